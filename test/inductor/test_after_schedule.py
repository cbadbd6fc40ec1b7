"""Merging after a schedule of the single collectives: what it keeps hidden and what it returns."""

import random

import pytest
import torch
import torch.fx as fx
from hypothesis import given, note, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import (
    CollectiveSpan,
    Hiding,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.after_schedule import (
    HIDING_SHARE,
    MAX_HIDING_NODES,
    MIN_HIDDEN_SHARE,
    hiding_intervals,
    merge_after_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import (
    Limits,
    Schedule,
    plan_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import make_units
from torch_patches._inductor.fx_passes.comm_overlap.plan import Plan
from torch_patches.testing.hiding_sketch import Sketch, random_sketch, track_of

pytestmark = pytest.mark.usefixtures("as_on_gpu")
FREE = Limits(1 << 40)
OPTIONS = Options("topo_span", bucket_mode="coalesced")
aten = torch.ops.aten


def planned(gm: fx.GraphModule, limits: Limits = FREE) -> tuple[Track, Schedule, Plan]:
    track = track_of(gm, collect(gm.graph))
    single = plan_schedule(track, make_units(track, ()), limits)
    return track, single, merge_after_schedule(gm.graph, track, single, OPTIONS, limits)


def members(plan: Plan) -> list[list[int]]:
    return [[member.index for member in bucket.members] for bucket in plan.buckets]


def layers(gathers: int, count: int = 3, products: int = 2) -> fx.GraphModule:
    """Each layer gathers weights, and multiplies by them after some other products."""
    s = Sketch()
    h = s.mm()
    for _ in range(count):
        weights = [s.wait(s.start()) for _ in range(gathers)]
        for weight in weights:
            h = s.mm(h, weight)
        for _ in range(products):
            h = s.mm(h)
    return s.done()


def test_can_bucket_gathers_hidden_by_the_same_compute() -> None:
    """A product takes 10 ms, a gather 4: both weights of a layer hide under the products before."""
    _, single, plan = planned(layers(2))
    assert single.timeline.exposed_ms == 0.0
    assert members(plan) == [[0, 1], [2, 3], [4, 5]]


def test_cannot_bucket_gathers_that_each_others_use_hides() -> None:
    """One weight a layer and no other compute: each hides under the product with the one before."""
    _, single, plan = planned(layers(1, products=0))
    assert single.timeline.exposed_ms == 0.0
    assert members(plan) == []


def test_plan_leaves_places_to_the_schedule_that_follows() -> None:
    gm = layers(2)
    track, single, plan = planned(gm)
    assert plan.moves == () and plan.dependencies == ()
    both = plan_schedule(track, make_units(track, plan.buckets), FREE)
    assert both.timeline.total_ms <= single.timeline.total_ms


def test_cannot_bucket_a_gather_whose_wait_would_have_to_move() -> None:
    """B's parameter is written behind A's wait; ``plan_schedule`` would wait for A there."""
    s = Sketch()
    s.end(s.start())
    parameter = s.placeholder(4, 8)
    s.call(aten.add_.Tensor, parameter, parameter)
    s.end(s.all_gather(parameter, 2, "g"))
    assert members(planned(s.done())[2]) == []


def scatters_around_a_peak() -> fx.GraphModule:
    """Two scatters that nothing hides (products of batches cost nothing here), and 64 KB between."""
    s = Sketch()
    batch = s.call(aten.unsqueeze, s.x, 0)
    s.end(s.scatter(s.call(aten.neg, s.x)))
    s.results.append(s.call(aten.bmm, batch, batch))
    s.results.append(s.call(aten.sum, s.call(aten.repeat, s.x, [16, 16])))
    s.results.append(s.call(aten.bmm, batch, batch))
    s.end(s.scatter(s.call(aten.neg, s.x)))
    return s.done()


@pytest.mark.parametrize(("more", "buckets"), [(0, []), (256, [[0, 1]])])
def test_memory_cap_binds_merging(more: int, buckets: list[list[int]]) -> None:
    """The first payload of 256 bytes would be held over the peak."""
    gm = scatters_around_a_peak()
    cap = Limits(peak_bytes(gm.graph).peak_bytes + more)
    assert members(planned(gm, cap)[2]) == buckets


# -- which compute counts -------------------------------------------------------------------------


def span_of(hidden_ms: list[float], length_ms: float) -> tuple[CollectiveSpan, list[fx.Node]]:
    s = Sketch()
    s.end(s.start())
    nodes = [s.mm() for _ in hidden_ms]
    collective = collect(s.done().graph).collectives[0]
    hidings = tuple(Hiding(node, ms) for node, ms in zip(nodes, hidden_ms, strict=True))
    return CollectiveSpan(collective, 0.0, length_ms, 0.0, hidings), nodes


def test_heaviest_compute_counts_until_it_is_enough() -> None:
    """5 + 4 of 10 ms are the share asked for; the small ones do not count."""
    assert HIDING_SHARE == 0.9
    span, nodes = span_of([0.5, 4.0, 0.5, 5.0], 10.0)
    (interval,) = hiding_intervals([span])
    assert interval.nodes == (nodes[1], nodes[3])


def test_no_more_than_a_few_count() -> None:
    """Ten of equal weight: the earlier ones."""
    span, nodes = span_of([1.0] * 10, 10.0)
    (interval,) = hiding_intervals([span])
    assert interval.nodes == tuple(nodes[:MAX_HIDING_NODES])


def test_what_is_hidden_for_a_small_part_counts_as_exposed() -> None:
    hidden = 10 * MIN_HIDDEN_SHARE
    assert hiding_intervals([span_of([hidden], 10.0)[0]])
    assert not hiding_intervals([span_of([hidden - 0.1], 10.0)[0]])


# -- random graphs --------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), room=st.sampled_from([1.0, 1.3]))
def test_buckets_can_be_scheduled(seed: int, room: float) -> None:
    """Gathers have a place in common, no reduction waits for itself, the peak stays."""
    gm = random_sketch(random.Random(seed)).done()
    note(gm.code)
    cap = Limits(int(peak_bytes(gm.graph).peak_bytes * room))
    track, single, plan = planned(gm, cap)
    units = make_units(track, plan.buckets)
    assert all(unit.earliest <= unit.use for unit in units if unit.gathers)
    schedule = plan_schedule(track, units, cap)
    assert len(schedule.timeline.spans) == len(units)
    assert schedule.peak_bytes <= max(single.peak_bytes, cap.peak_bytes)
