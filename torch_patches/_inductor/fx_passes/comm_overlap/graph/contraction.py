"""The contracted graph: only what constrains collectives, with equal reachability.

    placeholder -> cast -> AG0 -> W0 -> mm0 ----> add -> ...        AG0 -> W0 -> mm0 -> add
    placeholder -> cast -> AG1 -> W1 -> mm1(mm0) ---^         =>    AG1 -> W1 -> add

Starts, waits, barriers and nodes with ordering constraints stay.  Of the rest only junctions stay:
nodes where paths from different kept nodes meet, and from which another kept node is reached.  That
is a few percent of a real graph, and the edges are linear in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import inputs_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import BarrierKind, Skeleton


def contract(
    graph: fx.Graph, skeleton: Skeleton, also: Iterable[fx.Node] = ()
) -> AugmentedGraph[fx.Node]:
    """Builds the contracted graph of ``graph``; linear in its nodes and edges.

    Two kept nodes are connected in the result exactly if they are connected in ``graph`` by data,
    by ``skeleton.order_dependencies`` or across a barrier.

    Args:
        also: further nodes to keep, such as compute that hides collectives.
    """
    order_before: dict[fx.Node, list[fx.Node]] = {}
    for before, after in skeleton.order_dependencies:
        order_before.setdefault(after, []).append(before)
    kept = _kept_nodes(skeleton) | set(also)
    useful = _nodes_reaching(graph, kept)
    return _build(graph, kept, useful, order_before, _fences(skeleton))


def _fences(skeleton: Skeleton) -> set[fx.Node]:
    return {b.node for b in skeleton.barriers if b.kind is BarrierKind.EFFECT}


def _kept_nodes(skeleton: Skeleton) -> set[fx.Node]:
    kept = _fences(skeleton)
    for collective in skeleton.collectives:
        kept.add(collective.start)
        kept.update(collective.waits)
    for pair in skeleton.order_dependencies:
        kept.update(pair)
    return kept


def _nodes_reaching(graph: fx.Graph, kept: set[fx.Node]) -> set[fx.Node]:
    """Nodes from which a kept node can be reached, the kept ones included."""
    reaching = set(kept)
    for node in reversed(graph.nodes):
        if node in reaching:
            reaching.update(inputs_of(node))
    return reaching


def _build(
    graph: fx.Graph,
    kept: set[fx.Node],
    useful: set[fx.Node],
    order_before: dict[fx.Node, list[fx.Node]],
    fences: set[fx.Node],
) -> AugmentedGraph[fx.Node]:
    nodes: list[fx.Node] = []
    predecessors: dict[fx.Node, tuple[fx.Node, ...]] = {}
    # nearest contracted node(s) at or above each node of the graph
    nearest: dict[fx.Node, tuple[fx.Node, ...]] = {}
    last_fence: fx.Node | None = None
    since_fence: list[fx.Node] = []
    for node in graph.nodes:
        if node not in useful:
            continue
        is_kept, inputs = node in kept, inputs_of(node)
        if not is_kept and len(inputs) == 1:
            nearest[node] = nearest.get(next(iter(inputs)), ())
            continue
        above: dict[fx.Node, None] = {}
        for source in inputs:
            for placed in nearest.get(source, ()):
                above[placed] = None
        if is_kept:
            above.update(dict.fromkeys(order_before.get(node, ())))
            if last_fence is not None:
                above[last_fence] = None
            if node in fences:
                above.update(dict.fromkeys(since_fence))
                last_fence, since_fence = node, []
            else:
                since_fence.append(node)
        direct = _without_implied(above, predecessors)
        if not is_kept and len(direct) < 2:
            nearest[node] = direct
            continue
        nodes.append(node)
        predecessors[node] = direct
        nearest[node] = (node,)
    edges = ((before, after) for after in nodes for before in predecessors[after])
    return AugmentedGraph(nodes, edges)


def _without_implied(
    above: dict[fx.Node, None], predecessors: dict[fx.Node, tuple[fx.Node, ...]]
) -> tuple[fx.Node, ...]:
    """Drops a node that another one already follows directly; keeps chains of junctions short."""
    if len(above) < 2:
        return tuple(above)
    implied = {p for n in above for p in predecessors[n]}
    return tuple(n for n in above if n not in implied)
