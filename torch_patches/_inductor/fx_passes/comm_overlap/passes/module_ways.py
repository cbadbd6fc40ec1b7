"""Ways to bucket and schedule where modules decide."""

from __future__ import annotations

from collections.abc import Sequence

from torch_patches._inductor.fx_passes.comm_overlap.passes.block_timing import (
    find_hiders,
    time_blocks,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_buckets import (
    plan_module_buckets,
    split_for_memory,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import ModuleLabels
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.timing import Timing
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import (
    ChooseTiming,
    Way,
    excess_bytes,
    schedule_way,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Options

#: Buckets are made in parts if that brings the run below this share of its time.
_WORTH_PARTS = 0.999


def module_ways(track: Track, options: Options, limits: Limits, labels: ModuleLabels) -> list[Way]:
    """The buckets of the modules, placed as asked for, in parts where memory kept a whole one from
    starting in time and that pays; then without prefetch and deferral, for where the first does not
    hold what it must.

    With ``enable_overlap_scheduling`` the estimates place them, else the order of the modules.
    """
    merger = LinearMerger(track, limits.in_flight_bytes)
    buckets = plan_module_buckets(track.skeleton, merger, labels, options)
    hiders = find_hiders(track, options)

    def by_modules(prefetch: int, deferral: int) -> ChooseTiming:
        def choose(units: Sequence[Unit]) -> Timing:
            return time_blocks(track, units, buckets.visit_of, prefetch, deferral, hiders)

        return choose

    asked = by_modules(options.module_prefetch_depth, options.module_deferral_depth)
    choose = asked if options.places_by_modules else None
    ways = [schedule_way("as asked", buckets.plan, track, limits, choose)]
    short = ways[0].schedule.short
    if short:
        plan = split_for_memory(buckets.plan, track.gathers, short)
        ways.append(schedule_way("as asked, in parts", plan, track, limits, choose))
    # Parts cost launches: they must pay.
    if len(ways) == 2 and _total_ms(ways[1]) < _WORTH_PARTS * _total_ms(ways[0]):
        ways.reverse()
    ways.append(schedule_way("in place", buckets.plan, track, limits, by_modules(0, 0)))
    return sorted(ways, key=lambda way: excess_bytes(way, limits) > 0)


def _total_ms(way: Way) -> float:
    return way.schedule.timeline.total_ms
