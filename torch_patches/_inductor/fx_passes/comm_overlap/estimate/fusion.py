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

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    OpTraits,
    ResultBytes,
    first_argument,
    inputs_of,
    is_joint_copy,
    is_view,
    op_name,
    traits_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import only_data

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


class Traffic(NamedTuple):
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
    return _is_fusible(node, traits_of(node.target))


def _is_fusible(node: fx.Node, traits: OpTraits) -> bool:
    if traits.namespace not in ("aten", "prims"):
        return False
    if traits.is_pointwise or traits.is_cast or traits.name in _FUSIBLE_NAMES:
        return True
    return is_joint_copy(node)


def is_kernel(node: fx.Node) -> bool:
    """It computes something; views and pieces of results do not, wherever they stand."""
    return node.op == "call_function" and not is_view(node)


def memory_traffic(
    graph: fx.Graph, idle: Set[fx.Node] = frozenset(), sizes: ResultBytes | None = None
) -> dict[fx.Node, Traffic]:
    """Traffic of every node that computes.

    Args:
        idle: nodes that count as views, since only some ranks have them (pads of short shards).
        sizes: those known already; it is added to.
    """
    sizes = ResultBytes() if sizes is None else sizes
    sources, regions = _read(graph, idle)
    joint = {region for node, region in regions.items() if region is not node}
    seen: set[tuple[fx.Node, fx.Node]] = set()
    result: dict[fx.Node, Traffic] = {}
    for node, region in regions.items():
        read = 0
        is_joint = region in joint
        picks_rows = traits_of(node.target).name in _ROW_PICKERS
        for source, views in _by_source(inputs_of(node), sources):
            if is_joint:
                if regions.get(source) is region or (region, source) in seen:
                    continue
                seen.add((region, source))
            if picks_rows:  # as many as it returns
                read += min(sizes[source], sizes[node])
            elif len(views) == 1 and views[0] is source:
                read += sizes[source]
            else:
                read += _read_bytes(source, views, idle, sizes)
        written = sizes[node] if _leaves(node, regions) else 0
        result[node] = Traffic(read, written, region is node)
    return result


def _by_source(
    inputs: Collection[fx.Node], sources: Mapping[fx.Node, fx.Node]
) -> Iterable[tuple[fx.Node, Sequence[fx.Node]]]:
    """What a node is given, by what it is a view of."""
    if len(inputs) == 1:
        (only,) = inputs
        return ((sources[only], (only,)),)
    views: dict[fx.Node, list[fx.Node]] = {}
    for view in inputs:
        views.setdefault(sources[view], []).append(view)
    return views.items()


def _read_bytes(
    source: fx.Node, views: Sequence[fx.Node], idle: Set[fx.Node], sizes: ResultBytes
) -> int:
    """What a kernel reads of a tensor: the views it was given of it, at most all of it."""
    whole = sizes[source]
    read = sum([sizes[view] for view in views])
    # A short shard counts as what it is padded to: so much others have.
    if read > whole and any(_is_padded(v, source, idle) for v in views):
        return read
    return min(whole, read)


def _is_padded(node: fx.Node, source: fx.Node, idle: Set[fx.Node]) -> bool:
    while node is not source:
        if node in idle and op_name(node.target) in ("constant_pad_nd", "cat"):
            return True
        above = first_argument(node)
        if not isinstance(above, fx.Node):
            return False
        node = above
    return False


def _leaves(node: fx.Node, regions: Mapping[fx.Node, fx.Node]) -> bool:
    """Somebody outside of its region reads it, perhaps through nodes that do not compute."""
    region = regions[node]
    reached, seen = [node], {node}
    for above in reached:
        for user in above.users:
            readers = regions.get(user)
            if readers is None:
                if user.op != "call_function":
                    return True
                if user not in seen:  # it counts as a view
                    seen.add(user)
                    reached.append(user)
            elif readers is not region:
                return True
    return False


def _read(
    graph: fx.Graph, idle: Set[fx.Node]
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """(What each node is a view of, or made from without work; the region of each that computes).

    A source is the first node, going up, that does work or is an input: itself, if it is one.  A
    region goes by its last node; both are in graph order.
    """
    sources: dict[fx.Node, fx.Node] = {}
    below: dict[fx.Node, int] = {}  # level of what reads the node
    parent: dict[fx.Node, fx.Node] = {}  # of the same region, further down; itself at the end
    fusible: dict[fx.Node, int] = {}  # levels of those that are
    for node in graph.nodes:
        inputs = inputs_of(node)
        level = 0
        for n in inputs:
            if below[n] > level:
                level = below[n]
        below[node] = level
        sources[node] = node
        if node.op != "call_function":
            continue
        traits = traits_of(node.target)
        if traits.is_view or node in idle:
            viewed = _viewed(node)
            sources[node] = node if viewed is None else sources[viewed]
            continue
        parent[node] = node
        if not _is_fusible(node, traits):
            below[node] = level + 1
            continue
        fusible[node] = level
        for n in inputs:
            source = sources[n]
            if fusible.get(source) == level:
                parent[_root(source, parent)] = node
    for node in reversed(fusible):  # parents stand behind their children
        parent[node] = parent[parent[node]]
    return sources, parent


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node that does not compute passes on; None of a cat of several."""
    source = first_argument(node)
    if isinstance(source, fx.Node):
        return source
    return only_data(node)  # of a cat with constants


def _root(node: fx.Node, parent: dict[fx.Node, fx.Node]) -> fx.Node:
    """Representative of a component, with the path halved on the way."""
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
