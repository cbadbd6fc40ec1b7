"""An undo log for plain lists and dicts.

A search that tries many changes and keeps few must give the rest back exactly.  Copying the state
before each try costs its whole size; a trail costs one entry for each write and nothing for what
was not touched::

    trail = Trail()
    mark = len(trail)
    trail.write(labels, 3, 17)
    trail.insert(edges, 5, True)
    trail.undo_to(mark)         # labels[3] is what it was, edges has no 5

Entries are undone last first, so a key that was inserted is always the newest of its container
when it goes: the iteration order of a dict comes back too, provided that keys are only dropped
with :meth:`drop` from dicts that nobody iterates over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ABSENT = object()


class Trail:
    """Records writes to containers and undoes them; every operation is O(items written)."""

    def __init__(self) -> None:
        self._log: list[tuple[Any, Any, Any]] = []  # container, key or slice, what it held

    def __len__(self) -> int:
        return len(self._log)

    def write(self, container: list[V] | dict[int, V], key: int, value: V) -> None:
        """Overwrite an entry that exists."""
        self._log.append((container, key, container[key]))
        container[key] = value

    def insert(self, mapping: dict[K, V], key: K, value: V) -> None:
        """Add a key that `mapping` does not have."""
        self._log.append((mapping, key, _ABSENT))
        mapping[key] = value

    def drop(self, mapping: dict[K, V], key: K) -> None:
        """Delete a key; undoing puts it back as the newest key."""
        self._log.append((mapping, key, mapping.pop(key)))

    def extend(self, items: list[V], more: Iterable[V]) -> None:
        """Append to `items`."""
        self._log.append((items, slice(len(items), None), _ABSENT))
        items.extend(more)

    def undo_to(self, length: int) -> None:
        """Undo the newest writes until `length` of them are left."""
        while len(self._log) > length:
            container, key, old = self._log.pop()
            if old is _ABSENT:
                del container[key]
            else:
                container[key] = old
