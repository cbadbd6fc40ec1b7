"""Live bytes along the order of a graph: ``peak_bytes(graph) -> PeakMemory``.

What counts is storages, not nodes: views, getitems, waits and in-place results share the storage
of what they are made from; each output of an op with several has its own.  A storage lives from
the node that makes it to its last use through any of its aliases; at a node both its inputs and
its outputs live.  A collective's output lives from its start, its input until its wait.  Inputs of
the graph live throughout (see ``free_inputs``), outputs to the end.

Limits: a storage counts as the bytes of the tensor it was made for; the allocator's rounding,
fragmentation and workspaces of kernels are left out; the order is that of the graph run eagerly,
without what a compiler fuses or reuses; inputs are taken to be different storages.  Symbolic sizes
count by the fallback that all ranks share.  Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    first_argument,
    is_view,
    op_name,
    tensors_of,
    wait_source,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import (
    decision_bytes,
    known_contiguous,
    tensor_bytes,
)

#: Indices of storages: of a tensor, or of each item that an op with several results returns.
_Storages = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PeakMemory:
    """The largest number of live bytes, and the first node at which they live (None: no node)."""

    peak_bytes: int
    node: fx.Node | None


def peak_bytes(
    graph: fx.Graph, free_inputs: bool = False, kept: Set[fx.Node] = frozenset()
) -> PeakMemory:
    """Peak of the live bytes of ``graph`` in its order.

    Args:
        free_inputs: an input dies after its last use, as the saved activations of a compiled
            backward do, unless it is ``kept``.
        kept: inputs that the caller holds anyway, parameters above all.
    """
    live = live_bytes(graph, free_inputs, kept)
    before = live.inputs
    peak, where = before, None
    for node, size in zip(graph.nodes, live.at_node, strict=True):
        if size > peak:
            peak, where = size, node
    return PeakMemory(peak, where)


@dataclass(frozen=True)
class LiveBytes:
    """Live bytes before the first node, and at each node in graph order, inputs and outputs of the
    node included."""

    inputs: int
    at_node: tuple[int, ...]


def live_bytes(
    graph: fx.Graph, free_inputs: bool = False, kept: Set[fx.Node] = frozenset()
) -> LiveBytes:
    """Live bytes along the graph's order; arguments as for :func:`peak_bytes`."""
    lives = _Lives()
    order = list(graph.nodes)
    for place, node in enumerate(order):
        lives.visit(node, place)
    made: list[int] = [0] * len(order)
    dying: list[int] = [0] * len(order)
    inputs = 0
    for storage, size in enumerate(lives.sizes):
        owner = order[lives.made_at[storage]]
        if owner.op in ("placeholder", "get_attr"):
            inputs += size
            if not free_inputs or owner.op == "get_attr" or owner in kept:
                continue
        else:
            made[lives.made_at[storage]] += size
        dying[lives.last_use[storage]] += size
    live, at_node = inputs, []
    for place in range(len(order)):
        live += made[place]
        at_node.append(live)
        live -= dying[place]
    return LiveBytes(inputs, tuple(at_node))


@dataclass
class _Lives:
    """Which storages there are, how large, from when to when."""

    sizes: list[int] = field(default_factory=list)
    made_at: list[int] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)
    _items: dict[fx.Node, tuple[_Storages, ...]] = field(default_factory=dict)
    _in_flight: dict[int, _Storages] = field(default_factory=dict)

    def visit(self, node: fx.Node, place: int) -> None:
        for used in node.all_input_nodes:
            self._use(self._all(used), place)
        source = wait_source(node)
        if source is not None:
            for storage in self._all(source):
                self._use(self._in_flight.get(storage, ()), place)
        self._items[node] = self._results(node, source, place)
        self._use(self._all(node), place)
        if source is None and collective_kind(node) is not None:
            self._launch(node)

    def _all(self, node: fx.Node) -> _Storages:
        return tuple(s for item in self._items.get(node, ()) for s in item)

    def _use(self, storages: _Storages, place: int) -> None:
        for storage in storages:
            self.last_use[storage] = place

    def _results(self, node: fx.Node, source: fx.Node | None, place: int) -> tuple[_Storages, ...]:
        """Storages of each item of the node's result."""
        if node.op == "output":
            return ()
        if source is not None:
            return (self._all(source),)
        viewed = first_argument(node) if _shares_storage(node) else None
        if isinstance(viewed, fx.Node):
            return self._view(node, viewed)
        aliased = _aliased_arguments(node)
        if aliased:
            return (tuple(s for n in aliased for s in self._all(n)),)
        value = node.meta.get("val")
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(self._make(tensors_of(item), place) for item in items)

    def _view(self, node: fx.Node, viewed: fx.Node) -> tuple[_Storages, ...]:
        items = self._items.get(viewed, ())
        index = node.args[1] if node.target is operator.getitem else None
        several = isinstance(viewed.meta.get("val"), (list, tuple))
        if several and isinstance(index, int) and len(items) == len(viewed.meta["val"]):
            return (items[index],)
        return (self._all(viewed),)

    def _make(self, tensors: Iterable[torch.Tensor], place: int) -> _Storages:
        made: list[int] = []
        for tensor in tensors:
            made.append(len(self.sizes))
            self.sizes.append(decision_bytes(tensor_bytes(tensor)))
            self.made_at.append(place)
            self.last_use.append(place)
        return tuple(made)

    def _launch(self, start: fx.Node) -> None:
        """Ties each payload to the output whose wait ends its use."""
        payload = first_argument(start)
        outputs = self._items[start]
        if isinstance(payload, (list, tuple)) and len(payload) == len(outputs):
            inputs = [self._all(n) for n in payload if isinstance(n, fx.Node)]
        else:
            inputs = [tuple(s for n in start.all_input_nodes for s in self._all(n))] * len(outputs)
        for output, used in zip(outputs, inputs, strict=True):
            self._in_flight.update(dict.fromkeys(output, used))


def _shares_storage(node: fx.Node) -> bool:
    """A view; a reshape only where the layout allows it without a copy."""
    if not is_view(node):
        return False
    source = first_argument(node)
    if op_name(node.target) != "reshape" or not isinstance(source, fx.Node):
        return True
    value = source.meta.get("val")
    return not isinstance(value, torch.Tensor) or known_contiguous(value)


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments whose storage the op returns by its schema: in-place and ``out=`` forms."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    if not any(r.alias_info is not None for r in target._schema.returns):
        return []
    aliased: list[fx.Node] = []
    arguments = target._schema.arguments
    values: list[Any] = [*node.args]
    values += [node.kwargs.get(a.name) for a in arguments[len(node.args) :]]
    for argument, value in zip(arguments, values, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.node.map_arg(value, aliased.append)
    return aliased
