"""Chained all-gathers (and reduce-scatters) on sub-meshes as one on the whole mesh, where proven.

    shard -> AG inner (2) -> wait -> AG outer (4) -> wait     =>     shard -> AG mesh (8) -> wait

``chain_proof.py`` proves that a chain is one collective, and in which order that one's group must list
its ranks: row-major where the outer dimension is gathered last, column-major the other way round.  A
registered group of so many ranks is the target if its ranks, laid out in that order, have those of
each of the chain's groups in a line through this rank.

Decisions are the same on all ranks if the groups of a chain are those of one mesh whose ranks are in
order: the grid is then the same for all, and only this rank's lines in it are its own.  Of a mesh that
is known (the model's DTensors have one) every rank's lines are looked at.  Shards must be even: a rank
with a short one sees other nodes (``graph/evenness.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import Link, find_chains
from torch_patches._inductor.fx_passes.comm_overlap.graph.evenness import (
    UNEVEN_MARK,
    is_cut_behind,
    is_padded_in_front,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.fuse import fuse_chain
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    first_argument,
    op_namespace,
    schema_arguments,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import expression_of
from torch_patches._inductor.fx_passes.comm_overlap.passes.chain_proof import prove
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Refusal,
    RefusalReason,
    Skeleton,
)


class Groups(Protocol):
    """What is known of process groups on this rank."""

    @property
    def rank(self) -> int:
        """This rank."""

    def ranks(self, group: str) -> tuple[int, ...] | None:
        """Global ranks of a group in its order; None where it is not known."""

    def like(self, group: str, size: int) -> Sequence[tuple[str, tuple[int, ...]]]:
        """(name, ranks) of the groups of ``size`` ranks with the backend of ``group``, in an order
        that all of their ranks share."""

    def looks_alike(self, groups: Sequence[str], places: Sequence[Sequence[int]]) -> bool:
        """Whether the other ranks of the mesh see the same of these groups and of the one whose
        ranks have these places in them."""


@dataclass(frozen=True, eq=False)
class Fusion:
    """A chain that is one collective.

    Args:
        links: of the chain, or of a part of it.
        group, ranks: of the target.
        shape: of the last result.
    """

    links: tuple[Link, ...]
    group: str
    ranks: tuple[int, ...]
    shape: tuple[Any, ...]

    @property
    def first(self) -> Collective:
        return self.links[0].collective

    @property
    def last(self) -> Collective:
        return self.links[-1].collective


def plan_fusions(
    skeleton: Skeleton, groups: Groups, kinds: Sequence[CollectiveKind]
) -> tuple[list[Fusion], list[Refusal]]:
    """Chains to fuse, and why others are left; near-linear in the graph.

    Of a chain that is not one collective as a whole, parts of it may be, the longer ones first.
    """
    fusions: list[Fusion] = []
    refusals: list[Refusal] = []
    writes = _Writes(skeleton)
    taken: set[Collective] = set()  # two chains may share their first links
    for chain in find_chains(skeleton):
        if chain[0].collective.kind not in kinds:
            continue
        found = _parts(chain, groups, writes)
        for part in found:
            if isinstance(part, Refusal):
                refusals.append(part)
            elif taken.isdisjoint(members := [link.collective for link in part.links]):
                fusions.append(part)
                taken.update(members)
    return fusions, refusals


def _parts(chain: Sequence[Link], groups: Groups, writes: _Writes) -> list[Fusion | Refusal]:
    if len(chain) < 2:
        return []
    for length in range(len(chain), 1, -1):
        for begin in range(len(chain) - length + 1):
            part = [Link(chain[begin].collective), *chain[begin + 1 : begin + length]]
            found = _fuse(part, groups, writes)
            if isinstance(found, Fusion):
                before, behind = chain[:begin], chain[begin + length :]
                return [*_parts(before, groups, writes), found, *_parts(behind, groups, writes)]
            if length == len(chain):
                why = found
    names = tuple(link.collective.start.name for link in chain)
    return [Refusal(names, why)]


def _fuse(links: Sequence[Link], groups: Groups, writes: _Writes) -> Fusion | RefusalReason:
    obstacle = _obstacle(links, writes)
    if obstacle is not None:
        return obstacle
    lines = [groups.ranks(link.collective.group) for link in links]
    known = [line for line in lines if line is not None]
    sizes = [_group_size(link.collective) for link in links]
    if len(known) < len(lines) or [len(line) for line in known] != sizes:
        return RefusalReason.CHAIN_GROUPS
    if not _cross_only_here(known, groups.rank):
        return RefusalReason.CHAIN_GROUPS
    proof = prove(links, sizes)
    if isinstance(proof, RefusalReason):
        return proof
    for name, ranks in groups.like(links[0].collective.group, math.prod(sizes)):
        if _is_grid(ranks, proof.coordinates, known, groups.rank):
            if not groups.looks_alike([link.collective.group for link in links], proof.coordinates):
                return RefusalReason.CHAIN_MESH
            fusion = Fusion(tuple(links), name, ranks, proof.shape)
            return fusion if _has_sayable_shape(fusion) else RefusalReason.CHAIN_SYMBOLIC
    return RefusalReason.CHAIN_NO_GROUP


def _has_sayable_shape(fusion: Fusion) -> bool:
    """A view of the one result needs its sizes as numbers, but for one."""
    symbolic = [size for size in fusion.shape if not isinstance(size, int)]
    return len(symbolic) < 2 or _rows(fusion) is None


def _obstacle(links: Sequence[Link], writes: _Writes) -> RefusalReason | None:
    first, last = links[0].collective, links[-1].collective
    for link in links[1:]:
        if link.obstacle is not None:
            return link.obstacle
    members = [link.collective for link in links]
    if any(op_namespace(m.start.target) != "_c10d_functional" for m in members):
        return RefusalReason.KIND_NOT_MERGEABLE
    refused = next((m.refusal for m in members if m.refusal is not None), None)
    if refused is not None:
        return refused
    if any(not _is_read_by_its_wait_alone(m) for m in members):
        return RefusalReason.USED_BEFORE_WAIT
    keys = [m.key for m in members if m.key is not None]
    if len(keys) < len(members):
        return RefusalReason.NO_METADATA
    if len({(key.dtype, key.device_type) for key in keys}) != 1:
        return RefusalReason.CHAIN_DTYPE
    if len({key.reduce_op for key in keys}) != 1 or keys[0].reduce_op not in (None, "sum", "avg"):
        return RefusalReason.CHAIN_OP
    if len({(m.backward, _policy(m)) for m in members}) != 1:
        return RefusalReason.CHAIN_PHASE
    if writes.lie_between(first, last, members):
        return RefusalReason.CHAIN_MUTATION
    if any(UNEVEN_MARK in m.start.meta for m in members):
        return RefusalReason.CHAIN_UNEVEN
    gathers = first.kind is CollectiveKind.ALL_GATHER
    if is_cut_behind(last.waits[0]) if gathers else is_padded_in_front(first.start):
        return RefusalReason.CHAIN_UNEVEN
    return None


def _is_read_by_its_wait_alone(collective: Collective) -> bool:
    """One wait, directly behind the start."""
    start = collective.start
    return (
        len(collective.waits) == 1
        and list(start.users) == list(collective.waits)
        and first_argument(collective.waits[0]) is start
    )


def _policy(collective: Collective) -> tuple[object, ...]:
    """What the partitioner shall recompute: gathering in steps may be meant to keep one of them."""
    return tuple(n.meta.get("recompute") for n in (collective.start, collective.waits[0]))


class _Writes:
    """Writes and side effects, by place."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._positions = skeleton.positions
        self._ordered: dict[fx.Node, list[fx.Node]] = {}
        for before, after in skeleton.order_dependencies:
            self._ordered.setdefault(before, []).append(after)

    def lie_between(
        self, first: Collective, last: Collective, members: Sequence[Collective]
    ) -> bool:
        """One of what the chain reads, or a side effect, before one collective in its place has read
        it: a gather there starts last and is waited for last, a reduce-scatter stands first."""
        if len({m.segment for m in members}) != 1:
            return True
        if any(m.wait_segment != first.segment for m in members[:-1]):
            return True
        end = self._positions[last.waits[0]]
        readers: list[fx.Node] = [first.start]
        return any(
            self._positions[after] <= end
            for reader in readers
            for after in self._ordered.get(reader, ())
        )


