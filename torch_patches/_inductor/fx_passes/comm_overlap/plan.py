"""The vocabulary shared by every layer: what was read, what was decided, what was refused.

``collect`` turns a graph into a :class:`Skeleton`; a pass turns a skeleton into a :class:`Plan`;
``check`` and ``rewrite`` turn a plan into a changed graph.  Everything here is frozen data: a pass
never mutates what it was given, and two ranks with equal skeletons produce equal plans.

Sizes are bytes of the *full* tensor (gather output, scatter input), the amount that travels.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

import torch
import torch.fx as fx

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import CalibrationTable


class CollectiveKind(enum.Enum):
    """What a collective does; part of the bucket key, so kinds never mix."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


MERGEABLE_KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
)


class MergeForm(enum.Enum):
    """How a bucket is built.  Values are those of torch's ``bucket_mode`` flag."""

    COPY = "default"  # copies in, one collective, one wait, copies out
    COALESCED = "coalesced"  # one launch over many tensors, no copies, one wait per member


class RefusalReason(enum.Enum):
    """Why a collective is not in a bucket, or a planned bucket was given up.

    The value is the sentence that logs, reports and tools print.
    """

    KIND_NOT_MERGEABLE = "this kind of collective is never merged"
    ALREADY_BUCKETED = "it is already a bucket"
    ALREADY_CONSIDERED = "an earlier run with the same options has left it alone"
    COALESCED_IN_INPUT = "it is a coalesced collective of the input graph"
    MUTATES_ARGUMENT = "it writes into an argument (in-place or out= form)"
    WRAPPED = "it sits inside a control_deps region"
    NO_WAIT = "its result is never waited for"
    USED_BEFORE_WAIT = "its result is used by something other than a wait"
    UNSUPPORTED_LAYOUT = "its tensors are not plain strided ones with a contiguous result"
    NO_METADATA = "its node carries no tensor metadata"
    NOT_PARAMETER_TRAFFIC = "it carries neither a parameter nor a gradient"
    NOT_TAGGED = "nobody tells what it carries: it is in an inner graph, or newer than the tags"
    NOT_PRIMARY_GROUP = "primary_fsdp_group_only is set and its group is not the primary one"
    ALONE_IN_KEY = (
        "no other collective has its kind, group, dtype, reduce op, device and phase (forward or "
        "backward)"
    )
    ALONE_IN_MODULE = (
        "no other collective of its module's bucket has its kind, group, dtype, reduce op, device "
        "and phase"
    )
    LEFT_OVER = "the others of its key are in buckets that it could not join"
    NOT_IN_PLAN = "no entry of the module plan covers it, and module_uncovered is 'leave'"
    SYMBOLIC_SIZE = "its size is symbolic and its backend needs the copying form"
    BYTE_CAP = "the next member would exceed bucket_cap_mb"
    FIRST_BUCKET = "it fills the small first bucket of all-reduces, so that they start early"
    SPAN_CAP = "the next member would exceed max_topo_span"
    DEPENDENCY = "it depends on a member of the bucket, or merging would close a cycle"
    HIDING = "merging it would take compute that hides it, or one in between, away from it"
    MEMORY = "merging it would exceed the memory cap"
    COPIES = "the copies into and out of the bucket would cost more than the merge saves"
    PREFETCH = "no place is left between what its members need and their first use"
    NOT_BETTER = "a plan without this bucket was estimated to be faster, or to need less memory"
    BARRIER = "a side effect lies between it and the bucket"
    CHECK_FAILED = "the plan did not pass the legality check"


@dataclass(frozen=True)
class BucketKey:
    """Collectives may merge only if their keys are equal.

    Args:
        kind: the collective's kind.
        group: canonical name of the process group object (two groups with equal ranks are two
            streams, hence two keys).
        group_size: ranks in the group, None where neither the node nor a registry tells.
        dtype: dtype on the wire.
        reduce_op: "sum", "avg", ...; None for gathers.
        device_type: "cuda", "cpu", ...
    """

    kind: CollectiveKind
    group: str
    group_size: int | None
    dtype: torch.dtype
    reduce_op: str | None
    device_type: str

    @property
    def needs_copies(self) -> bool:
        """The coalesced form is wrong or missing for this key in the backends.

        gloo writes all outputs of a coalesced reduce-scatter at the wait of each of them, over
        whatever was stored there since an earlier wait; and its coalesced ops know no complex
        numbers, which the plain ones view as real.
        """
        on_cpu = self.device_type == "cpu"
        return self.dtype.is_complex or (on_cpu and self.kind is CollectiveKind.REDUCE_SCATTER)


