"""Blocks in a row, each with a number of events and a slack; a segment tree over them.

Answers in O(log blocks) which block holds an event, and which block behind a given one is the first
whose slack is below a bound; lowers or raises the slack of a range at the same price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spot:
    """Where an event is: the block, and the events of the block in front of it."""

    block: int
    inside: int


class SlackTree:
    """See the module.  Node 1 is the root, node ``i`` has the children ``2i`` and ``2i + 1``.

    Args:
        counts, slacks: of the blocks, at least one.
    """

    def __init__(self, counts: Sequence[int], slacks: Sequence[float]) -> None:
        assert len(counts) == len(slacks) > 0
        self.blocks = len(counts)
        self._leaves = 1 << (self.blocks - 1).bit_length()
        padding = self._leaves - self.blocks
        self._count = [0] * self._leaves + list(counts) + [0] * padding
        self._least = [0.0] * self._leaves + list(slacks) + [float("inf")] * padding
        self._added = [0.0] * (2 * self._leaves)  # to everything below the node
        for node in range(self._leaves - 1, 0, -1):
            self._pull(node)

    @property
    def events(self) -> int:
        """Of all blocks."""
        return self._count[1]

    def set(self, block: int, count: int, slack: float) -> None:
        """Replaces a block's numbers."""
        node = block + self._leaves
        self._count[node] = count
        self._least[node] = slack - self._above(node)
        self._pull_up(node)

    def add(self, first: int, behind: int, by: float) -> None:
        """Adds to the slack of the blocks ``first <= block < behind``."""
        if first >= behind:
            return
        low, high = first + self._leaves, behind + self._leaves
        while low < high:
            if low & 1:
                self._add_at(low, by)
                low += 1
            if high & 1:
                high -= 1
                self._add_at(high, by)
            low, high = low >> 1, high >> 1
        self._pull_up(first + self._leaves)
        self._pull_up(behind - 1 + self._leaves)

    def added(self, block: int) -> float:
        """All that was added to the slack of a block so far, :meth:`set` or not."""
        node = block + self._leaves
        return self._added[node] + self._above(node)

    def first_below(self, first: int, bound: float) -> int:
        """The first block from ``first`` on with a slack below ``bound``; ``blocks`` if none."""
        found = self._search(1, 0, self._leaves, first, bound)
        return self.blocks if found is None else found

    def find(self, position: int) -> Spot:
        """The block of an event; behind the last event, the end of the last block."""
        if position >= self.events:
            last = self.blocks - 1
            return Spot(last, self._count[last + self._leaves])
        node = 1
        while node < self._leaves:
            node *= 2
            if position >= self._count[node]:
                position -= self._count[node]
                node += 1
        return Spot(node - self._leaves, position)

    def _search(self, node: int, low: int, width: int, first: int, bound: float) -> int | None:
        """Among the blocks ``low <= block < low + width``, which are those below the node."""
        if low + width <= first or self._least[node] >= bound:
            return None
        if width == 1:
            return low
        half, bound = width // 2, bound - self._added[node]
        found = self._search(2 * node, low, half, first, bound)
        if found is None:
            found = self._search(2 * node + 1, low + half, half, first, bound)
        return found

    def _above(self, node: int) -> float:
        total = 0.0
        while node > 1:
            node //= 2
            total += self._added[node]
        return total

    def _add_at(self, node: int, by: float) -> None:
        self._added[node] += by
        self._least[node] += by

    def _pull_up(self, node: int) -> None:
        while node > 1:
            node //= 2
            self._pull(node)

    def _pull(self, node: int) -> None:
        left, right = 2 * node, 2 * node + 1
        self._count[node] = self._count[left] + self._count[right]
        self._least[node] = min(self._least[left], self._least[right]) + self._added[node]
