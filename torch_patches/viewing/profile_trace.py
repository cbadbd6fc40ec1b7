"""Reads traces of ``torch.profiler``: ``read_profile(path) -> Profile``.

What is read: kernels with their times; for collectives what NCCL's events tell of them (name, elements,
dtype, ranks, group); the profiler's steps.

    kernel, user_annotation   ph X, cat, name, ts and dur in us
    args of a kernel          device, stream, correlation (with the call that launched it), External id
                              (of the CPU event around that call)
    of NCCL's kernels, else of ``record_param_comms`` with the same External id
                              Collective name, In msg nelems, Out msg nelems, dtype, Group size,
                              Process Group Name, Process Group Ranks

A collective that NCCL launches as several kernels is one.  Kernels belong to the step in which the CPU
launched them.  A step whose collectives are not those of most steps (a first one that compiles, a last
one cut short) is left out.

A trace of gloo has no kernels: collectives are ``gloo:all_reduce`` and the like on threads of their own,
without sizes, a reduce-scatter is an all-reduce there, and compute is what the thread of the steps runs
outside of its calls to start collectives and to wait for them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_patches.viewing.trace_events import (
    Event,
    ProfileError,
    Span,
    arguments_of,
    number_or_none,
    read_events,
    times_of,
)

_KINDS = (  # the first that is found in a name, without case and signs
    ("barrier", "barrier"),  # NCCL makes it of an all-reduce
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "all_to_all"),
    ("broadcast", "broadcast"),
)
_DTYPE_BYTES = {
    "double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2,
    "byte": 1, "char": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complexhalf": 4, "complexfloat": 8,
    "complexdouble": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_STEP = re.compile(r"ProfilerStep#\d+")
_GLOO = "gloo:"
_COMMUNICATES = ("c10d::", "_c10d_functional::", "PythonSubclass", "record_param_comms")


@dataclass(frozen=True)
class MeasuredLaunch:
    """A collective; None where the trace does not tell.

    Args:
        group: name of its process group; empty where the trace does not tell.
        step: number among the steps of the profile.
    """

    kind: str
    size_bytes: int | None
    group_size: int | None
    ms: float
    group: str = ""
    step: int = 0


@dataclass(frozen=True)
class StepTimes:
    """What a trace tells of one step, or of all.

    Args:
        compute_ms: during which other kernels ran.
        exposed_ms: during which collectives ran and no other kernel did.
        span_ms: from the first kernel to the end of the last one.
    """

    compute_ms: float
    exposed_ms: float
    span_ms: float


@dataclass(frozen=True)
class Profile:
    """What a trace tells of all its steps that are alike.

    Args:
        steps: of the profiler; 1 where it has none.
        launches: collectives in the order in which they began.
        compute_ms, exposed_ms, span_ms: see :class:`StepTimes`; of all steps together.
        by_step: of each; empty where the trace cannot be cut into steps.
        notes: sentences on what was left out.
        of_gloo: it is of a CPU.
    """

    steps: int
    launches: tuple[MeasuredLaunch, ...]
    compute_ms: float
    exposed_ms: float
    span_ms: float
    by_step: tuple[StepTimes, ...] = ()
    notes: tuple[str, ...] = ()
    of_gloo: bool = False


@dataclass(frozen=True, eq=False)
class _Work:
    """One kernel, or the kernels of one collective.

    Args:
        start, end: ms.
        launched: ms at which the CPU launched it; None where the trace does not tell.
        told: arguments of a collective; None for other kernels.
    """

    start: float
    end: float
    launched: float | None
    kind: str | None
    told: Event = field(default_factory=dict)

    @property
    def span(self) -> Span:
        return self.start, self.end


def read_profile(path: str | Path, steps: int | None = None) -> Profile:
    """Reads ``*.json`` or ``*.json.gz`` as ``torch.profiler`` exports them.

    Args:
        steps: how many there are, where the trace does not mark them: it does if the profiler has a
            schedule and its ``step()`` is called.

    Raises:
        ProfileError: it is none, or has no kernels.
        OSError: it cannot be read.
    """
    path = Path(path)
    events = list(read_events(path))
    notes: list[str] = []
    kernels = [event for event in events if str(event.get("cat", "")).lower() in _KERNELS]
    if kernels:
        work = _of_device(kernels, events, notes)
    else:
        work = _of_gloo(events)
        if not work:
            raise ProfileError(
                f"{path.name}: no kernels of a GPU in it, and no collectives of gloo; profile with "
                "ProfilerActivity.CUDA, and export in on_trace_ready where there is a schedule"
            )
        notes.append("It is of a CPU, where estimates hold only with a table measured there.")
    work.sort(key=lambda each: each.start)
    marks = _marks(events)
    by_step = [work] if steps is not None else _in_steps(work, marks, notes)
    split = steps is None and len(marks) > 0 and by_step is not None
    parts = by_step if by_step is not None else [work]
    times = tuple(map(_times_of, parts))
    whole = times[0] if not split else _sum(times)
    return Profile(
        steps=steps or (len(parts) if split else len(marks) or 1),
        launches=tuple(
            _launch(each, number)
            for number, part in enumerate(parts)
            for each in part
            if each.kind is not None
        ),
        compute_ms=whole.compute_ms,
        exposed_ms=whole.exposed_ms,
        span_ms=whole.span_ms,
        by_step=times if split else (),
        notes=tuple(notes),
        of_gloo=not kernels,
    )


def _times_of(work: Sequence[_Work]) -> StepTimes:
    busy = [each.span for each in work if each.kind is None]
    flying = [each.span for each in work if each.kind is not None]
    span = max(each.end for each in work) - min(each.start for each in work)
    return StepTimes(covered(busy), alone(busy, flying), span)


def _sum(times: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(
        sum(each.compute_ms for each in times),
        sum(each.exposed_ms for each in times),
        sum(each.span_ms for each in times),
    )


# -- kernels of a GPU -----------------------------------------------------------------------------


def _of_device(kernels: Sequence[Event], events: Sequence[Event], notes: list[str]) -> list[_Work]:
    """The kernels of one device, those of one collective as one."""
    kernels = _of_one_device(kernels, notes)
    calls = {
        number: event["ts"] / 1e3
        for event in events
        if str(event.get("cat", "")).lower() in _CALLS
        and (number := number_or_none(arguments_of(event).get("correlation"))) is not None
    }
    around = {
        number: told
        for event in events
        if event.get("name") == "record_param_comms"
        and (number := number_or_none((told := arguments_of(event)).get("External id"))) is not None
    }
    work: list[_Work] = []
    of_call: dict[int, list[Event]] = {}
    for event in kernels:
        told = arguments_of(event)
        number = number_or_none(told.get("External id"))
        if "Collective name" not in told and number in around and _kind(event, {}) is not None:
            told = {**around[number], **told}
        if number is not None and "Collective name" in told:
            of_call.setdefault(number, []).append({**event, "args": told})
        else:
            work.append(_work([event], _kind(event, told), told, calls))
    for found in of_call.values():
        told = arguments_of(found[0])
        work.append(_work(found, _kind(found[0], told), told, calls))
    return work


def _of_one_device(kernels: Sequence[Event], notes: list[str]) -> list[Event]:
    """Those of the device with most collectives; the lowest of several."""
    devices = Counter(number_or_none(arguments_of(event).get("device")) for event in kernels)
    if len(devices) < 2:
        return list(kernels)
    collectives = Counter(
        number_or_none(arguments_of(event).get("device"))
        for event in kernels
        if _kind(event, arguments_of(event)) is not None
    )
    chosen = max(devices, key=lambda device: (collectives[device], -(device or 0)))
    notes.append(f"Of {len(devices)} devices in it, device {chosen} is read.")
    return [
        event for event in kernels if number_or_none(arguments_of(event).get("device")) == chosen
    ]


def _work(
    events: Sequence[Event], kind: str | None, told: Event, calls: Mapping[int, float]
) -> _Work:
    start = min(times_of(event)[0] for event in events)
    end = max(times_of(event)[1] for event in events)
    number = number_or_none(arguments_of(events[0]).get("correlation"))
    return _Work(start, end, None if number is None else calls.get(number), kind, told)


def _kind(event: Event, told: Event) -> str | None:
    """The collective's kind; None of any other kernel."""
    name = str(event.get("name", ""))
    collective = told.get("Collective name")
    if collective is None and "nccl" not in name.lower():
        return None
    for text in (str(collective or ""), name):
        plain = text.lower().replace("_", "")
        for part, kind in _KINDS:
            if part in plain:
                return kind
    return str(collective or "other")


