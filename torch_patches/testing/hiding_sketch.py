"""Graphs with hand-annotated hiding, bucketed and judged: for tests of the overlap-preserving merge.

    s = Sketch()
    a = s.start()                       A( mm )A
    s.end(a, s.mm())
    outcome = bucket(s.done(), s.hiding, Options("topo_span"))

``bucket`` also checks what must hold whatever was merged: the plan is legal, compute stands inside
of its intervals, values are the same bit by bit, everything left apart has a reason.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from torch_patches._inductor.fx_passes.comm_overlap.check import check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import wait_source
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.overlap_bucketer import (
    plan_preserving_overlap,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.room import Surroundings
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track, read_track
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveKind,
    HidingInterval,
    Plan,
    RefusalReason,
    Skeleton,
)
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

aten = torch.ops.aten
GROUPS = {"g": [[0, 1]], "h": [[0, 1]]}
Hiding = Mapping[fx.Node, tuple[fx.Node, ...]]


def _costs(node: fx.Node, size_bytes: int | None) -> float:
    if node.target is aten.mm.default:
        return 10.0
    kind = collective_kind(node)
    return {None: 0.0, CollectiveKind.ALL_GATHER: 4.0}.get(kind, 6.0)


#: A matrix product takes 10 ms, a gather 4, other collectives 6, however large; the host no time.
MODEL = RuntimeModel(custom=_costs, host=HostCosts(0, 0, 0, 0), interference=Interference(1.0, 1.0))


class Sketch(GraphBuilder):
    """Collectives of parameters and gradients, and what hides them."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.placeholder(8, 8)
        self.hiding: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.results: list[fx.Node] = []

    def start(self, group: str = "g") -> fx.Node:
        """A gather of a new parameter: 256 bytes of 8 x 8."""
        return self.all_gather(self.placeholder(4, 8), 2, group)

    def scatter(self, source: fx.Node, group: str = "g") -> fx.Node:
        """A reduction of a gradient."""
        return self.reduce_scatter(source, "sum", 2, group)

    def mm(self, left: fx.Node | None = None, right: fx.Node | None = None) -> fx.Node:
        """Compute; its result leaves the graph."""
        node = self.call(aten.mm, left or self.x, right or self.x)
        self.results.append(node)
        return node

    def end(self, start: fx.Node, *hidden_by: fx.Node) -> fx.Node:
        """The wait of a collective that was hidden by compute."""
        if hidden_by:
            self.hiding[start] = hidden_by
        wait = self.wait(start)
        self.results.append(wait)
        return wait

    def done(self) -> fx.GraphModule:
        """Ends the graph."""
        return self.output(*self.results)


def random_sketch(r: random.Random) -> Sketch:
    """Collectives in flight over compute that may use what has arrived; some of it hides them."""
    s = Sketch()
    flying: list[tuple[fx.Node, list[fx.Node]]] = []
    arrived = [s.x]
    for _ in range(r.randrange(6, 40)):
        choice = r.random()
        if choice < 0.35:
            flying.append((s.start(r.choice("gh")), []))
        elif choice < 0.5:
            source = s.mm(r.choice(arrived), s.x)
            flying.append((s.scatter(source, r.choice("gh")), []))
        elif choice < 0.8 or not flying:
            node = s.mm(r.choice(arrived), s.x)
            for _, hidden_by in flying:
                if r.random() < 0.5:
                    hidden_by.append(node)
        else:
            start, hidden_by = flying.pop(r.randrange(len(flying)))
            wait = s.end(start, *hidden_by)
            if wait.meta["val"].shape == (8, 8):
                arrived.append(wait)
    for start, hidden_by in flying:
        s.end(start, *hidden_by)
    return s


@dataclass
class Outcome:
    """What became of a graph.

    Args:
        plan: as applied.
        before, after: the graph; ``before`` is a copy.
        buckets: members of each as places among all starts.
        reasons: of the collectives that were refused, by place among all starts.
    """

    plan: Plan
    before: fx.GraphModule
    after: fx.GraphModule
    buckets: list[list[int]]
    reasons: dict[int, RefusalReason]


