"""Creates FX nodes with complete metadata, for the two merge forms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    COLLECTIVE_NAMESPACES,
    op_name,
    op_namespace,
    schema_arguments,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import (
    TAG_MARK,
    tag_of,
    without_parameter,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Bucket, Traffic

#: On what a bucket is made of besides its members: copies, buffers and their pieces.  All ranks have
#: the same ones, whatever their shards are.
PART_MARK = "comm_overlap_part"

#: A node with more of them is told of new ones all at once: each time costs as much as it has.
MANY_INPUTS = 16

#: Metadata that describes the donor's own value or arguments, hence not handed on.
_OWN_METADATA = frozenset({"val", "eager_input_vals", "tensor_meta", "example_value"})


@dataclass(frozen=True, eq=False)
class Merged:
    """Nodes that replaced a bucket's members.

    Args:
        start: the merged collective.
        start_nodes: copies in and the start, in order.
        replaced: erased node -> the node that took its place, for ordering constraints.
        wait_nodes: what belongs at the first wait: the waits and, of the copying form, copies out.
    """

    start: fx.Node
    start_nodes: tuple[fx.Node, ...]
    replaced: dict[fx.Node, fx.Node]
    wait_nodes: tuple[fx.Node, ...] = ()


class Emitter:
    """Creates nodes at the end of the graph; their place is decided afterwards."""

    def __init__(self, graph: fx.Graph, ordered: Set[fx.Node], run_eagerly: bool = False) -> None:
        """
        Args:
            graph: to which nodes are added.
            ordered: nodes with ordering constraints, which must not lose their identity.
            run_eagerly: the graph is run op by op as it is, not compiled.
        """
        self.graph = graph
        self.ordered = ordered
        self.run_eagerly = run_eagerly
        self._output = next(iter(reversed(graph.nodes)))
        self._handed_over: dict[fx.Node, fx.Node] = {}
        self._readers = {self._output: None}  # that are told in the end
        self._late: dict[fx.Node, None] = {}

    def call(
        self,
        target: Callable[..., object],
        args: tuple[Any, ...],
        donor: fx.Node,
        value: object,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """A call node with ``value`` as its fake result and the donor's other metadata."""
        with self.graph.inserting_before(self._output):
            node = self.graph.call_function(target, args, kwargs or {})
        node.meta.update({k: v for k, v in donor.meta.items() if k not in _OWN_METADATA})
        node.meta["val"] = value
        return node

    def compute(
        self,
        target: Callable[..., object],
        args: tuple[Any, ...],
        donor: fx.Node,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """A call node whose fake result is found by running the op on its fake arguments."""
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        with fake_mode_of(values):
            value = target(*values, **(kwargs or {}))
        return self.call(target, args, donor, value, kwargs)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Hands the uses of ``old`` over; readers of many nodes follow in :meth:`finish`.

        A backward returns thousands of gradients: its output is not to be read again for each.
        """
        for user in list(old.users):
            if user in self._readers or len(user.all_input_nodes) > MANY_INPUTS:
                self._readers[user] = None
                self._handed_over[old] = new
            else:
                user.replace_input_with(old, new)

    def erase(self, nodes: Sequence[fx.Node]) -> None:
        """Erases nodes that nobody reads any more, users first; those that are still read by who
        follows in :meth:`finish`, there."""
        for node in nodes:
            if any(user in self._readers or user in self._late for user in node.users):
                self._late[node] = None
            else:
                self.graph.erase_node(node)

    def finish(self) -> None:
        """Once, at the end."""
        if self._handed_over:
            for reader in self._readers:
                reader.args = fx.node.map_arg(reader.args, self._now)
                reader.kwargs = fx.node.map_arg(reader.kwargs, self._now)
        for node in self._late:
            self.graph.erase_node(node)

    def _now(self, node: fx.Node) -> fx.Node:
        while node in self._handed_over:
            node = self._handed_over[node]
        return node


def fake_mode_of(values: object) -> contextlib.AbstractContextManager[object]:
    """The mode that the first fake tensor in ``values`` belongs to, as a context."""
    for value in _flatten(values):
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def _flatten(values: object) -> list[object]:
    if isinstance(values, (list, tuple)):
        return [leaf for item in values for leaf in _flatten(item)]
    return [values]


def fake_view(
    value: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """What a view op returns: ``shape`` and ``strides`` over the storage of ``value``.

    ``offset`` is in elements from where ``value`` starts.  Found without running the op in its
    fake mode, which takes seven times as long and would dominate a rewrite.
    """
    start = int(value.storage_offset()) + offset
    if not isinstance(value, FakeTensor):
        return torch.as_strided(value, shape, strides, start)
    with in_kernel_invocation_manager(value.fake_mode):  # so that no kernel of its device is needed
        plain = torch.as_strided(value, shape, strides, start)
    return FakeTensor(value.fake_mode, plain, value.device)


def fake_copy(value: torch.Tensor) -> torch.Tensor:
    """What a copy of a contiguous tensor into one like it returns.

    Found without running the op in its fake mode, as :func:`fake_view` is.
    """
    shape, strides = value.shape, value.stride()
    if not isinstance(value, FakeTensor):
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    with no_dispatch():
        plain = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, plain, value.device)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor; a size of 0 counts as 1, as torch has it."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return strides


def collective_op(start: fx.Node, *, coalesced: bool) -> torch._ops.OpOverload:
    """The op to launch for a bucket: that of a member, in its namespace, or its coalesced form."""
    assert op_namespace(start.target) in COLLECTIVE_NAMESPACES
    name = f"{op_name(start.target)}{'_coalesced' if coalesced else ''}"
    namespace = getattr(torch.ops, str(op_namespace(start.target)))
    op = getattr(namespace, name).default
    assert isinstance(op, torch._ops.OpOverload)
    return op


def merged_arguments(start: fx.Node, payload: Any) -> tuple[Any, ...]:
    """Arguments of a member with its payload replaced; keyword arguments become positional."""
    assert isinstance(start.target, torch._ops.OpOverload)
    arguments = schema_arguments(start)
    rest = [a.name for a in start.target._schema.arguments][1:]
    return (payload, *(arguments[name] for name in rest if name in arguments))


def mark(start: fx.Node, index: int, bucket: Bucket) -> None:
    """Marks a merged collective so that no pass merges it again; its tag names no parameter.

    The mark tells what it carries: behind copies into a bucket, structure does not.
    """
    traffic = {member.traffic.value for member in bucket.members}
    start.meta[BUCKET_MARK] = {
        "bucket": index,
        "members": len(bucket.members),
        "traffic": traffic.pop() if len(traffic) == 1 else Traffic.OTHER.value,
    }
    tag = tag_of(start)
    if tag is not None:
        start.meta[TAG_MARK] = without_parameter(tag)
