"""One name for a process group, however the graph refers to it.

The argument may be a string, a node that yields a group, or a group object.  The stream of a
collective belongs to the group object, so two groups with equal ranks keep different names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class KnownMesh:
    """A device mesh: which ranks share a group, also on other ranks.

    Args:
        sizes: of its dimensions.
        ranks: row by row.
        groups: this rank's group of each dimension.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    groups: tuple[str, ...]

    def looks_alike(self, groups: Sequence[str], places: Sequence[Sequence[int]]) -> bool:
        """Every rank of the mesh finds its groups, and the one that they are fused into, as this rank
        does.

        torch sorts the ranks of a group.  In a mesh whose ranks are permuted the order of a group is
        then the mesh's on some lines and not on others.

        Args:
            groups: of the chain.
            places: for each rank of the fused group, in order, its place in each of ``groups``.
        """
        dims = tuple(self.groups.index(group) for group in groups)
        return _looks_alike(self, dims, tuple(map(tuple, places)))

    def lines(self, dims: Sequence[int], places: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Of each part of the mesh along ``dims`` the ranks at ``places``."""
        strides = [math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes))]
        offsets = [
            sum(place * strides[dim] for dim, place in zip(dims, at, strict=True)) for at in places
        ]
        for start in range(len(self.ranks)):
            if all(start // strides[dim] % self.sizes[dim] == 0 for dim in dims):
                yield [self.ranks[start + offset] for offset in offsets]


@functools.lru_cache(256)
def _looks_alike(
    mesh: KnownMesh, dims: tuple[int, ...], places: tuple[tuple[int, ...], ...]
) -> bool:
    def in_one_order(along: Sequence[int], at: Sequence[tuple[int, ...]]) -> bool:
        return len({_order_of(line) for line in mesh.lines(along, at)}) == 1

    each = (in_one_order([dim], [(i,) for i in range(mesh.sizes[dim])]) for dim in dims)
    return all(each) and in_one_order(dims, places)


def _order_of(line: Sequence[int]) -> tuple[int, ...]:
    """Places of the ranks from the lowest to the highest."""
    return tuple(sorted(range(len(line)), key=line.__getitem__))


@dataclass(frozen=True)
class GroupTable:
    """The process groups that a process has joined, in the order in which it did.

    All ranks of two groups have joined them in one order, as c10d demands.  Plain data, taken when a
    compile starts: a backward that compiles later sees the groups of its forward.

    Args:
        rank: this rank, -1 where there is none.
        groups: name, ranks in their order and backend of each; the default group last.
        meshes: what is known of the meshes behind them.
    """

    rank: int = -1
    groups: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    meshes: tuple[KnownMesh, ...] = ()

    @staticmethod
    def registered(meshes: Sequence[KnownMesh] = ()) -> GroupTable:
        """As it is now; empty without torch.distributed."""
        if not dist.is_available() or not dist.is_initialized():
            return GroupTable()
        world = dist.distributed_c10d._world
        default = world.default_pg
        groups = [
            (
                str(name),
                tuple(dist.get_process_group_ranks(group)),
                str(world.pg_backend_config.get(group)),
            )
            for group, name in sorted(world.pg_names.items(), key=lambda item: item[0] is default)
            if group in world.pg_group_ranks
        ]
        return GroupTable(dist.get_rank(), tuple(groups), tuple(meshes))

    def only(self, targets: Set[str]) -> GroupTable:
        """The same, where :meth:`like` finds no other groups than these."""
        return _TargetsOnly(self.rank, self.groups, self.meshes, frozenset(targets))

    @cached_property
    def _by_name(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (ranks, backend) for name, ranks, backend in self.groups}

    def ranks(self, group: str) -> tuple[int, ...] | None:
        """Global ranks of a group in its order; None where this process is not in it."""
        found = self._by_name.get(group)
        return None if found is None else found[0]

    def like(self, group: str, size: int) -> list[tuple[str, tuple[int, ...]]]:
        """(name, ranks) of the groups of ``size`` ranks with the backend of ``group``."""
        _, wanted = self._by_name.get(group, ((), ""))
        return [
            (name, ranks)
            for name, ranks, backend in self.groups
            if len(ranks) == size and backend == wanted
        ]

    def looks_alike(self, groups: Sequence[str], places: Sequence[Sequence[int]]) -> bool:
        """Whether the other ranks of the mesh see what this one does.

        Of groups that no known mesh has it is assumed that theirs lists its ranks in order, as those
        of ``init_device_mesh`` do.
        """
        known = [mesh for mesh in self.meshes if set(groups) <= set(mesh.groups)]
        return all(mesh.looks_alike(groups, places) for mesh in known)


@dataclass(frozen=True)
class _TargetsOnly(GroupTable):
    targets: frozenset[str] = frozenset()

    def like(self, group: str, size: int) -> list[tuple[str, tuple[int, ...]]]:
        return [found for found in super().like(group, size) if found[0] in self.targets]


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

    def looks_alike(self, groups: Sequence[str], places: Sequence[Sequence[int]]) -> bool:
        """The mesh is in order by what it is."""
        return True
