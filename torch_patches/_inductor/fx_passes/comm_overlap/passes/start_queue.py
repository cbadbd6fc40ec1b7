"""The order in which collectives of one process group start, as a chain of dependencies.

A group is one stream: a collective runs after those that started before it.  The chain makes the
order part of the contracted graph, so that no merge and no move can change it unseen:

    A -> B -> C        joining C to A, in front of B:    {A, C} -> B
                       joining A to C, behind B:         B -> {A, C}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph


@dataclass(eq=False)
class Entry:
    """One place in the queue: a collective, or a bucket of several.

    Args:
        start: the node that holds the place in the chain.
        hidden: some member has compute that hides it.
        members: all starts that stand here.
    """

    start: fx.Node
    hidden: bool
    members: list[fx.Node]
    before: Entry | None = None
    behind: Entry | None = None


class StartQueue:
    """The starts of one group, in order."""

    def __init__(
        self, contracted: AugmentedGraph[fx.Node], starts: Sequence[tuple[fx.Node, bool]]
    ) -> None:
        """``starts``: (node, hidden) in graph order."""
        self._contracted = contracted
        self._first: Entry | None = None
        self.entries: dict[fx.Node, Entry] = {}  # of every start, also of one taken out
        last: Entry | None = None
        for start, hidden in starts:
            entry = Entry(start, hidden, [start])
            _link(last, entry)
            if last is not None:
                contracted.add_dependency(last.start, start)
            self.entries[start] = last = entry
            self._first = self._first or entry

    def entry(self, start: fx.Node) -> Entry:
        """The place of a collective, wherever it has been merged."""
        return self.entries[start]

    def between(self, early: Entry, late: Entry, limit: int) -> list[Entry] | None:
        """Entries behind ``early`` and in front of ``late``; None if ``late`` does not follow
        within ``limit`` entries."""
        found: list[Entry] = []
        entry = early.behind
        while entry is not None and entry is not late:
            if len(found) == limit:
                return None
            found.append(entry)
            entry = entry.behind
        return None if entry is None else found

    def take_out(self, entry: Entry) -> None:
        """Closes the chain over an entry; a rollback of the graph and :meth:`put_back` undo it."""
        before, behind = entry.before, entry.behind
        if before is not None:
            self._contracted.remove_dependency(before.start, entry.start)
        if behind is not None:
            self._contracted.remove_dependency(entry.start, behind.start)
        if before is not None and behind is not None:
            # They follow each other through the entry already.
            self._contracted.add_dependency(before.start, behind.start)
        if self._first is entry:
            self._first = behind
        _link(before, behind)

    def put_back(self, entry: Entry) -> None:
        """Undoes :meth:`take_out` in the list, after the graph has been rolled back."""
        if self._first is entry.behind:
            self._first = entry
        _link(entry.before, entry)
        _link(entry, entry.behind)

    def unite(self, kept: Entry, taken: Entry) -> None:
        """Members of ``taken``, which has been taken out, now stand at ``kept``."""
        kept.hidden = kept.hidden or taken.hidden
        kept.members.extend(taken.members)
        self.entries.update(dict.fromkeys(taken.members, kept))

    def chain(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(before, after) pairs of the order as it is now."""
        entry = self._first
        while entry is not None and entry.behind is not None:
            yield entry.start, entry.behind.start
            entry = entry.behind


def _link(before: Entry | None, behind: Entry | None) -> None:
    """The two ends keep pointing at what is taken out between them, until it is forgotten."""
    if before is not None:
        before.behind = behind
    if behind is not None:
        behind.before = before
