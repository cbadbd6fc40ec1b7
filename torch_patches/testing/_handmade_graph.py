"""FX graphs with collectives, written by hand in one expression.

`handmade(2, lambda call, x, y: ...)` makes a graph with two placeholders x and y; `call(op, *args)`
adds a node named after the op, and what the function returns is the output:

    handmade(1, lambda call, x: wait(call, call(C.all_reduce, x, "sum", "g")))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

Build = Callable[..., Any]


def handmade(n_inputs: int, build: Build, attrs: dict[str, Any] | None = None) -> fx.GraphModule:
    """`attrs` are what get_attr nodes read."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"in{i}") for i in range(n_inputs)]

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        target = getattr(op, "default", op)
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        return graph.create_node("call_function", target, args, kwargs, name=name)

    graph.output(build(call, *inputs))
    return fx.GraphModule(attrs or {}, graph)


def wait(call: Callable[..., fx.Node], x: fx.Node) -> fx.Node:
    return call(torch.ops._c10d_functional.wait_tensor, x)


def started(op: Any, *args: Any) -> Build:
    """x -> wait(op(x, *args))"""
    return lambda call, x: wait(call, call(op, x, *args))
