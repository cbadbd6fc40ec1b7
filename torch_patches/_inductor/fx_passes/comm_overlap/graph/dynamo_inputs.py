"""What Dynamo knows of a graph's inputs, recorded before AOTAutograd forgets it.

    L['self']._modules['layers']._modules['0']._parameters['w']   ->   parameter layers.0.w, index 3

AOTAutograd's joint graph carries no names under ``torch.compile``: its placeholders only say which
of Dynamo's inputs they come from.  The records are joined with them by that index.

The index of a parameter is its place in the order of registration, taken from the module that the
compiled frame holds; where no module is found, in the order of Dynamo's inputs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

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

    Args:
        model: what a Dynamo backend is called with.
        scopes: ``{"L": locals, "G": globals}`` of the compiled frame, for the order of
            registration; None asks Dynamo, which knows only while it calls the backend.
    """
    if not isinstance(model, fx.GraphModule):
        return ()
    placeholders = model.graph.find_nodes(op="placeholder")
    sources = [getattr(node, "_dynamo_source", None) for node in placeholders]
    if all(source is None for source in sources):
        return ()
    names = ["" if source is None else _name_of(source) for source in sources]
    is_parameter = [
        isinstance(node.meta.get("example_value"), torch.nn.Parameter) for node in placeholders
    ]
    return _record(names, is_parameter, _frame_scopes() if scopes is None else scopes)


def recorded_from_names(names: Sequence[str]) -> tuple[RecordedInput, ...]:
    """The same from the names of Dynamo's sources alone, as captured files keep them."""
    return _record(names, [False] * len(names), {})


def _name_of(source: Any) -> str:
    name = source.name  # a method in some releases, a property in others
    return str(name() if callable(name) else name)


def _record(
    names: Sequence[str], is_parameter: Sequence[bool], scopes: Mapping[str, Mapping[str, Any]]
) -> tuple[RecordedInput, ...]:
    registered = _Registration(scopes)
    found: list[tuple[InputKind, str, int | None]] = []
    for name, parameter in zip(names, is_parameter, strict=True):
        path = _parse(name)
        kind = path.kind if path is not None else InputKind.OTHER
        if parameter:
            kind = InputKind.PARAMETER
        if kind is InputKind.OTHER:
            found.append((kind, "", None))
        elif path is None:
            found.append((kind, name, None))
        else:
            found.append((kind, *registered.look_up(path)))
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
        first: dict[int, tuple[str, int]] = {}
        order: dict[str, tuple[str, int]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            name = _qualified(name.split("."))
            if id(parameter) not in first:
                first[id(parameter)] = (name, self._count)
                self._count += 1
            order[name] = first[id(parameter)]
        self._modules[id(module)] = order
        return order


def _step_into(value: Any, step: str | int) -> Any:
    """One step without running code of the user's (properties)."""
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, (list, tuple)) and isinstance(step, int):
        return value[step] if -len(value) <= step < len(value) else None
    return getattr(value, "__dict__", {}).get(step)
