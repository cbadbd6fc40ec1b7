"""Positions that agree on all ranks: the number of working nodes before a node.

Ranks run the same program, but their graphs may differ in nodes that do no work (views, aliases,
slices that keep everything) and in the layout of their shards: a rank with a short shard pads it
before a gather, cuts its part after a reduction, and on a mesh of several dimensions splits and
joins in between (with zeros for parts that it lacks), where the others do not.  None of it may
change a decision, so none counts: neither at the graph's edge nor directly around a collective,
whatever that carries.

    w -> mul -> [pad] -> AG -> wait -> view -> [slice] -> mm      the nodes in brackets do not count
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    does_work,
    first_argument,
    inputs_of,
    is_joint_copy,
    op_name,
    traits_of,
    wait_source,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    TrafficFinder,
    data_inputs,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Traffic

_SPLITS = frozenset({"chunk", "split", "split_with_sizes", "split_with_sizes_copy"})
_COPIES = frozenset({"cat", "clone"})
_SHARD_LAYOUT = _SPLITS | _COPIES | {"constant_pad_nd", "narrow", "slice"}


def idle_nodes(
    graph: fx.Graph, traffic: TrafficFinder, communicating: Iterable[fx.Node]
) -> frozenset[fx.Node]:
    """Nodes that must not count: no work, or the padding and cutting of shards; linear.

    Args:
        communicating: starts and waits.
    """
    around = _around_collectives(graph, communicating)
    return frozenset([n for n in graph.nodes if _is_idle(n, around, traffic)])


def copies_of_activations(
    collectives: Iterable[Collective], idle: Set[fx.Node], traffic: TrafficFinder
) -> set[fx.Node]:
    """Idle nodes that take their time on every rank: what rearranges an activation in front of or
    behind a collective.  Linear.

    Ranks whose parts of an activation differ in size have other kernels besides, but for what stands
    between a collective and another one, an input or an output: that may be there on one rank alone,
    as with shards of parameters.
    """
    activations: list[fx.Node] = []
    shards: list[fx.Node] = []
    for c in collectives:
        (activations if c.traffic is Traffic.OTHER else shards).extend((c.start, *c.waits))
    behind, in_front = _behind(activations), _in_front(activations)
    outer = {n for n in in_front - behind if not traffic.rearranges_an_input(n)}
    outer |= {n for n in behind - in_front if not traffic.leads_to_outputs(n)}
    copies = {n for n in outer if n in idle and _copies_data_alone(n)}
    return copies - _behind(shards) - _in_front(shards) if copies else copies


def _copies_data_alone(node: fx.Node) -> bool:
    """No zeros besides, which stand for what one rank lacks."""
    return traits_of(node.target).name in _COPIES and len(data_inputs(node)) == len(inputs_of(node))


def _is_idle(node: fx.Node, around: Set[fx.Node], traffic: TrafficFinder) -> bool:
    traits = traits_of(node.target)
    if traits.name is None:
        if node.target is not operator.getitem:
            return not does_work(node)
        return traffic.is_at_the_edge(node) or (_is_piece(node) and node in around)
    if traits.name in _SHARD_LAYOUT or traits.is_creation or traits.is_shape_only:
        return node in around or traffic.is_at_the_edge(node) or not does_work(node)
    return traits.is_no_op  # of ops, only slices do no work besides


def _is_piece(node: fx.Node) -> bool:
    """A getitem of what was cut."""
    source = first_argument(node)
    return isinstance(source, fx.Node) and op_name(source.target) in _SPLITS


def _around_collectives(graph: fx.Graph, communicating: Iterable[fx.Node]) -> set[fx.Node]:
    """Rearrangements, views and casts that lead from a collective or to one with nothing else in
    between; linear."""
    collectives = [n for n in communicating if traits_of(n.target).communicates]
    # A partitioner leaves what led to a collective of the other graph behind: without users.
    unused = {n for n in graph.nodes if not n.users and _passes(n)}
    return _behind(collectives) | _in_front([*collectives, *unused]) | unused


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        users = pending.pop().users
        passing = [n for n in users if n not in found and (_passes(n) or wait_source(n))]
        found.update(passing)
        pending.extend(passing)
    return found


def _in_front(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        passing = [n for n in inputs_of(pending.pop()) if n not in found and _passes(n)]
        found.update(passing)
        pending.extend(passing)
    return found


def _passes(node: fx.Node) -> bool:
    traits = traits_of(node.target)
    if traits.is_view or traits.is_cast or traits.is_creation or traits.is_shape_only:
        return True
    return traits.name in _SHARD_LAYOUT or is_joint_copy(node)


def count_positions(graph: fx.Graph, idle: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Number of nodes outside ``idle`` before each node, for the whole graph."""
    positions: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        positions[node] = count
        count += node not in idle
    return positions
