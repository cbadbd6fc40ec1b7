"""What a schedule may move: parameter gathers with the nodes that only prepare them.

placeholder -> cast -> pad -> AG -> wait -> use        {cast, pad, AG} move up together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BarrierKind,
    Collective,
    CollectiveKind,
    Skeleton,
    Traffic,
)


@dataclass(eq=False)
class Gather:
    """A parameter gather whose start may move up.

    Args:
        collective: the gather.
        preparation: nodes that only prepare its payload, in graph order; they move with it.
        earliest: first place where what those need exists.
        start, use: places of its start and of its first wait.
    """

    collective: Collective
    preparation: tuple[fx.Node, ...]
    earliest: int
    start: int
    use: int


def find_gathers(skeleton: Skeleton, place: Mapping[fx.Node, int]) -> list[Gather]:
    """Parameter gathers in order of use; linear in the graph."""
    fixed = {node for pair in skeleton.order_dependencies for node in pair}
    for collective in skeleton.collectives:
        fixed.update((collective.start, *collective.waits))
    fences = [place[b.node] for b in skeleton.barriers if b.kind is BarrierKind.EFFECT]
    found = [
        _gather(c, place, fixed, fences)
        for c in skeleton.collectives
        if c.kind is CollectiveKind.ALL_GATHER and c.traffic is Traffic.PARAMETER and c.waits
    ]
    return sorted(found, key=lambda gather: (gather.use, gather.start))


def _gather(
    collective: Collective,
    place: Mapping[fx.Node, int],
    fixed: set[fx.Node],
    fences: Sequence[int],
) -> Gather:
    start = place[collective.start]
    preparation = _preparation(collective.start, place, fixed)
    inside = {collective.start, *preparation}
    needed = [place[n] for node in inside for n in node.all_input_nodes if n not in inside]
    fence = max((f for f in fences if f < start), default=-1)
    earliest = max(needed, default=-1)
    use = min(place[wait] for wait in collective.waits)
    return Gather(collective, preparation, max(earliest, fence) + 1, start, use)


def _preparation(
    start: fx.Node, place: Mapping[fx.Node, int], fixed: set[fx.Node]
) -> tuple[fx.Node, ...]:
    """Casts, views and pads that nobody but ``start`` needs."""
    inside = {start}
    pending = list(start.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node in fixed or not inside.issuperset(node.users):
            continue
        if node not in inside:
            inside.add(node)
            pending.extend(node.all_input_nodes)
    inside.discard(start)
    return tuple(sorted(inside, key=place.__getitem__))
