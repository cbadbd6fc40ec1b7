"""Pieces of graphs captured from real models, as examples for the invariants.

    source = CapturedGraphs(sorted(Path("test/data").glob("*.json.gz")))
    gm, description = source.draw(Random(0))

A piece is a stretch of 20 to 250 nodes, or sometimes a whole graph, of a capture with up to 1,100.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect, find_starts
from torch_patches.captured import load_captured
from torch_patches.testing.graph_cuts import stretch
from torch_patches.testing.spmd_interpreter import expand_group
from torch_patches.testing.strategies import Description

#: Nodes of a graph that may be an example as it is.
_MOST_NODES = 1100
_LENGTHS = (20, 40, 40, 60, 80, 120, 250)


@dataclass(frozen=True, eq=False)
class _Source:
    name: str
    gm: fx.GraphModule
    description: Description


class CapturedGraphs:
    """Captures in memory, read one by one as they are needed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Args: ``paths``: of captures that :func:`load_captured` reads."""
        self._paths = list(paths)
        self._read: dict[Path, list[_Source]] = {}

    def draw(self, r: Random) -> tuple[fx.GraphModule, Description]:
        """A piece with at least one collective, and what it takes to run it."""
        sources = self._sources(r.choice(self._paths))
        source = r.choice(sources)
        whole = len(source.gm.graph.nodes) <= _MOST_NODES and not _attributes(source.gm)
        if whole and r.random() < 0.02:
            return copy.deepcopy(source.gm), source.description
        while True:
            length = r.choice(_LENGTHS)
            begin = r.randrange(max(len(source.gm.graph.nodes) - length, 1))
            piece = stretch(source.gm, begin, begin + length)
            if find_starts(piece.graph):
                return piece, source.description

    def _sources(self, path: Path) -> list[_Source]:
        if path not in self._read:
            captured = load_captured(path)
            world = captured.info["world_size"]
            groups = {g: expand_group(ranks, world) for g, ranks in captured.groups.items()}
            _add_strided(groups, world)
            description = Description(world, groups, high=256, scale=0.02)
            self._read[path] = [
                _Source(f"{path.name} {name}", gm, description)
                for name, gm in captured.graphs.items()
                if collect(gm.graph).collectives
            ]
        return self._read[path]


def _attributes(gm: fx.GraphModule) -> list[fx.Node]:
    """Values that a capture has no data of."""
    return list(gm.graph.find_nodes(op="get_attr"))


def _add_strided(groups: dict[str, list[list[int]]], world: int) -> None:
    """Groups of neighbours and of ranks that stand apart, for collectives to be moved to."""
    for size in (2, 4):
        count = world // size
        groups[f"near{size}"] = [list(range(i * size, (i + 1) * size)) for i in range(count)]
        groups[f"far{size}"] = [list(range(i, world, count)) for i in range(count)]
