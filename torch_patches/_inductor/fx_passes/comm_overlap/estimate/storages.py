"""Which storages a graph makes, how large, from when to when.

Views, getitems, waits and in-place results share the storage of what they are made from; each
output of an op with several has its own.  A storage lives from the node that makes it to its last
use through any of its aliases.

A collective's result lives from its start.  What it sends lives until its wait: the process group
holds it, and Inductor keeps it too.  An all-reduce or a broadcast sends a copy that it made first,
which is its result.  All results of a coalesced launch live until the last wait for any of them:
c10d registers the one work of the launch for each result, and the work holds them all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    OpTraits,
    ResultBytes,
    first_argument,
    inputs_of,
    tensors_of,
    traits_of,
    wait_sources,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import (
    decision_bytes,
    has_symbols,
    known_contiguous,
    tensor_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

#: Indices of storages: of a tensor, or of each item that an op with several results returns.
_Indices = tuple[int, ...]

_SENDS_A_COPY = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST})
#: Functional forms of writes: PyTorch clones the whole storage of the first argument
#: (``clone_preserve_strides``), since the result shall have its strides and offset.
_CLONES_STORAGE = frozenset(
    {
        "_foreach_copy", "as_strided_scatter", "copy", "diagonal_scatter", "select_scatter",
        "slice_scatter",
    }
)  # fmt: skip
#: Views where the layout allows it, copies elsewhere.
_MAYBE_COPIES = frozenset({"contiguous", "reshape", "reshape_as"})


@dataclass(frozen=True)
class _Flight:
    """What is held until the wait for one result: what it was sent as, and its launch's results."""

    sent: _Indices
    together: _Indices


