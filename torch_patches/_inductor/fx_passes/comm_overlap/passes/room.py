"""Live bytes while buckets grow: ``Room.refusal`` says whether a merge exceeds the memory cap.

Bytes are counted by slot (see ``track.py``): what no schedule moves, plus what each collective
keeps alive:

    gather      its result (and a payload made for it) from its start to the member's use
    reduction   its payload from where that is made to the wait
    copies      a bucket beside its payloads where they are copied in, beside its results where they
                are copied out; the copy that a coalesced all-reduce sends

Merging a gather into an earlier start, or a reduction into a later wait, makes these longer.  Only
slots in which something grows are looked at, so that an input over the cap stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.passes.berths import (
    Berth,
    ranks_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    RefusalReason,
)


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What is known besides the graph's dependencies.

    Args:
        track: the graph's compute and memory.
        limits: caps that merging must keep.
        places: of starts and waits that a schedule has moved, in the order in which they stand
            where they share a place; others are where the graph has them.
        waits_stay: gathers are waited for no later than now, as ``plan_schedule`` has it.
    """

    track: Track
    limits: Limits
    places: Mapping[fx.Node, int] = field(default_factory=dict)
    waits_stay: bool = False


@dataclass(frozen=True)
class _Change:
    """Bytes more (or less) in the slots from ``first`` on, in front of ``behind``."""

    first: int
    behind: int
    size_bytes: int


class Room:
    """Bytes by slot under the merges accepted so far."""

    def __init__(self, track: Track, limits: Limits) -> None:
        self.track, self.limits = track, limits
        self.operations = 0
        self._live = list(track.fixed_bytes)
        self._in_flight = [0] * track.slots
        for index, reduction in track.reductions.items():
            slot = track.slot[track.place[reduction.start]]
            own = track.start_bytes[index] - reduction.size_bytes
            self._live[slot] = max(self._live[slot], own)

    def occupy(self, collectives: Sequence[Collective], berths: Sequence[Berth]) -> None:
        """Counts collectives where they stand by themselves."""
        for collective, berth in zip(collectives, berths, strict=True):
            if collective.waits:
                flight = _Change(self._slot(berth.start), self._slot(berth.wait), berth.size_bytes)
                self._add(self._in_flight, flight)
            gather = self.track.gathers.get(collective.index)
            if gather is not None:
                first, use = self._slot(berth.start), self._slot(gather.use)
                self._add(self._live, _Change(first, use, berth.flight_bytes))
            elif collective.index in self.track.reductions:
                first = self._slot(self.track.place[collective.start])
                behind = self._slot(berth.wait) + 1
                self._add(self._live, _Change(first, behind, berth.size_bytes))

    def refusal(
        self, member: Collective, one: Berth, two: Berth, new: Berth, copying: bool
    ) -> RefusalReason | None:
        """Makes one berth of two, or says why not and changes nothing.

        Args:
            member: of either.
            copying: the bucket is copied together.

        Linear in the slots that a start or a wait moves over.
        """
        bound = self.limits.prefetch_kernels
        bounded = member.kind is CollectiveKind.ALL_GATHER and bound is not None
        if bounded and self._ahead(new) > max(bound or 0, self._ahead(one), self._ahead(two)):
            return RefusalReason.PREFETCH
        cap = self.limits.in_flight_bytes
        if cap is not None and new.size_bytes > cap:
            return RefusalReason.MEMORY  # all of a bucket is in flight at once
        live = list(self._live_changes(member, (one, two), new, copying))
        flight = list(self._flight_changes((one, two), new))
        self._apply(live, flight, 1)
        fits = _fits(self._live, live, self.limits.peak_bytes) and all(
            self._live[slot] + more <= self.limits.peak_bytes
            for slot, more in self._copies(member, new, copying)
        )
        if fits and (cap is None or _fits(self._in_flight, flight, cap)):
            return None
        self._apply(live, flight, -1)
        return RefusalReason.MEMORY

    def _apply(self, live: Sequence[_Change], flight: Sequence[_Change], sign: int) -> None:
        for change in live:
            self._add(self._live, change, sign)
        for change in flight:
            self._add(self._in_flight, change, sign)

    def _live_changes(
        self, member: Collective, olds: Sequence[Berth], new: Berth, copying: bool
    ) -> Iterator[_Change]:
        for old in olds:
            if member.kind is CollectiveKind.ALL_GATHER:
                yield _shift(self._slot(new.start), self._slot(old.start), old.flight_bytes)
                ends = self._slot(old.wait), self._slot(max(old.wait, new.wait))
                yield _Change(*ends, old.flight_bytes - old.size_bytes)  # held until the wait
            else:
                yield _shift(self._slot(old.wait) + 1, self._slot(new.wait) + 1, old.size_bytes)
            if copying and old.members > 1:
                yield self._copy(old, -1)
        if copying:
            yield self._copy(new, 1)

    def _copy(self, berth: Berth, sign: int) -> _Change:
        first, behind = self._slot(berth.start), self._slot(berth.wait) + 1
        return _Change(first, behind, sign * berth.copied_bytes)

    def _flight_changes(self, olds: Sequence[Berth], new: Berth) -> Iterator[_Change]:
        for old in olds:
            yield _shift(self._slot(new.start), self._slot(old.start), old.size_bytes)
            yield _shift(self._slot(old.wait), self._slot(new.wait), old.size_bytes)

    def _copies(self, member: Collective, new: Berth, copying: bool) -> Iterator[tuple[int, int]]:
        """(slot, bytes more) that live for one slot: looked at, not kept."""
        start, wait, size = self._slot(new.start), self._slot(new.wait), new.size_bytes
        ranks = ranks_of(member)
        if member.kind is CollectiveKind.ALL_REDUCE:
            yield start, size  # the copy into the bucket, or the one that is sent
        elif copying:
            yield start, size // ranks if member.kind is CollectiveKind.ALL_GATHER else size
        if copying:
            yield wait, size // ranks if member.kind is CollectiveKind.REDUCE_SCATTER else size

    def _ahead(self, berth: Berth) -> int:
        return self._slot(berth.wait) - self._slot(berth.start)

    def _slot(self, place: int) -> int:
        return self.track.slot[min(place, len(self.track.slot) - 1)]

    def _add(self, by_slot: list[int], change: _Change, sign: int = 1) -> None:
        self.operations += change.behind - change.first
        for slot in range(change.first, change.behind):
            by_slot[slot] += sign * change.size_bytes


def _fits(by_slot: Sequence[int], changes: Sequence[_Change], cap: int) -> bool:
    """Whether nothing exceeds ``cap`` where it grew."""
    return all(
        by_slot[slot] <= cap
        for change in changes
        if change.size_bytes > 0
        for slot in range(change.first, change.behind)
    )


def _shift(first: int, behind: int, size_bytes: int) -> _Change:
    """More bytes from ``first`` to ``behind``; less, where these are the other way round."""
    if first <= behind:
        return _Change(first, behind, size_bytes)
    return _Change(behind, first, -size_bytes)
