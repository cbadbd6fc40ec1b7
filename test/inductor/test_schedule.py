"""Where starts and waits are placed; costs are given, so places are worked out by hand.

A matrix product takes 10 ms, a gather 4, a scatter 6.
"""

import copy
import random

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes, peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.reorder import move_nodes
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import read_track
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.schedule_sketch import (
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

aten = torch.ops.aten


def layers(count: int) -> fx.GraphModule:
    s = Sketch()
    h = s.x
    for _ in range(count):
        h = s.mm(h, s.weight())
    return s.end(h)


def test_gather_starts_under_the_compute_in_front_of_its_use() -> None:
    gm = layers(3)
    assert run(gm).total_ms == 42.0
    assert schedule(gm).total_ms == 34.0  # the first gather is exposed
    assert text(gm) == "s0 s1 w0 mm w1 s2 mm w2 mm"


def test_gather_starts_no_earlier_than_pays() -> None:
    """Three products in front of the second weight: its gather hides under the last of them."""
    s = Sketch()
    h = s.mm(s.x, s.weight())
    for _ in range(2):
        h = s.mm(h, s.x)
    gm = s.end(s.mm(h, s.weight()))
    assert schedule(gm).exposed_ms == 4.0
    assert text(gm) == "s0 w0 mm mm s1 mm w1 mm"


def test_two_gathers_for_one_use_start_earlier() -> None:
    """8 ms of gathers fit under one product of 10 ms; 12 ms do not, so one goes up further."""
    s = Sketch()
    h = s.mm(s.mm(s.x, s.x), s.x)
    weights = [s.weight() for _ in range(3)]
    for weight in weights:
        h = s.mm(h, weight)
    gm = s.end(h)
    assert schedule(gm).exposed_ms == 0.0


def test_memory_cap_keeps_a_gather_from_starting_early() -> None:
    gm = layers(3)
    cap = Limits(peak_bytes(gm.graph).peak_bytes, prefetch_kernels=None)
    before = run(gm).total_ms
    tight = schedule(gm, cap)
    assert peak_bytes(gm.graph).peak_bytes <= cap.peak_bytes
    assert tight.total_ms <= before


def test_gather_that_must_start_waits_for_scatters_where_there_is_no_room() -> None:
    """It would queue behind them on their stream anyway, so it is no later for it."""

    def crowded() -> fx.GraphModule:
        s = Sketch()
        h = s.mm(s.x, s.x)
        for _ in range(4):
            s.scatter(s.call(aten.relu, h))
        return s.end(s.mm(h, s.weight()))

    free, tight = crowded(), crowded()
    cap = Limits(peak_bytes(tight.graph).peak_bytes, prefetch_kernels=0)
    assert plan(tight, cap).peak_bytes <= cap.peak_bytes
    assert schedule(tight, cap).total_ms == schedule(free, Limits(1 << 40, None, 0)).total_ms


def test_scatter_that_has_no_room_beside_the_next_kernel_is_waited_for_at_once() -> None:
    """Three nodes fused into that kernel stand in front of the last one, which is where it is."""
    s = Sketch()
    wide = s.placeholder(64, 8)
    h = s.mm(s.x, s.x)
    s.scatter(s.call(aten.mm, wide, h))
    for op in (aten.neg, aten.exp, aten.sin, aten.neg):
        wide = s.call(op, wide)
    gm = s.end(s.mm(s.call(aten.mm, wide, s.x), s.x))
    cap = Limits(peak_bytes(gm.graph).peak_bytes, prefetch_kernels=None)
    planned = plan(gm, cap)
    schedule(gm, cap)
    assert peak_bytes(gm.graph).peak_bytes <= cap.peak_bytes
    assert planned.peak_bytes <= cap.peak_bytes


def test_gather_starts_in_front_of_scatters_that_would_hold_it_up() -> None:
    """Three of 6 ms, ready 10 ms before its use: behind them it would end 12 ms late."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    for _ in range(3):
        s.scatter(s.call(aten.relu, h))
    h = s.mm(h, s.x)
    gm = s.end(s.mm(h, s.weight()))
    assert schedule(gm).total_ms == 30.0
    assert text(gm).startswith("s0 mm s1 s2 s3 mm")


def test_bytes_in_flight() -> None:
    gm = layers(3)
    assert schedule(gm, Limits(1 << 40, in_flight_bytes=0, prefetch_kernels=None)).total_ms == 42.0


def test_prefetch_bound() -> None:
    gm = layers(3)
    assert schedule(gm, Limits(1 << 40, prefetch_kernels=0)).total_ms == 42.0
    gm = layers(3)
    assert schedule(gm, Limits(1 << 40, prefetch_kernels=1)).total_ms == 34.0


def test_nothing_crosses_a_side_effect() -> None:
    s = Sketch()
    h = s.mm(s.x, s.weight())
    fence = s.call(barrier, s.x)
    weight = s.weight()
    gm = s.end(s.mm(h, weight))
    schedule(gm)
    order = list(gm.graph.nodes)
    start = next(n for n in weight.all_input_nodes)
    assert order.index(fence) < order.index(start)


def test_preparation_moves_with_its_gather() -> None:
    s = Sketch()
    h = s.mm(s.x, s.x)
    cast = s.call(aten._to_copy, s.placeholder(4, 8, dtype=torch.float64), dtype=torch.float32)
    gm = s.end(s.mm(h, s.gather_and_wait(cast, 2, "g")))
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "s0 mm w0 mm"


@pytest.mark.parametrize("shared", [False, True])
def test_view_in_front_of_a_gather_moves_up_with_it_and_not_down(shared: bool) -> None:
    s = Sketch()
    view = s.call(aten.view, s.placeholder(8, 4), [4, 8])
    other = [s.call(aten.neg, view)] if shared else []
    h = s.mm(s.mm(s.x, s.x), s.x)
    if not shared:
        view = s.call(aten.view, view, [4, 8])
    gm = s.end(s.mm(h, s.gather_and_wait(view, 2, "g")), *other)
    moved = {move.node: move.place for move in plan(gm).moves}
    order = list(gm.graph.nodes)
    start = next(n for n in order if collective_kind(n) is not None)
    assert moved[view] == (order.index(view) if shared else moved[start])
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm w0 mm"


def test_scatter_is_waited_for_once_it_is_done() -> None:
    """Its wait moves down behind one product, not to the end of the graph."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    s.scatter(h)
    for _ in range(3):
        h = s.mm(h, s.x)
    gm = s.end(h)
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm w0 mm mm"


def test_last_scatter_is_waited_for_at_the_end() -> None:
    s = Sketch()
    s.scatter(s.mm(s.x, s.x))
    h = s.mm(s.x, s.x)
    gm = s.end(h)
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm w0"


def test_reduction_that_another_feeds_starts_when_that_is_done() -> None:
    """Scatter, then an all-reduce of what it gives (HSDP): both hide."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    scattered = s.scatter_and_wait(h, "sum", 2, "g")
    s.results.append(s.reduce_and_wait(scattered, "sum", "h"))
    for _ in range(3):
        h = s.mm(h, s.x)
    gm = s.end(h)
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm w0 s1 mm w1 mm"


def test_activation_collective_is_waited_for_at_its_first_use() -> None:
    """It starts where it stood: what it gathers has just been computed."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    gathered = s.gather_and_wait(s.call(aten.relu, h), 2, "g")
    gm = s.end(s.mm(h, s.x), s.mm(h, s.x), s.mm(gathered, s.x), s.mm(h, s.x))
    assert text(gm) == "mm s0 w0 mm mm mm mm"
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm mm w0 mm mm"


def test_view_of_an_activation_is_no_use_of_it() -> None:
    """What computes with the view is; the plan knows the time of the run that comes of it."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    view = s.call(aten.t, s.gather_and_wait(s.call(aten.relu, h), 2, "g"))
    gm = s.end(s.mm(h, s.x), s.mm(h, s.x), s.mm(s.x, view))
    expected = plan(gm).timeline
    assert schedule(gm).total_ms == expected.total_ms == 40.0
    assert text(gm) == "mm s0 mm mm w0 mm"


def test_a_schedule_is_told_only_of_what_matters_to_it() -> None:
    """Not of inputs, and of a cast that moves with its gather; but of the activation's use."""
    s = Sketch()
    cast = s.call(aten._to_copy, s.placeholder(4, 8, dtype=torch.float64), dtype=torch.float32)
    h = s.mm(s.x, s.gather_and_wait(cast, 2, "g"))
    gathered = s.gather_and_wait(s.call(aten.relu, h), 2, "g")
    gm = s.end(s.mm(h, s.x), s.call(aten.t, gathered))
    track = track_of(gm)
    skeleton, costs = track.skeleton, track.costs
    moving = {node for c in skeleton.collectives for node in (c.start, *c.waits)}
    told = [track.order[place] for place, _ in track.events]
    compute = {n for n in costs if n not in moving} - {cast}
    use = track.order[track.uses[1]]
    expected = [n for n in track.order if n in moving | compute | {use} or n.op == "output"]
    assert told == expected
    assert [event for place, event in track.events if track.order[place].op == "output"] == [None]


def test_a_schedule_sees_one_kernel_where_nothing_can_come_in_between() -> None:
    """relu and neg are one kernel; so are the others, but a wait may move in front of the second."""
    s = Sketch()
    h = s.mm(s.x, s.x)
    relu = s.call(aten.relu, h)
    neg = s.call(aten.neg, relu)
    gathered = s.gather_and_wait(h, 2, "g")
    first = s.call(aten.abs, h)
    use = s.mm(gathered, first)
    last = s.call(aten.cos, use)
    gm = s.end(neg, last)
    costs = {
        n: ComputeCost(1.0, int(n in (h, neg, last))) for n in (h, relu, neg, first, use, last)
    }
    nodes = list(gm.graph.nodes)
    track = read_track(nodes, collect(gm.graph), MODEL, costs, live_bytes(gm.graph))
    assert nodes[track.uses[0]] is use
    told = {nodes[place]: event for place, event in track.events if nodes[place] in costs}
    part, end = ComputeCost(1.0, 0), ComputeCost(1.0, 1)
    assert told == {h: end, neg: ComputeCost(2.0, 1), first: part, use: part, last: end}


def test_moved_nodes_go_behind_others_that_need_nothing() -> None:
    """Nothing but its place orders what has no inputs."""
    b = GraphBuilder()
    made = [b.call(aten.full, [2], float(number)) for number in range(4)]
    gm = b.output(*made)
    move_nodes(gm.graph, collect(gm.graph), [(made[0], 4), (made[2], 1)])
    assert [node for node in gm.graph.nodes if node in made] == [made[i] for i in (2, 1, 3, 0)]


# -- random graphs --------------------------------------------------------------------------------


def random_graph(r: random.Random) -> fx.GraphModule:
    s = Sketch()
    h = s.x
    for _ in range(r.randrange(3, 25)):
        choice = r.random()
        if choice < 0.4:
            h = s.mm(h, s.weight(r.choice("gh")))
        elif choice < 0.6:
            s.scatter(s.mm(h, s.x), r.choice("gh"))
        elif choice < 0.7:
            scattered = s.scatter_and_wait(s.mm(h, s.x), "sum", 2, "g")
            s.results.append(s.reduce_and_wait(scattered, "sum", "h"))
        else:
            h = s.mm(h, s.x)
    return s.end(h)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_random_graphs(seed: int) -> None:
    """Never slower, same values, peak under the cap, and a second pass changes nothing."""
    gm = random_graph(random.Random(seed))
    before = copy.deepcopy(gm)
    cap = int(peak_bytes(gm.graph).peak_bytes * 1.5)
    line = schedule(gm, Limits(cap))
    assert line.total_ms <= run(before).total_ms + 1e-9
    assert peak_bytes(gm.graph).peak_bytes <= cap
    inputs = random_inputs(before, 2, seed=0)
    expected, actual = (pytree.tree_leaves(run_spmd(g, inputs, GROUPS, 2)) for g in (before, gm))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("count", [100])
def test_work_grows_linearly(count: int) -> None:
    def operations(number: int) -> int:
        return plan(layers(number)).operations

    assert 0 < operations(2 * count) <= 2.2 * operations(count)
