"""One merge after the other under the rules of ``overlap_bucketer.py``: :class:`HidingMerger`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import number_nodes
from torch_patches._inductor.fx_passes.comm_overlap.passes.berths import (
    Berth,
    find_berths,
    joint_bounds,
    joint_places,
    obstacle,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import Merger
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import (
    find_gathers,
    preparation_moves,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.room import Room, Surroundings
from torch_patches._inductor.fx_passes.comm_overlap.passes.start_queue import Entry, StartQueue
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import copy_costs
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    HidingInterval,
    MergeForm,
    Move,
    RefusalReason,
    Skeleton,
)

#: Entries of a queue that one merge may jump over; bounds the work of a merge.
MAX_JUMP = 64


@dataclass(frozen=True, eq=False)
class _Option:
    """One way to put a merged entry into the queue.

    Args:
        stretch: the two entries and all between them.
        order: the same with the earlier one standing for both.
        start: place of the merged start.
        waits: places of the merged wait, to be tried in this order.
        is_settled: they are more than a guess.
    """

    stretch: Sequence[Entry]
    order: Sequence[Entry]
    start: int
    waits: tuple[int, ...]
    is_settled: bool

    def berth(self, wait: int) -> Berth:
        """That of the merged entry."""
        bounds = joint_bounds(self.kept.berth, self.taken.berth)
        return replace(bounds, start=self.start, wait=wait, is_settled=self.is_settled)

    @property
    def kept(self) -> Entry:
        return self.stretch[0]

    @property
    def taken(self) -> Entry:
        return self.stretch[-1]


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A merge that has been made in the graph and in the queue, and what undoes it."""

    mark: int
    queue: StartQueue
    option: _Option
    ends: tuple[Entry | None, Entry | None]


