"""torch's own passes on the graphs that ours get: for tests of ``torch_patches.compat_api``.

Needs a default process group, which may be fake; torch's passes look groups up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.overlap_scheduling import CollectiveInfo
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    is_control_deps,
    wait_source,
    wrapped_node,
)
from torch_patches.testing.hiding_sketch import Sketch

aten = torch.ops.aten

#: Name -> the module of torch that has it.
HOMES = {
    "AugmentedGraphHelper": "augmented_graph_helper",
    "OverlapPreservingBucketer": "fx_passes.overlap_preserving_bucketer",
    "OverlapScheduler": "fx_passes.overlap_scheduling",
    "schedule_overlap_bucketing": "fx_passes.overlap_scheduling",
    "pre_bucket_fsdp_collectives": "fx_passes.fsdp",
    "identify_fsdp_groups": "fx_passes.fsdp",
    "greedy_bucket_collective_by_mb": "fx_passes.bucketing",
    "manual_overlap_bucketing": "fx_passes.overlap_manual_scheduling",
    "ManualOverlapScheduler": "fx_passes.overlap_manual_scheduling",
}


def of_torch(name: str) -> Any:
    """torch's thing of this name; None where this torch has none."""
    return getattr(importlib.import_module("torch._inductor." + HOMES[name]), name, None)


@contextmanager
def without_gpu() -> Iterator[None]:
    """torch's scheduler asks a GPU for its rates; compute that nobody estimates takes no time then."""
    name = _compat.roofline_name()
    if name is None:
        yield
        return
    with mock.patch.object(overlap_scheduling, name, lambda node: 0.0):
        yield


def launches(gm: fx.GraphModule) -> dict[str, int]:
    """Launches by kind, and waits, of a graph of either."""
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        name = word(node)
        if name in ("gather", "scatter", "reduce", "wait"):
            found[name] = found.get(name, 0) + 1
    return found


def words(gm: fx.GraphModule) -> str:
    """The order of starts, waits and matrix products."""
    return " ".join(filter(None, map(word, gm.graph.nodes)))


def word(node: fx.Node) -> str:
    """What a node is, in one word, also inside ``control_deps``; empty for others."""
    op = wrapped_node(node) or node
    text = str(op.target) if op.op == "call_function" else ""
    names = {
        "wait_tensor": "wait",
        "_c10d_functional.all_gather": "gather",
        "_c10d_functional.reduce_scatter": "scatter",
        "_c10d_functional.all_reduce": "reduce",
        "aten.mm": "mm",
    }
    return next((name for part, name in names.items() if part in text), "")


def held(gm: fx.GraphModule) -> list[str]:
    """Words of the nodes that control dependencies hold back, in graph order."""
    return [word(node) for node in gm.graph.nodes if is_control_deps(node)]


def infos(
    gm: fx.GraphModule, hiding: Mapping[fx.Node, tuple[fx.Node, ...]]
) -> dict[fx.Node, CollectiveInfo]:
    """What torch's scheduler hands to its bucketer: hidden collectives wholly, others not at all."""
    return {
        c.start: CollectiveInfo(
            c.start,
            c.waits[0],
            c.size_bytes,
            1.0,
            0.0 if c.start in hiding else 1.0,
            OrderedSet(hiding.get(c.start, ())),
        )
        for c in collect(gm.graph).collectives
    }


def fixed_times(**ms: float) -> Callable[[fx.Node, int | None], float | None]:
    """An estimation by kind (``mm``, ``gather``, ``scatter``, ``reduce``), however large; it knows
    nothing else."""

    def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
        return None if wait_source(node) is not None else ms.get(word(node))

    return estimate


class WorldSketch(Sketch):
    """A :class:`Sketch` on groups that exist: torch's passes look them up."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.world = group

    def start(self, group: str = "", rows: int = 4) -> fx.Node:
        return self.all_gather(self.placeholder(rows, 8), 2, group or self.world)

    def scatter(self, source: fx.Node, group: str = "") -> fx.Node:
        return super().scatter(source, group or self.world)
