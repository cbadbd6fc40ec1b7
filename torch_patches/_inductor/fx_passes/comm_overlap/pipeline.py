"""The pass list, seen whole, and the entry points that run it.

    joint graph:      tag parameter and gradient traffic -> chained collectives as one
                      -> mark gathered parameters that stay
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
from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.changing import (
    Changed,
    change_graph,
    report_fusions,
)
from torch_patches._inductor.fx_passes.comm_overlap.cross_rank import (
    CrossRankError,
    Vote,
    agree,
    describe_difference,
    exchange,
    groups_of,
    take_leaders_plan,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import CalibrationError
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    EstimationError,
)
from torch_patches._inductor.fx_passes.comm_overlap.fusing import fuse_or_leave
from torch_patches._inductor.fx_passes.comm_overlap.gc_pause import without_gc
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import record_inputs
from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    ModuleScope,
    ModuleStackError,
    read_node_stacks,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.keeping import keep_or_leave
from torch_patches._inductor.fx_passes.comm_overlap.module_names import (
    check_module_names as check_module_names,
)
from torch_patches._inductor.fx_passes.comm_overlap.module_names import (
    warn_of_plan,
    warn_reduced,
    warn_uncovered,
)
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
    reason_of,
    warn_unfused,
    warn_untagged,
    warn_untouched,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlanError
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_ways import FULL_WAYS
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import is_tagged, tag_graph
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import BucketCapError
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput, Skeleton
from torch_patches._inductor.fx_passes.comm_overlap.portable_plan import PortablePlan
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches._inductor.fx_passes.comm_overlap.reporting import (
    Observer,
    emit_report,
)
from torch_patches._inductor.fx_passes.comm_overlap.sources import digest_of as digest_of
from torch_patches._inductor.fx_passes.comm_overlap.sources import source_digest as source_digest
from torch_patches._inductor.fx_passes.comm_overlap.sources import unshared_digest

log = logging.getLogger(__name__)

#: The user's own mistakes: they raise, as bad flags do.
USER_ERRORS = (
    BucketCapError,
    EstimationError,
    CalibrationError,
    ModulePlanError,
    ModuleStackError,
    CrossRankError,
)


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
        warn_untagged(reason_of(error))
        return ()


@without_gc
def run_joint(
    graph: fx.Graph, options: Options, recorded: Sequence[RecordedInput] = ()
) -> Report | None:
    """Tags the collectives of a joint or inference graph, makes one of chained ones, and marks
    gathered parameters that shall stay for the backward.

    Args:
        recorded: what Dynamo knew of the inputs; without it, descriptors and structure decide.

    Returns:
        What became of chains and gathered parameters; None where that is nothing.

    Raises:
        OSError, MemoryError, ...: causes local to this rank (:data:`RANK_LOCAL_ERRORS`).  After any
            other failure the graph has no tags (structure decides), with one warning.
    """
    if options.bucketing_mode != "none":
        tag_or_leave(graph, recorded)
    fused = fuse_or_leave(graph, options)
    kept = keep_or_leave(graph, options)
    if not (fused.fusions or fused.refusals or kept.gathers):
        return None
    report = report_fusions(graph, options, fused)
    if report is None:
        return None
    report = replace(report, phase="joint", kept_gathers=kept.gathers, kept_bytes=kept.size_bytes)
    _tell(report, options)
    return report


def tag_or_leave(
    graph: fx.Graph, recorded: Sequence[RecordedInput], unless_tagged: bool = False
) -> None:
    """Tags the collectives of a graph; one that cannot be tagged stays without, with one warning.

    Args:
        unless_tagged: a graph that has tags keeps them.
    """
    try:
        if not (unless_tagged and is_tagged(graph)):
            tag_graph(graph, recorded)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_untagged(reason_of(error))


def tags_digest(
    module: fx.GraphModule, recorded: Sequence[RecordedInput] = (), options: Options | None = None
) -> str:
    """Hash of what the tags of a graph, and of the graphs inside it, decide; tags it first if it
    has none.  Where ``options`` read modules, also of what their names decide.

    torch's key of a compiled graph sees code, not metadata: two backward graphs with equal code may
    have other tags, since those come from the joint graph.  A graph that cannot be read shares its
    entry with no other.
    """
    tag_or_leave(module.graph, recorded, unless_tagged=True)
    try:
        return _digest_of_tags(module, options)
    except (*RANK_LOCAL_ERRORS, *USER_ERRORS):
        raise
    except Exception as error:
        raise_if_strict(error)
        return unshared_digest()


def _digest_of_tags(module: fx.GraphModule, options: Options | None) -> str:
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


@without_gc
def run_post_grad(
    graph: fx.Graph,
    options: Options,
    recorded: Sequence[RecordedInput] = (),
    estimated: bool = False,
    observer: Observer | None = None,
) -> Report | None:
    """Buckets and schedules the collectives of a forward, backward or inference graph, in place.

    A graph without tags is tagged first, if its inputs have descriptors; else structure decides.

    Args:
        recorded: as for :func:`run_joint`.
        estimated: report expected times and peaks also where no decision needs them.
        observer: keeps what can show the runs before and after; see ``Report.story``.

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
    if options.bucketing_mode != "none":
        tag_or_leave(graph, recorded, unless_tagged=True)
    if options.cross_rank_check == "off":
        changed = _attempt(graph, options, estimated, observer=observer)
    else:
        changed = _compared(graph, options, estimated, observer)
    if changed is None:
        return None
    if changed.report is not None and changed.report.failure is None:
        _tell(changed.report, options)
    return changed.report


