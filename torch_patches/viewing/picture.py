"""Both runs as plain data that can be drawn: ``picture_of(record) -> Picture``.

The record's runs are simulated once more, by the same lanes that the forecasts come from
(``estimate/timeline.py``), and this time every kernel's place in time is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Lanes, Launch
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective
from torch_patches.viewing.record import LaunchRecord, RunRecord, StoryRecord

if TYPE_CHECKING:
    from torch_patches.viewing.exposure import Exposure

#: What is in an order and no call; it does not count as moved.
_NO_CALLS = frozenset({"placeholder", "get_attr", "output"})
#: Longest kernels under a collective that are named.
NAMED_KERNELS = 8


@dataclass(frozen=True)
class Kernel:
    """A piece of compute on the compute stream; ``place`` is its node's in the order."""

    place: int
    name: str
    op: str
    module: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Flight:
    """A collective on its group's stream.

    Args:
        launch: what it is.
        issued_ms: when the compute stream had reached its start.
        start_ms, end_ms: when data moved.
        exposed_ms: how long compute stood still for it.
        hidden_ms: how long compute ran meanwhile.
        hidden_by: names of that compute and its ms under it, the longest first.
        exposure: why it is exposed; None if it is not.
    """

    launch: LaunchRecord
    issued_ms: float
    start_ms: float
    end_ms: float
    exposed_ms: float
    hidden_ms: float
    hidden_by: tuple[tuple[str, float], ...]
    exposure: Exposure | None = None

    @property
    def queued_ms(self) -> float:
        """How long it waited for its group's stream, or the link."""
        return max(self.start_ms - self.issued_ms, 0.0)


@dataclass(frozen=True)
class Stop:
    """Compute stood still for the launch with this index."""

    launch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class MemoryPoint:
    """From ``ms`` on, ``live_bytes`` live, up to the next point."""

    ms: float
    live_bytes: int


@dataclass(frozen=True)
class Run:
    """One simulated run.

    Args:
        total_ms, compute_ms, exposed_ms: as ``Timeline`` has them.
        peak_bytes, held_peak_bytes: most live bytes, with inputs freed and held.
        kernels: in order of time.
        flights: in start order.
        stops: in order of time; all that is exposed.
        memory: live bytes over time, where inputs are freed.
    """

    total_ms: float
    compute_ms: float
    exposed_ms: float
    peak_bytes: int
    held_peak_bytes: int
    kernels: tuple[Kernel, ...] = field(repr=False)
    flights: tuple[Flight, ...] = field(repr=False)
    stops: tuple[Stop, ...] = field(repr=False)
    memory: tuple[MemoryPoint, ...] = field(repr=False)

    def groups(self) -> tuple[str, ...]:
        """Process groups in order of first appearance."""
        return tuple(dict.fromkeys(flight.launch.group for flight in self.flights))


@dataclass(frozen=True)
class Picture:
    """Both runs.

    Args:
        cap_bytes: most live bytes that the result may have, with inputs freed.
        displaced: names of surviving calls that stand elsewhere among the others.
        constants, options: in words, by name.
    """

    before: Run
    after: Run
    cap_bytes: int
    held_cap_bytes: int
    displaced: tuple[str, ...]
    constants: Mapping[str, str]
    options: Mapping[str, str]


def picture_of(record: StoryRecord) -> Picture:
    """Simulates both runs, and finds the reason of what is exposed in each."""
    from torch_patches.viewing.exposure import Bounds, explain_run

    bounds = Bounds(record.cap_bytes, record.prefetch_kernels, record.schedules)
    as_given = replace(bounds, schedules=False)
    before = explain_run(record.before, replay(record.before, record), as_given)
    after = explain_run(record.after, replay(record.after, record), bounds)
    return Picture(
        before=before,
        after=after,
        cap_bytes=record.cap_bytes,
        held_cap_bytes=record.held_cap_bytes,
        displaced=displaced(record.before, record.after),
        constants=record.constants,
        options=record.options,
    )


# -- simulation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """All that the lanes read of a collective."""

    index: int
    group: str


class _Replay(Lanes):
    """Lanes that keep when everything happened; nodes are places in the order."""

    def __init__(self, record: StoryRecord) -> None:
        super().__init__(RuntimeModel(host=record.host, interference=record.interference))
        self.kernels: list[tuple[int, float, float]] = []
        self.stops: list[Stop] = []
        self.issued: dict[int, float] = {}

    def compute(self, node: fx.Node, cost: ComputeCost) -> None:
        free = self.compute_free
        super().compute(node, cost)
        self.kernels.append((cast(int, node), max(free, self.host), self.compute_free))

    def start(self, launch: Launch) -> None:
        super().start(launch)
        self.issued[launch.collective.index] = max(self.host, self.compute_free)

    def wait(self, launch: Launch, waits: int = 1) -> None:
        before = self.exposed_ms
        super().wait(launch, waits)
        stood = self.exposed_ms - before
        if stood > 0:
            end = self.compute_free
            self.stops.append(Stop(launch.collective.index, end - stood, end))

    def stop_for_the_rest(self) -> None:
        """For those that nobody waits for, the run goes on until they end."""
        ended = self.now
        for index, flight in self.flights.items():
            if not flight.waited and flight.end > ended:
                self.stops.append(Stop(index, ended, flight.end))
                ended = flight.end


