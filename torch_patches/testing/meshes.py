"""Meshes of simulated ranks, their groups, and chains of gathers and scatters on them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from torch_patches.testing.graph_builder import GraphBuilder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class Mesh:
    """Ranks 0, 1, ... in row-major order."""

    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def lists(self, dims: Sequence[int]) -> list[list[int]]:
        """Rank lists of the groups over ``dims``, the first of which varies slowest."""
        grid = torch.arange(self.ranks).view(self.sizes)
        rest = [d for d in range(len(self.sizes)) if d not in dims]
        return [
            list(map(int, row))
            for row in grid.permute(*rest, *dims).reshape(
                -1, math.prod(self.sizes[d] for d in dims)
            )
        ]


@dataclass(frozen=True)
class RankGroups:
    """What one rank knows; see ``passes.all_gather_fusion.Groups``."""

    rank: int
    table: Mapping[str, Sequence[Sequence[int]]]

    def ranks(self, group: str) -> tuple[int, ...] | None:
        found = [row for row in self.table.get(group, ()) if self.rank in row]
        return tuple(found[0]) if found else None

    def like(self, group: str, size: int) -> list[tuple[str, tuple[int, ...]]]:
        known = [(name, self.ranks(name)) for name in self.table]
        return [(name, ranks) for name, ranks in known if ranks is not None and len(ranks) == size]

    def looks_alike(self, groups: Sequence[str], places: Sequence[Sequence[int]]) -> bool:
        """Meshes here are in order."""
        return True


@dataclass
class ChainCase:
    """A chain on a mesh, alone in its graph.

    Args:
        gm: input -> chain -> output.
        table: rank lists of the groups of the chain and of the targets that are registered.
        members: of the chain, as dimensions of the mesh.
        targets: registered targets, by name, as orders of these dimensions.
    """

    gm: fx.GraphModule
    mesh: Mesh
    table: dict[str, list[list[int]]]
    members: tuple[int, ...]
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def views(self) -> Iterator[RankGroups]:
        return (RankGroups(rank, self.table) for rank in range(self.mesh.ranks))


def random_case(
    r: random.Random, kind: str = "all_gather", dtype: torch.dtype = torch.float32
) -> ChainCase:
    """Two or three dimensions of 1 to 4 ranks, two or three gathers (or scatters), views between."""
    mesh = Mesh(tuple(r.randint(1, 4) for _ in range(r.randint(2, 3))))
    members = tuple(r.sample(range(len(mesh.sizes)), r.randint(2, len(mesh.sizes))))
    table = {f"dim{d}": mesh.lists([d]) for d in members}
    orders = list(itertools.permutations(members))
    targets = {
        f"flat{i}": order for i, order in enumerate(r.sample(orders, r.randint(1, len(orders))))
    }
    table |= {name: mesh.lists(order) for name, order in targets.items()}
    b = GraphBuilder()
    shape = [r.choice([1, 2, 3, 4]) for _ in range(r.randint(1, 3))]
    if kind != "all_gather":
        shape[0] *= math.prod(mesh.sizes[d] for d in members)
    x = b.placeholder(*shape, dtype=dtype)
    node = x
    for place, dim in enumerate(members):
        if place:
            node = _random_views(b, node, r)
        size = mesh.sizes[dim]
        if kind == "all_gather":
            node = b.gather_and_wait(node, size, f"dim{dim}")
        else:
            if not node.meta["val"].dim() or node.meta["val"].shape[0] % size:
                node = b.call(aten.reshape, node, [node.meta["val"].numel()])
            node = b.scatter_and_wait(node, "sum", size, f"dim{dim}")
    return ChainCase(b.output(node), mesh, table, members, targets)


def _random_views(b: GraphBuilder, node: fx.Node, r: random.Random) -> fx.Node:
    """Half of the time views that cancel or do nothing."""
    if r.random() < 0.5:
        return _cancelling_views(b, node, r)
    for _ in range(r.randint(1, 3)):
        node = _random_view(b, node, r)
    return node


def _cancelling_views(b: GraphBuilder, node: fx.Node, r: random.Random) -> fx.Node:
    shape = list(node.meta["val"].shape)
    dims = len(shape)
    match r.randrange(5):
        case 0:
            order = r.sample(range(dims), dims)
            inverse = [order.index(d) for d in range(dims)]
            node = b.call(aten.permute, node, order)
            return b.call(aten.permute, node, inverse)
        case 1 if dims >= 2:
            a, c = r.sample(range(dims), 2)
            return b.call(aten.transpose.int, b.call(aten.transpose.int, node, a, c), c, a)
        case 2:
            node = b.call(aten.reshape, node, [math.prod(shape)])
            return b.call(aten.view, node, shape)
        case 3:
            return b.call(aten.squeeze.dim, b.call(aten.unsqueeze, node, 0), 0)
        case _:
            return b.call(
                aten.slice.Tensor, b.call(aten.constant_pad_nd, node, [0, 0]), 0, 0, shape[0]
            )


def _random_view(b: GraphBuilder, node: fx.Node, r: random.Random) -> fx.Node:
    shape = list(node.meta["val"].shape)
    dims = len(shape)
    match r.randrange(4):
        case 0 if dims >= 2:
            return b.call(aten.permute, node, r.sample(range(dims), dims))
        case 1 if dims == 2:
            return b.call(aten.t, node)
        case 2 if dims < 4:
            return b.call(aten.unsqueeze, node, r.randint(0, dims))
        case _:
            return b.call(aten.reshape, node, _random_shape(math.prod(shape), r))


def _random_shape(size: int, r: random.Random) -> list[int]:
    shape = []
    for _ in range(r.randint(0, 2)):
        factor = r.choice([d for d in range(1, size + 1) if size % d == 0])
        shape.append(factor)
        size //= factor
    return [*shape, size]
