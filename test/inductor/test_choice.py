"""Which way is applied next, and what becomes of the others after a failure."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes import choice
from torch_patches._inductor.fx_passes.comm_overlap.passes.choice import (
    EstimatedChoice,
    ModuleChoice,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.sizes import Sizes
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import Way
from torch_patches._inductor.fx_passes.comm_overlap.plan import Plan

CAP = 1000
LIMITS = Limits(CAP)
TRACK: Track = SimpleNamespace()  # type: ignore[assignment]


def way(ms: float, excess: int = 0) -> Way:
    """Named "a way", as all others are: a name tells nothing."""
    timeline = SimpleNamespace(total_ms=ms)
    schedule = SimpleNamespace(timeline=timeline, peak_bytes=CAP + excess, operations=1)
    return Way("a way", Plan(), schedule, TRACK, LIMITS)  # type: ignore[arg-type]


def again(track: Track, one: Way, limits: Limits) -> Way:
    """Less memory costs 0.1 ms, and is kept."""
    schedule = SimpleNamespace(
        timeline=SimpleNamespace(total_ms=one.schedule.timeline.total_ms + 0.1),
        peak_bytes=limits.peak_bytes,
        operations=1,
    )
    return replace(one, schedule=schedule, track=track, limits=limits)


def choose(
    monkeypatch: pytest.MonkeyPatch,
    ways: list[Way],
    small: bool,
    searched: list[int] | None = None,
) -> EstimatedChoice:
    """Args: ``searched``: is given the memory cap of each search."""

    def try_ways(track: Track, options: Options, limits: Limits) -> list[Way]:
        if searched is not None:
            searched.append(limits.peak_bytes)
        return ways

    monkeypatch.setattr(choice, "try_ways", try_ways)
    monkeypatch.setattr(choice, "is_small", lambda track: small)
    monkeypatch.setattr(choice, "reschedule", again)
    monkeypatch.setattr(choice, "_on", lambda track, one: one)
    return EstimatedChoice(Options("auto"), LIMITS)


def taken(chosen: EstimatedChoice, slowest_ms: float = 100.0) -> float | None:
    one = chosen.next(lambda: TRACK, slowest_ms)
    return None if one is None else one.schedule.timeline.total_ms


@pytest.mark.parametrize(
    ("faster_ms", "excess", "small", "first_ms"),
    [
        (9.0, 10, False, 9.0),  # 1% over the cap, 10% faster
        (9.0, 200, False, 10.0),  # it exceeds the cap by too much
        (9.0, 200, True, 9.0),  # but for a small graph, where a look is cheap
        (9.98, 10, False, 10.0),  # it saves too little
        (9.98, 10, True, 9.98),
    ],
)
def test_faster_way_over_the_cap_is_looked_at_first_where_it_pays(
    monkeypatch: pytest.MonkeyPatch, faster_ms: float, excess: int, small: bool, first_ms: float
) -> None:
    chosen = choose(monkeypatch, [way(10.0), way(faster_ms, excess)], small)
    assert taken(chosen) == first_ms


def test_large_graph_takes_one_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    risky = [way(8.0, 20), way(8.5, 20)]
    chosen = choose(monkeypatch, [way(10.0), *risky], small=False)
    one = chosen.next(lambda: TRACK, 100.0)
    assert one is risky[0]
    chosen.fail(one, excess_bytes=5)
    assert taken(chosen) == pytest.approx(8.1)  # with less memory it is within the cap
    assert chosen.faster_than(8.1) is None


def fail_all(chosen: EstimatedChoice, most: int, excess: int = 0) -> list[float]:
    """What is taken one after the other where nothing holds."""
    found: list[float] = []
    while len(found) < most and (one := chosen.next(lambda: TRACK, 100.0)) is not None:
        found.append(one.schedule.timeline.total_ms)
        chosen.fail(one, excess)
    return found


@pytest.mark.parametrize(("small", "risks"), [(False, [8.0]), (True, [8.0, 8.1, 8.2])])
def test_so_many_risks_are_taken(
    monkeypatch: pytest.MonkeyPatch, small: bool, risks: list[float]
) -> None:
    """The fastest first, then one that holds by its own account."""
    ways = [way(10.0), *(way(ms, 10) for ms in (8.3, 8.1, 8.0, 8.2))]
    chosen = choose(monkeypatch, ways, small)
    assert fail_all(chosen, len(risks) + 1) == [*risks, 10.0]


def test_a_second_try_has_less_memory_and_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It planned with the cap of 1,000 and exceeded it by 250; 1 in 256 of the plan is margin."""
    chosen = choose(monkeypatch, [way(7.0, 300)], small=True)
    chosen.fail(chosen.next(lambda: TRACK, 100.0) or way(0.0), excess_bytes=250)
    second = chosen.next(lambda: TRACK, 100.0)
    assert second is not None and second.limits.peak_bytes == CAP - 250 - CAP // 256
    chosen.fail(second, excess_bytes=1)
    assert taken(chosen) is None


def test_a_second_try_that_does_not_hold_its_own_cap_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """9.1 ms with one byte more than it should have: the way that holds is first."""
    chosen = choose(monkeypatch, [way(10.0), way(9.0, 20)], small=False)

    def over(track: Track, one: Way, limits: Limits) -> Way:
        return replace(
            again(track, one, replace(limits, peak_bytes=limits.peak_bytes + 1)), limits=limits
        )

    monkeypatch.setattr(choice, "reschedule", over)
    assert fail_all(chosen, 1, excess=5) == [9.0]
    assert taken(chosen) == 10.0


