"""Puts a graph back as it was, after a rewrite that failed half way."""

from __future__ import annotations

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import relink


class Snapshot:
    """Order, arguments and metadata of every node; linear to take and to restore.

    A node that was erased meanwhile comes back as a new node with the same name, target,
    arguments and metadata.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        # Parallel lists, not an object a node: that many new objects would set off the garbage
        # collector.  Arguments and metadata are replaced by a rewrite, never changed in place.
        self._nodes = list(graph.nodes)
        self._names = [n.name for n in self._nodes]
        self._args = [n.args for n in self._nodes]
        self._kwargs = [n.kwargs for n in self._nodes]
        self._meta = [n.meta for n in self._nodes]

    def restore(self) -> None:
        """Makes the graph equal to what it was when the snapshot was taken."""
        present = set(self._graph.nodes)
        current = {node: node if node in present else self._create(node) for node in self._nodes}
        for place, old in enumerate(self._nodes):
            node = current[old]
            node.args = fx.node.map_arg(self._args[place], current.__getitem__)
            node.kwargs = fx.node.map_arg(self._kwargs[place], current.__getitem__)
            node.name = self._names[place]
            node.meta = self._meta[place]
        kept = set(current.values())
        for node in reversed([n for n in self._graph.nodes if n not in kept]):
            self._graph.erase_node(node)
        relink(self._graph, [current[node] for node in self._nodes])

    def _create(self, old: fx.Node) -> fx.Node:
        return self._graph.create_node(old.op, old.target, (), {}, type_expr=old.type)
