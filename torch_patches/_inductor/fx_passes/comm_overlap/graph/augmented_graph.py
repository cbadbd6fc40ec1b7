"""A DAG that answers "may these be merged, may this wait for that?" while a plan is being made.

Three things are held apart and searched together:

* *data* dependencies: what the graph computes, never removed;
* *extra* dependencies: what a schedule adds, for example "this gather starts behind that matmul".
  Removing one never removes an equal data dependency;
* *merge sets*: collectives that become one bucket.  A set behaves as one node with the
  dependencies and uses of all its members.

For example, two gathers may become one bucket unless one needs the other's result::

    gather_a -> matmul -> gather_b        gather_c

    graph.merge(gather_a, gather_b)       # False: the bucket would wait for its own result
    graph.merge(gather_a, gather_c)       # True
    graph.add_dependency(matmul, gather_c)  # False: gather_c is gather_a's set by now

Every change keeps the contracted graph acyclic, or is refused and changes nothing.  A topological
order of the sets is maintained, so that a search looks only between the places of its two ends.
The order is repaired as in Pearce and Kelly, "A Dynamic Topological Sort Algorithm for Directed
Acyclic Graphs", JEA 2006: only the region between the two ends of a change is affected.  Unlike
there, one side of the region is enough.  Say that `late` has to come to `early`'s place or the
other way round: either what lies behind `early` in the region moves behind `late`, or what
`late` needs in the region moves in front of `early`.  Both sides are explored edge by edge in turn
and the one that is finished first decides, which makes it cheap to merge parameter gathers (nearly
nothing before them) and terminal reduce-scatters (nothing behind them), however much lies on their
other side.  Knowing only one side there are no freed places to reuse; the moved sets take new ones
from an :class:`OrderList`.

Nodes may be any hashables.  Inside they are ints in the original order, and nothing that decides
or is returned depends on hashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch_patches._inductor.fx_passes.comm_overlap.graph.order_list import OrderList
from torch_patches._inductor.fx_passes.comm_overlap.graph.trail import Trail

N = TypeVar("N", bound=Hashable)

_DATA = 1
_EXTRA = 2
_Edges = list[dict[int, int]]  # node -> neighbour -> _DATA | _EXTRA, 0 once it has been removed


@dataclass(frozen=True)
class _Region:
    """The half of an affected region that has to make way, without the two ends."""

    behind_early: bool  # else it is the half in front of the late end
    sets: tuple[int, ...]  # in topological order


class AugmentedGraph(Generic[N]):
    """Incremental reachability over data dependencies, extra dependencies and merge sets.

    R below is the number of edges a search visits: at most twice those of the smaller of the two
    sides that lie between its ends in the order.  Unknown nodes raise KeyError.
    """

    def __init__(self, nodes: Iterable[N], data_dependencies: Iterable[tuple[N, N]]) -> None:
        """Nodes in a topological order and (before, after) pairs; O(nodes + pairs).

        Raises ValueError for a node given twice and for a pair that names an unknown node or
        contradicts the order.
        """
        self._nodes: list[N] = list(nodes)
        self._ids: dict[N, int] = {node: i for i, node in enumerate(self._nodes)}
        if len(self._ids) != len(self._nodes):
            raise ValueError("a node is given twice")
        count = len(self._nodes)
        self._successors: _Edges = [{} for _ in range(count)]
        self._predecessors: _Edges = [{} for _ in range(count)]
        # A set is named by one of its nodes, not always its first: the larger set's name survives.
        self._set_of: list[int] = list(range(count))
        self._members: list[list[int]] = [[i] for i in range(count)]
        self._first: list[int] = list(range(count))
        self._trail = Trail()
        self._order = OrderList(range(count), self._trail)
        self._marks: dict[int, int] = {}  # checkpoint -> length of the trail
        self._marks_given = 0
        self._visited = 0
        for before, after in data_dependencies:
            if before not in self._ids or after not in self._ids:
                raise ValueError(f"dependency {before!r} -> {after!r} names an unknown node")
            source, target = self._ids[before], self._ids[after]
            if source >= target:
                raise ValueError(f"dependency {before!r} -> {after!r} contradicts the node order")
            self._successors[source][target] = _DATA
            self._predecessors[target][source] = _DATA

    @property
    def operations(self) -> int:
        """Edges and members visited plus places given in the order, so far; never goes back."""
        return self._visited + self._order.moves

    # Dependencies

    def add_dependency(self, before: N, after: N) -> bool:
        """Add an extra dependency; False, and no change, if it would close a cycle.

        Both ends in one merge set are a cycle.  Adding it again changes nothing.  O(R log R).
        """
        return self._connect(self._ids[before], self._ids[after], _EXTRA)

    def remove_dependency(self, before: N, after: N) -> bool:
        """Remove the extra dependency between exactly these two nodes; False if there is none."""
        source, target = self._ids[before], self._ids[after]
        kinds = self._successors[source].get(target, 0)
        if not kinds & _EXTRA:
            return False
        self._set_edge(source, target, kinds & ~_EXTRA)
        return True

    def has_dependency(self, before: N, after: N) -> bool:
        """Whether there is an *extra* dependency between exactly these two nodes."""
        kinds = self._successors[self._ids[before]].get(self._ids[after], 0)
        return bool(kinds & _EXTRA)

    def extra_dependencies(self) -> list[tuple[N, N]]:
        """All extra dependencies as (before, after), sorted by original node order; O(edges)."""
        return [
            (self._nodes[source], self._nodes[target])
            for source, edges in enumerate(self._successors)
            for target in sorted(edges)
            if edges[target] & _EXTRA
        ]

    def has_path(self, source: N, target: N) -> bool:
        """Whether a path leads from `source`'s set to `target`'s, another one.  O(R)."""
        early, late = self._set(source), self._set(target)
        if self._order.label[early] >= self._order.label[late]:
            return False
        return self._separate(early, late) is None

    def predecessors(self, node: N, limit: int | None = None) -> list[N]:
        """Representatives of the sets that `node`'s set needs directly, in original order.

        O(members + edges), or O(`limit`): then some are left out of a set, or node, with more.
        """
        return self._adjacent(node, self._predecessors, limit)

    def successors(self, node: N, limit: int | None = None) -> list[N]:
        """Representatives of the sets that need `node`'s set directly; see `predecessors`."""
        return self._adjacent(node, self._successors, limit)

    # Merge sets

    def can_merge(self, a: N, b: N) -> bool:
        """Whether :meth:`merge` would succeed; changes nothing.  O(R)."""
        return not self.has_path(a, b) and not self.has_path(b, a)

    def merge(self, a: N, b: N) -> bool:
        """Unite the sets of `a` and `b`; False, and no change, if a path joins them.

        True without a change if they are one set.  O(R log R + smaller set).
        """
        early, late = sorted((self._set(a), self._set(b)), key=self._order.label.__getitem__)
        if early == late:
            return True
        region = self._separate(early, late)
        if region is None:
            return False
        if region.behind_early:
            self._order.move_behind(late, region.sets)
            self._unite(late, early)
        else:
            self._order.move_in_front(early, region.sets)
            self._unite(early, late)
        return True

    def merge_all(self, nodes: Iterable[N]) -> bool:
        """Unite the sets of all `nodes`, or refuse and change nothing.

        Merging them one by one loses nothing: more members only add paths, so a set that ends
        legal was legal at every step.
        """
        known = [self._nodes[self._ids[node]] for node in nodes]  # KeyError before any change
        length = len(self._trail)
        if all(self.merge(known[0], node) for node in known):
            return True
        self._trail.undo_to(length)
        return False

    def members(self, node: N) -> tuple[N, ...]:
        """The nodes of `node`'s set, itself included, in original order."""
        return tuple(self._nodes[i] for i in sorted(self._members[self._set(node)]))

    def representative(self, node: N) -> N:
        """The member of `node`'s set that is first in original order; O(1)."""
        return self._nodes[self._first[self._set(node)]]

    def is_merged(self, node: N) -> bool:
        """Whether `node` shares its set with another node."""
        return len(self._members[self._set(node)]) > 1

    # Order

    def order(self) -> list[N]:
        """The representatives of all sets in the current topological order."""
        return [self._nodes[self._first[item]] for item in self._order]

    def order_number(self, node: N) -> int:
        """Place of `node`'s set: smaller is earlier.  Only comparisons mean anything; gaps do not.

        A later change may renumber sets that it does not move past each other.
        """
        return self._order.label[self._set(node)]

    def has_cycle(self) -> bool:
        """Kahn's algorithm on the contracted graph, no trust in the order; O(nodes + edges)."""
        waits_for = {
            item: sum(
                kinds > 0 for i in self._members[item] for kinds in self._predecessors[i].values()
            )
            for item in self._order
        }
        ready = [item for item, count in waits_for.items() if count == 0]
        for item in ready:  # grows while it is read
            for node in self._members[item]:
                for target, kinds in self._successors[node].items():
                    if kinds:  # a removed edge may lead to a dropped node
                        user = self._set_of[target]
                        waits_for[user] -= 1
                        if waits_for[user] == 0:
                            ready.append(user)
        return len(ready) < len(waits_for)

    # Changes of the node list

    def add_node(self, node: N, after: Iterable[N] = (), before: Iterable[N] = ()) -> bool:
        """Add a node that needs `after` and is needed by `before` (data dependencies).

        It comes last in original order.  False, and no change, if that closes a cycle; ValueError
        if `node` is in the graph.
        """
        if node in self._ids:
            raise ValueError(f"{node!r} is in the graph already")
        needs, users = [self._ids[n] for n in after], [self._ids[n] for n in before]
        length, new = len(self._trail), len(self._nodes)
        self._trail.insert(self._ids, node, new)
        self._trail.extend(self._nodes, [node])
        self._trail.extend(self._successors, [{}])
        self._trail.extend(self._predecessors, [{}])
        self._trail.extend(self._set_of, [new])
        self._trail.extend(self._members, [[new]])
        self._trail.extend(self._first, [new])
        self._order.append(new)
        legal = all(self._connect(n, new, _DATA) for n in needs)
        legal = legal and all(self._connect(new, n, _DATA) for n in users)
        if not legal:
            self._trail.undo_to(length)
        return legal

    def replace_node(self, old: N, new: N) -> bool:
        """Drop `old`; `new` takes over its dependencies and its place in its merge set.

        A `new` that is not in the graph also takes its place in original order, in O(1).  One that
        is keeps its own and joins the two sets; False, and no change, if a path joins them.
        """
        source, target = self._ids[old], self._ids.get(new)
        if source == target:
            return True
        if target is None:
            self._trail.drop(self._ids, old)
            self._trail.insert(self._ids, new, source)
            self._trail.write(self._nodes, source, new)
            return True
        if not self.merge(old, new):
            return False
        self._hand_over(source, target)
        item = self._set_of[target]
        self._trail.write(self._members, item, [i for i in self._members[item] if i != source])
        self._trail.write(self._first, item, min(self._members[item]))
        self._trail.drop(self._ids, old)
        return True

    # Undo

    def checkpoint(self) -> int:
        """A mark for :meth:`rollback`; O(1).  Checkpoints nest."""
        self._marks_given += 1
        self._marks[self._marks_given] = len(self._trail)
        return self._marks_given

    def rollback(self, mark: int) -> None:
        """Undo every change since `mark`; O(changes undone).

        `mark` stays good for another rollback, later ones become stale.  A stale one raises
        ValueError.
        """
        if mark not in self._marks:
            raise ValueError(f"checkpoint {mark} is stale or was never given")
        while next(reversed(self._marks)) != mark:
            self._marks.popitem()
        self._trail.undo_to(self._marks[mark])

    # Inside: ints only

    def _set(self, node: N) -> int:
        return self._set_of[self._ids[node]]

    def _adjacent(self, node: N, edges: _Edges, limit: int | None) -> list[N]:
        found: set[int] = set()
        for other in itertools.islice(self._walk(self._members[self._set(node)], edges), limit):
            self._visited += 1
            if other is not None:
                found.add(self._first[self._set_of[other]])
        return [self._nodes[i] for i in sorted(found)]

    @staticmethod
    def _walk(members: list[int], edges: _Edges) -> Iterator[int | None]:
        """The other end of each edge, None for each member and each removed edge."""
        for member in members:
            yield None
            for other, kinds in edges[member].items():
                yield other if kinds else None

    def _connect(self, source: int, target: int, kind: int) -> bool:
        """Add an edge and repair the order; False, and no change, if it closes a cycle."""
        before, after = self._set_of[source], self._set_of[target]
        if before == after:
            return False
        if self._order.label[before] > self._order.label[after]:
            region = self._separate(after, before)
            if region is None:
                return False
            if region.behind_early:
                self._order.move_behind(before, (after, *region.sets))
            else:
                self._order.move_in_front(after, (*region.sets, before))
        self._set_edge(source, target, self._successors[source].get(target, 0) | kind)
        return True

    def _set_edge(self, source: int, target: int, kinds: int) -> None:
        # Removed edges stay with value 0: deleting one and undoing that would put it last in its
        # dict, and the next search would take another course than without the two.
        old = self._successors[source].get(target)
        if old is None:
            self._trail.insert(self._successors[source], target, kinds)
            self._trail.insert(self._predecessors[target], source, kinds)
        elif old != kinds:
            self._trail.write(self._successors[source], target, kinds)
            self._trail.write(self._predecessors[target], source, kinds)

    def _hand_over(self, old: int, new: int) -> None:
        """Move all edges of `old` to `new`, a member of the same set."""
        for target, kinds in self._successors[old].items():
            if kinds:
                self._set_edge(new, target, self._successors[new].get(target, 0) | kinds)
                self._set_edge(old, target, 0)
        for source, kinds in self._predecessors[old].items():
            if kinds:
                self._set_edge(source, new, self._successors[source].get(new, 0) | kinds)
                self._set_edge(source, old, 0)

    def _unite(self, place: int, other: int) -> None:
        """Unite two sets at the first one's place; the smaller one is relabelled."""
        keep, drop = place, other
        if len(self._members[keep]) < len(self._members[drop]):
            keep, drop = drop, keep
            self._order.move_behind(place, (keep,))
        self._order.remove(drop)
        for node in self._members[drop]:
            self._trail.write(self._set_of, node, keep)
        self._trail.extend(self._members[keep], self._members[drop])
        self._trail.write(self._first, keep, min(self._first[keep], self._first[drop]))

    def _separate(self, early: int, late: int) -> _Region | None:
        """None if a path leads from `early` to `late`, else the half region found first; O(R).

        Two searches take turns of one edge: uses of `early` and needs of `late`.  One that ends
        without meeting the other has seen all it can reach, so there is no path.
        """
        uses, needs = {early}, {late}
        low, high = self._order.label[early], self._order.label[late]
        forward = self._explore(uses, needs, self._successors, low, high)
        backward = self._explore(needs, uses, self._predecessors, low, high)
        while True:
            for search, seen, end in ((forward, uses, early), (backward, needs, late)):
                met = next(search, None)
                if met:
                    return None
                if met is None:
                    sets = sorted(seen - {end}, key=self._order.label.__getitem__)
                    return _Region(search is forward, tuple(sets))

    def _explore(
        self, seen: set[int], others: set[int], edges: _Edges, low: int, high: int
    ) -> Iterator[bool]:
        """Grow `seen` breadth first between two labels; yields after each edge: `others` met?"""
        set_of, members, label = self._set_of, self._members, self._order.label
        frontier = list(seen)
        for item in frontier:  # grows while it is read
            for node in members[item]:
                for other, kinds in edges[node].items():
                    self._visited += 1
                    neighbour = set_of[other]
                    if kinds and low <= label[neighbour] <= high and neighbour not in seen:
                        seen.add(neighbour)
                        frontier.append(neighbour)
                        yield neighbour in others
                    else:
                        yield False