def test_second_search_has_the_least_memory_of_a_second_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the 8 applications of a small graph have failed, each by 5 bytes of 1,000.

    The least cap is that of a second try: 1,000 - 5 - 3 = 992, less 5 and 3 more.
    """
    searched: list[int] = []
    chosen = choose(monkeypatch, [way(9.0 + place) for place in range(9)], True, searched)
    fail_all(chosen, 2, excess=5)
    least = chosen._lowest.peak_bytes
    assert least in (992, 984)
    fail_all(chosen, 2)
    assert searched == [CAP]
    found = chosen.next(lambda: TRACK, 100.0)
    assert found is not None and searched == [CAP, least]
    chosen.fail(found, 0)
    assert taken(chosen) is not None and searched == [CAP, least]
    assert all(entry.limits.peak_bytes == least for entry in chosen._entries)


def test_nothing_is_searched_again_where_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    chosen = choose(monkeypatch, [way(9.0 + place) for place in range(9)], True, searched)
    fail_all(chosen, 3)
    assert taken(chosen) == 12.0
    chosen.faster_than(14.0)
    fail_all(chosen, 3)
    assert searched == [CAP]


def test_a_hopeless_way_is_not_looked_at_where_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is faster, and exceeds the cap by more than an eighth (and half: no risk to take before)."""
    for excess, expected in ((CAP // 8, 9.0), (CAP // 8 + 1, None)):
        chosen = choose(monkeypatch, [way(10.0), way(9.0, excess)], small=True)
        monkeypatch.setattr(choice, "_MAX_RISKS_SMALL", 0)
        assert taken(chosen) == 10.0
        slowest = chosen.faster_than(10.0)
        assert slowest is not None and taken(chosen, slowest) == expected


def test_failures_tell_how_careful_the_accounts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that said 300 too much took 250: others that say more than 50 too much will fail too."""
    first = way(7.0, 300)
    chosen = choose(monkeypatch, [way(10.0), first, way(7.5, 60), way(9.0, 40)], small=True)
    assert chosen.next(lambda: TRACK, 100.0) is first
    chosen.fail(first, excess_bytes=250)
    assert taken(chosen) == pytest.approx(7.1)
    chosen.fail(first, excess_bytes=0)
    assert taken(chosen) == 9.0


@pytest.mark.parametrize(("excess", "shrinks"), [(250, True), (0, False)])
def test_a_way_whose_buckets_exceed_the_cap_gets_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, excess: int, shrinks: bool
) -> None:
    """It took 250 more than the cap of 1,000 and planned 300 more: with starts and waits under less
    memory it still plans 290 more, so buckets shrink in what is left of the cap."""
    asked: list[tuple[int, int]] = []

    class Search:
        def __init__(self, track: Track, options: Options, limits: Limits) -> None:
            self.limits = limits

        def shrunk(self, one: Way, most_bytes: int) -> Way:
            asked.append((self.limits.peak_bytes, most_bytes))
            return replace(way(8.0, 40), sizes=one.sizes)

    first = replace(way(7.0, 300), sizes=Sizes((100,)))
    chosen = choose(monkeypatch, [way(10.0), first], small=True)
    monkeypatch.setattr(choice, "CapSearch", Search)
    monkeypatch.setattr(
        choice, "reschedule", lambda track, one, limits: replace(way(7.2, 290), sizes=one.sizes)
    )
    chosen.fail(chosen.next(lambda: TRACK, 100.0) or way(0.0), excess)
    assert taken(chosen) == (8.0 if shrinks else 10.0)
    assert asked == ([(CAP - 250, CAP + 50)] if shrinks else [])


def test_ways_of_one_name_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is tried although one of that name failed."""
    ways = [way(9.0), way(9.5)]
    chosen = choose(monkeypatch, ways, small=True)
    for one in ways:
        assert chosen.next(lambda: TRACK, 100.0) is one
        chosen.fail(one, excess_bytes=0)
    assert taken(chosen) is None


def test_slower_ways_than_asked_for_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(monkeypatch, [way(9.0), way(8.0, 10)], small=True)
    assert taken(chosen, slowest_ms=7.0) is None
    assert taken(chosen, slowest_ms=8.0) == 8.0


def test_modules_get_less_memory_once_and_are_given_up_then() -> None:
    """At once where memory is not why."""
    chosen = ModuleChoice(Options("modules"), LIMITS, SimpleNamespace())  # type: ignore[arg-type]
    tries: list[tuple[set[str], dict[str, int]]] = []

    def next_way(*args: object) -> tuple[None, int]:
        seen = args[-1]
        tries.append((set(seen.given_up), dict(seen.lowered_bytes)))  # type: ignore[attr-defined]
        return None, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "next_module_way", next_way)
        for excess in (250, 250):
            chosen.fail(way(7.0, 300), excess)
            chosen.next(lambda: TRACK, 100.0)
        chosen.fail(replace(way(7.0), name="another way"), 0)
        chosen.next(lambda: TRACK, 100.0)
    lowered = {"a way": CAP - 250 - CAP // 256}
    assert tries == [
        (set(), lowered),
        ({"a way"}, lowered),
        ({"a way", "another way"}, lowered),
    ]


def test_graph_is_read_anew_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading undoes what was applied, so it must not happen where nothing is left to try."""
    chosen = choose(monkeypatch, [way(9.0)], small=True)
    reads: list[int] = []

    def read() -> Track:
        reads.append(1)
        return TRACK

    assert chosen.next(read, 100.0) is not None
    reads.clear()
    slowest = chosen.faster_than(9.0)
    assert slowest is not None and chosen.next(read, slowest) is None and not reads
