"""The file of a capture while it is made: graphs are encoded when they pass by."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from torch_patches.captured._graphs import GraphEncoder
from torch_patches.captured._targets import CaptureFormatError

FORMAT = 1
MAX_BYTES = 64 * 2**20  # of JSON, after decompression


@dataclass(frozen=True)
class CapturedGroup:
    """A process group: its global ranks in group order, what it was made for, its backends."""

    ranks: tuple[int, ...]
    description: str = ""
    backend: str = ""

    def content(self) -> dict[str, Any]:
        """As JSON."""
        told = {"backend": self.backend} if self.backend else {}
        return {"ranks": list(self.ranks), "description": self.description, **told}


class Document:
    """Graphs of one file, as JSON already: what is added may change or go away.

    Args:
        info: anything that JSON holds.
        groups: process groups by name.
        torch_version: the torch that the graphs come from.
    """

    def __init__(
        self,
        info: Mapping[str, Any],
        groups: Mapping[str, CapturedGroup],
        torch_version: str = torch.__version__,
    ) -> None:
        self.info = dict(info)
        self.groups = dict(groups)
        self.graphs: dict[str, Any] = {}
        self._torch_version = torch_version
        self._encoder = GraphEncoder()

    def add(self, name: str, module: fx.GraphModule) -> None:
        """Encode ``module`` as it is now.

        Raises:
            CaptureFormatError: it calls something that the format cannot name.
        """
        self.graphs[name] = self._encoder.graph(module)

    def content(self) -> dict[str, Any]:
        """The JSON document."""
        classes = self._encoder.stacks.classes
        meshes = self._encoder.values.meshes.meshes
        return {
            "format": FORMAT,
            "torch": self._torch_version,
            "info": self.info,
            "groups": {name: group.content() for name, group in self.groups.items()},
            **({"meshes": meshes} if meshes else {}),
            "symbols": self._encoder.values.symbols.hints,
            "module_stacks": self._encoder.stacks.paths,
            **({} if classes is None else {"module_classes": classes}),
            "graphs": self.graphs,
        }

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all; equal content gives equal files.

        Raises:
            CaptureFormatError: it is too large.
            OSError: it cannot be written.
        """
        data = json.dumps(self.content(), separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_BYTES:
            raise CaptureFormatError(f"{len(data)} bytes of JSON, more than {MAX_BYTES}")
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            # No time stamp in it.
            part.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
            part.replace(path)
        except OSError as error:  # the part's name says nothing
            raise type(error)(error.errno, error.strerror, str(path)) from error
        finally:
            part.unlink(missing_ok=True)
