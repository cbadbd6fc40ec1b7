"""Ways to bucket and schedule where modules decide.

What was asked for comes first; the others do less, for where it exceeds the memory cap or is slower
than the input:

    as asked              a bucket for each module; the next one's gather starts under this one
    as asked, copied      the same with copying buckets, where bucket_mode leaves the choice: where the
                          host, which issues each member of a coalesced launch, is what limits
    as asked, in parts    the same, but gathers that memory keeps from starting in time are split
    halves                buckets of half the bytes
    in place              buckets of modules, no prefetch and no deferral
    quarters, eighths     buckets of fewer bytes, likewise
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import MIB
from torch_patches._inductor.fx_passes.comm_overlap.options import BucketCap, Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.block_timing import (
    find_hiders,
    time_blocks,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_buckets import (
    ModuleBuckets,
    find_visits,
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
from torch_patches._inductor.fx_passes.comm_overlap.plan import MergeForm

#: Buckets are made in parts, or copied, if that brings the run below this share of its time: more
#: launches and copies must pay, beyond what estimates can tell apart.
_WORTH = 0.999
AS_ASKED, COPIED, IN_PARTS = "as asked", "as asked, copied", "as asked, in parts"
IN_PLACE = "in place"
#: Ways that do what was asked for.
FULL_WAYS = (AS_ASKED, COPIED, IN_PARTS)
_SMALLER = {"halves": 2, "quarters": 4, "eighths": 8}
_UNMOVED = (IN_PLACE, "quarters", "eighths")
_TRIED_ANYWAY = (AS_ASKED, "halves")
#: All of them, in the order in which they are tried.
MODULE_WAYS = (AS_ASKED, "halves", IN_PLACE, "quarters", "eighths")


@dataclass(frozen=True)
class ModuleTries:
    """What is known of ways that were tried.

    Args:
        given_up: names of those that are not tried again.
        lowered_bytes: name -> memory limit of a second try.
        slowest_ms: a way that takes longer is not taken.
    """

    given_up: Set[str]
    lowered_bytes: Mapping[str, int]
    slowest_ms: float


def next_module_way(
    track: Track, options: Options, limits: Limits, labels: ModuleLabels, tries: ModuleTries
) -> tuple[Way | None, int]:
    """The first way that is not given up, keeps the memory cap by its own account and is fast enough;
    and the work of finding it.

    With ``enable_overlap_scheduling`` the estimates place the buckets, else the order of the
    modules does.
    """
    operations = 0
    beyond: Way | None = None
    for name in MODULE_WAYS:
        names = FULL_WAYS if name == AS_ASKED else (name,)
        lowered = [tries.lowered_bytes[n] for n in names if n in tries.lowered_bytes]
        own = replace(limits, peak_bytes=min([limits.peak_bytes, *lowered]))
        planner = _WayPlanner(track, options, own, labels)
        # The variants of "as asked" come before it: none is left once it is given up.
        made = list(planner.make(name)) if name not in tries.given_up else []
        operations += planner.operations
        for way in made:
            slow = way.schedule.timeline.total_ms > tries.slowest_ms
            if way.name in tries.given_up or slow:
                continue
            # Its own account is careful; what was asked for is worth a look at the changed graph.
            if name in _TRIED_ANYWAY or not excess_bytes(way, own):
                return way, operations
            beyond = beyond or way
    return beyond, operations


class _WayPlanner:
    """Plans ways under one memory limit.

    Attributes:
        operations: counted work, also of ways that are not offered.
    """

    def __init__(
        self, track: Track, options: Options, limits: Limits, labels: ModuleLabels
    ) -> None:
        self._track, self._options, self._limits, self._labels = track, options, limits, labels
        self._hiders = find_hiders(track, options)
        self.operations = 0

    def make(self, name: str) -> Iterator[Way]:
        """The way of this name, and its variants, the better first."""
        options = self._options
        prefetch, deferral = options.module_prefetch_depth, options.module_deferral_depth
        if name in _UNMOVED:
            prefetch, deferral = 0, 0
        if name in _SMALLER:
            options = self._with_smaller_cap(_SMALLER[name])
        whole = self._schedule(name, options, prefetch, deferral)
        yield from self._better(whole, options) if name == AS_ASKED else ()
        yield whole

    def _schedule(self, name: str, options: Options, prefetch: int, deferral: int) -> Way:
        merger = LinearMerger(self._track, self._limits.in_flight_bytes)
        buckets = plan_module_buckets(self._track.skeleton, merger, self._labels, options)
        placed = options.places_by_modules or name in _UNMOVED
        timing = self._by_modules(buckets, prefetch, deferral) if placed else None
        return self._counted(schedule_way(name, buckets.plan, self._track, self._limits, timing))

    def _counted(self, way: Way) -> Way:
        self.operations += way.schedule.operations + way.plan.operations
        return way

    def _better(self, whole: Way, options: Options) -> list[Way]:
        """Variants of what was asked for that are worth it, the best first."""
        variants: list[Way] = []
        if options.bucket_mode is None:
            copying = replace(options, bucket_mode=MergeForm.COPY.value)
            depths = (options.module_prefetch_depth, options.module_deferral_depth)
            variants.append(self._schedule(COPIED, copying, *depths))
        if whole.schedule.short:
            plan = split_for_memory(whole.plan, self._track.gathers, whole.schedule.short)
            timing = whole.choose_timing
            parts = schedule_way(IN_PARTS, plan, self._track, self._limits, timing)
            variants.append(self._counted(parts))
        worth = [way for way in variants if _total_ms(way) < _WORTH * _total_ms(whole)]
        return sorted(worth, key=_total_ms)

    def _with_smaller_cap(self, divisor: int) -> Options:
        """Buckets of a share of the largest gather or reduction of one run of a module."""
        collectives = self._track.skeleton.collectives
        visit_of = find_visits(collectives, self._labels.of)
        sizes: dict[tuple[object, ...], int] = {}
        for collective in collectives:
            visit = visit_of.get(collective.index)
            if visit is not None:
                key = (visit, collective.key)
                sizes[key] = sizes.get(key, 0) + collective.size_bytes
        largest = max(sizes.values(), default=0)
        share = max(largest // divisor, 1) / MIB
        return replace(self._options, bucket_cap_mb=_at_most(self._options.bucket_cap_mb, share))

    def _by_modules(self, buckets: ModuleBuckets, prefetch: int, deferral: int) -> ChooseTiming:
        def choose(units: Sequence[Unit]) -> Timing:
            return time_blocks(
                self._track, units, buckets.visit_of, prefetch, deferral, self._hiders
            )

        return choose


def _total_ms(way: Way) -> float:
    return way.schedule.timeline.total_ms


def _at_most(cap: BucketCap, mb: float) -> BucketCap:
    """The user's cap, or caps by bucket index, and no more than that."""
    if cap is None:
        return mb
    if callable(cap):
        return lambda index: min(cap(index), mb)
    return tuple(min(c, mb) for c in cap) if isinstance(cap, tuple) else min(cap, mb)