class Traffic(enum.Enum):
    """What a collective carries: from its tag where there is one, else from the structure around
    it."""

    PARAMETER = "parameter"  # gathered from one parameter through casts, views, pads, slices
    GRADIENT = "gradient"  # reduced, and every path from it ends in a parameter's gradient
    OTHER = "other"  # activations, routing, statistics


class TagSource(enum.Enum):
    """Where a tag's knowledge of the graph's inputs comes from, the surest first."""

    DESCRIPTORS = "descriptors"  # AOT export names parameters and buffers
    DYNAMO = "dynamo"  # sources of Dynamo's placeholders, joined by index
    STRUCTURE = "structure"  # an input that a collective rearranges, an output it ends in
    UNTOLD = "untold"  # an inner graph of a compile: nobody tells what its inputs are


@dataclass(frozen=True)
class CollectiveTag:
    """What the joint graph tells about a collective; kept in ``node.meta`` of its chain.

    Plain data, so that it survives partition, recomputation, deepcopy and ``GraphPickler``.

    Args:
        traffic: ``OTHER`` means that it was looked at and carries neither.
        source: where the knowledge comes from.
        parameter: fully qualified name of the parameter gathered, or whose gradient is reduced.
        index: its place in the order of registration, bottom-up as FSDP2 has it; where no module is
            known, among the parameters given.  With the name it decides in the modes of modules,
            and is for people elsewhere.
        place: its place among the graph's inputs, as descriptors count them.  The graph alone gives
            it, so it is the same on all ranks, whatever their Python objects are.
    """

    traffic: Traffic
    source: TagSource
    parameter: str | None = None
    index: int | None = None
    place: int | None = None


class InputKind(enum.Enum):
    """What a graph input is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OTHER = "other"  # data, a tangent, a saved activation
    UNKNOWN = "unknown"  # nobody tells


@dataclass(frozen=True)
class RecordedInput:
    """One input of the graph that Dynamo made, by the index that AOT descriptors use.

    Args:
        kind: parameter, buffer or other.
        name: fully qualified, empty for other inputs.
        index: parameters: place in the order of registration.  Name and index come from this rank's
            Python objects; they decide in the modes of modules only.
    """

    kind: InputKind
    name: str = ""
    index: int | None = None


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective of the graph, from its start to its waits.

    Args:
        index: place among the graph's collectives, in start order.
        start: the node that launches it.
        waits: its wait nodes in graph order (empty: never waited for).
        key: see :class:`BucketKey`; None where metadata is missing.
        kind: the collective's kind.
        group: canonical process-group name.
        ranks: ranks of the group where it is registered, else None.
        input_bytes, output_bytes: local tensor sizes, symbolic where the shape is.
        size_bytes: the larger of the two with symbols replaced by the stated fallback; the only
            size that may enter a decision.
        position: working nodes before the start (see ``graph/positions.py``).
        wait_position: the same for the first wait, or None.
        segment, wait_segment: number of ``EFFECT`` barriers before the start and the first wait.
        traffic: parameter, gradient or other.
        tag: what the joint graph told, or None where none was seen.
        backward: it runs in the backward of a graph that may hold both passes; gathers repeated
            there never merge with those of the forward.
        feeder: index of the collective of the same traffic whose result it passes on, rearranged or
            computed on element by element in between, or None.
        refusal: why it can never be a bucket member, or None.
        has_symbolic_size: some dimension is symbolic.
        parameter_index: the tag's place; without tags, place of the parameter among the graph's
            inputs, or of its gradient among the outputs.  Gathers and reductions of a model agree
            in its order.
        considered: fingerprint of the options of an earlier run that left it alone, or None.
    """

    index: int
    start: fx.Node
    waits: tuple[fx.Node, ...]
    kind: CollectiveKind
    group: str
    ranks: tuple[int, ...] | None
    key: BucketKey | None
    input_bytes: int | torch.SymInt
    output_bytes: int | torch.SymInt
    size_bytes: int
    position: int
    wait_position: int | None
    segment: int
    wait_segment: int | None
    traffic: Traffic
    refusal: RefusalReason | None
    has_symbolic_size: bool = False
    parameter_index: int | None = None
    considered: str | None = None
    tag: CollectiveTag | None = None
    backward: bool = False
    feeder: int | None = None


