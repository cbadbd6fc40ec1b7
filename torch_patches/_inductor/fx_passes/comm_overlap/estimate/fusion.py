"""Which nodes Inductor would compute in one kernel, and what then goes through memory.

Pointwise ops, reductions and copies are fusible.  Every node has a level: the number of
non-fusible nodes on the heaviest path to it.  A fusible producer and a fusible consumer of one
level have no non-fusible node between them, so fusing them is legal; fused regions are the
connected components of such pairs.  Inside a region a value stays in registers:

    mm -> relu -> mul -> mm        region {relu, mul}: reads mm's result once, writes mul's

Linear in nodes and edges.  A real fuser is more careful (registers, loop orders), so a region is a
lower bound of the traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    does_work,
    first_argument,
    is_joint_copy,
    is_view,
    op_name,
    tensors_of,
    traits_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import decision_bytes, tensor_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import data_inputs

_FUSIBLE_NAMES = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
        "amax", "amin", "any", "all", "argmax", "argmin", "cat", "clone", "constant_pad_nd",
        "copy", "cumsum", "embedding", "empty", "full", "gather", "index_select", "iota", "arange",
        "max", "mean", "min", "native_layer_norm", "native_layer_norm_backward", "nll_loss_backward",
        "nll_loss_forward", "norm", "prod", "scalar_tensor", "stack", "std", "sum", "var",
        "var_mean", "_fused_rms_norm", "_fused_rms_norm_backward",
    }
)  # fmt: skip
_ROW_PICKERS = frozenset({"embedding", "gather", "index", "index_select"})


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of a node once regions are fused.

    Args:
        read_bytes: of tensors that its region reads here first.
        written_bytes: of its result, if something outside of its region reads it.
        launches: the node ends its region, or is a kernel of its own.
    """

    read_bytes: int
    written_bytes: int
    launches: bool


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor makes it part of a generated kernel."""
    traits = traits_of(node.target)
    if traits.namespace not in ("aten", "prims"):
        return False
    if traits.is_pointwise or traits.is_cast or traits.name in _FUSIBLE_NAMES:
        return True
    return is_joint_copy(node)


def is_kernel(node: fx.Node) -> bool:
    """It computes something; views and pieces of results do not, wherever they stand."""
    return node.op == "call_function" and does_work(node) and not is_view(node)


def memory_traffic(graph: fx.Graph, idle: Set[fx.Node] = frozenset()) -> dict[fx.Node, Traffic]:
    """Traffic of every node that computes.

    Args:
        idle: nodes that count as views, since only some ranks have them (pads of short shards).
    """
    sources, sizes = _Sources(idle), _Sizes()
    regions = _regions(graph, idle, sources)
    last = {region: node for node, region in regions.items()}
    seen: set[tuple[int, fx.Node]] = set()
    result: dict[fx.Node, Traffic] = {}
    for node, region in regions.items():
        read = 0
        views: dict[fx.Node, list[fx.Node]] = {}
        for view in node.all_input_nodes:
            views.setdefault(sources.of(view), []).append(view)
        for source, viewed in views.items():
            if regions.get(source) == region or (region, source) in seen:
                continue
            seen.add((region, source))
            read += _read_bytes(node, source, viewed, idle, sizes)
        written = sizes.of(node) if _leaves(node, regions, idle) else 0
        result[node] = Traffic(read, written, last[region] is node)
    return result


class _Sizes:
    """Bytes of results; most are asked for by several readers."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        known = self._known.get(node)
        if known is None:
            value = node.meta.get("val")
            tensors = (value,) if isinstance(value, torch.Tensor) else tensors_of(value)
            known = self._known[node] = sum([decision_bytes(tensor_bytes(t)) for t in tensors])
        return known


class _Sources:
    """What nodes are views of, or made from without work."""

    def __init__(self, idle: Set[fx.Node]) -> None:
        self._idle = idle
        self._known: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """The first node, going up from this one, that does work or is an input."""
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = self._find(node)
        return known

    def _find(self, node: fx.Node) -> fx.Node:
        while is_view(node) or (node in self._idle and node.op == "call_function"):
            source = first_argument(node)
            if not isinstance(source, fx.Node):
                data = data_inputs(node)  # of a cat with constants
                if len(data) != 1:
                    break
                source = data[0]
            node = source
        return node


def _read_bytes(
    node: fx.Node, source: fx.Node, views: Sequence[fx.Node], idle: Set[fx.Node], sizes: _Sizes
) -> int:
    """What a kernel reads of a tensor: the views it was given of it, at most all of it; rows that
    an embedding picks count as many as it returns."""
    whole = sizes.of(source)
    if traits_of(node.target).name in _ROW_PICKERS:
        return min(whole, sizes.of(node))
    if len(views) == 1 and views[0] is source:
        return whole
    read = sum([sizes.of(view) for view in views])
    # A short shard counts as what it is padded to: so much others have.
    padded = any(_is_padded(view, source, idle) for view in views)
    return read if padded else min(whole, read)


def _is_padded(node: fx.Node, source: fx.Node, idle: Set[fx.Node]) -> bool:
    while node is not source:
        if node in idle and op_name(node.target) in ("constant_pad_nd", "cat"):
            return True
        above = first_argument(node)
        if not isinstance(above, fx.Node):
            return False
        node = above
    return False


def _leaves(node: fx.Node, regions: Mapping[fx.Node, int], idle: Set[fx.Node]) -> bool:
    """Somebody outside of its region reads it, perhaps through views."""
    region = regions[node]
    for user in node.users:  # true of most nodes, at the first one
        if regions.get(user, region) != region:
            return True
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user in regions:  # it works
                if regions[user] != region:
                    return True
            elif is_view(user) or (user.op == "call_function" and _is_idle(user, idle)):
                pending.append(user)
            else:
                return True
    return False


def _is_idle(node: fx.Node, idle: Set[fx.Node]) -> bool:
    return node in idle or not does_work(node)


def _regions(graph: fx.Graph, idle: Set[fx.Node], sources: _Sources) -> dict[fx.Node, int]:
    """Region number of every node that computes, in graph order; a non-fusible node is alone in its
    own."""
    levels: dict[fx.Node, int] = {}
    below: dict[fx.Node, int] = {}  # level of what reads the node
    parent: dict[fx.Node, fx.Node] = {}
    fusible: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        level = max([below[n] for n in inputs]) if inputs else 0
        levels[node] = below[node] = level
        if node in idle or not is_kernel(node):
            continue
        parent[node] = node
        if not is_fusible(node):
            below[node] = level + 1
            continue
        fusible.add(node)
        for n in dict.fromkeys([sources.of(n) for n in inputs]):
            if n in fusible and levels[n] == level:
                parent[_root(n, parent)] = _root(node, parent)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(_root(node, parent), len(numbers)) for node in parent}


def _root(node: fx.Node, parent: dict[fx.Node, fx.Node]) -> fx.Node:
    """Representative of a component, with the path halved on the way."""
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