def _attempt(
    graph: fx.Graph,
    options: Options,
    estimated: bool,
    given: PortablePlan | None = None,
    observer: Observer | None = None,
) -> Changed | None:
    """The graph changed or, if it cannot be handled, left as it was."""
    try:
        return change_graph(graph, options, estimated, given, observer)
    except (*RANK_LOCAL_ERRORS, *USER_ERRORS):
        raise
    except Exception as error:
        raise_if_strict(error)
        reason = reason_of(error)
        warn = warn_unfused if options.bucketing_mode == "none" else warn_untouched
        warn(reason)
        return _unchanged(graph, options, Report(options.bucketing_mode, failure=reason))


def _unchanged(graph: fx.Graph, options: Options, report: Report) -> Changed:
    """A graph that stays as it is; what cannot even be read has no launches to compare."""
    after = Skeleton((), (), {}, frozenset(), ())
    if options.cross_rank_check != "off":
        try:
            after = collect(graph)
        except RANK_LOCAL_ERRORS:
            raise
        except Exception:
            log.debug("no collectives to compare between ranks", exc_info=True)
    return Changed(report, after, PortablePlan(), "")


def _compared(
    graph: fx.Graph, options: Options, estimated: bool, observer: Observer | None
) -> Changed | None:
    """What stands once the ranks have compared what they decided.

    Raises:
        CrossRankError: they differ, and the flag is "error".
    """
    given = _unchanged(graph, options, Report(options.bucketing_mode)).after
    snapshot, groups = Snapshot(graph), groups_of(given)
    try:
        changed = _attempt(graph, options, estimated, observer=observer)
    except Exception:
        exchange(groups, Vote.of_failure())
        raise
    if changed is None:
        return None
    votes = exchange(groups, Vote.of(changed.after, given, changed.structure, changed.plan))
    if agree(votes):
        return _with_verdict(changed, f"{len(votes)} ranks decided alike")
    difference = describe_difference(votes, changed.after, given)
    if options.cross_rank_check == "error":
        raise CrossRankError(f"{difference}; cross_rank_check = 'error'")
    if options.cross_rank_check == "warn":
        log.warning("%s; the job may hang (cross_rank_check = 'warn')", difference)
        return _with_verdict(changed, difference)
    taken: list[Changed] = []
    raised: list[Exception] = []

    def take(plan: PortablePlan) -> Vote | None:
        snapshot.restore()
        try:
            made = _attempt(graph, options, estimated, plan, observer)
        except Exception as error:  # told first: the others wait for an answer
            raised.append(error)
            return None
        if made is None or (made.report is not None and made.report.failure is not None):
            return None
        taken.append(made)
        return Vote.of(made.after, given, made.structure, made.plan)

    if take_leaders_plan(votes, groups, take):
        log.warning("%s; all took the plan of rank %d", difference, min(votes))
        return _with_verdict(taken[-1], f"{difference}; all took the plan of rank {min(votes)}")
    snapshot.restore()
    if raised:
        raise raised[0]
    verdict = (
        f"{difference}; no plan fits all of them, so all left the graph as it was; where the graphs "
        "themselves differ the job may hang all the same"
    )
    log.warning("%s", verdict)
    left = Report(options.bucketing_mode, failure=verdict, cross_rank=verdict)
    return _unchanged(graph, options, left)


def _with_verdict(changed: Changed, verdict: str) -> Changed:
    return replace(changed, report=changed.report and replace(changed.report, cross_rank=verdict))


def _tell(report: Report, options: Options) -> None:
    """Log line, counters, artifact and warnings.  A failure must not undo what other ranks have
    done."""
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


def optimize_graph(
    gm: fx.GraphModule, options: Options, observer: Observer | None = None
) -> Report:
    """Runs the pipeline on one GraphModule and recompiles it; see ``torch_patches.optimize_graph``."""
    report = run_post_grad(gm.graph, options, estimated=True, observer=observer)
    gm.recompile()
    return report if report is not None else Report(options.bucketing_mode)
