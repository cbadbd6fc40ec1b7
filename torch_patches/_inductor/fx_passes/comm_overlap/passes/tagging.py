"""Tags on the joint graph: which collectives carry parameters, which gradients.

    parameter input -> cast/view/pad/quantise ... -> all-gather -> wait -> cast/view ...
    reduce-scatter or all-reduce -> wait -> cast/view/scale/add ... -> gradient of a parameter

Only the joint graph shows all of it: in the backward graph a saved activation that is gathered
looks like a parameter.  Every collective gets a tag; ``Traffic.OTHER`` says that it was looked at and
carries neither.  Tags are metadata of a collective's start, its waits and what only passes their
result on, so partition, recomputation and copies keep them.  A forward or backward graph whose
placeholders kept their descriptors can be tagged too.

Tags depend on descriptors, records and structure; never on the names of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collective_kind,
    find_starts,
    find_starts_and_waits,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.graph_inputs import (
    Fact,
    Facts,
    read_facts,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    has_tensor,
    inputs_of,
    op_name,
    op_namespace,
    reads_only_shape,
    traits_of,
    viewed_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK, tag_of
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    finishes_gradient,
    is_overwritten,
    passes_through,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveKind,
    CollectiveTag,
    InputKind,
    RecordedInput,
    TagSource,
    Traffic,
)

#: Reductions that compute the scale of a quantised parameter.
_SCALE_OPS = frozenset({"amax", "amin", "aminmax", "max", "min", "norm", "linalg_vector_norm"})
_CREATION_OPS = frozenset({"full", "zeros", "ones", "empty", "scalar_tensor", "arange"})
#: Rearrangements of one tensor beyond those that structure alone is trusted with.
_REARRANGEMENTS = frozenset({"copy", "slice_scatter", "stack", "flip", "roll", "tril", "triu"})


def tag_graph(graph: fx.Graph, recorded: Sequence[RecordedInput] = ()) -> int:
    """Writes the tags of :func:`plan_tags` into the graph's metadata.

    Returns:
        How many collectives carry a parameter or a gradient.

    Raises:
        DescriptorMismatch: see :func:`plan_tags`; nothing is written then.
    """
    tags = plan_tags(graph, recorded)
    for node, tag in tags.items():
        node.meta[TAG_MARK] = tag
    starts = [n for n in tags if collective_kind(n) is not None]
    return sum(tags[n].traffic is not Traffic.OTHER for n in starts)


def is_tagged(graph: fx.Graph) -> bool:
    """Whether any collective of the graph has a tag."""
    return any(tag_of(start) is not None for start in find_starts(graph))


def plan_tags(
    graph: fx.Graph, recorded: Sequence[RecordedInput] = ()
) -> dict[fx.Node, CollectiveTag]:
    """Tags of all collectives and their chains; empty where no input has a descriptor.

    An inner graph of a compile (of a higher-order op) has none, while Dynamo's records tell of the
    outer graph: its collectives are tagged as untold, and left alone.

    Args:
        graph: a joint graph, or a forward, backward or inference graph with descriptors.
        recorded: what Dynamo knew of the inputs, by the index that descriptors use.

    Linear in nodes and edges.

    Raises:
        DescriptorMismatch: outputs and their descriptors differ in number.
    """
    starts, waits_of = find_starts_and_waits(graph)
    facts = read_facts(graph, recorded) if starts else None
    if facts is None:
        untold = CollectiveTag(Traffic.OTHER, TagSource.UNTOLD)
        return dict.fromkeys(starts, untold) if recorded else {}
    origins = _find_origins(graph, facts)
    gradients = _find_gradients(graph, facts, origins)
    tags: dict[fx.Node, CollectiveTag] = {}
    for start, kind in starts.items():
        waits = waits_of.get(start, [])
        if kind is CollectiveKind.ALL_GATHER:
            fact = _gathered(start, facts, origins)
            traffic = Traffic.PARAMETER
            chain = _same_origin(start, origins) if fact is not None else []
        else:
            fact = _reduced(kind, waits, gradients)
            traffic = Traffic.GRADIENT
            chain = _finishing(start, gradients) if fact is not None else []
        if fact is None:
            tag = CollectiveTag(Traffic.OTHER, facts.source)
        else:
            tag = CollectiveTag(traffic, fact.source, fact.name, fact.index, fact.place)
        tags.update(dict.fromkeys((start, *waits, *chain), tag))
    return tags


# -- parameters -----------------------------------------------------------------------------------


class _Neutral:
    """Origin of what mixes with a parameter without making it data: buffers, constants."""


_NEUTRAL = _Neutral()
_Origin = fx.Node | _Neutral


def _find_origins(graph: fx.Graph, facts: Facts) -> dict[fx.Node, _Origin]:
    """The one parameter (its input) that a node is computed from, if it is only prepared on
    the way: cast, viewed, padded, quantised, gathered.  Nodes of any other data are not in it."""
    origins: dict[fx.Node, _Origin] = {}
    for node in graph.nodes:
        if node in facts.inputs:
            origin = _origin_of_input(node, facts)
        elif node.op == "call_function":
            origin = _origin(node, facts, origins)
        else:
            continue
        if origin is not None:
            origins[node] = origin
    return origins


def _origin_of_input(node: fx.Node, facts: Facts) -> _Origin | None:
    kind = facts.inputs[node].kind
    if kind in (InputKind.PARAMETER, InputKind.UNKNOWN):
        return node
    return _NEUTRAL if kind is InputKind.BUFFER else None


def _origin(node: fx.Node, facts: Facts, origins: Mapping[fx.Node, _Origin]) -> _Origin | None:
    found: list[_Origin] = []
    for source in inputs_of(node):
        if has_tensor(source):
            if source not in origins:  # true of most nodes
                return _NEUTRAL if reads_only_shape(node) else None
            found.append(origins[source])
    if reads_only_shape(node):
        return _NEUTRAL
    if not found:
        return _NEUTRAL if _is_aten(node) and op_name(node.target) in _CREATION_OPS else None
    parameters = [o for o in dict.fromkeys(found) if isinstance(o, fx.Node)]
    if len(parameters) != 1:
        return _NEUTRAL if not parameters and _prepares(node) else None
    origin = parameters[0]
    known = facts.inputs[origin].kind is InputKind.PARAMETER
    allowed = passes_through(node) or (known and _prepares(node))
    return origin if allowed else None


def _prepares(node: fx.Node) -> bool:
    """Element by element, a rearrangement, a reduction to a scale, or a quantisation (somebody's
    op over one parameter): no matrix product."""
    if passes_through(node):
        return True
    traits = traits_of(node.target)
    if traits.namespace is None or traits.is_mutable or traits.is_random:
        return False
    if traits.namespace in ("aten", "prims"):
        return traits.is_pointwise or traits.name in _SCALE_OPS or traits.name in _REARRANGEMENTS
    return not traits.communicates


def _is_aten(node: fx.Node) -> bool:
    return op_namespace(node.target) in ("aten", "prims")


def _gathered(start: fx.Node, facts: Facts, origins: Mapping[fx.Node, _Origin]) -> Fact | None:
    """The parameter that a gather gathers, or None."""
    origin = origins.get(start)
    return facts.inputs[origin] if isinstance(origin, fx.Node) else None


def _same_origin(start: fx.Node, origins: Mapping[fx.Node, _Origin]) -> list[fx.Node]:
    """What follows a gather and still is nothing but its parameter."""
    chain: dict[fx.Node, None] = {}
    pending = [start]
    while pending:
        for user in pending.pop().users:
            if user not in chain and origins.get(user) is origins[start]:
                chain[user] = None
                pending.append(user)
    return list(chain)


# -- gradients ------------------------------------------------------------------------------------


def _find_gradients(
    graph: fx.Graph, facts: Facts, origins: Mapping[fx.Node, _Origin]
) -> dict[fx.Node, Fact]:
    """The parameter for whose gradient alone a node is computed; those of another use are not in it."""
    places = _output_places(facts.outputs)
    gradients: dict[fx.Node, Fact] = {}
    above = set(places)  # of what else leads to no gradient, nothing can
    for node in reversed(graph.nodes):
        if node in above:
            fact = _gradient(node, places.get(node, ()), facts, gradients, origins)
            if fact is not None:
                gradients[node] = fact
                above.update(inputs_of(node))
    return gradients


def _output_places(outputs: Iterable[object]) -> dict[fx.Node, list[int]]:
    places: dict[fx.Node, list[int]] = {}
    for place, value in enumerate(outputs):
        if isinstance(value, fx.Node):
            places.setdefault(value, []).append(place)
    return places


def _gradient(
    node: fx.Node,
    places: Sequence[int],
    facts: Facts,
    gradients: Mapping[fx.Node, Fact],
    origins: Mapping[fx.Node, _Origin],
) -> Fact | None:
    found: Fact | None = None
    for place in places:
        fact = facts.gradients.get(place)
        if fact is None or fact.kind not in (InputKind.PARAMETER, InputKind.UNKNOWN):
            return None
        found = found or fact
    for user in node.users:
        if user.op == "output" or reads_only_shape(user) or is_overwritten(node, user):
            continue
        fact = gradients.get(user)
        if fact is None or not _finishes(user, node, origins):
            return None
        found = found or fact
    return found


def _finishes(node: fx.Node, gradient: fx.Node, origins: Mapping[fx.Node, _Origin]) -> bool:
    """May stand between a gradient's reduction and the output: also the way back through what
    prepared the parameter, element by element and with nothing but parameters and constants."""
    if finishes_gradient(node):
        return True
    if not (_is_aten(node) and _prepares(node)):
        return False
    others = [n for n in inputs_of(node) if has_tensor(n) and n not in origins]
    return all(viewed_node(n) is viewed_node(gradient) for n in others)


def _reduced(
    kind: CollectiveKind, waits: Sequence[fx.Node], gradients: Mapping[fx.Node, Fact]
) -> Fact | None:
    """The parameter whose gradient a reduction reduces, or None."""
    if kind not in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE) or not waits:
        return None
    return gradients[waits[0]] if all(wait in gradients for wait in waits) else None


def _finishing(start: fx.Node, gradients: Mapping[fx.Node, Fact]) -> list[fx.Node]:
    """What lies between a reduction and the gradients that leave the graph."""
    chain: dict[fx.Node, None] = {}
    pending = [start]
    while pending:
        for user in pending.pop().users:
            if user in gradients and user not in chain:
                chain[user] = None
                pending.append(user)
    return list(chain)
