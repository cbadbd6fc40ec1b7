"""Parts of a report in some lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_patches._inductor.fx_passes.comm_overlap.fusing import FusionReport
from torch_patches._inductor.fx_passes.comm_overlap.plan import Refusal
from torch_patches._inductor.fx_passes.comm_overlap.report_parts import BucketReport

_MIB = 1 << 20


def explain_fusions(fusions: Sequence[FusionReport]) -> Iterator[str]:
    """Every chain that became one collective."""
    for fusion in fusions:
        yield (
            f"  {fusion.kind} of {fusion.group_size} ranks on {fusion.group} instead of "
            f"{', '.join(fusion.members)}"
        )


def explain_module_plan(
    found: str, plan: Sequence[tuple[str, ...] | str], uncovered: Sequence[str]
) -> list[str]:
    """Which blocks were found, the plan as Python, and what no entry covers."""
    entries = [entry if isinstance(entry, str) else list(entry) for entry in plan]
    lines = [*found.splitlines(), f"module_bucket_plans = {entries!r}"]
    if uncovered:
        lines.append(f"in no entry: {', '.join(uncovered)}")
    return lines


def explain_buckets(buckets: Sequence[BucketReport]) -> Iterator[str]:
    """Every bucket."""
    for bucket in buckets:
        name = f"{bucket.label}: " if bucket.label else ""
        yield (
            f"  {name}{bucket.kind} of {len(bucket.members)} on {bucket.group}, {bucket.dtype}, "
            f"{bucket.size_bytes / _MIB:.1f} MiB, {bucket.form}"
        )


def explain_refusals(refusals: Sequence[Refusal]) -> Iterator[str]:
    """What was not merged, by reason; eight of each by name."""
    by_reason: dict[str, list[str]] = {}
    for refusal in refusals:
        detail = f" ({refusal.detail})" if refusal.detail else ""
        by_reason.setdefault(refusal.reason.value, []).append(", ".join(refusal.members) + detail)
    for reason, members in by_reason.items():
        yield f"  not merged, because {reason}: {len(members)}"
        yield from (f"    {member}" for member in members[:8])
        if len(members) > 8:
            yield f"    and {len(members) - 8} more"
