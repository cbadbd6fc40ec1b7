"""What a schedule may move: parameter gathers with the nodes that only prepare them.

placeholder -> cast -> pad -> AG -> wait -> use        {cast, pad, AG} move up together
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import inputs_of, is_view
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BarrierKind,
    Collective,
    CollectiveKind,
    Move,
    RefusalReason,
    Skeleton,
    Traffic,
)


@dataclass(eq=False)
class Gather:
    """A parameter gather whose start may move up.

    Args:
        collective: the gather.
        preparation: nodes that only prepare its payload, and nodes that do no work on the way to it,
            in graph order; they move with it.
        earliest: first place where what those need exists.
        start, use: places of its start and of its first wait.
        latest: last place in front of which it can start: its use, or a side effect before that.
        flight_bytes: what lives between the two because of it: its result, and its payload where
            that is made for it (the padding of short shards apart).
    """

    collective: Collective
    preparation: tuple[fx.Node, ...]
    earliest: int
    start: int
    use: int
    latest: int
    flight_bytes: int


#: What a schedule does not move, because others write to, read or wrap what is in flight.
_STAYS = frozenset(
    {
        RefusalReason.MUTATES_ARGUMENT,
        RefusalReason.USED_BEFORE_WAIT,
        RefusalReason.WRAPPED,
        RefusalReason.NO_METADATA,
    }
)


def is_movable(collective: Collective) -> bool:
    """Whether a schedule may move its start or its waits."""
    return bool(collective.waits) and collective.refusal not in _STAYS


def preparation_moves(
    gather: Gather, start: int, place: Mapping[fx.Node, int], idle: Set[fx.Node]
) -> list[Move]:
    """Moves of what prepares a gather that starts in front of the place ``start``.

    What does no work may serve others too, and other ranks lack it: it only moves up.
    """
    return [Move(n, min(start, place[n]) if n in idle else start) for n in gather.preparation]


def find_gathers(skeleton: Skeleton, place: Mapping[fx.Node, int]) -> list[Gather]:
    """Parameter gathers in order of use; linear in the graph."""
    # What does no work only moves up: no further than to what it must stay behind.
    ordered = {node for pair in skeleton.order_dependencies for node in pair}
    fixed = {node for node in ordered if node not in skeleton.idle}
    behind: dict[fx.Node, int] = {}
    for before, after in skeleton.order_dependencies:
        behind[after] = max(behind.get(after, -1), place[before])
    for collective in skeleton.collectives:
        fixed.update((collective.start, *collective.waits))
    fences = sorted(place[b.node] for b in skeleton.barriers if b.kind is BarrierKind.EFFECT)
    found = [
        _gather(c, place, fixed, _bounds(fences, place[c.start]), behind, skeleton.idle)
        for c in skeleton.collectives
        if c.kind is CollectiveKind.ALL_GATHER and c.traffic is Traffic.PARAMETER and is_movable(c)
    ]
    return sorted(found, key=lambda gather: (gather.latest, gather.use, gather.start))


def _gather(
    collective: Collective,
    place: Mapping[fx.Node, int],
    fixed: set[fx.Node],
    bounds: tuple[int, int],
    behind: Mapping[fx.Node, int],
    idle: Set[fx.Node],
) -> Gather:
    """
    Args:
        bounds: what the start must not pass, beyond what it needs.
        behind: the same of each node that mutations order.
    """
    first, before = bounds
    start = place[collective.start]
    preparation = _preparation(collective.start, place, fixed, idle)
    inside = {collective.start, *preparation}
    needed = [place[n] for node in inside for n in inputs_of(node) if n not in inside]
    needed += [behind[node] for node in inside if node in behind]
    earliest = max(first, *needed, -1) + 1
    use = min(place[wait] for wait in collective.waits)
    size = collective.size_bytes
    if any(not is_view(node) and node not in idle for node in preparation):
        ranks = collective.key.group_size if collective.key is not None else None
        size += size // max(ranks or 1, 1)
    return Gather(collective, preparation, earliest, start, use, min(use, before), size)


def _bounds(fences: Sequence[int], place: int) -> tuple[int, int]:
    """The last of the sorted ``fences`` in front of ``place``, and the first one behind it."""
    index = bisect_left(fences, place)
    return fences[index - 1] if index else -1, fences[index] if index < len(fences) else sys.maxsize


def _preparation(
    start: fx.Node, place: Mapping[fx.Node, int], fixed: set[fx.Node], idle: Set[fx.Node]
) -> tuple[fx.Node, ...]:
    """Casts that nobody but ``start`` needs, and views and pads, also where others need them."""
    inside, exclusive = {start}, {start}
    pending = list(inputs_of(start))
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node in fixed or node in exclusive:
            continue
        alone = exclusive.issuperset(node.users)
        if not alone and (node in inside or node not in idle):
            continue
        inside.add(node)
        if alone:
            exclusive.add(node)
        pending.extend(inputs_of(node))
    inside.discard(start)
    return tuple(sorted(inside, key=place.__getitem__))
