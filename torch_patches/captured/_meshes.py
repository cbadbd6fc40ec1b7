"""Device meshes of a capture as JSON and back: shape, ranks, names; no object of torch's.

    "meshes": [{"device_type": "cuda", "shape": [2, 4], "ranks": [0, 1, 2, 3, 4, 5, 6, 7],
                "dim_names": ["replicate", "shard"], "groups": ["1", "5"]}]

A graph input that is a mesh says which: ``{"opaque": "DeviceMesh", "mesh": 0}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_patches.captured._targets import CaptureFormatError

MAX_RANKS = 2**22  # of one mesh
MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class CapturedMesh:
    """A DeviceMesh.

    Args:
        device_type: such as "cuda".
        shape: ranks of each dimension.
        ranks: global ranks, the last dimension running fastest.
        dim_names: of the dimensions; empty where they have none.
        groups: names of the process groups of the dimensions, as in the graphs' arguments; empty
            where there are none.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.shape) <= MAX_DIMENSIONS or len(self.ranks) > MAX_RANKS:
            raise CaptureFormatError("a device mesh of refused size")
        numbers = (*self.shape, *self.ranks)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise CaptureFormatError("the ranks of a device mesh are no numbers")
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise CaptureFormatError("the ranks of a device mesh do not fit its shape")
        for names in (self.dim_names, self.groups):
            if names and len(names) != len(self.shape):
                raise CaptureFormatError("a device mesh has one name for each dimension, or none")
            if not all(isinstance(name, str) for name in names):
                raise CaptureFormatError("names of a device mesh are texts")


class MeshEncoder:
    """Collects the distinct meshes of one file; values refer to them by index."""

    def __init__(self) -> None:
        self._index: dict[CapturedMesh, int] = {}

    def index(self, mesh: CapturedMesh) -> int:
        """Place of ``mesh`` among the file's."""
        return self._index.setdefault(mesh, len(self._index))

    @property
    def meshes(self) -> list[dict[str, Any]]:
        """The section; empty where no mesh is known."""
        return [asdict(mesh) for mesh in self._index]


def describe_mesh(value: Any) -> CapturedMesh | None:
    """What is known of a value that stands for a DeviceMesh; None for other values."""
    value = getattr(value, "real_obj", value)  # AOTAutograd traces a fake object around it
    if type(value).__name__ != "DeviceMesh":
        return None
    with unset_fake_temporarily(), torch.no_grad():  # the ranks are a tensor
        if not isinstance(getattr(value, "mesh", None), torch.Tensor):
            return None
        mesh = value.mesh.cpu()
        ranks = tuple(int(rank) for rank in mesh.flatten().tolist())
    names = tuple(str(name) for name in value.mesh_dim_names or ())
    groups = tuple(str(name) for name in getattr(value, "_dim_group_names", None) or ())
    fitting = groups if len(groups) == mesh.ndim else ()
    return CapturedMesh(str(value.device_type), tuple(mesh.shape), ranks, names, fitting)


def decode_meshes(section: Any) -> list[CapturedMesh]:
    """The meshes of a file.

    Raises:
        CaptureFormatError: the section is no list of meshes.
    """
    if section is None:
        return []
    if not isinstance(section, list):
        raise CaptureFormatError("meshes are no list")
    return [_decode(mesh) for mesh in section]


def _decode(mesh: Any) -> CapturedMesh:
    if not isinstance(mesh, Mapping) or not isinstance(mesh.get("device_type"), str):
        raise CaptureFormatError("a device mesh is no object with a device type")
    lists = {key: mesh.get(key, []) for key in ("shape", "ranks", "dim_names", "groups")}
    if not all(isinstance(part, Sequence) and not isinstance(part, str) for part in lists.values()):
        raise CaptureFormatError("a device mesh holds lists")
    return CapturedMesh(mesh["device_type"], **{key: tuple(part) for key, part in lists.items()})
