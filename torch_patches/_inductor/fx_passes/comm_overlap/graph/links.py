"""Chains of collectives, and numbers that results are scaled by.

    gradient -> RS -> wait -> view -> div by 4 -> AR -> wait -> div by 2 -> output

The all-reduce is *fed* by the reduce-scatter, and the ``div by 2`` is the *scaling* behind it.
Ranks differ in views and in the padding and cutting of shards.  So feeders, and whether there is a
scaling, are found through all of it; which nodes one scaling can replace is found through views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    COLLECTIVE_NAMESPACES,
    is_view,
    op_namespace,
    reads_only_shape,
    tensors_of,
    traits_of,
    viewed_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import has_symbols
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    data_inputs,
    passes_through,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Traffic

aten = torch.ops.aten
_SCALINGS = (aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar)
_RESIZING_VIEWS = frozenset({"expand", "select", "unfold", "as_strided", "diagonal"})

#: Op and number of a scaling.
_ScalingKind = tuple[object, str]


def with_feeders(
    collectives: Sequence[Collective], feeders: Mapping[fx.Node, Collective]
) -> list[Collective]:
    """The collectives with ``feeder`` filled in from what :func:`find_feeders` found."""
    return [
        replace(c, feeder=feeders[c.start].index) if c.start in feeders else c for c in collectives
    ]


def find_feeders(collectives: Sequence[Collective]) -> dict[fx.Node, Collective]:
    """For each start that passes a parameter or gradient on, the collective that it has it from.

    In between it may be rearranged, cast, and computed on element by element (scaled, quantised,
    accumulated into).  Linear in the nodes between.

    Args:
        collectives: in graph order.
    """
    by_start = {c.start: c for c in collectives}
    found: dict[fx.Node, fx.Node | None] = {}
    feeders: dict[fx.Node, Collective] = {}
    for collective in collectives:
        if collective.traffic is Traffic.OTHER:
            continue
        source = _feeding(collective.start, by_start.keys(), found)
        before = None if source is None else by_start[source]
        if before is None:
            continue
        if before.traffic is collective.traffic:
            feeders[collective.start] = before
    return feeders


def _feeding(
    start: fx.Node, starts: Set[fx.Node], found: dict[fx.Node, fx.Node | None]
) -> fx.Node | None:
    """``found``: for each node seen, the start that it is the result of, itself included."""
    inputs = data_inputs(start)
    pending = [(n, _passed_on(n, starts)) for n in inputs if n not in found]
    while pending:
        node, above = pending[-1]
        unseen = [n for n in above if n not in found]
        if unseen:
            pending.extend([(n, _passed_on(n, starts)) for n in unseen])
            continue
        found[node] = node if node in starts else _common_source(node, above, found)
        pending.pop()
    return _common_source(start, inputs, found)


def _passed_on(node: fx.Node, starts: Set[fx.Node]) -> list[fx.Node]:
    """What a node between two chained collectives hands on; nothing of others."""
    return data_inputs(node) if node not in starts and _carries(node) else []


def _common_source(
    node: fx.Node, inputs: Sequence[fx.Node], found: Mapping[fx.Node, fx.Node | None]
) -> fx.Node | None:
    """The source of all inputs.  Element by element, all have one size: then the first source."""
    if len(inputs) == 1:
        return found[inputs[0]]
    sources = dict.fromkeys(found[n] for n in inputs)
    if not passes_through(node):
        sources.pop(None, None)
        return next(iter(sources), None)
    return next(iter(sources)) if len(sources) == 1 else None


def _carries(node: fx.Node) -> bool:
    """May stand between two chained collectives."""
    if node.op != "call_function":
        return False
    traits = traits_of(node.target)
    if traits.name in _RESIZING_VIEWS:
        return False
    if traits.is_shape_only or passes_through(node):
        return True
    if traits.namespace is None or traits.is_mutable:
        return False
    if traits.is_pointwise:
        return True
    # an op of somebody else over one tensor, perhaps viewed twice: its quantisation
    return traits.namespace != "aten" and len({viewed_node(n) for n in data_inputs(node)}) == 1


def is_scaling(node: fx.Node) -> bool:
    """``div`` or ``mul`` of a tensor by a Python number."""
    if node.target not in _SCALINGS or node.kwargs or len(node.args) != 2:
        return False
    source, number = node.args
    return isinstance(source, fx.Node) and type(number) in (int, float)


def are_scaled_alike(members: Sequence[Collective]) -> bool:
    """Whether what is read of every member's result is scaled by the same op and number.

    Equal on all ranks: shards may be cut, copied and joined between wait and scaling.
    """
    kinds = {_scaling_of(member) for member in members}
    return len(kinds) == 1 and None not in kinds


def _scaling_of(member: Collective) -> _ScalingKind | None:
    """What scales the result of the member's only wait, in its dtype, wherever it is read."""
    if len(member.waits) != 1 or member.has_symbolic_size:
        return None
    dtype = _dtype_of(member.waits[0])
    kinds: set[_ScalingKind] = set()
    pending, seen = [member.waits[0]], {member.waits[0]}
    while pending:
        for user in pending.pop().users:
            if user in seen or reads_only_shape(user):
                continue
            seen.add(user)
            if is_scaling(user) and _dtypes_of(user) == {dtype}:
                kinds.add((user.target, repr(user.args[1])))
            elif _rearranges(user) and _dtypes_of(user) == {dtype}:
                pending.append(user)
            else:
                return None
    return next(iter(kinds)) if len(kinds) == 1 else None


def _rearranges(node: fx.Node) -> bool:
    return passes_through(node) and op_namespace(node.target) not in COLLECTIVE_NAMESPACES


def _dtype_of(wait: fx.Node) -> torch.dtype | None:
    value = wait.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _dtypes_of(node: fx.Node) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_of(node.meta.get("val"))}


def common_scaling(members: Sequence[Collective]) -> tuple[fx.Node, ...]:
    """The scaling behind each member if all have one by the same op and number, else ().

    Only nodes that one scaling of the whole buffer can stand for, so ranks may differ in it.
    """
    scalings = [_scaling_behind(member) for member in members]
    kinds = {(s.target, repr(s.args[1])) for s in scalings if s is not None}
    if None in scalings or len(kinds) != 1:
        return ()
    return tuple(s for s in scalings if s is not None)


def _scaling_behind(member: Collective) -> fx.Node | None:
    """What alone reads the member's only wait, through views, and scales it in its dtype."""
    if len(member.waits) != 1 or member.has_symbolic_size:
        return None
    node = member.waits[0]
    dtype = _dtype_of(node)
    while len(node.users) == 1:
        node = next(iter(node.users))
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or has_symbols(value):
            return None
        if is_scaling(node):
            return node
        if not is_view(node):
            return None
    return None
