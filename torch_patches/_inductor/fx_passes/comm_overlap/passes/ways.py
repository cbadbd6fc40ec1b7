"""A way to treat a graph: buckets, and where their starts and waits go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import (
    Limits,
    Schedule,
    plan_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.sizes import Sizes
from torch_patches._inductor.fx_passes.comm_overlap.passes.timing import Timing
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit, make_units
from torch_patches._inductor.fx_passes.comm_overlap.plan import Plan

#: Kernels of a graph on which work is spent that would be too much on a large one.
SMALL_KERNELS = 512
#: Chooses places for the launches of a graph.
ChooseTiming = Callable[[Sequence[Unit]], Timing]


@dataclass(frozen=True, eq=False)
class Way:
    """One way to bucket, with the schedule of its buckets, whose moves are in the plan.

    Args:
        track, limits: that it was scheduled for and under.
        choose_timing: what placed them; None where the estimates did.
        sizes: of the buckets, where a search chose them.
    """

    name: str
    plan: Plan
    schedule: Schedule
    track: Track
    limits: Limits
    choose_timing: ChooseTiming | None = None
    sizes: Sizes | None = None


def schedule_way(
    name: str,
    plan: Plan,
    track: Track,
    limits: Limits,
    choose_timing: ChooseTiming | None = None,
) -> Way:
    """The way with these buckets."""
    units = make_units(track, plan.buckets)
    timing = choose_timing(units) if choose_timing is not None else None
    schedule = plan_schedule(track, units, limits, timing)
    moved = replace(plan, moves=schedule.moves)
    return Way(name, moved, schedule, track, limits, choose_timing)


def reschedule(track: Track, way: Way, limits: Limits) -> Way:
    """The way with a schedule for the buckets that its plan has now."""
    found = schedule_way(way.name, way.plan, track, limits, way.choose_timing)
    return replace(found, sizes=way.sizes)


def is_small(track: Track) -> bool:
    """A second application costs little there, and so do ways that are worth less elsewhere: known
    by kernels, of which all ranks have as many."""
    return track.slots <= SMALL_KERNELS


def excess_bytes(way: Way, limits: Limits) -> int:
    """By how much it exceeds the memory cap."""
    return max(way.schedule.peak_bytes - limits.peak_bytes, 0)


def total_ms(way: Way) -> float:
    """Of its simulated run."""
    return way.schedule.timeline.total_ms


def badness(way: Way, limits: Limits) -> tuple[int, float, int]:
    """Smaller is better: within the memory limit first, then time, then launches."""
    merged = sum(len(bucket.members) for bucket in way.plan.buckets)
    return excess_bytes(way, limits), total_ms(way), len(way.plan.buckets) - merged
