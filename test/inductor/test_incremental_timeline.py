"""Changes of an order, timed by what they touch, against whole runs of the changed order.

Orders are made of events directly: kernels of one node, and launches of one collective with other
indices, groups and times, which is all that the lanes read.  A failing property prints its seed and
size; ``random_case(seed, size)`` makes the same order again.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.estimate.events import (
    Event,
    Kernel,
    Start,
    Wait,
    events_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.incremental import (
    BLOCK,
    BLOCK_LIMIT,
    RunTime,
    TimelineCache,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.slack_tree import SlackTree, Spot
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import (
    Lanes,
    Launch,
    simulate,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
LINKS = (DEVICES["H100"].intra_node, DEVICES["H100"].inter_node)
#: What the module promises, relative to the longest run so far.
EXACT = 1e-9


@dataclass(frozen=True)
class Case:
    """An order and the model that times it."""

    events: list[Event]
    model: RuntimeModel


# ---------------------------------------------------------------- events without a graph


@cache
def collective() -> Collective:
    b = GraphBuilder()
    return collect(b.output(b.gather_and_wait(b.placeholder(8, 8), 2, "g")).graph).collectives[0]


def launch(index: int, ms: float, group: str = "g", host_ms: float = 0.0) -> Launch:
    link = LINKS[group == "far"]
    return Launch(replace(collective(), index=index, group=group), ms, link, host_ms)


def kernel(ms: float, launches: int = 1) -> Kernel:
    return Kernel(collective().start, ComputeCost(ms, launches))


def model(kernel_us: float = 0.0, wait_us: float = 0.0, slow: float = 1.2) -> RuntimeModel:
    host = HostCosts(kernel_us, 0.0, 0.0, wait_us)
    return RuntimeModel(host=host, interference=Interference(slow, 1.0))


def whole_run(events: Sequence[Event], model: RuntimeModel) -> RunTime:
    """All events through the lanes, as ``simulate`` sends those of a graph."""
    lanes, launches = Lanes(model), []
    for event in events:
        if isinstance(event, Kernel):
            lanes.compute(event.node, event.cost)
        elif isinstance(event, Start):
            launches.append(event.launch)
            lanes.start(event.launch)
        else:
            lanes.wait(event.launch, event.waits)
    line = lanes.finish(launches)
    return RunTime(line.total_ms, line.exposed_ms)


def assert_equal(
    found: RunTime, wanted: RunTime, what: object = "", longest_ms: float = 0.0
) -> None:
    near = EXACT * max(wanted.total_ms, longest_ms)
    assert found.total_ms == pytest.approx(wanted.total_ms, rel=0, abs=near), what
    assert found.exposed_ms == pytest.approx(wanted.exposed_ms, rel=EXACT, abs=1e-3 * near), what


# ---------------------------------------------------------------- the property


def random_case(seed: int, size: int) -> Case:
    """Any mix of kernels and collectives; hosts from free to the one that everything waits for."""
    r = random.Random(f"case {seed}")
    # Whole numbers make ties, which the host, the streams and the waits then have at once.
    times = r.choice([(0, 1, 2, 3, 5), (0.0, 0.013, 0.11, 0.7, 2.9)])
    host_us = r.choice([0.0, 5.0, 300.0, 1000.0, 4000.0])
    density = r.choice([0.15, 0.4, 0.7])
    open_waits: list[Launch] = []
    events: list[Event] = []
    while len(events) < size:
        choice = r.random()
        if choice > density:
            events.append(kernel(r.choice(times), r.choice((0, 1, 1, 2))))
        elif choice > density / 2:
            new = launch(
                len(events), r.choice(times) * 2, r.choice(("g", "h", "far")), host_us / 1e3
            )
            events.append(Start(new))
            open_waits.extend([new] * r.choice((0, 1, 1, 1, 2)))  # never waited for, once, twice
        elif open_waits:
            events.append(Wait(open_waits.pop(r.randrange(len(open_waits))), r.choice((1, 2))))
    host = HostCosts(host_us, 0.0, 0.0, host_us / 4)
    interference = Interference(r.choice((1.0, 1.2, 2.0)), r.choice((0.0, 0.5, 1.0)))
    return Case(events, RuntimeModel(host=host, interference=interference))


def legal(events: Sequence[Event]) -> list[Event]:
    """The same events with each wait behind its start, where that is among them."""
    ahead = {e.launch.collective.index for e in events if isinstance(e, Start)}
    held: dict[int, list[Event]] = {}
    result: list[Event] = []
    for event in events:
        result.append(event)
        if isinstance(event, Kernel):
            continue
        index = event.launch.collective.index
        if isinstance(event, Start):
            ahead.discard(index)
            result.extend(held.pop(index, ()))
        elif index in ahead:
            held.setdefault(index, []).append(result.pop())
    return result


def random_change(r: random.Random, events: Sequence[Event]) -> tuple[int, int, list[Event]]:
    first = r.randrange(len(events) + 1)
    last = min(len(events), first + r.choice((0, 2, 5, 12, 40)))
    stretch = list(events[first:last])
    r.shuffle(stretch)
    for _ in range(r.choice((0, 0, 1, 3))):  # more events, or fewer
        kernels = [i for i, event in enumerate(stretch) if isinstance(event, Kernel)]
        if kernels and r.random() < 0.5:
            del stretch[r.choice(kernels)]
        else:
            stretch.insert(r.randrange(len(stretch) + 1), kernel(r.choice((0.0, 0.5, 2.0))))
    return first, last, legal(stretch)


@settings(deadline=None, max_examples=150, database=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 300))
def test_changes_equal_whole_runs(seed: int, size: int) -> None:
    case = random_case(seed, size)
    r = random.Random(f"changes {seed}")
    cache = TimelineCache(case.events, case.model)
    events = list(case.events)
    longest_ms = cache.time.total_ms
    assert_equal(cache.time, whole_run(events, case.model), (seed, size))
    for step in range(8):
        first, last, new = random_change(r, events)
        changed = [*events[:first], *new, *events[last:]]
        wanted = whole_run(changed, case.model)
        before = cache.time
        what = f"random_case({seed}, {size}), change {step}: {first} to {last} become {new}"
        assert_equal(cache.retime(first, last, new), wanted, what, longest_ms)
        assert cache.time == before
        if r.random() < 0.7:
            events = changed
            assert cache.accept(first, last, new) == cache.time
            longest_ms = max(longest_ms, wanted.total_ms)
            assert_equal(cache.time, wanted, what, longest_ms)
            assert cache.events(0, len(cache)) == events


def random_graph(r: random.Random) -> torch.fx.GraphModule:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    flying, results = [], []
    for _ in range(60):
        choice = r.random()
        if choice < 0.5:
            results.append(b.call(aten.mm, x, x))
        elif choice < 0.65:
            flying.append(b.all_gather(x, 2, r.choice("gh")))
        elif choice < 0.75:
            flying.extend(b.all_gather_coalesced([x, x], 16, "far"))
        elif flying:
            results.append(b.wait(flying.pop(r.randrange(len(flying)))))
    return b.output(*results)


@pytest.mark.parametrize("seed", range(5))
def test_order_of_a_graph_equals_simulate(seed: int) -> None:
    """Nodes of a graph, its input's and getitems among them, which have no event."""
    r = random.Random(seed)
    gm = random_graph(r)
    skeleton, runtime = collect(gm.graph), RuntimeModel()
    costs = runtime.node_costs(gm.graph, skeleton)
    order = list(gm.graph.nodes)
    cache = TimelineCache(events_of(order, skeleton, runtime, costs), runtime)
    line = simulate(order, skeleton, runtime, costs)
    assert_equal(cache.time, RunTime(line.total_ms, line.exposed_ms))
    # every start to the front, which delays what the host has to issue behind them
    starts = [c.start for c in skeleton.collectives]
    order = [*starts, *(node for node in order if node not in starts)]
    line = simulate(order, skeleton, runtime, costs)
    found = cache.retime(0, len(cache), events_of(order, skeleton, runtime, costs))
    assert_equal(found, RunTime(line.total_ms, line.exposed_ms))
    assert found != cache.time


