"""Changes one graph: decides, checks, applies and reports; or applies what another rank decided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.check import check_fences, check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    RuntimeModel,
    make_model,
)
from torch_patches._inductor.fx_passes.comm_overlap.forecast import Forecast, forecast
from torch_patches._inductor.fx_passes.comm_overlap.fusing import Fused, fuse_or_leave
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import find_chains
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    CONSIDERED_MARK,
    SCHEDULED_MARK,
    collect,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    Overlap,
    insert_overlap_dependencies,
    plan_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.copy_engines import (
    ring_bytes,
    use_copy_engines,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import check_order
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped, overlap
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import (
    uncovered_owners,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_topo_span
from torch_patches._inductor.fx_passes.comm_overlap.plan import Plan, Skeleton
from torch_patches._inductor.fx_passes.comm_overlap.portable_plan import (
    PortablePlan,
    PortablePlanError,
    decode,
    encode,
    structure_digest,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches._inductor.fx_passes.comm_overlap.reporting import (
    Before,
    Observer,
    build_report,
    fusion_report,
    with_forecasts,
    with_fusions,
    with_story,
)

log = logging.getLogger(__name__)

Planner = Callable[[Skeleton, AugmentedGraph[fx.Node], Options], Plan]

#: What decides where nothing is scheduled, by bucketing_mode.
PLANNERS: dict[str, Planner] = {"topo_span": plan_topo_span}


@dataclass(frozen=True, eq=False)
class _Change:
    """The graph before, the plan that was applied to it, and what is expected of it.

    Args:
        order: the nodes that the plan was made for.
        fused: what was done before the plan was made.
        was: the forecast of the graph as it was given, where chains were fused.
    """

    before: Before
    order: Sequence[fx.Node]
    plan: Plan
    after: Skeleton
    overlapped: Overlapped | None = None
    fused: Fused = field(default_factory=Fused)
    was: Forecast | None = None


@dataclass(frozen=True, eq=False)
class Changed:
    """What was done to a graph.

    Args:
        report: for the user; None where it could not be made.
        after: the launches now.
        plan: for other ranks.
        structure: of the graph that it was made for; empty where nobody compares.
    """

    report: Report | None
    after: Skeleton
    plan: PortablePlan
    structure: str


def change_graph(
    graph: fx.Graph,
    options: Options,
    estimated: bool,
    given: PortablePlan | None = None,
    observer: Observer | None = None,
) -> Changed | None:
    """Reads, decides, checks and applies; the graph is as it was if this raises.

    Args:
        estimated: report expected times and peaks also where no decision needs them.
        given: another rank's plan, to be applied instead of deciding.
        observer: looks at the forecasts before and after, where there are any.

    Returns:
        None where there is nothing to do.

    Raises:
        PortablePlanError: ``given`` is not legal here.
    """
    skeleton = collect(graph)
    if not skeleton.collectives or _is_scheduled(skeleton, options):
        return None
    before = Before.of(graph, skeleton, observer is not None)
    snapshot = Snapshot(graph)
    try:
        was = _forecast_of_chains(graph, skeleton, options, estimated)
        fused = fuse_or_leave(graph, options)
        structure = structure_digest(graph) if options.cross_rank_check == "agree" else ""
        if options.bucketing_mode == "none":
            report = report_fusions(graph, options, fused)
            return Changed(report, collect(graph), PortablePlan(), structure)
        if options.fuses:  # undone or not, there are new nodes
            skeleton = collect(graph)
        if given is not None:
            change = _take_over(graph, skeleton, options, before, given)
        elif options.schedules:
            change = _overlap(graph, skeleton, options, before)
        else:
            change = _bucket(graph, skeleton, options, before, estimated)
        change = replace(change, fused=fused, was=was if fused.fusions else None)
        _mark_considered(change.after, options)
        made = _report(graph, options, change, observer)
        if options.copy_engine_gathers:
            made = _by_copy_engines(change.after, options, made)
        if change.overlapped is not None and options.insert_overlap_deps:
            made = _hold_order(graph, change.overlapped.hidings(), made)
        return Changed(made, change.after, encode(change.plan, change.order), structure)
    except BaseException:
        snapshot.restore()
        raise


def _forecast_of_chains(
    graph: fx.Graph, skeleton: Skeleton, options: Options, estimated: bool
) -> Forecast | None:
    """Of the graph as it is given, if it has chains that may be fused before the next forecast."""
    wanted = options.bucketing_mode != "none" and (options.schedules or estimated)
    if not (options.fuses and wanted and find_chains(skeleton)):
        return None
    return forecast(graph, skeleton, _model(options), eager=options.run_eagerly)


def _by_copy_engines(after: Skeleton, options: Options, report: Report | None) -> Report | None:
    """Hands gathers within nodes over; the report with how many.

    Last, since estimates know nothing of it; groups are told as theirs are.
    """
    model = _model(options)
    near = {c.group for c in after.collectives if model.link(c) is model.device.intra_node}
    taken = use_copy_engines(after.collectives, near, fold_casts=not options.run_eagerly)
    return report and replace(
        report,
        copy_engine_gathers=tuple(one.start.name for one in taken),
        copy_engine_bytes=ring_bytes(taken),
    )


def _hold_order(
    graph: fx.Graph, hidings: Sequence[Overlap], report: Report | None
) -> Report | None:
    """Inserts control dependencies; the report with how many, and what they do not hold."""
    planned = plan_overlap_dependencies(graph, hidings)
    edges = insert_overlap_dependencies(graph, hidings)
    return report and replace(
        report,
        control_dependencies=edges,
        not_held=tuple(o.start.name for o in planned.without_anchor),
        half_held=tuple(o.start.name for o in planned.payload_held),
    )


def _overlap(graph: fx.Graph, skeleton: Skeleton, options: Options, before: Before) -> _Change:
    overlapped = overlap(graph, skeleton, options, _model(options))
    order = overlapped.before.order
    return _Change(before, order, overlapped.plan, overlapped.after.skeleton, overlapped)


def _bucket(
    graph: fx.Graph, skeleton: Skeleton, options: Options, before: Before, estimated: bool
) -> _Change:
    model = _model(options) if estimated else None
    eager = options.run_eagerly
    was = forecast(graph, skeleton, model, eager=eager) if model is not None else None
    order = tuple(graph.nodes)
    plan = PLANNERS[options.bucketing_mode](skeleton, contract(graph, skeleton), options)
    plan = check_plan(skeleton, contract(graph, skeleton), plan)
    after = _apply(graph, skeleton, plan, options)
    if model is None or was is None:
        return _Change(before, order, plan, after)
    now = forecast(graph, after, was.model, eager=eager)
    return _Change(before, order, plan, after, Overlapped(plan, "as asked", was, now))


def _take_over(
    graph: fx.Graph, skeleton: Skeleton, options: Options, before: Before, given: PortablePlan
) -> _Change:
    """Another rank's plan; what it is worth here does not count, whether it is legal does."""
    order = tuple(graph.nodes)
    plan = decode(given, skeleton, order)
    if len(check_plan(skeleton, contract(graph, skeleton), plan).buckets) < len(plan.buckets):
        raise PortablePlanError("a bucket of the plan is not legal here")
    model, eager = _model(options), options.run_eagerly
    was = forecast(graph, skeleton, model, eager=eager)
    after = _apply(graph, skeleton, plan, options)
    now = forecast(graph, after, was.model, eager=eager)
    return _Change(before, order, plan, after, Overlapped(plan, "another rank's", was, now))


