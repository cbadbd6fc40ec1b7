"""A small graph with descriptors, as AOTAutograd would have left them.

Inputs ``w`` (a parameter, place 0), ``v`` (a parameter, place 1), ``b`` (a buffer) and ``x`` (data),
all of 8 x 8, on a group "dp" of 2 ranks.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch._functorch._aot_autograd import descriptors as aot

from torch_patches.testing.graph_builder import GraphBuilder

c10d = torch.ops._c10d_functional

W, V = aot.ParamAOTInput("layer.w"), aot.ParamAOTInput("layer.v")
B, X = aot.BufferAOTInput("scale"), aot.PlainAOTInput(0)


class DescribedGraph(GraphBuilder):
    """A graph with descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = self.input(W), self.input(V)
        self.b, self.x = self.input(B), self.input(X)

    def input(self, descriptor: object, *shape: int) -> fx.Node:
        node = self.placeholder(*(shape or (8, 8)))
        if descriptor is not None:
            node.meta["desc"] = descriptor
        return node

    def gather(self, node: fx.Node) -> fx.Node:
        """The wait of an all-gather."""
        return self.wait(self.call(c10d.all_gather_into_tensor, node, 2, "dp"))

    def scatter(self, node: fx.Node) -> fx.Node:
        return self.wait(self.call(c10d.reduce_scatter_tensor, node, "avg", 2, "dp"))

    def reduce(self, node: fx.Node) -> fx.Node:
        return self.wait(self.call(c10d.all_reduce, node, "avg", "dp"))

    def wait(self, node: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor, node)

    def end(self, *outputs: tuple[fx.Node | None, object]) -> fx.GraphModule:
        """Outputs with their descriptors."""
        gm = self.output(*(node for node, _ in outputs))
        (output,) = gm.graph.find_nodes(op="output")
        output.meta["desc"] = [descriptor for _, descriptor in outputs]
        return gm


def three_gathers() -> fx.GraphModule:
    """Gathers of w and v, and of what looks like a parameter and is a saved activation."""
    s = DescribedGraph()
    saved = s.input(None)
    return s.end(*((s.gather(n), aot.PlainAOTOutput(0)) for n in (s.v, saved, s.w)))
