"""Small questions about single FX nodes: which op is it, does it work, does it alias?

A *working* node launches something.  Aliases, reshaping views and slices that keep everything do
not.  Other nodes that move no data (a transpose, a getitem) count as work all the same: ranks do
not differ in them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import (
    decision_bytes,
    expression_of,
    tensor_bytes,
)

#: Of gathers by the copy engines.
COPY_ENGINES = "comm_overlap"
COLLECTIVE_NAMESPACES = ("_c10d_functional", "c10d_functional", COPY_ENGINES)

#: The second (from torch 2.15 on) waits for several results of one collective, and returns a list.
_WAIT_NAMES = frozenset({"wait_tensor", "wait_tensors"})
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
_COPY_NAMES = frozenset({"clone", "contiguous", "constant_pad_nd", "cat", "split_with_sizes_copy"})
_CREATION_NAMES = frozenset({"empty", "empty_strided", "full", "ones", "zeros"})
_HEAVY_NAMES = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
        "convolution", "convolution_backward",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the questions below ask of a target; there are few distinct ones, and many nodes.

    Args:
        namespace, name: of an op overload, as in ``aten::mm``; None of anything else.
        arguments: names, by its schema.
        communicates: a functional collective, or a wait.
        is_copy: rearranges what it is given.
        is_creation: makes a constant of a given shape.
        is_mutable, returns_alias: by its schema.
        is_heavy: a matrix product, convolution or attention.
    """

    namespace: str | None = None
    name: str | None = None
    arguments: tuple[str, ...] = ()
    is_view: bool = False
    is_no_op: bool = False
    is_cast: bool = False
    is_slice: bool = False
    is_shape_only: bool = False
    is_copy: bool = False
    is_creation: bool = False
    is_pointwise: bool = False
    is_mutable: bool = False
    is_random: bool = False
    returns_alias: bool = False
    communicates: bool = False
    is_wait: bool = False
    is_control_deps: bool = False
    is_heavy: bool = False


_NONE = OpTraits()
#: By identity: an op's own hash is Python code, and would take a sixth of a compile.  The targets
#: are kept, so that no other object gets the identity of one.
_TRAITS: dict[int, OpTraits] = {id(operator.getitem): OpTraits(is_view=True)}
_KEPT: list[object] = []


def traits_of(target: object) -> OpTraits:
    """Traits of the target of a node; those of Python functions but ``getitem`` are empty."""
    found = _TRAITS.get(id(target))
    return found if found is not None else _read_traits(target)


def _read_traits(target: object) -> OpTraits:
    if isinstance(target, str):  # of an input or output
        return _NONE
    if isinstance(target, torch._ops.OpOverload):
        traits = _traits_of_op(target)
    elif isinstance(target, torch._ops.HigherOrderOperator):
        traits = OpTraits(is_control_deps=target.name() == "control_deps")
    else:
        return _NONE  # of the many that a process may see, none is kept
    _KEPT.append(target)
    _TRAITS[id(target)] = traits
    return traits


def _traits_of_op(target: torch._ops.OpOverload) -> OpTraits:
    namespace, name = target._schema.name.split("::", 1)
    computes = namespace in ("aten", "prims")
    communicates = namespace in COLLECTIVE_NAMESPACES
    return OpTraits(
        namespace,
        name,
        tuple(argument.name for argument in target._schema.arguments),
        is_view=computes and name in _VIEW_NAMES,
        is_no_op=computes and name in _NO_OP_NAMES,
        is_cast=computes and name in _CAST_NAMES,
        is_slice=computes and name == "slice",
        is_shape_only=computes and name in _SHAPE_ONLY_NAMES,
        is_copy=computes and name in _COPY_NAMES,
        is_creation=namespace == "aten" and name in _CREATION_NAMES,
        is_pointwise=torch.Tag.pointwise in target.tags,
        is_mutable=target._schema.is_mutable,
        is_random=torch.Tag.nondeterministic_seeded in target.tags,
        returns_alias=any(r.alias_info is not None for r in target._schema.returns),
        communicates=communicates,
        is_wait=communicates and name in _WAIT_NAMES,
        is_heavy=_is_heavy(namespace, name),
    )


def _is_heavy(namespace: str, name: str) -> bool:
    if namespace != "aten":
        return "flex_attention" in name
    return name in _HEAVY_NAMES or "scaled_dot_product" in name


def op_namespace(target: object) -> str | None:
    """``aten`` for ``torch.ops.aten.mm.default``; None for anything but an op overload."""
    return traits_of(target).namespace


def op_name(target: object) -> str | None:
    """``mm`` for ``torch.ops.aten.mm.default``; None for anything but an op overload."""
    return traits_of(target).name


