"""How the benches run a planner on a captured graph, and what they measure of the result."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.fx as fx
from _bench_floor import edge_nodes

import torch_patches.optimize  # noqa: F401 (else the first plan would be timed with its import)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Timeline, simulate
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Skeleton, Traffic
from torch_patches.captured import load_captured
from torch_patches.testing import torch_scheduler
from torch_patches.testing.backends import as_on_gpu

GIB = 2**30
#: Changes a graph, in place or not, and returns the result.
Planner = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True, eq=False)
class Planned:
    """A graph after a planner.

    Args:
        gm: the result; the input where there is an error.
        error: the planner's exception in a line, or empty.
        cpu_s: process time of the planner, without recompiling the graph: Inductor does that
            once, behind all passes.
        kept: places of the inputs that are never freed.
        activations: names of the input's starts that carry neither parameters nor gradients.
        labels: what process groups are for, by name.
    """

    gm: fx.GraphModule
    error: str = ""
    cpu_s: float = 0.0
    kept: frozenset[int] = frozenset()
    activations: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def planned(path: Path, graph: str, planner: Planner) -> Iterator[Planned]:
    """Loads ``graph`` afresh and plans it.  Its process groups exist until the context ends.

    An exception of the planner is a result.
    """
    captured = load_captured(path)
    gm = captured.graphs[graph]
    with as_on_gpu(), torch_scheduler.process_groups(captured.groups):
        kept = frozenset(gathered_inputs(gm.graph))
        others = (c for c in collect(gm.graph).collectives if c.traffic is Traffic.OTHER)
        activations = frozenset(c.start.name for c in others)
        vars(gm)["recompile"] = lambda: None
        gc.collect()
        start = time.process_time()
        try:
            after = planner(gm)
        except Exception as error:
            traceback.print_exc(limit=-4)
            yield Planned(gm, f"{type(error).__name__}: {error!s:.200}")
            return
        cpu_s = time.process_time() - start
        del vars(gm)["recompile"]
        after.recompile()
        yield Planned(after, "", cpu_s, kept, activations, captured.group_descriptions)


@dataclass(frozen=True, eq=False)
class Simulated:
    """A finished graph as the simulator sees it; ``costs`` are those of its compute nodes."""

    skeleton: Skeleton
    costs: Mapping[fx.Node, ComputeCost]
    timeline: Timeline


def simulated(graph: fx.Graph, model: RuntimeModel, *, uncorrected: bool = False) -> Simulated:
    """The run of ``graph`` as it stands.

    Args:
        uncorrected: torch's copies into gathers cost what our planners' model takes for an op that
            it does not know, see ``torch_scheduler.copies_in``.
    """
    skeleton = collect(graph)
    # Planners leave out what only ranks with a short shard do; here torch's copies shall count.
    costs = dict(model.node_costs(graph, replace(skeleton, idle=frozenset())))
    if not uncorrected:
        costs |= torch_scheduler.copies_in(costs, model)
    run = simulate(graph.nodes, skeleton, model.beside(costs), costs)
    return Simulated(skeleton, costs, run)


def measure(done: Planned, model: RuntimeModel) -> dict[str, Any]:
    """The figures of a finished graph that both benches report."""
    graph = done.gm.graph
    run = simulated(graph, model)
    inputs = graph.find_nodes(op="placeholder")
    exposed = run.timeline.exposed_by_group()
    freed = peak_bytes(graph, free_inputs=True, kept={inputs[place] for place in done.kept})
    return {
        "total_ms": run.timeline.total_ms,
        "compute_ms": run.timeline.compute_ms,
        "exposed_ms": {done.labels.get(group) or group: ms for group, ms in exposed.items()},
        "peak_bytes": peak_bytes(graph).peak_bytes,
        "freed_peak_bytes": freed.peak_bytes,
        "launches": dict(Counter(c.kind.value for c in run.skeleton.collectives)),
        "nodes": len(graph.nodes),
    }


def exposed_at_the_ends(graph: fx.Graph, run: Simulated) -> tuple[float, float]:
    """Exposed ms of what is waited for before any kernel, and of what is after all of them.

    What prepares payloads, or follows results on their way out, is no kernel here.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    edge = edge_nodes(graph)
    working = [place[node] for node in run.costs if node not in edge]
    first, last = min(working, default=0), max(working, default=-1)
    before = behind = 0.0
    for span in run.timeline.spans:
        waits = [place[wait] for wait in span.collective.waits]
        if not waits or min(waits) > last:
            behind += span.exposed_ms
        elif min(waits) < first:
            before += span.exposed_ms
    return before, behind


def gathered_inputs(graph: fx.Graph) -> set[int]:
    """Places of the inputs that parameter gathers read: the caller holds them anyway."""
    pending = [
        c.start
        for c in collect(graph).collectives
        if c.kind is CollectiveKind.ALL_GATHER and c.traffic is Traffic.PARAMETER
    ]
    seen = set(pending)
    while pending:
        fresh = [n for n in pending.pop().all_input_nodes if n not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    inputs = graph.find_nodes(op="placeholder")
    return {place for place, node in enumerate(inputs) if node in seen}
