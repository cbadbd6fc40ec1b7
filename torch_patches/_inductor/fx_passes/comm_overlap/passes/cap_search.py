"""Finds the sizes of buckets for "auto": a walk from the best of a few, while it gets better.

    default, 100 MB, 400 MB, ... -> the best -> copied, where the host is what limits?
                                                twice as large? half?
                                                only gathers? only reductions? only one key?
                                                smaller at the ends?
                                             -> the best

Each step is one plan and one schedule, both near-linear, and there are ``max_schedules`` at most.
What decides is the estimated time, and the memory cap: both are the same on all ranks, and keys are
known by the order in which they appear, since names of groups differ between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import MIB
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.bucket_sizes import DynamicSizes
from torch_patches._inductor.fx_passes.comm_overlap.passes.caps import (
    BucketCaps,
    fitting_bytes,
    tapering_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
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
    reschedule,
    schedule_way,
    total_ms,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BucketKey,
    CollectiveKind,
    Plan,
)

#: MB that buckets may hold; the search goes from one to the next.
SMALLEST_MB, LARGEST_MB = 25, 1600
#: MB of gathers and of reductions, which are of a wider dtype, from which it sets out; besides the
#: default ones.
_SEEDS_MB = ((100, 100), (400, 400), (400, 800))
#: A second schedule of a plan over the memory cap aims lower by the excess and this part of the cap.
_MARGIN = 1024
#: The host limits a run if it issues its last work behind this share of it.
_HOST_SHARE = 0.9


@dataclass(frozen=True)
class Sizes:
    """Sizes of the buckets of one plan.

    Args:
        caps: bytes by key, keys in order of appearance.
        dynamic: the dynamic program decides where buckets end, within these sizes.
        tapered: buckets are smaller at the ends of the graph, where no compute hides them.
        copied: places of the keys whose buckets are copied together.  The host issues each member of
            a zero-copy bucket, and one collective of a copied one.
    """

    caps: tuple[int, ...]
    tapered: bool = False
    dynamic: bool = False
    copied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Move:
    """A step from some sizes to others.

    Args:
        places: of the keys whose buckets become ``numerator / denominator`` times as large.
        tapers, copies: turns ``tapered`` over, or ``copied`` for ``places``.
        cuts: leaves it to the dynamic program where buckets end.
        widens: to the largest size.
    """

    places: tuple[int, ...] = ()
    numerator: int = 1
    denominator: int = 1
    tapers: bool = False
    copies: bool = False
    cuts: bool = False
    widens: bool = False

    def of(self, sizes: Sizes) -> Sizes | None:
        """Where it leads to; None beyond the bounds."""
        if self.copies:
            return replace(sizes, copied=sizes.copied ^ frozenset(self.places))
        if self.cuts:
            whole = (LARGEST_MB * MIB,) * len(sizes.caps) if self.widens else sizes.caps
            return (
                None if sizes.dynamic else replace(sizes, caps=whole, dynamic=True, tapered=False)
            )
        if self.tapers and sizes.dynamic:
            return None
        caps = list(sizes.caps)
        for place in self.places:
            caps[place] = caps[place] * self.numerator // self.denominator
            if not SMALLEST_MB * MIB <= caps[place] <= LARGEST_MB * MIB:
                return None
        return replace(sizes, caps=tuple(caps), tapered=sizes.tapered != self.tapers)


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
        self._tried: dict[Sizes, Way] = {}
        self._ways: dict[tuple[tuple[object, ...], ...], Way] = {}  # by form and members of buckets
        self._schedules = 0
        self._dynamic: DynamicSizes | None = None  # once there is a way to go by

    def ways(self) -> list[Way]:
        """All ways that were tried; none where nothing can be merged."""
        if self._largest:
            self._walk()
        return list(self._ways.values())

    def _walk(self) -> None:
        best = min(self._seeds()[: self._options.max_schedules], key=self._badness)
        self._dynamic = DynamicSizes(self._track, self._options, self._limits, self._try(best))
        moves = self._moves()
        walking = True
        while walking:
            walking = False
            for move in moves:
                if move.copies and not self._is_host_bound(best):
                    continue
                further = move.of(best)
                while further is not None and self._can_try(further):
                    if not self._badness(further) < self._badness(best):
                        break
                    best, further, walking = further, move.of(further), True
                if self._is_settled(best):
                    return

    def _is_settled(self, sizes: Sizes) -> bool:
        """The dynamic program has chosen from all sizes, and memory allows it."""
        chosen = sizes.dynamic and self._is_one_group
        return chosen and not excess_bytes(self._try(sizes), self._limits)

    def _is_host_bound(self, sizes: Sizes) -> bool:
        timeline = self._try(sizes).schedule.timeline
        return timeline.host_ms > _HOST_SHARE * timeline.total_ms

    def _can_try(self, sizes: Sizes) -> bool:
        return sizes in self._tried or self._schedules < self._options.max_schedules

    def _badness(self, sizes: Sizes) -> tuple[int, float, int]:
        return badness(self._try(sizes), self._limits)

    # -- sizes -------------------------------------------------------------------------------------

    def _seeds(self) -> list[Sizes]:
        usual = tuple(cap_bytes(None, 0, key, most) for key, most in self._largest.items())
        return [Sizes(usual), *(Sizes(self._by_kind(*mb)) for mb in _SEEDS_MB)]

    def _by_kind(self, gather_mb: int, reduction_mb: int) -> tuple[int, ...]:
        """The same for all gathers, and for all reductions."""
        return tuple((gather_mb if g else reduction_mb) * MIB for g in self._is_gather)

    def _moves(self) -> list[_Move]:
        """Those that change much come first; the form before sizes, which depend on it."""
        every = tuple(range(len(self._is_gather)))
        kinds = [tuple(p for p in every if self._is_gather[p] is kind) for kind in (False, True)]
        groups = dict.fromkeys((every, *kinds, *((place,) for place in every)))
        sized = [_Move(p, *by) for p in groups if p for by in ((2, 1), (1, 2))]
        ends = [_Move(tapers=True), _Move(cuts=True)]
        copies, wide = self._copying([every, *kinds]), _Move(cuts=True, widens=True)
        if self._is_one_group:
            return [*copies, wide, *sized, *ends]
        return [*copies, *sized, *ends, wide]

    def _copying(self, kinds: Sequence[tuple[int, ...]]) -> list[_Move]:
        """Where the form is left to the pass: keys that have both."""
        if self._options.bucket_mode is not None:
            return []
        both = frozenset(place for place, key in enumerate(self._largest) if not key.needs_copies)
        groups = dict.fromkeys(tuple(p for p in places if p in both) for places in kinds)
        return [_Move(places, copies=True) for places in groups if places]

    # -- plans -------------------------------------------------------------------------------------

    def _try(self, sizes: Sizes) -> Way:
        if sizes not in self._tried:
            plan = self._plan(sizes)
            made = tuple((b.form, *(m.index for m in b.members)) for b in plan.buckets)
            if made not in self._ways:
                self._ways[made] = self._schedule(self._name(sizes), plan)
            self._tried[sizes] = self._ways[made]
        return self._tried[sizes]

    def _plan(self, sizes: Sizes) -> Plan:
        by_key = dict(zip(self._largest, sizes.caps, strict=True))
        by_first = dict(self._fitting)
        keys = list(self._largest)
        copied = frozenset(keys[place] for place in sizes.copied)
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
        return found + (", tapered" if sizes.tapered else "") + dynamic + copied

    def _sizes_by_kind(self, sizes: Sizes) -> str:
        by_kind: dict[str, list[str]] = {}
        for key, cap in zip(self._largest, sizes.caps, strict=True):
            by_kind.setdefault(key.kind.value, []).append(str(cap // MIB))
        return ", ".join(f"{kind} {'/'.join(caps)} MB" for kind, caps in by_kind.items())