def is_view(node: fx.Node) -> bool:
    """The result shares its first argument's storage (also ``getitem``, which hands out a part)."""
    return traits_of(node.target).is_view


def first_argument(node: fx.Node) -> object:
    """What an op works on, however it was passed: its first argument; None if there is none."""
    if node.args:
        return node.args[0]
    names = traits_of(node.target).arguments
    return node.kwargs.get(names[0]) if names else None


def inputs_of(node: fx.Node) -> Collection[fx.Node]:
    """``all_input_nodes`` without the list that it makes each time; not to be kept over a change."""
    return node._input_nodes


def viewed_node(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, at the end of a chain of views; itself if it is no view."""
    while is_view(node) and isinstance(source := first_argument(node), fx.Node):
        node = source
    return node


def is_cast(node: fx.Node) -> bool:
    """A change of dtype (or of device or layout) of one tensor."""
    return traits_of(node.target).is_cast


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
    if not traits_of(node.target).is_slice:
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
    traits = traits_of(node.target)
    return not traits.is_no_op and not (traits.is_slice and is_full_slice(node))


def reads_only_shape(node: fx.Node) -> bool:
    """A constant in the shape, dtype and device of what it is given, whose values it never reads."""
    return traits_of(node.target).is_shape_only


def is_control_deps(node: fx.Node) -> bool:
    """The higher-order op that orders a node behind others for Inductor."""
    return traits_of(node.target).is_control_deps


def attribute_of(node: fx.Node) -> object:
    """What a ``get_attr`` node reads, also below other modules (``a.b.weight``); None where the
    graph's module has nothing there."""
    found: object = node.graph.owning_module
    for step in str(node.target).split("."):
        found = getattr(found, step, None)
    return found


def wrapped_node(node: fx.Node) -> fx.Node | None:
    """The single op inside a ``control_deps`` node, or None."""
    if not is_control_deps(node) or len(node.args) < 2:
        return None
    attribute = node.args[1]
    module = attribute_of(attribute) if isinstance(attribute, fx.Node) else None
    if not isinstance(module, fx.GraphModule):
        return None
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return calls[0] if len(calls) == 1 else None


def wait_source(node: fx.Node) -> fx.Node | None:
    """What a wait node (also one inside ``control_deps``) waits for, of a wait for several results
    of one collective the first; None for other nodes."""
    sources = wait_sources(node)
    return sources[0] if sources else None


def wait_sources(node: fx.Node) -> tuple[fx.Node, ...]:
    """All that a wait node waits for, in the order of its results; empty for other nodes, and for a
    wait for results of several collectives, which nothing here can take apart."""
    traits = traits_of(node.target)
    if not (traits.is_wait or traits.is_control_deps):
        return ()
    inner = wrapped_node(node)
    if inner is not None and not traits_of(inner.target).is_wait:
        return ()
    source: object = None
    if inner is None:
        source = first_argument(node) if traits.is_wait else None
    elif isinstance(first_argument(inner), (list, tuple)):
        source = node.args[2:]
    elif len(node.args) > 2:
        source = node.args[2]
    if isinstance(source, fx.Node):
        return (source,)
    sources = tuple(source) if isinstance(source, (list, tuple)) else ()
    of_one = len({viewed_node(n) if isinstance(n, fx.Node) else None for n in sources}) == 1
    return sources if of_one and isinstance(sources[0], fx.Node) else ()


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Tensors in a node's ``meta["val"]``: itself, or those of a list, tuple or dict (which a
    functional Triton kernel returns)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def has_tensor(node: fx.Node) -> bool:
    """The node's result is a tensor, or holds one."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or next(tensors_of(value), None) is not None


class ResultBytes(dict[fx.Node, int]):
    """Bytes of what nodes return, as decisions count them (:func:`decision_bytes`).

    Reading a fake tensor takes longer than all else that is asked of a node.  So a size is read
    once, at the first ``sizes[node]``, and holds as long as no ``meta["val"]`` is replaced: a
    rewrite by a plan replaces none, it makes new nodes.
    """

    def __missing__(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            size = decision_bytes(value.numel() * value.element_size())
        else:
            size = sum([decision_bytes(tensor_bytes(t)) for t in tensors_of(value)])
        self[node] = size
        return size


def schema_arguments(node: fx.Node) -> dict[str, object]:
    """Arguments of an op node by name, in the order of its schema, defaults left out."""
    names = traits_of(node.target).arguments
    if not node.kwargs:
        return dict(zip(names, node.args, strict=False))
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: given[name] for name in names if name in given}
