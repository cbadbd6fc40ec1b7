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


def module_ways(track: Track, options: Options, limits: Limits, labels: ModuleLabels) -> list[Way]:
    """The buckets of the modules, placed as asked for; then without prefetch and deferral, for where
    the first does not hold what it must.

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
    choices = {
        "as asked": asked if options.places_by_modules else None,
        "in place": by_modules(0, 0),
    }
    ways = [
        schedule_way(name, buckets.plan, track, limits, choose) for name, choose in choices.items()
    ]
    return sorted(ways, key=lambda way: excess_bytes(way, limits) > 0)
