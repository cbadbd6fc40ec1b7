"""Reads the communication skeleton of an FX graph: ``collect(graph) -> Skeleton``.

A collective is a *start* node and the *wait* nodes reached from it through aliases, views and
getitems.  Both functional namespaces are read, coalesced, ``out=`` and in-place forms too, and
collectives or waits inside ``control_deps``.  What cannot be merged is still part of the skeleton,
with the reason.  Nothing here changes a graph, and no process group needs to exist.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.effects import Effects, find_effects
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import (
    canonical_group,
    registered_ranks,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.links import (
    find_feeders,
    with_feeders,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    COPY_ENGINES,
    is_view,
    op_namespace,
    schema_arguments,
    tensors_of,
    traits_of,
    viewed_node,
    wait_source,
    wrapped_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.positions import (
    copies_of_activations,
    count_positions,
    idle_nodes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.shared_sizes import with_shared_sizes
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import (
    decision_bytes,
    has_symbols,
    known_contiguous,
    total_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import TrafficFinder
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    MERGEABLE_KINDS,
    Barrier,
    BarrierKind,
    BucketKey,
    Collective,
    CollectiveKind,
    RefusalReason,
    Skeleton,
    Traffic,
)

#: ``node.meta`` key of nodes made by a merge; such collectives are not merged again.
BUCKET_MARK = "comm_overlap_bucket"
#: ``node.meta`` key of the member results that a bucket is copied out to.
MEMBER_MARK = "comm_overlap_member"
#: ``node.meta`` key of starts that a run has left alone: the fingerprint of its options.  A merge
#: shortens distances, so without it a second run could find something to merge.
CONSIDERED_MARK = "comm_overlap_considered"
#: ``node.meta`` key of starts that a schedule has placed: the fingerprint of its options.
SCHEDULED_MARK = "comm_overlap_scheduled"


@dataclass(frozen=True)
class _OpTraits:
    kind: CollectiveKind
    coalesced: bool = False
    mutates: bool = False


_OPS = {
    "all_gather_into_tensor": _OpTraits(CollectiveKind.ALL_GATHER),
    "all_gather_into_tensor_out": _OpTraits(CollectiveKind.ALL_GATHER, mutates=True),
    "all_gather_into_tensor_coalesced": _OpTraits(CollectiveKind.ALL_GATHER, coalesced=True),
    "reduce_scatter_tensor": _OpTraits(CollectiveKind.REDUCE_SCATTER),
    "reduce_scatter_tensor_out": _OpTraits(CollectiveKind.REDUCE_SCATTER, mutates=True),
    "reduce_scatter_tensor_coalesced": _OpTraits(CollectiveKind.REDUCE_SCATTER, coalesced=True),
    "all_reduce": _OpTraits(CollectiveKind.ALL_REDUCE),
    "all_reduce_": _OpTraits(CollectiveKind.ALL_REDUCE, mutates=True),
    "all_reduce_coalesced": _OpTraits(CollectiveKind.ALL_REDUCE, coalesced=True),
    "all_reduce_coalesced_": _OpTraits(CollectiveKind.ALL_REDUCE, coalesced=True, mutates=True),
    "all_to_all_single": _OpTraits(CollectiveKind.ALL_TO_ALL),
    "broadcast": _OpTraits(CollectiveKind.BROADCAST),
    "broadcast_": _OpTraits(CollectiveKind.BROADCAST, mutates=True),
}


def collective_kind(node: fx.Node) -> CollectiveKind | None:
    """The kind of the collective that ``node`` starts (also inside ``control_deps``), or None."""
    about = traits_of(node.target)
    if about.is_control_deps:
        traits = _traits(wrapped_node(node) or node)
    elif about.communicates:
        traits = _OPS.get(about.name or "")
    else:
        return None
    return traits.kind if traits is not None else None


def _traits(node: fx.Node) -> _OpTraits | None:
    about = traits_of(node.target)
    return _OPS.get(about.name or "") if about.communicates else None


def collect(graph: fx.Graph) -> Skeleton:
    """Reads every collective, barrier and ordering constraint of ``graph``.

    Linear in nodes and edges.  Positions count working nodes only, so that views and aliases, in
    which ranks may differ, do not move anything.
    """
    communicating = _communicating(graph)
    traffic = TrafficFinder(graph)
    idle = idle_nodes(graph, traffic, communicating)
    positions = count_positions(graph, idle)
    effects = find_effects(graph, is_collective=lambda n: collective_kind(n) is not None)
    numbers = number_nodes(graph)
    fences = [numbers[b.node] for b in effects.barriers if b.kind is BarrierKind.EFFECT]
    places = _Places(positions, fences, numbers)
    waits_of = _waits_by_start(communicating)
    starts = _starts(communicating)
    tagged = any(tag_of(start) is not None for start in starts)
    carried = _Carried(traffic, tagged)
    ranks_of = functools.cache(registered_ranks)
    collectives = [
        _read(start, index, tuple(waits_of.get(start, ())), places, carried, ranks_of)
        for index, start in enumerate(starts)
    ]
    feeders = find_feeders(collectives)
    return Skeleton(
        collectives=tuple(with_feeders(with_shared_sizes(collectives, feeders), feeders)),
        barriers=_with_positions(effects, positions),
        positions=positions,
        idle=idle - copies_of_activations(collectives, idle, traffic),
        order_dependencies=effects.order_dependencies,
        tagged=tagged,
    )


@dataclass(frozen=True)
class _Places:
    """Where nodes stand: working position, numbers of barriers in the graph, number in the graph."""

    positions: dict[fx.Node, int]
    fences: list[int]
    numbers: dict[fx.Node, int]

    def segment(self, node: fx.Node) -> int:
        """Number of barriers before a node."""
        return bisect_right(self.fences, self.numbers[node])


@dataclass(frozen=True)
class _Carried:
    """What collectives carry: the tags' word where a graph has tags, else that of structure."""

    structure: TrafficFinder
    tagged: bool

    def traffic(self, start: fx.Node, kind: CollectiveKind, waits: tuple[fx.Node, ...]) -> Traffic:
        bucket = start.meta.get(BUCKET_MARK)
        if bucket is not None:
            return Traffic(bucket["traffic"])
        if not self.tagged:
            return self.structure.of(start, kind, waits)
        # One that appeared after the joint graph is nobody's parameter for all we know.
        tag = tag_of(start)
        return Traffic.OTHER if tag is None else tag.traffic

    def parameter_index(
        self, start: fx.Node, kind: CollectiveKind, waits: tuple[fx.Node, ...]
    ) -> int | None:
        if not self.tagged:
            return self.structure.parameter_index(start, kind, waits)
        tag = tag_of(start)
        return None if tag is None else tag.place


