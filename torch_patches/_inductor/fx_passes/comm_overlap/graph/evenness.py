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

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    is_cast,
    is_full_slice,
    is_view,
    op_name,
    op_namespace,
    reads_only_shape,
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
    """All that is read of a result, behind views and other gathers, is the first part of it.

    What a forward graph returns for its backward tells nothing.
    """
    pending, seen, is_cut = [wait], {wait}, False
    while pending:
        for reader in pending.pop().users:
            if reader.op == "output" or reads_only_shape(reader) or reader in seen:
                continue
            if _is_part(reader):
                if not _keeps_first_part(reader):
                    return False  # parts of a weight, not its padding
                is_cut = True
                continue
            if not _passes_on(reader):
                return False
            seen.add(reader)
            pending.append(reader)
        if len(seen) > _MAX_NODES:
            return True
    return is_cut


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
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
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


def _keeps_first_part(part: fx.Node) -> bool:
    start = part.args[2] if len(part.args) > 2 else part.kwargs.get("start", 0)
    return start in (0, None)
