"""The pass list, seen whole, and the entry points that run it.

    joint graph:      tag parameter and gradient traffic -> chained collectives as one
    post-grad graph:  tag, if no joint graph was seen -> chained collectives as one
                      -> collect -> topo_span -> check -> apply -> report
                      -> collect -> label by module, in the modes that do
                                 -> ways to bucket and schedule (overlap.py)
                                 -> control dependencies, for Inductor -> report

``run_joint`` and ``run_post_grad`` are what Inductor calls; ``optimize_graph`` runs the same on one
GraphModule.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.check import check_fences, check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import CalibrationError
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    EstimationError,
    RuntimeModel,
    make_model,
)
from torch_patches._inductor.fx_passes.comm_overlap.forecast import Forecast, forecast
from torch_patches._inductor.fx_passes.comm_overlap.fusing import Fused, fuse_chains
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    CONSIDERED_MARK,
    SCHEDULED_MARK,
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    Overlap,
    insert_overlap_dependencies,
    plan_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import record_inputs
from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    ModuleScope,
    ModuleStackError,
    read_node_stacks,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.module_names import (
    check_module_names as check_module_names,
)
from torch_patches._inductor.fx_passes.comm_overlap.module_names import (
    warn_of_plan,
    warn_reduced,
    warn_uncovered,
)
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    raise_if_strict,
    warn_unfused,
    warn_untagged,
    warn_untouched,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped, overlap
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import (
    uncovered_owners,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlanError
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_ways import FULL_WAYS
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import is_tagged, tag_graph
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_topo_span
from torch_patches._inductor.fx_passes.comm_overlap.plan import Plan, RecordedInput, Skeleton
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches._inductor.fx_passes.comm_overlap.reporting import (
    Before,
    build_report,
    emit_report,
    fusion_report,
    with_forecasts,
    with_fusions,
)
from torch_patches._inductor.fx_passes.comm_overlap.sources import digest_of as digest_of
from torch_patches._inductor.fx_passes.comm_overlap.sources import source_digest as source_digest

log = logging.getLogger(__name__)

#: Causes local to one rank: swallowing them there would change one rank's schedule and hang the job.
RANK_LOCAL_ERRORS = (
    OSError,
    MemoryError,
    RecursionError,
    ImportError,
    torch.OutOfMemoryError,
)

Planner = Callable[[Skeleton, AugmentedGraph[fx.Node], Options], Plan]

#: The user's own mistakes: they raise, as bad flags do.
USER_ERRORS = (EstimationError, CalibrationError, ModulePlanError, ModuleStackError)

#: What decides where nothing is scheduled, by bucketing_mode.
PLANNERS: dict[str, Planner] = {"topo_span": plan_topo_span}


def record_inputs_of(model: object) -> tuple[RecordedInput, ...]:
    """What Dynamo knows of the inputs of the graph it hands over; call it while it does.

    Empty for other models, and with one warning where Dynamo's graph cannot be read.
    """
    try:
        return record_inputs(model)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_untagged(f"{type(error).__name__}: {error}")
        return ()


def run_joint(
    graph: fx.Graph, options: Options, recorded: Sequence[RecordedInput] = ()
) -> Report | None:
    """Tags the collectives of a joint or inference graph, and makes one of chained ones.

    Args:
        recorded: what Dynamo knew of the inputs; without it, descriptors and structure decide.

    Returns:
        What became of chains; None where no flag asks for it.

    Raises:
        OSError, MemoryError, ...: causes local to this rank (:data:`RANK_LOCAL_ERRORS`).  After any
            other failure the graph has no tags (structure decides), with one warning.
    """
    if options.bucketing_mode != "none":
        _tag(graph, recorded)
    if not options.fuses:
        return None
    before = collect(graph).collectives
    fused = _fuse(graph, options)
    report = replace(fusion_report(options, before, fused, collect(graph)), phase="joint")
    _tell(report, options)
    return report


def _fuse(graph: fx.Graph, options: Options) -> Fused:
    """Chains as one, where a flag asks for it; a graph that cannot be handled stays."""
    if not options.fuses:
        return Fused()
    try:
        return fuse_chains(graph, options)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_unfused(f"{type(error).__name__}: {error}")
        return Fused()


def _tag(graph: fx.Graph, recorded: Sequence[RecordedInput]) -> None:
    try:
        tag_graph(graph, recorded)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_untagged(f"{type(error).__name__}: {error}")


def tags_digest(
    module: fx.GraphModule, recorded: Sequence[RecordedInput] = (), options: Options | None = None
) -> str:
    """Hash of what the tags of a graph, and of the graphs inside it, decide; tags it first if it
    has none.  Where ``options`` read modules, also of what their names decide.

    torch's key of a compiled graph sees code, not metadata: two backward graphs with equal code may
    have other tags, since those come from the joint graph.
    """
    if not is_tagged(module.graph):
        _tag(module.graph, recorded)
    names = options is not None and options.reads_modules
    digest = hashlib.sha256()
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            if collective_kind(node) is not None:
                tag = tag_of(node)
                decisive = None if tag is None else (tag.traffic.value, tag.source.value, tag.place)
                digest.update(repr(decisive).encode())
                if names and tag is not None:
                    digest.update(repr((tag.parameter, tag.index)).encode())
        if names and options is not None:
            stacks = _node_stacks(inner.graph, options)
            for place, node in enumerate(inner.graph.nodes):
                digest.update(repr((place, stacks.get(node, ()))).encode())
    return digest.hexdigest()


def _node_stacks(graph: fx.Graph, options: Options) -> dict[fx.Node, tuple[ModuleScope, ...]]:
    """Empty where the graph cannot be read: it will be left as it is."""
    try:
        return read_node_stacks(collect(graph), graph.nodes, options.module_stack_fn)
    except (*RANK_LOCAL_ERRORS, *USER_ERRORS):
        raise
    except Exception as error:
        raise_if_strict(error)
        return {}


def run_post_grad(
    graph: fx.Graph,
    options: Options,
    recorded: Sequence[RecordedInput] = (),
    estimated: bool = False,
) -> Report | None:
    """Buckets and schedules the collectives of a forward, backward or inference graph, in place.

    A graph without tags is tagged first, if its inputs have descriptors; else structure decides.

    Args:
        recorded: as for :func:`run_joint`.
        estimated: report expected times and peaks also where no decision needs them.

    Returns:
        The report, or None where there is nothing to do (no flag asks for anything, no collectives,
        a second run).

    Raises:
        OSError, MemoryError, ...: causes local to this rank (:data:`RANK_LOCAL_ERRORS`).
        EstimationError, CalibrationError: what the user gave for estimates is no good.  Any other
            failure leaves the graph as it was and warns once.
    """
    if not options.changes:
        return None
    if options.bucketing_mode != "none" and not is_tagged(graph):
        _tag(graph, recorded)
    try:
        report = _change(graph, options, estimated)
    except (*RANK_LOCAL_ERRORS, *USER_ERRORS):
        raise
    except Exception as error:
        raise_if_strict(error)
        reason = f"{type(error).__name__}: {error}"
        warn_untouched(reason)
        return Report(options.bucketing_mode, failure=reason)
    if report is not None:
        _tell(report, options)
    return report


@dataclass(frozen=True, eq=False)
class _Change:
    """The graph before, the plan that was applied to it, and what is expected of it.

    Args:
        fused: what was done before the plan was made.
        was: the forecast of the graph as it was given, where chains were fused.
    """

    before: Before
    plan: Plan
    after: Skeleton
    overlapped: Overlapped | None = None
    fused: Fused = field(default_factory=Fused)
    was: Forecast | None = None


def _change(graph: fx.Graph, options: Options, estimated: bool) -> Report | None:
    """Reads, decides, checks and applies; the graph is as it was if this raises."""
    skeleton = collect(graph)
    if not skeleton.collectives or _is_scheduled(skeleton, options):
        return None
    before = Before.of(graph, skeleton)
    snapshot = Snapshot(graph)
    try:
        was = _forecast_if_fused(graph, skeleton, options, estimated)
        fused = _fuse(graph, options)
        if options.bucketing_mode == "none":
            return fusion_report(options, before.collectives, fused, collect(graph))
        if options.fuses:  # undone or not, there are new nodes
            skeleton = collect(graph)
        if options.schedules:
            change = _overlap(graph, skeleton, options, before)
        else:
            change = _bucket(graph, skeleton, options, before, estimated)
        change = replace(change, fused=fused, was=was if fused.fusions else None)
        _mark_considered(graph, options)
        report = _report(graph, options, change)
        if change.overlapped is not None and options.insert_overlap_deps:
            report = _hold_order(graph, change.overlapped.hidings(), report)
    except BaseException:
        snapshot.restore()
        raise
    return report


def _forecast_if_fused(
    graph: fx.Graph, skeleton: Skeleton, options: Options, estimated: bool
) -> Forecast | None:
    """Of the graph as it is given, if chains may be fused before anything else is forecast."""
    if not options.fuses or not (options.schedules or estimated):
        return None
    if options.bucketing_mode == "none":
        return None
    return forecast(graph, skeleton, _model(options), eager=options.run_eagerly)


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
    return _Change(before, overlapped.plan, overlapped.after.skeleton, overlapped)


def _bucket(
    graph: fx.Graph, skeleton: Skeleton, options: Options, before: Before, estimated: bool
) -> _Change:
    model = _model(options) if estimated else None
    eager = options.run_eagerly
    was = forecast(graph, skeleton, model, eager=eager) if model is not None else None
    plan = PLANNERS[options.bucketing_mode](skeleton, contract(graph, skeleton), options)
    plan = check_plan(skeleton, contract(graph, skeleton), plan)
    if plan.buckets:
        apply_plan(graph, skeleton, plan, run_eagerly=eager)
        graph.lint()
    after = collect(graph)
    check_fences(skeleton, after, plan)
    if model is None or was is None:
        return _Change(before, plan, after)
    now = forecast(graph, after, model, eager=eager)
    return _Change(before, plan, after, Overlapped(plan, "as asked", was, now))


def _model(options: Options) -> RuntimeModel:
    return make_model(
        options.estimate_device,
        options.gpus_per_node,
        options.custom_runtime_estimation,
        options.calibration,
        options.compute_slowdown,
        options.link_sharing,
    )


def _report(graph: fx.Graph, options: Options, change: _Change) -> Report | None:
    """What was done.  A failure here must not undo it: the other ranks have done it too."""
    try:
        report = build_report(options, change.before, change.plan, graph, change.after)
        report = with_fusions(report, change.fused)
        if change.overlapped is None:
            return report
        report = with_forecasts(report, change.overlapped, change.was)
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


def _tell(report: Report, options: Options) -> None:
    """Likewise."""
    try:
        emit_report(report)
        if options.reads_modules and report.way not in FULL_WAYS and report.way:
            warn_reduced(report.way)
        for sentence in report.unmatched:
            warn_of_plan(sentence)
        if report.uncovered:
            warn_uncovered(report.uncovered, options.module_uncovered)
    except Exception as error:
        raise_if_strict(error)
        log.warning("torch_patches changed a graph but could not report it", exc_info=True)


def _mark_considered(graph: fx.Graph, options: Options) -> None:
    """So that a second run with the same options changes nothing."""
    fingerprint = options.fingerprint()
    for node in graph.nodes:
        if collective_kind(node) is not None:
            if BUCKET_MARK not in node.meta:
                node.meta[CONSIDERED_MARK] = fingerprint
            if options.schedules:
                node.meta[SCHEDULED_MARK] = fingerprint


def _is_scheduled(skeleton: Skeleton, options: Options) -> bool:
    """An earlier run with the same options has placed all collectives."""
    fingerprint = options.fingerprint()
    marks = [c.start.meta.get(SCHEDULED_MARK) for c in skeleton.collectives]
    return options.schedules and fingerprint is not None and set(marks) == {fingerprint}


def optimize_graph(gm: fx.GraphModule, options: Options) -> Report:
    """Runs the pipeline on one GraphModule and recompiles it; see ``torch_patches.optimize_graph``."""
    report = run_post_grad(gm.graph, options, estimated=True)
    gm.recompile()
    return report if report is not None else Report(options.bucketing_mode)
