"""Finds the sizes of buckets for "auto": a walk from the best of a few, while it gets better.

    default -> copied, where the host is what limits?  All seeds are, if that is better.
            -> the dynamic program: better, and so few launches that fewer would not help?  A large
               graph of one group is done then.
    default, 100 MB, 400 MB, ... -> the best -> copied, or not?
                                                twice as large? half?
                                                only gathers? only reductions? only one key?
                                                smaller at the ends?
                                                faster, but over the memory cap: in less memory?
                                                so near to what the links take that it is enough?
                                             -> the best

Each step is one plan and one schedule, both near-linear, and there are ``max_schedules`` at most.
What decides is the estimated time, and the memory cap: both are the same on all ranks, and keys are
known by the order in which they appear, since names of groups differ between ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import MIB
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.bucket_sizes import DynamicSizes
from torch_patches._inductor.fx_passes.comm_overlap.passes.caps import (
    BucketCaps,
    fitting_bytes,
    room_of_reductions,
    tapering_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.sizes import (
    LARGEST_MB as LARGEST_MB,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.sizes import (
    SMALLEST_MB as SMALLEST_MB,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.sizes import (
    WHOLE_ROOM,
    Move,
    Sizes,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import (
    cap_bytes,
    plan_asked,
    read_asked,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import (
    Way,
    badness,
    excess_bytes,
    is_small,
    reschedule,
    schedule_way,
    total_ms,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BucketKey,
    CollectiveKind,
    Plan,
)

#: MB of gathers and of reductions, which are of a wider dtype, from which it sets out; besides the
#: default ones.
_SEEDS_MB = ((100, 100), (400, 400), (400, 800))
#: A second schedule of a plan over the memory cap aims lower by the excess and this part of the cap.
_MARGIN = 1024
#: Steps to smaller buckets for a way that exceeded the memory cap when it was applied.
_MAX_SHRUNK = 4
#: The host limits a run if it issues its last work behind this share of it.
_HOST_SHARE = 0.9
#: Launches limit a run if their latency is more than this share of it.
_LAUNCH_SHARE = 0.02


#: A run is near what its link takes if it is longer by no more than this share of it.
_NEAR_SHARE = 0.01


#: Form and members of each bucket.
_Made = tuple[tuple[object, ...], ...]


def _made(plan: Plan) -> _Made:
    return tuple((b.form, *(m.index for m in b.members)) for b in plan.buckets)


class CapSearch:
    """One search on one graph."""

    def __init__(self, track: Track, options: Options, limits: Limits) -> None:
        self._track, self._options, self._limits = track, options, limits
        self._largest: dict[BucketKey, int] = {}
        self._asked = read_asked(track.skeleton, options)
        for candidate in self._asked.candidates:
            if candidate.key is not None:
                most = max(self._largest.get(candidate.key, 0), candidate.size_bytes)
                self._largest[candidate.key] = most
        self._is_gather = [key.kind is CollectiveKind.ALL_GATHER for key in self._largest]
        # The dynamic program plans each key alone; buckets of several groups get in each other's way.
        self._is_one_group = len({key.group for key in self._largest}) == 1
        self._fitting = fitting_bytes(track, limits)
        self._free = {**self._fitting, **room_of_reductions(track, limits)}
        self._tried: dict[Sizes, Way] = {}
        self._ways: dict[_Made, Way] = {}
        self._schedules = 0
        self._dynamic: DynamicSizes | None = None  # once there is a way to go by

    def shrunk(self, way: Way, most_bytes: int) -> Way:
        """The way, which was scheduled on the track, with buckets so small that its peak is no more
        than that; or as near as a few steps lead."""
        sizes, best = way.sizes, way
        self._dynamic = DynamicSizes(self._track, self._options, self._limits, way)
        for _ in range(_MAX_SHRUNK):
            done = best.schedule.peak_bytes <= most_bytes
            sizes = None if done or sizes is None else self._unlike(_made(best.plan), sizes)
            if sizes is None:
                break
            best = min(best, self._try(sizes), key=lambda w: w.schedule.peak_bytes)
        return best

    def ways(self) -> list[Way]:
        """All ways that were tried; none where nothing can be merged."""
        if self._largest:
            self._walk()
        return list(self._ways.values())

    def _walk(self) -> None:
        seeds = self._formed(self._seeds())
        if not is_small(self._track) and self._settles_at_once(seeds[0]):
            return
        # Lazily: each of them counts before the next one is asked about.
        best = min(filter(self._can_try, seeds), key=self._badness)
        seeds = [seed for seed in seeds if seed in self._tried]
        self._dynamic = DynamicSizes(self._track, self._options, self._limits, self._try(best))
        best = self._better(min(seeds, key=self._total_ms), best) or best
        moves = self._moves()
        walking = True
        while walking:
            walking = False
            for move in moves:
                further = self._further(move, best)
                while further is not None and (better := self._better(further, best)) is not None:
                    best, further, walking = better, self._further(move, better), True
                if self._is_settled(best) or self._is_near(best):
                    return

    def _formed(self, seeds: list[Sizes]) -> list[Sizes]:
        """All of them copied where the host limits and that makes the first one better: it can halve a
        run, and the schedules might be used up before the walk comes to it."""
        every = self._copying([tuple(range(len(self._is_gather)))])
        copied = self._further(every[0], seeds[0]) if every else None
        better = None if copied is None else self._better(copied, seeds[0])
        if better is None:
            return seeds
        # The better one may be in less memory.
        formed = [replace(seed, copied=better.copied) for seed in seeds]
        return list(dict.fromkeys((*formed, better)))

    def _settles_at_once(self, seed: Sizes) -> bool:
        """All traffic is of one group, which the dynamic program knows best, and it does better by
        what the first seed has shown.  By what another one shows it seldom does better still, but
        where launches take long: their stops look like time to it, and it makes too many."""
        if len({collective.group for collective in self._track.skeleton.collectives}) > 1:
            return False
        if self._is_host_bound(seed):  # other forms can pay: schedules are left to them
            return False
        self._dynamic = DynamicSizes(self._track, self._options, self._limits, self._try(seed))
        found = self._further(Move(cuts=True, widens=True), seed)
        better = None if found is None else self._better(found, seed)
        if (
            better is not None
            and self._is_settled(better)
            and not self._is_host_bound(better)
            and not self._is_launch_bound(better)
        ):
            return True
        # By what the best seed shows, the program may find something else for the same sizes.
        self._tried = {tried: way for tried, way in self._tried.items() if not tried.dynamic}
        return False

    def _is_settled(self, sizes: Sizes) -> bool:
        """The dynamic program has chosen from all sizes, and memory allows it."""
        chosen = sizes.dynamic and self._is_one_group
        return chosen and not self._exceeds(sizes)

    def _is_near(self, sizes: Sizes) -> bool:
        """Of a large graph, within memory, and hardly longer than the busiest link moves data: what is
        left to win is no further schedules' worth."""
        near_ms = self._moving_ms() * (1 + _NEAR_SHARE)
        is_near = not is_small(self._track) and self._total_ms(sizes) <= near_ms
        return is_near and not self._exceeds(sizes)

    def _moving_ms(self) -> float:
        """Of the busiest link, or group where links are not shared, without what launches take."""
        model, busy = self._track.model, dict[object, float]()
        shared = model.interference.link_sharing == 1.0
        for one in self._track.skeleton.collectives:
            ms = model.collective_ms(one, 2 * one.size_bytes) - model.collective_ms(one)
            lane = model.link(one) if shared else one.group
            busy[lane] = busy.get(lane, 0.0) + max(ms, 0.0)
        return max(busy.values(), default=0.0)

    def _exceeds(self, sizes: Sizes) -> int:
        """By how many bytes, the memory cap."""
        return excess_bytes(self._try(sizes), self._limits)

    def _better(self, sizes: Sizes, best: Sizes) -> Sizes | None:
        """These if they are better, or in less memory where they are faster and exceed the cap."""
        tried: Sizes | None = sizes
        in_less = replace(sizes, room=best.room) == best
        before = self._exceeds(best) if in_less else sys.maxsize
        while tried is not None and self._can_try(tried):
            if self._badness(tried) < self._badness(best):
                return tried
            excess = self._exceeds(tried)
            slower = self._total_ms(tried) >= self._total_ms(best)
            if not excess or (slower and not self._exceeds(best)):
                return None
            if excess >= before:
                return None  # it does not lie in the buckets
            before, tried = excess, self._smaller(tried)
        return None

    def _further(self, move: Move, sizes: Sizes) -> Sizes | None:
        """Where a move leads to, if it may pay."""
        if move.fits:
            return self._smaller(sizes)
        if move.copies and not self._is_host_bound(sizes):
            return None
        return move.of(sizes)

    def _smaller(self, sizes: Sizes) -> Sizes | None:
        """With so much less memory for each bucket as all together exceed the cap by, at most half,
        and less still while that makes the same buckets; None where they hold the cap, and where
        nothing is left."""
        excess = self._exceeds(sizes)
        if not excess:
            return None
        free = max(self._limits.peak_bytes - max(self._track.fixed_bytes), 0)
        room = min(max(sizes.room * free // (free + excess), sizes.room // 2), sizes.room * 7 // 8)
        return self._unlike(_made(self._plan(sizes)), replace(sizes, room=room))

    def _unlike(self, made: _Made, sizes: Sizes) -> Sizes | None:
        """These, or less memory for each bucket, that make other buckets than ``made``."""
        while sizes.room:
            if _made(self._plan(sizes)) != made:
                return sizes
            sizes = replace(sizes, room=sizes.room * 3 // 4)
        return None

    def _is_host_bound(self, sizes: Sizes) -> bool:
        timeline = self._try(sizes).schedule.timeline
        return timeline.host_ms > _HOST_SHARE * timeline.total_ms

    def _is_launch_bound(self, sizes: Sizes) -> bool:
        """What fewer launches could save is much: the part of each that does not grow with its bytes."""
        model, timeline = self._track.model, self._try(sizes).schedule.timeline
        launches_ms = 0.0
        for span in timeline.spans:
            one = span.collective
            twice_ms = model.collective_ms(one, 2 * one.size_bytes)
            launches_ms += max(2 * model.collective_ms(one) - twice_ms, 0.0)
        return launches_ms > _LAUNCH_SHARE * timeline.total_ms

    def _can_try(self, sizes: Sizes) -> bool:
        return sizes in self._tried or self._schedules < self._options.max_schedules

    def _total_ms(self, sizes: Sizes) -> float:
        return total_ms(self._try(sizes))

    def _badness(self, sizes: Sizes) -> tuple[int, float, int]:
        return badness(self._try(sizes), self._limits)

    # -- sizes -------------------------------------------------------------------------------------

    def _seeds(self) -> list[Sizes]:
        usual = tuple(cap_bytes(None, 0, key, most) for key, most in self._largest.items())
        return [Sizes(usual), *(Sizes(self._by_kind(*mb)) for mb in _SEEDS_MB)]

    def _by_kind(self, gather_mb: int, reduction_mb: int) -> tuple[int, ...]:
        """The same for all gathers, and for all reductions."""
        return tuple((gather_mb if g else reduction_mb) * MIB for g in self._is_gather)

    def _moves(self) -> list[Move]:
        """Those that change much come first; the form before sizes, which depend on it."""
        every = tuple(range(len(self._is_gather)))
        kinds = [tuple(p for p in every if self._is_gather[p] is kind) for kind in (False, True)]
        groups = dict.fromkeys((every, *kinds, *((place,) for place in every)))
        sized = [Move(p, *by) for p in groups if p for by in ((2, 1), (1, 2))]
        ends = [Move(tapers=True), Move(cuts=True)]
        copies, wide = self._copying([every, *kinds]), Move(cuts=True, widens=True)
        less = Move(fits=True)
        if self._is_one_group:
            return [*copies, wide, less, *sized, *ends]
        return [*copies, less, *sized, *ends, wide]

    def _copying(self, kinds: Sequence[tuple[int, ...]]) -> list[Move]:
        """Where the form is left to the pass: keys that have both."""
        if self._options.bucket_mode is not None:
            return []
        both = frozenset(place for place, key in enumerate(self._largest) if not key.needs_copies)
        groups = dict.fromkeys(tuple(p for p in places if p in both) for places in kinds)
        return [Move(places, copies=True) for places in groups if places]

    # -- plans -------------------------------------------------------------------------------------

    def _try(self, sizes: Sizes) -> Way:
        if sizes not in self._tried:
            plan = self._plan(sizes)
            made = _made(plan)
            if made not in self._ways:
                way = self._schedule(self._name(sizes), plan)
                self._ways[made] = replace(way, sizes=sizes)
            self._tried[sizes] = self._ways[made]
        return self._tried[sizes]

    def _plan(self, sizes: Sizes) -> Plan:
        by_key = dict(zip(self._largest, sizes.caps, strict=True))
        by_first = dict(self._fitting)
        keys = list(self._largest)
        copied = frozenset(keys[place] for place in sizes.copied)
        if sizes.room < WHOLE_ROOM:
            by_first = {i: size * sizes.room // WHOLE_ROOM for i, size in self._free.items()}
        caps = BucketCaps(by_key, by_first, copied)
        given: Mapping[int, int] = {}
        if sizes.dynamic and self._dynamic is not None:
            given = self._dynamic.by_first(caps)
        elif sizes.tapered:
            given = tapering_bytes(self._track, by_key)
        for index, size in given.items():
            by_first[index] = min(by_first.get(index, size), size)
        merger = LinearMerger(self._track, self._limits.in_flight_bytes)
        return plan_asked(self._asked, merger, self._options, caps)

    def _schedule(self, name: str, plan: Plan) -> Way:
        """The way of these buckets; where it is over the memory cap and fast, one that aims lower."""
        way = schedule_way(name, plan, self._track, self._limits)
        self._schedules += 1
        excess = excess_bytes(way, self._limits)
        holding = [w for w in self._ways.values() if not excess_bytes(w, self._limits)]
        if not excess or (holding and total_ms(way) >= min(map(total_ms, holding))):
            return way
        cap = self._limits.peak_bytes
        lower = replace(self._limits, peak_bytes=cap - excess - cap // _MARGIN)
        self._schedules += 1
        return min(way, reschedule(self._track, way, lower), key=lambda w: badness(w, self._limits))

    def _name(self, sizes: Sizes) -> str:
        """As reports have it: the same on all ranks."""
        whole = {cap // MIB for cap in sizes.caps}
        found = f"{whole.pop()} MB" if len(whole) == 1 else self._sizes_by_kind(sizes)
        dynamic = " by the dynamic program" if sizes.dynamic else ""
        keys = list(self._largest)
        kinds = dict.fromkeys(keys[place].kind.value for place in sorted(sizes.copied))
        copied = f", copied {', '.join(kinds)}" if kinds else ""
        if sizes.room < WHOLE_ROOM:
            copied += f", in {sizes.room}/{WHOLE_ROOM} of the memory"
        return found + (", tapered" if sizes.tapered else "") + dynamic + copied

    def _sizes_by_kind(self, sizes: Sizes) -> str:
        by_kind: dict[str, list[str]] = {}
        for key, cap in zip(self._largest, sizes.caps, strict=True):
            by_kind.setdefault(key.kind.value, []).append(str(cap // MIB))
        return ", ".join(f"{kind} {'/'.join(caps)} MB" for kind, caps in by_kind.items())
