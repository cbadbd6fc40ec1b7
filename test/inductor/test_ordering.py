"""Keys of nodes in an order under change."""

import torch

from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import Placement
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten


def test_new_nodes_keep_the_order_that_they_are_placed_in() -> None:
    b = GraphBuilder()
    old = [b.call(aten.neg, b.placeholder(1)) for _ in range(2)]
    placement = Placement({node: number for number, node in enumerate(b.graph.nodes)})
    new = [b.call(aten.relu, old[0]) for _ in range(3)]
    slot = placement.numbers[old[1]]
    placement.place_new([new[2], new[0]], slot)
    placement.place_new([new[1]], slot)
    expected = [old[0], new[2], new[0], new[1], old[1]]
    assert sorted([*old, *new], key=placement.key) == expected