def _group_size(collective: Collective) -> int:
    size = collective.key.group_size if collective.key is not None else None
    return -1 if size is None else size


def _cross_only_here(lines: Sequence[tuple[int, ...]], rank: int) -> bool:
    """Each group holds this rank, no two another one as well."""
    others: set[int] = set()
    for line in lines:
        if rank not in line or len(set(line)) != len(line):
            return False
        rest = set(line) - {rank}
        if rest & others:
            return False
        others |= rest
    return True


def _is_grid(
    ranks: Sequence[int],
    coordinates: Sequence[tuple[int, ...]],
    lines: Sequence[tuple[int, ...]],
    rank: int,
) -> bool:
    """The target's ranks along each group, through this rank, are those of the group."""
    if rank not in ranks or len(set(ranks)) != len(ranks):
        return False
    rank_at = dict(zip(coordinates, ranks, strict=True))
    here = coordinates[ranks.index(rank)]
    return all(
        [rank_at[(*here[:axis], place, *here[axis + 1 :])] for place in range(len(line))]
        == list(line)
        for axis, line in enumerate(lines)
    )


def apply_fusions(graph: fx.Graph, fusions: Sequence[Fusion]) -> None:
    """Changes ``graph`` in place."""
    for fusion in fusions:
        fuse_chain(
            graph,
            [link.collective for link in fusion.links],
            _arguments_on(fusion),
            _rows(fusion),
        )


def _arguments_on(fusion: Fusion) -> tuple[Any, ...]:
    """Of the fused start: the first link's payload, the target's size and name."""
    given = schema_arguments(fusion.last.start)
    first = next(iter(given))
    given[first] = first_argument(fusion.first.start)
    given["group_size"], given["group_name"] = len(fusion.ranks), fusion.group
    return tuple(given.values())


def _rows(fusion: Fusion) -> Any:
    """Of the one collective's result, where its shape is not the chain's."""
    payload = first_argument(fusion.first.start)
    assert isinstance(payload, fx.Node)
    shape = list(payload.meta["val"].shape)
    ranks = len(fusion.ranks)
    gathers = fusion.first.kind is CollectiveKind.ALL_GATHER
    if not shape:
        return None
    rows = shape[0] * ranks if gathers else shape[0] // ranks
    one = (expression_of(rows), *map(expression_of, shape[1:]))
    return None if one == fusion.shape else rows
