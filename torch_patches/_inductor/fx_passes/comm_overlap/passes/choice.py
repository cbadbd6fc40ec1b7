"""Which way is applied next: the fastest that may hold the memory cap in the changed graph.

    ways that were tried                      a 9.1 ms, over the cap by little     b 9.5     c 9.8
    a is applied                              it holds the cap after all -> kept
                                              it does not -> with less memory it takes 9.6: b is next
                                                             (smaller buckets where later starts and
                                                             earlier waits are not enough)

A schedule's account of memory is careful, so one that says a little too much may well hold the cap;
the forecast of the changed graph decides.  That costs as much as many schedules, hence it must pay:
a large graph takes the risk for a gain that can be seen, a small one for any.

After a failure the graph has new nodes in the place of those that were erased.  A way is therefore
known by the indices of what it merges, which stay, and is scheduled anew; nothing is searched again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import try_ways
from torch_patches._inductor.fx_passes.comm_overlap.passes.cap_search import CapSearch
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import ModuleLabels
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_ways import (
    ModuleTries,
    next_module_way,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import (
    Way,
    badness,
    excess_bytes,
    is_small,
    reschedule,
    total_ms,
)

#: A second try has this part of the memory less, besides what the first one exceeded the cap by:
#: schedules know memory by kernels, not by nodes.
_MARGIN = 256
#: Share of the time that one more application must promise to save in a large graph; in a small one
#: it may be any.
_WORTH, _WORTH_SMALL = 5e-3, 1e-9
#: A schedule that exceeds the cap by no more than this part of it is worth a look; and so many of
#: them are looked at, in a large graph and in a small one.
_RISK_PART, _RISK_PART_SMALL = 32, 2
_MAX_RISKS, _MAX_RISKS_SMALL = 1, 3
#: Once a way holds, others are applied only if they exceed the cap by less than this part of it.
_HOPELESS_PART = 8
#: Plans that are applied before the graph is left as it was; bounds the work.
MAX_APPLIED, MAX_APPLIED_SMALL, MAX_APPLIED_MODULES = 4, 8, 14

ReadTrack = Callable[[], Track]


class Choice(Protocol):
    """Chooses ways for a graph, one after the other.

    Attributes:
        operations: counted work so far.
    """

    operations: int

    def next(self, read: ReadTrack, slowest_ms: float) -> Way | None:
        """The way to apply next that is expected to take no longer than that; None where there is
        none left.

        Args:
            read: the graph as it was given, which undoes what was applied; not called for nothing.
        """

    def fail(self, way: Way, excess_bytes: int) -> None:
        """The last way did not hold what it promised.

        Args:
            excess_bytes: by which it exceeded the memory cap; 0 where that is not why.
        """

    def faster_than(self, kept_ms: float) -> float | None:
        """What a way must take to be worth a look where one of ``kept_ms`` holds; None: nothing is."""

    def again(self, track: Track, way: Way) -> Way:
        """A way that was applied and undone, for the graph as it is now."""

    @property
    def most_applied(self) -> int:
        """Ways that may be applied."""


@dataclass(eq=False)
class _Entry:
    """A way that waits for its turn.

    Attributes:
        way: as it was scheduled last.
        limits: whose memory cap counts for it.
        lowered: it failed once, and has less memory now.
        most_bytes: peak that its schedule may have, once it failed.
        due: it is to be scheduled under its limits before it can be compared.
    """

    way: Way
    limits: Limits
    lowered: bool = False
    most_bytes: int = 0
    due: bool = False


class EstimatedChoice:
    """By what the estimates say of each; see the module and :class:`Choice`."""

    def __init__(self, options: Options, limits: Limits) -> None:
        self._options, self._limits = options, limits
        self._failed, self._kept = 0, False
        self._lowest = limits
        self._care = limits.peak_bytes  # by which the accounts of those that failed were too high
        self._entries: list[_Entry] = []
        self._last: _Entry | None = None
        self._risks = 0
        self._small = False
        self.operations = 0

    @property
    def most_applied(self) -> int:
        return MAX_APPLIED_SMALL if self._small else MAX_APPLIED

    def next(self, read: ReadTrack, slowest_ms: float) -> Way | None:
        if not self._kept and self._failed in (0, self.most_applied // 2):
            self._search(read())
        for entry in self._entries:
            if entry.due:
                entry.way, entry.due = self._fitted(read(), entry), False
        fitting = [e for e in self._entries if total_ms(e.way) <= slowest_ms]
        if self._kept:  # what hardly holds is not worth a look then
            most = self._limits.peak_bytes // _HOPELESS_PART
            fitting = [e for e in fitting if excess_bytes(e.way, self._limits) <= most]
        chosen = min(fitting, key=self._badness, default=None)
        risky = self._risky(fitting, chosen)
        if risky is not None:
            self._risks += 1
            chosen = risky
        self._last = chosen
        if chosen is None:
            return None
        self._entries.remove(chosen)
        return self.again(read(), chosen.way)

    def fail(self, way: Way, excess_bytes: int) -> None:
        entry = self._last
        assert entry is not None
        self._failed += 1
        if not excess_bytes:
            return
        planned = way.schedule.peak_bytes - self._limits.peak_bytes
        self._care = min(self._care, max(planned - excess_bytes, 0))
        limits = replace(way.limits, peak_bytes=_lowered_bytes(way, excess_bytes))
        if limits.peak_bytes < self._lowest.peak_bytes:
            self._lowest = limits
        if not entry.lowered:
            most = way.schedule.peak_bytes - excess_bytes
            self._entries.append(_Entry(way, limits, lowered=True, most_bytes=most, due=True))

    def faster_than(self, kept_ms: float) -> float | None:
        self._kept = True
        return kept_ms * (1 - self._worth) if self._small else None

    def again(self, track: Track, way: Way) -> Way:
        return way if track is way.track else self._scheduled(track, way, way.limits)

    def _search(self, track: Track) -> None:
        """At first, and once more with the least memory that a second try had."""
        self._small = is_small(track)
        ways = try_ways(track, self._options, self._lowest)
        self.operations += sum(w.schedule.operations + w.plan.operations for w in ways)
        self._entries = [_Entry(way, self._lowest) for way in ways]

    def _scheduled(self, track: Track, way: Way, limits: Limits) -> Way:
        found = reschedule(track, _on(track, way), limits)
        self.operations += found.schedule.operations
        return found

    def _fitted(self, track: Track, entry: _Entry) -> Way:
        """With less memory: later starts and earlier waits, and smaller buckets where that is not
        enough."""
        excess = entry.way.schedule.peak_bytes - entry.most_bytes
        found = self._scheduled(track, entry.way, entry.limits)
        if found.sizes is None or found.schedule.peak_bytes <= entry.most_bytes:
            return found
        limits = replace(self._limits, peak_bytes=self._limits.peak_bytes - excess)
        search = CapSearch(track, self._options, limits)
        smaller = search.shrunk(found, entry.most_bytes)
        self.operations += smaller.schedule.operations + smaller.plan.operations
        return smaller

    def _risky(self, fitting: Sequence[_Entry], chosen: _Entry | None) -> _Entry | None:
        """The fastest over the cap by its own account, if it is worth a look."""
        most = _MAX_RISKS_SMALL if self._small else _MAX_RISKS
        if chosen is None or self._risks >= most:
            return None
        enough = total_ms(chosen.way) * (1 - self._worth)
        worth = [e for e in fitting if total_ms(e.way) < enough and self._may_hold(e)]
        return min(worth, key=lambda e: total_ms(e.way), default=None)

    def _may_hold(self, entry: _Entry) -> bool:
        """It exceeds its cap by little, and by no more than others were too careful by."""
        excess = excess_bytes(entry.way, self._limits)
        part = _RISK_PART_SMALL if self._small else _RISK_PART
        return excess <= min(self._limits.peak_bytes // part, self._care)

    @property
    def _worth(self) -> float:
        return _WORTH_SMALL if self._small else _WORTH

    def _badness(self, entry: _Entry) -> tuple[int, float, int]:
        return badness(entry.way, entry.limits)


class ModuleChoice:
    """As the user's modules are, and less where that does not hold; see :class:`Choice`."""

    def __init__(self, options: Options, limits: Limits, labels: ModuleLabels) -> None:
        self._options, self._limits, self._labels = options, limits, labels
        self._given_up: set[str] = set()
        self._lowered: dict[str, int] = {}
        self.operations = 0

    @property
    def most_applied(self) -> int:
        return MAX_APPLIED_MODULES

    def next(self, read: ReadTrack, slowest_ms: float) -> Way | None:
        track = read()
        tries = ModuleTries(self._given_up, self._lowered, slowest_ms)
        way, spent = next_module_way(track, self._options, self._limits, self._labels, tries)
        self.operations += spent
        return way

    def fail(self, way: Way, excess_bytes: int) -> None:
        if excess_bytes and way.name not in self._lowered:
            self._lowered[way.name] = _lowered_bytes(way, excess_bytes)
        else:
            self._given_up.add(way.name)

    def faster_than(self, kept_ms: float) -> float | None:
        """Nothing: the first that holds is nearest to what was asked for."""
        return None

    def again(self, track: Track, way: Way) -> Way:
        return way


def _lowered_bytes(way: Way, excess_bytes: int) -> int:
    """What the first try thought that it needed, less what it exceeded the cap by."""
    planned = min(way.schedule.peak_bytes, way.limits.peak_bytes)
    return planned - excess_bytes - planned // _MARGIN


def _on(track: Track, way: Way) -> Way:
    """The way with the collectives of this track in the place of those with the same index."""
    now = {collective.index: collective for collective in track.skeleton.collectives}
    buckets = tuple(
        replace(bucket, members=tuple(now[member.index] for member in bucket.members))
        for bucket in way.plan.buckets
    )
    return replace(way, plan=replace(way.plan, buckets=buckets, moves=()))
