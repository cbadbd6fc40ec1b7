"""Positions that agree on all ranks: the number of working nodes before a node.

Ranks run the same program, but their graphs may differ in nodes that do no work (views, aliases,
slices that keep everything) and in the layout of their shards: a rank with a short shard pads it
before a gather, cuts its part after a reduction, and on a mesh of several dimensions splits and
joins in between (with zeros for parts that it lacks), where the others do not.  None of it may
change a decision, so none counts: neither at the graph's edge nor directly around a collective,
whatever that carries.

    w -> mul -> [pad] -> AG -> wait -> view -> [slice] -> mm      the nodes in brackets do not count
"""

from __future__ import annotations

import operator

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    does_work,
    first_argument,
    is_joint_copy,
    op_name,
    traits_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import TrafficFinder

_SPLITS = frozenset({"chunk", "split", "split_with_sizes", "split_with_sizes_copy"})
_SHARD_LAYOUT = _SPLITS | {"cat", "clone", "constant_pad_nd", "narrow", "slice"}


def idle_nodes(graph: fx.Graph, traffic: TrafficFinder) -> frozenset[fx.Node]:
    """Nodes that must not count: no work, or the padding and cutting of shards; linear."""
    around = _around_collectives(graph)
    return frozenset(
        node
        for node in graph.nodes
        if not does_work(node)
        or (_rearranges_shards(node) and (node in around or traffic.is_at_the_edge(node)))
        or (node.target is operator.getitem and traffic.is_at_the_edge(node))
    )


def _rearranges_shards(node: fx.Node) -> bool:
    traits = traits_of(node.target)
    if traits.name is not None:
        return traits.name in _SHARD_LAYOUT or traits.is_creation or traits.is_shape_only
    if node.target is not operator.getitem:
        return False
    source = first_argument(node)
    return isinstance(source, fx.Node) and op_name(source.target) in _SPLITS


def _around_collectives(graph: fx.Graph) -> set[fx.Node]:
    """Rearrangements, views and casts that lead from a collective or to one with nothing else in
    between; linear."""
    passing = [n for n in graph.nodes if _passes(n)]
    behind: set[fx.Node] = set()
    for node in passing:
        for above in node.all_input_nodes:
            if above in behind or traits_of(above.target).communicates:
                behind.add(node)
                break
    in_front: set[fx.Node] = set()
    for node in reversed(passing):
        if (
            not node.users
        ):  # a partitioner leaves what led to a collective of the other graph behind
            in_front.add(node)
        for user in node.users:
            if user in in_front or traits_of(user.target).communicates:
                in_front.add(node)
                break
    return behind | in_front


def _passes(node: fx.Node) -> bool:
    traits = traits_of(node.target)
    if traits.is_view or traits.is_cast or traits.is_creation or traits.is_shape_only:
        return True
    return traits.name in _SHARD_LAYOUT or is_joint_copy(node)


def count_positions(graph: fx.Graph, idle: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Number of nodes outside ``idle`` before each node, for the whole graph."""
    positions: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        positions[node] = count
        count += node not in idle
    return positions