class BarrierKind(enum.Enum):
    """Why nothing may cross a node (``EFFECT``) or what it is ordered with (the rest)."""

    EFFECT = "unknown side effect"
    MUTATION = "mutation of an argument"
    RNG = "random number generator"


@dataclass(frozen=True, eq=False)
class Barrier:
    """A node with a side effect.  Only ``EFFECT`` barriers separate segments; mutations and
    random ops are ordered by :attr:`Skeleton.order_dependencies`."""

    node: fx.Node
    kind: BarrierKind
    position: int


@dataclass(frozen=True, eq=False)
class Skeleton:
    """The communication skeleton of a graph; a pure function of the graph.

    Args:
        collectives: all of them, in start order.
        barriers: nodes with side effects, in graph order.
        positions: node -> number of working nodes before it.
        idle: nodes that do no work, or only on ranks with a short shard; they count nowhere.
        order_dependencies: (before, after) pairs that data flow does not show: accesses of a
            mutated storage, random ops, barriers.
        tagged: the joint graph's tags tell what the collectives carry.
    """

    collectives: tuple[Collective, ...]
    barriers: tuple[Barrier, ...]
    positions: Mapping[fx.Node, int]
    idle: Set[fx.Node]
    order_dependencies: tuple[tuple[fx.Node, fx.Node], ...]
    tagged: bool = False


@dataclass(frozen=True)
class Refusal:
    """A merge that did not happen: the members it concerns (by name, for people) and why."""

    members: tuple[str, ...]
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, eq=False)
class HidingInterval:
    """Compute that runs while a collective does, between its start and its first wait."""

    collective: Collective
    nodes: tuple[fx.Node, ...]


class CloseReason(enum.Enum):
    """Why a bucket took no further member."""

    BYTES = "bytes"
    SPAN = "span"
    DEPENDENCY = "dependency"
    END = "end"


@dataclass(frozen=True, eq=False)
class Bucket:
    """Collectives to be merged.

    Args:
        members: in graph order of their starts.
        payload_order: permutation of ``range(len(members))``: the order of the payload in the
            merged collective.  It is by the place of the parameter among the graph's inputs
            (registration order under AOT export, order of first use under Dynamo) where known for
            all members, else graph order.  The graph alone gives it, for rank safety: it decides
            byte offsets, so ranks must agree in it.  Hence also the rounding of ring reductions,
            wherever the merged node stands.
        form: copying or coalesced.
        close_reason: why it took no further member.
        size_bytes: sum of the members' decision sizes.
        span: position of the last start minus position of the first.
        label: name of the module bucket; empty where no module decided.
    """

    members: tuple[Collective, ...]
    payload_order: tuple[int, ...]
    form: MergeForm
    close_reason: CloseReason
    size_bytes: int
    span: int
    label: str = ""

    @property
    def key(self) -> BucketKey:
        key = self.members[0].key
        assert key is not None
        return key


@dataclass(frozen=True, eq=False)
class Move:
    """A node, and the place in the graph's order in front of which it shall stand.

    Of a bucket's members the first start and the waits count: the merged nodes go there.
    """

    node: fx.Node
    place: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What a pass decided.

    Args:
        buckets: what is merged.
        refusals: what is not, and why.
        operations: counted work spent deciding.
        dependencies: (before, after) pairs that must hold in the result, beyond those of the graph:
            what keeps compute between the starts and waits that it hides.
        moves: in the order in which they shall stand where they share a place.
    """

    buckets: tuple[Bucket, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    operations: int = 0
    dependencies: tuple[tuple[fx.Node, fx.Node], ...] = ()
    moves: tuple[Move, ...] = ()


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
#: Kernels that a gather may start ahead of its use: about three layers of a transformer.
DEFAULT_PREFETCH = 50


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
            counts; where neither is given, the larger of :data:`DEFAULT_MEMORY_INCREASE` and
            :data:`DEFAULT_MEMORY_BYTES` does.
        max_in_flight_gb: GB of collectives that have started and are not used or waited for yet;
            None for no bound but the peak's.
        max_compute_pre_fetch: kernels between a gather's start and its first use; None for
            :data:`DEFAULT_PREFETCH`.
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
        run_eagerly: the graph is run op by op as it is, not compiled: copies and memory are those of
            PyTorch's own kernels.  No flag: who runs the graph knows.
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
    run_eagerly: bool = False

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
