"""Moves nodes of a graph: ``move_nodes(graph, skeleton, moves)``."""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import number_nodes
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import (
    Placement,
    Precedence,
    relink,
    smallest_order,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton


def move_nodes(graph: fx.Graph, skeleton: Skeleton, moves: Iterable[tuple[fx.Node, int]]) -> None:
    """Puts nodes in front of what stands at the given places, in the order given.

    What a moved node needs comes before it and what needs it behind, as data and the skeleton's
    order dependencies have it; everything else keeps its order.  n log n in nodes.
    """
    placement = Placement(number_nodes(graph))
    moved = list(moves)
    for node, place in moved:
        placement.place_new((node,), place)
    order = smallest_order(graph.nodes, Precedence(skeleton.order_dependencies), placement)
    assert order is not None, "the graph's own dependencies close no cycle"
    relink(graph, order)
