"""What the inputs and outputs of an AOTAutograd graph are, from their descriptors.

``meta["desc"]`` of a placeholder says which input of the model it is (or which part of a tensor
subclass), the output node's says which input each output is the gradient of.  Under AOT export they
carry parameter names; under ``torch.compile`` only an index, which records of Dynamo's inputs
resolve.  A graph without descriptors gives no facts.

Compiled autograd's graph returns gradients as ordinary outputs, or writes them over inputs; records
tell which.  Two kinds of training step have no names to give, so structure decides for them: functions of plain
tensors outside of any module, and graphs that compute gradients inside and return them as ordinary
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch._functorch._aot_autograd import descriptors as aot

from torch_patches._inductor.fx_passes.comm_overlap.graph.registration import bottom_up
from torch_patches._inductor.fx_passes.comm_overlap.plan import InputKind, RecordedInput, TagSource


class DescriptorMismatch(ValueError):
    """Outputs and descriptors cannot be paired."""


@dataclass(frozen=True)
class Fact:
    """What one graph input is, or which input an output is the gradient of.

    Args:
        kind: of the input.
        source: who tells.
        name: parameters: fully qualified name, where known.
        index: parameters: place in the order of registration.
        place: among the inputs, as descriptors count them.
    """

    kind: InputKind
    source: TagSource
    name: str | None = None
    index: int | None = None
    place: int | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """Facts by node.

    Args:
        inputs: placeholder, or attribute with a descriptor -> what it is.
        gradients: output place -> the input it is the gradient of; other outputs are not in it.
        outputs: every value that leaves the graph, flattened, in order.
        source: the surest source that names a parameter or input.
    """

    inputs: dict[fx.Node, Fact]
    gradients: dict[int, Fact]
    outputs: tuple[object, ...]
    source: TagSource


def read_facts(graph: fx.Graph, recorded: Sequence[RecordedInput] = ()) -> Facts | None:
    """None where no input has a descriptor.

    Raises:
        DescriptorMismatch: the outputs and their descriptors differ in number.
    """
    placeholders = graph.find_nodes(op="placeholder")
    held = graph.find_nodes(op="get_attr")  # by a module of torch.export, which has no such inputs
    described = {
        n: d for n in (*placeholders, *held) if isinstance(d := n.meta.get("desc"), aot.AOTInput)
    }
    if not described:
        return None
    outputs, output_descriptors = _paired_outputs(graph)
    trained = {
        place: base.grad_of
        for place, base in enumerate(map(_base, output_descriptors))
        if isinstance(base, aot.GradAOTOutput)
    }
    trained |= _accumulated(output_descriptors, recorded)
    # A partitioned graph may return the gradient of a parameter that is not among its inputs.
    reader = _Reader(recorded, [*described.values(), *trained.values()])
    # Beside described inputs, one without a descriptor is what the forward saved.
    saved = Fact(InputKind.OTHER, reader.source)
    inputs = {
        **dict.fromkeys(placeholders, saved),
        **{n: reader.fact(d) for n, d in described.items()},
    }
    gradients = {place: reader.fact(of) for place, of in trained.items()}
    if not gradients:
        gradients = _unnamed_gradients(outputs, reader.source)
    return Facts(inputs, gradients, outputs, reader.source)


def _accumulated(
    descriptors: Sequence[object], recorded: Sequence[RecordedInput]
) -> dict[int, aot.PlainAOTInput]:
    """Outputs of compiled autograd's graph that are gradients -> the input they are of."""
    of_output = {i: place for place, r in enumerate(recorded) for i in r.gradient_outputs}
    of_input = {i: place for place, r in enumerate(recorded) for i in r.gradient_inputs}
    found: dict[int, aot.PlainAOTInput] = {}
    for number, base in enumerate(map(_base, descriptors) if of_output else ()):
        place = None
        if isinstance(base, aot.PlainAOTOutput):
            place = of_output.get(base.idx)
        elif isinstance(base, aot.InputMutationAOTOutput):
            written = _base(base.mutated_input)
            place = of_input.get(written.idx) if isinstance(written, aot.PlainAOTInput) else None
        if place is not None:
            found[number] = aot.PlainAOTInput(place)
    return found


