"""A total order in which things can be moved next to each other without renumbering the rest.

Items carry integer labels with gaps, and `a` is before `b` when its label is smaller.  Moving an
item takes a label out of the gap at its new place; when that gap is used up, just enough of the
items behind it are spread out again.  This is the list-labelling scheme of Dietz and Sleator, "Two
Algorithms for Maintaining Order in a List", STOC 1987, on unbounded integers: the last item always
has room behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch_patches._inductor.fx_passes.comm_overlap.graph.trail import Trail

_HEAD = -1  # stands before the first item and behind the last: the links form a ring
_SPACING = 1 << 20  # gap between neighbours at first: 20 insertions at one place before a respread


class OrderList:
    """Items named by ints >= 0, in an order that a trail can undo.

    A comparison of labels is O(1); a move is O(log n) amortised; iterating is O(n).
    """

    def __init__(self, items: Iterable[int], trail: Trail) -> None:
        self.label: dict[int, int] = {_HEAD: 0}
        self.moves = 0  # labels assigned and links cut since the start: a measure of work
        self._trail = trail
        ring = [_HEAD, *items]
        for place, item in enumerate(ring):
            self.label[item] = place * _SPACING
        self._next = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        self._previous = dict(zip(ring[1:] + ring[:1], ring, strict=True))

    def __iter__(self) -> Iterator[int]:
        item = self._next[_HEAD]
        while item != _HEAD:
            yield item
            item = self._next[item]

    def append(self, item: int) -> None:
        """Add a new item behind all others."""
        for table in (self.label, self._next, self._previous):
            self._trail.insert(table, item, _HEAD)  # any value: linking overwrites it
        self._link(item, self._previous[_HEAD])

    def remove(self, item: int) -> None:
        """Take an item out; its label means nothing from here on."""
        before, after = self._previous[item], self._next[item]
        self._trail.write(self._next, before, after)
        self._trail.write(self._previous, after, before)
        self.moves += 1

    def move_behind(self, anchor: int, items: Sequence[int]) -> None:
        """Put `items`, in the order given, directly behind `anchor`, which is none of them."""
        for item in items:
            self.remove(item)
        for item in items:
            self._link(item, anchor)
            anchor = item

    def move_in_front(self, anchor: int, items: Sequence[int]) -> None:
        """Put `items`, in the order given, directly in front of `anchor`, none of them."""
        for item in items:
            self.remove(item)
        for item in items:
            self._link(item, self._previous[anchor])

    def _link(self, item: int, before: int) -> None:
        after = self._next[before]
        label = self._free_label_behind(before)
        self._trail.write(self._next, before, item)
        self._trail.write(self._previous, item, before)
        self._trail.write(self._next, item, after)
        self._trail.write(self._previous, after, item)
        self._assign(item, label)

    def _free_label_behind(self, anchor: int) -> int:
        """A label between `anchor` and its neighbour, after making room where there is none."""
        base = self.label[anchor]
        crowded: list[int] = []  # neighbours that have to be spread out to make room
        right = self._next[anchor]
        while right != _HEAD and self.label[right] - base <= (len(crowded) + 1) ** 2:
            crowded.append(right)
            right = self._next[right]
        parts = len(crowded) + 2
        width = parts * _SPACING if right == _HEAD else self.label[right] - base
        for place, item in enumerate(crowded, start=2):
            self._assign(item, base + width * place // parts)
        return base + width // parts

    def _assign(self, item: int, label: int) -> None:
        self._trail.write(self.label, item, label)
        self.moves += 1
