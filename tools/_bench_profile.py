"""What the device did in a torch.profiler trace: compute, communication, and what of it was exposed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Categories of trace events that occupy the device.
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]


@dataclass(frozen=True)
class DeviceTimes:
    """Of one step, in the mean.

    Args:
        compute_ms: at least one kernel that is not NCCL's runs.
        communication_ms: at least one of NCCL's runs.
        exposed_ms: one of NCCL's runs, and no other.
        idle_ms: none runs, between the first and the last.
        nccl_kernels: launched.
    """

    compute_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float
    nccl_kernels: float


def device_times(path: str | Path, steps: int) -> DeviceTimes:
    """Reads a trace that ``export_chrome_trace`` wrote, gzipped or not.

    Args:
        steps: training steps in it.

    Raises:
        ValueError: no kernel of a device is in it.
    """
    path = Path(path)
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return device_times_of(content["traceEvents"], steps)


def device_times_of(events: Iterable[dict[str, Any]], steps: int) -> DeviceTimes:
    """The same from the events; their times are microseconds."""
    compute: list[Interval] = []
    communication: list[Interval] = []
    kernels = 0
    for event in events:
        if event.get("cat") not in _DEVICE or "dur" not in event:
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if str(event["name"]).startswith("nccl"):
            communication.append(interval)
            kernels += 1
        else:
            compute.append(interval)
    if not compute and not communication:
        raise ValueError("no kernel of a device is in the trace")
    busy = _length(compute)
    either = _length([*compute, *communication])
    every = [*compute, *communication]
    span = max(end for _, end in every) - min(start for start, _ in every)
    return DeviceTimes(
        compute_ms=busy / steps / 1e3,
        communication_ms=_length(communication) / steps / 1e3,
        exposed_ms=(either - busy) / steps / 1e3,
        idle_ms=(span - either) / steps / 1e3,
        nccl_kernels=kernels / steps,
    )


def _length(intervals: Iterable[Interval]) -> float:
    """Of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
