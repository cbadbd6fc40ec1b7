"""When each collective starts and when it is waited for: one simulated pass over the graph.

Compute keeps its order.  Along it, starts and waits are placed as a run of the graph would want
them (the timeline's lanes tell the time):

    parameter gathers     start as late as still hides them: when the compute left until their first
                          use is no more than what their stream has to do until then, and the stream
                          would stand idle otherwise.  Wait at first use.
    gradient reductions   start where they can; wait once they are done, which frees their buffers,
                          at the latest at the end.  One that another feeds starts when that is done.
    all others            start and wait where they stand: they are on the critical path.

A start moves up only while memory stays under the cap at every place it moves over, at most
``prefetch_kernels`` ahead of its use, and not over a side effect.  Linear in the graph, times the
nodes that a gather moves over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import LiveBytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Lanes
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import Gather, find_gathers
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BarrierKind,
    Collective,
    Skeleton,
    Traffic,
)


@dataclass(frozen=True)
class Limits:
    """What a schedule must keep.

    Args:
        peak_bytes: live bytes that no place may exceed because of a move.
        in_flight_bytes: outputs of gathers that have started and are not used yet, and payloads of
            reductions that are not waited for yet; None for no bound.
        prefetch_kernels: kernels between the start of a gather and its first use; None for no
            bound.
    """

    peak_bytes: int
    in_flight_bytes: int | None = None
    prefetch_kernels: int | None = 50


@dataclass(frozen=True, eq=False)
class Move:
    """A node, and the place in the graph's order in front of which it now stands."""

    node: fx.Node
    place: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Moves in the order in which they stand where they share a place; counted work."""

    moves: tuple[Move, ...]
    operations: int


def plan_schedule(
    order: Sequence[fx.Node],
    skeleton: Skeleton,
    model: RuntimeModel,
    costs: Mapping[fx.Node, ComputeCost],
    live: LiveBytes,
    limits: Limits,
) -> Schedule:
    """Places every start and wait of a graph.

    Args:
        order: the graph's nodes in order.
        costs, live: of them.
    """
    scheduler = _Scheduler(order, skeleton, model, costs, live, limits)
    scheduler.run()
    return Schedule(tuple(scheduler.moves), scheduler.operations)


class _Scheduler:
    """One pass; see the module."""

    def __init__(
        self,
        order: Sequence[fx.Node],
        skeleton: Skeleton,
        model: RuntimeModel,
        costs: Mapping[fx.Node, ComputeCost],
        live: LiveBytes,
        limits: Limits,
    ) -> None:
        self.order, self.skeleton, self.model = order, skeleton, model
        self.costs, self.live, self.limits = costs, live, limits
        self.place = {node: place for place, node in enumerate(order)}
        self.lanes = Lanes(model)
        self.moves: list[Move] = []
        self.operations = 0
        self.extra = [0] * len(order)  # bytes that moves add at each place
        self.in_flight = 0
        self.compute_before, self.kernels_before = self._sums()
        gathers = find_gathers(skeleton, self.place)
        self.gather_of = {gather.collective.index: gather for gather in gathers}
        self.latest = self._latest_starts(gathers)
        self.pending = gathers[::-1]
        self.started: set[int] = set()
        self.flying: list[Collective] = []
        self.fed_by: dict[int, list[Collective]] = {}
        for collective in skeleton.collectives:
            if collective.feeder is not None and collective.traffic is Traffic.GRADIENT:
                self.fed_by.setdefault(collective.feeder, []).append(collective)

    def _sums(self) -> tuple[list[float], list[int]]:
        """Compute ms, and kernels, in front of each place."""
        compute, kernels = [0.0], [0]
        for node in self.order:
            cost = self.costs.get(node)
            compute.append(compute[-1] + (cost.ms if cost else 0.0))
            kernels.append(kernels[-1] + (cost.launches if cost else 0))
        return compute, kernels

    def _latest_starts(self, gathers: Sequence[Gather]) -> dict[int, float]:
        """Compute ms at which each gather must start to be in time for its use and for the next
        gather of its stream; reductions that become ready in between take their time on it too."""
        arrivals: dict[str, list[tuple[float, float]]] = {}
        for c in self.skeleton.collectives:
            if c.traffic is Traffic.GRADIENT:
                ready = self.compute_before[self.place[c.start]]
                arrivals.setdefault(c.group, []).append((ready, self.model.collective_ms(c)))
        latest: dict[int, float] = {}
        next_start: dict[str, float] = {}
        for gather in reversed(gathers):
            collective = gather.collective
            later = next_start.get(collective.group, float("inf"))
            start = min(self.compute_before[gather.use], later)
            start -= self.model.collective_ms(collective)
            waiting = arrivals.get(collective.group, [])
            while waiting and waiting[-1][0] >= start:
                ready, ms = waiting.pop()
                start -= ms if ready < later else 0.0
            latest[collective.index] = next_start[collective.group] = start
        return latest

    def run(self) -> None:
        starts = {c.start: c for c in self.skeleton.collectives}
        waits = {wait: c for c in self.skeleton.collectives for wait in c.waits}
        moved = {node for gather in self.pending for node in gather.preparation}
        fences = {b.node for b in self.skeleton.barriers if b.kind is BarrierKind.EFFECT}
        for place, node in enumerate(self.order):
            if node in fences or node.op == "output":
                self._collect_all(place)
            elif node in waits:
                self._reach_wait(place, waits[node])
            elif node in starts:
                self._reach_start(starts[node])
            elif node in self.costs and node not in moved:
                if self.costs[node].launches:
                    self._collect_done(place)
                    self._start_due(place, self.costs[node].ms)
                self.lanes.compute(node, self.costs[node])

    # -- gathers -----------------------------------------------------------------------------------

    def _start_due(self, place: int, upcoming_ms: float) -> None:
        """Starts the gathers whose time has come, in order of use."""
        while self.pending and self._is_due(self.pending[-1], place, upcoming_ms):
            self._start_gather(self.pending.pop(), place)

    def _is_due(self, gather: Gather, place: int, upcoming_ms: float) -> bool:
        self.operations += 1
        if place < gather.earliest:
            return False
        bound = self.limits.prefetch_kernels
        ahead = self.kernels_before[gather.use] - self.kernels_before[place]
        if bound is not None and ahead > bound:
            return False
        now = max(self.lanes.compute_free, self.lanes.host)
        free = self.lanes.group_free.get(gather.collective.group, 0.0)
        backlog = max(free - now, 0.0)
        due_ms = self.compute_before[place] + upcoming_ms + backlog
        due = due_ms >= self.latest[gather.collective.index] and backlog <= upcoming_ms
        return due and self._fits(gather, place)

    def _fits(self, gather: Gather, place: int) -> bool:
        """Under the caps at every place that the start moves over."""
        size = gather.collective.size_bytes
        bound = self.limits.in_flight_bytes
        if bound is not None and self.in_flight + size > bound:
            return False
        limit = self.limits.peak_bytes - size
        over = range(place, max(gather.start, place))
        self.operations += len(over)
        return all(self.live.at_node[p] + self.extra[p] <= limit for p in over)

    def _start_gather(self, gather: Gather, place: int) -> None:
        size = gather.collective.size_bytes
        for over in range(place, gather.start):
            self.extra[over] += size
        for over in range(gather.start, place):
            self.extra[over] -= size
        self.in_flight += size
        for node in gather.preparation:
            if node in self.costs:
                self.lanes.compute(node, self.costs[node])
        self.lanes.start(gather.collective)
        self.started.add(gather.collective.index)
        self.moves.extend(Move(n, place) for n in (*gather.preparation, gather.collective.start))

    # -- places of the input -------------------------------------------------------------------------

    def _reach_wait(self, place: int, collective: Collective) -> None:
        gather = self.gather_of.get(collective.index)
        if gather is None:
            if collective.traffic is not Traffic.GRADIENT:
                self.lanes.wait(collective)
            return  # reductions are collected when they are done
        while collective.index not in self.started:
            self._start_gather(self.pending.pop(), place)
        if place == gather.use:
            self.in_flight -= collective.size_bytes
        self.lanes.wait(collective)

    def _reach_start(self, collective: Collective) -> None:
        if collective.index in self.gather_of or collective.index in self.started:
            return
        if any(collective in self.fed_by.get(c.index, ()) for c in self.flying):
            return  # starts once what feeds it is done
        self._start_here(collective)

    def _start_here(self, collective: Collective) -> None:
        self.lanes.start(collective)
        self.started.add(collective.index)
        if collective.traffic is Traffic.GRADIENT and collective.waits:
            self.flying.append(collective)
            self.in_flight += collective.size_bytes

    # -- reductions ----------------------------------------------------------------------------------

    def _collect_done(self, place: int) -> None:
        """Waits for reductions that have ended, oldest first."""
        now = max(self.lanes.compute_free, self.lanes.host)
        bound = self.limits.in_flight_bytes
        while self.flying:
            crowded = bound is not None and self.in_flight > bound
            if self.lanes.end_of(self.flying[0]) > now and not crowded:
                return
            self._collect(self.flying.pop(0), place)

    def _collect_all(self, place: int) -> None:
        while self.flying:
            self._collect(self.flying.pop(0), place)

    def _collect(self, collective: Collective, place: int) -> None:
        self.in_flight -= collective.size_bytes
        for wait in collective.waits:
            self.lanes.wait(collective)
            self.moves.append(Move(wait, place))
        for fed in self.fed_by.get(collective.index, ()):
            if fed.index not in self.started:
                self.moves.append(Move(fed.start, place))
                self._start_here(fed)