def _unnamed_gradients(outputs: Sequence[object], source: TagSource) -> dict[int, Fact]:
    """Outputs that may be gradients where no descriptor says so: those computed by autograd inside
    of the graph, and any output of a function of plain tensors."""
    return {
        place: Fact(InputKind.UNKNOWN, TagSource.STRUCTURE, place=place)
        for place, value in enumerate(outputs)
        if isinstance(value, fx.Node)
        and (source is TagSource.STRUCTURE or value.meta.get("autograd_backward"))
    }


def _base(descriptor: Any) -> Any:
    """The descriptor of the whole tensor, if this is one of a part of it."""
    while isinstance(descriptor, (aot.SubclassGetAttrAOTInput, aot.SubclassGetAttrAOTOutput)):
        descriptor = descriptor.base
    return descriptor


def _named_input(descriptor: Any) -> Any:
    """The input that a descriptor tells of: one tensor can stand for several that are views of it,
    and one of them is named."""
    base = _base(descriptor)
    while isinstance(base, (aot.ViewBaseAOTInput, aot.SyntheticBaseAOTInput)):
        base = _base(base.base_of)
    return base


class _Reader:
    """Turns input descriptors into facts."""

    def __init__(self, recorded: Sequence[RecordedInput], given: Sequence[Any]) -> None:
        self._recorded = recorded
        self._places: dict[str, int] = {}
        bases = [_named_input(descriptor) for descriptor in given]
        for base in bases:
            if isinstance(base, aot.ParamAOTInput):
                self._places.setdefault(base.target, len(self._places))
        self._registered = bottom_up(self._places)
        named = any(isinstance(b, (aot.ParamAOTInput, aot.BufferAOTInput)) for b in bases)
        if named:
            self.source = TagSource.DESCRIPTORS
        else:
            unknown = any(record.kind is InputKind.UNKNOWN for record in recorded)
            self.source = TagSource.STRUCTURE if unknown or not recorded else TagSource.DYNAMO

    def fact(self, descriptor: Any) -> Fact:
        base = _named_input(descriptor)
        if isinstance(base, aot.ParamAOTInput):
            name = base.target
            index, place = self._registered[name], self._places[name]
            return Fact(InputKind.PARAMETER, TagSource.DESCRIPTORS, name, index, place)
        if isinstance(base, aot.BufferAOTInput):
            return Fact(InputKind.BUFFER, TagSource.DESCRIPTORS, base.target)
        if not isinstance(base, aot.PlainAOTInput):
            return Fact(InputKind.OTHER, self.source)
        if base.idx < len(self._recorded):
            record = self._recorded[base.idx]
            told = record.kind is not InputKind.UNKNOWN
            source = TagSource.DYNAMO if told else TagSource.STRUCTURE
            return Fact(record.kind, source, record.name or None, record.index, base.idx)
        if self.source is TagSource.DESCRIPTORS:
            # An export that names parameters has named all of them.
            return Fact(InputKind.OTHER, self.source)
        return Fact(InputKind.UNKNOWN, TagSource.STRUCTURE, place=base.idx)


def _paired_outputs(graph: fx.Graph) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Outputs and their descriptors, both flattened: tracing may nest one and not the other."""
    outputs: list[object] = []
    described: list[object] = []
    for node in graph.find_nodes(op="output"):
        _flatten(node.args, outputs)
        if "desc" in node.meta:
            _flatten(node.meta["desc"], described)
    if described and len(described) != len(outputs):
        raise DescriptorMismatch(
            f"the graph has {len(outputs)} outputs and {len(described)} output descriptors; "
            f"they cannot be paired"
        )
    return tuple(outputs), tuple(described)


def _flatten(value: object, leaves: list[object]) -> None:
    """Leaves of nested lists, tuples and dicts, None included."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _flatten(item, leaves)
    elif isinstance(value, dict):
        for item in value.values():
            _flatten(item, leaves)
    else:
        leaves.append(value)
