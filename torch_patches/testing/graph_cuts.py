"""Smaller graphs out of larger ones: without a node, and a stretch of nodes alone."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx as fx
from torch._subclasses import FakeTensor

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect


def replace_by_input(node: fx.Node) -> None:
    """Lets the users of ``node`` read its first tensor argument like it, or else a new input; erases
    it.  Nothing happens to what is no tensor."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return
    alike = [
        n
        for n in node.all_input_nodes
        if isinstance(n.meta["val"], torch.Tensor)
        and n.meta["val"].shape == val.shape
        and n.meta["val"].stride() == val.stride()
        and n.meta["val"].dtype is val.dtype
    ]
    new = alike[0] if alike else _new_input(node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _new_input(node: fx.Node) -> fx.Node:
    """Placeholders are numbered in graph order: the new one comes last."""
    graph = node.graph
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1] if inputs else graph._root):
        new = graph.placeholder(f"cut_{node.name}")
    new.meta["val"] = node.meta["val"]
    return new


def stretch(gm: fx.GraphModule, begin: int, end: int) -> fx.GraphModule:
    """The nodes from the ``begin``-th to before the ``end``-th of those that are no inputs, as a
    graph of its own.

    What it reads from outside becomes an input, and so do constants without data; what is read
    outside becomes an output.  Collectives that are not waited for inside are left out, and so are
    waits for collectives outside.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")][begin:end]
    nodes = [n for n in nodes if n.op != "get_attr" or not _is_fake(gm, n)]
    chosen = set(nodes) - _half_inside(gm, set(nodes))
    nodes = [node for node in nodes if node in chosen]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for outside in _read_by(nodes, gm):
        if outside.op == "get_attr" and not _is_fake(gm, outside):
            made[outside] = graph.node_copy(outside)
        else:
            made[outside] = graph.placeholder(outside.name)
            made[outside].meta = dict(outside.meta)
            made[outside].meta.pop("tensor_meta", None)
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    last = gm.graph.output_node()
    outputs = [n for n in nodes if any(u not in chosen for u in n.users) and _is_value(n)]
    result = graph.output(tuple(made[node] for node in outputs))
    result.meta = {k: v for k, v in last.meta.items() if k not in ("val", "desc")}
    _drop_descriptors(graph)
    graph.lint()
    return fx.GraphModule(gm, graph)


def _half_inside(gm: fx.GraphModule, inside: set[fx.Node]) -> set[fx.Node]:
    """Starts that are not waited for inside with what reads them, and waits for starts outside."""
    half: set[fx.Node] = set()
    for collective in collect(gm.graph).collectives:
        own = {collective.start, *collective.waits}
        between = [u for u in collective.start.users if u not in own]
        own.update(between)
        if not own <= inside:
            half |= own & inside
    return half


def _read_by(nodes: Sequence[fx.Node], gm: fx.GraphModule) -> list[fx.Node]:
    """What the nodes read from outside, inputs and attributes first, in graph order."""
    inside = set(nodes)
    read = {n for node in nodes for n in node.all_input_nodes if n not in inside}
    ordered = [n for n in gm.graph.nodes if n in read]
    return sorted(ordered, key=lambda n: n.op == "get_attr" and not _is_fake(gm, n))


def _is_fake(gm: fx.GraphModule, node: fx.Node) -> bool:
    """An attribute of a captured graph has no data."""
    return isinstance(operator.attrgetter(str(node.target))(gm), FakeTensor)


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _drop_descriptors(graph: fx.Graph) -> None:
    """They count the inputs and outputs of the whole graph."""
    for node in graph.find_nodes(op="placeholder"):
        node.meta.pop("desc", None)
