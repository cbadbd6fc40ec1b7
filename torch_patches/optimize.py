"""``torch_patches.optimize_graph``: the pipeline on one GraphModule, without a compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch.fx as fx

from torch_patches import config, recording
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.options import (
    BucketCap,
    CustomEstimation,
    ModuleStackFunction,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.mesh_groups import with_groups
from torch_patches.viewing.record import observe


class _FromFlag:
    """Default of an argument: the value of the flag with the same name."""

    def __repr__(self) -> str:
        return "<the flag's value>"


FROM_FLAG: Final[Any] = _FromFlag()

#: Calling ``optimize_graph`` is the opt-in, so "none" becomes this.
DEFAULT_MODE = "auto"


def optimize_graph(
    gm: fx.GraphModule,
    *,
    bucketing_mode: str = FROM_FLAG,
    overlap: bool = FROM_FLAG,
    bucket_cap_mb: BucketCap | list[float] = FROM_FLAG,
    max_topo_span: int | None = FROM_FLAG,
    primary_fsdp_group_only: bool = FROM_FLAG,
    bucket_mode: str | None = FROM_FLAG,
    max_memory_increase_gb: float | None = FROM_FLAG,
    max_memory_increase_ratio: float | None = FROM_FLAG,
    max_in_flight_gb: float | None = FROM_FLAG,
    max_compute_pre_fetch: int | None = FROM_FLAG,
    max_schedules: int = FROM_FLAG,
    insert_overlap_deps: bool = False,
    gpus_per_node: int = FROM_FLAG,
    estimate_device: str = FROM_FLAG,
    compute_slowdown: float = FROM_FLAG,
    link_sharing: float = FROM_FLAG,
    calibration_file: str | None = FROM_FLAG,
    module_bucket_plans: Sequence[Sequence[str] | str] | None = FROM_FLAG,
    module_overlap_with: Mapping[str, str] = FROM_FLAG,
    module_prefetch_depth: int = FROM_FLAG,
    module_deferral_depth: int = FROM_FLAG,
    module_uncovered: str = FROM_FLAG,
    module_plan_unmatched: str = FROM_FLAG,
    module_stack_fn: ModuleStackFunction | None = FROM_FLAG,
    fuse_chained_all_gathers: bool = FROM_FLAG,
    fuse_chained_reduce_scatters: bool = FROM_FLAG,
    create_flattened_groups: bool = FROM_FLAG,
    cross_rank_check: str = FROM_FLAG,
    custom_runtime_estimation: CustomEstimation | None = FROM_FLAG,
    keep_story: bool = True,
) -> Report:
    """Merges and schedules the collectives of ``gm`` in place and recompiles it.

    Args:
        gm: an ATen graph (forward, backward or inference) with fake values in ``meta["val"]``.
        bucketing_mode: "topo_span", "transformer_block", "modules" or "auto"; "none" means "auto",
            since the call is the opt-in, unless it is given here and chains are to be fused.
        overlap: also schedule starts and waits (the flag ``enable_overlap_scheduling``); "auto"
            does so whatever is said here.
        bucket_cap_mb: MB (2**20 bytes) a bucket may hold; a list is by bucket index, the last value
            repeating; a function maps the bucket index to MB; None leaves it to "auto", and else
            takes the largest single collective of the same kind, group and dtype (at most 500 MB),
            or what saturates the group's network, whichever is larger, and 25 MB for DDP's
            all-reduces.
        max_topo_span: largest distance, in working nodes, between a bucket's first and last
            member; None for no bound.
        primary_fsdp_group_only: leave out the collectives of minority FSDP groups.
        bucket_mode: "default" (copies), "coalesced" (no copies), None (chosen by the pass).
        max_memory_increase_gb, max_memory_increase_ratio: GB (2**30 bytes), or share, by which the
            estimated peak may grow; the smaller counts; with both None 2%, or 10% where modules decide, at least
            32 MiB.
        max_in_flight_gb: GB of collectives started and not used yet; None for no bound of its own.
        max_compute_pre_fetch: kernels between a gather's start and its first use; None for 200, and
            for no bound in the modes of modules.
        max_schedules: that "auto" may make while it looks for bucket sizes.
        insert_overlap_deps: hold the order by control dependencies, which only Inductor can lower;
            not taken from the flag.
        gpus_per_node: ranks that share a node.
        estimate_device: "A100", "H100", "H200", "B200" or "generic": whose rates estimates use.
        compute_slowdown: a kernel takes this many times as long under a collective.
        link_sharing: 0 to 1, how far groups on one link wait for each other.
        calibration_file: a table of measured costs (``torch-patches calibrate``).
        module_bucket_plans: for "modules": names of modules or parameters with ``*`` and ``[0-5]``;
            each name is a bucket for every module it matches, each list of names one bucket.
        module_overlap_with: bucket name -> module whose compute shall hide it.
        module_prefetch_depth, module_deferral_depth: module buckets that gathers start ahead, and
            that reductions are waited for later.
        module_uncovered: "bucket" or "leave" what no entry covers.
        module_plan_unmatched: "error" or "warn" where an entry matches nothing.
        module_stack_fn: ``fn(node) -> [(module path, class), ...]``, the outermost first.
        fuse_chained_all_gathers: make one of gathers over one mesh dimension after the other, where
            proven to be the same.
        fuse_chained_reduce_scatters: the same for reduce-scatters, whose sums then round otherwise.
        create_flattened_groups: make the process groups this needs, if ``gm`` holds the DTensors or
            meshes that tell them; all their ranks must call.
        cross_rank_check: "off", or what to do where ranks decide differently: "warn", "error" or
            "agree"; all ranks of the graph's groups must call.
        custom_runtime_estimation: ``fn(node, override_size_bytes | None) -> ms | None``.
        keep_story: the report remembers both simulated runs (one or two MiB, and up to a tenth of
            the pass's time), for ``to_html`` and ``to_chrome_trace``.  No flag.

    Each argument left out takes the value of the flag
    ``torch._inductor.config.aten_distributed_optimizations.<name>``.

    Returns:
        What was done.  Where a graph cannot be handled it is left as it was, ``report.failure``
        says why, and one warning is logged.

    Raises:
        FlagError: an argument (or the flag it defaults to) has a wrong type or value.
        BucketCapError: ``bucket_cap_mb`` is a function that fails, or returns no number.
        EstimationError, CalibrationError: the estimation or the table is no good.
        ModulePlanError: entries of the plan match one parameter twice, or nothing.
        ModuleStackError: ``module_stack_fn`` failed.
        CrossRankError: ranks decided differently, and ``cross_rank_check`` is "error".
        OSError, MemoryError, RecursionError: causes local to this rank.
    """
    given = {
        "bucketing_mode": bucketing_mode,
        "enable_overlap_scheduling": overlap,
        "bucket_cap_mb": bucket_cap_mb,
        "max_topo_span": max_topo_span,
        "primary_fsdp_group_only": primary_fsdp_group_only,
        "bucket_mode": bucket_mode,
        "max_memory_increase_gb": max_memory_increase_gb,
        "max_memory_increase_ratio": max_memory_increase_ratio,
        "max_in_flight_gb": max_in_flight_gb,
        "max_compute_pre_fetch": max_compute_pre_fetch,
        "max_schedules": max_schedules,
        "insert_overlap_deps": insert_overlap_deps,
        "gpus_per_node": gpus_per_node,
        "estimate_device": estimate_device,
        "compute_slowdown": compute_slowdown,
        "link_sharing": link_sharing,
        "calibration_file": calibration_file,
        "module_bucket_plans": module_bucket_plans,
        "module_overlap_with": module_overlap_with,
        "module_prefetch_depth": module_prefetch_depth,
        "module_deferral_depth": module_deferral_depth,
        "module_uncovered": module_uncovered,
        "module_plan_unmatched": module_plan_unmatched,
        "module_stack_fn": module_stack_fn,
        "fuse_chained_all_gathers": fuse_chained_all_gathers,
        "fuse_chained_reduce_scatters": fuse_chained_reduce_scatters,
        "create_flattened_groups": create_flattened_groups,
        "cross_rank_check": cross_rank_check,
        "custom_runtime_estimation": custom_runtime_estimation,
    }
    arguments = {name: value for name, value in given.items() if value is not FROM_FLAG}
    options = config.options_from_arguments(arguments, "optimize_graph")
    if options.bucketing_mode == "none" and not ("bucketing_mode" in arguments and options.fuses):
        arguments["bucketing_mode"] = DEFAULT_MODE
        options = config.options_from_arguments(arguments, "optimize_graph")
    written = recording.begin("optimize_graph", gm, options)
    if written is not None:
        written.before(gm.graph)
    observer = observe if keep_story else None
    report = pipeline.optimize_graph(gm, with_groups(gm, options), observer)
    if written is not None:
        written.after(gm.graph)
    return report
