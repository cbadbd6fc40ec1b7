"""Figures about a graph's order, before and after a pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    traits_of,
    wrapped_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind


def is_heavy_compute(node: fx.Node) -> bool:
    """A matmul, convolution or attention: compute long enough to hide a collective under."""
    target = (wrapped_node(node) or node).target
    traits = traits_of(target)
    if traits.name is None:
        return not traits.is_view and "flex_attention" in str(target)
    return traits.is_heavy


def max_consecutive_compute_between_reduce_scatters(graph: fx.Graph) -> int:
    """The longest run of matmuls, convolutions and attentions with no reduce-scatter start in it.

    Runs are counted from the start of the graph or a reduce-scatter to the next reduce-scatter;
    what follows the last one waits for nothing and does not count.  0 without reduce-scatters.
    A large value after a pass means that it batched compute, so that gradients of many layers
    stay alive and their reductions have nothing left to hide under.
    """
    longest = current = 0
    for node in graph.nodes:
        traits = traits_of(node.target)
        if traits.is_heavy:
            current += 1
        elif not traits.is_view and (traits.name is None or traits.communicates):
            if collective_kind(node) is CollectiveKind.REDUCE_SCATTER:
                longest, current = max(longest, current), 0
            elif node.op == "call_function" and is_heavy_compute(node):
                current += 1
    return longest


def displaced_share(before: Sequence[fx.Node], after: Sequence[fx.Node]) -> float:
    """Share of surviving call_function nodes outside a longest common subsequence, 0 to 1.

    Args:
        before, after: nodes in the order of the graph before and after a pass.

    Both are orders of distinct nodes, so the longest common subsequence is a longest increasing
    subsequence of places: n log n.
    """
    place = {node: i for i, node in enumerate(before) if node.op == "call_function"}
    sequence = [place[node] for node in after if node in place]
    if not sequence:
        return 0.0
    tails: list[int] = []
    for value in sequence:
        where = bisect_left(tails, value)
        tails[where : where + 1] = [value]
    return 1.0 - len(tails) / len(sequence)
