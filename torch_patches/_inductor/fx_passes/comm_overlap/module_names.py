"""A plan of modules beside the names of the whole model, and what users are told of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    clean_parameter_name,
    read_model_modules,
)
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import (
    DEFAULT_MEMORY_INCREASE,
    DEFAULT_MODULE_MEMORY_INCREASE,
    Options,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    check_overlap_names,
    parse_plan,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import InputKind, RecordedInput

log = logging.getLogger(__name__)


def check_module_names(
    model: object, recorded: Sequence[RecordedInput], options: Options
) -> Options:
    """Compares the plan of modules with the names that Dynamo's graph knows, of the whole model.

    Graphs behind it know a part of them, and do not check again.

    Raises:
        ModulePlanError: see :func:`~.passes.module_plan.ModulePlan.check`.
    """
    if not options.reads_modules:
        return options
    named = [r.name for r in recorded if r.kind is InputKind.PARAMETER and r.name]
    if not named or not isinstance(model, fx.GraphModule):
        return replace(options, module_plan_unmatched="warn")  # a part of the names, at best
    try:
        parameters = [clean_parameter_name(name) for name in named]
        modules = read_model_modules(model.graph)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_of_plan(f"the names of the model could not be read ({type(error).__name__}: {error})")
        return replace(options, module_plan_unmatched="warn")
    if options.bucketing_mode == "modules":
        plan = parse_plan(options.module_bucket_plans)
        if all(plan.bucket_of(name) is None for name in (*parameters, *modules)):
            return options  # another model than the one meant, unless it has collectives
        for sentence in plan.check(parameters, modules, options.module_plan_unmatched):
            warn_of_plan(sentence)
        buckets = [plan.bucket_of(name) for name in (*modules, *parameters)]
        known = list({bucket: None for bucket in buckets if bucket is not None})
        overlap = dict(options.module_overlap_with)
        for sentence in check_overlap_names(overlap, known, modules, options.module_plan_unmatched):
            warn_of_plan(sentence)
    return replace(options, module_names_checked=True)


@functools.cache
def warn_uncovered(owners: tuple[str, ...], treatment: str) -> None:
    """Once for each set."""
    shown = ", ".join(owners[:20]) + (f", and {len(owners) - 20} more" if len(owners) > 20 else "")
    log.warning(
        "torch_patches: no entry of the module plan covers the collectives of %s; they are %s "
        "(aten_distributed_optimizations.module_uncovered = %r)",
        shown,
        "bucketed as by 'topo_span'" if treatment == "bucket" else "left as they are",
        treatment,
    )


@functools.cache
def warn_of_plan(sentence: str) -> None:
    """What a plan's check found and is no error."""
    log.warning("torch_patches: %s", sentence)


@functools.cache
def warn_reduced(way: str) -> None:
    """Once for each."""
    log.warning(
        "torch_patches could not place the buckets of modules as asked for, since the estimated peak "
        "would exceed its cap, or the time that of the input: %s. "
        "aten_distributed_optimizations.max_memory_increase_gb and max_memory_increase_ratio are "
        "the cap (unset: %s of the input's peak, %s with enable_overlap_scheduling, at least 32 MiB)",
        "the graph stays as it was" if way == "input" else f"buckets are made as {way!r}",
        DEFAULT_MODULE_MEMORY_INCREASE,
        DEFAULT_MEMORY_INCREASE,
    )
