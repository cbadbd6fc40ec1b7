"""What was done to a graph: a plain object, one log line, counters and a trace artifact."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import CollectiveSpan
from torch_patches._inductor.fx_passes.comm_overlap.explain import (
    describe_module_plan,
    explain,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import (
    displaced_share,
    max_consecutive_compute_between_reduce_scatters,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import report_bytes
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    CloseReason,
    Collective,
    Plan,
    Refusal,
    Skeleton,
    TagSource,
)
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import (
    schedule_hash as schedule_hash,
)

log = logging.getLogger(__name__)

__all__ = [
    "BucketReport",
    "GroupReport",
    "Report",
    "build_report",
    "emit_report",
    "max_consecutive_compute_between_reduce_scatters",
]


@dataclass(frozen=True)
class GroupReport:
    """Collectives of one kind on one process group."""

    kind: str
    group: str
    count: int
    size_bytes: int
    bytes_by_dtype: dict[str, int]


@dataclass(frozen=True)
class SpanReport:
    """One collective of the result, as the timeline expects it to run.

    Args:
        start: name of its start.
        start_ms, end_ms: on its group's stream.
        exposed_ms: how long compute stands still for it.
        hidden_ms: how long compute runs meanwhile.
        hidden_by: names of that compute, the longest first, eight at most.
    """

    start: str
    kind: str
    group: str
    start_ms: float
    end_ms: float
    exposed_ms: float
    hidden_ms: float
    hidden_by: tuple[str, ...]


@dataclass(frozen=True)
class BucketReport:
    """One bucket: what it is, what is in it, how far its members stood apart, why it closed; and the
    name of the module bucket, where modules decide."""

    kind: str
    group: str
    dtype: str
    reduce_op: str | None
    form: str
    members: tuple[str, ...]
    size_bytes: int
    span: int
    close_reason: str
    label: str = ""


@dataclass(frozen=True)
class Report:
    """What a pipeline run did to one graph.

    Args:
        mode: the bucketing mode that ran.
        collectives_before, collectives_after: launches by kind.
        groups_before, groups_after: the same by kind and group, with bytes by dtype.
        told_by: collectives by who told what they carry: "descriptors" or "dynamo" (tags of the
            joint graph), "structure".
        buckets: every bucket made.
        refusals: every collective or bucket that was not merged, with the reason.
        max_span: the largest span of a bucket, in working nodes.
        max_topo_span: its bound, None if there was none.
        closes: buckets by the reason that closed them.
        displaced_share: share of surviving call_function nodes that moved, 0 to 1.
        max_consecutive_compute_before, max_consecutive_compute_after: see
            ``max_consecutive_compute_between_reduce_scatters``.
        operations: counted work of the search.
        schedule_hash: equal on two ranks exactly if they launch the same collectives in the same
            order; compare it offline when a job hangs.
        failure: why the graph was left as it was, or None.
        estimates: constants behind the figures that follow; empty where nothing was estimated.
        way: which of the ways tried was taken; "input" means that nothing was better.
        total_ms_before, total_ms_after: of the simulated run.
        exposed_ms_before, exposed_ms_after: how long compute stands still for collectives.
        exposed_by_group_before, exposed_by_group_after: the same by process group.
        compute_ms_before, compute_ms_after: of all kernels; the difference is copies.
        peak_bytes_before, peak_bytes_after: most live bytes, where inputs other than parameters die
            after their last use.
        held_peak_bytes_before, held_peak_bytes_after: where the caller holds them.
        moved: surviving nodes that stand elsewhere among the others.
        control_dependencies: edges that hold the order in Inductor.
        not_held: starts of collectives whose overlap they do not hold, since no compute under them
            is a kernel that may wait for another.
        half_held: starts whose payload they hold in front of that compute, and not the launch:
            Inductor lowers all-reduces and broadcasts in place.
        spans: every collective of the result.
        module_plan: the module buckets, in the form of ``module_bucket_plans``; empty in other modes.
        modules_found: which repeated blocks were found.
        uncovered: parameters, or modules, whose collectives no entry of the plan covers.
        unmatched: a sentence for each entry of the plan, or of module_overlap_with, that matches
            nothing here.
    """

    mode: str
    collectives_before: dict[str, int] = field(default_factory=dict)
    collectives_after: dict[str, int] = field(default_factory=dict)
    groups_before: tuple[GroupReport, ...] = ()
    groups_after: tuple[GroupReport, ...] = ()
    told_by: dict[str, int] = field(default_factory=dict)
    buckets: tuple[BucketReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    max_span: int = 0
    max_topo_span: int | None = None
    closes: dict[str, int] = field(default_factory=dict)
    displaced_share: float = 0.0
    max_consecutive_compute_before: int = 0
    max_consecutive_compute_after: int = 0
    operations: int = 0
    schedule_hash: str = ""
    failure: str | None = None
    estimates: str = ""
    way: str = ""
    total_ms_before: float = 0.0
    total_ms_after: float = 0.0
    exposed_ms_before: float = 0.0
    exposed_ms_after: float = 0.0
    exposed_by_group_before: dict[str, float] = field(default_factory=dict)
    exposed_by_group_after: dict[str, float] = field(default_factory=dict)
    compute_ms_before: float = 0.0
    compute_ms_after: float = 0.0
    peak_bytes_before: int = 0
    peak_bytes_after: int = 0
    held_peak_bytes_before: int = 0
    held_peak_bytes_after: int = 0
    moved: int = 0
    control_dependencies: int = 0
    not_held: tuple[str, ...] = ()
    half_held: tuple[str, ...] = ()
    spans: tuple[SpanReport, ...] = ()
    module_plan: tuple[tuple[str, ...] | str, ...] = ()
    modules_found: str = ""
    uncovered: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()

    def explain(self) -> str:
        """What was done in some lines for people; module buckets with a plan to paste."""
        return explain(self)

    def to_json(self) -> str:
        """The whole report as JSON; refusal reasons as their sentences."""
        return json.dumps(asdict(self), default=lambda value: value.value, indent=1)

    def summary(self) -> str:
        """One line for the log."""
        merged = sum(len(b.members) for b in self.buckets)
        closes = ", ".join(f"{self.closes.get(r.value, 0)} by {r.value}" for r in CloseReason)
        return (
            f"comm_overlap {self.mode}: {len(self.buckets)} buckets of {merged} collectives, "
            f"launches {_counts(self.collectives_before)} -> {_counts(self.collectives_after)}, "
            f"traffic told by {_counts(self.told_by)}, "
            f"max span {self.max_span} (bound {self.max_topo_span}), closed {closes}, "
            f"max consecutive compute between reduce-scatters "
            f"{self.max_consecutive_compute_before} -> {self.max_consecutive_compute_after}, "
            f"{self.displaced_share:.1%} of nodes displaced{self._estimated()}"
        )

    def _estimated(self) -> str:
        if not self.estimates:
            return ""
        mib = 1 << 20
        return (
            f", estimated ({self.estimates}; way: {self.way}) "
            f"{self.total_ms_before:.2f} -> {self.total_ms_after:.2f} ms, "
            f"exposed {self.exposed_ms_before:.2f} -> {self.exposed_ms_after:.2f} ms, "
            f"peak {self.peak_bytes_before / mib:.1f} -> {self.peak_bytes_after / mib:.1f} MiB"
        )


def _counts(by_kind: dict[str, int]) -> str:
    return " ".join(f"{kind}={count}" for kind, count in by_kind.items()) or "none"


@dataclass(frozen=True, eq=False)
class Before:
    """What a report needs from the graph before it changes."""

    nodes: tuple[fx.Node, ...]
    max_consecutive_compute: int
    collectives: tuple[Collective, ...]

    @staticmethod
    def of(graph: fx.Graph, skeleton: Skeleton) -> Before:
        return Before(
            tuple(graph.nodes),
            max_consecutive_compute_between_reduce_scatters(graph),
            skeleton.collectives,
        )


def count_launches(collectives: Sequence[Collective]) -> dict[str, int]:
    """Launches by kind, in order of first appearance; a bucket is one launch."""
    return dict(Counter(c.kind.value for c in collectives))


def count_sources(collectives: Sequence[Collective]) -> dict[str, int]:
    """Collectives by who told what they carry."""
    sources = (c.tag.source if c.tag is not None else TagSource.STRUCTURE for c in collectives)
    return dict(Counter(source.value for source in sources))


def summarize_groups(collectives: Sequence[Collective]) -> tuple[GroupReport, ...]:
    """Counts and bytes by kind and group."""
    by_group: dict[tuple[str, str], list[Collective]] = {}
    for collective in collectives:
        by_group.setdefault((collective.kind.value, collective.group), []).append(collective)
    return tuple(
        GroupReport(
            kind, group, len(members), sum(c.size_bytes for c in members), _bytes_by_dtype(members)
        )
        for (kind, group), members in by_group.items()
    )


def _bytes_by_dtype(collectives: Sequence[Collective]) -> dict[str, int]:
    result: Counter[str] = Counter()
    for collective in collectives:
        dtype = str(collective.key.dtype).removeprefix("torch.") if collective.key else "unknown"
        larger = max(report_bytes(collective.input_bytes), report_bytes(collective.output_bytes))
        result[dtype] += larger
    return dict(result)


def describe_bucket(bucket: Bucket) -> BucketReport:
    """A bucket by names and numbers, without nodes."""
    return BucketReport(
        kind=bucket.key.kind.value,
        group=bucket.key.group,
        dtype=str(bucket.key.dtype).removeprefix("torch."),
        reduce_op=bucket.key.reduce_op,
        form=bucket.form.value,
        members=tuple(member.start.name for member in bucket.members),
        size_bytes=bucket.size_bytes,
        span=bucket.span,
        close_reason=bucket.close_reason.value,
        label=bucket.label,
    )


def build_report(
    options: Options,
    before: Before,
    plan: Plan,
    graph: fx.Graph,
    after: Skeleton,
) -> Report:
    """Assembles the report of a run whose plan has been applied to ``graph``."""
    buckets = tuple(describe_bucket(bucket) for bucket in plan.buckets)
    share = displaced_share(before.nodes, tuple(graph.nodes))
    return Report(
        mode=options.bucketing_mode,
        collectives_before=count_launches(before.collectives),
        collectives_after=count_launches(after.collectives),
        groups_before=summarize_groups(before.collectives),
        groups_after=summarize_groups(after.collectives),
        told_by=count_sources(before.collectives),
        buckets=buckets,
        refusals=plan.refusals,
        max_span=max((b.span for b in buckets), default=0),
        max_topo_span=options.max_topo_span,
        closes=dict(Counter(b.close_reason for b in buckets)),
        displaced_share=share,
        moved=round(share * _count_surviving(before.nodes, graph)),
        max_consecutive_compute_before=before.max_consecutive_compute,
        max_consecutive_compute_after=max_consecutive_compute_between_reduce_scatters(graph),
        operations=plan.operations,
        schedule_hash=schedule_hash(after),
    )


def _count_surviving(before: Sequence[fx.Node], graph: fx.Graph) -> int:
    known = set(before)
    return sum(node in known and node.op == "call_function" for node in graph.nodes)


def with_forecasts(report: Report, overlapped: Overlapped) -> Report:
    """The report with what the estimates expect of the graph before and after."""
    before, after = overlapped.before, overlapped.after
    return replace(
        report,
        estimates=after.model.describe(),
        way=overlapped.way,
        total_ms_before=before.timeline.total_ms,
        total_ms_after=after.timeline.total_ms,
        exposed_ms_before=before.timeline.exposed_ms,
        exposed_ms_after=after.timeline.exposed_ms,
        exposed_by_group_before=before.timeline.exposed_by_group(),
        exposed_by_group_after=after.timeline.exposed_by_group(),
        compute_ms_before=before.timeline.compute_ms,
        compute_ms_after=after.timeline.compute_ms,
        peak_bytes_before=before.peak_bytes,
        peak_bytes_after=after.peak_bytes,
        held_peak_bytes_before=before.held_peak_bytes,
        held_peak_bytes_after=after.held_peak_bytes,
        spans=tuple(map(_describe_span, after.timeline.spans)),
    )


def _describe_span(span: CollectiveSpan) -> SpanReport:
    longest = sorted(span.hidden_by, key=lambda hiding: -hiding.ms)[:8]
    return SpanReport(
        start=span.collective.start.name,
        kind=span.collective.kind.value,
        group=span.collective.group,
        start_ms=span.start_ms,
        end_ms=span.end_ms,
        exposed_ms=span.exposed_ms,
        hidden_ms=span.hidden_ms,
        hidden_by=tuple(hiding.node.name for hiding in longest),
    )


def emit_report(report: Report) -> None:
    """One INFO line, counters in ``counters["inductor"]`` and a ``trace_structured`` artifact.

    The log record carries the whole object as ``record.report``, for a handler of the user's.

    Counters add up over graphs, except those named ``max``, which keep the largest (0 for a
    ``max_topo_span`` of None).
    """
    from torch._dynamo.utils import counters
    from torch._logging import trace_structured

    log.info("%s", report.summary(), extra={"report": report})
    if report.module_plan:
        log.info("%s", "\n".join(describe_module_plan(report)))
    counts = counters["inductor"]
    counts["comm_overlap_graphs"] += 1
    counts["comm_overlap_buckets"] += len(report.buckets)
    counts["comm_overlap_bucket_members"] += sum(len(b.members) for b in report.buckets)
    for reason, count in report.closes.items():
        counts[f"comm_overlap_closed_by_{reason}"] += count
    for name, value in (
        ("max_span", report.max_span),
        ("max_topo_span", report.max_topo_span or 0),
        ("max_consecutive_compute_before", report.max_consecutive_compute_before),
        ("max_consecutive_compute_after", report.max_consecutive_compute_after),
    ):
        counts[f"comm_overlap_{name}"] = max(counts[f"comm_overlap_{name}"], value)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "comm_overlap_report", "encoding": "json"},
        payload_fn=report.to_json,
    )