def _launch(work: _Work, step: int) -> MeasuredLaunch:
    told = work.told
    elements = [told.get(name) for name in ("In msg nelems", "Out msg nelems")]
    known = [count for count in elements if isinstance(count, int) and count > 0]
    width = _DTYPE_BYTES.get(str(told.get("dtype", "")).lower())
    ranks = number_or_none(told.get("Group size"))
    return MeasuredLaunch(
        kind=work.kind or "other",
        size_bytes=max(known) * width if known and width else None,
        group_size=_count_ranks(told.get("Process Group Ranks")) if ranks is None else ranks,
        ms=work.end - work.start,
        group=str(told.get("Process Group Name", "")),
        step=step,
    )


def _count_ranks(text: object) -> int | None:
    """Of ``[0, 1, 2, 3]``; a long list is cut short with dots."""
    ranks = re.findall(r"\d+", text) if isinstance(text, str) and "..." not in text else []
    return len(ranks) or None


# -- gloo -----------------------------------------------------------------------------------------


def _of_gloo(events: Sequence[Event]) -> list[_Work]:
    """Empty where no collective of gloo is in it."""
    flying = [event for event in events if str(event.get("name", "")).startswith(_GLOO)]
    if not flying:
        return []
    main = _main_thread(events)
    work = [_work([event], _kind(event, {"Collective name": event["name"]}), {}, {})
            for event in flying]  # fmt: skip
    operators = [e for e in events if e.get("cat") == "cpu_op" and e.get("tid") == main]
    waits = [times_of(event) for event in operators if _is_communication(event)]
    others = [times_of(event) for event in operators if not _is_communication(event)]
    # A compiled graph is one op around its launches and waits.
    work += [_Work(start, end, None, None) for start, end in without(others, waits)]
    return work


