"""Why compute stands still for a collective: ``explain_run(record, run, bounds) -> Run``.

A kernel can hide a collective only if it neither makes what that sends nor needs what that brings.
Of these *independent* kernels the ones in front of the start would hide it if it started earlier, the
ones behind the first wait if it were waited for later.  What keeps it from that is looked for in a
fixed order; the first thing found is the reason.

These are findings about the estimated run, for people; no pass reads them.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

from torch_patches.viewing.picture import Flight, Run, with_exposures
from torch_patches.viewing.record import LaunchRecord, RunRecord

#: Less is a rounding error, in ms.
SMALL_MS = 1e-6
#: Of its own time, less independent compute is none.
_NONE_SHARE = 0.02
#: A cause that explains this share of the exposed time is the reason.
_MAIN_SHARE = 0.5
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce"})


class ExposureReason(enum.Enum):
    """The value is the sentence that pages and the command print."""

    NOTHING_INDEPENDENT = "every kernel either makes what it sends or needs what it brings"
    TOO_LITTLE = "there is less independent compute than it takes"
    QUEUED = "its group's stream, or the link, was busy when it was issued"
    NOT_SCHEDULED = "nothing has moved it: it stands where the model put it"
    MEMORY = "more of it would be hidden if it were in flight for longer, over the memory cap"
    TAKEN = "the independent compute around it hides other collectives already"
    PREFETCH = "it would have to start further ahead than max_compute_pre_fetch allows"
    ORDER = "independent compute runs elsewhere, and the schedule found nothing better"

    @property
    def advice(self) -> str:
        """What would have to change."""
        return _ADVICE[self]


_ADVICE = {
    ExposureReason.NOTHING_INDEPENDENT: (
        "a model or a batch with independent work beside it, or a smaller payload "
        "(a lower dtype, a smaller group, a parameter that stays gathered)"
    ),
    ExposureReason.TOO_LITTLE: (
        "more compute (a larger batch), a smaller payload, or a faster link; smaller buckets "
        "let a part of it start earlier"
    ),
    ExposureReason.QUEUED: (
        "less traffic in front of it: larger messages where launches dominate, or another group "
        "for what is in its way"
    ),
    ExposureReason.NOT_SCHEDULED: "enable_overlap_scheduling = True, or bucketing_mode = 'auto'",
    ExposureReason.MEMORY: "a larger max_memory_increase_gb / max_memory_increase_ratio",
    ExposureReason.TAKEN: (
        "less traffic, or a network with room: the links are what is short here, not compute"
    ),
    ExposureReason.PREFETCH: "a larger max_compute_pre_fetch",
    ExposureReason.ORDER: (
        "another bucketing (bucket_cap_mb, max_topo_span); where the mode is 'auto' already, a "
        "larger max_schedules, else that mode"
    ),
}


@dataclass(frozen=True)
class Exposure:
    """Why one collective is exposed.

    Args:
        detail: figures for people.
        independent_ms: compute that could hide it.
        earlier_ms, later_ms: the parts of it in front of the start, and behind the first wait.
    """

    reason: ExposureReason
    detail: str
    independent_ms: float
    earlier_ms: float
    later_ms: float


@dataclass(frozen=True)
class Bounds:
    """What a schedule had to keep: see ``StoryRecord``."""

    cap_bytes: int
    prefetch_kernels: int | None
    schedules: bool


def explain_run(record: RunRecord, run: Run, bounds: Bounds) -> Run:
    """The run with the reason of everything that is exposed in it.

    Time and memory: nodes times kernels bits.
    """
    exposed = [flight for flight in run.flights if flight.exposed_ms > SMALL_MS]
    if not exposed:
        return run
    kernels = _Kernels(record, run)
    makers, needers = kernels.makers(exposed), kernels.needers(exposed)
    found: dict[int, Exposure] = {}
    for flight in exposed:
        index = flight.launch.index
        free = kernels.all & ~(makers[index] | needers[index])
        found[index] = _Case(record, run, bounds, kernels, flight, free).exposure()
    return with_exposures(run, found)


class _Kernels:
    """Sets of kernels are the bits of a number: bit k is the k-th kernel in order."""

    def __init__(self, record: RunRecord, run: Run) -> None:
        self._record = record
        self.places = [kernel.place for kernel in run.kernels]
        self.ms = [record.costs[place].ms for place in self.places]
        self.all = (1 << len(self.places)) - 1
        self._bit = {place: 1 << k for k, place in enumerate(self.places)}
        self._edges = _edges(record)
        self._busy = _busy(run)

    def makers(self, flights: Iterable[Flight]) -> Mapping[int, int]:
        """Of each flight the kernels that its start depends on."""
        known = [0] * len(self._record.names)
        for place, sources in enumerate(self._edges):
            for source in sources:
                known[place] |= known[source] | self._bit.get(source, 0)
        return {flight.launch.index: known[flight.launch.place] for flight in flights}

    def needers(self, flights: Iterable[Flight]) -> Mapping[int, int]:
        """Of each flight the kernels that depend on one of its waits."""
        known = [0] * len(self._record.names)
        for place in range(len(known) - 1, -1, -1):
            mine = known[place] | self._bit.get(place, 0)
            for source in self._edges[place]:
                known[source] |= mine
        found: dict[int, int] = {}
        for flight in flights:
            needers = 0
            for wait in flight.launch.waits:
                needers |= known[wait]
            found[flight.launch.index] = needers
        return found

    def ms_of(self, chosen: int) -> float:
        """Time of the kernels in a set, each run alone."""
        bits = bin(chosen)[:1:-1]
        return sum(compress(self.ms, map(int, bits)))

    def before(self, place: int) -> int:
        """All kernels in front of a place."""
        return (1 << bisect_left(self.places, place)) - 1

    def in_set(self, chosen: int) -> list[int]:
        """Numbers of the kernels in a set, in order."""
        return [k for k, bit in enumerate(bin(chosen)[:1:-1]) if bit == "1"]

    def is_busy(self, kernel: int, but: int) -> bool:
        """It hides another collective than the one with this index."""
        return any(index != but for index in self._busy[kernel])


def _edges(record: RunRecord) -> Sequence[Sequence[int]]:
    """What each node depends on, in front of it in the order."""
    edges: list[list[int]] = [list(sources) for sources in record.inputs]
    for first, second in record.order_dependencies:
        if first < second:
            edges[second].append(first)
    return edges


def _busy(run: Run) -> list[tuple[int, ...]]:
    """Of each kernel the flights that move data while it runs; both are in order of time."""
    flights = sorted(run.flights, key=lambda flight: flight.start_ms)
    found: list[tuple[int, ...]] = []
    active: list[Flight] = []
    nearest = 0
    for kernel in run.kernels:
        while nearest < len(flights) and flights[nearest].start_ms < kernel.end_ms:
            active.append(flights[nearest])
            nearest += 1
        active = [flight for flight in active if flight.end_ms > kernel.start_ms]
        found.append(tuple(flight.launch.index for flight in active))
    return found


@dataclass(frozen=True)
class _Case:
    """One exposed flight; ``free`` are the kernels independent of it."""

    record: RunRecord
    run: Run
    bounds: Bounds
    kernels: _Kernels
    flight: Flight
    free: int

    def exposure(self) -> Exposure:
        kernels, launch = self.kernels, self.flight.launch
        first_wait = min(launch.waits, default=len(self.record.names))
        earlier = self.free & kernels.before(launch.place)
        later = self.free & ~kernels.before(first_wait)
        made = Exposure(
            ExposureReason.ORDER, "", kernels.ms_of(self.free), kernels.ms_of(earlier),
            kernels.ms_of(later),
        )  # fmt: skip
        reason, detail = self._reason(made, kernels.in_set(earlier), kernels.in_set(later))
        return replace(made, reason=reason, detail=detail)

    def _reason(
        self, found: Exposure, earlier: list[int], later: list[int]
    ) -> tuple[ExposureReason, str]:
        flight, alone_ms = self.flight, self.flight.launch.ms
        if found.independent_ms <= _NONE_SHARE * alone_ms:
            return ExposureReason.NOTHING_INDEPENDENT, ""
        if found.independent_ms < alone_ms:
            figures = f"it takes {alone_ms:.3f} ms, of which {found.independent_ms:.3f} ms can hide"
            return ExposureReason.TOO_LITTLE, figures
        if flight.queued_ms >= _MAIN_SHARE * flight.exposed_ms:
            return ExposureReason.QUEUED, f"{flight.queued_ms:.3f} ms{self._in_front()}"
        elsewhere = (
            f"{found.earlier_ms:.3f} ms of independent compute run before its start, "
            f"{found.later_ms:.3f} ms behind its wait"
        )
        if not self.bounds.schedules:
            return ExposureReason.NOT_SCHEDULED, elsewhere
        ahead, behind = self._enough(reversed(earlier)), self._enough(later)
        if over := self._over_cap(ahead, behind):
            return ExposureReason.MEMORY, over
        near = [*ahead, *behind]
        index = flight.launch.index
        taken = [k for k in near if self.kernels.is_busy(k, index)]
        taken_ms = sum(self.kernels.ms[k] for k in taken)
        near_ms = sum(self.kernels.ms[k] for k in near)
        if near and taken_ms >= _MAIN_SHARE * near_ms:
            return ExposureReason.TAKEN, f"{taken_ms:.3f} of {near_ms:.3f} ms around it"
        if far := self._too_far(ahead, behind):
            return ExposureReason.PREFETCH, far
        return ExposureReason.ORDER, elsewhere

    def _enough(self, kernels: Iterable[int]) -> list[int]:
        """The first ones, as many as would hide what is exposed."""
        chosen = list(kernels)
        sums = accumulate(self.kernels.ms[k] for k in chosen)
        needed = sum(1 for total in sums if total < self.flight.exposed_ms) + 1
        return chosen[:needed]

    def _in_front(self) -> str:
        """Names of what it waited for."""
        moment = self.flight.start_ms
        names = [f.launch.start for f in self.run.flights if abs(f.end_ms - moment) < SMALL_MS]
        return f" behind {', '.join(names[:2])}" if names else ""

    def _over_cap(self, ahead: list[int], behind: list[int]) -> str:
        """In all directions that there are, the cap would be exceeded."""
        launch, live, cap = self.flight.launch, self.record.live.at_node, self.bounds.cap_bytes
        sent_bytes, brought_bytes = _payload_bytes(launch)
        peaks: list[int] = []
        if ahead:
            first = self.kernels.places[ahead[-1]]
            peaks.append(max(live[first : launch.place]) + brought_bytes)
        if behind:
            last = self.kernels.places[behind[-1]]
            held_bytes = sent_bytes if launch.kind in _REDUCTIONS else 0
            peaks.append(max(live[min(launch.waits) : last + 1]) + held_bytes)
        if not peaks or min(peaks) <= cap:
            return ""
        return f"{min(peaks) / 2**20:.1f} MiB would live, the cap is {cap / 2**20:.1f} MiB"

    def _too_far(self, ahead: list[int], behind: list[int]) -> str:
        bound, launch = self.bounds.prefetch_kernels, self.flight.launch
        if bound is None or behind or not ahead or launch.kind != "all_gather":
            return ""
        places = self.kernels.places
        far = bisect_left(places, min(launch.waits)) - bisect_left(places, places[ahead[-1]])
        return f"{far} kernels ahead, the bound is {bound}" if far > bound else ""


def _payload_bytes(launch: LaunchRecord) -> tuple[int, int]:
    """Bytes of what a launch sends, and of what it brings."""
    full, part = launch.size_bytes, launch.size_bytes // max(launch.group_size or 1, 1)
    if launch.kind == "all_gather":
        return part, full
    return full, part if launch.kind == "reduce_scatter" else full


def by_reason(flights: Iterable[Flight]) -> Iterator[tuple[ExposureReason, float, int]]:
    """Exposed ms and launches by reason, the longest first."""
    sums: dict[ExposureReason, tuple[float, int]] = {}
    for flight in flights:
        if flight.exposure is not None:
            ms, count = sums.get(flight.exposure.reason, (0.0, 0))
            sums[flight.exposure.reason] = (ms + flight.exposed_ms, count + 1)
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return ((reason, ms, count) for reason, (ms, count) in ordered)
