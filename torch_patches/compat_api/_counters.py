"""torch's counters of a schedule, from what ours expects of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.fx as fx
from torch._dynamo.utils import counters

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import is_heavy_compute
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective


@dataclass(frozen=True)
class Reachable:
    """What compute could hide, in the graph as it was given.

    Args:
        hideable: indices of collectives that some matmul neither needs nor is needed by.
    """

    hideable: frozenset[int]

    @staticmethod
    def read(graph: fx.Graph, collectives: Sequence[Collective]) -> Reachable:
        """Linear in edges, times matmuls over 64."""
        nodes = list(graph.nodes)
        heavy = {node: 1 << bit for bit, node in enumerate(filter(is_heavy_compute, nodes))}
        above = _reached(nodes, heavy, lambda node: node.all_input_nodes)
        below = _reached(nodes[::-1], heavy, lambda node: node.users)
        found = (
            c.index
            for c in collectives
            if (above[c.start] | below[c.start]).bit_count() < len(heavy)
        )
        return Reachable(frozenset(found))


def _reached(
    nodes: Iterable[fx.Node],
    bits: dict[fx.Node, int],
    towards: Callable[[fx.Node], Iterable[fx.Node]],
) -> dict[fx.Node, int]:
    """Bits of all that each node reaches, itself included."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        mask = bits.get(node, 0)
        for other in towards(node):
            mask |= found[other]
        found[node] = mask
    return found


def count_schedule(overlapped: Overlapped, reachable: Reachable, later: int) -> None:
    """Adds to ``counters["inductor"]``; collectives of the input count, not their buckets.

    overlap_scheduling_exposed: nothing is hidden of them.
    overlap_scheduling_bad_exposed: those of these that compute could hide.
    overlap_scheduling_potentially_hidden: all that compute could hide.
    collective_buckets: buckets made.
    overlap_original_mem, rescheduled_mem: estimated peaks in bytes, of this graph.

    Args:
        later: buckets made behind the schedule.
    """
    exposed = _exposed(overlapped)
    counts = counters["inductor"]
    counts["overlap_scheduling_exposed"] += len(exposed)
    counts["overlap_scheduling_bad_exposed"] += len(exposed & reachable.hideable)
    counts["overlap_scheduling_potentially_hidden"] += len(reachable.hideable)
    counts["collective_buckets"] += len(overlapped.plan.buckets) + later
    counts["overlap_original_mem"] = overlapped.before.peak_bytes
    counts["rescheduled_mem"] = overlapped.after.peak_bytes


def _exposed(overlapped: Overlapped) -> set[int]:
    """Indices of the input's collectives of which nothing is hidden."""
    known = {c.start: c.index for c in overlapped.before.skeleton.collectives}
    found: set[int] = set()
    for span in overlapped.after.timeline.spans:
        start = span.collective.start
        if span.hidden_ms > 0 or not span.collective.waits:
            continue
        if start in known:
            found.add(known[start])
        else:
            bucket = overlapped.plan.buckets[start.meta[BUCKET_MARK]["bucket"]]
            found.update(member.index for member in bucket.members)
    return found
