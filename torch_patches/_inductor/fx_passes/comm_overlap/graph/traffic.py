"""What a collective carries, judged by structure alone: parameters, gradients or something else.

    parameter:  placeholder -> cast/view/pad/slice/gather ... -> all-gather
    gradient:   reduce-scatter or all-reduce -> wait -> cast/view/slice/scale/reduce ... -> output

A collective on anything else (activations of tensor parallelism, expert routing) sits on the
critical path; merging it would move compute.  Structure cannot tell a saved activation from a
parameter; tags from the joint graph can (``passes/tagging.py``), and replace this judgement
wherever they exist.

Ranks with less data than others have zeros in its place, shaped like something that is there:
``new_zeros(chunk)``.  Neither does that read the chunk, nor do the zeros come from anywhere.
"""

from __future__ import annotations

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    has_tensor,
    reads_only_shape,
    traits_of,
    viewed_node,
    wrapped_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Traffic


def passes_through(node: fx.Node) -> bool:
    """Rearranges or casts what it is given, or communicates it; computes nothing."""
    traits = traits_of(node.target)
    if traits.is_control_deps:
        traits = traits_of((wrapped_node(node) or node).target)
        return traits.communicates or traits.is_copy
    return traits.communicates or traits.is_view or traits.is_cast or traits.is_copy


def makes_constant(node: fx.Node) -> bool:
    """Its result holds the data of no other node: :func:`reads_only_shape`, ``zeros``, ..."""
    traits = traits_of(node.target)
    return traits.is_creation or traits.is_shape_only


def data_inputs(node: fx.Node) -> list[fx.Node]:
    """Tensor inputs of a node without constants, padded or not; all of them if there is no other.

    A rank without data passes zeros on where others pass their part: that must look the same.
    """
    inputs = [n for n in node.all_input_nodes if has_tensor(n)]
    if len(inputs) < 2:
        return inputs
    return [n for n in inputs if not _is_constant(n)] or inputs


def _is_constant(node: fx.Node) -> bool:
    while not makes_constant(node):
        if not passes_through(node) or len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


def finishes_gradient(node: fx.Node) -> bool:
    """May stand between a gradient's reduction and the output: also scaling by a number or an
    input, and adding another gradient (accumulation, a tied parameter)."""
    if passes_through(node):
        return True
    traits = traits_of(node.target)
    name = traits.name if traits.namespace == "aten" else None
    if name in ("mul", "div"):
        inputs = node.all_input_nodes
        return len(inputs) == 1 or any(viewed_node(n).op == "placeholder" for n in inputs)
    return name == "add"


def _readers(node: fx.Node) -> list[fx.Node]:
    """Users but the output that read a node's data; where there are none, those of its shape: on a
    rank without data they stand for the readers that others have."""
    readers = [user for user in node.users if not reads_only_shape(user)]
    return [user for user in readers or node.users if user.op != "output"]


def _places_in_output(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number, among all values that leave the graph, of the first place where a node does."""
    leaving: list[object] = []
    for output in graph.find_nodes(op="output"):
        fx.node.map_aggregate(output.args, lambda value: leaving.append(value))
    places: dict[fx.Node, int] = {}
    for place, value in enumerate(leaving):
        if isinstance(value, fx.Node):
            places.setdefault(value, place)
    return places


class TrafficFinder:
    """Two linear sweeps over a graph, then constant-time answers."""

    def __init__(self, graph: fx.Graph) -> None:
        self._origin: dict[fx.Node, fx.Node | None] = {}
        self._terminal: dict[fx.Node, bool] = {}
        self._input_places = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
        self._output_places = _places_in_output(graph)
        for node in graph.nodes:
            self._origin[node] = self._find_origin(node)
        for node in reversed(graph.nodes):
            self._terminal[node] = self._ends_in_output(node)
            if self._terminal[node]:
                self._output_places[node] = self._first_place(node)

    def _first_place(self, node: fx.Node) -> int:
        """The first output that a node leads to, if it leads to outputs only."""
        places = [self._output_places[user] for user in _readers(node)]
        if node in self._output_places:
            places.append(self._output_places[node])
        return min(places)

    def _find_origin(self, node: fx.Node) -> fx.Node | None:
        """The one tensor placeholder that ``node`` is a rearrangement of, or None."""
        if node.op == "placeholder":
            return node if has_tensor(node) else None
        if node.op != "call_function" or not (passes_through(node) or reads_only_shape(node)):
            return None
        inputs = data_inputs(node)
        if len(inputs) == 1:
            return self._origin[inputs[0]]
        origins = list(dict.fromkeys(self._origin[n] for n in inputs))
        return origins[0] if len(origins) == 1 else None

    def _ends_in_output(self, node: fx.Node) -> bool:
        """All of :func:`_readers` finish a gradient; most nodes have a first user that does not."""
        terminal = self._terminal
        is_read = False
        for user in node.users:
            if traits_of(user.target).is_shape_only:
                continue
            is_read = True
            if user.op != "output" and not (terminal[user] and finishes_gradient(user)):
                return False
        return is_read or (bool(node.users) and all(terminal[user] for user in node.users))

    def is_at_the_edge(self, node: fx.Node) -> bool:
        """Only rearranges an input of the graph, or only leads to outputs."""
        return self._origin[node] is not None or self._terminal[node]

    def parameter_index(
        self, start: fx.Node, kind: CollectiveKind, waits: tuple[fx.Node, ...]
    ) -> int | None:
        """Place of the parameter among the graph's inputs, or of its gradient among the outputs.

        Gradients leave a graph in the order of its inputs, so both give one order.
        """
        if kind is CollectiveKind.ALL_GATHER:
            origins = {self._origin[n] for n in data_inputs(start)}
            origin = next(iter(origins)) if len(origins) == 1 else None
            return None if origin is None else self._input_places[origin]
        places = [self._output_places[w] for w in waits if self._terminal[w]]
        return min(places, default=None)

    def of(self, start: fx.Node, kind: CollectiveKind, waits: tuple[fx.Node, ...]) -> Traffic:
        """Traffic of the collective that ``start`` launches."""
        if kind is CollectiveKind.ALL_GATHER:
            payload = data_inputs(start)
            derived = bool(payload) and all(self._origin[n] is not None for n in payload)
            return Traffic.PARAMETER if derived else Traffic.OTHER
        if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE):
            ends = bool(waits) and all(self._terminal[w] for w in waits)
            return Traffic.GRADIENT if ends else Traffic.OTHER
        return Traffic.OTHER
