"""Side effects in a graph: what nothing may cross, and orders that data flow does not show.

Three kinds.  An unknown effect (a custom op that mutates or returns nothing, point-to-point
communication, an unknown higher-order op) is a fence: collectives stay on their side of it.  A
mutation by a known op is ordered against every access of the same storage.  Random ops keep their
order among themselves, so that every rank draws the same numbers as before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    attribute_of,
    first_argument,
    inputs_of,
    is_control_deps,
    is_view,
    op_name,
    op_namespace,
    wait_source,
    wrapped_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Barrier, BarrierKind

_COMPUTE_NAMESPACES = frozenset(
    {"aten", "prims", "inductor", "inductor_prims", "fsdp", "quantized", "quantized_decomposed"}
)
_COMMUNICATION_NAMESPACES = frozenset(
    {
        "_c10d_functional",
        "c10d_functional",
        "_c10d_functional_autograd",
        "c10d",
        "symm_mem",
        "_dtensor",
    }
)
_PURE_HIGHER_ORDER = frozenset(
    {
        "associative_scan",
        "cond",
        "control_deps",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "triton_kernel_wrapper_functional",
        "while_loop",
    }
)
_RANDOM_HIGHER_ORDER = frozenset(
    {"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"}
)
_PURE_MODULE_PREFIXES = ("torch.fx.", "torch.utils._sympy.")
_PURE_BUILTINS = frozenset(
    {"abs", "bool", "float", "getattr", "int", "len", "max", "min", "pow", "round", "sum"}
)
_MUTATING_FUNCTIONS = frozenset(
    {
        "setitem",
        "delitem",
        "iadd",
        "iand",
        "iconcat",
        "ifloordiv",
        "ilshift",
        "imatmul",
        "imod",
        "imul",
        "ior",
        "ipow",
        "irshift",
        "isub",
        "itruediv",
        "ixor",
    }
)


@dataclass(frozen=True)
class Effects:
    """Barriers in graph order (positions not yet filled in) and (before, after) pairs."""

    barriers: tuple[Barrier, ...]
    order_dependencies: tuple[tuple[fx.Node, fx.Node], ...]


def find_effects(graph: fx.Graph, is_collective: Callable[[fx.Node], bool]) -> Effects:
    """Classifies every node of ``graph``; linear in nodes and edges."""
    barriers: list[Barrier] = []
    by_op: dict[int, BarrierKind | None] = {}  # by identity; an op's own hash is slow
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            kind = _classify(node, is_collective)
        elif id(target) in by_op:
            kind = by_op[id(target)]
        else:
            kind = by_op[id(target)] = _classify(node, is_collective)
        if kind is not None:
            barriers.append(Barrier(node, kind, -1))
    order = list(_random_order(barriers))
    order.extend(_storage_order(graph, barriers, is_collective))
    return Effects(tuple(barriers), tuple(order))


def _classify(node: fx.Node, is_collective: Callable[[fx.Node], bool]) -> BarrierKind | None:
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    if node.op != "call_function":
        return BarrierKind.EFFECT
    if is_control_deps(node):
        inner = wrapped_node(node)
        return BarrierKind.EFFECT if inner is None else _classify(inner, is_collective)
    if is_collective(node):
        return BarrierKind.MUTATION if _is_mutable(node.target) else None
    if wait_source(node) is not None:
        return None
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _classify_higher_order(node, is_collective)
    if isinstance(node.target, torch._ops.OpOverload):
        return _classify_op(node.target)
    return _classify_function(node.target)


def _is_mutable(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _classify_op(target: torch._ops.OpOverload) -> BarrierKind | None:
    namespace, name = op_namespace(target), op_name(target) or ""
    if namespace in _COMMUNICATION_NAMESPACES:
        # wait_tensor of a constant and autograd's wrapper only alias
        return None if name in ("wait_tensor", "_wrap_tensor_autograd") else BarrierKind.EFFECT
    if namespace not in _COMPUTE_NAMESPACES and (
        _is_mutable(target) or not target._schema.returns or _has_registered_effect(target)
    ):
        return BarrierKind.EFFECT
    if torch.Tag.nondeterministic_seeded in target.tags:
        return BarrierKind.RNG
    return BarrierKind.MUTATION if _is_mutable(target) else None


def _has_registered_effect(target: torch._ops.OpOverload) -> bool:
    from torch._higher_order_ops import effects

    lookup = getattr(effects, "get_effect_key", None) or getattr(effects, "_get_effect", None)
    if lookup is None:
        return False
    try:
        return lookup(target, (), {}) is not None
    except TypeError:  # the newer lookup takes the op alone
        return lookup(target) is not None


def _classify_higher_order(
    node: fx.Node, is_collective: Callable[[fx.Node], bool]
) -> BarrierKind | None:
    assert isinstance(node.target, torch._ops.HigherOrderOperator)
    name = node.target.name()
    if name in _RANDOM_HIGHER_ORDER:
        return BarrierKind.RNG
    if name in ("auto_functionalized", "auto_functionalized_v2"):
        known = op_namespace(node.args[0]) in _COMPUTE_NAMESPACES
        return None if known else BarrierKind.EFFECT
    if name == "triton_kernel_wrapper_mutation":
        return BarrierKind.MUTATION
    if name not in _PURE_HIGHER_ORDER:
        return BarrierKind.EFFECT
    for inner in _subgraph_nodes(node):
        kind = _classify(inner, is_collective)
        if kind is not None or is_collective(inner):
            return BarrierKind.RNG if kind is BarrierKind.RNG else BarrierKind.EFFECT
    return None


def _subgraph_nodes(node: fx.Node) -> Iterator[fx.Node]:
    for argument in inputs_of(node):
        if argument.op == "get_attr":
            module = attribute_of(argument)
            if isinstance(module, fx.GraphModule):
                yield from module.graph.nodes


def _classify_function(target: object) -> BarrierKind | None:
    """Arithmetic on sizes is pure; any other Python function may do anything."""
    module = str(getattr(target, "__module__", "") or "")
    name = str(getattr(target, "__name__", ""))
    if module in ("_operator", "operator"):
        pure = name not in _MUTATING_FUNCTIONS
    elif module == "builtins":
        pure = name in _PURE_BUILTINS
    else:
        pure = module in ("math", "torch") or module.startswith(_PURE_MODULE_PREFIXES)
    return None if pure else BarrierKind.EFFECT


def _random_order(barriers: list[Barrier]) -> Iterator[tuple[fx.Node, fx.Node]]:
    random = [b.node for b in barriers if b.kind is BarrierKind.RNG]
    yield from itertools.pairwise(random)


class _Storages:
    """Union-find over nodes that may share storage."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while (parent := self._parent.get(node, node)) is not root:
            self._parent[node] = root
            node = parent
        return root

    def union(self, a: fx.Node, b: fx.Node) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            self._parent[b] = a


