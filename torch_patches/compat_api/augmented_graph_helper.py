"""torch's ``AugmentedGraphHelper`` over :class:`AugmentedGraph`.

torch's class may hold a cycle, and is asked whether it does; ours refuses whatever would close one.
So the dependencies and merge sets are kept here, as the public attributes that torch's has, and an
:class:`AugmentedGraph` follows them as far as they are acyclic.  What it refuses is the cycle.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.fx as fx
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import (
    Placement,
    Precedence,
    smallest_order,
)

log = logging.getLogger(__name__)

Pair = tuple[fx.Node, fx.Node]


@dataclass
class _View:
    """The graph as far as it is acyclic.

    Args:
        state: of the FX graph when it was read (:func:`_state`).
        refused: (before, after) dependencies that contradict the others.
        contradicts: these, or a merge set, close a cycle.
    """

    graph: AugmentedGraph[fx.Node]
    state: tuple[int, int]
    refused: list[Pair] = field(default_factory=list)
    contradicts: bool = False

    def depend(self, before: fx.Node, after: fx.Node) -> None:
        # Nothing stands behind the output.
        if before.op == "output" or not self.graph.add_dependency(before, after):
            self.refused.append((before, after))
            self.contradicts = True

    def merge(self, members: OrderedSet[fx.Node]) -> None:
        self.contradicts |= not self.graph.merge_all(members)


def _state(graph: fx.Graph) -> tuple[int, int]:
    """Nodes there are, and names ever given: changes with every node that is added or erased, also
    where one takes the place of another; constant time."""
    return len(graph.nodes), _compat.names_given(graph)


class AugmentedGraphHelper:
    """Dependencies and merge sets beside those of an FX graph.

    Attributes (to be read; methods change them):
        graph: the FX graph, read anew when nodes were added or erased.  Whoever changes what nodes
            read, and nothing else, calls ``transfer_erased_node_deps({})`` before asking again.
        merge_sets: node -> the set it is merged in, itself included.
        extra_deps, extra_uses: node -> what it waits for, and what waits for it, beyond data.
    """

    def __init__(self, graph: fx.Graph, node_ancestors: object | None = None) -> None:
        """
        Args:
            graph: in any order; nodes made later may be named as replacements.
            node_ancestors: torch's shortcut for searches.  Ours need none: kept, not read.
        """
        self.graph = graph
        self.node_ancestors = node_ancestors
        self.merge_sets: dict[fx.Node, OrderedSet[fx.Node]] = {
            node: OrderedSet([node]) for node in graph.nodes
        }
        self.extra_deps: dict[fx.Node, OrderedSet[fx.Node]] = defaultdict(OrderedSet)
        self.extra_uses: dict[fx.Node, OrderedSet[fx.Node]] = defaultdict(OrderedSet)
        self._view: _View | None = None

    # -- changes ---------------------------------------------------------------------------------

    def add_extra_dep(self, *, n: fx.Node, dep: fx.Node) -> None:
        """``n`` waits for ``dep``; a contradiction is kept, for :meth:`has_cycle` to tell."""
        if dep in self.extra_deps[n]:
            return
        self.extra_deps[n].add(dep)
        self.extra_uses[dep].add(n)
        for node in (dep, n):
            if node not in self.merge_sets:
                self.merge_sets[node] = OrderedSet([node])
                self._view = None
        if self._view is not None:
            self._view.depend(dep, n)

    def remove_extra_dep(self, *, n: fx.Node, dep: fx.Node) -> None:
        """Takes it back, if there is one; a data dependency between the two stays."""
        if not self._forget(dep, n):
            return
        if self._view is not None and not self._view.contradicts:
            self._view.graph.remove_dependency(dep, n)
        else:
            self._view = None

    def _forget(self, before: fx.Node, after: fx.Node) -> bool:
        """Whether there was such a dependency."""
        waits_for = self.extra_deps.get(after)
        if not waits_for or before not in waits_for:
            return False
        waits_for.remove(before)
        self.extra_uses[before].discard(after)
        return True

    def merge_to_set(self, existing_node: fx.Node, new_node: fx.Node) -> None:
        """Puts ``new_node``, which must not be merged yet, into the other's set.

        Raises:
            AssertionError: it shares a set already.
        """
        existing, new = self.merge_sets[existing_node], self.merge_sets[new_node]
        assert len(new) == 1, f"{new_node} is merged with {len(new) - 1} other nodes already"
        if new is existing:
            return
        existing.update(new)
        self.merge_sets[new_node] = existing
        if self._view is not None:
            self._view.merge(existing)

    def unmerge_node(self, node: fx.Node) -> None:
        """Takes a node out of its set."""
        old = self.merge_sets[node]
        if len(old) == 1:
            return
        old.remove(node)
        self.merge_sets[node] = OrderedSet([node])
        self._view = None

    # -- questions -------------------------------------------------------------------------------

    def get_merged_deps(self, node: fx.Node) -> OrderedSet[fx.Node]:
        """What the node's set waits for directly, by data or otherwise."""
        return OrderedSet(
            needed
            for member in self.merge_sets[node]
            for needed in (*member.all_input_nodes, *self.extra_deps.get(member, ()))
        )

    def has_cycle(self) -> bool:
        """Whether data, dependencies and merge sets contradict each other."""
        return self._current().contradicts

    def has_path(self, source: fx.Node, target: fx.Node) -> bool:
        """Whether ``target``'s set waits for ``source``'s, by whatever way.

        Raises:
            AssertionError: the two are in one set.
        """
        assert self.merge_sets[source] is not self.merge_sets[target], (
            f"{source} and {target} are merged"
        )
        view = self._current()
        if not view.contradicts:
            return view.graph.has_path(source, target)
        wanted = self.merge_sets[source]
        return any(node in wanted for node in self._waited_for(target))

    def _waited_for(self, target: fx.Node) -> Iterator[fx.Node]:
        """All that the set of ``target`` waits for, also around a cycle."""
        seen, pending = {target}, [target]
        while pending:
            for node in self.get_merged_deps(pending.pop()):
                if node not in seen:
                    seen.add(node)
                    pending.append(node)
                    yield node

    def get_all_extra_deps(self) -> dict[fx.Node, OrderedSet[fx.Node]]:
        """A copy of what waits for something beyond data."""
        return {node: OrderedSet(deps) for node, deps in self.extra_deps.items() if deps}

    def _current(self) -> _View:
        if self._view is None or self._view.state != _state(self.graph):
            self._view = self._read()
        return self._view

    def _read(self) -> _View:
        """Merge sets come first: of what contradicts, dependencies can be given up, merges cannot."""
        nodes = list(dict.fromkeys((*self.graph.nodes, *self.merge_sets)))  # some are erased by now
        numbers = {node: place for place, node in enumerate(nodes)}
        order = smallest_order(nodes, Precedence(()), Placement(numbers))
        assert order is not None, "the graph itself has a cycle"
        data = ((before, after) for after in order for before in after.all_input_nodes)
        view = _View(AugmentedGraph(order, data), _state(self.graph))
        for members in {id(m): m for m in self.merge_sets.values() if len(m) > 1}.values():
            view.merge(members)
        for node, deps in self.extra_deps.items():
            for dep in deps:
                view.depend(dep, node)
        return view

    # -- after a rewrite -------------------------------------------------------------------------

    def transfer_erased_node_deps(self, erased_to_new: Mapping[fx.Node, fx.Node | None]) -> None:
        """Gives the dependencies of erased nodes to what took their place.

        One member stands for its whole merge set.  None: nothing took its place, and its
        dependencies are dropped.  So is one between two of the new nodes, or to another, that would
        close a cycle: new nodes are ordered by what they are made of.
        """
        moved = {
            member: new for old, new in erased_to_new.items() for member in self.merge_sets[old]
        }
        pairs = [(dep, node) for node, deps in self.extra_deps.items() for dep in deps]
        touched = [pair for pair in pairs if pair[0] in moved or pair[1] in moved]
        for pair in touched:
            self._forget(*pair)
        for old in moved:
            self.extra_deps.pop(old, None)
            self.extra_uses.pop(old, None)
            del self.merge_sets[old]
        for new in moved.values():
            known = self.merge_sets.get(new) if new is not None else None
            if new is not None and (known is None or not moved.keys().isdisjoint(known)):
                self.merge_sets[new] = OrderedSet([new])
        self._view = None
        for dep, node in touched:
            before, after = moved.get(dep, dep), moved.get(node, node)
            if before is not None and after is not None and before is not after:
                self._add_if_acyclic(before, after)

    def _add_if_acyclic(self, before: fx.Node, after: fx.Node) -> None:
        if self.merge_sets[before] is not self.merge_sets[after] and not self.has_path(
            after, before
        ):
            self.add_extra_dep(n=after, dep=before)

    def remove_erased_extra_deps(self) -> None:
        """Forgets dependencies of nodes that are no longer in the graph."""
        gone = [
            (before, after)
            for after, waits_for in self.extra_deps.items()
            for before in waits_for
            if before._erased or after._erased
        ]
        for before, after in gone:
            self.remove_extra_dep(n=after, dep=before)

    def check_and_maybe_autofix_cyclic_extra_deps(self, *, autofix: bool = False) -> None:
        """Looks for dependencies that contradict the graph, its merge sets, or earlier ones.

        Args:
            autofix: take them back, with a warning, instead of raising.

        Raises:
            RuntimeError: there are some; nothing is changed.
        """
        refused = self._read().refused
        if not refused:
            return
        names = ", ".join(f"{after} behind {before}" for before, after in refused)
        text = f"{len(refused)} extra dependencies close a cycle: {names}"
        if not autofix:
            raise RuntimeError(f"{text}; autofix=True takes them back")
        log.warning("%s; they are taken back", text)
        for before, after in refused:
            self.remove_extra_dep(n=after, dep=before)
