"""Where a collective, or a bucket of several, starts and is waited for, and where it could.

Places are those of the graph's order.  A bucket starts where the inputs of all members exist, in
front of all compute that hides a member, and is waited for behind that, before anything uses one:

    gather a   |earliest   start|  hiding     |wait  latest|
    gather b        |earliest     start|   hiding   |wait   latest|
    {a, b}          |...........|  hiding   hiding  |......|
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import is_view
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import Gather
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    RefusalReason,
    Traffic,
)

#: Behind every place.
NEVER = sys.maxsize


@dataclass(frozen=True)
class Berth:
    """See the module.  What stands *at* a place stands in front of the node of that number.

    Args:
        start, wait: places of the start and of the first wait.
        earliest: first place of the start where the inputs of all members exist.
        latest: last place of the wait, in front of the first use.
        first_hiding: place of the first compute that hides a member, or :data:`NEVER`.
        behind_hiding: place behind the last such compute, or 0.
        size_bytes: of the members together.
        flight_bytes: of what gathers keep alive from their start to their use.
        copied_bytes: what a copying bucket keeps alive besides, from its start to its wait: the copy
            that it sends, where what was sent before lives on.
        members: how many.
        first, last: positions of the members' starts, in working nodes (for the span).
        is_settled: False if only dependencies tell where it stands.
    """

    start: int
    wait: int
    earliest: int
    latest: int
    first_hiding: int
    behind_hiding: int
    size_bytes: int
    flight_bytes: int
    copied_bytes: int
    first: int
    last: int
    members: int = 1
    is_settled: bool = True

    @property
    def is_hidden(self) -> bool:
        """Some member has compute that hides it."""
        return self.behind_hiding > 0


def joint_bounds(one: Berth, two: Berth) -> Berth:
    """What bounds a bucket of both; it starts and is waited for as late as one of them."""
    return Berth(
        start=max(one.start, two.start),
        wait=max(one.wait, two.wait),
        earliest=max(one.earliest, two.earliest),
        latest=min(one.latest, two.latest),
        first_hiding=min(one.first_hiding, two.first_hiding),
        behind_hiding=max(one.behind_hiding, two.behind_hiding),
        size_bytes=one.size_bytes + two.size_bytes,
        flight_bytes=one.flight_bytes + two.flight_bytes,
        copied_bytes=one.copied_bytes + two.copied_bytes,
        first=min(one.first, two.first),
        last=max(one.last, two.last),
        members=one.members + two.members,
        is_settled=one.is_settled and two.is_settled,
    )


@dataclass(frozen=True)
class JointPlaces:
    """A place where a bucket can start, and those where it can be waited for then, in the order in
    which they are to be tried."""

    start: int
    waits: tuple[int, ...]


def joint_places(one: Berth, two: Berth) -> Iterator[JointPlaces]:
    """The places at which a bucket of both can stand, those to be tried first in front.

    Starts: the later member's, which needs the least memory; directly in front of the first compute
    that hides a member; the earlier member's.  For each, waits: the later member's; directly behind
    the last compute that hides a member; the earlier member's, which holds buffers the shortest.
    Three times three at most.
    """
    if not (one.is_settled and two.is_settled) or obstacle(one, two) is not None:
        return
    earliest = max(one.earliest, two.earliest)
    latest = min(one.latest, two.latest)
    hiding = min(one.first_hiding, two.first_hiding)
    behind = max(one.behind_hiding, two.behind_hiding)
    late, early = max(one.start, two.start), min(one.start, two.start)
    ends = (max(one.wait, two.wait), behind, min(one.wait, two.wait))
    for start in dict.fromkeys((late, hiding, early)):
        if earliest <= start <= hiding:
            least = max(start, behind)
            waits = tuple(dict.fromkeys(end for end in ends if least <= end <= latest))
            if waits:
                yield JointPlaces(start, waits)


def obstacle(one: Berth, two: Berth) -> RefusalReason | None:
    """Why there is no place for a bucket of both, as far as that is seen at once."""
    earliest, latest = max(one.earliest, two.earliest), min(one.latest, two.latest)
    if earliest > latest:
        return RefusalReason.PREFETCH
    hiding = min(one.first_hiding, two.first_hiding)
    behind = max(one.behind_hiding, two.behind_hiding)
    return RefusalReason.HIDING if earliest > hiding or behind > latest else None


def find_berths(
    collectives: Sequence[Collective],
    place: Mapping[fx.Node, int],
    gathers: Mapping[int, Gather],
    hiding: Mapping[int, Sequence[fx.Node]],
    scheduled: Mapping[fx.Node, int] | None = None,
    waits_stay: bool = False,
) -> list[Berth]:
    """Where each collective stands by itself; linear in the graph.

    Args:
        place: of the nodes in the graph's order.
        gathers: movable ones, by index.
        hiding: compute that hides them, by index.
        scheduled: places of starts and waits that a schedule moves.
        waits_stay: gathers are waited for at the latest where they are now.
    """
    moved = scheduled if scheduled is not None else {}
    return [
        _berth(c, place, gathers.get(c.index), hiding.get(c.index, ()), moved, waits_stay)
        for c in collectives
    ]


def _berth(
    collective: Collective,
    place: Mapping[fx.Node, int],
    gather: Gather | None,
    hiding: Sequence[fx.Node],
    scheduled: Mapping[fx.Node, int],
    waits_stay: bool,
) -> Berth:
    start = scheduled.get(collective.start, place[collective.start])
    waits = [scheduled.get(wait, place[wait]) for wait in collective.waits]
    wait = min(waits, default=NEVER)
    latest = wait if waits_stay and gather is not None else _first_use(collective, place)
    places = [place[node] for node in hiding]
    return Berth(
        start=start,
        wait=wait,
        earliest=start if gather is None else gather.earliest,
        latest=max(latest, wait),
        first_hiding=min(places, default=NEVER),
        behind_hiding=max(places, default=-1) + 1,
        size_bytes=collective.size_bytes,
        flight_bytes=0 if gather is None else gather.flight_bytes,
        copied_bytes=_copied_bytes(collective, gather),
        first=collective.position,
        last=collective.position,
    )


def _copied_bytes(collective: Collective, gather: Gather | None) -> int:
    """See :class:`Berth`: a parameter lives on, and a gradient that something else reads too."""
    if gather is not None:
        made_for_it = gather.flight_bytes > gather.collective.size_bytes
        return 0 if made_for_it else collective.size_bytes // ranks_of(collective)
    if collective.kind is not CollectiveKind.REDUCE_SCATTER:
        return 0  # an all-reduce sends a copy anyway
    pending = list(collective.start.all_input_nodes)
    while pending:
        payload = pending.pop()
        if len(payload.users) > 1:
            return collective.size_bytes
        pending += payload.all_input_nodes[:1] if is_view(payload) else ()
    return 0


def ranks_of(collective: Collective) -> int:
    """Ranks in its group, 1 if unknown."""
    return max((collective.key.group_size if collective.key is not None else None) or 1, 1)


def _first_use(collective: Collective, place: Mapping[fx.Node, int]) -> int:
    """Place of the first node that needs the result there; gradients only leave the graph."""
    if collective.traffic is Traffic.GRADIENT:
        return NEVER
    first = NEVER
    pending: list[fx.Node] = list(collective.waits)
    while pending:
        for user in pending.pop().users:
            if is_view(user):
                pending.append(user)
            else:
                first = min(first, place[user])
    return first
