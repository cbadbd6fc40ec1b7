"""Merging keeps compute between the starts and waits that it hides.

Graphs are written by hand, and so is which compute hides which collective.  Sketches read from left
to right; ``A( mm )A`` is a collective that starts, is hidden by mm, and is waited for.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.check import check_plan
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import wait_source
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.passes.overlap_bucketer import (
    plan_preserving_overlap,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    HidingInterval,
    Options,
    Plan,
    RefusalReason,
)
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
FORMS = pytest.mark.parametrize("form", ["default", "coalesced"])
GROUPS = {"g": [[0, 1]], "h": [[0, 1]]}


class Sketch(GraphBuilder):
    """Collectives of parameters and gradients, and what hides them."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.placeholder(8, 8)
        self.hiding: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.results: list[fx.Node] = []

    def start(self, group: str = "g") -> fx.Node:
        """A gather of a new parameter."""
        return self.all_gather(self.placeholder(4, 8), 2, group)

    def scatter(self, source: fx.Node, group: str = "g") -> fx.Node:
        return self.reduce_scatter(source, "sum", 2, group)

    def mm(self, left: fx.Node | None = None, right: fx.Node | None = None) -> fx.Node:
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
        return self.output(*self.results)


@dataclass
class Outcome:
    """What became of a sketch."""

    plan: Plan
    before: fx.GraphModule
    after: fx.GraphModule
    names: list[list[str]] = field(default_factory=list)


def bucket(
    gm: fx.GraphModule, hiding: dict[fx.Node, tuple[fx.Node, ...]], options: Options
) -> Outcome:
    """Plans, checks, applies; then checks intervals and values."""
    before = copy.deepcopy(gm)
    skeleton = collect(gm.graph)
    intervals = [
        HidingInterval(c, hiding[c.start]) for c in skeleton.collectives if c.start in hiding
    ]
    also = {node for nodes in hiding.values() for node in nodes}
    plan = plan_preserving_overlap(skeleton, contract(gm.graph, skeleton, also), options, intervals)
    names = {start.name: [n.name for n in nodes] for start, nodes in hiding.items()}
    checked = check_plan(skeleton, contract(gm.graph, skeleton, also), plan)
    assert checked.buckets == plan.buckets
    assert checked.dependencies == plan.dependencies
    members = [[m.start.name for m in b.members] for b in plan.buckets]
    apply_plan(gm.graph, skeleton, plan)
    gm.graph.lint()
    gm.recompile()
    check_intervals(gm, members, names)
    check_values(before, gm)
    return Outcome(plan, before, gm, members)