def number_nodes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Index of each node in graph order."""
    return {node: number for number, node in enumerate(graph.nodes)}


def _with_positions(effects: Effects, positions: dict[fx.Node, int]) -> tuple[Barrier, ...]:
    return tuple(Barrier(b.node, b.kind, positions[b.node]) for b in effects.barriers)


def find_starts_and_waits(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, CollectiveKind], dict[fx.Node, list[fx.Node]]]:
    """What starts a collective, and its kind; and the waits of each start, looking through views,
    aliases and getitems.  Both in graph order."""
    communicating = _communicating(graph)
    return _starts(communicating), _waits_by_start(communicating)


def find_starts(graph: fx.Graph) -> dict[fx.Node, CollectiveKind]:
    """What starts a collective, in graph order, and its kind."""
    return _starts(_communicating(graph))


def _starts(communicating: Iterable[fx.Node]) -> dict[fx.Node, CollectiveKind]:
    return {n: kind for n in communicating if (kind := collective_kind(n)) is not None}


def _communicating(graph: fx.Graph) -> list[fx.Node]:
    """Starts and waits, and what may hold one inside."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        about = traits_of(node.target)
        if about.communicates or about.is_control_deps:
            found.append(node)
    return found


def _waits_by_start(communicating: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in communicating:
        source = wait_source(node)
        if source is None:
            continue
        source = viewed_node(source)
        if collective_kind(source) is not None:
            result.setdefault(source, []).append(node)
    return result


def _read(
    start: fx.Node,
    index: int,
    waits: tuple[fx.Node, ...],
    places: _Places,
    carried: _Carried,
    ranks_of: Callable[[str], tuple[int, ...] | None],
) -> Collective:
    inner = wrapped_node(start)
    op = inner if inner is not None else start
    traits = _traits(op)
    assert traits is not None
    arguments = _outer_arguments(start, inner) if inner is not None else schema_arguments(op)
    inputs = _input_tensors(arguments)
    outputs = list(tensors_of(start.meta.get("val")))
    group = canonical_group(arguments, places.numbers)
    ranks = ranks_of(group)
    key = _bucket_key(traits, arguments, inputs, group, ranks)
    input_bytes, output_bytes = total_bytes(inputs), total_bytes(outputs)
    return Collective(
        index=index,
        start=start,
        waits=waits,
        kind=traits.kind,
        group=group,
        ranks=ranks,
        key=key,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        size_bytes=max(decision_bytes(input_bytes), decision_bytes(output_bytes)),
        position=places.positions[start],
        wait_position=min((places.positions[w] for w in waits), default=None),
        segment=places.segment(start),
        wait_segment=min(map(places.segment, waits), default=None),
        traffic=carried.traffic(start, traits.kind, waits),
        refusal=_refusal(start, traits, waits, inputs, outputs, key, wrapped=inner is not None),
        parameter_index=carried.parameter_index(start, traits.kind, waits),
        considered=start.meta.get(CONSIDERED_MARK),
        has_symbolic_size=any(has_symbols(t) for t in (*inputs, *outputs)),
        tag=tag_of(start),
        backward=runs_in_backward(start),
    )


def runs_in_backward(node: fx.Node) -> bool:
    """Says so itself; gathers that checkpointing repeats are marked too (not in torch 2.11)."""
    return bool(node.meta.get("autograd_backward")) or (
        node.meta.get("partitioner_tag") == "is_backward"
    )


def _outer_arguments(start: fx.Node, inner: fx.Node) -> dict[str, object]:
    """Arguments of a wrapped collective, with the subgraph's inputs replaced by the outer nodes."""
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    outer = dict(zip(placeholders, start.args[2:], strict=False))

    def substitute(value: Any) -> object:
        return fx.node.map_arg(value, lambda n: outer.get(n, n))

    return {name: substitute(value) for name, value in schema_arguments(inner).items()}


def _input_tensors(arguments: dict[str, object]) -> list[torch.Tensor]:
    """Fake values of the payload, which is the first argument of every collective."""
    payload = next(iter(arguments.values()), None)
    nodes: Iterable[object] = payload if isinstance(payload, (list, tuple)) else (payload,)
    values = (n.meta.get("val") for n in nodes if isinstance(n, fx.Node))
    return [tensor for value in values for tensor in tensors_of(value)]


def _bucket_key(
    traits: _OpTraits,
    arguments: dict[str, object],
    inputs: list[torch.Tensor],
    group: str,
    ranks: tuple[int, ...] | None,
) -> BucketKey | None:
    size = arguments.get("group_size")
    reduce_op = arguments.get("reduce_op", arguments.get("reduceOp", ""))
    if not inputs or not isinstance(reduce_op, str):  # a ReduceOp, which has no text
        return None
    return BucketKey(
        kind=traits.kind,
        group=group,
        group_size=size if isinstance(size, int) else (len(ranks) if ranks else None),
        dtype=inputs[0].dtype,
        reduce_op=reduce_op.lower() or None,
        device_type=inputs[0].device.type,
    )


def _refusal(
    start: fx.Node,
    traits: _OpTraits,
    waits: tuple[fx.Node, ...],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    key: BucketKey | None,
    *,
    wrapped: bool,
) -> RefusalReason | None:
    """Why this collective can never be a member of a bucket, or None."""
    if traits.kind not in MERGEABLE_KINDS or (inputs and key is None):
        return RefusalReason.KIND_NOT_MERGEABLE
    if BUCKET_MARK in start.meta or op_namespace(start.target) == COPY_ENGINES:
        return RefusalReason.ALREADY_BUCKETED
    if wrapped or any(wrapped_node(w) is not None for w in waits):
        return RefusalReason.WRAPPED
    if traits.mutates:
        return RefusalReason.MUTATES_ARGUMENT
    if traits.coalesced:
        return RefusalReason.COALESCED_IN_INPUT
    if not inputs or not outputs:
        return RefusalReason.NO_METADATA
    strided = all(t.layout is torch.strided for t in (*inputs, *outputs))
    if not strided or not all(known_contiguous(t) for t in outputs):
        return RefusalReason.UNSUPPORTED_LAYOUT
    if not waits:
        return RefusalReason.NO_WAIT
    if _used_before_wait(start):
        return RefusalReason.USED_BEFORE_WAIT
    return None


def _used_before_wait(start: fx.Node) -> bool:
    """Something other than a view or a wait reads the result while it is in flight."""
    pending = [start]
    while pending:
        for user in pending.pop().users:
            if is_view(user):
                pending.append(user)
            elif wait_source(user) is None:
                return True
    return False
