"""Puts a graph back as it was, after a rewrite that failed half way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import relink


@dataclass(frozen=True, eq=False)
class _Saved:
    node: fx.Node
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


class Snapshot:
    """Order, arguments and metadata of every node; linear to take and to restore.

    A node that was erased meanwhile comes back as a new node with the same name, target,
    arguments and metadata.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._saved = [_Saved(n, n.name, n.args, dict(n.kwargs), dict(n.meta)) for n in graph.nodes]

    def restore(self) -> None:
        """Makes the graph equal to what it was when the snapshot was taken."""
        present = set(self._graph.nodes)
        current: dict[fx.Node, fx.Node] = {}
        for saved in self._saved:
            survivor = saved.node in present
            current[saved.node] = saved.node if survivor else self._create(saved)
        for saved in self._saved:
            node = current[saved.node]
            node.args = fx.node.map_arg(saved.args, current.__getitem__)
            node.kwargs = fx.node.map_arg(saved.kwargs, current.__getitem__)
            node.name = saved.name
            node.meta = dict(saved.meta)
        kept = set(current.values())
        for node in reversed([n for n in self._graph.nodes if n not in kept]):
            self._graph.erase_node(node)
        relink(self._graph, [current[saved.node] for saved in self._saved])

    def _create(self, saved: _Saved) -> fx.Node:
        return self._graph.create_node(
            saved.node.op, saved.node.target, (), {}, name=saved.name, type_expr=saved.node.type
        )
