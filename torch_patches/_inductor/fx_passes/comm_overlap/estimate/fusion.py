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
    is_cast,
    is_joint_copy,
    is_view,
    op_name,
    op_namespace,
    tensors_of,
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
    if op_namespace(node.target) not in ("aten", "prims"):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    if is_cast(node) or op_name(node.target) in _FUSIBLE_NAMES or is_joint_copy(node):
        return True
    return torch.Tag.pointwise in node.target.tags


def is_kernel(node: fx.Node) -> bool:
    """It computes something; views and pieces of results do not, wherever they stand."""
    return node.op == "call_function" and does_work(node) and not is_view(node)


def memory_traffic(graph: fx.Graph, idle: Set[fx.Node] = frozenset()) -> dict[fx.Node, Traffic]:
    """Traffic of every node that computes.

    Args:
        idle: nodes that count as views, since only some ranks have them (pads of short shards).
    """
    regions = _regions(graph, idle)
    last = {regions[node]: node for node in graph.nodes if node in regions}
    seen: set[tuple[int, fx.Node]] = set()
    result: dict[fx.Node, Traffic] = {}
    source_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in regions:
            continue
        region = regions[node]
        read = 0
        views: dict[fx.Node, list[fx.Node]] = {}
        for view in node.all_input_nodes:
            if view not in source_of:
                source_of[view] = _source(view, idle)
            views.setdefault(source_of[view], []).append(view)
        for source, viewed in views.items():
            if regions.get(source) == region or (region, source) in seen:
                continue
            seen.add((region, source))
            read += _read_bytes(node, source, viewed, idle)
        written = _bytes(node) if _leaves(node, regions, idle) else 0
        result[node] = Traffic(read, written, last[region] is node)
    return result


def _source(node: fx.Node, idle: Set[fx.Node]) -> fx.Node:
    """What a node is a view of, or made from without work."""
    while is_view(node) or (node in idle and node.op == "call_function"):
        source = first_argument(node)
        if not isinstance(source, fx.Node):
            data = data_inputs(node)  # of a cat with constants
            if len(data) != 1:
                break
            source = data[0]
        node = source
    return node


def _read_bytes(
    node: fx.Node, source: fx.Node, views: Sequence[fx.Node], idle: Set[fx.Node]
) -> int:
    """What a kernel reads of a tensor: the views it was given of it, at most all of it; rows that
    an embedding picks count as many as it returns."""
    if op_name(node.target) in ("embedding", "index_select", "gather", "index"):
        return min(_bytes(source), _bytes(node))
    read = sum(_bytes(view) for view in views)
    # A short shard counts as what it is padded to: so much others have.
    padded = any(_is_padded(view, source, idle) for view in views)
    return read if padded else min(_bytes(source), read)


def _is_padded(node: fx.Node, source: fx.Node, idle: Set[fx.Node]) -> bool:
    while node is not source:
        if node in idle and op_name(node.target) in ("constant_pad_nd", "cat"):
            return True
        above = first_argument(node)
        if not isinstance(above, fx.Node):
            return False
        node = above
    return False


def _bytes(node: fx.Node) -> int:
    return sum(decision_bytes(tensor_bytes(t)) for t in tensors_of(node.meta.get("val")))


def _leaves(node: fx.Node, regions: Mapping[fx.Node, int], idle: Set[fx.Node]) -> bool:
    """Somebody outside of its region reads it, perhaps through views."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            works = does_work(user) and user not in idle
            if is_view(user) or (user.op == "call_function" and not works):
                pending.append(user)
            elif regions.get(user) != regions[node]:
                return True
    return False


def _regions(graph: fx.Graph, idle: Set[fx.Node]) -> dict[fx.Node, int]:
    """Region number of every node that computes; a non-fusible node is alone in its own."""
    levels: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        kernel, fusible = is_kernel(node) and node not in idle, is_fusible(node)
        level = 0
        for n in node.all_input_nodes:
            heavy = n in parent and not is_fusible(n)
            level = max(level, levels[n] + heavy)
        levels[node] = level
        if kernel:
            parent[node] = node
        if not (kernel and fusible):
            continue
        for n in dict.fromkeys(_source(n, idle) for n in node.all_input_nodes):
            if n in parent and is_fusible(n) and levels[n] == level:
                parent[_root(n, parent)] = _root(node, parent)
    numbers: dict[fx.Node, int] = {}
    return {
        node: numbers.setdefault(_root(node, parent), len(numbers))
        for node in graph.nodes
        if node in parent
    }


def _root(node: fx.Node, parent: dict[fx.Node, fx.Node]) -> fx.Node:
    """Representative of a component, with the path halved on the way."""
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
