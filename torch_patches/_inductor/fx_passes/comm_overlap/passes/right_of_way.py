"""Right of way on a link: parameters and gradients give way to what stands on the critical path.

Collectives on one link run one after the other.  Nothing moves those of activations (tensor or expert
parallelism), so what is still in flight when one of them starts delays all compute behind it.  It starts
behind that one instead:

    kernels     mm0       mm1       mm2                    mm0   mm1       mm2
    link        [reduction 0   ][all-gather]         ->          [all-gather][reduction 0   ]

A gather gives way where the compute behind still hides it; where nothing does, compute waits for one of
the two, and both are tried (:func:`~.auto.try_ways`).  A reduction gives way once: one longer than what
lies between two such starts would not start before the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Lanes
from torch_patches._inductor.fx_passes.comm_overlap.passes.occupancy import Occupancy
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit

#: Kernels up to the other start whose memory is looked at one by one.
_NEAR_KERNELS = 50


class RightOfWay:
    """Who gives way to which start; see the module."""

    def __init__(
        self,
        track: Track,
        units: Iterable[Unit],
        feeders: Mapping[int, Set[int]],
        lanes: Lanes,
        memory: Occupancy,
        strict: bool = False,
    ) -> None:
        """
        Args:
            units: of the track; all but gathers and reductions stay where they are.
            feeders: index of a unit -> indices of reductions that it reduces further.
            lanes, memory: of the schedule, as far as it has come.
            strict: gathers give way also where nothing hides them then.
        """
        self._strict = strict
        self.is_delayed = False  # by a gather
        self._track, self._lanes, self._memory = track, lanes, memory
        self._fences = sorted(track.place[fence] for fence in track.fences)
        self._starts: dict[Link, list[tuple[int, Unit]]] = {}  # of units that stay, in order
        self._behind: dict[int, list[Unit]] = {}  # place of a start -> reductions that wait for it
        self._urgent: set[int] = set()  # reductions that start as soon as they can
        for unit in units:
            if not unit.gathers and unit.index not in track.reductions:
                self._urgent |= feeders[unit.index]
                last = max(track.place[member.start] for member in unit.members)
                self._starts.setdefault(unit.launch.link, []).append((last, unit))
        for starts in self._starts.values():
            starts.sort(key=_place)

    def reduction_waits(self, unit: Unit, place: int, limit_bytes: int) -> bool:
        """Whether one that could start in front of ``place`` waits for a start, until which memory
        must hold it; :meth:`behind` has it then."""
        if unit.index in self._urgent:
            return False
        other = self._start_in_the_way(unit, place)
        if other is None or self._segment(place) != self._segment(other):
            return False
        memory = self._memory
        over = range(memory.slot, self._track.slot[other] + 1)
        if not memory.is_room_for_long(over, limit_bytes - memory.held_bytes, _NEAR_KERNELS):
            return False
        self._urgent.add(unit.index)
        self._behind.setdefault(other, []).append(unit)
        return True

    def gather_waits(self, unit: Unit, place: int) -> int | None:
        """Place of the start behind which one that could start in front of ``place`` is hidden too, or
        goes all the same, and does not delay that start; None where there is none."""
        other = self._start_in_the_way(unit, place)
        if other is None or other >= unit.latest:
            return None
        before = self._track.compute_before
        if self._strict or before[unit.use] - before[other] >= unit.launch.ms:
            return other
        self.is_delayed = True
        return None

    def _start_in_the_way(self, unit: Unit, place: int) -> int | None:
        """Place of the next start on its link, if the unit would still be in flight then."""
        starts = self._starts.get(unit.launch.link)
        if not starts:
            return None
        following = bisect_left(starts, place, key=_place)
        if following == len(starts):
            return None
        before, lanes = self._track.compute_before, self._lanes
        other = starts[following][0]
        reached = lanes.now + before[other] - before[place]
        if following:  # the one before it may still be waited for
            last = starts[following - 1][1]
            waits = [self._track.place[wait] for member in last.members for wait in member.waits]
            waited = self._track.uses.get(last.index, min(waits, default=other))
            if place <= waited < other and last.index in lanes.flights:
                reached = max(reached, lanes.end_of(last.launch) + before[other] - before[waited])
        return other if lanes.would_end(unit.launch) > reached else None

    def _segment(self, place: int) -> int:
        return bisect_left(self._fences, place)

    def behind(self, place: int) -> Sequence[Unit]:
        """Reductions that wait for the start at this place, oldest first; asked for once."""
        return self._behind.pop(place, ())

    def all(self) -> list[Unit]:
        """Reductions that still wait, oldest first, which then no longer do."""
        units = [unit for waiting in self._behind.values() for unit in waiting]
        self._behind.clear()
        return units


def _place(start: tuple[int, Unit]) -> int:
    return start[0]
