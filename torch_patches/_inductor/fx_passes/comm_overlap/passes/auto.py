"""Chooses buckets and a schedule together, by what the timeline expects of each pair.

    read the track -> for each way to bucket: buckets -> schedule -> time and peak -> keep the best

Merging first and scheduling the buckets mostly finds more overlap than the other way round, where
compute that hides one collective keeps it from being merged with the next; the latter is one of the
ways tried all the same ("after schedule").  A plan that is no faster than the input, or whose peak
exceeds the cap, is not taken.  The ways are a fixed list, so the work is a fixed multiple of one
schedule.
"""

from __future__ import annotations

from dataclasses import replace

from torch_patches._inductor.fx_passes.comm_overlap.options import (
    DEFAULT_MEMORY_BYTES,
    DEFAULT_MEMORY_INCREASE,
    DEFAULT_MODULE_MEMORY_INCREASE,
    DEFAULT_PREFETCH,
    Options,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.after_schedule import (
    merge_after_schedule,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_greedily
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import (
    Way,
    excess_bytes,
    schedule_way,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
)

GIB = 1 << 30

#: MB a bucket may hold in the ways that "auto" tries, besides the default and no merge at all.
CAPS_MB = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0)


def memory_limits(options: Options, peak_bytes: int) -> Limits:
    """The caps of the options, over an input with this peak.

    The absolute increase and the ratio are combined by minimum, the defaults by maximum.
    """
    gib, ratio = options.max_memory_increase_gb, options.max_memory_increase_ratio
    if gib is None and ratio is None:
        modules = options.places_by_modules
        share = DEFAULT_MODULE_MEMORY_INCREASE if modules else DEFAULT_MEMORY_INCREASE
        allowed = max(int(share * peak_bytes), DEFAULT_MEMORY_BYTES)
    else:
        asked = [None if gib is None else gib * GIB, None if ratio is None else ratio * peak_bytes]
        allowed = min(int(size) for size in asked if size is not None)
    flight = options.max_in_flight_gb
    prefetch = options.max_compute_pre_fetch
    if prefetch is None and not options.places_by_modules:  # a module may be of any length
        prefetch = DEFAULT_PREFETCH
    return Limits(
        peak_bytes=peak_bytes + allowed,
        in_flight_bytes=None if flight is None else int(flight * GIB),
        prefetch_kernels=prefetch,
    )


def try_ways(track: Track, options: Options, limits: Limits) -> list[Way]:
    """All ways, the best one first.

    Those within the memory limit come first, then the faster ones; of equals the one with fewer
    launches.
    """
    ways: list[Way] = []
    for name, choice in _choices(options):
        plan = _plan(track, choice, options, limits)
        ways.append(schedule_way(name, plan, track, limits))
    alone = next(way for way in ways if way.name == "none").schedule
    plan = merge_after_schedule(track.order[0].graph, track, alone, options, limits)
    ways.append(schedule_way("after schedule", plan, track, limits))
    return sorted(ways, key=lambda way: _badness(way, limits))


def _plan(track: Track, choice: Options | None, options: Options, limits: Limits) -> Plan:
    if choice is not None:
        merger = LinearMerger(track, limits.in_flight_bytes)
        return plan_greedily(track.skeleton, merger, choice)
    return merge_nothing(track.skeleton, options)


def merge_nothing(skeleton: Skeleton, options: Options) -> Plan:
    """A plan without buckets, and why."""
    candidates, refusals = select_candidates(skeleton, options)
    apart = [Refusal((c.start.name,), RefusalReason.NOT_BETTER) for c in candidates]
    return Plan(refusals=(*refusals, *apart))


def _choices(options: Options) -> list[tuple[str, Options | None]]:
    """Options of each way to bucket; None merges nothing."""
    if not _is_free(options):
        return [("as asked", options), ("none", None)]
    choices: list[tuple[str, Options | None]] = [("default", options), ("none", None)]
    choices += [(f"{cap:.0f} MB", replace(options, bucket_cap_mb=cap)) for cap in CAPS_MB]
    return choices


def _is_free(options: Options) -> bool:
    """Which bucket sizes to take is left to "auto"."""
    return options.bucketing_mode == "auto" and options.bucket_cap_mb is None


def _badness(way: Way, limits: Limits) -> tuple[int, float, int]:
    return (
        excess_bytes(way, limits),
        way.schedule.timeline.total_ms,
        -sum(len(b.members) for b in way.plan.buckets),
    )
