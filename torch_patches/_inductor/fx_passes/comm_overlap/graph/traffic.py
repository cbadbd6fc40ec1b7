"""What a collective carries, judged by structure alone: parameters, gradients or something else.

    parameter:  an input -> cast/view/pad/slice/gather ... -> all-gather
    gradient:   reduce-scatter or all-reduce -> wait -> cast/view/slice/scale/reduce ... -> output

A collective on anything else (activations of tensor parallelism, expert routing) sits on the
critical path; merging it would move compute.  Structure cannot tell a saved activation from a
parameter; tags from the joint graph can (``passes/tagging.py``), and replace this judgement
wherever they exist.

Ranks with less data than others have zeros in its place, shaped like something that is there:
``new_zeros(chunk)``.  Neither does that read the chunk, nor do the zeros come from anywhere.
"""

from __future__ import annotations

from collections.abc import Set

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    attribute_of,
    has_tensor,
    inputs_of,
    reads_only_shape,
    traits_of,
    viewed_node,
    wrapped_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Traffic

_OVERWRITES = frozenset({"copy", "copy_"})


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
    inputs = [n for n in inputs_of(node) if has_tensor(n)]
    if len(inputs) < 2:
        return inputs
    return [n for n in inputs if not _is_constant(n)] or inputs


def only_data(node: fx.Node) -> fx.Node | None:
    """The one tensor whose data a node is given, once; None where it is given several.

    A tensor that is joined to itself is several: a view in front of one of them makes it two.
    """
    inputs = data_inputs(node)
    if len(inputs) != 1:
        return None
    joined = node.args[0] if node.args else None
    twice = isinstance(joined, (list, tuple)) and joined.count(inputs[0]) > 1
    return None if twice else inputs[0]


def _is_constant(node: fx.Node) -> bool:
    while not makes_constant(node):
        inputs = inputs_of(node)
        if not passes_through(node) or len(inputs) != 1:
            return False
        node = next(iter(inputs))
    return True


def is_overwritten(node: fx.Node, user: fx.Node) -> bool:
    """``user`` writes another tensor's values over all of ``node`` and reads none of its own."""
    traits = traits_of(user.target)
    if traits.namespace != "aten" or traits.name not in _OVERWRITES or len(user.args) < 2:
        return False
    return user.args[0] is node and user.args[1] is not node


def finishes_gradient(node: fx.Node) -> bool:
    """May stand between a gradient's reduction and the output: also scaling by a number, itself or
    an input, adding another gradient (accumulation, a tied parameter), and writing it over what it was
    made from, as DDP's reducer does."""
    if passes_through(node):
        return True
    traits = traits_of(node.target)
    name = traits.name if traits.namespace == "aten" else None
    if name in ("mul", "div"):
        sources = {viewed_node(n) for n in inputs_of(node)}
        return len(sources) == 1 or any(n.op == "placeholder" for n in sources)
    return name == "add" or name in _OVERWRITES


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


def _held_parameters(graph: fx.Graph) -> list[fx.Node]:
    """Parameters that the graph's module holds itself, as ``torch.export``'s modules do; other
    attributes are constants."""
    held = graph.find_nodes(op="get_attr")
    return [node for node in held if isinstance(attribute_of(node), torch.nn.Parameter)]


class TrafficFinder:
    """Two linear sweeps over a graph, then constant-time answers.

    Each looks only at what it can still reach, from the inputs down and from the output up.
    """

    def __init__(self, graph: fx.Graph) -> None:
        inputs = [*graph.find_nodes(op="placeholder"), *_held_parameters(graph)]
        self._input_places = {n: i for i, n in enumerate(inputs)}
        self._output_places = _places_in_output(graph)
        #: The one tensor input that a node is a rearrangement of; others are not in it.
        self._origin: dict[fx.Node, fx.Node] = {n: n for n in inputs if has_tensor(n)}
        #: Nodes that lead to outputs only.
        self._terminal: set[fx.Node] = set()
        self._find_origins(graph)
        self._find_terminals(graph)

    def _find_origins(self, graph: fx.Graph) -> None:
        origins = self._origin
        below = {user for node in origins for user in node.users}
        for node in graph.nodes:
            if node not in below or not (passes_through(node) or reads_only_shape(node)):
                continue
            inputs = data_inputs(node)
            origin = origins.get(inputs[0]) if inputs else None
            if origin is not None and all(origins.get(n) is origin for n in inputs[1:]):
                origins[node] = origin
                below.update(node.users)

    def _find_terminals(self, graph: fx.Graph) -> None:
        terminal, places = self._terminal, self._output_places
        finishing: set[fx.Node] = set()  # terminal ones that finish a gradient, and the output
        above: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node.op == "output":
                finishing.add(node)
                above.update(inputs_of(node))
            elif node in above and (readers := self._finishing_readers(node, finishing)):
                terminal.add(node)
                places[node] = min([places[n] for n in (node, *readers) if n in places])
                above.update(inputs_of(node))
                if finishes_gradient(node):
                    finishing.add(node)

    def _finishing_readers(self, node: fx.Node, finishing: Set[fx.Node]) -> list[fx.Node]:
        """Who reads a node's data; empty if one of them does not finish a gradient.  Where nobody
        does, those who read its shape: on a rank without data they stand for the readers that
        others have."""
        readers = []
        for user in node.users:
            if user in finishing and not is_overwritten(node, user):
                readers.append(user)
            elif not (reads_only_shape(user) or is_overwritten(node, user)):  # true of most nodes
                return []
        if not readers and self._terminal.issuperset(node.users):
            return list(node.users)
        return readers

    def is_at_the_edge(self, node: fx.Node) -> bool:
        """Only rearranges an input of the graph, or only leads to outputs."""
        return self.rearranges_an_input(node) or self.leads_to_outputs(node)

    def rearranges_an_input(self, node: fx.Node) -> bool:
        """It holds the data of one input of the graph and nothing else."""
        return node in self._origin

    def leads_to_outputs(self, node: fx.Node) -> bool:
        """What reads it leads to outputs of the graph and does nothing but finish a gradient."""
        return node in self._terminal

    def parameter_index(
        self, start: fx.Node, kind: CollectiveKind, waits: tuple[fx.Node, ...]
    ) -> int | None:
        """Place of the parameter among the graph's inputs, or of its gradient among the outputs.

        Gradients leave a graph in the order of its inputs, so both give one order.
        """
        if kind is CollectiveKind.ALL_GATHER:
            origins = {self._origin.get(n) for n in data_inputs(start)}
            origin = next(iter(origins)) if len(origins) == 1 else None
            return None if origin is None else self._input_places[origin]
        places = [self._output_places[w] for w in waits if w in self._terminal]
        return min(places, default=None)

    def of(self, start: fx.Node, kind: CollectiveKind, waits: tuple[fx.Node, ...]) -> Traffic:
        """Traffic of the collective that ``start`` launches."""
        if kind is CollectiveKind.ALL_GATHER:
            payload = data_inputs(start)
            derived = bool(payload) and all(n in self._origin for n in payload)
            return Traffic.PARAMETER if derived else Traffic.OTHER
        if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE):
            ends = bool(waits) and self._terminal.issuperset(waits)
            return Traffic.GRADIENT if ends else Traffic.OTHER
        return Traffic.OTHER
