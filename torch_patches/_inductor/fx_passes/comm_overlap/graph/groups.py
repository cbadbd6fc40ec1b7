"""One name for a process group, however the graph refers to it.

The argument may be a string, a node that yields a group, or a group object.  The stream of a
collective belongs to the group object, so two groups with equal ranks keep different names.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, cast

import torch.distributed as dist
import torch.fx as fx


def canonical_group(arguments: dict[str, object], node_numbers: dict[fx.Node, int]) -> str:
    """Name of the group in a collective's ``arguments``; equal for equal groups.

    The legacy namespace names a group by tag and rank list; a node that computes a group is named
    by what it computes, down to numbered placeholders, never by its node name.
    """
    group = arguments.get("group_name")
    if group is not None:
        return _name_of(group, node_numbers)
    return f"ranks:{arguments.get('tag', '')}:{arguments.get('ranks', arguments.get('group'))}"


def _name_of(group: object, node_numbers: dict[fx.Node, int]) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, fx.Node):
        known = getattr(group.meta.get("val"), "group_name", None)
        return known if isinstance(known, str) else _describe(group, node_numbers, {})
    name = getattr(group, "group_name", None)
    return name if isinstance(name, str) else repr(group)


def _describe(value: object, node_numbers: dict[fx.Node, int], known: dict[fx.Node, str]) -> str:
    """Text of the computation that yields a group: equal text means the same group.

    A node met before is named by the order of its first visit, so that the text stays linear.
    """
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_describe(v, node_numbers, known) for v in value) + "]"
    if not isinstance(value, fx.Node):
        return repr(value)
    if value in known:
        return known[value]
    known[value] = f"${len(known)}"
    if value.op == "get_attr":
        return f"attribute {value.target}"
    if value.op != "call_function":
        return f"%{node_numbers[value]}"
    parts = [_describe(a, node_numbers, known) for a in (*value.args, *value.kwargs.values())]
    return f"{value.target}({', '.join(parts)})"


def registered_ranks(group: str) -> tuple[int, ...] | None:
    """Global ranks of a registered group in group order, None where it is not registered."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(cast(Any, group))))
    except (RuntimeError, ValueError, KeyError):
        return None


class RegisteredGroups:
    """The process groups that this process has joined, in the order in which it did.

    All ranks of two groups have joined them in one order, as c10d demands.
    """

    def __init__(self, targets: Set[str] | None = None) -> None:
        """Args: ``targets``: the groups that :meth:`like` may find; None for all."""
        self._targets = targets
        self._members: dict[str, tuple[int, ...]] = {}
        self._backends: dict[str, str] = {}
        self.rank = -1
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank = dist.get_rank()
        world = dist.distributed_c10d._world
        default = world.default_pg
        for group, name in sorted(world.pg_names.items(), key=lambda item: item[0] is default):
            if group in world.pg_group_ranks:
                self._members[name] = tuple(dist.get_process_group_ranks(group))
                self._backends[name] = str(world.pg_backend_config.get(group))

    def describe(self) -> str:
        """All that decides here, as text: equal text, equal answers."""
        facts = [(name, ranks, self._backends[name]) for name, ranks in self._members.items()]
        return repr((self.rank, facts))

    def ranks(self, group: str) -> tuple[int, ...] | None:
        """Global ranks of a group in its order; None where this process is not in it."""
        return self._members.get(group)

    def like(self, group: str, size: int) -> list[tuple[str, tuple[int, ...]]]:
        """(name, ranks) of the groups of ``size`` ranks with the backend of ``group``, the default
        group last."""
        return [
            (name, ranks)
            for name, ranks in self._members.items()
            if len(ranks) == size
            and self._backends[name] == self._backends.get(group)
            and (self._targets is None or name in self._targets)
        ]


class NamedMesh:
    """Groups of a mesh that is told by the names of its dimensions; ranks are numbered in it.

    For graphs whose groups no process has joined.
    """

    def __init__(
        self, dims: Sequence[tuple[str, int]], row_major: str, column_major: str | None = None
    ) -> None:
        """
        Args:
            dims: (group, size) of each dimension, the one that varies slowest first.
            row_major, column_major: names of the groups of all ranks, in either order.
        """
        self.rank = 0
        self._lines: dict[str, tuple[int, ...]] = {}
        stride = 1
        for name, size in reversed(dims):
            self._lines[name] = tuple(place * stride for place in range(size))
            stride *= size
        order = [0]
        for line in self._lines.values():  # the last dimension first, whose places vary slowest
            order = [rank + place for rank in order for place in line]
        self._full = [(row_major, tuple(range(stride)))]
        if column_major is not None:
            self._full.append((column_major, tuple(order)))

    def ranks(self, group: str) -> tuple[int, ...] | None:
        """Ranks of a dimension's group through rank 0."""
        return self._lines.get(group)

    def like(self, group: str, size: int) -> list[tuple[str, tuple[int, ...]]]:
        """The groups of all ranks, if these are ``size``."""
        return [(name, ranks) for name, ranks in self._full if len(ranks) == size]
