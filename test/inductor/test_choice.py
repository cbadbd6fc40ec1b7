"""Which way is applied next, and what becomes of the others after a failure."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes import choice
from torch_patches._inductor.fx_passes.comm_overlap.passes.choice import EstimatedChoice
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
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


def choose(monkeypatch: pytest.MonkeyPatch, ways: list[Way], small: bool) -> EstimatedChoice:
    monkeypatch.setattr(choice, "try_ways", lambda *args: ways)
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


def test_failures_tell_how_careful_the_accounts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that said 300 too much took 250: others that say more than 50 too much will fail too."""
    first = way(7.0, 300)
    chosen = choose(monkeypatch, [way(10.0), first, way(7.5, 60), way(9.0, 40)], small=True)
    assert chosen.next(lambda: TRACK, 100.0) is first
    chosen.fail(first, excess_bytes=250)
    assert taken(chosen) == pytest.approx(7.1)
    chosen.fail(first, excess_bytes=0)
    assert taken(chosen) == 9.0


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
