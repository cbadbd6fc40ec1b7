"""What a schedule knows of a graph: read once, shared by all plans that are tried on it.

Compute keeps its order.  Along it, places are grouped into *slots*, one for each kernel: the place
of the kernel and those in front of it, back to the kernel before.  Memory is known by slot, without
what a schedule may move:

    input      cast AG wait mm0   mm1   mm2   cast AG wait mm3          slots  0    1    2    3
    gathers    may start in any slot from where their inputs exist to the one of their use
    reductions may be waited for in any slot from their start on
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeGuard

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import LiveBytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import is_view
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import (
    Gather,
    find_gathers,
    is_movable,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BarrierKind,
    Collective,
    Skeleton,
    Traffic,
)

#: Compute that costs nothing.
_NOTHING = ComputeCost(0.0, 0)


@dataclass(frozen=True, eq=False)
class Track:
    """See the module.

    Args:
        order: the graph's nodes; place: their numbers.
        skeleton, model, costs: of the graph.
        compute_before: ms of compute in front of each place.
        slot: kernels in front of each place.
        live_bytes: at each place.
        fixed_bytes: by slot, the most that lives there without the outputs of movable gathers
            (from start to first use) and without the inputs of gradient reductions.
        peak_bytes: the same with that input at the places where reductions start in the input.
        peak_behind: by slot, the largest of these from there on.
        start_bytes: index of a reduction -> what lives at that place, its input included.
        gathers: parameter gathers, by index, in order of use.
        reductions: gradient reductions, by index.
        uses: index of any other collective -> place of the first use of its result.
        fences: nodes that no start or wait crosses.
        events: place -> what a schedule has to know of it: a collective that starts or is waited
            for there, the cost of compute, None for a fence or the end.  Nodes of one kernel with
            nothing in between are one event, at its last one.  Preparation of gathers, which moves
            with them, is left out; so is what costs nothing, but for places that other collectives'
            waits may move to.
    """

    order: Sequence[fx.Node]
    place: Mapping[fx.Node, int]
    skeleton: Skeleton
    model: RuntimeModel
    costs: Mapping[fx.Node, ComputeCost]
    compute_before: Sequence[float]
    slot: Sequence[int]
    live_bytes: Sequence[int]
    fixed_bytes: Sequence[int]
    peak_bytes: Sequence[int]
    peak_behind: Sequence[int]
    start_bytes: Mapping[int, int]
    gathers: Mapping[int, Gather]
    reductions: Mapping[int, Collective]
    uses: Mapping[int, int]
    fences: frozenset[fx.Node]
    events: Sequence[tuple[int, Collective | ComputeCost | None]]

    @property
    def slots(self) -> int:
        return len(self.fixed_bytes)


def read_track(
    order: Sequence[fx.Node],
    skeleton: Skeleton,
    model: RuntimeModel,
    costs: Mapping[fx.Node, ComputeCost],
    live: LiveBytes,
) -> Track:
    """Linear in nodes and edges.

    Args:
        costs, live: of the graph, with sizes that all ranks share.
    """
    place = {node: number for number, node in enumerate(order)}
    gathers = find_gathers(skeleton, place)
    reductions = {
        c.index: c for c in skeleton.collectives if c.traffic is Traffic.GRADIENT and is_movable(c)
    }
    compute, slot = _sums(order, costs)
    fixed = _fixed_bytes(place, live, gathers, reductions)
    starts = {place[c.start]: fixed[place[c.start]] + c.size_bytes for c in reductions.values()}
    by_slot, peaks = [0] * (slot[-1] + 1), [0] * (slot[-1] + 1)
    for number, size in enumerate(fixed):
        if order[number] in skeleton.idle:
            continue  # a pad of one rank: the others have no such place
        where = slot[number]
        if number in starts:
            size = starts[number]
        elif size > by_slot[where]:
            by_slot[where] = size
        if size > peaks[where]:
            peaks[where] = size
    fences = frozenset(b.node for b in skeleton.barriers if b.kind is BarrierKind.EFFECT)
    fence_places = sorted(place[fence] for fence in fences)
    movable = {gather.collective.index for gather in gathers} | reductions.keys()
    uses = {
        c.index: _first_use(c, place, fence_places, skeleton.idle)
        for c in skeleton.collectives
        if c.index not in movable and is_movable(c)
    }
    return Track(
        order=order,
        place=place,
        skeleton=skeleton,
        model=model,
        costs=costs,
        compute_before=compute,
        slot=slot,
        live_bytes=live.at_node,
        fixed_bytes=by_slot,
        peak_bytes=peaks,
        peak_behind=list(accumulate(reversed(peaks), max))[::-1],
        start_bytes={index: starts[place[c.start]] for index, c in reductions.items()},
        gathers={gather.collective.index: gather for gather in gathers},
        reductions=reductions,
        uses=uses,
        fences=fences,
        events=_events(order, skeleton, costs, gathers, fences, uses),
    )


def _events(
    order: Sequence[fx.Node],
    skeleton: Skeleton,
    costs: Mapping[fx.Node, ComputeCost],
    gathers: Sequence[Gather],
    fences: Set[fx.Node],
    uses: Mapping[int, int],
) -> list[tuple[int, Collective | ComputeCost | None]]:
    """See :class:`Track`; linear in nodes."""
    moving = {node: c for c in skeleton.collectives for node in (c.start, *c.waits)}
    prepared = {node for gather in gathers for node in gather.preparation}
    wanted = set(uses.values())
    found: list[tuple[int, Collective | ComputeCost | None]] = []
    for place, node in enumerate(order):
        if node in fences or node.op == "output":
            found.append((place, None))
        elif node in moving:
            found.append((place, moving[node]))
        elif node in costs and node not in prepared:
            cost = costs[node]
            where, part = found[-1] if found else (place, None)
            if _is_part(part) and where not in wanted and place not in wanted:
                found.pop()
                cost = ComputeCost(cost.ms + part.ms, cost.launches)
            found.append((place, cost))
        elif place in wanted:
            found.append((place, _NOTHING))
    return found


def _is_part(event: Collective | ComputeCost | None) -> TypeGuard[ComputeCost]:
    """Compute that a later node ends the kernel of; nothing stands between them."""
    return isinstance(event, ComputeCost) and not event.launches and event is not _NOTHING


def _sums(
    order: Sequence[fx.Node], costs: Mapping[fx.Node, ComputeCost]
) -> tuple[list[float], list[int]]:
    """Compute ms, and kernels, in front of each place."""
    found = [costs.get(node) for node in order]
    compute = accumulate((cost.ms if cost else 0.0 for cost in found), initial=0.0)
    slot = accumulate((cost.launches if cost else 0 for cost in found), initial=0)
    return list(compute), list(slot)


def _fixed_bytes(
    place: Mapping[fx.Node, int],
    live: LiveBytes,
    gathers: Sequence[Gather],
    reductions: Mapping[int, Collective],
) -> list[int]:
    """Live bytes at each place without what a schedule moves.

    The input of a reduction, which lives from where it is made, is counted out from its start on.
    """
    change = [0] * (len(place) + 1)
    for gather in gathers:
        change[gather.start] -= gather.flight_bytes
        change[gather.use] += gather.flight_bytes
    for reduction in reductions.values():
        change[place[reduction.start]] -= reduction.size_bytes
        change[max(place[wait] for wait in reduction.waits) + 1] += reduction.size_bytes
    return [at + moved for at, moved in zip(live.at_node, accumulate(change), strict=False)]


def _first_use(
    collective: Collective, place: Mapping[fx.Node, int], fences: list[int], idle: Set[fx.Node]
) -> int:
    """Place of the first node that reads the result, at the latest the next fence."""
    first = min(place[wait] for wait in collective.waits)
    found = fences[bisect_right(fences, first) :][:1]
    pending: list[fx.Node] = list(collective.waits)
    while pending:
        for user in pending.pop().users:
            if is_view(user) or (user in idle and user.op == "call_function"):
                pending.append(user)
            else:
                found.append(place[user])
    return max(min(found, default=first), first)
