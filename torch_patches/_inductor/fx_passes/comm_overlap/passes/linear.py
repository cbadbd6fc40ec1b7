"""Merges that leave compute in its order.

Each movable collective has a stretch of the graph in which it can run: a gather from where its
payload can be made to its first use, a gradient's reduction from its start to the end.  A bucket
can run where the stretches of its members overlap:

    gather a   |----------------------use|
    gather b             |-----------------------use|
    {a, b}               |------------use|

All starts and waits then have a place in one order of the graph's nodes, so no cycle can appear,
whatever is merged besides, and no search of the graph is needed; only among reductions that feed
each other is one, of their buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import Merger
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    MergeForm,
    RefusalReason,
    Traffic,
)


class LinearMerger(Merger):
    """Merges by the stretches of the module's docstring; see :class:`Merger`.

    Args:
        in_flight_bytes: most bytes of a bucket, None for no bound: all of it is in flight at once.
    """

    tells_needs = False  # the stretches tell

    def __init__(self, track: Track, in_flight_bytes: int | None = None) -> None:
        self.why: dict[int, RefusalReason] = {}
        self._track = track
        self._operations = 0
        self._bound = in_flight_bytes
        self._bytes: dict[int, int] = {}  # of buckets, by the first member
        self._stretch: dict[int, tuple[int, int]] = {
            index: (gather.earliest, gather.latest) for index, gather in track.gathers.items()
        }
        self._above = _feeders(track.skeleton.collectives)
        self._chained = any(self._above.values())
        self._members: dict[int, set[int]] = {}  # of buckets of reductions, by the first
        self._bucket: dict[int, int] = {}  # reduction in a bucket -> the first of it

    @property
    def operations(self) -> int:
        return self._operations

    def can_merge(self, first: Collective, other: Collective) -> bool:
        self._operations += 1
        size = self._bytes.get(first.index, first.size_bytes) + other.size_bytes
        if self._bound is not None and size > self._bound:
            self.why[first.index] = self.why[other.index] = RefusalReason.MEMORY
            return False
        if first.index in self._track.reductions and other.index in self._track.reductions:
            fed = self._chained and (self._is_fed_by(first, other) or self._is_fed_by(other, first))
            return not fed
        joint = self._joint(first, other)
        if joint is None or joint[0] > joint[1]:
            self.why[first.index] = self.why[other.index] = RefusalReason.PREFETCH
            return False
        return True

    def merge(self, first: Collective, other: Collective, form: MergeForm) -> bool:
        """Args: ``first``: the first member of the bucket; ``other``: in no bucket yet."""
        if not self.can_merge(first, other):
            return False
        size = self._bytes.get(first.index, first.size_bytes)
        self._bytes[first.index] = size + other.size_bytes
        joint = self._joint(first, other)
        if joint is not None:
            self._stretch[first.index] = joint
        else:
            self._members.setdefault(first.index, {first.index}).add(other.index)
            self._bucket[other.index] = first.index
        return True

    def _is_fed_by(self, one: Collective, other: Collective) -> bool:
        """Whether the bucket of ``one`` needs results of the other's, through any buckets."""
        goal = self._bucket.get(other.index, other.index)
        pending, seen = [self._bucket.get(one.index, one.index)], set[int]()
        while pending:
            bucket = pending.pop()
            if bucket in seen:
                continue
            seen.add(bucket)
            self._operations += 1
            for member in self._members.get(bucket, {bucket}):
                for feeder in self._above[member]:
                    above = self._bucket.get(feeder, feeder)
                    if above == goal:
                        return True
                    pending.append(above)
        return False

    def merge_waits(self, members: Sequence[Collective]) -> bool:
        """Always: the waits of a bucket have a place in common."""
        return True

    def _joint(self, first: Collective, other: Collective) -> tuple[int, int] | None:
        """The stretch of both, which is empty if it ends before it begins."""
        one, two = self._stretch.get(first.index), self._stretch.get(other.index)
        if one is None or two is None:
            return None
        return max(one[0], two[0]), min(one[1], two[1])


def _feeders(collectives: Sequence[Collective]) -> dict[int, set[int]]:
    """For each gradient reduction, also one that no schedule moves, those whose results it reduces
    further."""
    above: dict[int, set[int]] = {}
    for reduction in collectives:
        if reduction.traffic is Traffic.GRADIENT:
            feeder = reduction.feeder
            above[reduction.index] = set() if feeder is None else {feeder, *above[feeder]}
    return above
