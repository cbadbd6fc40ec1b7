"""Hands gathers of parameters within a node to the copy engines (:mod:`~.copy_engine_op`).

    p -> cast -> all_gather  ->  wait          p -> comm_overlap::all_gather(dtype) -> wait

Only the target of a start changes, and what it sends: a cast in front is part of it.  So a plan that is
applied stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import copy_engine_op
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    COPY_ENGINES,
    is_cast,
    is_joint_copy,
    op_name,
    op_namespace,
    schema_arguments,
    tensors_of,
    traits_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import has_symbols
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, CollectiveKind, Traffic

#: Bytes of the full tensors below which two barriers and a copy from each rank take longer.
LEAST_BYTES = 8 << 20
_NAMES = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")


def use_copy_engines(
    collectives: tuple[Collective, ...], inside: Set[str], *, fold_casts: bool = True
) -> list[Collective]:
    """Changes the starts of those that it takes, which it returns in order.

    Args:
        collectives: of the graph as it stands.
        inside: groups whose ranks reach each other's memory.
        fold_casts: of what is sent, which is left without a reader then.
    """
    taken = [one for one in collectives if one.group in inside and _fits(one)]
    if not taken:
        return taken
    copy_engine_op.register()
    late = _behind_mutations(taken[0].start.graph)
    for one in taken:
        _hand_over(one.start, fold_casts and one.start not in late)
    return taken


def _behind_mutations(graph: fx.Graph) -> set[fx.Node]:
    """Starts that might read another value if they read what their cast has read."""
    nodes = list(graph.nodes)
    mutable = (i for i, n in enumerate(nodes) if traits_of(n.target).is_mutable)
    first = next((i for i in mutable if collective_kind(nodes[i]) is None), len(nodes))
    return set(nodes[first:])


def ring_bytes(taken: Sequence[Collective]) -> int:
    """What each rank keeps for these gathers: each group has a ring."""
    by_group: dict[str, int] = {}
    for one in taken:
        size = copy_engine_op.ring_bytes(_sent_bytes(one.start))
        by_group[one.group] = max(by_group.get(one.group, 0), size)
    return sum(by_group.values())


def _sent_bytes(start: fx.Node) -> list[int]:
    results = start.meta["val"]
    ranks = int(schema_arguments(start)["group_size"])  # type: ignore[call-overload]
    return [tensor.nbytes // ranks for tensor in tensors_of(results)]


def _fits(one: Collective) -> bool:
    target, values = one.start.target, [sent.meta.get("val") for sent in _payload(one.start)]
    return (
        one.kind is CollectiveKind.ALL_GATHER
        and one.traffic is Traffic.PARAMETER
        and op_namespace(target) == "_c10d_functional"  # not those of an earlier run
        and op_name(target) in _NAMES
        and isinstance(schema_arguments(one.start).get("group_name"), str)
        and one.size_bytes >= LEAST_BYTES
        and bool(values)
        and all(isinstance(v, torch.Tensor) and v.dim() > 0 and not has_symbols(v) for v in values)
    )


def _payload(start: fx.Node) -> list[fx.Node]:
    arguments = schema_arguments(start)
    sent = arguments.get("inputs", arguments.get("input"))
    sent = sent if isinstance(sent, (list, tuple)) else [sent]
    return [node for node in sent if isinstance(node, fx.Node)]


def _hand_over(start: fx.Node, fold_casts: bool) -> None:
    arguments = schema_arguments(start)
    sent = _payload(start)
    dtypes = {node.meta["val"].dtype for node in sent}
    if fold_casts and len(dtypes) == 1:
        sent = [_uncast(node) for node in sent]
    name = str(op_name(start.target))
    payload = sent if "inputs" in arguments else sent[0]
    changed = any(node.meta["val"].dtype not in dtypes for node in sent)
    start.target = getattr(getattr(torch.ops, COPY_ENGINES), name).default
    given: Any = (payload, arguments["group_size"], arguments["group_name"])
    start.args = given
    start.kwargs = {"dtype": dtypes.pop()} if changed else {}


def _uncast(node: fx.Node) -> fx.Node:
    """What is cast, if nobody else reads the cast."""
    if len(node.users) > 1:
        return node
    inner = node
    if node.target is operator.getitem:  # of several casts that are one kernel
        together, place = node.args
        assert isinstance(together, fx.Node)
        if not is_joint_copy(together):
            return node
        inner = together.args[1][place]  # type: ignore[index,assignment]
        if any(user is not together for user in inner.users):
            return node
    if not is_cast(inner):
        return node
    (source,) = inner.all_input_nodes
    was, now = source.meta["val"], node.meta["val"]
    same = was.shape == now.shape and was.device == now.device and was.dtype.is_floating_point
    return source if same else node
