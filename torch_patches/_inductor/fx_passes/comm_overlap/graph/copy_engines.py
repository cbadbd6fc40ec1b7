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
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    is_cast,
    is_joint_copy,
    op_name,
    schema_arguments,
    tensors_of,
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
    if taken:
        copy_engine_op.register()
    for one in taken:
        _hand_over(one.start, fold_casts)
    return taken


def ring_bytes(starts: Sequence[fx.Node]) -> int:
    """What each rank of these gathers keeps for them."""
    return max((copy_engine_op.ring_bytes(_sent_bytes(start)) for start in starts), default=0)


def _sent_bytes(start: fx.Node) -> list[int]:
    results = start.meta["val"]
    ranks = int(schema_arguments(start)["group_size"])  # type: ignore[call-overload]
    return [tensor.nbytes // ranks for tensor in tensors_of(results)]


def _fits(one: Collective) -> bool:
    values = [tensor for sent in _payload(one.start) for tensor in (sent.meta.get("val"),)]
    return (
        one.kind is CollectiveKind.ALL_GATHER
        and one.traffic is Traffic.PARAMETER
        and op_name(one.start.target) in _NAMES
        and one.size_bytes >= LEAST_BYTES
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
    start.target = getattr(getattr(torch.ops, copy_engine_op.NAMESPACE), name).default
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
