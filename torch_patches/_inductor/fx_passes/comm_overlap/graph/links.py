"""Chains of collectives, and numbers that results are scaled by.

    gradient -> RS -> wait -> view -> div by 4 -> AR -> wait -> div by 2 -> output

The all-reduce is *fed* by the reduce-scatter, and the ``div by 2`` is the *scaling* behind it.
Both are found through views, in which ranks may differ; feeders also through casts and the
padding and cutting of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import is_view, tensors_of
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import has_symbols
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import passes_through
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective

aten = torch.ops.aten
_SCALINGS = (aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar)


def with_feeders(collectives: Sequence[Collective]) -> list[Collective]:
    """The collectives with ``feeder`` filled in; linear in the nodes between them."""
    index_of = {c.start: c.index for c in collectives}
    found: dict[fx.Node, int | None] = {}
    return [replace(c, feeder=_feeder(c.start, index_of, found)) for c in collectives]


def _feeder(
    start: fx.Node, index_of: dict[fx.Node, int], found: dict[fx.Node, int | None]
) -> int | None:
    walked: list[fx.Node] = []
    node: fx.Node | None = _only_tensor(start)
    while node is not None and node not in found and node not in index_of:
        walked.append(node)
        node = _only_tensor(node) if passes_through(node) or is_scaling(node) else None
    index = None if node is None else index_of.get(node, found.get(node))
    found.update(dict.fromkeys(walked, index))
    return index


def _only_tensor(node: fx.Node) -> fx.Node | None:
    inputs = [n for n in node.all_input_nodes if any(True for _ in tensors_of(n.meta.get("val")))]
    return inputs[0] if len(inputs) == 1 else None


def is_scaling(node: fx.Node) -> bool:
    """``div`` or ``mul`` of a tensor by a Python number."""
    if node.target not in _SCALINGS or node.kwargs or len(node.args) != 2:
        return False
    source, number = node.args
    return isinstance(source, fx.Node) and type(number) in (int, float)


def common_scaling(members: Sequence[Collective]) -> tuple[fx.Node, ...]:
    """The scaling behind each member if all have one by the same op and number, else ().

    Equal on all ranks: what lies between wait and scaling may differ, the scaling does not.
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
    dtype = node.meta["val"].dtype
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