def check_intervals(
    gm: fx.GraphModule,
    members: list[list[str]],
    hiding: dict[str, list[str]],
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
        first_wait = min(order[wait.name] for wait in waits_of(start))
        for hidden_by in nodes:
            place = order[now[hidden_by].name]
            assert order[start.name] < place < first_wait, (name, hidden_by)


def waits_of(start: fx.Node) -> list[fx.Node]:
    found, pending = [], [start]
    while pending:
        for user in pending.pop().users:
            if wait_source(user) is not None:
                found.append(user)
            elif "getitem" in user.name:
                pending.append(user)
    return found


def check_values(before: fx.GraphModule, after: fx.GraphModule) -> None:
    inputs = random_inputs(before, 2, seed=0)
    expected, actual = (
        pytree.tree_leaves(run_spmd(gm, inputs, GROUPS, 2)) for gm in (before, after)
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def buckets_of(s: Sketch, form: str, **options: float) -> list[list[str]]:
    """Buckets as lists of the members' places among all starts."""
    gm = s.done()
    starts = [n.name for n in gm.graph.nodes if collective_kind(n) is not None]
    outcome = bucket(gm, s.hiding, Options("topo_span", bucket_mode=form, **options))
    return [[starts.index(name) for name in names] for names in outcome.names]  # type: ignore[misc]


# -- two gathers ----------------------------------------------------------------------------------


@FORMS
def test_can_merge_gathers_with_disjoint_hiding(form: str) -> None:
    """A( mm )A  B( mm )B: the first wait moves behind the second mm."""
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    b = s.start()
    s.end(b, s.mm())
    assert buckets_of(s, form) == [[0, 1]]


@FORMS
def test_cannot_merge_when_hiding_compute_needs_the_other_gather(form: str) -> None:
    """A( mm )A  B( mm(A) )B."""
    s = Sketch()
    a = s.start()
    gathered = s.end(a, s.mm())
    b = s.start()
    s.end(b, s.mm(gathered))
    assert buckets_of(s, form) == []


@FORMS
def test_without_annotation_the_same_gathers_merge(form: str) -> None:
    s = Sketch()
    a = s.start()
    gathered = s.end(a)
    b = s.start()
    s.mm(gathered)
    s.end(b)
    assert buckets_of(s, form) == [[0, 1]]


@FORMS
def test_can_merge_nested_intervals(form: str) -> None:
    """A( B( mm )B mm )A, with the first mm hiding both."""
    s = Sketch()
    a, b = s.start(), s.start()
    shared = s.mm()
    s.end(b, shared)
    s.end(a, shared, s.mm())
    assert buckets_of(s, form) == [[0, 1]]


@FORMS
def test_cannot_merge_nested_when_the_outer_hiding_needs_the_inner(form: str) -> None:
    """A( B( mm )B mm(B) )A."""
    s = Sketch()
    a, b = s.start(), s.start()
    inner = s.mm()
    gathered = s.end(b, inner)
    s.end(a, inner, s.mm(gathered))
    assert buckets_of(s, form) == []


@FORMS
def test_can_merge_with_several_hiding_nodes(form: str) -> None:
    s = Sketch()
    a = s.start()
    s.end(a, s.mm(), s.mm(), s.mm())
    b = s.start()
    s.end(b, s.mm(), s.mm())
    assert buckets_of(s, form) == [[0, 1]]


@FORMS
def test_cannot_merge_when_one_of_several_hiding_nodes_needs_the_other(form: str) -> None:
    s = Sketch()
    a = s.start()
    gathered = s.end(a, s.mm(), s.mm())
    b = s.start()
    s.end(b, s.mm(), s.mm(gathered))
    assert buckets_of(s, form) == []


@FORMS
def test_exposed_gather_joins_a_hidden_one(form: str) -> None:
    """A( mm )A  B()B."""
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    s.mm(s.end(s.start()))
    assert buckets_of(s, form) == [[0, 1]]


@FORMS
def test_byte_cap(form: str) -> None:
    """256 bytes each; three fit under 800."""
    s = Sketch()
    for _ in range(5):
        s.end(s.start())
    assert buckets_of(s, form, bucket_cap_mb=800 / 2**20) == [[0, 1, 2], [3, 4]]


# -- the queue ------------------------------------------------------------------------------------


def gathers_around_a_scatter(hidden: bool) -> Sketch:
    """A( mm )A  R( [mm] )R  B( mm )B, all on one group."""
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    r = s.scatter(s.mm())
    s.end(r, *([s.mm()] if hidden else []))
    b = s.start()
    s.end(b, s.mm())
    return s


@FORMS
def test_hidden_scatter_keeps_gathers_apart(form: str) -> None:
    assert buckets_of(gathers_around_a_scatter(hidden=True), form) == []


@FORMS
def test_unhidden_scatter_does_not(form: str) -> None:
    assert buckets_of(gathers_around_a_scatter(hidden=False), form) == [[0, 2]]


@FORMS
def test_hidden_scatter_of_another_group_does_not(form: str) -> None:
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    r = s.scatter(s.mm(), "h")
    s.end(r, s.mm())
    b = s.start()
    s.end(b, s.mm())
    assert buckets_of(s, form) == [[0, 2]]


def test_reason_is_the_hiding() -> None:
    s = gathers_around_a_scatter(hidden=True)
    outcome = bucket(s.done(), s.hiding, Options("topo_span", bucket_mode="coalesced"))
    reasons = [refusal.reason for refusal in outcome.plan.refusals]
    assert reasons.count(RefusalReason.HIDING) >= 1


@FORMS
def test_exposed_scatter_moves_behind_a_hidden_gather(form: str) -> None:
    """R0()R0  A( mm )A  R1()R1: R1 cannot jump over A, but R0 can be put off."""
    s = Sketch()
    s.end(s.scatter(s.mm()))
    a = s.start()
    s.end(a, s.mm())
    s.end(s.scatter(s.mm()))
    assert buckets_of(s, form) == [[0, 2]]


@FORMS
def test_hidden_scatter_is_not_put_off_behind_a_hidden_gather(form: str) -> None:
    """R0( mm )R0  A( mm )A  R1()R1."""
    s = Sketch()
    r = s.scatter(s.mm())
    s.end(r, s.mm())
    a = s.start()
    s.end(a, s.mm())
    s.end(s.scatter(s.mm()))
    assert buckets_of(s, form) == []


@FORMS
def test_two_groups_interleaved(form: str) -> None:
    """A1( mm )  B1( mm )  A2( mm )  B2( mm ): both pairs."""
    s = Sketch()
    for group in "ghgh":
        start = s.start(group)
        s.end(start, s.mm())
    assert buckets_of(s, form) == [[0, 2], [1, 3]]


@FORMS
def test_two_groups_that_would_close_a_cycle_together(form: str) -> None:
    """A1, B1, then compute of A1 hides B2 and compute of B1 hides A2: one pair only."""
    s = Sketch()
    a1 = s.end(s.start("g"), s.mm())
    b1 = s.end(s.start("h"), s.mm())
    a2, b2 = s.start("g"), s.start("h")
    s.end(a2, s.mm(b1))
    s.end(b2, s.mm(a1))
    assert len(buckets_of(s, form)) == 1


@FORMS
def test_collective_that_hides_another_can_be_bucketed(form: str) -> None:
    """A( R()R )A: a scatter's wait stands where it would hide a gather; B joins A all the same."""
    s = Sketch()
    a = s.start("g")
    r = s.scatter(s.x, "h")
    s.end(a, r)
    s.end(r)
    second = s.scatter(s.x, "h")
    s.end(second)
    assert [1, 2] in buckets_of(s, form)


def test_relation_that_contradicts_the_graph_is_dropped() -> None:
    """mm needs the gather that it is said to hide."""
    s = Sketch()
    a = s.start()
    gathered = s.end(a)
    mm = s.mm(gathered)
    b = s.start()
    s.end(b)
    gm = s.done()
    skeleton = collect(gm.graph)
    intervals = [HidingInterval(skeleton.collectives[0], (mm,))]
    plan = plan_preserving_overlap(
        skeleton, contract(gm.graph, skeleton, {mm}), Options("topo_span"), intervals
    )
    assert [len(b.members) for b in plan.buckets] == [2]
    assert not any(mm in pair for pair in plan.dependencies)


# -- random graphs --------------------------------------------------------------------------------


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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), form=st.sampled_from(["default", "coalesced"]))
def test_random_graphs_keep_hiding_and_values(seed: int, form: str) -> None:
    buckets_of(random_sketch(random.Random(seed)), form)


def test_random_graphs_are_bucketed_at_all() -> None:
    def count(seed: int) -> int:
        return len(buckets_of(random_sketch(random.Random(seed)), "coalesced"))

    assert sum(count(seed) for seed in range(20)) > 20


def test_work_grows_linearly() -> None:
    """Twice the layers cost at most 2.2 times the operations."""

    def operations(layers: int) -> int:
        s = Sketch()
        h = s.x
        starts: Sequence[fx.Node] = [s.start() for _ in range(2)]
        for _ in range(layers):
            gathered = [s.end(start) for start in starts]
            starts = [s.start() for _ in range(2)]
            h = s.mm(h, gathered[0])
            for start in starts:
                s.hiding[start] = (h,)
        for start in starts:
            s.end(start)
        gm = s.done()
        skeleton = collect(gm.graph)
        hiding = [
            HidingInterval(c, s.hiding[c.start])
            for c in skeleton.collectives
            if c.start in s.hiding
        ]
        also = {node for nodes in s.hiding.values() for node in nodes}
        contracted = contract(gm.graph, skeleton, also)
        return plan_preserving_overlap(
            skeleton, contracted, Options("topo_span"), hiding
        ).operations

    small, large = operations(100), operations(200)
    assert 0 < large <= 2.2 * small
