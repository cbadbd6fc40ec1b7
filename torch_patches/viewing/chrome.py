"""Both runs as trace events, for chrome://tracing and ui.perfetto.dev.

A run is a process, its lanes are threads: compute, where compute stands still, one for each process
group; live bytes and the cap are counters.  Times are microseconds, as the format wants them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.viewing.picture import Flight, Picture, Run

_COMPUTE, _STOPS, _FIRST_GROUP = 1, 2, 3
_US = 1e3
_MIB = float(1 << 20)


def write_trace(picture: Picture, report: Report, path: str | Path) -> None:
    """Writes the file; equal runs give equal files.

    Raises:
        OSError: it cannot be written.
    """
    Path(path).write_text(json.dumps(trace_of(picture, report)), encoding="utf-8")


def trace_of(picture: Picture, report: Report) -> dict[str, Any]:
    """The content of the file."""
    events: list[dict[str, Any]] = []
    runs = (("before", picture.before), (f"after {report.mode}", picture.after))
    for process, (name, run) in enumerate(runs, start=1):
        events.extend(_names(process, name, run))
        events.extend(_kernels(process, run))
        events.extend(_stops(process, run))
        events.extend(_flights(process, run))
        events.extend(_memory(process, run, picture.cap_bytes))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"summary": report.summary(), "schedule_hash": report.schedule_hash},
    }


def _names(process: int, name: str, run: Run) -> Iterator[dict[str, Any]]:
    text = f"{name}: {run.total_ms:.2f} ms, {run.exposed_ms:.2f} ms exposed"
    yield _meta("process_name", process, 0, name=text)
    yield _meta("process_sort_index", process, 0, sort_index=process)
    lanes = ["compute", "stands still", *(f"group {group}" for group in run.groups())]
    for thread, lane in enumerate(lanes, start=_COMPUTE):
        yield _meta("thread_name", process, thread, name=lane)
        yield _meta("thread_sort_index", process, thread, sort_index=thread)


def _meta(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _event(
    process: int, thread: int, name: str, start_ms: float, end_ms: float, **args: Any
) -> dict[str, Any]:
    times = {"ts": start_ms * _US, "dur": (end_ms - start_ms) * _US}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _kernels(process: int, run: Run) -> Iterator[dict[str, Any]]:
    for kernel in run.kernels:
        if kernel.end_ms > kernel.start_ms:
            yield _event(
                process, _COMPUTE, kernel.op, kernel.start_ms, kernel.end_ms,
                node=kernel.name, module=kernel.module,
            )  # fmt: skip


def _stops(process: int, run: Run) -> Iterator[dict[str, Any]]:
    flights = {flight.launch.index: flight for flight in run.flights}
    for stop in run.stops:
        flight = flights[stop.launch]
        why = flight.exposure.reason.value if flight.exposure is not None else ""
        yield _event(
            process, _STOPS, f"waits for {flight.launch.start}", stop.start_ms, stop.end_ms,
            reason=why,
        )  # fmt: skip


def _flights(process: int, run: Run) -> Iterator[dict[str, Any]]:
    lane = {group: number for number, group in enumerate(run.groups(), start=_FIRST_GROUP)}
    for flight in run.flights:
        launch = flight.launch
        thread = lane[launch.group]
        yield _event(
            process, thread, launch.kind, flight.start_ms, flight.end_ms, **_details(flight)
        )


def _details(flight: Flight) -> dict[str, Any]:
    launch = flight.launch
    told = {
        "node": launch.start,
        "mib": round(launch.size_bytes / _MIB, 3),
        "dtype": launch.dtype,
        "parameter": launch.parameter,
        "bucket": launch.bucket,
        "exposed_ms": flight.exposed_ms,
        "hidden_ms": flight.hidden_ms,
        "hidden_by": [name for name, _ in flight.hidden_by],
    }
    if flight.exposure is not None:
        told["reason"] = flight.exposure.reason.value
    return told


def _memory(process: int, run: Run, cap_bytes: int) -> Iterator[dict[str, Any]]:
    for point in run.memory:
        values = {"live MiB": point.live_bytes / _MIB, "cap MiB": cap_bytes / _MIB}
        yield {
            "ph": "C", "name": "memory", "pid": process, "tid": 0,
            "ts": point.ms * _US, "args": values,
        }  # fmt: skip
