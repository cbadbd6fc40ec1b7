"""Merges collectives without taking away the compute that hides them.

Which compute hides which collective is given (by a schedule, or by hand).  Each relation becomes
dependencies of the contracted graph, and merged starts and waits are single nodes of it:

    start -> hiding compute -> wait         {start A, start B} -> compute of A, compute of B
                                                              -> {wait A, wait B}

So a merge that would leave compute outside of its interval closes a cycle, and is refused.  What
the graph cannot see is the stream: a group runs its collectives in the order they start.  A merge
that makes one collective jump the queue delays those it jumps over, so it may jump only over
collectives that nothing hides; and a hidden one is never put off behind others.

Strategy and bounds (bytes, span, order of candidates) are those of the greedy in ``topo_span.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import Merger
from torch_patches._inductor.fx_passes.comm_overlap.passes.start_queue import Entry, StartQueue
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_greedily
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    HidingInterval,
    MergeForm,
    Options,
    Plan,
    RefusalReason,
    Skeleton,
)

#: Entries of a queue that one merge may jump over; bounds the work of a merge.
MAX_JUMP = 64


def plan_preserving_overlap(
    skeleton: Skeleton,
    contracted: AugmentedGraph[fx.Node],
    options: Options,
    hiding: Sequence[HidingInterval],
) -> Plan:
    """Plans buckets that keep every hiding interval, with the dependencies that hold them.

    Args:
        contracted: a contraction that keeps the hiding nodes too
            (``contract(graph, skeleton, also=...)``).
        hiding: compute by collective; a relation that contradicts the graph (compute that the
            collective needs, or that needs it) is dropped.
    """
    merger = HidingMerger(skeleton, contracted, hiding)
    plan = plan_greedily(skeleton, merger, options)
    return Plan(
        plan.buckets, plan.refusals, plan.operations, tuple(merger.dependencies(plan.buckets))
    )


class HidingMerger(Merger):
    """Merges under the constraints of the module's docstring."""

    def __init__(
        self,
        skeleton: Skeleton,
        contracted: AugmentedGraph[fx.Node],
        hiding: Iterable[HidingInterval],
    ) -> None:
        super().__init__(contracted)
        self._collectives = skeleton.collectives
        self._hiding: dict[int, list[fx.Node]] = {}
        for interval in hiding:
            kept = [node for node in interval.nodes if self._hold(interval.collective, node)]
            if kept:
                self._hiding.setdefault(interval.collective.index, []).extend(kept)
        by_group: dict[str, list[tuple[fx.Node, bool]]] = {}
        for collective in skeleton.collectives:
            starts = by_group.setdefault(collective.group, [])
            starts.append((collective.start, collective.index in self._hiding))
        self._queues = {group: StartQueue(contracted, starts) for group, starts in by_group.items()}

    def _hold(self, collective: Collective, node: fx.Node) -> bool:
        """Keeps ``node`` between start and waits; all or nothing."""
        mark = self.contracted.checkpoint()
        held = self.contracted.add_dependency(collective.start, node) and all(
            self.contracted.add_dependency(node, wait) for wait in collective.waits
        )
        if not held:
            self.contracted.rollback(mark)
        return held

    def needs(self, node: fx.Node, limit: int) -> Sequence[fx.Node]:
        """None: a place in the queue, which may be left, looks like a dependency."""
        return ()

    def can_merge(self, first: Collective, other: Collective) -> bool:
        mark = self.contracted.checkpoint()
        undo = self._try(first, other)
        if undo is None:
            return False
        self.contracted.rollback(mark)
        undo[0].put_back(undo[1])
        return True

    def merge(self, first: Collective, other: Collective, form: MergeForm) -> bool:
        """Whatever the form, the waits are merged too: a coalesced collective is done as a whole,
        so its first wait waits for all of it."""
        found = self._try(first, other)
        if found is None:
            return False
        queue, taken, kept = found
        queue.unite(kept, taken)
        return True

    def _try(self, first: Collective, other: Collective) -> tuple[StartQueue, Entry, Entry] | None:
        """Merges in the graph at the first place that works; (queue, taken out, kept) or None."""
        queue = self._queues[first.group]
        early, late = queue.entry(first.start), queue.entry(other.start)
        crossed = queue.between(early, late, MAX_JUMP)
        if crossed is None:
            early, late = late, early
            crossed = queue.between(early, late, MAX_JUMP)
        if crossed is None:
            return None
        places: list[tuple[Entry, Entry]] = []
        if not any(entry.hidden for entry in crossed):
            places.append((late, early))
        if crossed and not early.hidden:
            places.append((early, late))
        for taken, kept in places:
            if self._merge_at(queue, taken, kept, first, other):
                return queue, taken, kept
        if not places:
            self.why[first.index] = self.why[other.index] = RefusalReason.HIDING
        return None

    def _merge_at(
        self, queue: StartQueue, taken: Entry, kept: Entry, first: Collective, other: Collective
    ) -> bool:
        mark = self.contracted.checkpoint()
        queue.take_out(taken)
        merged = self.contracted.merge(first.start, other.start) and self.contracted.merge_all(
            [*first.waits, *other.waits]
        )
        if not merged:
            self.contracted.rollback(mark)
            queue.put_back(taken)
        return merged

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
