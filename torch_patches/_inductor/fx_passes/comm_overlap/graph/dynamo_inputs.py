"""What Dynamo knows of a graph's inputs, recorded before AOTAutograd forgets it.

    L['self']._modules['layers']._modules['0']._parameters['w']   ->   parameter layers.0.w, index 3

AOTAutograd's joint graph carries no names under ``torch.compile``: its placeholders only say which
of Dynamo's inputs they come from.  The records are joined with them by that index.

The kind of an input depends on Dynamo's graph alone, so it is the same on all ranks.  Names and the
order of registration come from the module that the compiled frame holds (names are relative to it),
so they decide only where buckets are modules, and are for people elsewhere; where no module is found,
the index is the order of Dynamo's inputs.

Compiled autograd's graph takes a list of all tensors and returns gradients as ordinary outputs.  Its
``AccumulateGrad`` nodes tell of which of these tensors (``graph/accumulated.py``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.accumulated import (
    Accumulated,
    find_accumulated,
    flat_inputs,
    with_gradients,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import InputKind, RecordedInput

_PARAMETERS, _BUFFERS = "_parameters", "_buffers"
_STORAGE = frozenset({"_modules", _PARAMETERS, _BUFFERS})
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class _Path:
    """``L['self'].a['b']`` taken apart: scope "L", root "self", steps (".a", "['b']") as names."""

    scope: str
    root: str
    steps: tuple[str | int, ...]

    @property
    def kind(self) -> InputKind:
        holder = self.steps[-2] if len(self.steps) > 1 else None
        if holder == _PARAMETERS:
            return InputKind.PARAMETER
        return InputKind.BUFFER if holder == _BUFFERS else InputKind.OTHER


def record_inputs(
    model: object, scopes: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[RecordedInput, ...]:
    """One record for each placeholder of the graph that Dynamo made; empty for other models.

    Where no input is a parameter or buffer, plain tensors that a user trains (leaves that require a
    gradient) may be parameters: their kind is ``UNKNOWN``, and structure decides.

    Args:
        model: what a Dynamo backend is called with.
        scopes: ``{"L": locals, "G": globals}`` of the compiled frame; None asks Dynamo, which knows
            only while it calls the backend.
    """
    if not isinstance(model, fx.GraphModule):
        return ()
    inputs = flat_inputs(model.graph)
    if not inputs:
        return ()
    scopes = _frame_scopes() if scopes is None else scopes
    names, values = [given.name for given in inputs], [given.value for given in inputs]
    kinds = [_kind(name, value) for name, value in zip(names, values, strict=True)]
    accumulated = find_accumulated(model.graph)
    for gradient in accumulated:
        kinds[gradient.parameter] = InputKind.PARAMETER
    known = any(kind in (InputKind.PARAMETER, InputKind.BUFFER) for kind in kinds)
    if not known:
        kinds = [
            InputKind.UNKNOWN if _is_trained(value) else kind
            for kind, value in zip(kinds, values, strict=True)
        ]
    return with_gradients(_record(names, kinds, scopes), accumulated)


def recorded_from_names(
    names: Sequence[str], accumulated: Sequence[Accumulated] = ()
) -> tuple[RecordedInput, ...]:
    """The same from the names of Dynamo's sources alone, as captured files keep them, and from the
    gradients that compiled autograd's graph accumulates.

    Raises:
        IndexError: a gradient is of an input that has no name here.
    """
    kinds = [_kind(name, None) for name in names]
    for gradient in accumulated:
        kinds[gradient.parameter] = InputKind.PARAMETER
    return with_gradients(_record(names, kinds, {}), accumulated)


def _kind(name: str, value: object) -> InputKind:
    if isinstance(value, torch.nn.Parameter):
        return InputKind.PARAMETER
    path = _parse(name)
    return InputKind.OTHER if path is None else path.kind


def _is_trained(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _record(
    names: Sequence[str], kinds: Sequence[InputKind], scopes: Mapping[str, Mapping[str, Any]]
) -> tuple[RecordedInput, ...]:
    registered = _Registration(scopes)
    found: list[tuple[InputKind, str, int | None]] = []
    for name, kind in zip(names, kinds, strict=True):
        if kind in (InputKind.OTHER, InputKind.UNKNOWN):
            found.append((kind, "", None))
            continue
        path = _parse(name)
        known = (name, None) if path is None else registered.look_up(path)
        found.append((kind, *known))
    return _with_indices(found)


def _with_indices(
    found: Sequence[tuple[InputKind, str, int | None]],
) -> tuple[RecordedInput, ...]:
    """Places in the order of registration if all are known, else among the parameters given."""
    places = [place for kind, _, place in found if kind is InputKind.PARAMETER]
    registered = all(place is not None for place in places)
    records, count = [], 0
    for kind, name, place in found:
        index = None
        if kind is InputKind.PARAMETER:
            index = place if registered else count
            count += 1
        records.append(RecordedInput(kind, name, index))
    return tuple(records)


# -- names ----------------------------------------------------------------------------------------


def _parse(name: str) -> _Path | None:
    """None for anything but attributes and constant keys of one local or global."""
    try:
        expression = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    steps: list[str | int] = []
    while True:
        if isinstance(expression, ast.Attribute):
            steps.append(expression.attr)
        elif isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            key = expression.slice.value
            if not isinstance(key, (str, int)):
                return None
            steps.append(key)
        else:
            break
        expression = expression.value
    if not isinstance(expression, ast.Name) or not steps or not isinstance(steps[-1], str):
        return None
    return _Path(expression.id, steps[-1], tuple(reversed(steps[:-1])))


def _qualified(steps: Sequence[str | int]) -> str:
    kept = [str(step) for step in steps if step not in _STORAGE and step not in _WRAPPERS]
    return ".".join(kept)


# -- order of registration ------------------------------------------------------------------------


def _frame_scopes() -> Mapping[str, Mapping[str, Any]]:
    """Locals and globals of the frame that Dynamo compiles now; empty outside of a compile."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
        return {"L": output.local_scope, "G": output.global_scope}
    except AttributeError:
        return {}


