"""Positions that agree on all ranks: the number of working nodes before a node.

Ranks run the same program, but their graphs may differ in nodes that do no work (views, aliases,
slices that keep everything) and in the layout of their shards: a rank with a short shard pads it
before a gather, cuts its part after a reduction, and on a mesh of several dimensions splits and
joins in between, where the others do not.  None of it may change a decision, so none counts.
"""

from __future__ import annotations

import operator

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import does_work, op_name
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import TrafficFinder

_SHARD_LAYOUT = frozenset(
    {"cat", "chunk", "clone", "constant_pad_nd", "narrow", "slice", "split", "split_with_sizes"}
)


def idle_nodes(graph: fx.Graph, traffic: TrafficFinder) -> frozenset[fx.Node]:
    """Nodes that must not count: no work, or the padding and cutting of shards; linear."""
    return frozenset(
        node
        for node in graph.nodes
        if not does_work(node) or (_rearranges_shards(node) and traffic.is_at_the_edge(node))
    )


def _rearranges_shards(node: fx.Node) -> bool:
    return node.target is operator.getitem or op_name(node.target) in _SHARD_LAYOUT


def count_positions(graph: fx.Graph, idle: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Number of nodes outside ``idle`` before each node, for the whole graph."""
    positions: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        positions[node] = count
        count += node not in idle
    return positions
