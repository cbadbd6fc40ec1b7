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

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton


class Hiding(NamedTuple):
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
    launches: Launches | None = None,
) -> Timeline:
    """The run of one graph, its nodes in ``order``.

    Args:
        skeleton: of the graph.
        costs: of its compute nodes (:meth:`RuntimeModel.node_costs`).
        launches: of its collectives (:func:`launches_of`), where somebody has them.
    """
    run = Lanes(model)
    launches = launches_of(skeleton, model) if launches is None else launches
    starts, waits = launches.starts, launches.waits
    for node in order:
        if node in starts:
            run.start(starts[node])
        elif node in waits:
            run.wait(waits[node])
        elif node in costs:
            run.compute(node, costs[node])
    return run.finish(launches.all)


@dataclass(frozen=True, eq=False)
class Launch:
    """What the lanes need to know of one collective, or of several launched as one.

    Args:
        collective: the first of them, whose index names the launch.
        ms: on an idle link.
        link: that it uses.
        host_ms: of issuing it.
    """

    collective: Collective
    ms: float
    link: Link
    host_ms: float


def launch_of(members: Sequence[Collective], model: RuntimeModel, coalesced: bool = True) -> Launch:
    """The launch of one collective, or of a bucket.

    Args:
        members: in graph order; their sizes add up.
        coalesced: several outputs, each of which costs the host something; else one tensor.
    """
    first = members[0]
    size = None if len(members) == 1 else sum([member.size_bytes for member in members])
    outputs = sum([len(member.waits) or 1 for member in members]) if coalesced else 1
    host = model.host
    host_us = host.collective_us + (outputs - 1) * host.coalesced_member_us
    return Launch(first, model.collective_ms(first, size), model.link(first), host_us / 1e3)


@dataclass(frozen=True, eq=False)
class Launches:
    """The launches of a graph as it stands.

    Args:
        all: in start order.
        starts, waits: by the node that launches, or waits for, each.
    """

    all: Sequence[Launch]
    starts: Mapping[fx.Node, Launch]
    waits: Mapping[fx.Node, Launch]


def launches_of(skeleton: Skeleton, model: RuntimeModel) -> Launches:
    """Each collective of the graph launched on its own."""
    launches = [launch_of((collective,), model) for collective in skeleton.collectives]
    starts = {launch.collective.start: launch for launch in launches}
    waits = {wait: launch for launch in launches for wait in launch.collective.waits}
    return Launches(launches, starts, waits)


@dataclass(frozen=True, eq=False)
class FlightState:
    """A collective that has been issued, as :class:`LanesState` keeps it.

    Args:
        begin_ms, end_ms: from ``now`` on; 0 for what lies behind.
    """

    launch: Launch
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, eq=False)
class LanesState:
    """What the future of a run depends on, all relative to :attr:`Lanes.now`.

    Clocks that lie behind ``now`` are alike: nothing can begin before it.

    Args:
        lag_ms: how far behind ``now`` the host is.
        groups, links: ms for which each that is busy still is.
        flights: by index of the launch, in start order.
    """

    lag_ms: float
    groups: Mapping[str, float]
    links: Mapping[Link, float]
    flights: Mapping[int, FlightState]


@dataclass
class _Flight:
    """A collective that has been issued."""

    launch: Launch
    begin: float
    end: float
    exposed: float = 0.0
    waited: bool = False
    hidden_by: list[Hiding] = field(default_factory=list)


def _begin_of(flight: _Flight) -> float:
    return flight.begin


