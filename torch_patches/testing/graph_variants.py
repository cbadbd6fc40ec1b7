"""The same program written differently: other names, views that change nothing, other dict orders,
and shards padded or cut where another rank's are not.

Ranks whose graphs differ only in this must get the same schedule.
"""

from __future__ import annotations

import copy
from random import Random

import torch
import torch.fx as fx

from torch_patches.testing.graph_builder import evaluate

aten = torch.ops.aten


def vary(gm: fx.GraphModule, r: Random) -> fx.GraphModule:
    """A copy of ``gm`` with new names, views on random edges and shuffled metadata dicts."""
    variant = copy.deepcopy(gm)
    for node in list(variant.graph.nodes):
        if isinstance(node.meta.get("val"), torch.Tensor) and r.random() < 0.3:
            _insert_view(node, r)
    for node in list(variant.graph.nodes):
        if _is_shard(node) and r.random() < 0.5:
            _insert_padding(node)
    rename(variant.graph, r)
    for node in variant.graph.nodes:
        items = list(node.meta.items())
        r.shuffle(items)
        node.meta = dict(items)
    variant.graph.lint()
    return variant


def _insert_view(node: fx.Node, r: Random) -> None:
    """Some users of ``node`` read an alias of it instead; outputs keep reading the value itself."""
    users = [user for user in node.users if user.op == "call_function"]
    chosen = [u for u in users if r.random() < 0.7]
    if not chosen:
        return
    op = r.choice([aten.alias.default, aten.detach.default, aten.view.default])
    extra = ([*node.meta["val"].shape],) if op is aten.view.default else ()
    if any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape):
        op, extra = aten.alias.default, ()
    graph = node.graph
    behind = node if node.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(behind):
        view = graph.call_function(op, (node, *extra))
    with node.meta["val"].fake_mode:
        view.meta["val"] = evaluate(op, (node.meta["val"], *extra), {})
    for user in chosen:
        user.replace_input_with(node, view)


def _is_shard(node: fx.Node) -> bool:
    """A parameter that goes straight into a gather, or a gradient that leaves the graph."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not node.meta["val"].dim():
        return False
    if node.op == "placeholder":
        return any("all_gather_into_tensor.default" in str(u.target) for u in node.users)
    waits = "wait_tensor" in str(node.target) and bool(node.users)
    return waits and all(user.op == "output" for user in node.users)


def _insert_padding(node: fx.Node) -> None:
    """By nothing, so that values and shapes stay; what reads the shard reads the copy instead."""
    if any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape):
        return
    users = [u for u in node.users if u.op == "output" or "all_gather" in str(u.target)]
    graph = node.graph
    behind = node if node.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(behind):
        padded = graph.call_function(aten.constant_pad_nd.default, (node, [0, 0]))
    with node.meta["val"].fake_mode:
        padded.meta["val"] = evaluate(padded.target, (node.meta["val"], [0, 0]), {})
    for user in users:
        user.replace_input_with(node, padded)


def rename(graph: fx.Graph, r: Random) -> None:
    """Names whose alphabetical order has nothing to do with the graph's."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    numbers = list(range(len(nodes)))
    r.shuffle(numbers)
    for node, number in zip(nodes, numbers, strict=True):
        node._rename(f"n{number}_{r.choice('abz')}")
        if node.op == "placeholder":
            node.target = node.name