def _storage_order(
    graph: fx.Graph, barriers: list[Barrier], is_collective: Callable[[fx.Node], bool]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Orders each mutation against earlier and later accesses of the same storage.

    A wait is an access of its collective's payload: until then the payload is in flight.
    """
    mutations = {b.node: _written_nodes(b.node) for b in barriers if b.kind is not BarrierKind.RNG}
    mutations = {node: written for node, written in mutations.items() if written}
    if not mutations:
        return
    storages = _alias_classes(graph, mutations)
    touched = {storages.find(w) for written in mutations.values() for w in written}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    payloads: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        inputs = list(inputs_of(node))
        if is_collective(node):
            payloads[storages.find(node)] = inputs
        if wait_source(node) is not None:
            inputs.extend(payloads.get(storages.find(node), ()))
        written = {storages.find(w) for w in mutations.get(node, ())}
        for storage in dict.fromkeys(storages.find(i) for i in inputs):
            if storage not in touched:
                continue
            if storage in writer:
                yield writer[storage], node
            if storage in written:
                yield from ((reader, node) for reader in readers.pop(storage, ()))
                writer[storage] = node
            else:
                readers.setdefault(storage, []).append(node)


def _written_nodes(node: fx.Node) -> list[fx.Node]:
    """Nodes whose storage ``node`` may write; every input of an op without a known schema."""
    inner = wrapped_node(node)
    target = inner.target if inner is not None else node.target
    if not isinstance(target, torch._ops.OpOverload) or inner is not None:
        return list(inputs_of(node))
    if not target._schema.is_mutable:
        return []
    arguments = target._schema.arguments
    values = [*node.args, *(node.kwargs.get(a.name) for a in arguments[len(node.args) :])]
    written: list[fx.Node] = []
    for argument, value in zip(arguments, values, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.node.map_arg(value, written.append)
    return written


def _alias_classes(graph: fx.Graph, mutations: dict[fx.Node, list[fx.Node]]) -> _Storages:
    storages = _Storages()
    for node in graph.nodes:
        source = wait_source(node)
        if source is not None:
            storages.union(source, node)
        elif is_view(node) or op_name(node.target) == "constant_pad_nd":
            # Padding copies, but only on ranks with a short shard; the others read the parameter
            # itself.  Both must see the same constraints.
            viewed = first_argument(node)
            if isinstance(viewed, fx.Node):
                storages.union(viewed, node)
        elif isinstance(node.target, torch._ops.OpOverload):
            for aliased in _aliased_inputs(node, node.target):
                storages.union(aliased, node)
        for written in mutations.get(node, ()):
            storages.union(written, node)
    return storages


def _aliased_inputs(node: fx.Node, target: torch._ops.OpOverload) -> list[fx.Node]:
    """Inputs that the op's schema says its result may alias."""
    if not any(r.alias_info is not None for r in target._schema.returns):
        return []
    aliased: list[fx.Node] = []
    arguments = target._schema.arguments
    values = [*node.args, *(node.kwargs.get(a.name) for a in arguments[len(node.args) :])]
    for argument, value in zip(arguments, values, strict=False):
        if argument.alias_info is not None:
            fx.node.map_arg(value, aliased.append)
    return aliased