class Lanes:
    """The lanes' clocks, in ms.  Work is issued call by call, in the order of the host."""

    def __init__(self, model: RuntimeModel) -> None:
        self.model = model
        self.host = 0.0
        self.compute_free = 0.0
        self.compute_ms = 0.0
        self.exposed_ms = 0.0  # by the waits so far
        self.group_free: dict[str, float] = {}
        self.link_free: dict[Link, float] = {}
        self.flights: dict[int, _Flight] = {}
        self.in_air: list[_Flight] = []  # by begin
        self._kernel_ms = model.host.kernel_us / 1e3
        self._slowdown = model.interference.compute_slowdown

    def start(self, launch: Launch) -> None:
        group, link = launch.collective.group, launch.link
        self.host += launch.host_ms
        begin = self._begin(group, link)
        flight = _Flight(launch, begin, begin + launch.ms)
        self.group_free[group] = flight.end
        self.link_free[link] = max(self.link_free.get(link, 0.0), flight.end)
        self.flights[launch.collective.index] = flight
        insort(self.in_air, flight, key=_begin_of)

    def _begin(self, group: str, link: Link) -> float:
        begin = max(self.now, self.group_free.get(group, 0.0))
        behind = max(self.link_free.get(link, 0.0) - begin, 0.0)
        return begin + behind * self.model.interference.link_sharing

    def would_end(self, launch: Launch) -> float:
        """When a collective would end that is issued now."""
        return self._begin(launch.collective.group, launch.link) + launch.ms

    def compute(self, node: fx.Node, cost: ComputeCost) -> None:
        ms, launches = cost
        self.host += launches * self._kernel_ms
        self.compute_ms += ms
        begin = self.compute_free if self.compute_free > self.host else self.host
        in_air = self.in_air
        if in_air:
            for flight in in_air:
                if flight.end <= begin:
                    in_air = self.in_air = [f for f in in_air if f.end > begin]
                    break
        if not in_air:
            self.compute_free = begin + ms
            return
        end = self.compute_free = self._slowed(begin, ms)
        for flight in in_air:
            first = flight.begin if flight.begin > begin else begin
            last = flight.end if flight.end < end else end
            if last > first:
                flight.hidden_by.append(Hiding(node, last - first))

    def _slowed(self, begin: float, ms: float) -> float:
        """When ``ms`` of compute end that begin at ``begin``, slower under active collectives."""
        slowdown = self._slowdown
        now, left = begin, ms
        for flight in self.in_air:
            if flight.end <= now:
                continue
            if flight.begin > now:
                alone = flight.begin - now
                if left <= alone:
                    break
                now, left = now + alone, left - alone
            under = (flight.end - now) / slowdown
            if left <= under:
                return now + left * slowdown
            now, left = flight.end, left - under
        return now + left

    def wait(self, launch: Launch, waits: int = 1) -> None:
        """Args: ``waits``: for so many results of it."""
        self.host += waits * self.model.host.wait_us / 1e3
        flight = self.flights[launch.collective.index]
        flight.waited = True
        stood = max(flight.end - self.now, 0.0)
        flight.exposed += stood
        self.exposed_ms += stood
        self.compute_free = max(self.compute_free, flight.end)

    def end_of(self, launch: Launch) -> float:
        """When a collective that has been issued ends."""
        return self.flights[launch.collective.index].end

    @property
    def now(self) -> float:
        """The earliest time at which the next kernel can begin."""
        return self.compute_free if self.compute_free > self.host else self.host

    def snapshot(self, flights: Iterable[int]) -> LanesState:
        """The state as it is, for :meth:`restore`.

        Args:
            flights: indices of the launches that have started and may be asked for again; all that
                are in the air must be among them.
        """
        now = self.now

        def left(time_ms: float) -> float:
            return max(time_ms - now, 0.0)

        found = ((index, self.flights[index]) for index in flights)
        return LanesState(
            lag_ms=now - self.host,
            groups={group: end - now for group, end in self.group_free.items() if end > now},
            links={link: end - now for link, end in self.link_free.items() if end > now},
            flights={i: FlightState(f.launch, left(f.begin), left(f.end)) for i, f in found},
        )

    def restore(self, state: LanesState) -> None:
        """Goes on from a snapshot with ``now`` as time 0 and nothing summed up yet.

        :meth:`finish` then tells of the time since, and of the snapshot's flights.
        """
        self.host, self.compute_free = -state.lag_ms, 0.0
        self.compute_ms = self.exposed_ms = 0.0
        self.group_free, self.link_free = dict(state.groups), dict(state.links)
        self.flights = {
            index: _Flight(flight.launch, flight.begin_ms, flight.end_ms)
            for index, flight in state.flights.items()
        }
        in_air = [flight for flight in self.flights.values() if flight.end > 0]
        self.in_air = sorted(in_air, key=_begin_of)

    def finish(self, launches: Iterable[Launch]) -> Timeline:
        """The whole run.  Args: ``launches`` in start order."""
        ended = self.now
        for flight in self.flights.values():
            if not flight.waited:
                flight.exposed += max(flight.end - ended, 0.0)
                ended = max(ended, flight.end)
        spans = tuple(
            CollectiveSpan(f.launch.collective, f.begin, f.end, f.exposed, tuple(f.hidden_by))
            for f in (self.flights[launch.collective.index] for launch in launches)
        )
        exposed_ms = sum(span.exposed_ms for span in spans)
        return Timeline(ended, self.compute_ms, exposed_ms, self.host, spans)
