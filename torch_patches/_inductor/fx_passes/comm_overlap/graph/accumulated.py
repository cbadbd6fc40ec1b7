"""Inputs of Dynamo's graph as AOTAutograd counts them, and the gradients that such a graph accumulates.

    gradient = AccumulateGrad([new gradient], inputs[5], inputs[6] or None, ...)[0]

stands in compiled autograd's graph, where torch's DDP reduces from hooks (``python_reducer``): scaled,
all-reduced and copied over ``gradient``, which is returned.  Without it nothing of that graph says what
the outputs are.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput


@dataclass(frozen=True, eq=False)
class FlatInput:
    """One input of a graph; those in a list are inputs of their own, as AOTAutograd counts.

    Args:
        name: of Dynamo's source; empty in a list.
        value: Dynamo's example.
    """

    name: str
    value: object


@dataclass(frozen=True)
class Accumulated:
    """The gradient of one input.

    Args:
        parameter: place of that input.
        before: place of the input that held the gradient so far, or None.
        outputs: places of the outputs that are the gradient.
    """

    parameter: int
    before: int | None
    outputs: tuple[int, ...]


def flat_inputs(graph: fx.Graph) -> list[FlatInput]:
    """Empty where Dynamo did not make the graph, or where an input is nested deeper than a list."""
    placeholders = graph.find_nodes(op="placeholder")
    sources = [getattr(node, "_dynamo_source", None) for node in placeholders]
    if all(source is None for source in sources):
        return []
    found: list[FlatInput] = []
    for node, source in zip(placeholders, sources, strict=True):
        value = node.meta.get("example_value")
        if isinstance(value, dict) or not _is_flat(value):
            return []
        if isinstance(value, (list, tuple)):
            found.extend(FlatInput("", item) for item in value)
        else:
            found.append(FlatInput("" if source is None else str(source.name), value))
    return found


def _is_flat(value: object) -> bool:
    items = value if isinstance(value, (list, tuple)) else ()
    return not any(item is None or isinstance(item, (list, tuple, dict)) for item in items)


def find_accumulated(graph: fx.Graph) -> list[Accumulated]:
    """In the order of the graph; empty for all graphs but compiled autograd's."""
    accumulate = _accumulate_op()
    nodes = [] if accumulate is None else graph.find_nodes(op="call_function", target=accumulate)
    if not nodes:
        return []
    places = _places(graph)
    returned = _returned(graph)
    found: list[Accumulated] = []
    for node in nodes:
        parameter, before = (_place(value, places) for value in node.args[1:3])
        gradients = [user for user in node.users if user.target is operator.getitem]
        outputs = tuple(place for gradient in gradients for place in returned.get(gradient, ()))
        if parameter is not None and (outputs or before is not None):
            found.append(Accumulated(parameter, before, outputs))
    return found


def _accumulate_op() -> Any:
    """torch registers it when compiled autograd meets the first parameter."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(getattr(module, "ops", None), "AccumulateGrad", None)


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    """Place of a placeholder, or of the first of its list, among the flat inputs."""
    places: dict[fx.Node, int] = {}
    count = 0
    for node in graph.find_nodes(op="placeholder"):
        places[node] = count
        value = node.meta.get("example_value")
        count += len(value) if isinstance(value, (list, tuple)) else 1
    return places


def _place(value: object, places: dict[fx.Node, int]) -> int | None:
    """Of an input, or of a part of one that is a list."""
    if not isinstance(value, fx.Node):
        return None
    if value in places:
        return places[value]
    if value.target is operator.getitem and isinstance(number := value.args[1], int):
        source = value.args[0]
        return places[source] + number if source in places else None  # type: ignore[index]
    return None


def _returned(graph: fx.Graph) -> dict[fx.Node, list[int]]:
    """Places among the outputs, by node."""
    found: dict[fx.Node, list[int]] = {}
    values: list[object] = []
    for output in graph.find_nodes(op="output"):
        fx.node.map_aggregate(output.args, lambda value: values.append(value))
    for place, value in enumerate(values):
        if isinstance(value, fx.Node):
            found.setdefault(value, []).append(place)
    return found


def with_gradients(
    recorded: Sequence[RecordedInput], accumulated: Sequence[Accumulated]
) -> tuple[RecordedInput, ...]:
    """The records with the places of their gradients."""
    records = list(recorded)
    for gradient in accumulated:
        record = records[gradient.parameter]
        before = () if gradient.before is None else (gradient.before,)
        records[gradient.parameter] = replace(
            record,
            gradient_outputs=record.gradient_outputs + gradient.outputs,
            gradient_inputs=record.gradient_inputs + before,
        )
    return tuple(records)
