"""What a pass may read besides the skeleton: the flags of one compile, frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

import torch.fx as fx

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import CalibrationTable
    from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable

BucketCap = float | tuple[float, ...] | Callable[[int], float] | None

#: ``fn(node, override_size_bytes)`` -> ms, or None to leave it to the model.
CustomEstimation = Callable[[fx.Node, int | None], float | None]

#: ``fn(node)`` -> (path, class) of the modules that made a node, the outermost first.
ModuleStackFunction = Callable[[fx.Node], Sequence[tuple[str, type]]]

#: Texts give a bucket for each module they match, tuples of texts one bucket.
ModulePlanEntries = tuple[tuple[str, ...] | str, ...]

#: Modes whose buckets are modules.
MODULE_MODES = ("transformer_block", "modules")

#: Share of the input's peak by which a schedule may raise it where no cap is given; and the bytes
#: that it may always have then, without which small models would get nothing.
DEFAULT_MEMORY_INCREASE, DEFAULT_MEMORY_BYTES = 0.02, 32 << 20
#: The share where modules decide: their depths ask for a block's weights or gradients more.
DEFAULT_MODULE_MEMORY_INCREASE = 0.1
#: Kernels that a gather may start ahead of its use where the user sets no bound: memory is bounded
#: anyway, so this one bounds the work.
DEFAULT_PREFETCH = 200
#: Schedules that "auto" may make of a graph, besides that of the input's buckets.
DEFAULT_SCHEDULES = 13


@dataclass(frozen=True)
class Options:
    """Everything a pass may read besides the skeleton; one frozen copy for each compile.

    Args:
        bucketing_mode: "none", "topo_span", "transformer_block", "modules" or "auto".
        max_topo_span: largest span of a bucket in working nodes, None for no bound.  Buckets of
            modules have none.
        bucket_cap_mb: MB (2**20 bytes) a bucket may hold; a sequence is by bucket index with the
            last value repeating; a callable takes the bucket index; None takes the size that
            saturates the group's network or, where that is more, the largest single member of the
            key, up to 500 MB, and for all-reduces 25 MB.  Where it is None or one number, the first
            bucket of all-reduces without a reduce-scatter beside them (DDP) holds at most 1 MB.
            All-reduces over replicas (HSDP) follow their reduce-scatters' buckets.
        primary_fsdp_group_only: of the groups with parameter gathers or gradient scatters, bucket
            only the one with the most gathers; other groups (replicas) are served all the same.
        bucket_mode: "default" (copying), "coalesced" (zero-copy), None (chosen by the pass).
        enable_overlap_scheduling: also decide when collectives start and are waited for; "auto"
            does so anyway.
        insert_overlap_deps: hold the order in Inductor by control dependencies; None: where
            Inductor compiles.
        max_memory_increase_gb: GB (2**30 bytes) by which the peak may grow.
        max_memory_increase_ratio: the same as a share of the peak.  Of two given the smaller
            counts; where neither is given, the larger of :data:`DEFAULT_MEMORY_INCREASE` (of
            :data:`DEFAULT_MODULE_MEMORY_INCREASE` where modules decide when collectives start) and
            :data:`DEFAULT_MEMORY_BYTES` does.
        max_in_flight_gb: GB of collectives that have started and are not used or waited for yet;
            None for no bound but the peak's.
        max_compute_pre_fetch: kernels between a gather's start and its first use; None for
            :data:`DEFAULT_PREFETCH`.
        max_schedules: schedules that "auto" may make of a graph while it looks for bucket sizes; its
            work budget.
        gpus_per_node: ranks that share a node, on all of them.
        estimate_device: whose constants estimates use.
        compute_slowdown: a kernel takes this many times as long under a collective.
        link_sharing: share of a transfer that one of another group on the same link waits for.
        calibration_file: table of measured costs, the same file on all ranks.
        calibration: what was read from it when the compile started.
        calibration_digest: of that.
        custom_runtime_estimation: the user's own estimation.
        estimation_digest: what tells it from others in all processes; None if nothing does.
        module_bucket_plans: for "modules": each text is a bucket for every module it matches, each
            tuple of texts one bucket.
        module_overlap_with: (bucket, module whose compute shall hide it).
        module_prefetch_depth: module buckets ahead of their use that gathers start.
        module_deferral_depth: module buckets behind theirs that reductions are waited for.
        module_uncovered: "bucket" (as topo_span does) or "leave" what no entry covers.
        module_plan_unmatched: "error" or "warn" where an entry matches nothing.
        module_stack_fn: the user's own reading of which modules made a node.
        module_stack_digest: what tells it from others in all processes; None if nothing does.
        module_names_checked: the plan's names were compared with those of the whole model already,
            of which a graph may know only a part.
        fuse_chained_all_gathers: make one gather of gathers over one mesh dimension after the other.
        fuse_chained_reduce_scatters: the same for reduce-scatters, whose sums then round otherwise.
        create_flattened_groups: make the process groups that this needs, on all ranks at once.
        keep_gathered_parameters: keep from forward to backward what the memory cap allows.
        copy_engine_gathers: within nodes, gather parameters without a collective's kernel.
        groups: the process groups when the compile started, where chains are fused; None: those of
            now.
        cross_rank_check: "off", or what to do where ranks decide differently: "warn", "error",
            "agree".
        run_eagerly: the graph is run op by op as it is, not compiled: copies and memory are those of
            PyTorch's own kernels.  No flag: who runs the graph knows.
        any_traffic: merge whatever a collective carries, not only parameters and gradients.  No
            flag, as those that follow: for callers of torch's own names.
        only_groups: merge only on these process groups; None: on all.
        max_coll_distance: collectives of its key that a bucket's members stand apart at most; None
            for no bound.
        max_reduction_mb: MB that a bucket of reductions may hold, besides ``bucket_cap_mb``; None
            for no bound of its own.
        bucket_exposed_first: merges that keep a schedule take exposed collectives first, whatever
            simulates better.
    """

    bucketing_mode: str = "none"
    max_topo_span: int | None = 1500
    bucket_cap_mb: BucketCap = None
    primary_fsdp_group_only: bool = False
    bucket_mode: str | None = None
    enable_overlap_scheduling: bool = False
    insert_overlap_deps: bool | None = None
    max_memory_increase_gb: float | None = None
    max_memory_increase_ratio: float | None = None
    max_in_flight_gb: float | None = None
    max_compute_pre_fetch: int | None = None
    max_schedules: int = DEFAULT_SCHEDULES
    gpus_per_node: int = 8
    estimate_device: str = "H100"
    compute_slowdown: float = 1.2
    link_sharing: float = 1.0
    calibration_file: str | None = None
    calibration: CalibrationTable | None = field(default=None, repr=False, compare=False)
    calibration_digest: str | None = None
    custom_runtime_estimation: CustomEstimation | None = field(default=None, repr=False)
    estimation_digest: str | None = None
    module_bucket_plans: ModulePlanEntries | None = None
    module_overlap_with: tuple[tuple[str, str], ...] = ()
    module_prefetch_depth: int = 1
    module_deferral_depth: int = 1
    module_uncovered: str = "bucket"
    module_plan_unmatched: Literal["error", "warn"] = "error"
    module_stack_fn: ModuleStackFunction | None = field(default=None, repr=False)
    module_stack_digest: str | None = None
    module_names_checked: bool = field(default=False, repr=False, compare=False)
    fuse_chained_all_gathers: bool = False
    fuse_chained_reduce_scatters: bool = False
    create_flattened_groups: bool = False
    keep_gathered_parameters: bool = False
    copy_engine_gathers: bool = False
    groups: GroupTable | None = None
    cross_rank_check: str = "off"
    run_eagerly: bool = False
    any_traffic: bool = False
    only_groups: tuple[str, ...] | None = None
    max_coll_distance: int | None = None
    max_reduction_mb: float | None = None
    bucket_exposed_first: bool = False

    @property
    def fuses(self) -> bool:
        """Whether chained collectives become one."""
        return self.fuse_chained_all_gathers or self.fuse_chained_reduce_scatters

    @property
    def keeps(self) -> bool:
        """Whether gathered parameters may stay from forward to backward."""
        return self.keep_gathered_parameters and self.bucketing_mode != "none"

    @property
    def changes(self) -> bool:
        """Whether anything is to be done to a graph."""
        return self.fuses or self.bucketing_mode != "none"

    @property
    def schedules(self) -> bool:
        """Whether starts and waits are moved."""
        always = self.bucketing_mode == "auto" or self.reads_modules
        return always or (self.bucketing_mode != "none" and self.enable_overlap_scheduling)

    @property
    def reads_modules(self) -> bool:
        """Whether names of modules and parameters decide."""
        return self.bucketing_mode in MODULE_MODES

    @property
    def places_by_modules(self) -> bool:
        """The order of modules decides when collectives start and are waited for, not estimates."""
        return self.reads_modules and not self.enable_overlap_scheduling

    def fingerprint(self) -> str | None:
        """Equal for equal options; None with a function among them that cannot be compared."""
        if callable(self.bucket_cap_mb) or not self.has_known_functions:
            return None
        return repr([getattr(self, f.name) for f in fields(self) if f.repr])

    @property
    def has_known_functions(self) -> bool:
        """No function of the user's, or only such as can be told from others."""
        estimation = self.custom_runtime_estimation is None or self.estimation_digest is not None
        return estimation and (self.module_stack_fn is None or self.module_stack_digest is not None)
