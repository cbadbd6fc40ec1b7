"""Blocks of generated graphs (see ``graph_blocks``) whose collectives have a form that is not merged."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from torch_patches.testing.graph_context import GROUPS, Context, maybe, pause

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
legacy = torch.ops.c10d_functional


def coalesced(c: Context, r: Random) -> Iterator[None]:
    """Collectives that the input graph has coalesced already."""
    members = [c.builder.placeholder(r.choice([(2, 2), (4,)])) for _ in range(r.randint(1, 3))]
    kind = r.choice(["gather", "scatter", "reduce"])
    if kind == "gather":
        parts = c.builder.all_gather_coalesced(members, 2, "dp")
    elif kind == "scatter":
        parts = c.builder.reduce_scatter_coalesced(members, "sum", 2, "dp")
    else:
        parts = c.builder.all_reduce_coalesced(members, "sum", "dp")
    yield from pause(r, 2)
    for part in parts:
        c.use(c.builder.wait(part))
        yield from pause(r, 1)


def in_place(c: Context, r: Random) -> Iterator[None]:
    """all_reduce_ on an input or on an intermediate value, or a gather into a buffer."""
    x = c.builder.placeholder(2, 2)
    value = x if maybe(r, 0.5) else c.call(aten.clone, x)
    if maybe(r, 0.5):
        start = c.call(c10d.all_reduce_, value, "sum", "dp")
    else:
        buffer = c.call(aten.empty.memory_format, [4, 2])
        start = c.call(c10d.all_gather_into_tensor_out, value, 2, "dp", out=buffer)
    yield from pause(r, 2)
    c.use(c.builder.wait(start))


def legacy_ops(c: Context, r: Random) -> Iterator[None]:
    """The namespace without an underscore, which names a group by its ranks."""
    ranks = GROUPS["dp"][0]
    x = c.builder.placeholder(2, 2)
    if maybe(r, 0.6):
        start = c.call(legacy.all_gather_into_tensor, x, "", ranks, 2)
    else:
        start = c.call(legacy.reduce_scatter_tensor, x, "sum", "", ranks, 2)
    yield from pause(r, 2)
    result = c.call(legacy.wait_tensor, start)
    c.outputs.append(result)


def oddity(c: Context, r: Random) -> Iterator[None]:
    """A start nobody waits for, a wait on a placeholder, a wait on a finished value."""
    x = c.builder.placeholder(2, 2)
    kind = r.choice(["no wait", "no start", "waited twice"])
    if kind == "no wait":
        c.builder.all_gather(x, 2, "dp")
    elif kind == "no start":
        c.use(c.builder.wait(x))
    else:
        c.use(c.builder.wait(c.builder.gather_and_wait(x, 2, "dp")))
    yield
