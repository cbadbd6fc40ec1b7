"""Names of what a captured graph calls, and the way back from a name to a callable.

A name in a file selects from what is listed here; it is never imported.  Three kinds exist:
``op:ns.name.overload`` (the dispatcher), ``hop:name`` (higher-order operators), ``py:module.name``
(the short list :data:`PYTHON_CALLABLES`).  An operator that this process does not have becomes a
stub: it keeps its name, so the graph can be read and saved again, and raises when called.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from torch_patches._inductor.fx_passes.comm_overlap import copy_engine_op
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import COPY_ENGINES


class CaptureFormatError(ValueError):
    """A captured-graph file that is damaged, hostile, or of another format; or a graph that the
    format cannot hold."""


def _named(module: Any, prefix: str, names: str) -> dict[str, Callable[..., Any]]:
    return {f"{prefix}.{name}": getattr(module, name) for name in names.split()}


PYTHON_CALLABLES: dict[str, Callable[..., Any]] = {
    **_named(
        operator,
        "operator",
        "getitem add sub mul truediv floordiv mod pow neg abs pos lshift rshift and_ or_ xor "
        "invert not_ eq ne lt le gt ge",
    ),
    **_named(math, "math", "ceil floor trunc sqrt"),
    **_named(torch, "torch", "sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum sym_sqrt"),
}

# Namespaces whose operators are looked up, each with the module that registers them where torch
# does so only on import.
_NAMESPACES: dict[str, str | None] = {
    "aten": None,
    "prims": None,
    "prim": None,
    "rngprims": None,
    "profiler": None,
    "symm_mem": None,
    "quantized_decomposed": None,
    "c10d": None,
    "_c10d_functional": None,
    "_c10d_functional_autograd": None,
    "c10d_functional": None,
    "_dtensor": None,
    "fsdp": None,
    "inductor": None,
    "inductor_prims": "torch._inductor.inductor_prims",
    "bucketing": "torch._inductor.fx_passes.bucketing",
    COPY_ENGINES: None,
}
_HIGHER_ORDER_MODULES = {"control_deps": "torch._inductor.fx_passes.control_dependencies"}

_OP_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_HIGHER_ORDER_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NAME_OF_CALLABLE = {id(function): name for name, function in PYTHON_CALLABLES.items()}


def _stub(name: str) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not available in this process")

    stub.__name__ = stub.__qualname__ = re.sub(r"\W", "_", name)
    stub._captured_name = name  # type: ignore[attr-defined]
    return stub


def is_stub(target: Any) -> bool:
    """Is this call target one that stands for an operator this process does not have?"""
    return hasattr(target, "_captured_name")


def encode_target(target: Any) -> str:
    """The name of a call target."""
    if isinstance(target, torch._ops.OpOverload):
        return f"op:{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"hop:{target.name()}"
    if is_stub(target):
        return target._captured_name
    name = _NAME_OF_CALLABLE.get(id(target))
    if name is None:
        raise CaptureFormatError(f"a captured graph cannot hold calls of {target!r}")
    return f"py:{name}"


class TargetDecoder:
    """Turns names into callables; one stub for each unknown name."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[..., Any]] = {}

    def decode(self, name: str) -> Callable[..., Any]:
        """The callable of ``name``.

        Raises:
            CaptureFormatError: the name is malformed, or a Python callable not on the list.
        """
        if name not in self._known:
            self._known[name] = _resolve(name) or _stub(name)
        return self._known[name]


def _resolve(name: str) -> Callable[..., Any] | None:
    kind, _, rest = name.partition(":")
    if kind == "op" and _OP_NAME.fullmatch(rest):
        return _find_operator(*rest.split("."))
    if kind == "hop" and _HIGHER_ORDER_NAME.fullmatch(rest):
        return _find_higher_order(rest)
    if kind == "py" and rest in PYTHON_CALLABLES:
        return PYTHON_CALLABLES[rest]
    raise CaptureFormatError(f"refused call target {name[:200]!r}")


def _find_operator(namespace: str, name: str, overload: str) -> torch._ops.OpOverload | None:
    if namespace not in _NAMESPACES:
        return None
    _import(_NAMESPACES[namespace])
    if namespace == COPY_ENGINES:
        copy_engine_op.register()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in packet.overloads():
        return None
    return getattr(packet, overload)


def _find_higher_order(name: str) -> torch._ops.HigherOrderOperator | None:
    _import(_HIGHER_ORDER_MODULES.get(name))
    found = getattr(torch.ops.higher_order, name, None)
    return found if isinstance(found, torch._ops.HigherOrderOperator) else None


def _import(module: str | None) -> None:
    """Import one of the modules listed above, where this torch has it."""
    if module is not None:
        try:
            importlib.import_module(module)
        except ImportError:
            return
