"""Chooses buckets and a schedule together, by what the timeline expects of each pair.

    read the track -> for each way to bucket: buckets -> schedule -> time and peak -> keep the best

Merging first and scheduling the buckets mostly finds more overlap than the other way round, where
compute that hides one collective keeps it from being merged with the next.  Where sizes are left to
"auto", a search finds them (``cap_search.py``); where the user gives them, merging after a schedule
is tried besides.  A plan that is no faster than the input, or whose peak exceeds the cap, is not
taken.  The work is at most a fixed multiple of one schedule.
"""

from __future__ import annotations

from dataclasses import replace

from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import bytes_in
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
from torch_patches._inductor.fx_passes.comm_overlap.passes.cap_search import (
    LARGEST_MB,
    SMALLEST_MB,
    CapSearch,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_greedily
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import (
    Way,
    badness,
    is_small,
    reschedule,
    schedule_way,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
)

GIB = 1 << 30

#: Least and most MB that "auto" may put in a bucket, besides the default.
CAPS_MB = (SMALLEST_MB, LARGEST_MB)


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
        asked = [
            None if gib is None else bytes_in(gib, GIB),
            None if ratio is None else bytes_in(ratio, peak_bytes),
        ]
        allowed = min(size for size in asked if size is not None)
    flight = options.max_in_flight_gb
    prefetch = options.max_compute_pre_fetch
    if prefetch is None and not options.places_by_modules:  # a module may be of any length
        prefetch = DEFAULT_PREFETCH
    return Limits(
        peak_bytes=peak_bytes + allowed,
        in_flight_bytes=None if flight is None else bytes_in(flight, GIB),
        prefetch_kernels=prefetch,
    )


def try_ways(track: Track, options: Options, limits: Limits) -> list[Way]:
    """All ways, the best one first.

    Those within the memory limit come first, then the faster ones; of equals the one with fewer
    launches.
    """
    alone = schedule_way("none", merge_nothing(track.skeleton, options), track, limits)
    ways = [alone]
    free = _is_free(options)
    if free:
        ways += CapSearch(track, options, limits).ways()
    else:
        merger = LinearMerger(track, limits.in_flight_bytes)
        asked = plan_greedily(track.skeleton, merger, options)
        ways.append(schedule_way("as asked", asked, track, limits))
    if not free or is_small(track):
        graph = track.order[0].graph
        wide = replace(options, bucket_cap_mb=float(LARGEST_MB)) if free else options
        plan = merge_after_schedule(graph, track, alone.schedule, wide, limits)
        ways.append(schedule_way("after schedule", plan, track, limits))
    best = min(ways, key=lambda way: badness(way, limits))
    if best.schedule.delays_others:
        strict = replace(limits, gathers_give_way=True)
        # First, since it is taken if it is as good.
        ways.insert(0, reschedule(track, replace(best, name=f"{best.name}, giving way"), strict))
    return sorted(ways, key=lambda way: badness(way, limits))


def merge_nothing(skeleton: Skeleton, options: Options) -> Plan:
    """A plan without buckets, and why."""
    candidates, refusals = select_candidates(skeleton, options)
    apart = [Refusal((c.start.name,), RefusalReason.NOT_BETTER) for c in candidates]
    return Plan(refusals=(*refusals, *apart))


def _is_free(options: Options) -> bool:
    """Which bucket sizes to take is left to "auto"."""
    return options.bucketing_mode == "auto" and options.bucket_cap_mb is None