# ---------------------------------------------------------------- the price


LAYER = 10  # events of a layer: a start, seven kernels, a wait, a kernel


def layers(count: int, host_ms: float) -> list[Event]:
    """Each starts a gather of 2.5 ms, hidden by 7 kernels of 0.5 ms, and waits for it."""
    events: list[Event] = []
    for index in range(count):
        gather = launch(index, 2.5, host_ms=host_ms)
        events += [Start(gather), *(kernel(0.5) for _ in range(7)), Wait(gather), kernel(0.25)]
    return events


#: us that the host needs for a kernel of 500 us, and the share of 2,000 events that a change of ten
#: may cost.  Where both are nearly as fast, a delay of the device is caught up only little by little.
HOSTS = [(0.0, 0.05), (5.0, 0.05), (500.0, 0.1), (1000.0, 0.05), (5000.0, 0.05)]


def late_start(events: Sequence[Event], first: int) -> list[Event]:
    """A layer whose gather starts behind four kernels, so that 1.0 ms of it are exposed."""
    stretch = events[first : first + LAYER]
    return [*stretch[1:5], stretch[0], *stretch[5:]]


@pytest.mark.parametrize(("host_us", "share"), HOSTS)
def test_price_of_a_change_does_not_grow_with_the_order(host_us: float, share: float) -> None:
    """Ten events of 2,000, 8,000 and 32,000: the share of the shortest pass for each."""
    prices = []
    for count in (200, 800, 3200):
        events = layers(count, host_us / 1e3)
        runtime = model(host_us, host_us / 10)
        cache = TimelineCache(events, runtime)
        assert cache.operations == len(events) == count * LAYER
        first = len(events) // 2 // 80 * 80  # where layers and blocks begin together
        new = late_start(events, first)
        found = cache.retime(first, first + LAYER, new)
        price = cache.operations - len(events)
        if count == 200:
            changed = [*events[:first], *new, *events[first + LAYER :]]
            assert_equal(found, whole_run(changed, runtime))
            if host_us < 500.0:  # a slow host has the gather done before it issues the wait
                assert found.total_ms > cache.time.total_ms + 0.5
        accepted = cache.accept(first, first + LAYER, new)
        assert accepted == found
        assert cache.operations == len(events) + 2 * price
        prices.append(price)
    assert prices[0] < share * 2000
    assert max(prices) == prices[0]


