"""Parameters and gradients in front of the collectives of activations that share their link.

Costs as in test_schedule.py: a matrix product takes 10 ms, a gather 4, a scatter 6.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.passes.right_of_way import RightOfWay
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits, plan_schedule
from torch_patches._inductor.fx_passes.comm_overlap.passes.timing import Timing
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import make_units
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Traffic
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.schedule_sketch import (
    COSTS,
    FREE,
    GROUPS,
    MODEL,
    Sketch,
    plan,
    run,
    schedule,
    text,
    track_of,
)
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def activation(s: Sketch, source: fx.Node, group: str = "h") -> fx.Node:
    """Gathered, and on the critical path."""
    return s.gather_and_wait(s.call(aten.relu, source), 2, group)


def two_scatters(fenced: bool = False) -> fx.GraphModule:
    """Ready at once; both need 12 ms, of which a product and then an activation's gather hide 10."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    s.scatter(h)
    s.scatter(h)
    h = s.mm(h, s.x)
    if fenced:
        s.call(barrier, s.x)
    return s.end(s.mm(activation(s, h), s.x))


def test_a_reduction_that_would_be_in_flight_starts_behind() -> None:
    gm = two_scatters()
    line = schedule(gm)
    assert text(gm) == "mm s0 mm w0 s1 s2 w1 mm w2"  # 2 of the activations
    assert [(span.start_ms, span.exposed_ms) for span in line.spans] == [(10, 0), (20, 4), (24, 0)]


def test_a_link_of_its_own_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"g": "a", "h": "b"}
    monkeypatch.setattr(type(MODEL), "link", lambda self, collective: links[collective.group])
    gm = two_scatters()
    assert schedule(gm).exposed_ms == 4.0
    assert text(gm) == "mm s0 s1 mm w0 s2 w2 mm w1"


def test_a_reduction_stays_in_front_of_a_side_effect() -> None:
    gm = two_scatters(fenced=True)
    schedule(gm)
    assert text(gm) == "mm s0 s1 mm w0 w1 s2 w2 mm"


def test_memory_that_is_short_is_not_held_longer() -> None:
    gm = two_scatters()
    peak = peak_bytes(gm.graph).peak_bytes
    cap = peak - 36  # both payloads, and the product, do not fit
    assert schedule(gm, Limits(cap)).exposed_ms > 4.0
    assert text(gm).index("s1") < text(gm).index("s2")
    assert peak_bytes(gm.graph).peak_bytes <= peak


def test_a_reduction_gives_way_once() -> None:
    """The third scatter starts behind the first activation though the second one waits for it then."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    for _ in range(3):
        s.scatter(h)
    h = s.mm(activation(s, s.mm(h, s.x)), s.x)
    gm = s.end(s.mm(activation(s, h), s.x))
    schedule(gm)
    assert text(gm) == "mm s0 mm w0 s1 s2 s3 w1 mm w2 s4 w4 w3 mm"[: len(text(gm))]


def test_what_the_other_reduces_further_does_not_wait_for_it() -> None:
    """The all-reduce stays, as its result is read before its wait."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    s.scatter(h)
    start = s.call(c10d.all_reduce, s.scatter_and_wait(h, "sum", 2, "g"), "sum", "h")
    s.results += [s.wait(start), s.call(aten.view, start, [32])]
    gm = s.end(s.mm(h, s.x))
    schedule(gm)
    assert text(gm) == "mm s0 w0 s1 s2 w1 mm w2"


def one_gather(last: int) -> fx.GraphModule:
    """Its weight is for the last of so many products behind a reduced activation."""
    s = Sketch()
    h = s.mm(s.mm(s.x, s.x), s.x)
    h = s.scatter_and_wait(s.call(aten.relu, h), "sum", 2, "h")
    for _ in range(last - 1):
        h = s.mm(h, s.x)
    return s.end(s.mm(h, s.weight()))


def test_a_gather_starts_behind_where_it_is_hidden_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COSTS, CollectiveKind.ALL_GATHER, 14.0)
    gm = one_gather(3)
    assert schedule(gm).exposed_ms == 6.0  # of the activation, which starts in time
    assert text(gm) == "mm mm s0 w0 s1 mm mm w1 mm"


def test_a_gather_starts_in_front_where_it_would_be_late_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COSTS, CollectiveKind.ALL_GATHER, 14.0)
    gm = one_gather(2)
    schedule(gm)
    assert text(gm).index("s0") < text(gm).index("s1")


def test_a_gather_that_nothing_hides_gives_way_where_limits_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COSTS, CollectiveKind.ALL_GATHER, 45.0)
    waited_ms = []
    for limits in (FREE, replace(FREE, gathers_give_way=True)):
        planned = plan(one_gather(2), limits)
        assert planned.delays_others is not limits.gathers_give_way
        waited_ms.append({s.collective.traffic: s.exposed_ms for s in planned.timeline.spans})
    assert waited_ms == [
        {Traffic.PARAMETER: 0.0, Traffic.OTHER: 31.0},
        {Traffic.PARAMETER: 35.0, Traffic.OTHER: 6.0},
    ]


def test_places_that_somebody_has_chosen_stay() -> None:
    gm = two_scatters()
    track = track_of(gm)
    units = make_units(track, ())
    late = len(track.order)
    chosen = Timing(starts={}, waits={unit.index: late for unit in units})
    by_index = {
        span.collective.index: span.start_ms
        for span in plan_schedule(track, units, FREE, chosen).timeline.spans
    }
    assert by_index == {0: 10.0, 1: 16.0, 2: 22.0}


def random_graph(r: random.Random) -> fx.GraphModule:
    s = Sketch()
    h = s.x
    for _ in range(r.randrange(4, 25)):
        choice = r.random()
        if choice < 0.25:
            h = s.mm(h, s.weight(r.choice("gh")))
        elif choice < 0.6:
            s.scatter(h, r.choice("gh"))
        elif choice < 0.85:
            inner = s.mm(activation(s, h, "h"), s.x)
            h = s.call(aten.relu, s.scatter_and_wait(inner, "sum", 2, "h"))
        else:
            h = s.mm(h, s.x)
    return s.end(h)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), more=st.sampled_from([1.0, 1.2, 3.0]))
def test_random_graphs(seed: int, more: float) -> None:
    """Never slower, same values, and peak under the cap."""
    gm = random_graph(random.Random(seed))
    inputs = random_inputs(gm, 2, seed=0)
    expected = pytree.tree_leaves(run_spmd(gm, inputs, GROUPS, 2))
    before_ms, cap = run(gm).total_ms, int(peak_bytes(gm.graph).peak_bytes * more)
    assert schedule(gm, Limits(cap)).total_ms <= before_ms + 1e-9
    assert peak_bytes(gm.graph).peak_bytes <= cap
    actual = pytree.tree_leaves(run_spmd(gm, inputs, GROUPS, 2))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_it_pays_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of many graphs together wait for less, and the graphs take no longer."""

    def waited_and_total() -> tuple[float, float]:
        lines = [plan(random_graph(random.Random(seed))).timeline for seed in range(60)]
        waited = [
            span.exposed_ms
            for line in lines
            for span in line.spans
            if span.collective.traffic is Traffic.OTHER
        ]
        return sum(waited), sum(line.total_ms for line in lines)

    waited, total = waited_and_total()
    monkeypatch.setattr(RightOfWay, "_start_in_the_way", lambda self, unit, place: None)
    waited_without, total_without = waited_and_total()
    assert waited < 0.9 * waited_without
    assert total < total_without