class Storages:
    """Storages by index: ``sizes`` in bytes, ``made_at`` and ``last_use`` as places of the order."""

    def __init__(
        self,
        shared_sizes: Mapping[fx.Node, int],
        eager: bool,
        idle: Set[fx.Node] = frozenset(),
        own_sizes: ResultBytes | None = None,
    ) -> None:
        """Arguments as those of ``memory.live_bytes``."""
        self.sizes: list[int] = []
        self.made_at: list[int] = []
        self.last_use: list[int] = []
        self._shared_sizes, self._eager, self._idle = shared_sizes, eager, idle
        self._own_sizes = ResultBytes() if own_sizes is None else own_sizes
        self._everything: dict[fx.Node, _Indices] = {}
        self._items: dict[fx.Node, tuple[_Indices, ...]] = {}  # where there are several, or none
        self._in_flight: dict[int, _Flight] = {}

    def visit(self, node: fx.Node, place: int) -> None:
        """Takes the next node of the order."""
        last_use, everything = self.last_use, self._everything
        for used in inputs_of(node):
            for storage in everything[used]:
                last_use[storage] = place
        traits = traits_of(node.target)
        # A collective, a wait, or something that may wrap one.
        may_communicate = traits.communicates or traits.is_control_deps
        sources = wait_sources(node) if may_communicate else ()
        if sources:
            self._wait(node, sources, place)
            return
        self._find_results(node, place, traits)
        if may_communicate and collective_kind(node) is not None:
            self._launch(node)

    def _wait(self, node: fx.Node, sources: Sequence[fx.Node], place: int) -> None:
        """Hands on what it waits for: a tensor, or the list of several."""
        items = tuple([self._everything[source] for source in sources])
        self._everything[node] = tuple([storage for item in items for storage in item])
        if isinstance(node.meta.get("val"), (list, tuple)):
            self._items[node] = items
        for storage in self._everything[node]:
            self._land(storage, place)

    def _all(self, node: fx.Node) -> _Indices:
        return self._everything[node]

    def _items_of(self, node: fx.Node) -> tuple[_Indices, ...]:
        """Storages of each item of the node's result."""
        items = self._items.get(node)
        return (self._everything[node],) if items is None else items

    def _use(self, storages: _Indices, place: int) -> None:
        for storage in storages:
            self.last_use[storage] = place

    def _find_results(self, node: fx.Node, place: int, traits: OpTraits) -> None:
        if traits.is_view or traits.returns_alias or node in self._idle:
            shared = self._shared(node, traits)
            if shared is not None:
                self._everything[node] = shared
                return
        if node.op == "output":
            self._everything[node] = ()
        else:
            self._make(node, place)

    def _shared(self, node: fx.Node, traits: OpTraits) -> _Indices | None:
        """What a view or an in-place op hands on; None where it makes something new."""
        if node in self._idle or _shares_storage(node, traits):
            viewed = first_argument(node)
            if isinstance(viewed, fx.Node):
                return self._view(node, viewed)
        if traits.returns_alias and (aliased := _written_arguments(node)):
            return tuple([s for n in aliased for s in self._everything[n]])
        return None

    def _view(self, node: fx.Node, viewed: fx.Node) -> _Indices:
        if node.target is operator.getitem:
            index = _place_of(node.args[1], viewed.meta.get("val"))
            items = self._items_of(viewed)
            if index is not None and -len(items) <= index < len(items):
                return items[index]
        return self._everything[viewed]

    def _make(self, node: fx.Node, place: int) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self._everything[node] = (len(self.sizes),)
            self.sizes.append(self._size(node, value))
            self.made_at.append(place)
            self.last_use.append(place)
            return
        items = _parts_of(value)
        tensors = [list(tensors_of(item)) for item in items]
        sizes = iter(self._sizes(node, [t for item in tensors for t in item]))
        made = tuple([tuple([self._add(next(sizes), place) for _ in item]) for item in tensors])
        self._items[node] = made
        self._everything[node] = tuple([storage for item in made for storage in item])

    def _add(self, size: int, place: int) -> int:
        self.sizes.append(size)
        self.made_at.append(place)
        self.last_use.append(place)
        return len(self.sizes) - 1

    def _size(self, node: fx.Node, tensor: torch.Tensor) -> int:
        """Bytes of the storage of a result that is one tensor."""
        if self._eager:
            return self._sizes(node, (tensor,))[0]
        shared = self._shared_sizes.get(node)
        return self._own_sizes[node] if shared is None else shared

    def _sizes(self, node: fx.Node, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Bytes of the storage of each result of ``node``."""
        shared = self._shared_sizes.get(node)
        if shared is not None and tensors:
            part, rest = divmod(shared, len(tensors))
            return [part + rest, *[part] * (len(tensors) - 1)]
        if self._eager and traits_of(node.target).name in _CLONES_STORAGE:
            written = _nodes_of(first_argument(node))
            return [sum(self.sizes[s] for s in self._all(n)) for n in written]
        return [decision_bytes(tensor_bytes(t)) for t in tensors]

    def _launch(self, start: fx.Node) -> None:
        """Ties each result to what lives until the wait for it."""
        outputs = self._items_of(start)
        together = self._all(start) if len(outputs) > 1 else ()
        for output, sent in zip(outputs, self._sent(start, len(outputs)), strict=True):
            self._in_flight.update(dict.fromkeys(output, _Flight(sent, together)))

    def _sent(self, start: fx.Node, count: int) -> list[_Indices]:
        """What the group reads for each of ``count`` results."""
        if collective_kind(start) in _SENDS_A_COPY:
            return [()] * count
        payloads = _nodes_of(first_argument(start))
        if len(payloads) == count and not self._eager:
            return [self._all(n) for n in payloads]
        return [tuple(s for n in inputs_of(start) for s in self._all(n))] * count

    def _land(self, result: int, place: int) -> None:
        """A wait at ``place``; a second one for the same result finds nothing in flight."""
        flight = self._in_flight.pop(result, None)
        if flight is not None:
            self._use(flight.sent, place)
            self._use(flight.together, place)


def _parts_of(value: object) -> Sequence[object]:
    """The items of a list, tuple or dict; anything else is one."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else (value,)


def _place_of(index: object, value: object) -> int | None:
    """Place of an item among :func:`_parts_of`; None where ``value`` has no such item."""
    if isinstance(value, dict):
        return list(value).index(index) if index in value else None
    return index if isinstance(value, (list, tuple)) and isinstance(index, int) else None


def _nodes_of(argument: object) -> list[fx.Node]:
    many = argument if isinstance(argument, (list, tuple)) else [argument]
    return [n for n in many if isinstance(n, fx.Node)]


def _shares_storage(node: fx.Node, traits: OpTraits) -> bool:
    """A view; a reshape only where the layout allows it without a copy."""
    # an op that torch calls a view says in its schema what it aliases
    if not traits.is_view and not (traits.returns_alias and getattr(node.target, "is_view", False)):
        return False
    if traits.name not in _MAYBE_COPIES:
        return True
    source = first_argument(node)
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return True
    if known_contiguous(before):
        return True
    if traits.name == "contiguous" or has_symbols(before) or has_symbols(after):
        return False
    return can_view(before.shape, before.stride(), after.shape)


def can_view(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """A tensor of ``shape`` and ``strides`` can be seen in the shape ``wanted`` without a copy.

    Dimensions that lie in memory like one (each stride is the next one's times its size) can be cut
    anew; ``wanted`` must cut each such run by itself.
    """
    if 0 in shape:
        return True
    sizes = list(wanted)
    run = 1
    kept = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    for place in reversed(range(len(kept))):
        size, stride = kept[place]
        run *= size
        if place and kept[place - 1][1] == stride * size:
            continue
        while sizes and (run > 1 or sizes[-1] == 1):
            last = sizes.pop()
            if run % last:
                return False
            run //= last
        if run > 1:
            return False
    return True


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments whose storage the op returns by its schema: in-place and ``out=`` forms."""
    aliased: list[fx.Node] = []
    for name, position in _written_names(node.target):
        value: Any = node.kwargs.get(name)
        if position < len(node.args):
            value = node.args[position]
        fx.node.map_arg(value, aliased.append)
    return aliased


@functools.cache  # by op, of which there are few; reading a schema is slow
def _written_names(target: object) -> tuple[tuple[str, int], ...]:
    """Names and positions of the arguments that an op writes to and returns."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    schema = target._schema
    if not any(r.alias_info is not None for r in schema.returns):
        return ()
    return tuple(
        (argument.name, position)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
