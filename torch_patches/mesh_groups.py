"""Process groups over several dimensions of a device mesh, for chained collectives to become one.

A weight that is sharded twice along one dimension (``S(0)S(0)``) is gathered over one dimension of its
mesh and then over the other.  One gather needs a group of all these ranks, in the order in which they
hold the shards.  :func:`create_groups` makes those that a model's DTensors ask for.

The passes cannot do that: on a cache hit none of them runs, and a group that only some of its ranks
make is waited for without end.  So it is done when a compile starts, from what all ranks know of the
model, whether or not the graph turns out to hold chains.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import find_chains
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable, KnownMesh
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
    warn_unfused,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Wanted:
    """Dimensions of a mesh, that of the largest shards first."""

    mesh: DeviceMesh
    dims: tuple[int, ...]

    def ranks(self) -> tuple[int, ...]:
        """Of the group through this rank, in the order in which they hold the shards."""
        lines = self.mesh.mesh.movedim(self.dims, tuple(range(-len(self.dims), 0)))
        size = math.prod(self.mesh.size(dim) for dim in self.dims)
        here = dist.get_rank()
        for line in lines.reshape(-1, size).tolist():
            if here in line:
                return tuple(line)
        return ()


def with_groups(model: object, options: Options) -> Options:
    """The options of a compile that starts: groups made if the flags want it, and all of them noted,
    so that a backward that compiles later, and the cache's key, have those of now."""
    if not options.fuses:
        return options
    create_groups(model, options)
    return replace(options, groups=known_groups(model))


def known_groups(model: object) -> GroupTable:
    """The process groups as they are now, and what ``model`` tells of the meshes behind them."""
    if not dist.is_available() or not dist.is_initialized():
        return GroupTable()
    with unset_fake_temporarily(), _disable_current_modes():
        return GroupTable.registered(list(map(_known, _read(_meshes_of, model))))


def _read(what: Callable[[Any], Iterable[T]], model: object) -> list[T]:
    """Of a model's graph; nothing, with one warning, where it cannot be read."""
    try:
        return list(what(model))
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_unfused(f"{type(error).__name__}: {error}")
        return []


def _known(mesh: DeviceMesh) -> KnownMesh:
    names = tuple(str(mesh.get_group(dim).group_name) for dim in range(mesh.ndim))
    return KnownMesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), names)


def create_groups(model: object, options: Options) -> list[str]:
    """Makes the groups that ``model`` asks for and nobody has made, if the flags want it.

    Each is made by its own ranks alone, in the order of the graph.  All of them must come here with
    the same models in the same order.

    Args:
        model: Dynamo's graph with DTensors as example values, or an ATen graph with the meshes of
            its chains among its inputs.

    Returns:
        Names of the groups made here.

    Raises:
        RuntimeError: torch cannot make a group; the cause may be one rank's own.
    """
    if not (options.create_flattened_groups and options.fuses):
        return []
    if (
        not isinstance(model, fx.GraphModule)
        or not dist.is_available()
        or not dist.is_initialized()
    ):
        return []
    with unset_fake_temporarily(), _disable_current_modes():
        wanted = dict.fromkeys([*_read(_of_dtensors, model), *_read(_of_chains, model)])
        made = [_create(one) for one in wanted]
    return [name for name in made if name is not None]


def _create(wanted: _Wanted) -> str | None:
    """The new group's name; None where there is one, or where torch cannot make it."""
    ranks = wanted.ranks()
    if not ranks:
        return None  # this rank is outside the mesh
    like = wanted.mesh.get_group(wanted.dims[0])
    known = GroupTable.registered().like(str(like.group_name), len(ranks))
    if any(members == ranks for _, members in known):
        return None
    backend = dist.distributed_c10d._world.pg_backend_config[like]
    group = _compat.new_group_in_order(ranks, str(backend), "comm_overlap_flattened")
    if group is None:
        log.warning(
            "aten_distributed_optimizations.create_flattened_groups: this torch keeps the ranks of a "
            "group sorted, so none has them in the order %s; chains over them stay",
            list(ranks),
        )
        return None
    log.info("comm_overlap: made the process group %s of ranks %s", group.group_name, list(ranks))
    name: str = group.group_name
    return name


def _of_dtensors(model: fx.GraphModule) -> Iterator[_Wanted]:
    """Dimensions of a mesh that one dimension of a tensor is sharded by."""
    for node in model.graph.nodes:
        spec = _spec_of(node)
        if spec is None:
            continue
        for dims in _compat.shard_orders(spec):
            if len(dims) > 1:
                yield _Wanted(spec.mesh, dims)


def _of_chains(model: fx.GraphModule) -> Iterator[_Wanted]:
    """Dimensions that a chain goes over, of a mesh that the graph has as an input."""
    meshes = [mesh for node in model.graph.nodes if (mesh := _mesh_of(node)) is not None]
    if not meshes:
        return
    for chain in find_chains(collect(model.graph)):
        groups = [link.collective.group for link in chain]
        if chain[0].collective.kind is CollectiveKind.ALL_GATHER:
            groups.reverse()  # what is gathered last varies slowest
        for mesh in meshes:
            dim_of = {str(mesh.get_group(dim).group_name): dim for dim in range(mesh.ndim)}
            if len(groups) > 1 and all(group in dim_of for group in groups):
                yield _Wanted(mesh, tuple(dim_of[group] for group in groups))
                break


def _meshes_of(model: object) -> list[DeviceMesh]:
    """Of a graph's DTensors and inputs, those that this rank is in; in the order of the graph."""
    if not isinstance(model, fx.GraphModule):
        return []
    found: dict[DeviceMesh, None] = {}
    for node in model.graph.nodes:
        spec = _spec_of(node)
        mesh = spec.mesh if spec is not None else _mesh_of(node)
        if mesh is not None and mesh.get_coordinate() is not None:
            found.setdefault(mesh)
    return list(found)


def _spec_of(node: fx.Node) -> Any:
    """Mesh and placements of a DTensor."""
    value = node.meta.get("example_value", node.meta.get("val"))
    spec = getattr(value, "_spec", None)
    return spec if isinstance(value, torch.Tensor) and hasattr(spec, "mesh") else None


def _mesh_of(node: fx.Node) -> DeviceMesh | None:
    """The mesh that a graph input is; torch wraps it in an object that stands for it."""
    if node.op != "placeholder":
        return None
    value = node.meta.get("val")
    mesh = getattr(value, "real_obj", value)
    return mesh if isinstance(mesh, DeviceMesh) else None
