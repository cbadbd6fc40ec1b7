"""Sizes of a graph that was read from text without them: its operators on fake tensors.

Only operators that compute from tensors run, and those that make tensors of given size; fake tensors
have no data, so nothing of a file is executed and nothing is allocated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name, op_namespace
from torch_patches.captured._targets import PYTHON_CALLABLES

_NAMESPACES = ("aten", "prims", "_c10d_functional", "c10d_functional", "bucketing", "comm_overlap",
               "fsdp", "inductor_prims", "_dtensor")  # fmt: skip
_MAKERS = ("full", "zeros", "ones", "empty", "empty_strided", "arange", "iota", "scalar_tensor", "rand",
           "randn", "randint", "randperm", "eye", "linspace", "empty_permuted", "inductor_seeds",
           "inductor_seed", "inductor_random", "inductor_randint")  # fmt: skip
_MAX_RESULTS = 2**16
_PYTHON = frozenset(map(id, PYTHON_CALLABLES.values()))


def propagate(module: fx.GraphModule, fake_mode: FakeTensorMode) -> list[str]:
    """Gives values to the nodes of ``module`` that have none.

    Returns:
        Names of those that still have none: an operator that is not here, or a value that does not
        fit it.
    """
    missing: list[str] = []
    with fake_mode, torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                _take_attribute(module, node)
            if node.op != "call_function" or "val" in node.meta:
                continue
            if not (_compute(node) or _take_from_users(node)):
                missing.append(node.name)
    return missing


def _take_from_users(node: fx.Node) -> bool:
    """Values of several results, where the text annotates each where it is taken: printed graphs say
    nothing of tuples."""
    parts = {user.args[1]: user.meta.get("val") for user in node.users if _is_getitem(user)}
    if not parts or not all(isinstance(place, int) and place >= 0 for place in parts):
        return False
    places = [place for place in parts if isinstance(place, int)]
    if len(places) != len(node.users) or max(places) >= _MAX_RESULTS:
        return False
    node.meta["val"] = [parts.get(place) for place in range(max(places) + 1)]
    return True


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem and len(node.args) == 2 and "val" in node.meta


def _take_attribute(module: fx.GraphModule, node: fx.Node) -> None:
    value = getattr(module, str(node.target), None)
    if isinstance(value, torch.Tensor):
        node.meta["val"] = value


def _compute(node: fx.Node) -> bool:
    target = node.target
    if not _may_run(target) or any("val" not in source.meta for source in node.all_input_nodes):
        return False
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    assert callable(target)
    try:
        node.meta["val"] = _run(target, arguments, keywords)
    except Exception:  # whatever an operator says of arguments that do not fit
        return False
    return True


def _run(target: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    return target(*arguments, **keywords)


def _may_run(target: Any) -> bool:
    if id(target) in _PYTHON:
        return True
    if not isinstance(target, torch._ops.OpOverload) or op_namespace(target) not in _NAMESPACES:
        return False
    if op_name(target) in _MAKERS:
        return True
    return any("Tensor" in str(argument.type) for argument in target._schema.arguments)