def track_of(gm: fx.GraphModule, skeleton: Skeleton, model: RuntimeModel = MODEL) -> Track:
    """With inputs that are never freed."""
    costs = model.node_costs(gm.graph, skeleton)
    return read_track(list(gm.graph.nodes), skeleton, model, costs, live_bytes(gm.graph))


def plan_of(
    gm: fx.GraphModule,
    hiding: Hiding,
    options: Options,
    limits: Limits | None = None,
    model: RuntimeModel | None = None,
) -> tuple[Skeleton, Plan]:
    """Args: ``limits``: caps to keep, or None to merge by dependencies alone."""
    skeleton = collect(gm.graph)
    intervals = [
        HidingInterval(c, hiding[c.start]) for c in skeleton.collectives if c.start in hiding
    ]
    also = {node for nodes in hiding.values() for node in nodes}
    around = None if limits is None else Surroundings(track_of(gm, skeleton), limits)
    contracted = contract(gm.graph, skeleton, also)
    return skeleton, plan_preserving_overlap(
        skeleton, contracted, options, intervals, around, model
    )


def bucket(
    gm: fx.GraphModule,
    hiding: Hiding,
    options: Options,
    limits: Limits | None = None,
    model: RuntimeModel | None = None,
) -> Outcome:
    """Plans, checks, applies; then checks intervals, values and reasons."""
    before = copy.deepcopy(gm)
    skeleton, plan = plan_of(gm, hiding, options, limits, model)
    also = {node for nodes in hiding.values() for node in nodes}
    starts = {c.start.name: c.index for c in skeleton.collectives}
    names = {start.name: [n.name for n in nodes] for start, nodes in hiding.items()}
    checked = check_plan(skeleton, contract(gm.graph, skeleton, also), plan)
    assert checked.buckets == plan.buckets
    assert checked.dependencies == plan.dependencies
    members = [[m.start.name for m in b.members] for b in plan.buckets]
    apply_plan(gm.graph, skeleton, plan)
    gm.graph.lint()
    gm.recompile()
    _check_intervals(gm, members, names)
    _check_values(before, gm)
    buckets = [[starts[name] for name in bucketed] for bucketed in members]
    reasons = {starts[name]: r.reason for r in plan.refusals for name in r.members}
    merged = {index for indices in buckets for index in indices}
    assert merged | reasons.keys() == set(starts.values()), "something was left without a reason"
    assert merged.isdisjoint(reasons), "something was refused and merged"
    return Outcome(plan, before, gm, buckets, reasons)


def words(gm: fx.GraphModule) -> str:
    """The order of starts, waits and products: ``s0 mm w0``; merged starts are one word."""
    found: list[str] = []
    for node in gm.graph.nodes:
        if collective_kind(node) is not None:
            found.append("s")
        elif wait_source(node) is not None and (not found or found[-1] != "w"):
            found.append("w")
        elif node.target is aten.mm.default:
            found.append("mm")
    return " ".join(found)


def _check_intervals(
    gm: fx.GraphModule, members: list[list[str]], hiding: dict[str, list[str]]
) -> None:
    """Every collective's compute stands behind its (merged) start and in front of its first wait."""
    order = {node.name: place for place, node in enumerate(gm.graph.nodes)}
    now = {node.name: node for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        if "comm_overlap_bucket" in node.meta and collective_kind(node) is not None:
            bucketed = members[node.meta["comm_overlap_bucket"]["bucket"]]
            now.update(dict.fromkeys(bucketed, node))
    for name, nodes in hiding.items():
        start = now[name]
        first_wait = min(order[wait.name] for wait in _waits_of(start))
        for hidden_by in nodes:
            place = order[now[hidden_by].name]
            assert order[start.name] < place < first_wait, (name, hidden_by)


def _waits_of(start: fx.Node) -> list[fx.Node]:
    found, pending = [], [start]
    while pending:
        for user in pending.pop().users:
            if wait_source(user) is not None:
                found.append(user)
            elif "getitem" in user.name:
                pending.append(user)
    return found


def _check_values(before: fx.GraphModule, after: fx.GraphModule) -> None:
    expected, actual = (  # new inputs each time: a graph may write into them
        pytree.tree_leaves(run_spmd(gm, random_inputs(before, 2, seed=0), GROUPS, 2))
        for gm in (before, after)
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
