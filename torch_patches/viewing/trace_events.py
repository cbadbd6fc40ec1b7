"""Events of a trace of ``torch.profiler``: a file's, and what one of them holds."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 30
#: Far beyond any clock; an integer of JSON may have thousands of digits.
_LATEST_US = 1e18

Event = Mapping[str, Any]
Span = tuple[float, float]


class ProfileError(ValueError):
    """A file is no trace of ``torch.profiler``, or has nothing that can be compared."""


def read_events(path: Path) -> Iterator[Event]:
    """Those with a start and a duration, of ``*.json`` or ``*.json.gz``.

    Raises:
        ProfileError: it is no trace.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        zipped = stream.read(2) == b"\x1f\x8b"
    if path.stat().st_size > MAX_BYTES:
        raise ProfileError(f"{path.name}: more than {MAX_BYTES >> 20} MiB")
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


def _has_times(event: Event) -> bool:
    values = (event.get("ts"), event.get("dur"))
    return all(isinstance(v, int | float) and 0 <= v <= _LATEST_US for v in values)


def times_of(event: Event) -> Span:
    """Start and end in ms; the format has microseconds."""
    return event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3


def arguments_of(event: Event) -> Event:
    """Empty where there are none."""
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def number_or_none(value: object) -> int | None:
    """An integer as it is; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
