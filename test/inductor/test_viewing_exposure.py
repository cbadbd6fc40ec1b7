"""The reason of what is exposed, on graphs whose runs are worked out by hand.

A matrix product takes 10 ms, a gather 4, a reduce-scatter 6; the host issues in no time and links are
not shared, unless a test is about it.
"""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.forecast import forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches._inductor.fx_passes.comm_overlap.reporting import Observed
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.viewing.exposure import Bounds, ExposureReason, explain_run
from torch_patches.viewing.picture import Flight, Run, Stop, replay
from torch_patches.viewing.record import observe

aten = torch.ops.aten
MM, GATHER, SCATTER = 10.0, 4.0, 6.0
ROOMY = Bounds(cap_bytes=1 << 40, prefetch_kernels=None, schedules=True)


def custom(node: fx.Node, size_bytes: int | None) -> float:
    if node.target is aten.mm.default:
        return MM
    kind = collective_kind(node)
    if kind is not None:
        return GATHER if kind is CollectiveKind.ALL_GATHER else SCATTER
    return 0.0


def flights(gm: fx.GraphModule, bounds: Bounds = ROOMY) -> list[Flight]:
    return list(explained(gm, bounds).flights)


def explained(gm: fx.GraphModule, bounds: Bounds = ROOMY) -> Run:
    model = RuntimeModel(
        custom=custom, host=HostCosts(0, 0, 0, 0), interference=Interference(1.0, 0.0)
    )
    found = forecast(gm.graph, collect(gm.graph), model)
    inputs = {n.name: tuple(i.name for i in n.all_input_nodes) for n in gm.graph.nodes}
    record = observe(Observed(found, found, inputs, 1 << 40, 1 << 40, Options("auto")))
    return explain_run(record.after, replay(record.after, record), bounds)


def reason(flight: Flight) -> ExposureReason | None:
    return None if flight.exposure is None else flight.exposure.reason


def test_what_makes_it_and_what_needs_it_cannot_hide_it() -> None:
    """mm -> gather -> mm."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    gathered = b.gather_and_wait(b.call(aten.mm, x, x), 2, "g")
    (flight,) = flights(b.output(b.call(aten.mm, gathered, x)))
    assert flight.exposed_ms == GATHER
    assert reason(flight) is ExposureReason.NOTHING_INDEPENDENT


def test_a_mutation_orders_as_data_do() -> None:
    """The product in front writes into what the gather sends; by data flow alone it would be free."""
    b = GraphBuilder()
    x, out = b.placeholder(8, 8), b.placeholder(8, 8)
    product = b.call(aten.mm, x, x)
    b.call(aten.copy_, out, product)
    gathered = b.gather_and_wait(out, 2, "g")
    (flight,) = flights(b.output(b.call(aten.mm, gathered, x)))
    assert reason(flight) is ExposureReason.NOTHING_INDEPENDENT


def test_less_compute_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of 14 ms beside one free product of 10."""
    monkeypatch.setattr(f"{__name__}.GATHER", 14.0)
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    start = b.all_gather(x, 2, "g")
    free = b.call(aten.mm, x, x)
    (flight,) = flights(b.output(b.call(aten.mm, b.wait(start), x), free))
    assert flight.exposed_ms == 4.0
    assert reason(flight) is ExposureReason.TOO_LITTLE
    assert flight.exposure is not None and "14.000" in flight.exposure.detail


def test_a_busy_stream() -> None:
    """Two gathers at once on a group: the second begins when the first one ends."""
    b = GraphBuilder()
    x, y = b.placeholder(8, 8), b.placeholder(8, 8)
    starts = [b.all_gather(each, 2, "g") for each in (x, y)]
    waits = [b.wait(start) for start in starts]
    free = b.call(aten.mm, x, x)
    first, second = flights(b.output(free, *waits))
    assert (second.start_ms, second.exposed_ms) == (4.0, 4.0)
    assert reason(second) is ExposureReason.QUEUED
    assert second.exposure is not None and first.launch.start in second.exposure.detail
    assert reason(first) is not ExposureReason.QUEUED


def eager_wait() -> fx.GraphModule:
    """mm; a gather that is waited for at once; mm."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    first = b.call(aten.mm, x, x)
    gathered = b.gather_and_wait(x, 2, "g")
    return b.output(first, gathered, b.call(aten.mm, x, x))


def test_independent_compute_that_nobody_moved() -> None:
    (flight,) = flights(eager_wait(), Bounds(1 << 40, None, schedules=False))
    assert reason(flight) is ExposureReason.NOT_SCHEDULED
    assert flight.exposure is not None
    assert (flight.exposure.earlier_ms, flight.exposure.later_ms) == (MM, MM)
    assert reason(flights(eager_wait())[0]) is ExposureReason.ORDER


def test_memory_is_the_reason_where_every_direction_exceeds_the_cap() -> None:
    """A gather that starts before the product lives beside it: 256 B in, 256 of product, 512 gathered."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    first = b.call(aten.mm, x, x)
    gathered = b.gather_and_wait(x, 2, "g")
    gm = b.output(first, b.call(aten.mm, gathered, x))
    over = 256 + 256 + 512
    (flight,) = flights(gm, Bounds(over - 1, None, schedules=True))
    assert reason(flight) is ExposureReason.MEMORY
    (flight,) = flights(gm, Bounds(over, None, schedules=True))
    assert reason(flight) is ExposureReason.ORDER


def test_compute_that_hides_another_collective_is_taken() -> None:
    """The only free product runs beside a reduce-scatter on another group."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    other = b.reduce_scatter(x, "sum", 2, "h")
    free = b.call(aten.mm, x, x)
    done = b.wait(other)
    gathered = b.gather_and_wait(x, 2, "g")
    gm = b.output(free, done, b.call(aten.mm, gathered, x))
    _, gather = flights(gm)
    assert reason(gather) is ExposureReason.TAKEN


def test_a_start_too_far_ahead() -> None:
    """Three products in front; the nearest is needed, and one kernel ahead is the bound."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    first = b.call(aten.mm, x, x)
    b.call(aten.mm, first, x)
    gathered = b.gather_and_wait(x, 2, "g")
    gm = b.output(b.call(aten.mm, gathered, x), first)
    (flight,) = flights(gm, Bounds(1 << 40, 0, schedules=True))
    assert reason(flight) is ExposureReason.PREFETCH
    (flight,) = flights(gm, Bounds(1 << 40, 1, schedules=True))
    assert reason(flight) is ExposureReason.ORDER


def test_what_is_hidden_has_no_reason() -> None:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    start = b.all_gather(x, 2, "g")
    free = b.call(aten.mm, x, x)
    (flight,) = flights(b.output(free, b.wait(start)))
    assert (flight.exposed_ms, flight.exposure) == (0.0, None)


def test_what_nobody_waits_for_stands_at_the_end() -> None:
    """mm of 10 ms; a gather and a reduce-scatter that start behind it and are never waited for."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    product = b.call(aten.mm, x, x)
    b.all_gather(x, 2, "g")
    b.reduce_scatter(x, "sum", 2, "h")
    run = explained(b.output(product))
    assert (run.total_ms, run.exposed_ms) == (16.0, 6.0)
    assert run.stops == (Stop(0, 10.0, 14.0), Stop(1, 14.0, 16.0))


def test_every_reason_has_an_advice() -> None:
    for each in ExposureReason:
        assert each.advice and each.value
