"""Small questions about single FX nodes: which op is it, does it work, does it alias?

A *working* node launches something.  Aliases, reshaping views and slices that keep everything do
not.  Other nodes that move no data (a transpose, a getitem) count as work all the same: ranks do
not differ in them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import expression_of

COLLECTIVE_NAMESPACES = ("_c10d_functional", "c10d_functional")

_NO_OP_NAMES = frozenset({"alias", "detach", "view", "_unsafe_view", "reshape", "lift_fresh"})
_VIEW_NAMES = _NO_OP_NAMES | frozenset(
    {
        "as_strided",
        "diagonal",
        "expand",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "unfold",
        "view_as_complex",
        "view_as_real",
        "real",
        "imag",
    }
)
_SHAPE_ONLY_NAMES = frozenset(
    {
        "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros", "ones_like", "zeros_like",
    }
)  # fmt: skip
_CAST_NAMES = frozenset({"_to_copy", "convert_element_type", "to"})


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the questions below ask of an op; there are few distinct ops, and many nodes."""

    namespace: str
    name: str
    is_view: bool
    is_no_op: bool
    is_cast: bool
    is_slice: bool
    is_shape_only: bool


@functools.cache
def _traits(target: torch._ops.OpOverload) -> _Traits:
    namespace, name = target._schema.name.split("::", 1)
    computes = namespace in ("aten", "prims")
    return _Traits(
        namespace,
        name,
        is_view=computes and name in _VIEW_NAMES,
        is_no_op=computes and name in _NO_OP_NAMES,
        is_cast=computes and name in _CAST_NAMES,
        is_slice=computes and name == "slice",
        is_shape_only=computes and name in _SHAPE_ONLY_NAMES,
    )


def op_namespace(target: object) -> str | None:
    """``aten`` for ``torch.ops.aten.mm.default``; None for anything but an op overload."""
    return _traits(target).namespace if isinstance(target, torch._ops.OpOverload) else None


def op_name(target: object) -> str | None:
    """``mm`` for ``torch.ops.aten.mm.default``; None for anything but an op overload."""
    return _traits(target).name if isinstance(target, torch._ops.OpOverload) else None


def is_view(node: fx.Node) -> bool:
    """The result shares its first argument's storage (also ``getitem``, which hands out a part)."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _traits(target).is_view
    return target is operator.getitem


def first_argument(node: fx.Node) -> object:
    """What an op works on, however it was passed: its first argument; None if there is none."""
    if node.args:
        return node.args[0]
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.arguments:
        return node.kwargs.get(node.target._schema.arguments[0].name)
    return None


def viewed_node(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, at the end of a chain of views; itself if it is no view."""
    while is_view(node) and isinstance(source := first_argument(node), fx.Node):
        node = source
    return node


def is_cast(node: fx.Node) -> bool:
    """A change of dtype (or of device or layout) of one tensor."""
    return isinstance(node.target, torch._ops.OpOverload) and _traits(node.target).is_cast


def is_joint_copy(node: fx.Node) -> bool:
    """A ``_foreach_copy`` of tensors over themselves, which only makes one kernel of what makes
    them.  One of pieces of a buffer copies them out."""
    if op_name(node.target) != "_foreach_copy" or len(node.args) < 2:
        return False
    into, sources = node.args[:2]
    if into != sources or not isinstance(sources, (list, tuple)):
        return False
    return not any(isinstance(s, fx.Node) and s.target is operator.getitem for s in sources)


def is_full_slice(node: fx.Node) -> bool:
    """A slice that keeps its whole input, judged without adding a guard."""
    if not (isinstance(node.target, torch._ops.OpOverload) and _traits(node.target).is_slice):
        return False
    source = first_argument(node)
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return same_sizes(before.shape, after.shape)


def same_sizes(a: torch.Size, b: torch.Size) -> bool:
    """Equal as expressions; nothing is guarded on."""
    return [expression_of(n) for n in a] == [expression_of(n) for n in b]


def does_work(node: fx.Node) -> bool:
    """False for placeholders, outputs, attributes, aliases, reshapes, detaches and full slices."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    if isinstance(node.target, torch._ops.OpOverload) and _traits(node.target).is_no_op:
        return False
    return not is_full_slice(node)


def reads_only_shape(node: fx.Node) -> bool:
    """A constant in the shape, dtype and device of what it is given, whose values it never reads."""
    return isinstance(node.target, torch._ops.OpOverload) and _traits(node.target).is_shape_only


def is_control_deps(node: fx.Node) -> bool:
    """The higher-order op that orders a node behind others for Inductor."""
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "control_deps"


def wrapped_node(node: fx.Node) -> fx.Node | None:
    """The single op inside a ``control_deps`` node, or None."""
    if not is_control_deps(node) or len(node.args) < 2:
        return None
    attribute = node.args[1]
    owner = node.graph.owning_module
    if not isinstance(attribute, fx.Node) or owner is None:
        return None
    module: object = owner
    for part in str(attribute.target).split("."):
        module = getattr(module, part, None)
    if not isinstance(module, fx.GraphModule):
        return None
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return calls[0] if len(calls) == 1 else None


def wait_source(node: fx.Node) -> fx.Node | None:
    """What a wait node (also one inside ``control_deps``) waits for; None for other nodes."""
    inner = wrapped_node(node)
    target = inner.target if inner is not None else node.target
    if op_namespace(target) not in COLLECTIVE_NAMESPACES or op_name(target) != "wait_tensor":
        return None
    if inner is None:
        source = first_argument(node)
    else:
        source = node.args[2] if len(node.args) > 2 else None
    return source if isinstance(source, fx.Node) else None


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Tensors in a node's ``meta["val"]``: itself, or those of a list or tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