def _main_thread(events: Sequence[Event]) -> object:
    steps = [event.get("tid") for event in events if _STEP.fullmatch(str(event.get("name")))]
    operators = Counter(event.get("tid") for event in events if event.get("cat") == "cpu_op")
    return steps[0] if steps else max(operators, key=lambda tid: operators[tid], default=None)


def _is_communication(event: Event) -> bool:
    return str(event.get("name", "")).startswith(_COMMUNICATES)


# -- steps ----------------------------------------------------------------------------------------


def _marks(events: Sequence[Event]) -> list[Span]:
    """Start and end of each step on the CPU, in order."""
    found: dict[str, Span] = {}
    for event in events:
        name = str(event.get("name"))
        # The device's own annotations have the same names.
        if _STEP.fullmatch(name) and not str(event.get("cat", "")).startswith("gpu"):
            found.setdefault(name, times_of(event))
    return sorted(found.values())


def _in_steps(
    work: Sequence[_Work], marks: Sequence[Span], notes: list[str]
) -> list[list[_Work]] | None:
    """By the step in which it was launched, those of the steps that are alike; None where marks and
    kernels do not fit."""
    if not marks:
        return None
    parts: list[list[_Work]] = [[] for _ in marks]
    starts = [start for start, _ in marks]
    for each in work:
        number = bisect_right(starts, each.start if each.launched is None else each.launched) - 1
        # A kernel may run after the end of the step that launched it.
        if number >= 0 and (each.launched is None or each.launched <= marks[number][1]):
            parts[number].append(each)
    if not all(parts):
        return None
    looks = [_look(part) for part in parts]
    counts = Counter(looks)
    most = max(counts.values())
    usual = next(look for look in reversed(looks) if counts[look] == most)
    kept = [part for part, look in zip(parts, looks, strict=True) if look == usual]
    if len(kept) < len(parts):
        left = len(parts) - len(kept)
        notes.append(f"{left} step(s) with other collectives than most are left out.")
    return kept


def _look(part: Sequence[_Work]) -> tuple[Any, ...]:
    launches = (_launch(each, 0) for each in part if each.kind is not None)
    return tuple(sorted(repr((x.kind, x.size_bytes, x.group_size, x.group)) for x in launches))


# -- times ----------------------------------------------------------------------------------------


def covered(spans: Iterable[Span]) -> float:
    """How long at least one of them goes on."""
    total, end = 0.0, -math.inf
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def without(spans: Iterable[Span], holes: Iterable[Span]) -> Iterator[Span]:
    """What of the spans is in no hole, in order."""
    edges = [(time, step, 0) for span in spans for time, step in zip(span, (1, -1), strict=True)]
    edges += [(time, 0, step) for hole in holes for time, step in zip(hole, (1, -1), strict=True)]
    spans_open = holes_open = 0
    since = -math.inf
    for time, of_span, of_hole in sorted(edges):
        if spans_open and not holes_open and time > since:
            yield since, time
        spans_open, holes_open, since = spans_open + of_span, holes_open + of_hole, time


def alone(busy: Sequence[Span], flying: Sequence[Span]) -> float:
    """How long collectives fly while no kernel runs."""
    return covered([*busy, *flying]) - covered(busy)
