"""The table of flags: names, defaults, what is allowed, and what each does.

One table, :data:`FLAGS`, is the source of registration, validation and documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.options import (
    DEFAULT_MEMORY_INCREASE,
    DEFAULT_MODULE_MEMORY_INCREASE,
    DEFAULT_PREFETCH,
    DEFAULT_SCHEDULES,
)
from torch_patches.flag_checks import (
    BUCKET_MODES,
    BUCKETING_MODES,
    CROSS_RANK_CHECKS,
    check_bool,
    check_bucket_mode,
    check_bucketing_mode,
    check_cap,
    check_count,
    check_depth,
    check_device,
    check_function,
    check_number,
    check_overlap_with,
    check_path,
    check_plans,
    check_ranks,
    one_of,
    or_none,
    quoted,
)

PREFIX = "aten_distributed_optimizations."
NEUTRAL_DIGEST = "inactive"


class FlagError(ValueError):
    """A flag or argument has a wrong type or value; the text names it and what is allowed."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        name: without the prefix.
        default: its value where nobody set it.
        value_type: annotation handed to torch.  ``torch.compile(options=...)`` tests plain classes
            itself, with a message that does not say what is allowed; for generic annotations it
            leaves the test to us.
        check: returns the value in the form a pass reads; raises ``Unacceptable``.
        allowed: the end of the sentence "... is not allowed: use".
        doc: effect, unit, and what None means.
        of_torch: torch's own passes read it too.  While ours are off its value is their matter.
    """

    name: str
    default: object
    value_type: Any
    check: Callable[[object], Any]
    allowed: str
    doc: str
    of_torch: bool = False

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


@dataclass(frozen=True)
class FlagDescription:
    """A flag as text, for documentation."""

    name: str
    default: str
    allowed: str
    doc: str


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="bucketing_mode",
        default="none",
        value_type=Literal["none", "topo_span", "transformer_block", "modules", "auto"],
        check=check_bucketing_mode,
        allowed=f"one of {quoted(BUCKETING_MODES)}",
        doc="Which collectives are merged: 'none' changes nothing; 'topo_span' merges greedily in "
        "graph order, bounded by bucket_cap_mb and max_topo_span; 'transformer_block' makes a bucket "
        "of each repeated block of modules, which it finds, and 'modules' of what "
        "module_bucket_plans names, and both start the next one's gather under this one's compute "
        "and wait for this one's reduction behind the next one's backward; 'auto' tries several bucket "
        "sizes, schedules each, and takes what is estimated to be fastest.",
    ),
    Flag(
        name="max_topo_span",
        default=1500,
        value_type=int | None,
        check=check_count,
        allowed="an int >= 0, or None for no bound",
        doc="Largest distance, in nodes that do work, between the first and the last member of a "
        "bucket. None: no bound. Buckets of modules have none.",
    ),
    Flag(
        name="bucket_cap_mb",
        default=None,
        value_type=float | list[float] | None,
        check=check_cap,
        allowed="a finite number > 0, a list of such numbers by bucket index (the last repeats), "
        "or None for an estimate",
        doc="MB (2**20 bytes) that one bucket may hold. A list is by bucket index, its last value "
        "repeating. None: the size that saturates the group's network or, where that is more, the "
        "largest single collective of the bucket's key, up to 500 MB; for DDP's all-reduces 25 MB. "
        "Where it is None or one number, the first bucket of those holds at most 1 MB, to start "
        "early. Buckets of modules are bounded by a number or a list only.",
    ),
    Flag(
        name="primary_fsdp_group_only",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="Of the process groups with parameter gathers or gradient scatters, merge only in the "
        "one with the most gathers. Groups without either (replicas) are served all the same.",
    ),
    Flag(
        name="bucket_mode",
        default=None,
        value_type=Literal["default", "coalesced"] | None,
        check=check_bucket_mode,
        allowed=f"one of {quoted(BUCKET_MODES)} (together with bucketing_mode)",
        doc="How a bucket is built: 'default' copies into one tensor and out of it, 'coalesced' "
        "launches all members at once without copies. None: chosen by the pass. torch's own flag "
        "from 2.12 on.",
        of_torch=True,
    ),
    Flag(
        name="enable_overlap_scheduling",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="Also decide when collectives start and when they are waited for; 'auto' does so "
        "anyway. With bucketing_mode 'none' it turns on torch's own scheduler.",
        of_torch=True,
    ),
    Flag(
        name="insert_overlap_deps",
        default=None,
        value_type=bool | None,
        check=or_none(check_bool),
        allowed="True, False or None",
        doc="Hold the planned order in Inductor by control dependencies. None: yes under Inductor, "
        "no elsewhere.",
        of_torch=True,
    ),
    Flag(
        name="max_memory_increase_gb",
        default=None,
        value_type=float | None,
        check=or_none(check_number(0)),
        allowed="a finite number >= 0, or None for no absolute cap",
        doc="GB (2**30 bytes) by which scheduling and merging may raise the peak.",
        of_torch=True,
    ),
    Flag(
        name="max_memory_increase_ratio",
        default=None,
        value_type=float | None,
        check=or_none(check_number(0)),
        allowed="a finite number >= 0, or None for no relative cap",
        doc="The same as a share of the input's peak. Of this and max_memory_increase_gb the "
        f"smaller counts; with both None {DEFAULT_MEMORY_INCREASE} of the peak "
        f"({DEFAULT_MODULE_MEMORY_INCREASE} where modules decide when collectives start), at least 32 MiB.",
        of_torch=True,
    ),
    Flag(
        name="max_in_flight_gb",
        default=None,
        value_type=float | None,
        check=or_none(check_number(0)),
        allowed="a finite number >= 0, or None for no bound of its own",
        doc="GB of collectives that have started and are not used or waited for yet: no gather "
        "starts early and no bucket is made beyond it, and reductions are waited for once it is "
        "passed. What the input has in flight at once stays allowed.",
        of_torch=True,
    ),
    Flag(
        name="max_compute_pre_fetch",
        default=None,
        value_type=int | None,
        check=check_count,
        allowed=f"an int >= 0, or None for {DEFAULT_PREFETCH}",
        doc="Kernels between the start of a gather and its first use. None: "
        f"{DEFAULT_PREFETCH}, and no bound for buckets of modules.",
        of_torch=True,
    ),
    Flag(
        name="max_schedules",
        default=DEFAULT_SCHEDULES,
        value_type=int,
        check=check_ranks,
        allowed="an int >= 1",
        doc="The work budget of 'auto': schedules in one search for bucket sizes; a size over the memory "
        "cap may take one more. A plan that does not hold what it promised is undone and another "
        "search made, three times at most.",
    ),
    Flag(
        name="gpus_per_node",
        default=8,
        value_type=int,
        check=check_ranks,
        allowed="an int >= 1",
        doc="Ranks that share a node; estimates ask no machine, so that all ranks agree.",
    ),
    Flag(
        name="estimate_device",
        default="H100",
        value_type=str,
        check=check_device,
        allowed=f"one of {quoted(tuple(DEVICES))}",
        doc="Whose rates estimates use.",
    ),
    Flag(
        name="compute_slowdown",
        default=1.2,
        value_type=float,
        check=check_number(1),
        allowed="a finite number >= 1",
        doc="A kernel is estimated to take this many times as long under a collective.",
    ),
    Flag(
        name="link_sharing",
        default=1.0,
        value_type=float,
        check=check_number(0, 1),
        allowed="a number from 0 to 1",
        doc="Share of a transfer that one of another group on the same link waits for: 1 is one "
        "network, 0 is two.",
    ),
    Flag(
        name="calibration_file",
        default=None,
        value_type=str | None,
        check=or_none(check_path),
        allowed="the path of a table made by torch-patches calibrate, or None",
        doc="Measured costs to use before those of estimate_device; the same file on all ranks.",
    ),
    Flag(
        name="module_bucket_plans",
        default=None,
        value_type=list[Any] | None,
        check=or_none(check_plans),
        allowed="a list of names ('layers.*', 'layers.[0-5]', 'tok_embeddings') and of lists of "
        "names, as plan_from_modules gives it, or None",
        doc="For bucketing_mode 'modules': a name gives a bucket for each module that it matches, a "
        "list of names one bucket. Names are those of modules or parameters, and stand for all that "
        "is below.",
    ),
    Flag(
        name="module_overlap_with",
        default=(),
        value_type=dict[str, str] | tuple[Any, ...],
        check=check_overlap_with,
        allowed="a dict of names of buckets and of the modules whose compute shall hide them",
        doc="For buckets of modules: {'layers.3': 'layers.1'} starts the gather of layers.3 where the "
        "compute of layers.1 begins, and waits for its reduction where that ends, wherever it stands "
        "on the right side. Others are hidden by the module before, or behind.",
    ),
    Flag(
        name="module_prefetch_depth",
        default=1,
        value_type=int,
        check=check_depth,
        allowed="an int >= 0",
        doc="For buckets of modules: how many of them ahead of its use a gather starts, where memory "
        "allows.",
    ),
    Flag(
        name="module_deferral_depth",
        default=1,
        value_type=int,
        check=check_depth,
        allowed="an int >= 0",
        doc="For buckets of modules: how many of them later a reduction is waited for, where memory "
        "allows.",
    ),
    Flag(
        name="module_uncovered",
        default="bucket",
        value_type=Literal["bucket", "leave"],
        check=one_of(("bucket", "leave")),
        allowed="'bucket' or 'leave'",
        doc="What becomes of collectives that no module of the plan covers: 'bucket' merges them as "
        "'topo_span' does, 'leave' leaves them. A warning lists them either way.",
    ),
    Flag(
        name="module_plan_unmatched",
        default="error",
        value_type=Literal["error", "warn"],
        check=one_of(("error", "warn")),
        allowed="'error' or 'warn'",
        doc="What happens where an entry of module_bucket_plans matches nothing. Graph breaks split a "
        "model, and each part has a part of its modules: then 'warn'.",
    ),
    Flag(
        name="module_stack_fn",
        default=None,
        value_type=Callable[..., Any] | None,
        check=or_none(check_function),
        allowed="a function node -> list of (module path, class), the outermost first, or None",
        doc="For buckets of modules: asked first which modules made a node; where it knows nothing, "
        "nn_module_stack and custom['module_fqn'] are. A function that can be imported, or has a uuid(), keeps "
        "compiles cacheable.",
    ),
    Flag(
        name="fuse_chained_all_gathers",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="All-gathers over one dimension of a mesh after the other become one over all of them, "
        "where it is proven that every rank gets the same elements in the same order. Works with "
        "every bucketing_mode, also with 'none'.",
    ),
    Flag(
        name="fuse_chained_reduce_scatters",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="The same for reduce-scatters with op sum or avg. One reduction instead of two adds in "
        "another order, so results differ by rounding.",
    ),
    Flag(
        name="create_flattened_groups",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="When a compile starts, make the process groups over several mesh dimensions that its "
        "parameters are sharded by, where no group has these ranks in the order needed. All ranks of "
        "such a group must compile the same models in the same order, or they wait for each other.",
    ),
    Flag(
        name="keep_gathered_parameters",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="Where the model asks to gather parameters again in the backward: keep those that the "
        "forward uses last, as many as max_memory_increase_gb and _ratio allow over the estimated peak of "
        "the joint graph.",
    ),
    Flag(
        name="copy_engine_gathers",
        default=False,
        value_type=bool,
        check=check_bool,
        allowed="True or False",
        doc="Parameters of at least 8 MiB whose group lies within gpus_per_node are gathered by the GPUs' "
        "copy engines, from memory that all ranks of the group reach; each of those takes twice the bytes "
        "of its largest gather's own part for that, outside of torch's allocator. Not with CUDA graphs.",
    ),
    Flag(
        name="cross_rank_check",
        default="off",
        value_type=Literal["off", "warn", "error", "agree"],
        check=one_of(CROSS_RANK_CHECKS),
        allowed=f"one of {quoted(CROSS_RANK_CHECKS)}",
        doc="Compares what ranks decided over each process group of a graph, once for a compile: "
        "where they would launch different collectives, 'warn' says so, 'error' raises, 'agree' makes "
        "all take the first rank's plan or, if that does not fit all, none. Compiles are not cached "
        "then, and all ranks of a graph's groups must compile it.",
    ),
    Flag(
        name="custom_runtime_estimation",
        default=None,
        value_type=Callable[..., Any] | None,
        check=or_none(check_function),
        allowed="a function (node, override_size_bytes or None) -> ms or None, or None",
        doc="Estimation that is asked first; it must give the same on all ranks. A function that "
        "can be imported, or has a uuid(), keeps compiles cacheable.",
        of_torch=True,
    ),
)
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}

DIGEST_FLAG = PREFIX + "_torch_patches_digest"
"""Private: carries what a plan depends on and torch's cache key does not see; set by the hook."""
