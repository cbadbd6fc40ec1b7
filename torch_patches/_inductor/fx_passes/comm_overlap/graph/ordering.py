"""The smallest move that restores topological order after a merge.

A merged start needs the inputs of all members and must precede the users of all members.  Members
stand in some range of the graph, so either the ancestors in that range move up to the first member
(*hoist*; right for parameter gathers, whose inputs are only casts) or the descendants in that
range move down behind the last member (*sink*; right for gradient reductions, whose results only
leave the graph).  Nothing else moves: the rest keeps its order exactly.

The order is then the smallest one, by the nodes' keys, that respects data and extra dependencies
(Kahn's algorithm with a heap).  A node that does no work never changes the order of the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import inputs_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import Bucket, CollectiveKind

#: (slot in the input graph, phase within the slot, tie): hoisted, then new, then the node there.
OrderKey = tuple[int, int, int]
_HOISTED, _NEW, _IN_PLACE = 0, 1, 2


class Precedence:
    """What each node must follow: data inputs plus extra dependencies, in both directions."""

    def __init__(self, order_dependencies: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        self._before: dict[fx.Node, list[fx.Node]] = {}
        self._after: dict[fx.Node, list[fx.Node]] = {}
        for before, after in order_dependencies:
            self._before.setdefault(after, []).append(before)
            self._after.setdefault(before, []).append(after)

    def predecessors(self, node: fx.Node) -> list[fx.Node]:
        return [*inputs_of(node), *self._before.get(node, ())]

    def successors(self, node: fx.Node) -> list[fx.Node]:
        return [*node.users, *self._after.get(node, ())]

    def count_before(self, node: fx.Node) -> int:
        """Number of different predecessors."""
        inputs = inputs_of(node)  # different ones
        extra = self._before.get(node)
        return len(inputs) if extra is None else len({*inputs, *extra})

    def distinct_successors(self, node: fx.Node) -> Iterable[fx.Node]:
        """Each once, in their order."""
        extra = self._after.get(node)
        return node.users if extra is None else dict.fromkeys((*node.users, *extra))


@dataclass
class _Frontier:
    """One side of the search: nodes still to expand and the work found so far."""

    pending: list[fx.Node]
    seen: set[fx.Node]
    working: int = 0


def choose_slot(
    bucket: Bucket, numbers: Mapping[fx.Node, int], precedence: Precedence, idle: Set[fx.Node]
) -> int:
    """Where the merged start belongs: the number of the first member's start, or of the last's.

    The side that moves fewer working nodes wins; on a tie gathers go first and reductions last.
    Both searches stay inside the members' range and stop when the smaller one is known.
    """
    starts = [m.start for m in bucket.members]
    first, last = numbers[starts[0]], numbers[starts[-1]]
    hoist = _Frontier(list(starts), set(starts))
    sink = _Frontier(list(starts), set(starts))
    while (side := _next_to_expand(hoist, sink)) is not None:
        node = side.pending.pop()
        around = precedence.predecessors(node) if side is hoist else precedence.successors(node)
        for other in around:
            if other not in side.seen and first < numbers.get(other, -1) < last:
                side.seen.add(other)
                side.pending.append(other)
                side.working += other not in idle
    if hoist.working == sink.working:
        gather = bucket.key.kind is CollectiveKind.ALL_GATHER
        return first if gather else last
    return first if hoist.working < sink.working else last


def _next_to_expand(hoist: _Frontier, sink: _Frontier) -> _Frontier | None:
    """The side to search further, or None once it is certain which side is smaller.

    Certain means that a finished side's count is below what the other has found so far, or both
    are finished.  The counts compared are then exact, so that the answer does not depend on the
    order of the search or on nodes that do no work.
    """
    for one, other in ((hoist, sink), (sink, hoist)):
        if not one.pending and (not other.pending or one.working < other.working):
            return None
    if not hoist.pending:
        return sink
    if not sink.pending:
        return hoist
    return hoist if hoist.working <= sink.working else sink


@dataclass
class Placement:
    """Order keys of a graph under change: its old nodes by number, new nodes by the slot given."""

    numbers: Mapping[fx.Node, int]
    keys: dict[fx.Node, OrderKey] = field(default_factory=dict)
    _placed: int = 0

    def key(self, node: fx.Node) -> OrderKey:
        known = self.keys.get(node)
        return known if known is not None else (self.numbers[node], _IN_PLACE, 0)

    def place_new(self, nodes: Iterable[fx.Node], slot: int) -> None:
        """Puts nodes directly before what stood at ``slot``, in the order given, behind those that
        were put there before."""
        for node in nodes:
            self.keys[node] = (slot, _NEW, self._placed)
            self._placed += 1

    def hoist_inputs(self, start: fx.Node, precedence: Precedence, idle: Set[fx.Node]) -> None:
        """Lowers the keys of everything that must precede ``start`` but stands behind it.

        A node in front of it ends the search, unless it does no work: then it is as if its users
        read what it reads.
        """
        limit = self.key(start)
        pending, passed = precedence.predecessors(start), set[fx.Node]()
        while pending:
            node = pending.pop()
            key = self.key(node)
            if key > limit:
                self.keys[node] = (limit[0], _HOISTED, key[0])
                pending.extend(precedence.predecessors(node))
            elif node in idle and node not in passed:
                passed.add(node)
                pending.extend(precedence.predecessors(node))


def smallest_order(
    nodes: Iterable[fx.Node], precedence: Precedence, placement: Placement
) -> list[fx.Node] | None:
    """The topological order that is smallest by key, or None if there is a cycle.

    n log n in nodes, linear in edges.
    """
    waiting: dict[fx.Node, int] = {}
    ready: list[tuple[OrderKey, int, fx.Node]] = []
    key = placement.key
    for tie, node in enumerate(nodes):
        waiting[node] = count = precedence.count_before(node)
        if not count:
            ready.append((key(node), tie, node))
    heapq.heapify(ready)
    order: list[fx.Node] = []
    tie = len(waiting)
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for user in precedence.distinct_successors(node):
            waiting[user] = count = waiting[user] - 1
            if not count:
                tie += 1
                heapq.heappush(ready, (key(user), tie, user))
    return order if len(order) == len(waiting) else None


def check_order(graph: fx.Graph) -> None:
    """Every node stands behind what it reads, and no two have one name: what ``Graph.lint`` checks
    of an order, in a third of its time.

    Raises:
        RuntimeError: else.
    """
    above: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        if not above.issuperset(inputs_of(node)):
            raise RuntimeError(f"{node} reads what stands behind it, or is not in the graph")
        above.add(node)
        names.add(node.name)
    if len(names) < len(above):
        raise RuntimeError("two nodes have one name")


def relink(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Makes ``order``, a permutation of the graph's nodes, the order of the graph."""
    previous: fx.Node = graph._root
    for node in order:
        if previous.next is not node:
            previous.append(node)
        previous = node