@pytest.mark.parametrize(("host_us", "share"), HOSTS)
def test_price_wherever_the_change_is(host_us: float, share: float) -> None:
    """Every eleventh place of 2,000 events, with all offsets in a block among them."""
    events = layers(200, host_us / 1e3)
    cache = TimelineCache(events, model(host_us, host_us / 10))
    prices = []
    for first in range(0, len(events) - LAYER, 11):
        before = cache.operations
        cache.retime(first, first + LAYER, legal(events[first : first + LAYER][::-1]))
        prices.append(cache.operations - before)
    assert max(prices) < share * len(events)


def test_host_that_lost_its_lead_is_found_again_where_it_matters() -> None:
    """The host leads by up to 90 ms; near the end 150 short kernels take up 75 ms of that.

    A change in front that delays the host by 40 ms is passed over until there and counts there.
    """
    runtime = model(1000.0, slow=1.0)
    long, short = [kernel(1.5)] * 1000, [kernel(0.5)] * 150
    for delayed_us, counts in ((200, False), (4000, True)):
        gather = launch(0, 0.1, host_ms=0.0)
        slow = launch(0, 0.1, host_ms=delayed_us / 10)
        events = [*long[:180], Start(gather), Wait(gather), *short, *long]
        # ahead by 90 ms after 180 kernels of 1.5 ms, then by 15 after the short ones
        cache = TimelineCache([*long[:100], *events], runtime)
        base = cache.time
        before = cache.operations
        new: list[Event] = [Start(slow), Wait(slow)]
        found = cache.retime(280, 282, new)
        changed = [*long[:100], *events]
        changed[280:282] = new
        assert_equal(found, whole_run(changed, runtime))
        assert (found.total_ms > base.total_ms + 1) == counts
        assert cache.operations - before < (200 if counts else 50)


