"""Module stacks of a capture as JSON and back: paths, and names of the modules' classes.

A file holds each distinct stack once, as the list of its paths.  Where classes are known, it also
holds each distinct class name once, and for each stack the places of its classes among them:

    "module_stacks": [["L['self'].layers.0", "L['self'].layers.0.attention"]],
    "module_classes": {"names": ["model:Block", "model:Attention"], "of_stacks": [[0, 1]]}

Files without the second section (all of before it existed) give ``torch.nn.Module`` for every
class, and are written without it again.  Loading imports nothing: a name becomes a new, empty
subclass of ``torch.nn.Module`` that only says how it is called.  Two loads make two classes.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_patches.captured._targets import CaptureFormatError

MAX_CLASSES = 4096  # of a file; each takes a kilobyte or two when it is made
MAX_CLASS_NAME = 512  # characters, module included
_LOCALS = "<locals>"  # in the qualified name of a class made in a function
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

#: As torch has it: (path, class) by a key without meaning.
ModuleStack = dict[str, tuple[str, type[torch.nn.Module]]]


def is_identifier(name: Any) -> bool:
    """An ASCII identifier that is no keyword."""
    return (
        isinstance(name, str)
        and _IDENTIFIER.fullmatch(name) is not None
        and not keyword.iskeyword(name)
    )


class ModuleStackEncoder:
    """Collects the distinct stacks of one file; nodes refer to them by index."""

    def __init__(self) -> None:
        self.paths: list[list[str]] = []
        self._names: dict[str, int] = {}
        self._places: dict[type | str, int | None] = {}  # of classes seen, named or not
        self._of_stacks: list[list[int | None]] = []
        self._index: dict[tuple[tuple[str, int | None], ...], int] = {}

    def index(self, stack: Mapping[Any, Any]) -> int:
        """Place of ``stack``, a node's module stack.

        Raises:
            CaptureFormatError: more classes than a file may have.
        """
        entries = tuple((str(entry[0]), self._class_index(entry)) for entry in stack.values())
        if entries not in self._index:
            self._index[entries] = len(self.paths)
            self.paths.append([path for path, _ in entries])
            self._of_stacks.append([place for _, place in entries])
        return self._index[entries]

    @property
    def classes(self) -> dict[str, Any] | None:
        """The section on classes; None where no class is known."""
        if not self._names:
            return None
        return {"names": list(self._names), "of_stacks": self._of_stacks}

    def _class_index(self, entry: Sequence[Any]) -> int | None:
        found = entry[1] if len(entry) > 1 else None
        if not isinstance(found, type | str):
            return None
        if found not in self._places:
            self._places[found] = self._place(_class_name(found))
        return self._places[found]

    def _place(self, name: str | None) -> int | None:
        if name is None:
            return None
        if len(self._names) == MAX_CLASSES and name not in self._names:
            raise CaptureFormatError(f"more than {MAX_CLASSES} classes of modules")
        return self._names.setdefault(name, len(self._names))


def _class_name(found: type | str) -> str | None:
    """``module:qualified name``; None for ``torch.nn.Module`` and for what could not be loaded.

    Export has dotted names in place of classes.
    """
    if found is torch.nn.Module:
        return None
    if isinstance(found, str):
        name = ":".join(found.rpartition(".")[::2])
    else:
        name = f"{found.__module__}:{found.__qualname__}"
    return name if _is_class_name(name) else None


def _is_class_name(name: Any) -> bool:
    if not isinstance(name, str) or len(name) > MAX_CLASS_NAME:
        return False
    module, colon, qualified = name.partition(":")
    scopes = qualified.split(".")
    parts = [*module.split("."), *(scope for scope in scopes if scope != _LOCALS)]
    return bool(colon) and scopes[-1] != _LOCALS and all(map(is_identifier, parts))


def decode_module_stacks(stacks: Sequence[Any], classes: Any) -> list[ModuleStack]:
    """The stacks of a file by index.

    Args:
        stacks: the section "module_stacks".
        classes: the section "module_classes", None where the file has none.

    Raises:
        CaptureFormatError: it is not what :class:`ModuleStackEncoder` writes.
    """
    for paths in stacks:
        if not all(isinstance(path, str) for path in paths):
            raise CaptureFormatError(f"not a list of module paths: {str(paths)[:200]}")
    if classes is None:
        return [{path: (path, torch.nn.Module) for path in paths} for paths in stacks]
    types = _stub_classes(classes["names"])
    places = classes["of_stacks"]
    if not isinstance(places, list) or len(places) != len(stacks):
        raise CaptureFormatError("classes of other module stacks than the file's")
    return [_with_classes(paths, row, types) for paths, row in zip(stacks, places, strict=True)]


def _stub_classes(names: Any) -> list[type[torch.nn.Module]]:
    if not isinstance(names, list) or len(names) > MAX_CLASSES:
        raise CaptureFormatError(f"not a list of at most {MAX_CLASSES} classes")
    for name in names:
        if not _is_class_name(name):
            raise CaptureFormatError(f"not the name of a class: {str(name)[:200]!r}")
    return [_stub_class(name) for name in names]


def _stub_class(name: str) -> type[torch.nn.Module]:
    module, _, qualified = name.partition(":")
    members = {
        "__module__": module,
        "__qualname__": qualified,
        "__doc__": "Stands for a class that a captured graph names; pickle cannot find it.",
    }
    return type(qualified.rpartition(".")[2], (torch.nn.Module,), members)


def _with_classes(paths: Any, places: Any, types: Sequence[type[torch.nn.Module]]) -> ModuleStack:
    if not isinstance(places, list) or len(places) != len(paths):
        raise CaptureFormatError(f"not a class for each module: {str(places)[:200]}")
    return {path: (path, _chosen(place, types)) for path, place in zip(paths, places, strict=True)}


def _chosen(place: Any, types: Sequence[type[torch.nn.Module]]) -> type[torch.nn.Module]:
    if place is None:
        return torch.nn.Module
    if type(place) is not int or not 0 <= place < len(types):
        raise CaptureFormatError(f"not the place of a class: {str(place)[:200]}")
    return types[place]
