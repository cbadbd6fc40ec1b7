"""Makes the report of a run, and tells it: one log line, counters and a trace artifact."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import CollectiveSpan
from torch_patches._inductor.fx_passes.comm_overlap.forecast import Forecast
from torch_patches._inductor.fx_passes.comm_overlap.fusing import Fused
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import (
    displaced_share,
    max_consecutive_compute_between_reduce_scatters,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import report_bytes
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import memory_limits
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    Plan,
    Skeleton,
    TagSource,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import (
    BucketReport,
    GroupReport,
    Report,
    SpanReport,
    Story,
)
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import hash_of, launch_texts

log = logging.getLogger(__name__)

#: Name of the artifact with the launches and their hash.
SCHEDULE_ARTIFACT = "comm_overlap_schedule"


@dataclass(frozen=True, eq=False)
class Before:
    """What a report needs from the graph before it changes.

    Args:
        inputs: names of what each node reads, for an observer; empty where there is none.
    """

    nodes: tuple[fx.Node, ...]
    max_consecutive_compute: int
    collectives: tuple[Collective, ...]
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(graph: fx.Graph, skeleton: Skeleton, observed: bool = False) -> Before:
        inputs: dict[str, tuple[str, ...]] = {}
        if observed:  # names, since a rewrite gives the nodes other inputs
            inputs = {n.name: tuple(i.name for i in n.all_input_nodes) for n in graph.nodes}
        return Before(
            tuple(graph.nodes),
            max_consecutive_compute_between_reduce_scatters(graph),
            skeleton.collectives,
            inputs,
        )


@dataclass(frozen=True, eq=False)
class Observed:
    """What an observer may read of one run; its forecasts hold graphs, which it must not keep.

    Args:
        before, after: of the graph as it was given, and as it is now.
        inputs: names of what each node read before; the nodes of ``before`` have other inputs now.
        cap_bytes, held_cap_bytes: most live bytes that were allowed, with inputs freed and held.
        options: of the run.
    """

    before: Forecast
    after: Forecast
    inputs: Mapping[str, tuple[str, ...]]
    cap_bytes: int
    held_cap_bytes: int
    options: Options


#: Looks at a run when it is done, and keeps what can show it later.
Observer = Callable[[Observed], Story]


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
    # The waits of a bucket go where it goes, as its starts do, whether they are new nodes or not.
    merged = {wait for b in plan.buckets for member in b.members for wait in member.waits}
    others = [node for node in before.nodes if node not in merged]
    share = displaced_share(others, tuple(graph.nodes))
    launches = tuple(launch_texts(after, before.collectives))
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
        moved=round(share * _count_surviving(others, graph)),
        max_consecutive_compute_before=before.max_consecutive_compute,
        max_consecutive_compute_after=max_consecutive_compute_between_reduce_scatters(graph),
        operations=plan.operations,
        schedule_hash=hash_of(launches),
        launches=launches,
    )


def fusion_report(options: Options, fused: Fused, after: Skeleton) -> Report:
    """The report of a joint graph, or of a graph in which nothing but chains was looked at."""
    before = fused.before or after.collectives
    launches = tuple(launch_texts(after, before))
    return with_fusions(
        Report(
            mode=options.bucketing_mode,
            collectives_before=count_launches(before),
            collectives_after=count_launches(after.collectives),
            groups_before=summarize_groups(before),
            groups_after=summarize_groups(after.collectives),
            told_by=count_sources(before),
            schedule_hash=hash_of(launches),
            launches=launches,
            failure=fused.failure,
        ),
        fused,
    )


def with_fusions(report: Report, fused: Fused) -> Report:
    """The report with what became of chains."""
    return replace(
        report,
        fusions=fused.fusions,
        saved_launches=sum(fusion.saved_launches for fusion in fused.fusions),
        saved_bytes=sum(fusion.saved_bytes for fusion in fused.fusions),
        refusals=(*fused.refusals, *report.refusals),
    )


def _count_surviving(before: Sequence[fx.Node], graph: fx.Graph) -> int:
    known = set(before)
    return sum(node in known and node.op == "call_function" for node in graph.nodes)


def with_forecasts(report: Report, overlapped: Overlapped, given: Forecast | None = None) -> Report:
    """The report with what the estimates expect of the graph before and after.

    Args:
        given: of the graph before chains were fused; None where none were.
    """
    before, after = given or overlapped.before, overlapped.after
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


def with_story(
    report: Report,
    overlapped: Overlapped,
    given: Forecast | None,
    inputs: Mapping[str, tuple[str, ...]],
    options: Options,
    observer: Observer,
) -> Report:
    """The report with what ``observer`` keeps of the runs; ``given`` as for :func:`with_forecasts`,
    ``inputs`` as :class:`Observed` has them."""
    before = overlapped.before  # the caps count from it
    observed = Observed(
        before=given or before,
        after=overlapped.after,
        inputs=inputs,
        cap_bytes=memory_limits(options, before.peak_bytes).peak_bytes,
        held_cap_bytes=memory_limits(options, before.held_peak_bytes).peak_bytes,
        options=options,
    )
    return replace(report, story=observer(observed))


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
    """One INFO line, counters in ``counters["inductor"]`` and two ``trace_structured`` artifacts: the
    report, and :data:`SCHEDULE_ARTIFACT`.

    The log record carries the whole object as ``record.report``, for a handler of the user's.

    Counters add up over graphs, except those named ``max``, which keep the largest (0 for a
    ``max_topo_span`` of None).
    """
    from torch._dynamo.utils import counters
    from torch._logging import trace_structured

    log.info("%s", report.summary(), extra={"report": report})
    if report.module_plan:
        log.info("%s", "\n".join(report.explain_module_plan()))
    if log.isEnabledFor(logging.DEBUG) and (lines := report.explain_decisions()):
        log.debug("%s", "\n".join(lines))
    counts = counters["inductor"]
    counts["comm_overlap_fused_chains"] += len(report.fusions)
    counts["comm_overlap_saved_launches"] += report.saved_launches
    counts["comm_overlap_kept_gathers"] += len(report.kept_gathers)
    counts["comm_overlap_copy_engine_gathers"] += len(report.copy_engine_gathers)
    if report.phase == "post-grad" and report.mode != "none":
        _count_buckets(counts, report)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "comm_overlap_report", "encoding": "json"},
        payload_fn=report.to_json,
    )
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": SCHEDULE_ARTIFACT, "encoding": "json"},
        payload_fn=lambda: _schedule(report),
    )


def _schedule(report: Report) -> str:
    """What ``torch-patches diff`` compares between ranks; on a cache hit, where no pass runs, it takes
    the same from the graph that torch emits again."""
    schedule = {"phase": report.phase, "schedule_hash": report.schedule_hash}
    return json.dumps({**schedule, "launches": report.launches}, indent=1)


def _count_buckets(counts: Counter[str], report: Report) -> None:
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