class _Registration:
    """Names and places of parameters in the modules that a frame holds."""

    def __init__(self, scopes: Mapping[str, Mapping[str, Any]]) -> None:
        self._scopes = scopes
        self._modules: dict[int, dict[str, tuple[str, int]]] = {}
        self._count = 0

    def look_up(self, path: _Path) -> tuple[str, int | None]:
        """Fully qualified name, and place among all parameters seen so far or None."""
        for module, rest in self._modules_on(path):
            name = _qualified(rest)
            known = self._order_of(module)
            return known.get(name, (name, None))
        return _qualified(path.steps) or path.root, None

    def _modules_on(self, path: _Path) -> Iterator[tuple[torch.nn.Module, Sequence[str | int]]]:
        """The first module that the path leads through, and the steps from there."""
        value: Any = self._scopes.get(path.scope, {}).get(path.root)
        for taken in range(len(path.steps) + 1):
            if isinstance(value, torch.nn.Module):
                yield value, path.steps[taken:]
                return
            if taken == len(path.steps):
                return
            value = _step_into(value, path.steps[taken])

    def _order_of(self, module: torch.nn.Module) -> dict[str, tuple[str, int]]:
        """Every name a parameter has in ``module`` -> its first name and its place."""
        if id(module) in self._modules:
            return self._modules[id(module)]
        place: dict[int, int] = {}
        for parameter in _bottom_up(module, set()):
            place.setdefault(id(parameter), self._count + len(place))
        self._count += len(place)
        first: dict[int, str] = {}
        order: dict[str, tuple[str, int]] = {}
        # Not the module's own method: a user's may take other arguments.
        named = torch.nn.Module.named_parameters(module, remove_duplicate=False)
        for name, parameter in named:
            name = _qualified(name.split("."))
            order[name] = (first.setdefault(id(parameter), name), place[id(parameter)])
        self._modules[id(module)] = order
        return order


def _bottom_up(module: torch.nn.Module, seen: set[int]) -> Iterator[torch.nn.Parameter]:
    """Parameters as FSDP2 orders them: those of its children, then a module's own."""
    seen.add(id(module))
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            yield from _bottom_up(child, seen)
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def _step_into(value: Any, step: str | int) -> Any:
    """One step without running code of the user's (properties)."""
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, (list, tuple)) and isinstance(step, int):
        return value[step] if -len(value) <= step < len(value) else None
    return getattr(value, "__dict__", {}).get(step)
