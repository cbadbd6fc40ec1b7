"""A report in some lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.report import Report

_MIB = 1 << 20


def explain(report: Report) -> str:
    """The summary; module buckets with a plan that can be pasted into ``module_bucket_plans``; every
    fused chain; every bucket; what was refused, by reason."""
    lines = [report.summary()]
    for fusion in report.fusions:
        lines.append(
            f"  {fusion.kind} of {fusion.group_size} ranks on {fusion.group} instead of "
            f"{', '.join(fusion.members)}"
        )
    if report.module_plan:
        lines.extend(describe_module_plan(report))
    for bucket in report.buckets:
        name = f"{bucket.label}: " if bucket.label else ""
        lines.append(
            f"  {name}{bucket.kind} of {len(bucket.members)} on {bucket.group}, {bucket.dtype}, "
            f"{bucket.size_bytes / _MIB:.1f} MiB, {bucket.form}"
        )
    lines.extend(_refused(report))
    return "\n".join(lines)


def describe_module_plan(report: Report) -> Iterator[str]:
    """Which blocks were found, and the plan as Python."""
    if report.modules_found:
        yield from report.modules_found.splitlines()
    entries = [entry if isinstance(entry, str) else list(entry) for entry in report.module_plan]
    yield f"module_bucket_plans = {entries!r}"
    if report.uncovered:
        yield f"in no entry: {', '.join(report.uncovered)}"


def _refused(report: Report) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for refusal in report.refusals:
        detail = f" ({refusal.detail})" if refusal.detail else ""
        by_reason.setdefault(refusal.reason.value, []).append(", ".join(refusal.members) + detail)
    for reason, members in by_reason.items():
        yield f"  not merged, because {reason}: {len(members)}"
        yield from (f"    {member}" for member in members[:8])
        if len(members) > 8:
            yield f"    and {len(members) - 8} more"
