"""A ``torch.profiler`` trace beside the estimates: ``compare(read_profile(path), runs)``.

What is read of the trace: kernels with their times, for collectives what NCCL's events tell of them
(name, elements, dtype, ranks), and the profiler's steps.  A launch is found again by its kind, size
and ranks, never by a name.  Times of kernels are on the device; without such events (a trace of a
CPU run) there is nothing to compare.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_patches.viewing.picture import Run

#: An estimate that is off by more than this share is marked.
OFF_SHARE = 0.2
MAX_BYTES = 1 << 30
#: By so much of its size a launch may differ from the estimate that it belongs to.
_PADDING_SHARE = 0.01
_KINDS = (  # the first that is found in a name, without case and signs
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "all_to_all"),
    ("broadcast", "broadcast"),
)
_DTYPE_BYTES = {
    "double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2,
    "byte": 1, "char": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_STEP = re.compile(r"ProfilerStep#\d+")


class ProfileError(ValueError):
    """A file is no trace of ``torch.profiler``, or has nothing that can be compared."""


@dataclass(frozen=True)
class MeasuredLaunch:
    """A collective's kernel; None where the trace does not tell."""

    kind: str
    size_bytes: int | None
    group_size: int | None
    ms: float


@dataclass(frozen=True)
class Profile:
    """What a trace tells of all its steps.

    Args:
        steps: of the profiler; 1 where it has none.
        launches: kernels of collectives.
        compute_ms: during which other kernels ran.
        exposed_ms: during which collectives ran and no other kernel did.
        span_ms: from the first kernel to the end of the last one.
    """

    steps: int
    launches: tuple[MeasuredLaunch, ...]
    compute_ms: float
    exposed_ms: float
    span_ms: float


@dataclass(frozen=True)
class ComparedRow:
    """One estimate beside its measurement.

    Args:
        count: launches measured; steps, where a row is about whole steps.
        estimated_ms, measured_ms: of one launch, or of one step.
    """

    name: str
    count: int
    estimated_ms: float
    measured_ms: float

    @property
    def off_share(self) -> float:
        """By which share of the measurement the estimate is off; above 0 it is too high."""
        if self.measured_ms <= 0:
            return math.inf if self.estimated_ms > 0 else 0.0
        return self.estimated_ms / self.measured_ms - 1

    @property
    def is_off(self) -> bool:
        return abs(self.off_share) > OFF_SHARE

    @property
    def difference(self) -> str:
        """For people."""
        share = self.off_share
        return "not measured" if math.isinf(share) else f"{share:+.0%}"


@dataclass(frozen=True)
class Comparison:
    """All rows, and a sentence on what was compared."""

    note: str
    rows: tuple[ComparedRow, ...]

    @property
    def off(self) -> tuple[ComparedRow, ...]:
        """Where the model is off by more than :data:`OFF_SHARE`."""
        return tuple(row for row in self.rows if row.is_off)


# -- reading --------------------------------------------------------------------------------------


def read_profile(path: str | Path, steps: int | None = None) -> Profile:
    """Reads ``*.json`` or ``*.json.gz`` as ``torch.profiler`` exports them.

    Args:
        steps: how many there are, where the profiler's ``step()`` was not called.

    Raises:
        ProfileError: it is none, or has no kernels.
        OSError: it cannot be read.
    """
    events = list(_events(Path(path)))
    kernels = [event for event in events if str(event.get("cat", "")).lower() in _KERNELS]
    if not kernels:
        raise ProfileError(
            f"{Path(path).name}: no kernels of a GPU in it; profile with ProfilerActivity.CUDA"
        )
    collective: list[Mapping[str, Any]] = []
    compute: list[Mapping[str, Any]] = []
    for event in kernels:
        (compute if _kind(event) is None else collective).append(event)
    busy, flying = list(map(_times, compute)), list(map(_times, collective))
    first = min(_times(event)[0] for event in kernels)
    last = max(_times(event)[1] for event in kernels)
    named = {str(e.get("name")) for e in events if _STEP.fullmatch(str(e.get("name")))}
    return Profile(
        steps=steps or len(named) or 1,
        launches=tuple(_launch(event) for event in collective),
        compute_ms=_covered(busy),
        exposed_ms=_alone(busy, flying),
        span_ms=last - first,
    )


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as stream:
        zipped = stream.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ProfileError(f"{path.name}: more than {MAX_BYTES >> 20} MiB")
        content = json.loads(data)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, RecursionError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path.name}: no trace of torch.profiler ({error})") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ProfileError(f"{path.name}: no trace of torch.profiler (it has no traceEvents)")
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and _has_times(event):
            yield event


def _has_times(event: Mapping[str, Any]) -> bool:
    values = (event.get("ts"), event.get("dur"))
    return all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values)


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    """Start and end in ms; the format has microseconds."""
    return event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _kind(event: Mapping[str, Any]) -> str | None:
    """The collective's kind; None of any other kernel."""
    name = str(event.get("name", ""))
    told = _arguments(event).get("Collective name")
    if told is None and "nccl" not in name.lower():
        return None
    for text in (str(told or ""), name):
        plain = text.lower().replace("_", "")
        for part, kind in _KINDS:
            if part in plain:
                return kind
    return str(told or "other")


