"""Stored captures that tests read again and again, decoded once in a process.

    stored = StoredCaptures(Path("test/data"))
    with stored.reused():
        load_captured("test/data/llama_3l_fsdp8.json.gz").graphs["fw"]  # the caller's own copy

Decoding makes the values of all nodes of all graphs; a copy shares them, and is made of the graphs
that are asked for.  Whoever calls ``load_captured`` meanwhile, also through a command, gets copies.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.fx as fx

from torch_patches import captured as file_format
from torch_patches.captured import Captured

__all__ = ["StoredCaptures"]


class _Copies(Mapping[str, fx.GraphModule]):
    """Graphs by name, each copied when it is first asked for."""

    def __init__(self, kept: Mapping[str, fx.GraphModule]) -> None:
        self._kept = kept
        self._copies: dict[str, fx.GraphModule] = {}

    def __getitem__(self, name: str) -> fx.GraphModule:
        if name not in self._copies:
            self._copies[name] = copy.deepcopy(self._kept[name])
        return self._copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class StoredCaptures:
    """Files of one folder, decoded when they are first loaded and kept.

    A file with symbolic sizes is decoded each time: what is learnt of a size would be shared.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._documents: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._decoded: dict[int, Captured] = {}
        self._read = file_format._read
        self._decode = file_format.decode_document

    @contextmanager
    def reused(self) -> Iterator[None]:
        """While it lasts, ``load_captured`` gives copies."""
        with (
            mock.patch.object(file_format, "_read", self._read_once),
            mock.patch.object(file_format, "decode_document", self._decode_once),
        ):
            yield

    def _read_once(self, path: str | Path) -> dict[str, Any]:
        place = Path(path).resolve()
        if place.parent != self._folder:
            return self._read(path)
        state = place.stat()
        key = (place.name, state.st_mtime_ns, state.st_size)
        if key not in self._documents:
            self._documents[key] = self._read(path)
        return self._documents[key]

    def _decode_once(self, document: dict[str, Any]) -> Captured:
        # By identity, which is sound for those that are held here.
        held = any(document is each for each in self._documents.values())
        if not held or document["symbols"]:
            return self._decode(document)
        if id(document) not in self._decoded:
            self._decoded[id(document)] = self._decode(document)
        kept = self._decoded[id(document)]
        graphs: Any = _Copies(kept.graphs)
        return dataclasses.replace(kept, graphs=graphs, info=copy.deepcopy(kept.info))
