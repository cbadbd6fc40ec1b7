"""The simulated time of an order after a local change, at the price of the change.

    line = TimelineCache(events_of(order, skeleton, model, costs), model)   # one pass
    line.retime(40, 52, moved)      # what if these events stood where 40 to 51 do: ms, no change
    line.accept(40, 52, moved)      # go on from there

A planner keeps the order as events, tries moves of starts and waits with :meth:`retime`, each a
stretch of the order and what shall stand there instead, and takes the best by :meth:`accept`.  A
bucket is a change too: the starts of its members become one, and so do their waits; copies become
kernels.  Positions count the events of the order as it is now (:meth:`events` shows them).

The order is kept in blocks of a few events, each with the state of the lanes in front of it,
relative to the time at which it is entered:

    block   |  0  |  1  |  2  |  3  |  4  |  5  |  6  |
    change            xxxx
    runs again     |  1  |  2  |  3  |                     4 is entered in the state of before

Where a block is entered in the same state as before, everything behind happens as before, only
earlier or later.  What lies in the past is equal whatever its clock says (``LanesState``).  The
host is special: it runs ahead of the device and keeps its distance for long, so its clock alone
would differ up to the end.  Each block therefore knows its slack, by how much later the host could
issue everything without holding a kernel back, and blocks with more slack than the host has lost
are passed over.

Nothing of the kind is done for the streams of groups: one that has a backlog remembers a change
until it stands idle or compute waits for it, so a change in front of a long backlog (all-reduces
that are only waited for at the end of a backward) costs as much as the backlog is long.

Cost: events of the blocks that run again, and O(log blocks) for each change and each passing over.
Results differ from :func:`~.timeline.simulate` by rounding only: states count as equal within 1e-13
of the longest run since the cache was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_patches._inductor.fx_passes.comm_overlap.estimate.events import (
    Event,
    Kernel,
    Start,
    Tally,
    tally_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.slack_tree import SlackTree
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import (
    Lanes,
    LanesState,
    Launch,
)

#: Events in a block: a change costs up to two blocks more than its own events.
BLOCK = 16
#: A block that has grown to this many is split, together with all others.
BLOCK_LIMIT = 4 * BLOCK
#: Share of the longest run up to which two clocks count as equal.
ROUNDING = 1e-13


@dataclass(frozen=True)
class RunTime:
    """Of one order.

    Args:
        total_ms, exposed_ms: as in :class:`~.timeline.Timeline`.
    """

    total_ms: float
    exposed_ms: float


@dataclass(frozen=True, eq=False)
class _Entry:
    """In front of a block.  Args: ``open``: launches that will be waited for, and how often."""

    lanes: LanesState
    open: Mapping[int, int]

    @property
    def tail_ms(self) -> float:
        """Until the last collective in the air has ended."""
        return max((flight.end_ms for flight in self.lanes.flights.values()), default=0.0)

    def with_lag(self, more_ms: float) -> _Entry:
        """The same with the host further behind."""
        state = self.lanes
        moved = LanesState(state.lag_ms + more_ms, state.groups, state.links, state.flights)
        return _Entry(moved, self.open)


@dataclass(frozen=True, eq=False)
class _Block:
    """Some events in a row.

    Args:
        entry: the state in front of them.
        slack_ms: by how much later the host could issue everything in it without an effect;
            below 0 where something waits for the host.
        advance_ms: from entry to exit.
        exposed_ms: by the waits in it.
    """

    events: tuple[Event, ...]
    entry: _Entry
    slack_ms: float
    advance_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class _Passed:
    """Blocks ``first <= block < behind`` where nothing changes but that the host has less slack."""

    first: int
    behind: int
    lost_ms: float


@dataclass(eq=False)
class _Trial:
    """A change as far as it was run.

    Args:
        tally: of launches that are entirely in the change, by index.
        blocks: those that change.
        passed: see there.
        tail_ms: the order's behind its last event.
        later_ms, exposed_ms: what the change adds to the total and to what is exposed.
    """

    tally: dict[int, Tally]
    tail_ms: float
    blocks: dict[int, _Block] = field(default_factory=dict)
    passed: list[_Passed] = field(default_factory=list)
    later_ms: float = 0.0
    exposed_ms: float = 0.0


class TimelineCache:
    """A simulated order that can be changed; see the module.

    Args:
        events: the order.
        model: whose launches and costs the events carry.

    Raises:
        ValueError: a launch starts twice, or is waited for before it starts.
    """

    def __init__(self, events: Sequence[Event], model: RuntimeModel) -> None:
        self._model = model
        self._operations = 0
        self._tolerance_ms = 0.0
        self._build(events)

    def __len__(self) -> int:
        return self._tree.events

    @property
    def operations(self) -> int:
        """Events issued so far, the first pass included."""
        return self._operations

    @property
    def time(self) -> RunTime:
        """Of the order as it is now."""
        return self._time

    def events(self, first: int, last: int) -> list[Event]:
        """The events at the positions ``first <= position < last``.

        Raises:
            IndexError: they are not all there.
        """
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"events {first} to {last} of {len(self)}")
        spot = self._tree.find(first)
        found: list[Event] = []
        for block in range(spot.block, self._last_block(first, last) + 1):
            found.extend(self._blocks[block].events)
        return found[spot.inside : spot.inside + last - first]

    def retime(self, first: int, last: int, replacement: Sequence[Event]) -> RunTime:
        """The order's time if ``replacement`` stood where ``events(first, last)`` are.

        Launches with events elsewhere keep the number of their starts and waits here.

        Raises:
            IndexError: the positions are not in the order.
            ValueError: a launch would start twice or never, or be waited for before it starts.
        """
        return self._time_after(self._try(first, last, replacement))

    def accept(self, first: int, last: int, replacement: Sequence[Event]) -> RunTime:
        """Makes a change; costs as much as :meth:`retime`, which has the arguments and errors."""
        trial = self._try(first, last, replacement)
        self._time, self._tail_ms = self._time_after(trial), trial.tail_ms
        self._widen_tolerance()
        for index, tally in trial.tally.items():
            self._tally[index] = tally
        for passed in trial.passed:
            self._tree.add(passed.first, passed.behind, -passed.lost_ms)
        for index, block in trial.blocks.items():
            self._blocks[index] = block
            self._added[index] = self._tree.added(index)
            self._tree.set(index, len(block.events), block.slack_ms)
        if any(len(block.events) > BLOCK_LIMIT for block in trial.blocks.values()):
            self._build(self.events(0, len(self)))
        return self._time

    # -- the whole order -----------------------------------------------------------------------------

    def _build(self, events: Sequence[Event]) -> None:
        self._tally = tally_of(events)
        trial = _Trial({}, 0.0)
        entry = _Entry(LanesState(0.0, {}, {}, {}), {})
        for index, first in enumerate(range(0, max(len(events), 1), BLOCK)):
            piece = tuple(events[first : first + BLOCK])
            entry = self._run(trial, index, piece, entry)
        self._blocks = list(trial.blocks.values())
        self._tree = SlackTree(
            [len(block.events) for block in self._blocks],
            [block.slack_ms for block in self._blocks],
        )
        self._added = [0.0] * len(self._blocks)  # the tree's number when each block was made
        self._tail_ms = entry.tail_ms
        exposed_ms = trial.exposed_ms + self._tail_ms
        self._time = RunTime(trial.later_ms + self._tail_ms, exposed_ms)
        self._widen_tolerance()

    def _widen_tolerance(self) -> None:
        self._tolerance_ms = max(self._tolerance_ms, ROUNDING * self._time.total_ms)

    # -- a change ------------------------------------------------------------------------------------

    def _time_after(self, trial: _Trial) -> RunTime:
        return RunTime(
            self._time.total_ms + trial.later_ms, self._time.exposed_ms + trial.exposed_ms
        )

    def _try(self, first: int, last: int, replacement: Sequence[Event]) -> _Trial:
        changed = self._changes(self.events(first, last), replacement)
        trial = _Trial(changed, self._tail_ms)
        begin = self._tree.find(first)
        behind = self._last_block(first, last) + 1
        old = [event for b in self._blocks[begin.block : behind] for event in b.events]
        new = [*old[: begin.inside], *replacement, *old[begin.inside + last - first :]]
        entry = self._entry(begin.block)
        parts = behind - begin.block
        for part in range(parts):
            index = begin.block + part
            piece = tuple(new[len(new) * part // parts : len(new) * (part + 1) // parts])
            entry = self._rerun(trial, index, piece, entry)
        self._follow(trial, behind, entry)
        return trial

    def _follow(self, trial: _Trial, index: int, entry: _Entry) -> None:
        """Runs blocks from ``index`` on until they are entered as before, or to the end."""
        while index < len(self._blocks):
            base = self._entry(index)
            if _alike(entry.lanes, base.lanes, self._tolerance_ms):
                lost_ms = base.lanes.lag_ms - entry.lanes.lag_ms
                if abs(lost_ms) <= self._tolerance_ms:
                    return
                behind = self._tree.first_below(index, max(lost_ms, 0.0))
                trial.passed.append(_Passed(index, behind, lost_ms))
                if behind == len(self._blocks):
                    return
                index, entry = behind, self._entry(behind).with_lag(-lost_ms)
            entry = self._rerun(trial, index, self._blocks[index].events, entry)
            index += 1
        trial.tail_ms = entry.tail_ms
        trial.later_ms += trial.tail_ms - self._tail_ms
        trial.exposed_ms += trial.tail_ms - self._tail_ms

    def _rerun(self, trial: _Trial, index: int, events: tuple[Event, ...], entry: _Entry) -> _Entry:
        base = self._blocks[index]
        trial.later_ms -= base.advance_ms
        trial.exposed_ms -= base.exposed_ms
        return self._run(trial, index, events, entry)

    def _run(self, trial: _Trial, index: int, events: tuple[Event, ...], entry: _Entry) -> _Entry:
        """Adds a block to the trial.  Returns the state behind it."""
        lanes = Lanes(self._model)
        lanes.restore(entry.lanes)
        waits = dict(entry.open)
        slack_ms = float("inf")
        for event in events:
            self._operations += 1
            free_ms = lanes.compute_free
            if isinstance(event, Kernel):
                lanes.compute(event.node, event.cost)
            elif isinstance(event, Start):
                started = event.launch.collective.index
                tally = trial.tally.get(started) or self._tally[started]
                waits[started] = tally.waits
                lanes.start(event.launch)
            else:
                _count_down(waits, event.launch)
                lanes.wait(event.launch, event.waits)
            slack_ms = min(slack_ms, free_ms - lanes.host)
        now = lanes.now
        waits = {i: left for i, left in waits.items() if left or lanes.flights[i].end > now}
        trial.blocks[index] = _Block(events, entry, slack_ms, now, lanes.exposed_ms)
        trial.later_ms += now
        trial.exposed_ms += lanes.exposed_ms
        return _Entry(lanes.snapshot(waits), waits)

    def _entry(self, index: int) -> _Entry:
        """The state in front of a block, where slack that was lost since is lag that is less."""
        more_ms = self._tree.added(index) - self._added[index]
        entry = self._blocks[index].entry
        return entry.with_lag(more_ms) if more_ms else entry

    def _last_block(self, first: int, last: int) -> int:
        """The block of the last event of a stretch; of an empty one, where it would stand."""
        return self._tree.find(max(last - 1, first)).block

    def _changes(self, old: Sequence[Event], new: Sequence[Event]) -> dict[int, Tally]:
        """Launches that appear, disappear, or have other waits; all their events are here."""
        before, after = tally_of(old), tally_of(new)
        changed: dict[int, Tally] = {}
        for index in {**before, **after}:
            was, will = before.get(index, Tally()), after.get(index, Tally())
            if was == will:
                continue
            if self._tally.get(index, Tally()) != was:
                raise ValueError(f"collective {index} has events outside of the stretch as well")
            if will.waits and not will.starts:
                raise ValueError(f"collective {index} is waited for and never starts")
            changed[index] = will
        return changed


def _count_down(waits: dict[int, int], launch: Launch) -> None:
    index = launch.collective.index
    if index not in waits:
        raise ValueError(f"collective {index} is waited for before it starts")
    waits[index] -= 1


def _alike(one: LanesState, other: LanesState, tolerance_ms: float) -> bool:
    """Whether two states differ in nothing but where the host is."""

    def near(a: Mapping[Any, float], b: Mapping[Any, float]) -> bool:
        return all(abs(a.get(key, 0.0) - b.get(key, 0.0)) <= tolerance_ms for key in {**a, **b})

    return all(near(a, b) for a, b in zip(_clocks(one), _clocks(other), strict=True))


def _clocks(state: LanesState) -> tuple[Mapping[Any, float], ...]:
    """All but the host's; a clock that is missing is 0."""
    flights = state.flights.items()
    begins = {index: flight.begin_ms for index, flight in flights}
    ends = {index: flight.end_ms for index, flight in flights}
    return state.groups, state.links, begins, ends
