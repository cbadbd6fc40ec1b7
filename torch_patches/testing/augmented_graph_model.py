"""Checks :class:`AugmentedGraph` against a model that recomputes everything from scratch.

A :class:`Scenario` is a small DAG and a list of operations.  :func:`check_scenario` runs it on both
sides and compares after each step; a difference raises :class:`Mismatch`, whose text is a Python
program that shows it.  Used by ``test/inductor/test_augmented_graph.py`` (hypothesis draws the
scenarios) and ``tools/fuzz.py`` (a seed does).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph

Edge = tuple[int, int]

# Changes are drawn more often than questions, merges most: they are what moves the order.
_KINDS = (
    *("add_dependency", "add_dependency", "add_dependency", "remove_dependency"),
    *("merge", "merge", "merge", "merge_all", "can_merge", "has_path"),
    *("checkpoint", "rollback", "replace_new", "replace_existing", "add_node"),
)


@dataclass(frozen=True)
class Operation:
    """`picks` are reduced modulo what there is to pick from when the operation runs."""

    kind: str
    picks: tuple[int, int, int, int]


@dataclass(frozen=True)
class Scenario:
    """Nodes are 0 .. node_count - 1 in a topological order; new ones are named 100, 101, ..."""

    node_count: int
    edges: tuple[Edge, ...]
    operations: tuple[Operation, ...]


class Mismatch(AssertionError):
    """The graph and the model differ; the text is a program that shows it."""


def random_scenario(rng: random.Random, max_nodes: int = 14, max_operations: int = 24) -> Scenario:
    """Draw a DAG of any density and operations on it."""
    count = rng.randint(2, max_nodes)
    density = rng.choice((0.05, 0.15, 0.3))
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = tuple(pair for pair in pairs if rng.random() < density)
    operations = tuple(
        Operation(
            rng.choice(_KINDS),
            (rng.randrange(64), rng.randrange(64), rng.randrange(64), rng.randrange(64)),
        )
        for _ in range(rng.randint(1, max_operations))
    )
    return Scenario(count, edges, operations)


def minimise(scenario: Scenario) -> Scenario:
    """Leave out operations and edges, one by one, as long as the scenario still fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _one_less(scenario):
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def _one_less(scenario: Scenario) -> Iterator[Scenario]:
    for name in ("operations", "edges"):
        items = getattr(scenario, name)
        for i in range(len(items)):
            yield replace(scenario, **{name: items[:i] + items[i + 1 :]})


def check_scenario(scenario: Scenario) -> None:
    """Run `scenario` on graph and model and compare; raises :class:`Mismatch`."""
    driver = _Driver(scenario)
    try:
        driver.run()
    except Mismatch:
        raise
    except Exception as error:
        raise Mismatch(driver.program("observe(graph)", f"raised {error!r}", "a list")) from error


def fails(scenario: Scenario) -> bool:
    """Whether :func:`check_scenario` finds a difference."""
    try:
        check_scenario(scenario)
    except Mismatch:
        return True
    return False


class Model:
    """The same graph as plain sets of pairs; every question is answered by a search of it all."""

    def __init__(self, scenario: Scenario) -> None:
        self.rank = {node: node for node in range(scenario.node_count)}  # original order
        self.data = set(scenario.edges)
        self.extra: set[Edge] = set()
        self.group = {node: frozenset([node]) for node in self.rank}

    def nodes(self) -> list[int]:
        return sorted(self.rank, key=self.rank.__getitem__)

    def members(self, node: int) -> list[int]:
        return sorted(self.group[node], key=self.rank.__getitem__)

    def representative(self, node: int) -> int:
        return min(self.group[node], key=self.rank.__getitem__)

    def contracted(self) -> dict[int, list[int]]:
        """Representative -> representatives it leads to, in original order."""
        targets: dict[int, set[int]] = {self.representative(node): set() for node in self.rank}
        for before, after in self.data | self.extra:
            targets[self.representative(before)].add(self.representative(after))
        return {r: sorted(t, key=self.rank.__getitem__) for r, t in targets.items()}

    def reachable(self) -> dict[int, set[int]]:
        """Representative -> all representatives at the end of a path of one edge or more."""
        adjacent = self.contracted()
        found: dict[int, set[int]] = {}
        for start in adjacent:
            seen: set[int] = set()
            stack = list(adjacent[start])
            while stack:
                node = stack.pop()
                if node not in seen:
                    seen.add(node)
                    stack.extend(adjacent[node])
            found[start] = seen
        return found

    def is_acyclic(self) -> bool:
        return all(start not in seen for start, seen in self.reachable().items())

    def attempt(self, change: Callable[[Model], None]) -> Model | None:
        """A changed copy, or None if the change makes a cycle."""
        trial = copy.copy(self)
        trial.rank, trial.group = dict(self.rank), dict(self.group)
        trial.data, trial.extra = set(self.data), set(self.extra)
        change(trial)
        return trial if trial.is_acyclic() else None

    def unite(self, nodes: Iterable[int]) -> None:
        union = frozenset().union(*(self.group[node] for node in nodes))
        self.group.update(dict.fromkeys(union, union))

    def add(self, node: int, after: Iterable[int], before: Iterable[int]) -> None:
        self.rank[node] = 1 + max(self.rank.values(), default=-1)
        self.group[node] = frozenset([node])
        self.data |= {(n, node) for n in after} | {(node, n) for n in before}

    def substitute(self, old: int, new: int) -> None:
        """`new` takes over what `old` had, whether it is there already or not."""
        rank = self.rank.pop(old)
        self.rank.setdefault(new, rank)
        union = (self.group.pop(old) | self.group.get(new, frozenset()) | {new}) - {old}
        self.group.update(dict.fromkeys(union, union))
        for pairs in (self.data, self.extra):
            moved = {tuple(new if n == old else n for n in pair) for pair in pairs}
            pairs.clear()
            pairs.update(moved)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Call:
    """One call on the graph; replayed and printed, so it holds only literals."""

    name: str
    arguments: tuple[Any, ...]

    def on(self, graph: AugmentedGraph[int]) -> Any:
        return getattr(graph, self.name)(*self.arguments)

    def __str__(self) -> str:
        return f"graph.{self.name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True)
