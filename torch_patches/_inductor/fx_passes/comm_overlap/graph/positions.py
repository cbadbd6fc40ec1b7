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
    COLLECTIVE_NAMESPACES,
    does_work,
    first_argument,
    is_cast,
    is_joint_copy,
    is_view,
    op_name,
    op_namespace,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    TrafficFinder,
    makes_constant,
)

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
    if node.target is operator.getitem:
        source = first_argument(node)
        return isinstance(source, fx.Node) and op_name(source.target) in _SPLITS
    return op_name(node.target) in _SHARD_LAYOUT or makes_constant(node)


def _around_collectives(graph: fx.Graph) -> set[fx.Node]:
    """Rearrangements, views and casts that lead from a collective or to one with nothing else in
    between; linear."""
    passing = [n for n in graph.nodes if _passes(n)]
    behind: set[fx.Node] = set()
    for node in passing:
        if any(n in behind or _communicates(n) for n in node.all_input_nodes):
            behind.add(node)
    in_front: set[fx.Node] = set()
    for node in reversed(passing):
        # a partitioner leaves what led to a collective of the other graph behind, unread
        if not node.users or any(n in in_front or _communicates(n) for n in node.users):
            in_front.add(node)
    return behind | in_front


def _passes(node: fx.Node) -> bool:
    return is_view(node) or is_cast(node) or is_joint_copy(node) or _rearranges_shards(node)


def _communicates(node: fx.Node) -> bool:
    return op_namespace(node.target) in COLLECTIVE_NAMESPACES


def count_positions(graph: fx.Graph, idle: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Number of nodes outside ``idle`` before each node, for the whole graph."""
    positions: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        positions[node] = count
        count += node not in idle
    return positions
