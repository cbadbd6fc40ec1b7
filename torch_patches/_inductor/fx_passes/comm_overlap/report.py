"""What was done to a graph: a plain object that needs no graph any more."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch_patches._inductor.fx_passes.comm_overlap.explain import (
    explain_buckets,
    explain_fusions,
    explain_module_plan,
    explain_refusals,
)
from torch_patches._inductor.fx_passes.comm_overlap.fusing import FusionReport
from torch_patches._inductor.fx_passes.comm_overlap.plan import CloseReason, Refusal
from torch_patches._inductor.fx_passes.comm_overlap.report_parts import (
    BucketReport,
    GroupReport,
    SpanReport,
)

__all__ = [
    "BucketReport",
    "FusionReport",
    "GroupReport",
    "NoStoryError",
    "Report",
    "SpanReport",
    "Story",
]


class NoStoryError(ValueError):
    """A picture was asked for of a run that nobody observed."""


class Story(Protocol):
    """What an observer kept of the runs before and after, to show them; it holds no graph."""

    def write_chrome_trace(self, report: Report, path: str | Path) -> None:
        """Both runs as JSON for chrome://tracing and Perfetto."""

    def write_html(self, report: Report, path: str | Path) -> None:
        """One page for people."""


@dataclass(frozen=True)
class Report:
    """What a pipeline run did to one graph.

    Args:
        mode: the bucketing mode that ran.
        phase: "joint" where chains were fused before the graph was split, else "post-grad".
        collectives_before, collectives_after: launches by kind.
        groups_before, groups_after: the same by kind and group, with bytes by dtype.
        told_by: collectives by who told what they carry: "descriptors" or "dynamo" (tags of the
            joint graph), "structure".
        fusions: chains of collectives that became one.
        saved_launches, saved_bytes: by these, as :class:`FusionReport` has it.
        kept_gathers, kept_bytes: starts of the gathers whose results stay from forward to backward.
        copy_engine_gathers, copy_engine_bytes: starts of the gathers that the copy engines do, and what
            each rank keeps for them outside of torch's allocator.
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
            order; compare it offline when a job hangs (``torch-patches diff``).
        launches: the collectives of the result in order, as texts without names of this rank; what
            the hash is made of.
        cross_rank: what came of comparing ranks (cross_rank_check); empty where nobody did.
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
        story: both runs kernel by kernel, where somebody observed (``reporting.Observer``).
    """

    mode: str
    phase: str = "post-grad"
    collectives_before: dict[str, int] = field(default_factory=dict)
    collectives_after: dict[str, int] = field(default_factory=dict)
    groups_before: tuple[GroupReport, ...] = ()
    groups_after: tuple[GroupReport, ...] = ()
    told_by: dict[str, int] = field(default_factory=dict)
    fusions: tuple[FusionReport, ...] = ()
    saved_launches: int = 0
    saved_bytes: int = 0
    kept_gathers: tuple[str, ...] = ()
    kept_bytes: int = 0
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
    launches: tuple[str, ...] = ()
    copy_engine_gathers: tuple[str, ...] = ()
    copy_engine_bytes: int = 0
    cross_rank: str = ""
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
    story: Story | None = field(default=None, repr=False, compare=False)

    def explain(self) -> str:
        """What was done in some lines for people; module buckets with a plan to paste."""
        return "\n".join(
            [
                self.summary(),
                *self.explain_module_plan(),
                *self.explain_decisions(),
            ]
        )

    def explain_decisions(self) -> list[str]:
        """A line for each fused chain and each bucket, and what was not merged, by reason."""
        return [
            *explain_fusions(self.fusions),
            *explain_buckets(self.buckets),
            *explain_refusals(self.refusals),
        ]

    def explain_module_plan(self) -> list[str]:
        """Which blocks were found, and the plan as Python, to paste; empty in other modes."""
        if not self.module_plan:
            return []
        return explain_module_plan(self.modules_found, self.module_plan, self.uncovered)

    def to_json(self) -> str:
        """The whole report as JSON, without the story; refusal reasons as their sentences."""
        content = asdict(replace(self, story=None))
        del content["story"]
        return json.dumps(content, default=lambda value: value.value, indent=1)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes both runs as the estimates expect them, for chrome://tracing and ui.perfetto.dev.

        Raises:
            NoStoryError: nobody observed the run.
            OSError: it cannot be written.
        """
        self._told_story().write_chrome_trace(self, path)

    def to_html(self, path: str | Path) -> None:
        """Writes one page that needs no network: the timeline before and after, and tables.

        Raises:
            NoStoryError: nobody observed the run.
            OSError: it cannot be written.
        """
        self._told_story().write_html(self, path)

    def _told_story(self) -> Story:
        if self.story is None:
            why = self.failure or (
                "there were no collectives, no estimates, or nobody observed; optimize_graph does "
                "unless keep_story is False, and a compile whose INFO log is on"
            )
            raise NoStoryError(f"nothing was recorded that could be drawn: {why}")
        return self.story

    def summary(self) -> str:
        """One line for the log."""
        if self.phase == "joint" or self.mode == "none":
            kept = f"{len(self.kept_gathers)} gathered parameters kept ({_mib(self.kept_bytes)})"
            return (
                f"comm_overlap {self.phase} graph: {self._fused()}, "
                f"{kept + ', ' if self.kept_gathers else ''}launches "
                f"{_counts(self.collectives_before)} -> {_counts(self.collectives_after)}"
            )
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
            + (f", {self._fused()}" if self.fusions else "")
            + self._by_copy_engines()
        )

    def _fused(self) -> str:
        return (
            f"{len(self.fusions)} chains of {sum(len(f.members) for f in self.fusions)} collectives "
            f"fused ({self.saved_launches} launches, {_mib(self.saved_bytes)} between them saved)"
        )

    def _by_copy_engines(self) -> str:
        if not self.copy_engine_gathers:
            return ""
        count, size = len(self.copy_engine_gathers), _mib(self.copy_engine_bytes)
        return f", {count} gathers by the copy engines ({size} kept for them)"

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


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