def test_many_changes_stay_exact_and_cheap() -> None:
    """300 accepted moves, one after the other, on 2,000 events with a host that runs ahead."""
    r = random.Random(0)
    events, runtime = layers(200, 0.03), model(5.0, 1.0)
    cache = TimelineCache(events, runtime)
    cost = cache.operations
    for _ in range(300):
        first = r.randrange(len(events) - LAYER)
        stretch = events[first : first + LAYER]
        r.shuffle(stretch)
        new = legal(stretch)
        events[first : first + LAYER] = new
        cache.accept(first, first + LAYER, new)
    assert_equal(cache.time, whole_run(events, runtime))
    assert (cache.operations - cost) / 300 < 0.05 * len(events)


# ---------------------------------------------------------------- other changes


def test_merging_two_gathers() -> None:
    """Their starts and waits become those of a bucket of 4 ms, with a kernel of copies behind.

    start a, start b, mm 5, wait a, wait b, mm: a runs until 3, b until 6: 1 ms is exposed.  Merged
    it ends at 4, and the copy takes 0.5.
    """
    a, b, both = launch(0, 3.0), launch(1, 3.0), launch(0, 4.0)
    events = [Start(a), Start(b), kernel(5.0), Wait(a), Wait(b), kernel(1.0)]
    cache = TimelineCache(events, model(slow=1.0))
    assert (cache.time.total_ms, cache.time.exposed_ms) == (7.0, 1.0)
    merged = [Start(both), kernel(5.0), Wait(both), kernel(0.5)]
    assert cache.accept(0, 5, merged) == RunTime(6.5, 0.0)
    assert len(cache) == 5
    assert cache.accept(0, 4, events[:5]) == RunTime(7.0, 1.0)
    assert cache.events(0, 6) == events


def test_collective_in_the_air_at_the_end() -> None:
    """Never waited for: 3 of the scatter's 5 ms come behind the last kernel."""
    scatter = launch(0, 5.0)
    cache = TimelineCache([kernel(2.0), Start(scatter), kernel(2.0)], model(slow=1.0))
    assert cache.time == RunTime(7.0, 3.0)
    early: list[Event] = [Start(scatter), kernel(2.0), kernel(2.0)]
    assert cache.accept(0, 3, early) == RunTime(5.0, 1.0)
    # the last event once more: what is behind it has changed by then
    assert cache.accept(2, 3, [kernel(3.0)]) == RunTime(5.0, 0.0)
    assert cache.accept(3, 3, [kernel(1.0)]) == RunTime(6.0, 0.0)


def test_empty_order_can_grow() -> None:
    """Blocks are split when one has grown too large, once for all that went into it."""
    cache = TimelineCache([], model())
    assert (cache.time, len(cache)) == (RunTime(0.0, 0.0), 0)
    for count in range(BLOCK_LIMIT + 1):
        assert cache.time == RunTime(float(count), 0.0)
        cache.accept(count, count, [kernel(1.0)])
    before = cache.operations
    cache.retime(0, 1, [kernel(2.0)])
    assert cache.operations - before == BLOCK