class HidingMerger(Merger):
    """Merges that keep compute inside of the intervals it hides."""

    def __init__(
        self,
        skeleton: Skeleton,
        contracted: AugmentedGraph[fx.Node],
        hiding: Iterable[HidingInterval],
        surroundings: Surroundings | None = None,
        model: RuntimeModel | None = None,
    ) -> None:
        """Arguments as those of ``plan_preserving_overlap``."""
        super().__init__(contracted)
        self._collectives = skeleton.collectives
        #: Working nodes between the first and the last member's start; None for no bound.
        self.max_span: int | None = None
        self._looked = 0
        self._hiding: dict[int, list[fx.Node]] = {}
        for interval in hiding:
            kept = [node for node in interval.nodes if self._hold(interval.collective, node)]
            if kept:
                self._hiding.setdefault(interval.collective.index, []).extend(kept)
        self._idle = skeleton.idle
        self._room: Room | None = None
        self._model = model
        if surroundings is None:
            graph = self._collectives[0].start.graph if self._collectives else fx.Graph()
            self._place: Mapping[fx.Node, int] = number_nodes(graph)
            self._gathers = {g.collective.index: g for g in find_gathers(skeleton, self._place)}
            berths = find_berths(self._collectives, self._place, self._gathers, self._hiding)
        else:
            track = surroundings.track
            self._place = track.place
            self._model = model or track.model
            self._gathers = dict(track.gathers)
            berths = find_berths(
                self._collectives,
                self._place,
                self._gathers,
                self._hiding,
                surroundings.places,
                surroundings.waits_stay,
            )
            self._room = Room(track, surroundings.limits)
            self._room.occupy(self._collectives, berths)
        self._queues = self._line_up(berths, surroundings.places if surroundings else ())

    def _hold(self, collective: Collective, node: fx.Node) -> bool:
        """Keeps ``node`` between start and waits; all or nothing."""
        mark = self.contracted.checkpoint()
        held = self.contracted.add_dependency(collective.start, node) and all(
            self.contracted.add_dependency(node, wait) for wait in collective.waits
        )
        if not held:
            self.contracted.rollback(mark)
        return held

    def _line_up(self, berths: Sequence[Berth], moved: Iterable[fx.Node]) -> dict[str, StartQueue]:
        """Each group's collectives in the order in which they start."""
        rank = {node: number for number, node in enumerate(moved)}
        lines: dict[str, list[Entry]] = {}
        for collective, berth in zip(self._collectives, berths, strict=True):
            entry = Entry(collective.start, berth, [collective.start])
            lines.setdefault(collective.group, []).append(entry)
        for line in lines.values():
            line.sort(key=lambda entry: (entry.berth.start, rank.get(entry.start, len(rank))))
        return {group: StartQueue(self.contracted, line) for group, line in lines.items()}

    @property
    def operations(self) -> int:
        """Counted work so far."""
        room = self._room.operations if self._room is not None else 0
        return self.contracted.operations + self._looked + room

    def is_hidden(self, collective: Collective) -> bool:
        """Whether compute hides it."""
        return collective.index in self._hiding

    def needs(self, node: fx.Node, limit: int) -> Sequence[fx.Node]:
        """None: a place in the queue, which may be left, looks like a dependency."""
        return ()

    # -- one merge ---------------------------------------------------------------------------------

    def can_merge(self, first: Collective, other: Collective) -> bool:
        """By the graph, the queue and the span; other caps are for :meth:`merge`."""
        for option in self._options(first, other):
            attempt = self._attempt(first, other, option)
            if attempt is not None:
                self._undo(attempt)
                return True
        return False

    def merge(self, first: Collective, other: Collective, form: MergeForm) -> bool:
        """Whatever the form, the waits are merged too: a coalesced collective is done as a whole,
        so its first wait waits for all of it."""
        options = self._options(first, other)
        if options and form is MergeForm.COPY and self._copies_cost_more(first, other):
            return self._refuse(first, other, RefusalReason.COPIES)
        why: RefusalReason | None = None
        failed: set[tuple[int, ...]] = set()
        for option in options:
            name = tuple(id(entry) for entry in option.order)
            attempt = None if name in failed else self._attempt(first, other, option)
            if attempt is None:
                failed.add(name)
                continue
            for wait in option.waits:
                berth = option.berth(wait)
                why = self._take_room(first, option.stretch, berth, form)
                if why is None:
                    option.kept.berth = berth
                    attempt.queue.unite(option.kept, option.taken)
                    return True
            self._undo(attempt)
        return self._refuse(first, other, why)

    def _refuse(self, first: Collective, other: Collective, why: RefusalReason | None) -> bool:
        if why is not None:
            self.why[first.index] = self.why[other.index] = why
        return False

    def _options(self, first: Collective, other: Collective) -> list[_Option]:
        """Orders of the queue, with the places that go with each, in the order of trial."""
        queue = self._queues[first.group]
        one, two = queue.entry(first.start), queue.entry(other.start)
        why = self._obstacle(one.berth, two.berth)
        self._looked += 1
        if why is not None:
            self._refuse(first, other, why)
            return []
        stretch = queue.stretch(one, two, MAX_JUMP)
        if stretch is None:
            return []
        self._looked += len(stretch)
        found: list[_Option] = []
        for places in joint_places(one.berth, two.berth):
            order = _reordered(stretch, places.start)
            if order is not None:
                found.append(_Option(stretch, order, places.start, places.waits, True))
        if self._room is None:
            for end in (stretch[-1].berth, stretch[0].berth):
                order = _reordered(stretch, end.start)
                if order is not None:
                    found.append(_Option(stretch, order, end.start, (end.wait,), False))
        if not found:
            self._refuse(first, other, RefusalReason.HIDING)
        return found

    def _obstacle(self, one: Berth, two: Berth) -> RefusalReason | None:
        """What is seen at once: the bounds, and under a memory cap also the lack of a place."""
        span = max(one.last, two.last) - min(one.first, two.first)
        if self.max_span is not None and span > self.max_span:
            return RefusalReason.SPAN_CAP
        return None if self._room is None else obstacle(one, two)

    def _attempt(self, first: Collective, other: Collective, option: _Option) -> _Attempt | None:
        """Merges in the graph, with the queue in that order; None if that closes a cycle."""
        ends = (option.kept.before, option.taken.behind)
        queue = self._queues[first.group]
        attempt = _Attempt(self.contracted.checkpoint(), queue, option, ends)
        merged = (
            queue.rearrange(option.stretch, option.order)
            and self.contracted.merge(first.start, other.start)
            and self.contracted.merge_all([*first.waits, *other.waits])
        )
        if not merged:
            self._undo(attempt)
            return None
        return attempt

    def _undo(self, attempt: _Attempt) -> None:
        self.contracted.rollback(attempt.mark)
        attempt.queue.put_back(attempt.option.stretch, attempt.ends)

    def _take_room(
        self, member: Collective, stretch: Sequence[Entry], berth: Berth, form: MergeForm
    ) -> RefusalReason | None:
        if self._room is None:
            return None
        one, two = stretch[0].berth, stretch[-1].berth
        return self._room.refusal(member, one, two, berth, form is MergeForm.COPY)

    def _copies_cost_more(self, first: Collective, other: Collective) -> bool:
        """Than one launch less saves: latency, steps of the ring, and the host's work.

        A bucket of two is copied as a whole; a further member costs its own copies at most.
        """
        if self._model is None:
            return False
        model, queue = self._model, self._queues[first.group]
        one, two = queue.entry(first.start), queue.entry(other.start)
        pair = len(one.members) == 1 and len(two.members) == 1
        copies = copy_costs((first, other) if pair else (other,), model.device)
        sizes = one.berth.size_bytes, two.berth.size_bytes
        apart = model.collective_ms(first, sizes[0]) + model.collective_ms(other, sizes[1])
        host_us = model.host.collective_us + model.host.wait_us
        if pair:
            host_us -= sum(copy.launches for copy in copies) * model.host.kernel_us
        saved_ms = apart - model.collective_ms(first, sum(sizes)) + host_us / 1e3
        return sum(copy.ms for copy in copies) > saved_ms

    # -- what the merges amount to -----------------------------------------------------------------

    def moves(self, buckets: Iterable[Bucket]) -> list[Move]:
        """Where merged starts and waits go; with a start goes what prepares its payload."""
        found: list[tuple[int, int, Move]] = []
        for bucket in buckets:
            berth = self._queues[bucket.key.group].entry(bucket.members[0].start).berth
            if not berth.is_settled:
                continue
            for member in bucket.members:
                gather = self._gathers.get(member.index)
                if gather is not None:
                    prepared = preparation_moves(gather, berth.start, self._place, self._idle)
                    found += [(move.place, 0, move) for move in prepared]
            for member in bucket.members:
                found.append((berth.start, 0, Move(member.start, berth.start)))
                found += [(berth.wait, 1, Move(wait, berth.wait)) for wait in member.waits]
        found.sort(key=lambda move: move[:2])
        return [move for _, _, move in found]

    def dependencies(self, buckets: Iterable[Bucket]) -> list[tuple[fx.Node, fx.Node]]:
        """What must hold in the result: hiding compute inside of its interval, and the queues."""
        pairs: list[tuple[fx.Node, fx.Node]] = []
        apart = dict.fromkeys(self._hiding)
        for bucket in buckets:
            pairs.extend(self._interval(bucket.members, bucket.form))
            for member in bucket.members:
                apart.pop(member.index, None)
        for index in apart:
            pairs.extend(self._interval((self._collectives[index],), MergeForm.COALESCED))
        for queue in self._queues.values():
            pairs.extend(queue.chain())
        return pairs

    def _interval(
        self, members: Sequence[Collective], form: MergeForm
    ) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Starts, then all hiding compute, then the first wait, then other waits that remain."""
        first = min(members, key=lambda member: (member.wait_position or 0, member.index))
        for member in members:
            for node in self._hiding.get(member.index, ()):
                yield member.start, node
                yield node, first.waits[0]
        if form is MergeForm.COALESCED and any(m.index in self._hiding for m in members):
            waits = [wait for member in members for wait in member.waits]
            yield from ((first.waits[0], wait) for wait in waits if wait is not first.waits[0])


def _reordered(stretch: Sequence[Entry], start: int) -> list[Entry] | None:
    """The queue with one entry for the two ends of ``stretch``, which starts at that place.

    The earlier end stands for both.  None if a hidden entry would be put off behind others.
    """
    early, *crossed, late = stretch
    last = start >= late.berth.start
    passed = [entry for entry in crossed if last or entry.berth.start < start]
    jumped = [entry for entry in crossed if not (last or entry.berth.start < start)]
    if (passed and early.berth.is_hidden) or any(entry.berth.is_hidden for entry in jumped):
        return None
    return [*passed, early, *jumped]
