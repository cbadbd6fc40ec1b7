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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import find_chains
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import RegisteredGroups
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Dimensions of a mesh, that of the largest shards first."""

    mesh: Any
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
        made = [_create(wanted) for wanted in (*_of_dtensors(model), *_of_chains(model))]
    return [name for name in made if name is not None]


def _create(wanted: _Wanted) -> str | None:
    """The new group's name; None where there is one, or where torch cannot make it."""
    ranks = wanted.ranks()
    like = wanted.mesh.get_group(wanted.dims[0])
    known = RegisteredGroups().like(like.group_name, len(ranks))
    if not ranks or any(members == ranks for _, members in known):
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
        value = node.meta.get("example_value", node.meta.get("val"))
        spec: Any = getattr(value, "_spec", None)
        if not isinstance(value, torch.Tensor) or not hasattr(spec, "mesh"):
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
            dim_of = {mesh.get_group(dim).group_name: dim for dim in range(mesh.ndim)}
            if len(groups) > 1 and all(group in dim_of for group in groups):
                yield _Wanted(mesh, tuple(dim_of[group] for group in groups))
                break


def _mesh_of(node: fx.Node) -> Any:
    """The mesh that a graph input is; torch wraps it in an object that stands for it."""
    if node.op != "placeholder":
        return None
    value = node.meta.get("val")
    mesh = getattr(value, "real_obj", value)
    return mesh if isinstance(mesh, dist.device_mesh.DeviceMesh) else None