def _launch(event: Mapping[str, Any]) -> MeasuredLaunch:
    told = _arguments(event)
    elements = [told.get(name) for name in ("In msg nelems", "Out msg nelems")]
    known = [count for count in elements if isinstance(count, int) and count > 0]
    width = _DTYPE_BYTES.get(str(told.get("dtype", "")).lower())
    ranks = told.get("Group size")
    start, end = _times(event)
    return MeasuredLaunch(
        kind=_kind(event) or "other",
        size_bytes=max(known) * width if known and width else None,
        group_size=ranks if isinstance(ranks, int) else None,
        ms=end - start,
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them goes on."""
    total, end = 0.0, -math.inf
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def _alone(busy: Sequence[tuple[float, float]], flying: Sequence[tuple[float, float]]) -> float:
    """How long collectives fly while no kernel runs."""
    return _covered([*busy, *flying]) - _covered(busy)


# -- comparing ------------------------------------------------------------------------------------

_Key = tuple[str, int, int | None]


def compare(profile: Profile, before: Sequence[Run], after: Sequence[Run]) -> Comparison:
    """The profile beside the runs whose launches it has: those before, or those after.

    Args:
        before, after: of all graphs of a step.
    """
    runs, which = _profiled(profile, before, after)
    # Of the runs the same is asked as of the profile: what overlaps, whatever stood still for it.
    busy = [[(k.start_ms, k.end_ms) for k in run.kernels] for run in runs]
    alone = [
        _alone(kernels, [(f.start_ms, f.end_ms) for f in run.flights])
        for kernels, run in zip(busy, runs, strict=True)
    ]
    whole = (
        ("compute of a step", sum(map(_covered, busy)), profile.compute_ms),
        ("collectives of a step with no compute beside them", sum(alone), profile.exposed_ms),
        (
            "a whole step, with what is in no graph",
            sum(r.total_ms for r in runs),
            profile.span_ms,
        ),
    )
    steps = profile.steps
    rows = [ComparedRow(name, steps, told, found / steps) for name, told, found in whole]
    measured = _measured_by_key(profile, runs)
    for key, estimates in _estimated_by_key(runs).items():
        found = measured.pop(key, [])
        if found:
            rows.append(
                ComparedRow(_name(key), len(found), _mean(estimates), _mean([x.ms for x in found]))
            )
    other = sum(map(len, measured.values()))
    note = (
        f"The profile has {len(profile.launches)} collectives in {profile.steps} step(s), and is "
        f"compared with the graphs {which}. Times of collectives are of one launch each, and "
        f"include the wait for other ranks. "
    )
    if other:
        note += f"{other} measured collectives match none in the graphs."
    return Comparison(note.strip(), tuple(rows))


def _profiled(
    profile: Profile, before: Sequence[Run], after: Sequence[Run]
) -> tuple[Sequence[Run], str]:
    """The runs that launch what was measured, as often; those after where both do."""

    def distance(runs: Sequence[Run]) -> int:
        launches = (flight.launch for run in runs for flight in run.flights)
        launched = Counter((x.kind, x.size_bytes, x.group_size) for x in launches)
        measured = Counter(
            {key: len(found) for key, found in _measured_by_key(profile, runs).items()}
        )
        keys = {*measured, *launched}
        return sum(abs(measured[key] - profile.steps * launched[key]) for key in keys)

    if distance(before) < distance(after):
        return before, "as they were given (before torch_patches)"
    return after, "as torch_patches made them (after)"


def _estimated_by_key(runs: Sequence[Run]) -> dict[_Key, list[float]]:
    found: dict[_Key, list[float]] = {}
    for run in runs:
        for flight in run.flights:
            launch = flight.launch
            key = (launch.kind, launch.size_bytes, launch.group_size)
            found.setdefault(key, []).append(flight.end_ms - flight.start_ms)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1])))


def _measured_by_key(profile: Profile, runs: Sequence[Run]) -> dict[_Key, list[MeasuredLaunch]]:
    """By the key of the estimate that is meant: a trace may not tell how many ranks there are, and
    what is sent may be padded."""
    known = [
        (x.kind, x.size_bytes, x.group_size)
        for run in runs
        for f in run.flights
        for x in [f.launch]
    ]
    found: dict[_Key, list[MeasuredLaunch]] = {}
    for launch in profile.launches:
        found.setdefault(_nearest(launch, known), []).append(launch)
    return found


def _nearest(launch: MeasuredLaunch, known: Sequence[_Key]) -> _Key:
    """The estimate that a launch belongs to; its own key where there is none."""
    kind, size, ranks = launch.kind, launch.size_bytes or -1, launch.group_size
    distance = {
        key: abs(key[1] - size)
        for key in known
        if key[0] == kind and (ranks is None or key[2] is None or key[2] == ranks)
    }
    near = min(distance, key=lambda key: distance[key], default=None)
    if near is None or distance[near] > _PADDING_SHARE * size:
        return (kind, size, ranks)
    return near


def _name(key: _Key) -> str:
    kind, size_bytes, ranks = key
    of = f" of {ranks} ranks" if ranks is not None else ""
    return f"{kind}, {size_bytes / 2**20:.3f} MiB{of}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
