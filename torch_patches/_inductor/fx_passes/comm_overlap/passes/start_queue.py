"""The order in which collectives of one process group start, as a chain of dependencies.

A group is one stream: a collective runs after those that started before it.  The chain makes the
order part of the contracted graph, so that no merge and no move can change it unseen:

    A -> B -> C        joining C to A, in front of B:    {A, C} -> B
                       joining A to C, behind B:         B -> {A, C}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.passes.berths import Berth


@dataclass(eq=False)
class Entry:
    """One place in the queue: a collective, or a bucket of several.

    Args:
        start: the node that holds the place in the chain.
        berth: where it stands in the graph.
        members: all starts that stand here.
    """

    start: fx.Node
    berth: Berth
    members: list[fx.Node]
    before: Entry | None = None
    behind: Entry | None = None


class StartQueue:
    """The starts of one group, in order."""

    def __init__(self, contracted: AugmentedGraph[fx.Node], entries: Sequence[Entry]) -> None:
        """``entries`` in the order of their starts."""
        self._contracted = contracted
        self._first: Entry | None = None
        self._entries: dict[fx.Node, Entry] = {}  # of every start
        for entry in entries:
            self._entries[entry.start] = entry
        self._link(None, entries, None)
        self._given: set[tuple[fx.Node, fx.Node]] = set()  # dependencies of others
        for one, two in itertools.pairwise(entries):
            self._add(one.start, two.start)

    def entry(self, start: fx.Node) -> Entry:
        """The place of a collective, wherever it has been merged."""
        return self._entries[start]

    def stretch(self, one: Entry, two: Entry, limit: int) -> list[Entry] | None:
        """The two, the earlier one first, with all entries between them; None if these are more
        than ``limit``."""
        return self._from(one, two, limit) or self._from(two, one, limit)

    def _from(self, early: Entry, late: Entry, limit: int) -> list[Entry] | None:
        found = [early]
        entry = early.behind
        while entry is not None and len(found) <= limit + 1:
            found.append(entry)
            if entry is late:
                return found
            entry = entry.behind
        return None

    def rearrange(self, stretch: Sequence[Entry], order: Sequence[Entry]) -> bool:
        """Puts ``order`` in the place of ``stretch``, of which it leaves one entry out.

        False where the new chain contradicts the graph.  A rollback of the graph and
        :meth:`put_back` undo it in either case.
        """
        before, behind = stretch[0].before, stretch[-1].behind
        old = _pairs(before, stretch, behind)
        new = _pairs(before, order, behind)
        self._link(before, order, behind)
        kept = old.keys() & new.keys()
        for pair in old:
            if pair not in kept and pair not in self._given:
                self._contracted.remove_dependency(*pair)
        return all(pair in kept or self._add(*pair) for pair in new)

    def _add(self, before: fx.Node, after: fx.Node) -> bool:
        if self._contracted.has_dependency(before, after):
            self._given.add((before, after))
        return self._contracted.add_dependency(before, after)

    def put_back(self, stretch: Sequence[Entry], ends: tuple[Entry | None, Entry | None]) -> None:
        """Undoes :meth:`rearrange` in the list, after the graph has been rolled back.

        Args:
            ends: what stood before and behind the stretch.
        """
        self._link(ends[0], stretch, ends[1])

    def unite(self, kept: Entry, taken: Entry) -> None:
        """Members of ``taken``, which has been left out, now stand at ``kept``."""
        kept.members.extend(taken.members)
        self._entries.update(dict.fromkeys(taken.members, kept))

    def chain(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(before, after) pairs of the order as it is now."""
        entry = self._first
        while entry is not None and entry.behind is not None:
            yield entry.start, entry.behind.start
            entry = entry.behind

    def _link(self, before: Entry | None, entries: Sequence[Entry], behind: Entry | None) -> None:
        last = before
        for entry in (*entries, behind):
            if last is not None:
                last.behind = entry
            if entry is not None:
                entry.before = last
            if last is None:
                self._first = entry
            last = entry


def _pairs(
    before: Entry | None, entries: Sequence[Entry], behind: Entry | None
) -> dict[tuple[fx.Node, fx.Node], None]:
    found = [entry.start for entry in (before, *entries, behind) if entry is not None]
    return dict.fromkeys(itertools.pairwise(found))
