"""Puts a graph back as it was, after a rewrite that failed half way."""

from __future__ import annotations

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import relink


class Snapshot:
    """Order, targets, arguments, users and metadata of every node, and the owner's submodules; linear
    to take and to restore.

    A node that was erased meanwhile comes back as a new node with the same name, target,
    arguments and metadata.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        # Parallel lists, not an object a node: that many new objects would set off the garbage
        # collector.  Arguments and metadata are replaced by a rewrite, never changed in place.
        self._nodes = list(graph.nodes)
        self._names = [n.name for n in self._nodes]
        self._targets = [n.target for n in self._nodes]
        self._args = [n.args for n in self._nodes]
        self._kwargs = [n.kwargs for n in self._nodes]
        self._meta = [n.meta for n in self._nodes]
        self._users = [user for n in self._nodes for user in n.users]
        self._user_counts = [len(n.users) for n in self._nodes]
        self._submodules = set(self._owned())

    def restore(self) -> None:
        """Makes the graph equal to what it was when the snapshot was taken."""
        present = set(self._graph.nodes)
        current = {node: node if node in present else self._create(node) for node in self._nodes}
        kept = set(current.values())
        for place, old in enumerate(self._nodes):
            node = current[old]
            node.target = self._targets[place]
            node.args = fx.node.map_arg(self._args[place], current.__getitem__)
            node.kwargs = fx.node.map_arg(self._kwargs[place], current.__getitem__)
            node.name = self._names[place]
            node.meta = self._meta[place]
        self._erase([n for n in self._graph.nodes if n not in kept])
        self._restore_users(current)
        relink(self._graph, [current[node] for node in self._nodes])
        for name in [name for name in self._owned() if name not in self._submodules]:
            delattr(self._graph.owning_module, name)

    def _owned(self) -> list[str]:
        owner = self._graph.owning_module
        return [] if owner is None else list(owner._modules)

    def _create(self, old: fx.Node) -> fx.Node:
        return self._graph.create_node(old.op, old.target, (), {}, type_expr=old.type)

    def _erase(self, nodes: list[fx.Node]) -> None:
        """What reads them is erased, too, or was never put into the graph."""
        for node in nodes:
            node.args, node.kwargs = (), {}
        for node in nodes:
            node.users.clear()
            self._graph.erase_node(node)

    def _restore_users(self, current: dict[fx.Node, fx.Node]) -> None:
        """In their order, which passes behind may go by; and without nodes that were made, but not
        put into the graph, when something failed."""
        begin = 0
        for old, count in zip(self._nodes, self._user_counts, strict=True):
            users = current[old].users
            users.clear()
            users.update((current[user], None) for user in self._users[begin : begin + count])
            begin += count
