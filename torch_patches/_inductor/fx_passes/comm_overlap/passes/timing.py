"""When starts and waits fall due: by estimates, or where somebody else has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit

#: A gather is planned as if it took this many times its estimate, and a reduction is waited for
#: this share of its time after it ended by the estimate: estimates are not exact.
GATHER_MARGIN, REDUCTION_MARGIN = 1.5, 0.5


@dataclass(frozen=True, eq=False)
class Timing:
    """Places that somebody else has chosen; without one the estimates decide.

    Args:
        starts: index of a unit of gathers -> first place in front of which it may start.
        waits: index of a unit of reductions -> first place in front of which it may be waited for.
    """

    starts: Mapping[int, int]
    waits: Mapping[int, int]


def latest_starts(track: Track, gathers: Sequence[Unit], units: Sequence[Unit]) -> dict[int, float]:
    """Compute ms at which each gather must start to be in time for its use and for the next gather
    of its stream; reductions that become ready in between take their time on it too."""
    arrivals: dict[str, list[tuple[float, float]]] = {}
    for unit in units:
        if unit.index in track.reductions:
            ready = track.compute_before[max(track.place[m.start] for m in unit.members)]
            arrivals.setdefault(unit.group, []).append((ready, unit.launch.ms))
    for waiting in arrivals.values():
        waiting.sort()
    latest: dict[int, float] = {}
    next_start: dict[str, float] = {}
    for unit in reversed(gathers):
        later = next_start.get(unit.group, float("inf"))
        start = min(track.compute_before[unit.use], later) - GATHER_MARGIN * unit.launch.ms
        waiting = arrivals.get(unit.group, [])
        while waiting and sum(waiting[-1]) > start:
            ready, ms = waiting.pop()
            if ready < start:
                start = ready  # behind it, the gather would be late
            elif ready < later:
                start -= ms
        latest[unit.index] = next_start[unit.group] = start
    return latest