class _Saved:
    """What a rollback to `mark` has to bring back."""

    mark: int
    model: Model
    state: list[Any]
    kept: list[_Call]


@dataclass
class _Driver:
    """Applies operations to both sides."""

    scenario: Scenario
    graph: AugmentedGraph[int] = field(init=False)
    model: Model = field(init=False)
    calls: list[_Call] = field(default_factory=list)  # all of them, for the printed program
    kept: list[_Call] = field(default_factory=list)  # accepted and not rolled back
    saved: list[_Saved] = field(default_factory=list)
    new_nodes: int = 100

    def run(self) -> None:
        self.graph = AugmentedGraph(range(self.scenario.node_count), self.scenario.edges)
        self.model = Model(self.scenario)
        for operation in self.scenario.operations:
            self._apply(operation)
            self._compare_structure()
        self._compare_reachability()
        self._compare_with_replay()

    def _apply(self, operation: Operation) -> None:
        nodes = self.model.nodes()
        a, b, c, d = (nodes[pick % len(nodes)] for pick in operation.picks)
        model, name = self.model, operation.kind
        if name == "add_dependency":
            self._change(_Call(name, (a, b)), lambda m: m.extra.add((a, b)))
        elif name == "remove_dependency":
            self._remove(operation.picks[0], a, b)
        elif name == "merge":
            self._change(_Call(name, (a, b)), lambda m: m.unite((a, b)))
        elif name == "merge_all":
            self._change(_Call(name, ((a, b, c),)), lambda m: m.unite((a, b, c)))
        elif name == "can_merge":
            legal = model.attempt(lambda m: m.unite((a, b))) is not None
            self._expect(_Call(name, (a, b)), legal)
        elif name == "has_path":
            path = model.representative(b) in model.reachable()[model.representative(a)]
            self._expect(_Call(name, (a, b)), path)
        elif name == "checkpoint" or (name == "rollback" and not self.saved):
            self._checkpoint()
        elif name == "rollback":
            self._rollback(operation.picks[0])
        elif name == "replace_existing":
            change = (lambda m: None) if a == b else (lambda m: m.substitute(a, b))
            self._change(_Call("replace_node", (a, b)), change)
        elif name == "replace_new":
            new = self._new_node()
            self._change(_Call("replace_node", (a, new)), lambda m: m.substitute(a, new))
        else:
            new, after, before = self._new_node(), (a, b), (c, d)[: operation.picks[3] % 3]
            self._change(_Call(name, (new, after, before)), lambda m: m.add(new, after, before))

    def _new_node(self) -> int:
        self.new_nodes += 1
        return self.new_nodes - 1

    def _change(self, call: _Call, change: Callable[[Model], None]) -> None:
        """The graph has to accept what leaves the model acyclic, and only that."""
        changed = self.model.attempt(change)
        before = None if changed else observe(self.graph)
        self._expect(call, changed is not None)
        if changed is None:
            self._equal("observe(graph)", observe(self.graph), before)
        else:
            self.model = changed
            self.kept.append(call)

    def _remove(self, pick: int, a: int, b: int) -> None:
        """Mostly one that exists, by chance there are few of them."""
        extra = sorted(self.model.extra)
        if extra and pick % 4:
            a, b = extra[pick % len(extra)]
        self._expect(_Call("remove_dependency", (a, b)), (a, b) in self.model.extra)
        self.kept.append(self.calls[-1])
        self.model = self.model.attempt(lambda m: m.extra.discard((a, b))) or self.model

    def _checkpoint(self) -> None:
        self.calls.append(_Call("checkpoint", ()))
        mark = self.graph.checkpoint()
        state = observe(self.graph)
        self.saved.append(_Saved(mark, self.model, state, list(self.kept)))

    def _rollback(self, pick: int) -> None:
        del self.saved[pick % len(self.saved) + 1 :]
        saved = self.saved[-1]
        self._expect(_Call("rollback", (saved.mark,)), None)
        self._equal("observe(graph)", observe(self.graph), saved.state)
        self.model, self.kept = saved.model, list(saved.kept)

    def _compare_structure(self) -> None:
        """Sets, dependencies and a valid order."""
        graph, model = self.graph, self.model
        adjacent = model.contracted()
        order = graph.order()
        self._equal("sorted(graph.order())", sorted(order), sorted(adjacent))
        place = {node: i for i, node in enumerate(order)}
        wrong = [(a, b) for a in adjacent for b in adjacent[a] if place[a] >= place[b]]
        self._equal("[edges against graph.order()]", wrong, [])
        numbers = [graph.order_number(node) for node in order]
        self._equal("[graph.order_number(n) for n in graph.order()]", numbers, sorted(set(numbers)))
        self._equal("sorted(graph.extra_dependencies())", *map(sorted, self._extra()))
        for node in model.nodes():
            representative = model.representative(node)
            self._expect(_Call("members", (node,)), tuple(model.members(node)), log=False)
            self._expect(_Call("representative", (node,)), representative, log=False)
            self._expect(_Call("is_merged", (node,)), len(model.group[node]) > 1, log=False)
            self._expect(_Call("successors", (node,)), adjacent[representative], log=False)
            needs = [a for a in adjacent if representative in adjacent[a]]
            needs.sort(key=model.rank.__getitem__)
            self._expect(_Call("predecessors", (node,)), needs, log=False)

    def _extra(self) -> tuple[Iterable[Edge], Iterable[Edge]]:
        return self.graph.extra_dependencies(), self.model.extra

    def _compare_reachability(self) -> None:
        """All pairs; costly, so once for each scenario."""
        reachable = self.model.reachable()
        self._expect(_Call("has_cycle", ()), False, log=False)
        for a in self.model.nodes():
            for b in self.model.nodes():
                ends = self.model.representative(a), self.model.representative(b)
                path = ends[1] in reachable[ends[0]]
                self._expect(_Call("has_path", (a, b)), path, log=False)
                known = (a, b) in self.model.extra
                self._expect(_Call("has_dependency", (a, b)), known, log=False)

    def _compare_with_replay(self) -> None:
        """Refused and rolled back changes leave no trace: not even in order numbers."""
        fresh = AugmentedGraph(range(self.scenario.node_count), self.scenario.edges)
        for call in self.kept:
            call.on(fresh)
        replayed = "observe(graph) after the calls that were kept, " + "; ".join(
            map(str, self.kept)
        )
        self._equal(replayed, observe(fresh), observe(self.graph))

    def _expect(self, call: _Call, expected: Any, log: bool = True) -> None:
        if log:
            self.calls.append(call)
        try:
            actual = call.on(self.graph)
        except Exception as error:
            raise Mismatch(self.program(str(call), f"raised {error!r}", expected)) from error
        if actual != expected:
            raise Mismatch(self.program(str(call), repr(actual), expected))

    def _equal(self, what: str, actual: Any, expected: Any) -> None:
        if actual != expected:
            raise Mismatch(self.program(what, repr(actual), expected))

    def program(self, what: str, actual: str, expected: Any) -> str:
        module = AugmentedGraph.__module__
        lines = [
            f"from {module} import AugmentedGraph",
            f"from {observe.__module__} import observe",
            f"graph = AugmentedGraph(range({self.scenario.node_count}), {self.scenario.edges})",
            *map(str, self.calls),
            f"# {what}",
            f"#   is {actual}",
            f"#   must be {expected!r}",
        ]
        return "\n" + "\n".join(lines)


def observe(graph: AugmentedGraph[Any]) -> list[Any]:
    """All that can be seen of a graph without naming a node that is not in its order."""
    state: list[Any] = [graph.extra_dependencies()]
    for node in graph.order():
        neighbours = (graph.predecessors(node), graph.successors(node))
        state.append((node, graph.order_number(node), graph.members(node), neighbours))
    return state
