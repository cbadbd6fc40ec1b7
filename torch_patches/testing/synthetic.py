"""Synthetic FSDP training graphs of any size, for work bounds and benchmarks."""

from __future__ import annotations

import torch
import torch.fx as fx

from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten


def training_graph(
    layers: int, per_layer: int = 8, compute: int = 3, width: int = 4
) -> fx.GraphModule:
    """Each layer: ``per_layer`` times a parameter gather behind a cast, a matmul, ``compute``
    pointwise nodes and a gradient scatter.  About ``per_layer * (compute + 7)`` nodes a layer.

    Args:
        width: of the square weights; from some hundred on, communication takes longer than compute.
    """
    b = GraphBuilder()
    x, waits = b.placeholder(width, width, dtype=torch.bfloat16), []
    value = x.meta["val"]
    for _ in range(layers * per_layer):
        cast = b.call(aten._to_copy, b.placeholder(width // 2, width), dtype=torch.bfloat16)
        x = b.call(aten.mm, x, b.gather_and_wait(cast, 2, "g"))
        for _ in range(compute):
            x = b.graph.call_function(aten.neg.default, (x,))
            x.meta["val"] = value  # a shared fake value is enough: passes only read shapes here
        waits.append(b.scatter_and_wait(x, "sum", 2, "g"))
    return b.output(x, *waits)


def dense_graph(width: int) -> fx.GraphModule:
    """``width`` gathered weights, and as many nodes that read all of them, each reduced: more than
    ``width`` squared edges in ``6 * width`` nodes."""
    b = GraphBuilder()
    waits = [b.gather_and_wait(b.placeholder(2), 2, "g") for _ in range(width)]
    value = waits[0].meta["val"]
    joined = []
    for _ in range(width):
        node = b.graph.call_function(aten.cat.default, (waits,))
        node.meta["val"] = value  # shapes do not matter here, edges do
        joined.append(node)
    return b.output(*[b.reduce_and_wait(node, "sum", "g") for node in joined])
