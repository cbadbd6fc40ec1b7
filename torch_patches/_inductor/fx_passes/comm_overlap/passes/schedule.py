"""When each collective starts and when it is waited for: one simulated pass over the graph.

Compute keeps its order.  Along it, starts and waits are placed as a run of the graph would want
them (the timeline's lanes tell the time):

    parameter gathers     start as late as still hides them with some margin: when the compute left
                          until their first use is no more than what their stream has to do until
                          then, and the stream would stand idle otherwise.  Wait at first use.
    gradient reductions   start where they can; wait a while after they are done, which frees their
                          buffers, at the latest at the end, and earlier where memory is short.  One
                          that another feeds starts when that is done; one that would delay others
                          on its link starts behind the next of those (:mod:`.right_of_way`).
    all others            start where they stand, since they are on the critical path; wait at first
                          use.

A start moves up only while memory stays under the cap in every slot that it moves over, at most
``prefetch_kernels`` ahead of its use, and not over a side effect.  Collectives of a bucket are
placed as one (:class:`~.units.Unit`).  Linear in the graph, times the slots that a gather spans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Lanes, Timeline
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import preparation_moves
from torch_patches._inductor.fx_passes.comm_overlap.passes.occupancy import Occupancy
from torch_patches._inductor.fx_passes.comm_overlap.passes.right_of_way import RightOfWay
from torch_patches._inductor.fx_passes.comm_overlap.passes.timing import (
    REDUCTION_MARGIN,
    Timing,
    latest_starts,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Move,
    Traffic,
)

#: Behind every time and place.
_NEVER = float("inf")
#: Kernels between the wait of another collective and its first use where nothing bounds them.
_NEAR_KERNELS = 50


@dataclass(frozen=True)
class Limits:
    """What a schedule must keep.

    Args:
        peak_bytes: live bytes that no place may exceed because of a move.
        in_flight_bytes: outputs of gathers that have started and are not used yet, and payloads of
            reductions that are not waited for yet; None for no bound.
        prefetch_kernels: kernels from the start of a gather to its first use; None for no bound.
        gathers_give_way: also those that nothing hides then (:mod:`.right_of_way`).
    """

    peak_bytes: int
    in_flight_bytes: int | None = None
    prefetch_kernels: int | None = 50
    gathers_give_way: bool = False


@dataclass(frozen=True, eq=False)
class Schedule:
    """Where everything goes, and what is expected of it.

    Args:
        moves: nodes that change their place.
        timeline: the simulated run.
        peak_bytes: most live bytes in a slot, where waits and frees are taken a slot late.
        operations: counted work.
        short: index of a unit of gathers that could not start where its timing wanted -> bytes that
            were free there until its use.
        delays_others: a gather may delay what has right of way.
    """

    moves: tuple[Move, ...]
    timeline: Timeline
    peak_bytes: int
    operations: int
    short: Mapping[int, int] = field(default_factory=dict)
    delays_others: bool = False


def plan_schedule(
    track: Track, units: Sequence[Unit], limits: Limits, timing: Timing | None = None
) -> Schedule:
    """Places every start and wait of a graph.

    Args:
        units: all collectives (:func:`~.units.make_units`); buckets of gathers must have a place
            between the inputs of all and the first use of one.
        timing: of all gathers and reductions; the limits hold all the same.
    """
    scheduler = _Scheduler(track, units, limits, timing)
    scheduler.run()
    return Schedule(
        moves=tuple(scheduler.moves),
        timeline=scheduler.lanes.finish([unit.launch for unit in units]),
        peak_bytes=scheduler.memory.peak_bytes,
        operations=scheduler.operations + scheduler.memory.operations,
        short=scheduler.short,
        delays_others=scheduler.right_of_way.is_delayed,
    )


class _Scheduler:
    """One pass; see the module."""

    def __init__(
        self, track: Track, units: Sequence[Unit], limits: Limits, timing: Timing | None
    ) -> None:
        self.track, self.limits, self.timing = track, limits, timing
        self.lanes = Lanes(track.model)
        self.moves: list[Move] = []
        self.operations = 0
        self.full: dict[int, int] = {}  # unit -> slot in front of its use that has no room for it
        self.short: dict[int, int] = {}
        self.memory = Occupancy(track)
        self.in_flight = 0
        self.segment = 0  # side effects that were passed
        self.fence_places = sorted(track.place[fence] for fence in track.fences)
        self.unit_of = {member.index: unit for unit in units for member in unit.members}
        gathers = sorted((u for u in units if u.gathers), key=self._queue_place)
        self.queue_place = {unit.index: place for place, unit in enumerate(gathers)}
        self.latest = latest_starts(track, gathers, units) if timing is None else {}
        self.opens = {unit.index: self._opens(unit) for unit in gathers}
        self.pending: dict[str, list[Unit]] = {}
        for unit in reversed(gathers):
            self.pending.setdefault(unit.group, []).append(unit)
        self.started: set[int] = set()
        self.used: set[int] = set()  # gathers that were waited for, others that will be later
        self.awaited: set[int] = set()  # others that were waited for where the input does
        self.reached: dict[int, int] = {}  # unit -> members whose starts were passed
        self.flying: list[Unit] = []
        self.done: dict[int, float] = {}  # of each that flies, when it is to be waited for
        self.first_done = _NEVER  # the least of these
        self.feeders = {unit.index: self._feeders(unit) for unit in units}
        others = units if timing is None else ()  # else somebody has chosen what the links do when
        strict = limits.gathers_give_way
        self.right_of_way = RightOfWay(track, others, self.feeders, self.lanes, self.memory, strict)
        self.fed: dict[int, list[Unit]] = {}
        for unit in units:
            for feeder in self.feeders[unit.index]:
                self.fed.setdefault(feeder, []).append(unit)
        self.late_waits: dict[int, list[Collective]] = {}  # place -> others waited for there
        self.overdue: set[int] = set()  # reached waits of units that a bucket behind them feeds

    def _queue_place(self, unit: Unit) -> tuple[float, ...]:
        """In order of use, or as a timing has them; between the side effects that none may pass.

        Of those that one kernel waits for the longest comes first: it hides more if one has room.
        """
        segment = bisect_left(self.fence_places, unit.latest)
        wanted = self.timing.starts[unit.index] if self.timing is not None else 0
        slots = self.track.slot[unit.latest], self.track.slot[unit.use]
        return segment, wanted, *slots, -unit.launch.ms, unit.latest, unit.use, unit.index

    def _opens(self, unit: Unit) -> int:
        """First place in front of which a unit of gathers may start."""
        places = [unit.earliest]
        if self.limits.prefetch_kernels is not None:
            slot = self.track.slot
            places.append(bisect_left(slot, slot[unit.use] - self.limits.prefetch_kernels))
        if self.timing is not None:
            places.append(self.timing.starts[unit.index])
        return max(places)

    def _feeders(self, unit: Unit) -> set[int]:
        """Units of reductions whose results this one reduces further."""
        if unit.members[0].traffic is not Traffic.GRADIENT:
            return set()
        feeders = (self.unit_of.get(m.feeder) for m in unit.members if m.feeder is not None)
        return {f.index for f in feeders if f is not None and self._is_reduction(f)}

    def _is_reduction(self, unit: Unit) -> bool:
        return unit.index in self.track.reductions

    def run(self) -> None:
        track, lanes = self.track, self.lanes
        order, slot = track.order, track.slot
        memory, late_waits, flying = self.memory, self.late_waits, self.flying
        for place, event in track.events:
            if memory.slot < slot[place]:
                memory.advance(slot[place])
            if late_waits:
                for collective in late_waits.pop(place, ()):
                    self._wait_late(place, collective)
            if isinstance(event, ComputeCost):
                if event.launches:
                    self._enter_slot(place, event.ms)
                lanes.compute(order[place], event)
                if flying and event.launches:
                    # What is fused with the next kernel needs memory before that is reached.
                    memory.advance(slot[place + 1])
                    self._collect_down_to(self.limits.peak_bytes, place + 1)
            elif event is None:
                self._start_all(place)
                self._collect_all(place)
                self.segment += 1
            elif order[place] is event.start:
                self._reach_start(place, event)
            else:
                self._reach_wait(place, order[place], event)

    def _enter_slot(self, place: int, upcoming_ms: float) -> None:
        memory = self.memory
        memory.note_live()
        if self._is_crowded():
            self._launch_waiting(place)
        if self.flying:
            self._collect_done(place)
        if self._start_due(place, upcoming_ms):
            memory.note_live()

    # -- gathers -----------------------------------------------------------------------------------

    def _start_due(self, place: int, upcoming_ms: float) -> bool:
        """Starts the gathers whose time has come, in order of use; whether there were any."""
        started = False
        queues: Collection[list[Unit]] = self.pending.values()
        if len(queues) > 1:
            waiting = [pending for pending in queues if pending]
            queues = sorted(waiting, key=lambda pending: self.queue_place[pending[-1].index])
        for pending in queues:
            while pending and self._is_due(pending[-1], place, upcoming_ms):
                self._start_gather(pending.pop(), place)
                started = True
        return started

    def _start_all(self, place: int) -> None:
        """Those that must not move behind ``place``, a side effect."""
        for pending in self.pending.values():
            while pending and pending[-1].latest <= place:
                self._start_gather(pending.pop(), place)

    def _is_due(self, unit: Unit, place: int, upcoming_ms: float) -> bool:
        self.operations += 1
        if not self.opens[unit.index] <= place <= unit.latest:
            return False
        if self.timing is None:
            if self.track.compute_before[place] + upcoming_ms < self.latest[unit.index]:
                return False
            backlog = self.lanes.group_free.get(unit.group, 0.0) - self.lanes.now
            if backlog > upcoming_ms:
                return False  # it would begin no earlier than if it were issued behind the kernel
            if (other := self.right_of_way.gather_waits(unit, place)) is not None:
                self.opens[unit.index] = other + 1
                return False
        return self._fits(unit)

    def _fits(self, unit: Unit) -> bool:
        """Under the caps in every slot that the start moves over."""
        bound = self.limits.in_flight_bytes
        if bound is not None and self.in_flight + unit.size_bytes > bound:
            return False
        if self.memory.slot < self.full.get(unit.index, 0):
            return False
        flight = sum(gather.flight_bytes for gather in unit.gathers)
        use, limit = self.track.slot[unit.use], self.limits.peak_bytes
        full = self.memory.full_slot(use, limit - flight)
        if full is not None:
            self.full[unit.index] = full
            if self.timing is not None and unit.index not in self.short:
                self.short[unit.index] = self.memory.free_bytes(use, limit)
        return full is None

    def _start_gather(self, unit: Unit, place: int) -> None:
        use = self.track.slot[unit.use]
        for gather in unit.gathers:
            idle = self.track.skeleton.idle
            self.moves += preparation_moves(gather, place, self.track.place, idle)
            for node in gather.preparation:
                if node in self.track.costs:
                    self.lanes.compute(node, self.track.costs[node])
            own = self.track.slot[gather.use]
            # A bucket's members are there from its start on, copied out of it from its wait on.
            self.memory.occupy(
                self.memory.slot, own if unit.copy_in is None else use, gather.flight_bytes
            )
            if unit.copy_in is not None:
                self.memory.occupy(use, own, gather.collective.size_bytes)
        self.moves.extend(Move(gather.collective.start, place) for gather in unit.gathers)
        self._launch(unit)

    def _use_gather(self, place: int, node: fx.Node, unit: Unit) -> None:
        if unit.index not in self.started:
            pending = self.pending[unit.group]
            pending.pop() if pending[-1] is unit else pending.remove(unit)
            # Behind scatters of its own stream it waits anyway; they make room for it.
            flight = sum(gather.flight_bytes for gather in unit.gathers)
            self._collect_down_to(self.limits.peak_bytes - flight, place, unit.group)
            self._start_gather(unit, place)
        if unit.index in self.used:
            return
        self.used.add(unit.index)
        # What is due before compute goes on starts first: its stream would stand idle otherwise, for
        # as long as its payload is prepared behind this wait.
        stall = max(self.lanes.end_of(unit.launch) - self.lanes.now, 0.0)
        self._start_due(place, stall)
        self.moves.extend(Move(wait, place) for m in unit.members for wait in m.waits[:1])
        self.in_flight -= unit.size_bytes
        if self.limits.in_flight_bytes is not None:
            self._start_due(place, stall)
        self.lanes.wait(unit.launch, unit.waits)
        if unit.copy_out is not None:
            self.memory.note_peak(self.memory.live_bytes + unit.size_bytes)
            self.lanes.compute(node, unit.copy_out)

    # -- places of the input -------------------------------------------------------------------------

    def _launch(self, unit: Unit) -> None:
        if unit.copy_in is not None:
            self.lanes.compute(unit.members[0].start, unit.copy_in)
        self.lanes.start(unit.launch)
        self.started.add(unit.index)
        self.in_flight += unit.size_bytes
        if unit.index in self.overdue:
            self._wait_in_place(unit)

    def _reach_start(self, place: int, collective: Collective) -> None:
        unit = self.unit_of[collective.index]
        if unit.gathers:
            return
        self.reached[unit.index] = self.reached.get(unit.index, 0) + 1
        if self._is_reduction(unit):
            live = self.track.start_bytes[collective.index] + self.memory.extra_bytes
            without = self.memory.live_bytes - self.memory.held_bytes
            # Its payload lives on while the next kernel runs.
            most = max(live - without, collective.size_bytes)
            self._collect_down_to(self.limits.peak_bytes - most, place)
            self.memory.note_peak(live + self.memory.held_bytes)
            self.memory.held_bytes += collective.size_bytes
        else:  # it stays where it is, so what it reduces further is needed now
            for feeder in sorted(self.feeders[unit.index]):
                self._collect(self.unit_of[feeder], place)
        self._launch_if_ready(place, unit)
        for waiting in self.right_of_way.behind(place):
            self._launch_if_ready(place + 1, waiting)

    def _launch_if_ready(self, place: int, unit: Unit) -> None:
        reached = self.reached.get(unit.index, 0) == len(unit.members)
        if not reached or self.feeders[unit.index] or unit.index in self.started:
            return
        reduction = self._is_reduction(unit)
        if reduction:
            if self.right_of_way.reduction_waits(unit, place, self.limits.peak_bytes):
                return
            self._make_way(unit, place)
        if place != self.track.place[unit.members[0].start]:
            self.moves.extend(Move(member.start, place) for member in unit.members)
        # Payloads and a bucket, or the copy that an all-reduce sends, live side by side.
        doubled = unit.members[0].kind is CollectiveKind.ALL_REDUCE and len(unit.members) > 1
        if doubled or unit.copy_in is not None:
            self.memory.note_peak(self.memory.live_bytes + unit.size_bytes)
        self._launch(unit)
        if reduction:
            self.flying.append(unit)
            self.done[unit.index] = self._done_at(unit)
            self.first_done = min(self.first_done, self.done[unit.index])
            # The next kernel's place is that of the last node fused into it; the others come before.
            self._collect_down_to(self.limits.peak_bytes, place)
        elif len(unit.members) == 1:
            self._plan_late_wait(unit.members[0])

    def _launch_waiting(self, place: int) -> None:
        """Only what has been launched can make room."""
        for unit in self.right_of_way.all():
            self._launch_if_ready(place, unit)

    def _make_way(self, unit: Unit, place: int) -> None:
        """Waits for the oldest reductions where one more would be too much in flight."""
        bound = self.limits.in_flight_bytes
        while bound is not None and self.in_flight + unit.size_bytes > bound:
            flying = self._collectable()
            if not flying:
                return
            self._collect(flying[0], place)

    def _plan_late_wait(self, collective: Collective) -> None:
        """A wait of another collective goes to its first use, if its payload may live so long."""
        track = self.track
        use = track.uses.get(collective.index)
        if use is None:
            return
        size = collective.size_bytes
        last = max(track.slot[track.place[wait]] for wait in collective.waits)
        over = range(last + 1, track.slot[use] + 1)
        limit = self.limits.peak_bytes - size - self.memory.held_bytes
        bound = self.limits.in_flight_bytes
        if not over or (bound is not None and self.in_flight > bound):
            return
        near = self.limits.prefetch_kernels
        if self.memory.is_room_for_long(over, limit, _NEAR_KERNELS if near is None else near):
            self.memory.occupy(over.start, over.stop, size)
            self.late_waits.setdefault(use, []).append(collective)
            self.used.add(collective.index)

    def _wait_late(self, place: int, collective: Collective) -> None:
        self.in_flight -= collective.size_bytes
        for wait in collective.waits:
            self.moves.append(Move(wait, place))
            self.lanes.wait(self.unit_of[collective.index].launch)

    def _reach_wait(self, place: int, node: fx.Node, collective: Collective) -> None:
        unit = self.unit_of[collective.index]
        if unit.gathers:
            self._use_gather(place, node, unit)
        elif not self._is_reduction(unit) and unit.index not in self.used:
            if unit.index in self.started:
                self._wait_in_place(unit)
            else:
                self.overdue.add(unit.index)

    def _wait_in_place(self, unit: Unit) -> None:
        if unit.index not in self.awaited:
            self.awaited.add(unit.index)
            self.in_flight -= unit.size_bytes
        self.lanes.wait(unit.launch)

    # -- reductions ----------------------------------------------------------------------------------

    def _collect_done(self, place: int) -> None:
        """Waits for reductions that ended a while ago; for the oldest where memory is short.

        What another reduction needs comes first, so that it is sent before compute waits for more.
        """
        if self.first_done > self._clock(place) and not self._is_crowded():
            return
        collectable = self._collectable()
        if self.fed:
            collectable.sort(key=lambda unit: unit.index not in self.fed)
        for unit in collectable:
            # Waiting for one takes time, and makes room.
            is_flying = unit.index in self.done  # one that it feeds may have made way for itself
            if is_flying and (self.done[unit.index] <= self._clock(place) or self._is_crowded()):
                self._collect(unit, place)

    def _clock(self, place: int) -> float:
        """What tells when reductions are to be waited for: the time, or the place."""
        return self.lanes.now if self.timing is None else place

    def _done_at(self, unit: Unit) -> float:
        """On that clock, for a reduction that has been issued."""
        if self.timing is not None:
            return self.timing.waits[unit.index]
        return self.lanes.end_of(unit.launch) + REDUCTION_MARGIN * unit.launch.ms

    def _is_crowded(self) -> bool:
        """More lives, or is in flight, than may."""
        limits = self.limits
        if self.memory.live_bytes > limits.peak_bytes:
            return True
        return limits.in_flight_bytes is not None and self.in_flight > limits.in_flight_bytes

    def _collectable(self) -> list[Unit]:
        """Those that were waited for between the same side effects in the input."""
        if not self.flying:
            return []
        return [u for u in self.flying if u.members[0].wait_segment == self.segment]

    def _collect_down_to(self, most_bytes: int, place: int, group: str | None = None) -> None:
        """The oldest ones, of one group if one is given, until no more lives in this slot."""
        if self.memory.live_bytes <= most_bytes:
            return
        self._launch_waiting(place)
        for unit in self._collectable():
            if self.memory.live_bytes <= most_bytes:
                break
            if group is None or unit.group == group:
                self._collect(unit, place)

    def _collect_all(self, place: int) -> None:
        while units := self._collectable():
            self._collect(units[0], place)

    def _collect(self, unit: Unit, place: int) -> None:
        if unit.index not in self.done:
            return  # one that it feeds has made way for itself
        self.flying.remove(unit)
        if self.done.pop(unit.index) <= self.first_done:
            self.first_done = min(self.done.values(), default=_NEVER)
        self.in_flight -= unit.size_bytes
        self.memory.held_bytes -= unit.size_bytes
        self.lanes.wait(unit.launch, unit.waits)
        self.moves.extend(Move(wait, place) for member in unit.members for wait in member.waits)
        if unit.copy_out is not None:
            self.lanes.compute(unit.members[0].waits[0], unit.copy_out)
        for fed in self.fed.get(unit.index, ()):
            self.feeders[fed.index].discard(unit.index)
            self._launch_if_ready(place, fed)
