"""Where starts and waits go beside collectives of other kinds, groups and payloads.

A matrix product takes 10 ms, a gather 4, a scatter or an all-reduce 6, as in test_schedule.py.
"""

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Timeline, simulate
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.reorder import move_nodes
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import (
    Limits,
    Schedule,
    plan_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import make_units
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.hiding_sketch import MODEL, Sketch, track_of

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
FREE = Limits(peak_bytes=1 << 40, prefetch_kernels=None)


def plan(gm: fx.GraphModule, limits: Limits = FREE) -> Schedule:
    track = track_of(gm, collect(gm.graph))
    return plan_schedule(track, make_units(track, ()), limits)


def schedule(gm: fx.GraphModule, limits: Limits = FREE) -> Timeline:
    """Schedules in place; the run afterwards."""
    moves = [(move.node, move.place) for move in plan(gm, limits).moves]
    move_nodes(gm.graph, collect(gm.graph), moves)
    gm.graph.lint()
    skeleton = collect(gm.graph)
    return simulate(gm.graph.nodes, skeleton, MODEL, MODEL.node_costs(gm.graph, skeleton))


def text(gm: fx.GraphModule) -> str:
    """The order of starts, waits and compute: ``s0 w0 mm s1 ...``."""
    collectives = collect(gm.graph).collectives
    words = {c.start: f"s{c.index}" for c in collectives}
    words |= {wait: f"w{c.index}" for c in collectives for wait in c.waits}
    words |= {n: "mm" for n in gm.graph.nodes if n.target is aten.mm.default}
    return " ".join(words[n] for n in gm.graph.nodes if n in words)


def weight(s: Sketch, group: str = "g") -> fx.Node:
    return s.wait(s.start(group))


def test_reductions_between_side_effects_are_waited_for_under_compute() -> None:
    s = Sketch()
    h = s.mm()
    for _ in range(2):
        s.results.append(s.wait(s.scatter(h)))
        h = s.mm(s.mm(h, s.x), s.x)
        s.call(barrier, s.x)
    gm = s.done()
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm w0 mm s1 mm w1 mm"


def test_gathers_that_are_due_together_start_in_the_order_of_their_uses() -> None:
    """Of two groups; the one that the graph gathers with first is used last."""
    s = Sketch()
    h = s.mm(s.mm(s.x, weight(s, "g")), s.x)
    h = s.call(aten.add.Tensor, h, weight(s, "h"))
    s.mm(h, weight(s, "g"))
    gm = s.done()
    schedule(gm)
    assert text(gm) == "s0 w0 mm s1 s2 mm w1 w2 mm"


def test_casts_of_one_payload_among_several_move_with_their_gather() -> None:
    """Of two that are gathered by one launch, the second is a parameter as it stands."""
    s = Sketch()
    h = s.mm()
    cast = s.call(aten._to_copy, s.placeholder(4, 8, dtype=torch.float64), dtype=torch.float32)
    one, two = s.all_gather_coalesced([cast, s.placeholder(4, 8)], 2, "g")
    s.mm(s.mm(h, s.wait(one)), s.wait(two))
    gm = s.done()
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "s0 mm w0 mm w0 mm"


def test_bytes_of_an_activation_are_in_flight_until_its_wait() -> None:
    """512 bytes of it; then there is room for the weight of 256."""
    s = Sketch()
    gathered = s.wait(s.all_gather(s.mm(), 2, "g"))
    h = s.mm(s.call(aten.slice.Tensor, gathered, 0, 0, 8), s.x)
    s.mm(h, weight(s))
    gm = s.done()
    limits = Limits(1 << 40, in_flight_bytes=512, prefetch_kernels=None)
    assert schedule(gm, limits).exposed_ms == 4.0
    assert text(gm) == "mm s0 w0 s1 mm w1 mm"


def test_each_look_at_a_gather_is_counted() -> None:
    """In front of every kernel, one more time for each that it might start in front of."""

    def operations(products: int) -> int:
        s = Sketch()
        h = s.x
        for _ in range(products):
            h = s.mm(h, s.x)
        s.mm(h, weight(s))
        return plan(s.done()).operations

    assert operations(30) - operations(10) == 20


def test_reduction_that_another_feeds_starts_where_its_payload_is_made() -> None:
    """The scatter is done long before what is added to its result."""
    s = Sketch()
    h = s.mm()
    scattered = s.wait(s.scatter(h))
    for _ in range(4):
        h = s.mm(h, s.x)
    part = s.call(aten.slice.Tensor, h, 0, 0, 4)
    total = s.call(aten.add.Tensor, scattered, part)
    s.results.append(s.wait(s.all_reduce(total, "sum", "h")))
    for _ in range(3):
        h = s.mm(h, s.x)
    gm = s.done()
    assert schedule(gm).exposed_ms == 0.0
    assert text(gm) == "mm s0 mm w0 mm mm mm s1 mm w1 mm mm"
