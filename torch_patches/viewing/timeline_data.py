"""What the page's script draws: a picture as small JSON."""

from __future__ import annotations

from typing import Any

from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.viewing.picture import Flight, Picture, Run
from torch_patches.viewing.text import run_title

#: Of ms: a tenth of a nanosecond.
_DIGITS = 7


def timeline_data(picture: Picture, report: Report) -> dict[str, Any]:
    """Texts of kernels are numbers of ``names``, since most come more than once."""
    names: dict[str, int] = {}
    bucket_of = {m: i for i, bucket in enumerate(report.buckets) for m in bucket.members}
    before, after = picture.before, picture.after
    groups = list(dict.fromkeys([*before.groups(), *after.groups()]))  # lanes of both alike
    return {
        "cap": picture.cap_bytes,
        "groups": groups,
        "runs": [
            _run("before", before, report, bucket_of, names),
            _run(f"after {report.mode}", after, report, bucket_of, names),
        ],
        "names": list(names),
    }


def _run(
    name: str, run: Run, report: Report, bucket_of: dict[str, int], names: dict[str, int]
) -> dict[str, Any]:
    number = {flight.launch.index: i for i, flight in enumerate(run.flights)}

    def text(value: str) -> int:
        return names.setdefault(value, len(names))

    return {
        "title": run_title(name, run),
        "total": _ms(run.total_ms),
        "kernels": [
            [_ms(k.start_ms), _ms(k.end_ms), text(k.name), text(k.op), text(k.module)]
            for k in run.kernels
            if k.end_ms > k.start_ms
        ],
        "stops": [[_ms(s.start_ms), _ms(s.end_ms), number[s.launch]] for s in run.stops],
        "flights": [_flight(flight, report, bucket_of) for flight in run.flights],
        "memory": [[_ms(point.ms), point.live_bytes] for point in run.memory],
    }


def _flight(flight: Flight, report: Report, bucket_of: dict[str, int]) -> dict[str, Any]:
    launch = flight.launch
    bucket = launch.bucket if launch.bucket is not None else bucket_of.get(launch.start)
    exposure = flight.exposure
    reason = ""
    if exposure is not None:
        reason = exposure.reason.value + (f" ({exposure.detail})" if exposure.detail else "")
    return {
        "name": launch.start,
        "kind": launch.kind,
        "label": _label(flight, report),
        "group": launch.group,
        "dtype": launch.dtype,
        "bytes": launch.size_bytes,
        "parameter": launch.parameter,
        "bucket": bucket,
        "start": _ms(flight.start_ms),
        "end": _ms(flight.end_ms),
        "hidden": _ms(flight.hidden_ms),
        "exposed": _ms(flight.exposed_ms),
        "queued": _ms(flight.queued_ms),
        "reason": reason,
        "hiddenBy": [name for name, _ in flight.hidden_by],
    }


def _label(flight: Flight, report: Report) -> str:
    launch = flight.launch
    if launch.bucket is not None and launch.bucket < len(report.buckets):
        bucket = report.buckets[launch.bucket]
        of = f" {bucket.label}" if bucket.label else ""
        return f"{launch.kind}{of}, {len(bucket.members)} in one"
    return launch.kind


def _ms(value: float) -> float:
    return round(value, _DIGITS)
