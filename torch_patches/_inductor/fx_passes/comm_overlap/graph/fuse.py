"""Makes one collective of a chain: the last one takes over the first one's payload.

A gather stands where the last one stood, a reduce-scatter where the first one did, start and wait: what
is alive in between is the smaller tensor, as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import first_argument
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, CollectiveKind

aten = torch.ops.aten


def fuse_chain(
    graph: fx.Graph,
    members: Sequence[Collective],
    arguments: tuple[Any, ...],
    rows: int | torch.SymInt | None,
) -> None:
    """Changes ``graph`` in place; the last start and wait stay, with their tags.

    Args:
        arguments: of the one collective.
        rows: of its result, the other sizes being the payload's; None for a result that has the
            shape of the chain's already.
    """
    first, last = members[0], members[-1]
    payload = first_argument(first.start)
    passed_on = first_argument(last.start)
    assert isinstance(payload, fx.Node)
    start, wait = last.start, last.waits[0]
    start.args, start.kwargs = arguments, {}
    if first.kind is CollectiveKind.REDUCE_SCATTER:
        first.start.append(start)
        first.waits[0].append(wait)
    if rows is not None:
        _give_shape(graph, start, wait, (rows, *payload.meta["val"].shape[1:]))
    _erase_unread(graph, passed_on, payload)


def _give_shape(
    graph: fx.Graph, start: fx.Node, wait: fx.Node, shape: tuple[int | torch.SymInt, ...]
) -> None:
    """Start and wait with the shape of one collective, and a view of the chain's behind them, of
    which one size at most is symbolic."""
    value = wait.meta["val"]
    readers = list(wait.users)
    sizes = [size if isinstance(size, int) else -1 for size in value.shape]
    with graph.inserting_after(wait):
        view = graph.call_function(aten.view.default, (wait, sizes))
    view.meta.update({**wait.meta, "val": value})
    for reader in readers:
        reader.replace_input_with(wait, view)
    for node in (start, wait):
        node.meta["val"] = value.new_empty(shape)


def _erase_unread(graph: fx.Graph, node: object, payload: fx.Node) -> None:
    """Erases what only led from ``payload`` to ``node``."""
    while isinstance(node, fx.Node) and node is not payload and not node.users:
        source = first_argument(node)
        graph.erase_node(node)
        node = source
