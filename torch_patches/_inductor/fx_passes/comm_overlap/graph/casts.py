"""Casts in front of gathers, found in every form that ranks with a short shard give them.

    p -> cast -> AG              p -> pad -> cast -> AG              p -> cast -> cat(.., zeros) -> AG

One rank has the first form, another the second or third.  What is made of a cast must not depend on
which it is: the graph that comes out is estimated, and what is decided by that must be the same on
all ranks.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    first_argument,
    is_cast,
    is_view,
    op_name,
    reads_only_shape,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import only_data


@dataclass(frozen=True, eq=False)
class CastChain:
    """A cast that only one gather reads.

    Args:
        cast: the node.
        behind: views and pads between it and the payload, in that order.
    """

    cast: fx.Node
    behind: tuple[fx.Node, ...]


def cast_in_front(payload: fx.Node, ordered: Set[fx.Node]) -> CastChain | None:
    """The cast behind which only views and pads make the payload.

    None where somebody else reads one of them, or where one is ``ordered``: against a write of what
    it reads, for instance.
    """
    behind: list[fx.Node] = []
    node: fx.Node | None = payload
    while node is not None and node not in ordered and _has_one_reader(node):
        if is_cast(node):
            return CastChain(node, tuple(reversed(behind)))
        behind.append(node)
        node = passed_on(node)
    return None


def _has_one_reader(node: fx.Node) -> bool:
    """Ranks with a short shard also read its shape, to pad it."""
    return sum(not reads_only_shape(user) for user in node.users) == 1


def passed_on(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, or what it pads."""
    source: object = None
    if is_view(node) or op_name(node.target) == "constant_pad_nd":
        source = first_argument(node)
    elif op_name(node.target) == "cat":
        source = only_data(node)
    return source if isinstance(source, fx.Node) else None
