"""Sizes of buckets by the dynamic program (``partition.py``), from what one schedule has shown.

    a way with its timeline -> the clock: compute, and what it stands still for besides this key
                            -> other traffic on the key's link
    a key's collectives     -> a row, small ones together -> cut -> bytes of the bucket that begins there

What a cut is worth is a model of the schedule, not the schedule: the result is a candidate like
others, which the schedule judges.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import choose_form
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.caps import BucketCaps
from torch_patches._inductor.fx_passes.comm_overlap.passes.partition import (
    Load,
    after_gathers,
    after_reductions,
    cut,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.replicas import scatters_of_replicas
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import FIRST_BUCKET_BYTES
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import copy_costs
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import Way
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BucketKey,
    Collective,
    CollectiveKind,
    MergeForm,
)

#: Small collectives stand together until they make up this part of a bucket, but for so many at each
#: end of a row, where sizes matter most.
_GRAINS, _FINE_ENDS = 12, 8
#: Buckets that are in memory at a time.
_TOGETHER = 2
#: Steps of the program for each collective, beyond which sizes are left to the greedy.
_MAX_STEPS = 200


class _Grain(NamedTuple):
    """Collectives next to each other in a row that are not cut apart; or a bucket of such.

    Args:
        begin, end: of them in the row.
        size_bytes: of all.
        ready, due: places between which all may start: gathers; where the last one is ready, twice:
            reductions.
    """

    begin: int
    end: int
    size_bytes: int
    ready: int
    due: int


class DynamicSizes:
    """Sizes for one graph.

    Args:
        seen: a way to go by.
    """

    def __init__(self, track: Track, options: Options, limits: Limits, seen: Way) -> None:
        self.track, self.options, self.limits, self.seen = track, options, limits, seen
        collectives = track.skeleton.collectives
        scatter_of = scatters_of_replicas(collectives)
        self.replicas: dict[int, list[Collective]] = {}
        for collective in collectives:
            if collective.index in scatter_of:
                self.replicas.setdefault(scatter_of[collective.index], []).append(collective)
        self._rows: dict[tuple[BucketKey, bool], list[Collective]] = {}
        for c in select_candidates(track.skeleton, options)[0]:
            known = c.index in track.gathers or c.index in track.reductions
            if c.key is not None and c.index not in scatter_of and known:
                self._rows.setdefault((c.key, c.backward), []).append(c)
        self.operations = 0

    def by_first(self, caps: BucketCaps) -> dict[int, int]:
        """Index of the first collective of each bucket -> its bytes; none of a key that takes too
        much work."""
        found: dict[int, int] = {}
        for (key, _), row in self._rows.items():
            if len(row) > 1:
                found.update(_Row(self, key, row, caps).sizes())
        return found


class _Clock:
    """When a run comes to a place, and what the link of one row carries besides.

    Args:
        seen: the run.
        row: collectives whose own part in both is left out.
    """

    def __init__(self, track: Track, seen: Way, row: Sequence[Collective]) -> None:
        self._track = track
        self._known: dict[int, float] = {}
        timeline = seen.schedule.timeline
        moved = {move.node: move.place for move in seen.schedule.moves}
        last = {b.members[0].index: b.members[-1] for b in seen.plan.buckets}
        link, key, own = track.model.link(row[0]), row[0].key, row[0].backward
        stood: list[tuple[int, float]] = []
        traffic: list[tuple[int, float]] = []
        for span in timeline.spans:
            collective = span.collective
            if (collective.key, collective.backward) == (key, own):
                continue
            first_wait = collective.waits[0] if collective.waits else collective.start
            waited = moved.get(first_wait, track.place[first_wait])
            stood.append((waited, span.exposed_ms))
            if track.model.link(collective) is link:
                start = last.get(collective.index, collective).start
                gather = track.gathers.get(collective.index)
                place = waited if gather is not None else track.place[start]
                traffic.append((place, span.end_ms - span.start_ms))
        self._stood, self._traffic = _Sums(stood), _Sums(traffic)
        busy_ms = timeline.total_ms - timeline.exposed_ms
        self._stretch = max(busy_ms / timeline.compute_ms, 1.0) if timeline.compute_ms else 1.0

    def ms(self, place: int) -> float:
        """Time in front of a place, without what stands still for the row itself."""
        found = self._known.get(place)
        if found is None:
            compute = self._track.compute_before[place] * self._stretch
            found = self._known[place] = compute + self._stood.in_front_of(place)
        return found

    def traffic_ms(self, one: int, other: int) -> float:
        """Between two places; 0 if they are the other way round."""
        if one >= other:
            return 0.0
        return self._traffic.in_front_of(other) - self._traffic.in_front_of(one)


class _Sums:
    """Sums of what comes in front of a place."""

    def __init__(self, events: list[tuple[int, float]]) -> None:
        events.sort()
        self._places = [place for place, _ in events]
        self._sums = list(accumulate((ms for _, ms in events), initial=0.0))

    def in_front_of(self, place: int) -> float:
        return self._sums[bisect_left(self._places, place)] if self._places else 0.0


class _Row:
    """The collectives of one key and phase, in graph order."""

    def __init__(
        self, sizes: DynamicSizes, key: BucketKey, row: Sequence[Collective], caps: BucketCaps
    ) -> None:
        self._sizes, self._key, self._row, self._caps = sizes, key, row, caps
        self._track = sizes.track
        self._clock = _Clock(sizes.track, sizes.seen, row)
        self._slower = 1 - 1 / sizes.track.model.interference.compute_slowdown
        form = MergeForm.COPY if key in caps.copied else choose_form(sizes.options, key)
        self._is_copied = form is MergeForm.COPY
        self._is_gather = key.kind is CollectiveKind.ALL_GATHER
        self._starts_small = key.kind is CollectiveKind.ALL_REDUCE
        flight = sizes.limits.in_flight_bytes
        self._most_bytes = min(caps.by_key[key], caps.by_key[key] if flight is None else flight)
        self._ms: dict[int, float] = {}  # of a bucket, by bytes
        self._opens: dict[int, int] = {}  # first place where a gather may start, by its last one
        self._grains = self._into_grains()
        self._open: _Grain | None = None  # the bucket that was asked for last

    def sizes(self) -> dict[int, int]:
        """See :meth:`DynamicSizes.by_first`."""
        step = after_gathers if self._is_gather else after_reductions
        found = cut(len(self._grains), self._load, step, _MAX_STEPS * len(self._row))
        if found is None:
            return {}
        self._sizes.operations += found.steps
        sizes: dict[int, int] = {}
        begin = 0
        for end in found.ends:
            grains = self._grains[begin:end]
            first = self._row[grains[0].begin]
            sizes[first.index] = sum(grain.size_bytes for grain in grains)
            begin = end
        return sizes

    def _into_grains(self) -> list[_Grain]:
        grain_bytes = self._caps.by_key[self._key] // _GRAINS
        found: list[_Grain] = []
        for number in range(len(self._row)):
            single = self._grain(number)
            if _FINE_ENDS < number < len(self._row) - _FINE_ENDS:
                joined = self._joined(found[-1], single)
                if joined is not None and joined.size_bytes <= grain_bytes:
                    found[-1] = joined
                    continue
            found.append(single)
        return found

    def _grain(self, number: int) -> _Grain:
        collective = self._row[number]
        gather = self._track.gathers.get(collective.index)
        if gather is None:
            place = self._track.place[collective.start]
            return _Grain(number, number + 1, collective.size_bytes, place, place)
        return _Grain(number, number + 1, collective.size_bytes, gather.earliest, gather.latest)

    def _joined(self, one: _Grain, other: _Grain) -> _Grain | None:
        """Both in one bucket; None where that may not be."""
        first, last = self._row[one.begin], self._row[other.end - 1]
        size = one.size_bytes + other.size_bytes
        span = self._sizes.options.max_topo_span
        if size > self._cap(first, other):
            return None
        if span is not None and last.position - first.position > span:
            return None
        if first.segment != last.segment or first.wait_segment != last.wait_segment:
            return None
        ready = max(one.ready, other.ready)
        due = min(one.due, other.due) if self._is_gather else ready
        return None if due < ready else _Grain(one.begin, other.end, size, ready, due)

    def _cap(self, first: Collective, last: _Grain) -> int:
        """Bytes from ``first`` on: of several buckets, as one is in flight when the next one starts."""
        free = self._caps.by_first.get(first.index, sys.maxsize)
        if not self._is_gather:
            fixed = self._track.fixed_bytes[self._track.slot[last.ready]]
            free = min(free, self._sizes.limits.peak_bytes - fixed)
        return min(self._most_bytes, free // _TOGETHER)

    def _load(self, first: int, end: int) -> Load | None:
        """Args: as ``cut`` has them, a bucket one grain longer each time."""
        if end == first + 1:
            self._open = self._grains[first]
        elif self._open is not None:
            self._open = self._joined(self._open, self._grains[end - 1])
        bucket = self._open
        if bucket is None:
            return None
        small = self._starts_small and first == 0 and end > 1
        if small and bucket.size_bytes > FIRST_BUCKET_BYTES:
            return None
        if self._is_gather:
            return self._gather_load(bucket, end)
        return self._reduction_load(bucket, first)

    def _gather_load(self, bucket: _Grain, end: int) -> Load:
        clock = self._clock
        after = self._grains[end].due if end < len(self._grains) else bucket.due
        inside, outside = self._copies(bucket)
        ms = self._link_ms(bucket)
        return Load(
            ms=ms,
            ready_ms=clock.ms(max(bucket.ready, self._opening(bucket.due))),
            due_ms=clock.ms(bucket.due),
            after_ms=clock.traffic_ms(bucket.due, after),
            copy_in_ms=inside,
            copy_out_ms=outside,
            cost_ms=self._slower * ms,
        )

    def _opening(self, due: int) -> int:
        """First place in front of which a gather may start that must start in front of ``due``."""
        bound, slot = self._sizes.limits.prefetch_kernels, self._track.slot
        if bound is None:
            return 0
        if due not in self._opens:
            self._opens[due] = bisect_left(slot, slot[due] - bound)
        return self._opens[due]

    def _reduction_load(self, bucket: _Grain, first: int) -> Load:
        clock = self._clock
        before = self._grains[first - 1].ready if first else bucket.ready
        inside, outside = self._copies(bucket)
        lead, ms, tail = self._chain(bucket)
        return Load(
            ms=ms,
            ready_ms=clock.ms(bucket.ready),
            before_ms=clock.traffic_ms(before, bucket.ready),
            lead_ms=lead,
            tail_ms=tail,
            copy_in_ms=inside,
            copy_out_ms=outside,
            cost_ms=self._slower * ms,
        )

    def _chain(self, bucket: _Grain) -> tuple[float, float, float]:
        """In front of the slower link, on it, and behind it: of reductions over replicas as well."""
        own = self._link_ms(bucket)
        if not self._sizes.replicas:
            return 0.0, own, 0.0
        members = self._row[bucket.begin : bucket.end]
        replicas = [r for m in members for r in self._sizes.replicas.get(m.index, ())]
        if not replicas:
            return 0.0, own, 0.0
        model = self._track.model
        theirs = model.collective_ms(replicas[0], sum(r.size_bytes for r in replicas))
        if model.link(replicas[0]) is model.link(members[0]):
            return 0.0, own + theirs, 0.0
        behind = replicas[0].feeder == members[0].index
        one, two = (own, theirs) if behind else (theirs, own)
        return (one, two, 0.0) if two > one else (0.0, one, two)

    def _link_ms(self, bucket: _Grain) -> float:
        size = bucket.size_bytes
        if size not in self._ms:
            self._ms[size] = self._track.model.collective_ms(self._row[bucket.begin], size)
        return self._ms[size]

    def _copies(self, bucket: _Grain) -> tuple[float, float]:
        if not self._is_copied or bucket.end == bucket.begin + 1:
            return 0.0, 0.0
        members = self._row[bucket.begin : bucket.end]
        inside, outside = copy_costs(members, self._track.model.device)
        return inside.ms, outside.ms
