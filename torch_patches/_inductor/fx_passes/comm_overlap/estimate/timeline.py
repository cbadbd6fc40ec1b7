"""Simulates an order of nodes: a host lane, a compute stream, and a stream for each process group.

    host       issues everything in order: kernels, collectives, waits
    compute    one kernel after the other, none before the host has issued it
    group      one collective after the other, none before the compute issued before it is done
               (NCCL waits for the stream it is called from)
    wait       the compute stream stops until the collective has ended; what it stops for is exposed

Compute under an active collective is slower, and collectives of two groups on one link share it
(:class:`~.runtime.Interference`).  Linear in nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton


@dataclass(frozen=True, eq=False)
class Hiding:
    """Compute under which a part of a collective ran."""

    node: fx.Node
    ms: float


@dataclass(frozen=True, eq=False)
class CollectiveSpan:
    """When a collective ran.

    Args:
        collective: of the skeleton.
        start_ms, end_ms: on its group's stream.
        exposed_ms: how long compute stood still for it.
        hidden_by: compute that ran meanwhile, in order.
    """

    collective: Collective
    start_ms: float
    end_ms: float
    exposed_ms: float
    hidden_by: tuple[Hiding, ...]

    @property
    def hidden_ms(self) -> float:
        """The part of it during which compute ran."""
        return sum(hiding.ms for hiding in self.hidden_by)


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated run.

    Args:
        total_ms: until everything is done.
        compute_ms: sum of the compute nodes' own times.
        exposed_ms: how long compute stood still for collectives, those never waited for included.
        host_ms: until the host has issued everything.
        spans: by collective, in start order.
    """

    total_ms: float
    compute_ms: float
    exposed_ms: float
    host_ms: float
    spans: tuple[CollectiveSpan, ...]

    def exposed_by_group(self) -> dict[str, float]:
        """Exposed ms by process group, in order of first appearance."""
        result: dict[str, float] = {}
        for span in self.spans:
            group = span.collective.group
            result[group] = result.get(group, 0.0) + span.exposed_ms
        return result


def simulate(
    order: Iterable[fx.Node],
    skeleton: Skeleton,
    model: RuntimeModel,
    costs: Mapping[fx.Node, ComputeCost],
) -> Timeline:
    """The run of one graph, its nodes in ``order``.

    Args:
        skeleton: of the graph.
        costs: of its compute nodes (:meth:`RuntimeModel.node_costs`).
    """
    run = Lanes(model)
    starts = {c.start: c for c in skeleton.collectives}
    waits = {wait: c for c in skeleton.collectives for wait in c.waits}
    compute_ms = 0.0
    for node in order:
        if node in starts:
            run.start(starts[node])
        elif node in waits:
            run.wait(waits[node])
        elif node in costs:
            compute_ms += costs[node].ms
            run.compute(node, costs[node])
    return run.finish(skeleton, compute_ms)


@dataclass
class _Flight:
    """A collective that has been issued."""

    collective: Collective
    begin: float
    end: float
    exposed: float = 0.0
    hidden_by: list[Hiding] = field(default_factory=list)


class Lanes:
    """The lanes' clocks, in ms.  Work is issued call by call, in the order of the host."""

    def __init__(self, model: RuntimeModel) -> None:
        self.model = model
        self.host = 0.0
        self.compute_free = 0.0
        self.group_free: dict[str, float] = {}
        self.link_free: dict[Link, float] = {}
        self.flights: dict[int, _Flight] = {}
        self.in_air: list[_Flight] = []

    def start(self, collective: Collective) -> None:
        members = max(len(collective.waits), 1)
        host = self.model.host
        self.host += (host.collective_us + (members - 1) * host.coalesced_member_us) / 1e3
        begin = max(self.host, self.compute_free, self.group_free.get(collective.group, 0.0))
        link = self.model.link(collective)
        busy = self.link_free.get(link, 0.0) - begin
        begin += max(busy, 0.0) * self.model.interference.link_sharing
        flight = _Flight(collective, begin, begin + self.model.collective_ms(collective))
        self.group_free[collective.group] = flight.end
        self.link_free[link] = max(self.link_free.get(link, 0.0), flight.end)
        self.flights[collective.index] = flight
        self.in_air.append(flight)

    def compute(self, node: fx.Node, cost: ComputeCost) -> None:
        self.host += cost.launches * self.model.host.kernel_us / 1e3
        begin = max(self.compute_free, self.host)
        self.compute_free = self._slowed(begin, cost.ms)
        for flight in self.in_air:
            overlap = min(flight.end, self.compute_free) - max(flight.begin, begin)
            if overlap > 0:
                flight.hidden_by.append(Hiding(node, overlap))

    def _slowed(self, begin: float, ms: float) -> float:
        """When ``ms`` of compute end that begin at ``begin``, slower under active collectives."""
        self.in_air = [flight for flight in self.in_air if flight.end > begin]
        slowdown = self.model.interference.compute_slowdown
        now, left = begin, ms
        for flight in sorted(self.in_air, key=lambda flight: flight.begin):
            if flight.end <= now:
                continue
            alone = max(flight.begin - now, 0.0)
            if left <= alone:
                break
            now, left = now + alone, left - alone
            under = (flight.end - now) / slowdown
            if left <= under:
                return now + left * slowdown
            now, left = flight.end, left - under
        return now + left

    def wait(self, collective: Collective) -> None:
        self.host += self.model.host.wait_us / 1e3
        flight = self.flights[collective.index]
        ready = max(self.compute_free, self.host)
        flight.exposed += max(flight.end - ready, 0.0)
        self.compute_free = max(self.compute_free, flight.end)

    def end_of(self, collective: Collective) -> float:
        """When a collective that has been issued ends."""
        return self.flights[collective.index].end

    def finish(self, skeleton: Skeleton, compute_ms: float) -> Timeline:
        ended = max(self.compute_free, self.host)
        for flight in self.flights.values():
            if not flight.collective.waits:
                flight.exposed += max(flight.end - ended, 0.0)
                ended = max(ended, flight.end)
        spans = tuple(
            CollectiveSpan(f.collective, f.begin, f.end, f.exposed, tuple(f.hidden_by))
            for f in (self.flights[c.index] for c in skeleton.collectives)
        )
        return Timeline(ended, compute_ms, sum(s.exposed_ms for s in spans), self.host, spans)
