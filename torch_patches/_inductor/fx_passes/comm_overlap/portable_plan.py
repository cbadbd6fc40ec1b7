"""A plan without nodes, to be sent to another rank: nodes are told by their place in the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    CloseReason,
    MergeForm,
    Move,
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
)


class PortablePlanError(ValueError):
    """A plan that was sent does not fit this graph."""


@dataclass(frozen=True)
class PortableBucket:
    """As :class:`Bucket`; members by their number among the graph's collectives."""

    members: tuple[int, ...]
    payload_order: tuple[int, ...]
    form: str
    close_reason: str
    size_bytes: int
    span: int
    label: str


@dataclass(frozen=True)
class PortablePlan:
    """What is applied of a :class:`Plan`."""

    buckets: tuple[PortableBucket, ...] = ()
    moves: tuple[tuple[int, int], ...] = ()
    dependencies: tuple[tuple[int, int], ...] = ()
    order: tuple[int, ...] = ()


def encode(plan: Plan, order: Sequence[fx.Node]) -> PortablePlan:
    """Args: ``order``: the nodes of the graph that the plan was made for."""
    place = {node: number for number, node in enumerate(order)}
    return PortablePlan(
        buckets=tuple(
            PortableBucket(
                members=tuple(member.index for member in bucket.members),
                payload_order=bucket.payload_order,
                form=bucket.form.value,
                close_reason=bucket.close_reason.value,
                size_bytes=bucket.size_bytes,
                span=bucket.span,
                label=bucket.label,
            )
            for bucket in plan.buckets
        ),
        moves=tuple((place[move.node], move.place) for move in plan.moves),
        dependencies=tuple((place[before], place[after]) for before, after in plan.dependencies),
        order=tuple(place[node] for node in plan.order),
    )


def decode(portable: PortablePlan, skeleton: Skeleton, order: Sequence[fx.Node]) -> Plan:
    """The plan for a graph of the same structure.

    Raises:
        PortablePlanError: a number lies outside the graph.
    """
    try:
        buckets = tuple(
            Bucket(
                members=tuple(skeleton.collectives[index] for index in bucket.members),
                payload_order=bucket.payload_order,
                form=MergeForm(bucket.form),
                close_reason=CloseReason(bucket.close_reason),
                size_bytes=bucket.size_bytes,
                span=bucket.span,
                label=bucket.label,
            )
            for bucket in portable.buckets
        )
        moves = tuple(Move(order[number], place) for number, place in portable.moves)
        pairs = tuple((order[before], order[after]) for before, after in portable.dependencies)
        ordered = tuple(order[number] for number in portable.order)
    except IndexError:
        raise PortablePlanError("the plan speaks of nodes that this graph does not have") from None
    if ordered and (len(ordered) != len(order) or set(ordered) != set(order)):
        raise PortablePlanError("the plan's order is not one of all nodes of this graph")
    merged = {member for bucket in portable.buckets for member in bucket.members}
    apart = [c.start.name for c in skeleton.collectives if c.index not in merged]
    refusals = tuple(Refusal((name,), RefusalReason.OTHER_RANK) for name in apart)
    return Plan(buckets, refusals, 0, pairs, moves, ordered)


def structure_digest(graph: fx.Graph) -> str:
    """Equal for graphs with the same ops on the same inputs; numbers, names and groups may differ."""
    digest = hashlib.sha256()
    place: dict[fx.Node, int] = {}
    for number, node in enumerate(graph.nodes):
        place[node] = number
        inputs = [place[source] for source in node.all_input_nodes]
        target = str(node.target) if node.op == "call_function" else ""
        digest.update(repr((node.op, target, inputs)).encode())
    return digest.hexdigest()[:16]