def _apply(graph: fx.Graph, skeleton: Skeleton, plan: Plan, options: Options) -> Skeleton:
    if plan.buckets or plan.moves or plan.order:
        apply_plan(graph, skeleton, plan, run_eagerly=options.run_eagerly)
        check_order(graph)
    after = collect(graph)
    check_fences(skeleton, after, plan)
    return after


def _model(options: Options) -> RuntimeModel:
    return make_model(
        options.estimate_device,
        options.gpus_per_node,
        options.custom_runtime_estimation,
        options.calibration,
        options.compute_slowdown,
        options.link_sharing,
    )


def report_fusions(graph: fx.Graph, options: Options, fused: Fused) -> Report | None:
    """Where nothing but chains was looked at.  A failure must not undo what other ranks have done."""
    try:
        return fusion_report(options, fused, collect(graph))
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        log.warning("torch_patches changed a graph but could not report it", exc_info=True)
        return None


def _report(
    graph: fx.Graph, options: Options, change: _Change, observer: Observer | None
) -> Report | None:
    """What was done.  A failure here must not undo it: the other ranks have done it too."""
    try:
        report = build_report(options, change.before, change.plan, graph, change.after)
        report = with_fusions(report, change.fused)
        if change.overlapped is None:
            return report
        report = with_forecasts(report, change.overlapped, change.was)
        if observer is not None:
            report = _observed(report, options, change, change.overlapped, observer)
        labels = change.overlapped.labels
        if labels is None:
            return report
        uncovered = uncovered_owners(change.before.collectives, labels)
        return replace(
            report,
            module_plan=labels.entries,
            modules_found=labels.found,
            uncovered=tuple(uncovered),
            unmatched=labels.unmatched,
        )
    except Exception as error:
        raise_if_strict(error)
        log.warning("torch_patches changed a graph but could not report it", exc_info=True)
        return None


def _observed(
    report: Report, options: Options, change: _Change, overlapped: Overlapped, observer: Observer
) -> Report:
    """With the story, where it can be told; the figures do not depend on it."""
    try:
        return with_story(report, overlapped, change.was, change.before.inputs, options, observer)
    except Exception as error:
        raise_if_strict(error)
        log.warning("torch_patches could not keep what draws a run", exc_info=True)
        return report


def _mark_considered(after: Skeleton, options: Options) -> None:
    """So that a second run with the same options changes nothing."""
    fingerprint = options.fingerprint()
    for start in (collective.start for collective in after.collectives):
        marks = {} if BUCKET_MARK in start.meta else {CONSIDERED_MARK: fingerprint}
        if options.schedules:
            marks[SCHEDULED_MARK] = fingerprint
        start.meta = {**start.meta, **marks}  # a snapshot holds the old one


def _is_scheduled(skeleton: Skeleton, options: Options) -> bool:
    """An earlier run with the same options has placed all collectives."""
    fingerprint = options.fingerprint()
    marks = [c.start.meta.get(SCHEDULED_MARK) for c in skeleton.collectives]
    return options.schedules and fingerprint is not None and set(marks) == {fingerprint}
