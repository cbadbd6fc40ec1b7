"""autoparallel's names: the pipeline's two phases as plain functions, and the fusion of chained
all-gathers.  The package's docstring has an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.fx as fx

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.fusing import apply_or_restore
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import record_inputs
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable, NamedMesh
from torch_patches._inductor.fx_passes.comm_overlap.passes.all_gather_fusion import (
    Groups,
    plan_fusions,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import tag_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Skeleton
from torch_patches._inductor.fx_passes.comm_overlap.report import Report


def tag_collectives_for_bucketing(
    joint_graph: fx.Graph | fx.GraphModule, model: fx.GraphModule | None = None
) -> None:
    """Marks every collective of a joint graph as parameter, gradient or other traffic.

    The marks are metadata, which partition, recomputation and copies keep; no node changes.

    Args:
        joint_graph: what a partition function gets, or an inference graph.  Without
            ``meta["desc"]`` on its inputs nothing is marked, and structure decides later.
        model: under ``torch.compile`` what Dynamo called the backend with, which has not returned
            yet; it knows parameters, buffers and their names.  AOT export and AutoParallel put them
            into the descriptors.  With neither, a gathered input counts as a parameter.

    Raises:
        ValueError: the graph's outputs and their descriptors differ in number, so they cannot be
            paired; nothing is marked.
        TypeError: not a graph.

    Example:
        See the package.
    """
    if isinstance(joint_graph, fx.GraphModule):
        joint_graph = joint_graph.graph
    if not isinstance(joint_graph, fx.Graph):
        raise TypeError(
            f"tag_collectives_for_bucketing() takes an fx.Graph or fx.GraphModule, "
            f"not {type(joint_graph).__name__}"
        )
    tag_graph(joint_graph, record_inputs(model))


def bucket_collectives(
    gm: fx.GraphModule, bucket_cap_mb: float | list[float] | Callable[[int], float] = 25.0
) -> Report:
    """Merges parameter and gradient collectives of one graph, in place, and recompiles it.

    Tags decide where there are any.  The flags ``aten_distributed_optimizations.max_topo_span``,
    ``primary_fsdp_group_only`` and ``bucket_mode`` hold here too.

    Args:
        gm: a forward, backward or inference graph with fake values in ``meta["val"]``.
        bucket_cap_mb: MB (2**20 bytes) a bucket may hold; a list is by bucket index, the last value
            repeating; a function maps the bucket index to MB.

    Returns:
        What was done; ``report.failure`` says why, where the graph was left as it was.

    Raises:
        FlagError: the cap or a flag has a wrong type or value.
        TypeError: not a GraphModule.

    Example:
        See the package.
    """
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(f"bucket_collectives() takes an fx.GraphModule, not {type(gm).__name__}")
    arguments = {"bucketing_mode": "topo_span", "bucket_cap_mb": bucket_cap_mb}
    options = config.options_from_arguments(arguments, "bucket_collectives")
    return pipeline.optimize_graph(gm, options)


def fuse_chained_allgathers(
    graph: fx.Graph,
    full_group_size: int,
    full_group_name: str,
    subgroup_order: Sequence[str] | None = None,
    reversed_full_group_name: str | None = None,
) -> int:
    """Makes one all-gather of each chain of all-gathers on sub-meshes that is proven to be one.

    Only views may stand between the gathers of a chain, and shards must be even.  A chain that one
    gather would order otherwise stays as it is.

    Args:
        graph: a joint, forward, backward or inference graph, changed in place; the caller
            recompiles its module.
        full_group_size: ranks of the whole mesh.
        full_group_name: the group of all of them in row-major order.
        subgroup_order: groups of the mesh's dimensions, the one that varies slowest first.  None
            asks the process groups that this process has joined.
        reversed_full_group_name: the group of all ranks in column-major order, for chains that
            gather the slowest dimension first; without it such chains stay.

    Returns:
        How many chains were fused.

    Raises:
        TypeError: not a graph.
        ValueError: the dimensions' sizes, as far as the graph tells them, do not multiply to
            ``full_group_size``.
    """
    if not isinstance(graph, fx.Graph):
        raise TypeError(f"fuse_chained_allgathers() takes an fx.Graph, not {type(graph).__name__}")
    skeleton = collect(graph)
    groups: Groups
    if subgroup_order is None:
        targets = {full_group_name, reversed_full_group_name}
        groups = GroupTable.registered().only({name for name in targets if name is not None})
    else:
        dims = _dimensions(skeleton, subgroup_order, full_group_size)
        groups = NamedMesh(dims, full_group_name, reversed_full_group_name)
    fusions, _ = plan_fusions(skeleton, groups, [CollectiveKind.ALL_GATHER])
    fusions = [fusion for fusion in fusions if len(fusion.ranks) == full_group_size]
    apply_or_restore(graph, fusions)
    return len(fusions)


def _dimensions(
    skeleton: Skeleton, subgroup_order: Sequence[str], full_group_size: int
) -> list[tuple[str, int]]:
    """(group, size) of the mesh's dimensions that the graph has."""
    sizes = {c.group: c.key.group_size for c in skeleton.collectives if c.key is not None}
    dims = [(name, size) for name in subgroup_order if (size := sizes.get(name)) is not None]
    product = math.prod(size for _, size in dims)
    if len(dims) == len(subgroup_order) and product != full_group_size:
        raise ValueError(
            f"subgroup_order = {list(subgroup_order)!r} has {product} ranks in this graph, not "
            f"full_group_size = {full_group_size}"
        )
    return dims
