"""Makes Inductor keep a planned overlap: start, then the compute that hides it, then the wait.

Inductor schedules by data only, so compute that shall run under a collective may end up before its
start or behind its wait.  A node can be made to wait for others by wrapping it in ``control_deps``:

    start -> mm      the matmul is not run before the collective is started
    mm -> wait       the wait is not run before the matmul

Wrapping costs: what is wrapped is lowered by itself.  So there are as few edges as will do:

* anchors are single matmuls (kernels of their own), never ops that are fused, draw random numbers,
  have effects or return several tensors;
* what data, another edge or the order of starts implies is left out (transitive reduction).
  Inductor chains all collectives in graph order itself (``decide_global_ordering_of_comms``), so
  no start needs an edge to the next;
* where the matmul itself needs a wait that stands behind the start (that of its own parameter,
  mostly), that wait carries the edge and the matmul is not wrapped.

An edge says nothing that the order of the graph does not, so edges cannot close a cycle.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collective_kind,
    number_nodes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import is_heavy_compute
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    is_control_deps,
    op_name,
    reads_only_shape,
    viewed_node,
    wait_source,
    wrapped_node,
)

#: Edges that one search may visit.  A search that gives up keeps an edge that may be redundant,
#: which changes no order: it does not matter if ranks differ in it.
SEARCH_LIMIT = 1000

#: Inductor lowers other collectives (all-reduce, broadcast) to their in-place form, on a copy of
#: the payload if need be.  What depends on "the start's result" then depends on that payload, not
#: on the launch.  That is worth having: with the payload made, delaying the launch saves no memory.
_RESULT_IS_LAUNCH = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_to_all_single",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
#: Inductor looks for convolutions in the graph itself to choose layouts; it misses wrapped ones.
_NEVER_WRAPPED = frozenset({"convolution", "convolution_backward"})


@dataclass(frozen=True, eq=False)
class Overlap:
    """Compute that shall run between a collective's start and its first wait.

    Args:
        compute: nodes that stand between ``start`` and all ``waits`` in the graph; others are not
            ordered.
    """

    start: fx.Node
    compute: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Edge:
    """``after`` is run behind ``before``."""

    before: fx.Node
    after: fx.Node


@dataclass(frozen=True, eq=False)
class OverlapDependencies:
    """What :func:`plan_overlap_dependencies` decides.

    Args:
        edges: in the order of the nodes they end in.
        without_anchor: overlaps that get no edge: none of their compute may be an anchor.
        payload_held: overlaps whose start Inductor lowers in place (all-reduce, broadcast): not
            the launch but its payload is held in front of the compute.
        operations: graph edges visited.
    """

    edges: tuple[Edge, ...]
    without_anchor: tuple[Overlap, ...]
    payload_held: tuple[Overlap, ...]
    operations: int


def insert_overlap_dependencies(
    graph: fx.Graph,
    overlaps: Sequence[Overlap],
    is_anchor: Callable[[fx.Node], bool] = is_heavy_compute,
) -> int:
    """Adds the control dependencies that keep ``overlaps``; a second call adds none.

    To be the last change of a graph that goes to Inductor: wrapped nodes are new nodes with the
    old names and metadata.

    Args:
        graph: owned by a GraphModule, which gets a submodule for each wrapped node.
        is_anchor: compute that is a kernel of its own; see :func:`plan_overlap_dependencies`.

    Returns:
        The number of edges added.

    Raises:
        ValueError: the graph has no owning module.
    """
    if graph.owning_module is None:
        raise ValueError("control dependencies need a graph that a GraphModule owns")
    edges = plan_overlap_dependencies(graph, overlaps, is_anchor).edges
    if edges:
        _insert(graph, edges)
        graph.lint()
    return len(edges)


def plan_overlap_dependencies(
    graph: fx.Graph,
    overlaps: Sequence[Overlap],
    is_anchor: Callable[[fx.Node], bool] = is_heavy_compute,
) -> OverlapDependencies:
    """The fewest edges that keep ``overlaps``; changes nothing.

    Linear in the nodes between starts and waits, plus a bounded search for each edge considered.

    Args:
        is_anchor: says of compute whether Inductor never fuses it; ops that cannot be wrapped are
            left out whatever it says.
    """
    paths = _Paths(graph)
    candidates: set[tuple[fx.Node, fx.Node]] = set()
    weak: set[tuple[fx.Node, fx.Node]] = set()
    without_anchor: list[Overlap] = []
    payload_held: list[Overlap] = []
    for overlap in overlaps:
        anchors = _anchors(overlap, is_anchor, paths.numbers)
        if not anchors:
            without_anchor.append(overlap)
            continue
        held = _result_is_launch(overlap.start)
        if not held:
            payload_held.append(overlap)
        for anchor in paths.first_of(anchors):
            edge = (overlap.start, paths.carrier(overlap.start, anchor))
            (candidates if held else weak).add(edge)
        last = paths.last_of(anchors)
        candidates.update((anchor, wait) for wait in overlap.waits for anchor in last)
    return OverlapDependencies(
        edges=_reduced(candidates, weak, paths),
        without_anchor=tuple(without_anchor),
        payload_held=tuple(payload_held),
        operations=paths.operations,
    )


def _anchors(
    overlap: Overlap, is_anchor: Callable[[fx.Node], bool], numbers: dict[fx.Node, int]
) -> list[fx.Node]:
    """Compute of the overlap that can be ordered and stands inside of it, in graph order."""
    if not overlap.waits:
        return []
    begin, end = numbers[overlap.start], min(numbers[w] for w in overlap.waits)
    inside = (n for n in overlap.compute if begin < numbers[n] < end)
    return sorted((n for n in inside if can_wrap(n) and is_anchor(n)), key=numbers.__getitem__)


def can_wrap(node: fx.Node) -> bool:
    """Whether ``control_deps`` can hold compute: a pure aten op with one tensor as its result.

    Not random ops (all aten ops that take a Generator are tagged so), effects, ops that return a tuple, a list or nothing,
    higher-order ops (``auto_functionalized``, ``flex_attention``) and convolutions.
    """
    target = (wrapped_node(node) or node).target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    schema = target._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    return single and op_name(target) not in _NEVER_WRAPPED


def _result_is_launch(start: fx.Node) -> bool:
    return op_name((wrapped_node(start) or start).target) in _RESULT_IS_LAUNCH


def _reduced(
    candidates: Iterable[tuple[fx.Node, fx.Node]],
    weak: Iterable[tuple[fx.Node, fx.Node]],
    paths: _Paths,
) -> tuple[Edge, ...]:
    """Candidates that no path implies, in the order of their ends.

    Short ones first: a path around an edge consists of shorter ones, so each is decided when all
    that could imply it have been.  Weak ones (they hold a payload only) imply nothing.
    """
    numbers = paths.numbers

    def length(edge: tuple[fx.Node, fx.Node]) -> tuple[int, int]:
        return numbers[edge[1]] - numbers[edge[0]], numbers[edge[1]]

    kept: list[Edge] = []
    for before, after in sorted(candidates, key=length):
        if not paths.connected(before, after):
            paths.add(before, after)
            kept.append(Edge(before, after))
    kept += [Edge(*edge) for edge in sorted(weak, key=length) if not paths.connected(*edge)]
    return tuple(sorted(kept, key=lambda e: (numbers[e.after], numbers[e.before])))


@dataclass
class _Side:
    """One end of a search: nodes to expand, nodes found."""

    neighbours: Callable[[fx.Node], Iterable[fx.Node]]
    pending: list[fx.Node]
    seen: set[fx.Node] = field(default_factory=set)


class _Paths:
    """Paths through data, chosen edges and the chain of starts, bounded by graph positions."""

    def __init__(self, graph: fx.Graph) -> None:
        self.numbers = number_nodes(graph)
        self.operations = 0
        self._before: dict[fx.Node, list[fx.Node]] = {}
        self._after: dict[fx.Node, list[fx.Node]] = {}
        previous: fx.Node | None = None
        for node in graph.nodes:
            if collective_kind(node) is not None:
                if previous is not None:
                    self.add(previous, node)
                previous = node

    def add(self, before: fx.Node, after: fx.Node) -> None:
        self._after.setdefault(before, []).append(after)
        self._before.setdefault(after, []).append(before)

    def _predecessors(self, node: fx.Node) -> list[fx.Node]:
        return [*_read_nodes(node), *self._before.get(node, ())]

    def _successors(self, node: fx.Node) -> list[fx.Node]:
        return [*_readers(node), *self._after.get(node, ())]

    def connected(self, before: fx.Node, after: fx.Node) -> bool:
        """Whether there is a path; False too if the search gives up.

        Searched from both ends in turn, between their positions: the side that ends first decides.
        """
        low, high = self.numbers[before], self.numbers[after]
        forward = _Side(self._successors, [before], {before})
        backward = _Side(self._predecessors, [after], {after})
        limit = self.operations + SEARCH_LIMIT
        side, other = forward, backward
        while side.pending and self.operations < limit:
            for node in side.neighbours(side.pending.pop()):
                self.operations += 1
                if node in other.seen:
                    return True
                if low < self.numbers[node] < high and node not in side.seen:
                    side.seen.add(node)
                    side.pending.append(node)
            side, other = other, side
        return False

    def carrier(self, start: fx.Node, anchor: fx.Node) -> fx.Node:
        """The last wait behind ``start`` that ``anchor`` needs; without one, ``anchor`` itself."""
        low, limit = self.numbers[start], self.operations + SEARCH_LIMIT
        pending, seen = [anchor], {anchor}
        best: fx.Node | None = None
        while pending and self.operations < limit:
            for node in self._predecessors(pending.pop()):
                self.operations += 1
                if self.numbers[node] <= low or node in seen:
                    continue
                seen.add(node)
                pending.append(node)
                waits = wait_source(node) is not None
                if waits and (best is None or self.numbers[best] < self.numbers[node]):
                    best = node
        return anchor if best is None else best

    def first_of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Those (in graph order) that need none of the others."""
        reached: set[fx.Node] = set()
        wanted, first = set(nodes), []
        node, end = nodes[0], nodes[-1].next
        while node is not end:
            inputs = _read_nodes(node)
            self.operations += len(inputs)
            needs = any(i in reached for i in inputs)
            if needs or node in wanted:
                reached.add(node)
            if node in wanted and not needs:
                first.append(node)
            node = node.next
        return first

    def last_of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Those (in graph order) that none of the others needs."""
        reached: set[fx.Node] = set()
        wanted, last = set(nodes), []
        node, end = nodes[-1], nodes[0].prev
        while node is not end:
            readers = _readers(node)
            self.operations += len(readers)
            needed = any(r in reached for r in readers)
            if needed or node in wanted:
                reached.add(node)
            if node in wanted and not needed:
                last.append(node)
            node = node.prev
        return last[::-1]


def _is_read(node: fx.Node) -> bool:
    """Whether its value is data; a size orders nothing in the generated code."""
    return not isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _read_nodes(node: fx.Node) -> list[fx.Node]:
    """Inputs that a node cannot run before."""
    return [] if reads_only_shape(node) else [n for n in node.all_input_nodes if _is_read(n)]


def _readers(node: fx.Node) -> list[fx.Node]:
    """Users that cannot run before a node."""
    return [n for n in node.users if not reads_only_shape(n)] if _is_read(node) else []


def _insert(graph: fx.Graph, edges: Iterable[Edge]) -> None:
    """Wraps what edges end in; ``edges`` come in the order of those nodes."""
    numbers = number_nodes(graph)
    needed: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for edge in edges:
        result = _result(edge.before, numbers)
        if numbers[result] > numbers[edge.after]:
            edge.before.append(result)
        needed.setdefault(edge.after, OrderedSet()).add(result)
    for node in [n for n in needed if is_control_deps(n)]:
        known = node.args[0]
        assert isinstance(known, (tuple, list))
        node.args = ((*known, *needed.pop(node)), *node.args[1:])
    for node, dependencies in needed.items():
        if wait_source(node) is None:
            dependencies.update(_fusible_inputs(node))
    preserve_node_ordering(graph, needed)


def _result(node: fx.Node, numbers: dict[fx.Node, int]) -> fx.Node:
    """What stands for a node in a dependency: itself, or a part that is used of a list.

    torch before 2.13 ignores a dependency that is not one tensor.  Inductor drops a part that
    nobody uses, and dependencies on it.
    """
    if not isinstance(node.meta.get("val"), (list, tuple)):
        return node
    parts = [n for n in node.users if n.target is operator.getitem and n.users]
    return min(parts, key=numbers.__getitem__, default=node)


def _fusible_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that may be made by a fused kernel; they become dependencies too.

    torch gives a wrapped node's dependencies to every kernel that comes into being while it is
    lowered.  An input that is still a loop to be fused would be turned into a kernel then, and would
    be cut off from what it could be fused with.  Dependencies are turned into kernels before.
    """

    def is_made_by_kernel(source: fx.Node) -> bool:
        if source.op != "call_function" or wait_source(source) is not None:
            return False
        return collective_kind(source) is None and not is_heavy_compute(source)

    return [n for n in node.all_input_nodes if is_made_by_kernel(viewed_node(n))]