def test_changes_that_are_refused() -> None:
    a, b = launch(0, 1.0), launch(1, 1.0)
    events = [Start(a), kernel(1.0), Wait(a), Start(b), Wait(b), kernel(1.0)]
    cache = TimelineCache(events, model(slow=1.0))
    wrong: list[tuple[int, int, list[Event], str]] = [
        (0, 1, [], "0 has events outside"),
        (2, 3, [Wait(a), Wait(a)], "0 has events outside"),
        (3, 4, [Start(b), Start(b)], "1 starts twice"),
        (0, 3, [Start(a), Start(b), kernel(1.0), Wait(a)], "1 has events outside"),
        (3, 5, [Wait(b), Start(b)], "1 is waited for before it starts"),
        (3, 5, [Wait(b)], "1 is waited for and never starts"),
    ]
    for first, last, new, message in wrong:
        for change in (cache.retime, cache.accept):
            with pytest.raises(ValueError, match=message):
                change(first, last, new)
    for first, last in ((-1, 2), (4, 3), (5, 7)):
        with pytest.raises(IndexError):
            cache.retime(first, last, [])
    assert cache.events(0, len(cache)) == events
    assert cache.accept(3, 5, []) == RunTime(2.0, 0.0)  # b entirely gone
    for order in ([Wait(a), Start(a)], [Start(a), Start(a)]):
        with pytest.raises(ValueError, match="0 "):
            TimelineCache(order, model())


# ---------------------------------------------------------------- the lanes' state


def halves(case: Case, cut: int) -> tuple[RunTime, float]:
    """A run that is interrupted at ``cut``, and how many ms of collectives are hidden in it."""
    lanes, launches = Lanes(case.model), []
    total_ms = exposed_ms = hidden_ms = 0.0
    for position, event in enumerate(case.events):
        if position == cut:
            total_ms, exposed_ms = lanes.now, lanes.exposed_ms
            hidden_ms = sum(h.ms for flight in lanes.flights.values() for h in flight.hidden_by)
            lanes.restore(lanes.snapshot(lanes.flights))
            assert lanes.now == lanes.exposed_ms == lanes.compute_ms == 0.0
        if isinstance(event, Kernel):
            lanes.compute(event.node, event.cost)
        elif isinstance(event, Start):
            launches.append(event.launch)
            lanes.start(event.launch)
        else:
            lanes.wait(event.launch, event.waits)
    line = lanes.finish(launches)
    hidden_ms += sum(span.hidden_ms for span in line.spans)
    return RunTime(total_ms + line.total_ms, exposed_ms + line.exposed_ms), hidden_ms


@pytest.mark.parametrize("seed", range(10))
def test_lanes_go_on_from_a_snapshot(seed: int) -> None:
    """Two halves sum up to the whole run, wherever it is cut, and so does what is hidden."""
    case = random_case(seed, 60)
    wanted = whole_run(case.events, case.model)
    hidden_ms = halves(case, 60)[1]
    for cut in range(0, 60, 7):
        found, hidden = halves(case, cut)
        assert_equal(found, wanted, (seed, cut))
        assert hidden == pytest.approx(hidden_ms, abs=1e-9), (seed, cut)


# ---------------------------------------------------------------- the tree


@settings(deadline=None, database=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 40))
def test_slack_tree_equals_lists(seed: int, blocks: int) -> None:
    r = random.Random(f"tree {seed}")
    counts = [r.choice((0, 1, 3)) for _ in range(blocks)]
    slacks = [float(r.randrange(10)) for _ in range(blocks)]
    added = [0.0] * blocks
    tree = SlackTree(counts, slacks)
    for _ in range(30):
        block, behind = sorted((r.randrange(blocks), r.randrange(blocks + 1)))
        if r.random() < 0.4:
            by = float(r.randrange(-3, 4))
            tree.add(block, behind, by)
            for i in range(block, behind):
                slacks[i] += by
                added[i] += by
        elif block < blocks:
            counts[block], slacks[block] = r.choice((0, 2, 4)), float(r.randrange(10))
            tree.set(block, counts[block], slacks[block])
        bound = float(r.randrange(-3, 12))
        below = [i for i in range(blocks) if i >= block and slacks[i] < bound]
        assert tree.first_below(block, bound) == (below[0] if below else blocks)
        assert [tree.added(i) for i in range(blocks)] == added
        spots = [Spot(i, inside) for i, count in enumerate(counts) for inside in range(count)]
        assert tree.events == len(spots)
        assert [tree.find(position) for position in range(len(spots))] == spots
        assert tree.find(len(spots)) == Spot(blocks - 1, counts[-1])
