"""The process groups that a compile of a file's graphs would see, without any of its processes.

Chained collectives become one on a group that exists where the model compiles.  The passes take these
from torch.distributed; here they come from the file: ranks, backends, device meshes.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_patches.cli._common import CommandError

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable, KnownMesh
    from torch_patches._inductor.fx_passes.comm_overlap.options import Options
    from torch_patches.captured import Captured

_DEFAULT = "default_pg"  # torch's description of the group of all ranks


@contextmanager
def as_compiled(captured: Captured, options: Options) -> Iterator[tuple[Captured, Options]]:
    """The process groups exist, on torch's fake backend.

    Yields:
        The capture with the groups that a flag makes, and the options with the table of all.

    Raises:
        CommandError: no rank is in all of them.
    """
    from torch_patches.testing.torch_scheduler import process_groups

    rank = _rank_of(captured)
    if options.fuses:
        table = _table(captured, rank)
        if options.create_flattened_groups:
            captured = _with_flattened(captured, table)
            table = _table(captured, rank)
        options = dataclasses.replace(options, groups=table)
    with process_groups(captured.groups):
        yield captured, options


def _rank_of(captured: Captured) -> int:
    """The one that captured; where the file does not tell, the first that is in all groups."""
    groups = captured.groups
    shared = set.intersection(*map(set, groups.values())) if groups else {0}
    if not shared:
        names = ", ".join(sorted(groups))
        raise CommandError(f"no rank is in all of the groups {names} (--group)")
    told = captured.info.get("rank")
    return told if isinstance(told, int) and told in shared else min(shared)


def _table(captured: Captured, rank: int) -> GroupTable:
    """In the order of the file, which is that of their making; the default group last."""
    from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable

    names = sorted(
        captured.groups, key=lambda name: captured.group_descriptions.get(name) == _DEFAULT
    )
    groups = tuple((n, captured.groups[n], captured.group_backends.get(n, "")) for n in names)
    return GroupTable(rank, groups, tuple(_meshes(captured, rank)))


def _meshes(captured: Captured, rank: int) -> list[KnownMesh]:
    """Of the graphs' inputs, those that this rank is in."""
    from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import KnownMesh
    from torch_patches.captured import OpaqueValue

    found: dict[KnownMesh, None] = {}
    for module in captured.graphs.values():
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            mesh = value.mesh if isinstance(value, OpaqueValue) else None
            if mesh is not None and mesh.groups and rank in mesh.ranks:
                found.setdefault(KnownMesh(mesh.shape, mesh.ranks, mesh.groups))
    return list(found)


# -- groups that a flag makes ---------------------------------------------------------------------


def _with_flattened(captured: Captured, table: GroupTable) -> Captured:
    """With what ``create_flattened_groups`` would make for the chains of the graphs; a chain on no
    mesh of the file is told on stderr."""
    groups, backends = dict(captured.groups), dict(captured.group_backends)
    for chained in _chained_groups(captured):
        ranks, backend = _ranks_over(chained, table), backends.get(chained[0], "")
        if ranks is None:
            print(
                "warning: create_flattened_groups: no device mesh in the file has the groups "
                f"{', '.join(chained)}; none is made over them",
                file=sys.stderr,
            )
        elif not any(groups[n] == ranks and backends.get(n, "") == backend for n in groups):
            name = f"flattened {' '.join(chained)}"
            groups[name], backends[name] = ranks, backend
    return dataclasses.replace(captured, groups=groups, group_backends=backends)


def _chained_groups(captured: Captured) -> list[tuple[str, ...]]:
    """Groups of each chain, that of the largest shards first."""
    from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import find_chains
    from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
    from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

    found: dict[tuple[str, ...], None] = {}
    for module in captured.graphs.values():
        for chain in find_chains(collect(module.graph)):
            groups = tuple(link.collective.group for link in chain)
            if chain[0].collective.kind is CollectiveKind.ALL_GATHER:
                groups = groups[::-1]  # what is gathered last varies slowest
            if len(set(groups)) == len(groups) > 1:
                found.setdefault(groups)
    return list(found)


def _ranks_over(groups: tuple[str, ...], table: GroupTable) -> tuple[int, ...] | None:
    """Of the group over these dimensions of a mesh, through this rank, in the order of its shards."""
    for mesh in table.meshes:
        if set(groups) <= set(mesh.groups):
            dims = [mesh.groups.index(group) for group in groups]
            sizes = [mesh.sizes[dim] for dim in dims]
            places = [_digits(number, sizes) for number in range(math.prod(sizes))]
            for line in mesh.lines(dims, places):
                if table.rank in line:
                    return tuple(line)
    return None


def _digits(number: int, sizes: list[int]) -> tuple[int, ...]:
    digits: list[int] = []
    for size in reversed(sizes):
        digits.append(number % size)
        number //= size
    return tuple(reversed(digits))
