"""Are the shards of a chain even?  Told by what all ranks see: the whole tensor.

    shard -> pad -> AG -> slice -> pad -> AG -> slice        gradient -> pad -> RS -> slice -> RS
    [---- differ by rank ----]                  [all]        [all]               [differs]

Where a dimension does not divide, some ranks pad and cut and others do not.  The whole, which they all
have, is padded too: its padding is cut off behind the last gather, or added in front of the first
reduce-scatter, perhaps beyond views and other collectives.

What the joint graph shows is noted on its starts: the split may leave a forward with the result and its
backward with what cuts it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    does_work,
    first_argument,
    is_cast,
    is_full_slice,
    is_view,
    op_name,
    op_namespace,
    reads_only_shape,
    same_sizes,
    schema_arguments,
    wait_source,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import makes_constant

_PIECES = frozenset({"split", "split_with_sizes", "chunk", "cat", "stack", "clone", "contiguous"})
_STARTS = frozenset({"all_gather_into_tensor", "reduce_scatter_tensor"})
#: In ``meta`` of the starts of a chain that was found uneven.
UNEVEN_MARK = "comm_overlap_uneven"
#: Nodes looked at; a chain that goes on further counts as uneven.
_MAX_NODES = 256


def is_cut_behind(wait: fx.Node) -> bool:
    """All that is read of a result, behind views and other gathers, are parts that leave some of it
    out.

    Which part does not matter: padding is cut off behind the first one, but a rank may also take the
    part of a weight that it works on, which is the first one on one rank only.  Parts that together
    are the whole are those of a weight.  What a forward graph returns for its backward tells nothing.
    """
    pending, seen = [wait], {wait}
    parts: list[fx.Node] = []
    while pending:
        for reader in pending.pop().users:
            if reader.op == "output" or reads_only_shape(reader) or reader in seen:
                continue
            if _is_part(reader):
                parts.append(reader)
                continue
            if not _passes_on(reader):
                return False
            seen.add(reader)
            pending.append(reader)
        if len(seen) > _MAX_NODES:
            return True
    return bool(parts) and not _are_the_whole(parts)


def is_padded_in_front(start: fx.Node) -> bool:
    """What is sent has been padded, behind views, casts or other reduce-scatters."""
    pending: list[fx.Node] = list(start.all_input_nodes)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op != "call_function":
            continue
        if _pads(node):
            return True
        if not _passes_on(node):
            continue
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending.extend(fresh)
        if len(seen) > _MAX_NODES:
            return True
    return False


def pads_by_nothing(node: fx.Node) -> bool:
    """A ``constant_pad_nd`` that adds and takes away nothing on every side."""
    given = schema_arguments(node).get("pad")
    return isinstance(given, (list, tuple)) and all(isinstance(p, int) and p == 0 for p in given)


def _pads(node: fx.Node) -> bool:
    if op_namespace(node.target) != "aten":
        return False
    if op_name(node.target) == "constant_pad_nd":
        return not pads_by_nothing(node)
    return op_name(node.target) == "cat" and any(map(makes_constant, node.all_input_nodes))


def _passes_on(node: fx.Node) -> bool:
    """Its elements are those of its inputs, perhaps of other ranks too."""
    if wait_source(node) is not None or node.target is operator.getitem:
        return True
    name, namespace = op_name(node.target), op_namespace(node.target)
    if namespace == "_c10d_functional":
        return name in _STARTS
    return namespace == "aten" and (is_view(node) or is_cast(node) or name in _PIECES)


def _is_part(node: fx.Node) -> bool:
    """A slice of any dimension that does not keep the whole."""
    is_slice = op_namespace(node.target) == "aten" and op_name(node.target) in ("slice", "narrow")
    return is_slice and not is_full_slice(node)


def _are_the_whole(parts: Sequence[fx.Node]) -> bool:
    """Some of the parts are, together, all of what they are parts of, along one dimension."""
    intervals: dict[tuple[fx.Node, int], list[tuple[int, int]]] = {}
    for part in parts:
        found = _interval(part)
        if found is not None:
            source, dim, begin, end = found
            intervals.setdefault((source, dim), []).append((begin, end))
    return any(
        _reach(sorted(along)) >= source.meta["val"].shape[dim]
        for (source, dim), along in intervals.items()
    )


def _interval(part: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """What a part is taken from, along which dimension, and from where to where; None where that is
    not known."""
    given = schema_arguments(part)
    source, dim, begin = first_argument(part), given.get("dim", 0), given.get("start") or 0
    if not isinstance(source, fx.Node) or not isinstance(dim, int) or not isinstance(begin, int):
        return None
    source = _as_it_is(source)
    shape = source.meta["val"].shape
    size, length = shape[dim], part.meta["val"].shape[dim]
    if not isinstance(size, int) or not isinstance(length, int) or given.get("step", 1) != 1:
        return None
    begin = min(max(begin + size if begin < 0 else begin, 0), size)
    return source, dim % len(shape), begin, begin + length


def _as_it_is(node: fx.Node) -> fx.Node:
    """What a node shows in the same shape: ranks differ in such views."""
    while not does_work(node) and isinstance(source := first_argument(node), fx.Node):
        if not same_sizes(source.meta["val"].shape, node.meta["val"].shape):
            break
        node = source
    return node


def _reach(intervals: Sequence[tuple[int, int]]) -> int:
    """How far sorted intervals go from 0 on without a gap."""
    reach = 0
    for begin, end in intervals:
        if begin > reach:
            break
        reach = max(reach, end)
    return reach
