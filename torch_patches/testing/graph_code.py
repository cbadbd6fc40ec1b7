"""Prints an FX graph as the ``GraphBuilder`` program that makes it, for failure messages."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import traits_of
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK, tag_of
from torch_patches.testing.graph_builder import Group


def builder_code(gm: fx.GraphModule) -> list[str]:
    """Lines that leave the graph in ``gm``; they need :data:`IMPORTS`."""
    lines = ["b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))"]
    symbols: dict[str, str] = {}
    for node in gm.graph.nodes:
        if _is_written_in_its_wait(node):
            continue
        if node.op == "placeholder":
            lines.append(f"{node.name} = {_placeholder(node, symbols)}")
        elif node.op == "output":
            lines.append(f"gm = b.output({', '.join(_text(a) for a in node.args[0])})")
        else:
            lines.append(f"{node.name} = {_call(node)}")
    return [*lines, *_metadata(gm.graph)]


IMPORTS = ("from torch_patches.testing.program import *",)


def _is_written_in_its_wait(node: fx.Node) -> bool:
    """A start with a wait right behind it, and nothing to say of it: both are one line."""
    said = {"desc", "nn_module_stack", "fwd_nn_module_stack", TAG_MARK}
    return (
        collective_kind(node) is not None
        and list(node.users) == [node.next]
        and traits_of(node.next.target).is_wait
        and said.isdisjoint(node.meta)
    )


def _metadata(graph: fx.Graph) -> Iterator[str]:
    """Tags, descriptors and the modules that made a node."""
    for node in graph.nodes:
        place = "gm.graph.output_node()" if node.op == "output" else node.name
        if "desc" in node.meta:
            yield f'{place}.meta["desc"] = {node.meta["desc"]!r}'
        for mark in ("nn_module_stack", "fwd_nn_module_stack"):
            if mark in node.meta:
                kinds = {
                    k: (p, c if isinstance(c, str) else f"{c.__module__}.{c.__qualname__}")
                    for k, (p, c) in node.meta[mark].items()
                }
                yield f'{place}.meta["{mark}"] = {kinds!r}'
        if (tag := tag_of(node)) is not None:
            arguments = (
                f"{tag.traffic}, {tag.source}, {tag.parameter!r}, {tag.index!r}, {tag.place!r}"
            )
            yield f'{place}.meta["{TAG_MARK}"] = CollectiveTag({arguments})'


def _placeholder(node: fx.Node, symbols: dict[str, str]) -> str:
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        symbols[str(val)] = f'{node.name}.meta["val"]'
        return f'b.symbol({val.node.hint}, "{node.name}")'
    if not isinstance(val, torch.Tensor):
        return f'b.opaque_placeholder("{node.name}", {val!r})'
    shape = _sizes(val.shape, symbols)
    layout = "" if _is_row_major(val) else f", stride={_sizes(val.stride(), symbols)}"
    dtype = "" if val.dtype is torch.float32 else f", dtype={val.dtype}"
    return f'b.placeholder({shape}{dtype}{layout}, name="{node.name}")'


def _is_row_major(val: torch.Tensor) -> bool:
    """Exactly the strides that a new tensor has; ``is_contiguous`` overlooks dimensions of size 1."""
    if any(isinstance(size, torch.SymInt) for size in val.shape):
        return val.is_contiguous()
    return val.stride() == torch.empty(val.shape, device="meta").stride()


def _sizes(sizes: Any, symbols: dict[str, str]) -> str:
    texts = [symbols.get(str(size), str(size)) for size in sizes]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"b.getitem({node.args[0]}, {node.args[1]})"
    named = [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    arguments = [_target(node.target), *(_text(a) for a in node.args), *named]
    return f"b.call({', '.join(arguments)})"


def _target(target: Any) -> str:
    return f"torch.ops.{target}" if isinstance(target, torch._ops.OpOverload) else str(target)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) for item in value)}]"
    if not isinstance(value, fx.Node):
        return repr(value)
    return _call(value) if _is_written_in_its_wait(value) else value.name


__all__ = ["IMPORTS", "Group", "builder_code"]
