"""Captured FX graphs as files: what passes read of a graph, without its data and without pickle.

    save_captured("llama.json.gz", {"fw": forward, "bw": backward}, info={"model": "llama"})
    captured = load_captured("llama.json.gz")     # needs no process group, no GPU, no model
    captured.graphs["fw"], captured.groups["0"]   # GraphModule with fake values; ranks

A file is gzipped JSON: nodes with their targets, arguments, tensor metadata and the metadata that
passes use; subgraphs; process groups with their ranks.  There are no tensor data, stack traces or
paths of the machine that captured; of a module's class there is the name (``_modules``), of a device
mesh the ranks (``_meshes``).  docs/capture_format.md has all of it.
Loading a file from anywhere is safe: names only select from lists in this package (see
``_targets``), everything that ends up in generated code is an identifier, and sizes are
bounded.  Anything else raises :class:`CaptureFormatError`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_patches.captured._document import FORMAT, MAX_BYTES, CapturedGroup, Document
from torch_patches.captured._graphs import GraphDecoder
from torch_patches.captured._meshes import CapturedMesh, decode_meshes
from torch_patches.captured._targets import CaptureFormatError, is_stub
from torch_patches.captured._values import OpaqueValue

__all__ = [
    "FORMAT",
    "CaptureFormatError",
    "Captured",
    "CapturedGroup",
    "CapturedMesh",
    "Document",
    "OpaqueValue",
    "is_stub",
    "load_captured",
    "registered_groups",
    "save_captured",
]

MAX_DEPTH = 100  # of nested arrays and objects
MAX_RANK = 2**20


@dataclass(frozen=True, eq=False)
class Captured:
    """The content of a file.

    Args:
        graphs: by name, usually "joint", "fw" and "bw"; ``meta["val"]`` are fake tensors of
            :attr:`fake_mode`.
        info: how it was captured, as given to :func:`save_captured`.
        groups: process-group name, as in the graphs' arguments, to ranks.
        group_descriptions: process-group name to what it was made for, such as "mesh_tp".
        fake_mode: the mode of all fake tensors.
        torch_version: the torch that captured.
        group_backends: process-group name to torch's text for its backends, such as
            "cpu:gloo,cuda:nccl", where the file tells.
    """

    graphs: dict[str, fx.GraphModule]
    info: dict[str, Any]
    groups: dict[str, tuple[int, ...]]
    group_descriptions: dict[str, str]
    fake_mode: FakeTensorMode = field(repr=False)
    torch_version: str = torch.__version__
    group_backends: dict[str, str] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the content to another file; unchanged graphs give an equal file."""
        groups = {
            name: CapturedGroup(
                ranks,
                self.group_descriptions.get(name, ""),
                self.group_backends.get(name, ""),
            )
            for name, ranks in self.groups.items()
        }
        document = Document(self.info, groups, self.torch_version)
        for name, module in self.graphs.items():
            document.add(name, module)
        document.write(path)


def save_captured(
    path: str | Path,
    graphs: Mapping[str, fx.GraphModule],
    info: Mapping[str, Any],
    groups: Mapping[str, CapturedGroup] | None = None,
) -> None:
    """Write graphs to ``path``.

    Args:
        path: usually ``*.json.gz``.
        graphs: by name.
        info: anything that JSON holds.
        groups: by name; None for the process groups registered in this process.

    Raises:
        CaptureFormatError: a graph calls something that the format cannot name.
    """
    document = Document(info, registered_groups() if groups is None else groups)
    for name, module in graphs.items():
        document.add(name, module)
    document.write(path)


def load_captured(path: str | Path) -> Captured:
    """Read a file of :func:`save_captured`.  Executes nothing of it and needs no process group.

    Raises:
        CaptureFormatError: the file is damaged, hostile, too large or of another format.
        OSError: it cannot be read at all.
    """
    return _checked(lambda: _read(path), Path(path).name)


def load_text_document(document: dict[str, Any], what: str) -> Captured:
    """A document that was made from text; see ``_readable``.

    Raises:
        CaptureFormatError: the text holds what a capture may not hold.
    """
    return _checked(lambda: document, what)


def _checked(read: Callable[[], dict[str, Any]], what: str) -> Captured:
    try:
        return decode_document(read())
    except CaptureFormatError as error:
        raise CaptureFormatError(f"{what}: {error}") from error
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        StopIteration,
        SyntaxError,  # of the code that torch.fx writes of a graph with operands that it cannot write
        TypeError,
        ValueError,
    ) as error:
        # Each decoder takes its part of the document at its word; what does not fit ends here.
        raise CaptureFormatError(f"{what}: malformed ({error!r:.300})") from error


def registered_groups() -> dict[str, CapturedGroup]:
    """The process groups of this process that contain its rank, by name."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    world = dist.distributed_c10d._world
    return {
        name: CapturedGroup(
            tuple(dist.get_process_group_ranks(group)),
            getattr(group, "group_desc", ""),
            str(world.pg_backend_config.get(group, "")),
        )
        for group, name in world.pg_names.items()
    }


# ------------------------------------------------------------------------------------------- files


def _read(path: str | Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CaptureFormatError(f"not a complete gzip file ({error})") from error
    if len(data) > MAX_BYTES:
        raise CaptureFormatError(f"more than {MAX_BYTES} bytes of JSON")
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CaptureFormatError(f"not JSON, or nested too deeply ({error})") from error
    _check_depth(document)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise CaptureFormatError(f"format {found!r:.100}, this version reads {FORMAT}")
    return document


def _refuse_constant(name: str) -> None:
    raise CaptureFormatError(f"{name} is not JSON")


def _check_depth(document: Any) -> None:
    """The decoders recurse; this bounds how deep."""
    level = [document]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(v for v in item.values() if isinstance(v, dict | list))
            elif isinstance(item, list):
                children.extend(v for v in item if isinstance(v, dict | list))
        if not children:
            return
        level = children
    raise CaptureFormatError(f"nested deeper than {MAX_DEPTH}")


# ---------------------------------------------------------------------------------------- document


def decode_document(document: dict[str, Any]) -> Captured:
    """The content of a file that was read, or made of text (see ``_readable``); it may be anything,
    and what does not fit raises whatever the decoders meet."""
    decoder = GraphDecoder(
        document["symbols"],
        document["module_stacks"],
        document.get("module_classes"),
        decode_meshes(document.get("meshes")),
    )
    graphs = {name: decoder.graph(graph) for name, graph in document["graphs"].items()}
    groups: dict[str, tuple[int, ...]] = {}
    descriptions: dict[str, str] = {}
    backends: dict[str, str] = {}
    for name, group in document["groups"].items():
        groups[name] = _checked_ranks(name, group["ranks"])
        descriptions[name] = str(group["description"])
        if "backend" in group:
            backends[name] = str(group["backend"])
    return Captured(
        graphs=graphs,
        info=dict(document["info"]),
        groups=groups,
        group_descriptions=descriptions,
        fake_mode=decoder.values.fake_mode,
        torch_version=str(document["torch"]),
        group_backends=backends,
    )


def _checked_ranks(name: str, ranks: Any) -> tuple[int, ...]:
    """torch makes groups of nothing else."""
    numbers = tuple(ranks)
    if not numbers or any(type(rank) is not int or not 0 <= rank < MAX_RANK for rank in numbers):
        raise CaptureFormatError(f"group {name!r}: ranks are numbers from 0 to {MAX_RANK - 1}")
    if len(set(numbers)) != len(numbers):
        raise CaptureFormatError(f"group {name!r}: a rank is named twice")
    return numbers