def replay(run: RunRecord, record: StoryRecord) -> Run:
    """The run, kernel by kernel; linear in nodes."""
    lanes = _Replay(record)
    launches = [
        Launch(cast(Collective, _Known(r.index, r.group)), r.ms, r.link, r.host_ms)
        for r in run.launches
    ]
    starts = {r.place: launch for r, launch in zip(run.launches, launches, strict=True)}
    waits = {w: x for r, x in zip(run.launches, launches, strict=True) for w in r.waits}
    curve = _Curve(run.live.inputs)
    for place in range(len(run.names)):
        if place in starts:
            lanes.start(starts[place])
        elif place in waits:
            lanes.wait(waits[place])
        elif place in run.costs:
            lanes.compute(cast(fx.Node, place), run.costs[place])
            curve.add(lanes.kernels[-1][1], run.live.at_node[place])
        curve.add(lanes.compute_free, run.live.at_node[place])
        curve.add(lanes.compute_free, run.live.after[place])
    lanes.stop_for_the_rest()
    timeline = lanes.finish(launches)
    flights = (
        _flight(launch, span, lanes.issued[launch.index], run.names)
        for launch, span in zip(run.launches, timeline.spans, strict=True)
    )
    return Run(
        total_ms=timeline.total_ms,
        compute_ms=timeline.compute_ms,
        exposed_ms=timeline.exposed_ms,
        peak_bytes=run.peak_bytes,
        held_peak_bytes=run.held_peak_bytes,
        kernels=tuple(
            Kernel(place, run.names[place], run.ops[place], run.modules.get(place, ""), start, end)
            for place, start, end in lanes.kernels
        ),
        flights=tuple(flights),
        stops=tuple(lanes.stops),
        memory=curve.points(timeline.total_ms),
    )


def _flight(launch: LaunchRecord, span: Any, issued_ms: float, names: Sequence[str]) -> Flight:
    longest = sorted(span.hidden_by, key=lambda hiding: -hiding.ms)[:NAMED_KERNELS]
    return Flight(
        launch=launch,
        issued_ms=issued_ms,
        start_ms=span.start_ms,
        end_ms=span.end_ms,
        exposed_ms=span.exposed_ms,
        hidden_ms=span.hidden_ms,
        hidden_by=tuple((names[hiding.node], hiding.ms) for hiding in longest),
    )


class _Curve:
    """Live bytes over time: of one moment the most, and what lives behind it."""

    def __init__(self, inputs: int) -> None:
        self._points: list[tuple[float, int, int]] = [(0.0, inputs, inputs)]  # ms, most, last

    def add(self, ms: float, live_bytes: int) -> None:
        last_ms, most, _ = self._points[-1]
        if ms <= last_ms:
            self._points[-1] = (last_ms, max(most, live_bytes), live_bytes)
        else:
            self._points.append((ms, live_bytes, live_bytes))

    def points(self, end_ms: float) -> tuple[MemoryPoint, ...]:
        found: list[MemoryPoint] = []
        for ms, most, last in self._points:
            found.append(MemoryPoint(ms, most))
            if last != most:
                found.append(MemoryPoint(ms, last))
        return (*found, MemoryPoint(max(end_ms, found[-1].ms), found[-1].live_bytes))


# -- order ----------------------------------------------------------------------------------------


def displaced(before: RunRecord, after: RunRecord) -> tuple[str, ...]:
    """Names of calls in both that are outside a longest common subsequence; n log n.  The waits of a
    bucket go where it goes, as its starts do."""
    place = {n: i for i, n in enumerate(before.names) if before.ops[i] not in _NO_CALLS}
    merged = {after.names[w] for x in after.launches if x.bucket is not None for w in x.waits}
    names = [name for name in after.names if name in place and name not in merged]
    tails: list[int] = []
    lengths: list[int] = []
    for name in names:
        where = bisect_left(tails, place[name])
        tails[where : where + 1] = [place[name]]
        lengths.append(where + 1)
    moved: list[str] = []
    wanted = len(tails)
    for name, length in zip(reversed(names), reversed(lengths), strict=True):
        # Of those with one length the last has the smallest place, so it fits before the next one.
        if length == wanted:
            wanted -= 1
        else:
            moved.append(name)
    return tuple(reversed(moved))


def with_exposures(run: Run, exposures: Mapping[int, Exposure]) -> Run:
    """The run with the reason of each exposed flight, by index of its launch."""
    told = (replace(f, exposure=exposures.get(f.launch.index)) for f in run.flights)
    return replace(run, flights=tuple(told))
