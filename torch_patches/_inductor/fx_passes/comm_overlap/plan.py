"""The vocabulary shared by every layer: what was read, what was decided, what was refused.

``collect`` turns a graph into a :class:`Skeleton`; a pass turns a skeleton into a :class:`Plan`;
``check`` and ``rewrite`` turn a plan into a changed graph.  Everything here is frozen data: a pass
never mutates what it was given, and two ranks with equal skeletons produce equal plans.

Sizes are bytes of the *full* tensor (gather output, scatter input), the amount that travels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.fx as fx


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
    NOT_ASKED_FOR = "the caller did not ask for it"
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
    CHAIN_USERS = "something else reads what lies between the chained collectives"
    CHAIN_DTYPE = "the dtype changes between the chained collectives"
    CHAIN_OP = "the chained reductions differ in their op"
    CHAIN_UNEVEN = "rows are cut or padded: shards are uneven, and other ranks may see none of it"
    CHAIN_MUTATION = "a write or a side effect lies between the chained collectives"
    CHAIN_PHASE = (
        "the chained collectives differ in phase (forward or backward), or in what the backward "
        "recomputes"
    )
    CHAIN_GROUPS = "the chained groups are not registered, or share more than this rank"
    CHAIN_MESH = (
        "the mesh's ranks are permuted: other ranks see the order of these groups otherwise"
    )
    CHAIN_SYMBOLIC = "a symbolic size keeps the chain from being followed"
    CHAIN_ORDER = "one collective would order the elements otherwise"
    CHAIN_NO_GROUP = (
        "no process group has the ranks of the chain in the order that it needs; "
        "create_flattened_groups makes those that the parameters' placements ask for"
    )
    OTHER_RANK = "another rank decided (cross_rank_check)"
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

    def __hash__(self) -> int:
        """Without the kind: an enum's own hash is Python code."""
        return hash((self.group, self.group_size, self.dtype, self.reduce_op))

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
        gradient_outputs: of compiled autograd's graph: places of the outputs that are the gradient
            of this input.
        gradient_inputs: of that graph: places of the inputs that hold the gradient so far, and are
            written over.
    """

    kind: InputKind
    name: str = ""
    index: int | None = None
    gradient_outputs: tuple[int, ...] = ()
    gradient_inputs: tuple[int, ...] = ()


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
        idle: nodes that do no work, or only on ranks with a short shard; they count nowhere.  What
            copies an activation around a collective is not among them, but has no position either.
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


class Move(NamedTuple):
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
        order: all nodes in the order in which places count, where compute gets a new one; else
            empty: the graph's own.
    """

    buckets: tuple[Bucket, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    operations: int = 0
    dependencies: tuple[tuple[fx.Node, fx.Node], ...] = ()
    moves: tuple[Move, ...] = ()
    order: tuple[fx.Node, ...] = ()
