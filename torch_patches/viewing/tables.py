"""The page's tables, as texts for the template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.report import GroupReport, Report
from torch_patches.viewing.exposure import by_reason
from torch_patches.viewing.picture import Flight, Picture
from torch_patches.viewing.text import mib, ms, percent

if TYPE_CHECKING:
    from torch_patches.viewing.page import Sheet
    from torch_patches.viewing.profile import Comparison

Row = dict[str, Any]


def sheet_tables(sheet: Sheet) -> dict[str, Any]:
    """Everything that the template asks of a sheet, besides its title and data."""
    report, picture = sheet.report, sheet.picture
    flights = () if picture is None else picture.after.flights
    return {
        "warnings": list(_warnings(report)),
        "figures": [] if picture is None else list(_figures(report, picture)),
        "reasons": [
            {"ms": ms(total), "count": count, "reason": reason.value, "advice": reason.advice}
            for reason, total, count in by_reason(flights)
        ],
        "exposed": list(_exposed(flights)),
        "buckets": [
            {**vars(bucket), "size": mib(bucket.size_bytes), "members": list(bucket.members)}
            for bucket in report.buckets
        ],
        "labelled": any(bucket.label for bucket in report.buckets),
        "fusions": [{**vars(f), "members": list(f.members)} for f in report.fusions],
        "refusals": list(_refusals(report)),
        "traffic": list(_traffic(report)),
        "displaced": None if picture is None else list(picture.displaced),
        "displaced_share": percent(report.displaced_share),
        "options": [] if picture is None else list(_options(picture)),
        "constants": [] if picture is None else list(_pairs(picture.constants.items())),
        "summary": report.summary(),
        "schedule_hash": report.schedule_hash,
    }


def _warnings(report: Report) -> Iterator[str]:
    if report.failure:
        yield f"The graph was left as it was: {report.failure}"
    yield from report.unmatched
    if report.uncovered:
        yield f"No entry of the plan covers {', '.join(report.uncovered)}"
    if report.not_held:
        yield f"No kernel can hold the overlap of {', '.join(report.not_held)} in Inductor"
    if report.half_held:
        yield f"Inductor may launch {', '.join(report.half_held)} later than planned"
    if report.cross_rank:
        yield f"Between ranks: {report.cross_rank}"


def _figures(report: Report, picture: Picture) -> Iterator[Row]:
    before, after = picture.before, picture.after
    pairs = (
        ("whole run", ms(before.total_ms), ms(after.total_ms)),
        ("compute stands still", ms(before.exposed_ms), ms(after.exposed_ms)),
        ("compute", ms(before.compute_ms), ms(after.compute_ms)),
        ("launches", str(len(before.flights)), str(len(after.flights))),
        ("peak, inputs freed", mib(before.peak_bytes), mib(after.peak_bytes)),
        ("peak, inputs held", mib(before.held_peak_bytes), mib(after.held_peak_bytes)),
    )
    caps = {
        "peak, inputs freed": picture.cap_bytes,
        "peak, inputs held": picture.held_cap_bytes,
    }
    for name, was, now in pairs:
        cap = f", cap {mib(caps[name])}" if name in caps else ""
        yield {"name": name, "after": now, "note": f"was {was}{cap}"}
    yield {"name": "way taken", "after": report.way, "note": f"mode {report.mode}"}


def _exposed(flights: Iterable[Flight]) -> Iterator[Row]:
    told = [flight for flight in flights if flight.exposure is not None]
    for flight in sorted(told, key=lambda f: -f.exposed_ms):
        launch, exposure = flight.launch, flight.exposure
        assert exposure is not None
        yield {
            "bucket": launch.bucket,
            "name": launch.start,
            "kind": launch.kind,
            "group": launch.group,
            "size": mib(launch.size_bytes),
            "takes": ms(flight.end_ms - flight.start_ms),
            "hidden": ms(flight.hidden_ms),
            "exposed": ms(flight.exposed_ms),
            "reason": exposure.reason.value,
            "detail": exposure.detail,
        }


def _refusals(report: Report) -> Iterator[Row]:
    by_sentence: dict[str, list[str]] = {}
    for refusal in report.refusals:
        detail = f" ({refusal.detail})" if refusal.detail else ""
        members = by_sentence.setdefault(refusal.reason.value, [])
        members.append(", ".join(refusal.members) + detail)
    for sentence, members in sorted(by_sentence.items(), key=lambda item: -len(item[1])):
        yield {"reason": sentence, "members": members}


def _traffic(report: Report) -> Iterator[Row]:
    """A row for each kind, group and dtype; launches once for each kind and group."""
    before, after = _by_key(report.groups_before), _by_key(report.groups_after)
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        dtypes = dict.fromkeys([*_dtypes(was), *_dtypes(now)])
        for number, dtype in enumerate(dtypes):
            yield {
                "kind": key[0],
                "group": key[1],
                "dtype": dtype,
                "count_before": _count(was) if number == 0 else "",
                "count_after": _count(now) if number == 0 else "",
                "bytes_before": mib(_dtypes(was).get(dtype, 0)),
                "bytes_after": mib(_dtypes(now).get(dtype, 0)),
            }


def _by_key(groups: Iterable[GroupReport]) -> dict[tuple[str, str], GroupReport]:
    return {(group.kind, group.group): group for group in groups}


def _dtypes(group: GroupReport | None) -> dict[str, int]:
    return {} if group is None else group.bytes_by_dtype


def _count(group: GroupReport | None) -> str:
    return "0" if group is None else str(group.count)


def _options(picture: Picture) -> Iterator[Row]:
    default = Options()
    for name, value in picture.options.items():
        yield {"name": name, "value": value, "changed": value != str(getattr(default, name))}


def _pairs(items: Iterable[tuple[str, str]]) -> Iterator[Row]:
    return ({"name": name, "value": value, "changed": False} for name, value in items)


def measured_rows(measured: Comparison) -> Row:
    """A profile beside the estimates."""
    rows = [
        {
            "name": row.name,
            "count": row.count,
            "estimated": ms(row.estimated_ms),
            "measured": ms(row.measured_ms),
            "difference": row.difference,
            "off": row.is_off,
        }
        for row in measured.rows
    ]
    return {"note": measured.note, "rows": rows}
