"""What a schedule says of memory and of copies, and what short memory keeps in its place.

A matrix product takes 10 ms, a gather 4, a scatter 6, as in test_schedule.py; "default" copies.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import make_bucket
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import (
    Limits,
    Schedule,
    plan_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.timing import (
    GATHER_MARGIN,
    Timing,
    latest_starts,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import copy_costs, make_units
from torch_patches._inductor.fx_passes.comm_overlap.plan import CloseReason, MergeForm
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.hiding_sketch import MODEL, Sketch, track_of

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
FREE = Limits(peak_bytes=1 << 40, prefetch_kernels=None)


def peak(s: Sketch) -> None:
    """A tensor of 64 KB for a moment, in a kernel of its own."""
    s.results.append(s.call(aten.sum, s.call(aten.repeat, s.x, [16, 16])))


def planned(gm: fx.GraphModule, limits: Limits, timing: Timing | None = None) -> Schedule:
    track = track_of(gm, collect(gm.graph))
    return plan_schedule(track, make_units(track, ()), limits, timing)


# -- one bucket of all ----------------------------------------------------------------------------


def bucketed(gm: fx.GraphModule, form: MergeForm) -> Schedule:
    track = track_of(gm, collect(gm.graph))
    bucket = make_bucket(track.skeleton.collectives, form, CloseReason.END)
    return plan_schedule(track, make_units(track, [bucket]), FREE)


def gathers_used_apart() -> fx.GraphModule:
    """A weight is used at once, the other one behind a peak."""
    s = Sketch()
    h = s.mm(s.x, s.wait(s.start()))
    peak(s)
    h = s.mm(h)
    s.mm(h, s.wait(s.start()))
    return s.done()


def scatters() -> fx.GraphModule:
    s = Sketch()
    h = s.x
    for _ in range(2):
        h = s.call(aten.mm, h, s.x)
        s.end(s.scatter(h))
    for _ in range(2):
        h = s.call(aten.mm, h, s.x)
    return s.done()


@pytest.mark.parametrize("make", [gathers_used_apart, scatters])
def test_copies_into_and_out_of_a_bucket_take_time(make) -> None:
    gm = make()
    copies = copy_costs(collect(gm.graph).collectives, MODEL.device)
    apart, copied = bucketed(gm, MergeForm.COALESCED), bucketed(gm, MergeForm.COPY)
    more_ms = copied.timeline.compute_ms - apart.timeline.compute_ms
    assert more_ms == pytest.approx(sum(copy.ms for copy in copies))


def test_what_is_copied_out_of_a_bucket_lives_until_its_own_use() -> None:
    """Also behind the first use of the bucket, over the peak."""
    gm = gathers_used_apart()
    assert bucketed(gm, MergeForm.COPY).peak_bytes == bucketed(gm, MergeForm.COALESCED).peak_bytes


def test_payloads_of_reductions_live_beside_the_bucket_that_they_are_copied_to() -> None:
    """Two payloads of 256 bytes."""
    gm = scatters()
    apart, copied = bucketed(gm, MergeForm.COALESCED), bucketed(gm, MergeForm.COPY)
    assert copied.peak_bytes == apart.peak_bytes + 512


@pytest.mark.parametrize(("ranks", "inside_us"), [(1, 4.096), (2, 2.048), (4, 1.024), (8, 1.0)])
def test_copies_read_and_write_everything_once(ranks: int, inside_us: float) -> None:
    """Results of 2 KiB at 1 GB/s, and their shards; no kernel takes less than 1 us."""
    b = GraphBuilder()
    waits = [b.gather_and_wait(b.placeholder(256 // ranks), ranks, "g") for _ in range(2)]
    device = replace(DEVICES["H100"], dram_gb_per_s=1.0, dram_efficiency=1.0, kernel_us=1.0)
    members = collect(b.output(*waits).graph).collectives
    inside, outside = copy_costs(members, device)
    assert inside.ms * 1e3 == pytest.approx(inside_us, rel=1e-9)
    assert outside.ms * 1e3 == pytest.approx(4.096, rel=1e-9)
    assert (inside.launches, outside.launches) == (1, 1)


def test_copies_of_reductions_go_by_what_they_send_and_get() -> None:
    """Two gradients of 2 KiB, 512 bytes of each left of them by four ranks; an all-reduce leaves all."""
    device = replace(DEVICES["H100"], dram_gb_per_s=1.0, dram_efficiency=1.0, kernel_us=0.0)
    for scatters, outside_us in ((True, 1.024), (False, 4.096)):
        b = GraphBuilder()
        grads = [b.placeholder(512) for _ in range(2)]
        waits = [
            b.scatter_and_wait(grad, "sum", 4, "g")
            if scatters
            else b.reduce_and_wait(grad, "sum", "g")
            for grad in grads
        ]
        members = collect(b.output(*waits).graph).collectives
        inside, outside = copy_costs(members, device)
        assert inside.ms * 1e3 == pytest.approx(2 * 4.096, rel=1e-9)
        assert outside.ms * 1e3 == pytest.approx(2 * outside_us, rel=1e-9)


# -- where memory is short ------------------------------------------------------------------------


def test_a_schedule_tells_how_much_was_free_where_a_gather_should_have_started() -> None:
    """Both shall start in front; for one there is no room.  With as much more as is missing it has."""
    gm = gathers_used_apart()
    timing = Timing(dict.fromkeys(range(2), 0), {})
    before = peak_bytes(gm.graph).peak_bytes
    for more in (0, 100):
        (free,) = planned(gm, Limits(before + more, None, None), timing).short.values()
        assert 0 <= free < 256
        missing = 256 - free
        assert planned(gm, Limits(before + more + missing, None, None), timing).short == {}
        assert planned(gm, Limits(before + more + missing - 1, None, None), timing).short
    assert planned(gm, Limits(before, None, None)).short == {}  # nobody chose a place


@pytest.mark.parametrize("products", [2, 60])
def test_an_activation_is_waited_for_late_only_where_its_payload_may_live_so_long(
    products: int,
) -> None:
    """Near its use and far from it."""
    s = Sketch()
    gathered = s.wait(s.all_gather(s.call(aten.relu, s.mm()), 2, "g"))
    s.results.clear()
    for _ in range(products):
        s.mm()
    peak(s)
    s.mm(gathered, s.x)
    gm = s.done()
    before = peak_bytes(gm.graph).peak_bytes
    assert planned(gm, Limits(before, None, None)).moves == ()
    free = planned(gm, FREE)
    assert [move.node for move in free.moves] == [gathered]
    assert free.timeline.exposed_ms == 0.0


def test_a_reduction_that_ends_when_a_gather_is_to_start_does_not_hold_it_up() -> None:
    """By a little more it does: then the gather goes in front of it."""

    def start_of_gather(reduction_ms: float) -> float:
        gather = SimpleNamespace(index=1, group="g", use=2, launch=SimpleNamespace(ms=4.0))
        start = object()
        reduction = SimpleNamespace(
            index=0,
            group="g",
            launch=SimpleNamespace(ms=reduction_ms),
            members=[SimpleNamespace(start=start)],
        )
        track = SimpleNamespace(
            reductions={0: reduction}, place={start: 1}, compute_before=[0.0, 10.0, 20.0]
        )
        return latest_starts(track, [gather], [reduction])[1]  # type: ignore[arg-type,list-item]

    in_time = 20.0 - GATHER_MARGIN * 4.0
    assert start_of_gather(in_time - 10.0) == in_time
    assert start_of_gather(in_time - 10.0 + 0.5) == 10.0
