"""Graphs of matrix products, gathers and scatters with given costs, so that places can be worked out by
hand, and their schedules as words:

    s0 w0 mm s1 w1 mm     each weight is gathered in front of its product
    s0 s1 w0 mm w1 mm     scheduled: the second gather hides under the first product

A matrix product takes 10 ms, a gather 4, a scatter 6; the host issues in no time.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Timeline, simulate
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.reorder import move_nodes
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import (
    Limits,
    Schedule,
    plan_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track, read_track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import make_units
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
#: Ranks of the groups, which share a link.
GROUPS = {"g": [[0, 1]], "h": [[0, 1]]}
COSTS = {CollectiveKind.ALL_GATHER: 4.0, CollectiveKind.REDUCE_SCATTER: 6.0}
FREE = Limits(peak_bytes=1 << 40, prefetch_kernels=None)


def custom(node: fx.Node, size_bytes: int | None) -> float:
    """ms of a node."""
    if node.target is aten.mm.default:
        return 10.0
    kind = collective_kind(node)
    return 0.0 if kind is None else COSTS.get(kind, 5.0)


MODEL = RuntimeModel(custom=custom, host=HostCosts(0, 0, 0, 0), interference=Interference(1.0, 1.0))


class Sketch(GraphBuilder):
    """A chain of matrix products over gathered weights, and scatters of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.placeholder(8, 8)
        self.results: list[fx.Node] = []

    def weight(self, group: str = "g") -> fx.Node:
        return self.gather_and_wait(self.placeholder(4, 8), 2, group)

    def mm(self, left: fx.Node, right: fx.Node) -> fx.Node:
        return self.call(aten.mm, left, right)

    def scatter(self, source: fx.Node, group: str = "g") -> fx.Node:
        """Its wait, which leaves the graph."""
        self.results.append(self.scatter_and_wait(source, "sum", 2, group))
        return self.results[-1]

    def end(self, *outputs: fx.Node) -> fx.GraphModule:
        return self.output(*outputs, *self.results)


def track_of(gm: fx.GraphModule) -> Track:
    """The graph as its schedules see it."""
    skeleton = collect(gm.graph)
    costs = MODEL.node_costs(gm.graph, skeleton)
    return read_track(list(gm.graph.nodes), skeleton, MODEL, costs, live_bytes(gm.graph))


def plan(gm: fx.GraphModule, limits: Limits = FREE) -> Schedule:
    """The schedule of a graph whose collectives stay single."""
    track = track_of(gm)
    return plan_schedule(track, make_units(track, ()), limits)


def schedule(gm: fx.GraphModule, limits: Limits = FREE) -> Timeline:
    """Schedules in place; the run afterwards."""
    planned = plan(gm, limits)
    moves = [(move.node, move.place) for move in planned.moves]
    move_nodes(gm.graph, collect(gm.graph), moves)
    gm.graph.lint()
    gm.recompile()
    return run(gm)


def run(gm: fx.GraphModule) -> Timeline:
    """The graph as it stands."""
    skeleton = collect(gm.graph)
    return simulate(gm.graph.nodes, skeleton, MODEL, MODEL.node_costs(gm.graph, skeleton))


def text(gm: fx.GraphModule) -> str:
    """The order of starts, waits and compute: ``s0 w0 mm s1 ...``."""
    starts = {c.start: f"s{c.index}" for c in collect(gm.graph).collectives}
    waits = {w: f"w{c.index}" for c in collect(gm.graph).collectives for w in c.waits}
    words = {**starts, **waits}
    compute = {n: "mm" for n in gm.graph.nodes if n.target is aten.mm.default}
    return " ".join({**words, **compute}[n] for n in gm.graph.nodes if n in words or n in compute)
