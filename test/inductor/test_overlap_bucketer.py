"""Merging keeps compute between the starts and waits that it hides: cases annotated by hand.

Sketches read from left to right; ``A( mm )A`` is a collective that starts, is hidden by mm, and is
waited for.  Where no limits are given, only dependencies count.
"""

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.berths import find_berths
from torch_patches._inductor.fx_passes.comm_overlap.passes.overlap_bucketer import (
    plan_preserving_overlap,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.start_queue import Entry, StartQueue
from torch_patches._inductor.fx_passes.comm_overlap.plan import HidingInterval, RefusalReason
from torch_patches.testing.hiding_sketch import Sketch, bucket

pytestmark = pytest.mark.usefixtures("as_on_gpu")
FORMS = pytest.mark.parametrize("form", ["default", "coalesced"])
#: By dependencies alone, and with places and a cap that is never reached.
LIMITS = pytest.mark.parametrize("limits", [None, Limits(1 << 40)], ids=["graph", "places"])


def buckets_of(s: Sketch, form: str, limits: Limits | None = None) -> list[list[int]]:
    """Buckets as lists of the members' places among all starts."""
    return bucket(s.done(), s.hiding, Options("topo_span", bucket_mode=form), limits).buckets


# -- two gathers ----------------------------------------------------------------------------------


@LIMITS
@FORMS
def test_can_bucket_gathers_with_disjoint_hiding(form: str, limits: Limits | None) -> None:
    """A( mm )A  B( mm )B: the first wait moves behind the second mm."""
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    b = s.start()
    s.end(b, s.mm())
    assert buckets_of(s, form, limits) == [[0, 1]]


@LIMITS
@FORMS
def test_cannot_bucket_when_hiding_compute_needs_the_other_gather(
    form: str, limits: Limits | None
) -> None:
    """A( mm )A  B( mm(A) )B."""
    s = Sketch()
    a = s.start()
    gathered = s.end(a, s.mm())
    b = s.start()
    s.end(b, s.mm(gathered))
    assert buckets_of(s, form, limits) == []


@LIMITS
@FORMS
def test_can_bucket_when_other_compute_needs_the_other_gather(
    form: str, limits: Limits | None
) -> None:
    s = Sketch()
    a = s.start()
    gathered = s.end(a)
    b = s.start()
    s.mm(gathered)
    s.end(b)
    assert buckets_of(s, form, limits) == [[0, 1]]


@LIMITS
@FORMS
def test_can_bucket_nested_intervals(form: str, limits: Limits | None) -> None:
    """A( B( mm )B mm )A, with the first mm hiding both."""
    s = Sketch()
    a, b = s.start(), s.start()
    shared = s.mm()
    s.end(b, shared)
    s.end(a, shared, s.mm())
    assert buckets_of(s, form, limits) == [[0, 1]]


@LIMITS
@FORMS
def test_cannot_bucket_nested_when_the_outer_hiding_needs_the_inner(
    form: str, limits: Limits | None
) -> None:
    """A( B( mm )B mm(B) )A."""
    s = Sketch()
    a, b = s.start(), s.start()
    inner = s.mm()
    gathered = s.end(b, inner)
    s.end(a, inner, s.mm(gathered))
    assert buckets_of(s, form, limits) == []


@LIMITS
@FORMS
def test_can_bucket_with_several_hiding_nodes(form: str, limits: Limits | None) -> None:
    s = Sketch()
    a = s.start()
    s.end(a, s.mm(), s.mm(), s.mm())
    b = s.start()
    s.end(b, s.mm(), s.mm())
    assert buckets_of(s, form, limits) == [[0, 1]]


@LIMITS
@FORMS
def test_cannot_bucket_when_one_of_several_hiding_nodes_needs_the_other(
    form: str, limits: Limits | None
) -> None:
    s = Sketch()
    a = s.start()
    gathered = s.end(a, s.mm(), s.mm())
    b = s.start()
    s.end(b, s.mm(), s.mm(gathered))
    assert buckets_of(s, form, limits) == []


@LIMITS
@FORMS
def test_can_bucket_an_exposed_gather_with_a_hidden_one(form: str, limits: Limits | None) -> None:
    """A( mm )A  B()B."""
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    s.mm(s.end(s.start()))
    assert buckets_of(s, form, limits) == [[0, 1]]


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


@LIMITS
@FORMS
def test_cannot_bucket_gathers_around_a_hidden_scatter(form: str, limits: Limits | None) -> None:
    assert buckets_of(gathers_around_a_scatter(hidden=True), form, limits) == []


@LIMITS
@FORMS
def test_can_bucket_gathers_around_an_unhidden_scatter(form: str, limits: Limits | None) -> None:
    assert buckets_of(gathers_around_a_scatter(hidden=False), form, limits) == [[0, 2]]


@LIMITS
@FORMS
def test_can_bucket_gathers_around_a_hidden_scatter_of_another_group(
    form: str, limits: Limits | None
) -> None:
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    r = s.scatter(s.mm(), "h")
    s.end(r, s.mm())
    b = s.start()
    s.end(b, s.mm())
    assert buckets_of(s, form, limits) == [[0, 2]]


def test_reason_is_the_hiding() -> None:
    s = gathers_around_a_scatter(hidden=True)
    outcome = bucket(s.done(), s.hiding, Options("topo_span", bucket_mode="coalesced"))
    assert outcome.reasons == {
        0: RefusalReason.HIDING,
        1: RefusalReason.ALONE_IN_KEY,
        2: RefusalReason.HIDING,
    }


@LIMITS
@FORMS
def test_can_bucket_an_exposed_scatter_put_off_behind_a_hidden_gather(
    form: str, limits: Limits | None
) -> None:
    """R0()R0  A( mm )A  R1()R1: R1 cannot jump over A, but R0 can be put off."""
    s = Sketch()
    s.end(s.scatter(s.mm()))
    a = s.start()
    s.end(a, s.mm())
    s.end(s.scatter(s.mm()))
    assert buckets_of(s, form, limits) == [[0, 2]]


@LIMITS
@FORMS
def test_cannot_bucket_a_hidden_scatter_put_off_behind_a_hidden_gather(
    form: str, limits: Limits | None
) -> None:
    """R0( mm )R0  A( mm )A  R1()R1."""
    s = Sketch()
    r = s.scatter(s.mm())
    s.end(r, s.mm())
    a = s.start()
    s.end(a, s.mm())
    s.end(s.scatter(s.mm()))
    assert buckets_of(s, form, limits) == []


@LIMITS
@FORMS
def test_can_bucket_two_groups_interleaved(form: str, limits: Limits | None) -> None:
    """A1( mm )  B1( mm )  A2( mm )  B2( mm ): both pairs."""
    s = Sketch()
    for group in "ghgh":
        start = s.start(group)
        s.end(start, s.mm())
    assert buckets_of(s, form, limits) == [[0, 2], [1, 3]]


@LIMITS
@FORMS
def test_cannot_bucket_two_groups_that_would_close_a_cycle_together(
    form: str, limits: Limits | None
) -> None:
    """A1, B1, then compute of A1 hides B2 and compute of B1 hides A2: one pair only."""
    s = Sketch()
    a1 = s.end(s.start("g"), s.mm())
    b1 = s.end(s.start("h"), s.mm())
    a2, b2 = s.start("g"), s.start("h")
    s.end(a2, s.mm(b1))
    s.end(b2, s.mm(a1))
    assert len(buckets_of(s, form, limits)) == 1


@LIMITS
@FORMS
def test_can_bucket_a_collective_that_hides_another(form: str, limits: Limits | None) -> None:
    """A( R()R )A: a scatter's wait stands where it would hide a gather; B joins A all the same."""
    s = Sketch()
    a = s.start("g")
    r = s.scatter(s.x, "h")
    s.end(a, r)
    s.end(r)
    second = s.scatter(s.x, "h")
    s.end(second)
    assert [1, 2] in buckets_of(s, form, limits)


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


@LIMITS
@FORMS
def test_cannot_bucket_a_collective_that_hides_another_out_of_that(
    form: str, limits: Limits | None
) -> None:
    """A( R()R )A, and compute of A makes what R2 scatters: R cannot join R2 under A."""
    s = Sketch()
    a = s.start("g")
    r = s.scatter(s.x, "h")
    gathered = s.end(a, r)
    s.end(r)
    s.end(s.scatter(s.mm(gathered), "h"))
    assert buckets_of(s, form, limits) == []


@LIMITS
@FORMS
def test_can_bucket_two_that_share_their_hiding(form: str, limits: Limits | None) -> None:
    """A( B( mm )A )B."""
    s = Sketch()
    a, b = s.start(), s.start()
    shared = s.mm()
    s.end(a, shared)
    s.end(b, shared)
    assert buckets_of(s, form, limits) == [[0, 1]]


@LIMITS
@FORMS
def test_cannot_bucket_two_that_share_their_hiding_when_more_of_it_needs_one(
    form: str, limits: Limits | None
) -> None:
    """A( B( mm )A mm(A) )B."""
    s = Sketch()
    a, b = s.start(), s.start()
    shared = s.mm()
    gathered = s.end(a, shared)
    s.end(b, shared, s.mm(gathered))
    assert buckets_of(s, form, limits) == []


def test_queue_keeps_dependencies_of_others() -> None:
    """A -> R is the queue's and somebody else's: putting A off behind R is refused."""
    s = Sketch()
    for _ in range(3):
        s.end(s.start())
    gm = s.done()
    skeleton = collect(gm.graph)
    contracted = contract(gm.graph, skeleton)
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    berths = find_berths(skeleton.collectives, place, {}, {})
    starts = [c.start for c in skeleton.collectives]
    contracted.add_dependency(starts[0], starts[1])
    entries = [Entry(n, b, [n]) for n, b in zip(starts, berths, strict=True)]
    queue = StartQueue(contracted, entries)
    assert not queue.rearrange(entries, [entries[1], entries[0]])


def test_plan_names_all_that_must_hold_in_the_result() -> None:
    """A( mm )A  B()B  C()C, of which A and C are merged: the bucket is waited for as a whole, and B
    starts behind it."""
    s = Sketch()
    a = s.start()
    mm = s.mm()
    wait_a = s.end(a, mm)
    b = s.all_gather(s.placeholder(4, 8, dtype=torch.float64), 2, "g")
    s.end(b)
    wait_c = s.end(s.start())
    expected = [(a, mm), (mm, wait_a), (wait_a, wait_c), (a, b)]
    names = {(before.name, after.name) for before, after in expected}
    outcome = bucket(s.done(), s.hiding, Options("topo_span", bucket_mode="coalesced"), None)
    assert outcome.buckets == [[0, 2]]
    assert {(before.name, after.name) for before, after in outcome.plan.dependencies} == names
