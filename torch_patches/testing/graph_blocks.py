"""Pieces of collective graphs, as coroutines that a scheduler interleaves.

A block adds a few nodes and yields wherever other blocks may put theirs: between a start and its
wait, between a wait and its use.  What a block writes in place is its own, so any interleaving is a
legal program.  ``BLOCKS`` lists them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import Traffic
from torch_patches.testing import effect_ops
from torch_patches.testing.graph_context import (
    GROUPS,
    SIZE_OF,
    WORLD_SIZE,
    Context,
    Parameter,
    maybe,
    pause,
)
from torch_patches.testing.graph_odd_blocks import coalesced, in_place, legacy_ops, oddity

aten = torch.ops.aten

SHARD_SHAPES = ((2, 2), (4,), (3,), (1, 3), (2, 3), (0, 2), (), (2, 1, 2))

Block = Callable[[Context, Random], Iterator[None]]


# ---------------------------------------------------------------- parameters


def _shard(c: Context, r: Random) -> fx.Node:
    """A parameter shard: of many shapes, sometimes not contiguous, sometimes bf16."""
    shape = r.choice(SHARD_SHAPES)
    dtype = r.choice(c.dtypes)
    if len(shape) == 2 and maybe(r, 0.2):
        param = c.builder.placeholder(shape, dtype=dtype, stride=(1, shape[0] or 1))
    else:
        param = c.builder.placeholder(shape, dtype=dtype)
    c.new_parameter(param)
    return param


def _prepare(c: Context, param: fx.Node, r: Random) -> fx.Node:
    """What stands between a parameter and its gather: cast, pad, view, slice; shared sometimes."""
    value = c.look_through(param, r)
    if value.meta["val"].dtype is not c.dtypes[-1] and maybe(r, 0.8):
        value = c.cast(value, c.dtypes[-1])
    if maybe(r, 0.2):
        c.use(value)
    dims = value.meta["val"].dim()
    if dims and maybe(r, 0.2):
        value = c.call(aten.constant_pad_nd, value, [0, 0] * (dims - 1) + [0, 1])
    if dims > 1 and maybe(r, 0.2):
        value = c.call(aten.reshape, value, [-1])
    if dims and maybe(r, 0.15):
        value = c.call(aten.slice.Tensor, value, 0, 0, 1)
    return c.look_through(value, r)


def _gather(
    c: Context, value: fx.Node, group: str, r: Random, parameter: Parameter
) -> Iterator[None]:
    """Start, wait, uses of a parameter."""
    start = c.builder.all_gather(value, SIZE_OF[group], c.group(group, r))
    c.tag(start, Traffic.PARAMETER, parameter)
    yield from pause(r)
    result = c.builder.wait(c.look_through(start, r))
    if maybe(r, 0.1):
        c.use(c.builder.wait(start))  # a second wait
    result = c.look_through(result, r)
    rows = result.meta["val"].shape[0]
    if rows > 2 and maybe(r, 0.2):
        result = c.call(aten.slice.Tensor, result, 0, 0, rows - 1)  # drops the padding
    yield from pause(r, 2)
    for _ in range(r.choice([1, 1, 2])):
        c.use(result)
    if maybe(r, 0.2):
        c.outputs.append(result)


def fsdp_param(c: Context, r: Random) -> Iterator[None]:
    """placeholder -> cast/pad/view -> gather -> wait -> use"""
    group = r.choice(c.fsdp_groups)
    param = _shard(c, r)
    c.params.append((param, group))
    yield from pause(r, 1)
    yield from _gather(c, _prepare(c, param, r), group, r, c.inputs[param])


def fsdp_recompute(c: Context, r: Random) -> Iterator[None]:
    """The gather of an earlier parameter again, as a backward does."""
    if c.params:
        param, group = r.choice(c.params)
        yield from _gather(c, _prepare(c, param, r), group, r, c.inputs[param])


def fsdp_chain(c: Context, r: Random) -> Iterator[None]:
    """A gather of a gather, on the two dims of the mesh."""
    shard = c.builder.placeholder(r.choice([(1, 3), (2,)]))
    parameter = c.new_parameter(shard)
    inner, outer = r.choice([("tp", "dp"), ("dp", "tp")])
    first = c.builder.all_gather(shard, SIZE_OF[inner], inner)
    c.tag(first, Traffic.PARAMETER, parameter)
    yield from pause(r, 2)
    first = c.look_through(c.builder.wait(first), r)
    if maybe(r, 0.2):
        c.use(first)
    yield from _gather(c, first, outer, r, parameter)


# ---------------------------------------------------------------- gradients


def _gradient(c: Context, r: Random, rows: int) -> fx.Node:
    """A value made from the chain, with ``rows`` dividing its first dimension."""
    shape = r.choice([(rows,), (rows, 2), (2 * rows, 3), (rows, 1, 2), (0, 2)])
    scale = c.builder.placeholder(shape)
    grad = c.call(aten.mul.Tensor, scale, c.call(aten.sum, c.x))
    if c.dtypes[-1] is torch.bfloat16 and maybe(r, 0.5):
        grad = c.cast(grad, torch.bfloat16)
    if len(shape) == 2 and maybe(r, 0.15):
        grad = c.call(aten.mul.Tensor, grad, 2.0)
        flipped = c.call(aten.clone, c.call(aten.permute, grad, [1, 0]),
                         memory_format=torch.contiguous_format)  # fmt: skip
        grad = c.call(aten.permute, flipped, [1, 0])
    return c.look_through(grad, r)


def _finish(c: Context, reduced: fx.Node, r: Random, starts: list[fx.Node]) -> None:
    """From the wait to the output: cast, scale, accumulate; sometimes read by compute too.

    Args:
        starts: the collectives that made it.
    """
    value = c.look_through(reduced, r)
    if maybe(r, 0.2):
        value = c.call(aten.div.Tensor, value, 4.0)
    if maybe(r, 0.1):
        value = c.call(aten.mul.Tensor, value, c.builder.placeholder(()))
    if maybe(r, 0.2):
        val = value.meta["val"]
        value = c.call(
            aten.add.Tensor, c.builder.placeholder(val.shape, dtype=val.dtype), value
        )  # accumulation
    is_read = maybe(r, 0.15)
    if is_read:
        c.use(value)  # a gradient norm: no longer terminal
    if maybe(r, 0.9):
        c.outputs.append(value)
        parameter = c.gradients[value] = c.new_parameter()
        for start in starts:
            if is_read:
                c.tag(start, Traffic.OTHER)
            else:
                c.tag(start, Traffic.GRADIENT, parameter)


def fsdp_grad(c: Context, r: Random) -> Iterator[None]:
    """compute -> reduce-scatter -> wait -> output"""
    group = r.choice(c.fsdp_groups)
    grad = _gradient(c, r, SIZE_OF[group])
    yield from pause(r, 1)
    op = r.choice(["sum", "sum", "sum", "avg"])
    start = c.builder.reduce_scatter(grad, op, SIZE_OF[group], c.group(group, r))
    yield from pause(r, 4)
    _finish(c, c.builder.wait(c.look_through(start, r)), r, [start])


def ddp_grad(c: Context, r: Random) -> Iterator[None]:
    """compute -> all-reduce -> wait -> output; scalars too"""
    grad = _gradient(c, r, 1) if maybe(r, 0.85) else c.call(aten.sum, c.x)
    if maybe(r, 0.2):
        grad = c.call(aten.div.Tensor, grad, 2.0)
    start = c.builder.all_reduce(
        grad, r.choice(["sum", "sum", "sum", "avg", "max"]), r.choice(["dp", "world"])
    )
    yield from pause(r, 4)
    _finish(c, c.builder.wait(c.look_through(start, r)), r, [start])


def hsdp_grad(c: Context, r: Random) -> Iterator[None]:
    """reduce-scatter within the shard group, then all-reduce across the replicas"""
    scatter = c.builder.reduce_scatter(_gradient(c, r, 2), "avg", 2, "fsdp_tp")
    yield from pause(r, 2)
    scattered = c.look_through(c.builder.wait(scatter), r)
    start = c.builder.all_reduce(scattered, "avg", "dp")
    yield from pause(r, 3)
    _finish(c, c.builder.wait(start), r, [scatter, start])


# ---------------------------------------------------------------- activations


def tensor_parallel(c: Context, r: Random) -> Iterator[None]:
    """Sequence parallelism (gather, mm, reduce-scatter) or an all-reduce, on the critical path."""
    if maybe(r, 0.4):
        start = c.builder.all_reduce(c.call(aten.mm, c.x, c.x), "sum", "tp")
        c.tag(start, Traffic.OTHER)
        yield from pause(r, 1)
        c.use(c.builder.wait(start))
        return
    start = c.builder.all_gather(c.x, 2, "tp")
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 1)
    full = c.builder.wait(start)
    product = c.call(aten.mm, full, c.builder.placeholder(4, 4))
    start = c.builder.reduce_scatter(product, "sum", 2, "tp")
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 1)
    c.use(c.builder.wait(start))


def expert_parallel(c: Context, r: Random) -> Iterator[None]:
    """Tokens out, compute, tokens back; split sizes even, or inputs that differ between ranks."""
    group = r.choice(["dp", "tp"])
    if maybe(r, 0.5):
        sends: Any = [2, 2]
        receives: Any = [2, 2]
    else:
        sends, receives = _uneven_splits(c, group, r)
    start = c.builder.all_to_all(c.x, receives, sends, group)
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 2)
    tokens = c.call(aten.mul.Tensor, c.builder.wait(start), 2.0)
    start = c.builder.all_to_all(tokens, sends, receives, group)
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 2)
    c.use(c.builder.wait(start))


def _uneven_splits(c: Context, group: str, r: Random) -> tuple[list[fx.Node], list[fx.Node]]:
    """Sizes as graph inputs: rank i sends ``table[i][j]`` rows to member j of its group."""
    table = {rank: (k := r.randint(0, 4), 4 - k) for rank in range(WORLD_SIZE)}
    sends = [c.builder.symbol(4) for _ in range(2)]
    receives = [c.builder.symbol(4) for _ in range(2)]
    for j in range(2):
        c.values[sends[j]] = [table[rank][j] for rank in range(WORLD_SIZE)]
        c.values[receives[j]] = [0] * WORLD_SIZE
        for ranks in GROUPS[group]:
            for place, rank in enumerate(ranks):
                c.values[receives[j]][rank] = table[ranks[j]][place]
    return sends, receives


def broadcast(c: Context, r: Random) -> Iterator[None]:
    """A parameter sent from one rank."""
    start = c.builder.broadcast(_shard(c, r), r.randint(0, 1), "dp")
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 1)
    c.use(c.builder.wait(start))


def compute(c: Context, r: Random) -> Iterator[None]:
    """Work that collectives may hide under."""
    for _ in range(r.randint(1, 4)):
        op = r.choice([aten.sin, aten.neg, aten.mm])
        c.x = c.call(op, c.x, *([c.x] if op is aten.mm else []))
        yield


# ---------------------------------------------------------------- effects


def mutated_param(c: Context, r: Random) -> Iterator[None]:
    """A parameter written between two gathers of it: each must see its own version."""
    group = r.choice(c.fsdp_groups)
    param = c.builder.placeholder(r.choice([(2, 2), (4,)]))
    parameter = c.new_parameter(param)
    view = c.look_through(param, r)
    if maybe(r, 0.7):
        yield from _gather(c, _prepare(c, view, r), group, r, parameter)
    yield from pause(r, 1)
    _write(c, param if maybe(r, 0.5) else view, r)
    yield from pause(r, 1)
    yield from _gather(c, _prepare(c, param, r), group, r, parameter)


def _write(c: Context, target: fx.Node, r: Random) -> None:
    if maybe(r, 0.5):
        c.call(aten.add_.Tensor, target, 1.0)
    else:
        c.call(aten.copy_, target, c.call(aten.mul.Tensor, target, 0.5))


def mutated_value(c: Context, r: Random) -> Iterator[None]:
    """An intermediate value written before its gather starts, and what was gathered, after."""
    value = c.call(aten.clone, c.builder.placeholder(2, 2))
    yield from pause(r, 1)
    _write(c, value, r)
    start = c.builder.all_gather(value, 2, "dp")
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 2)
    result = c.builder.wait(start)
    if maybe(r, 0.5):
        c.use(result)
    yield from pause(r, 1)
    _write(c, c.look_through(result, r), r)
    yield from pause(r, 1)
    c.use(result)
    if maybe(r, 0.5):
        c.outputs.append(result)


def optimizer_step(c: Context, r: Random) -> Iterator[None]:
    """A gradient reduced and put into an input in place; nothing is returned."""
    grad = c.call(aten.mul.Tensor, c.builder.placeholder(4, 2), c.call(aten.sum, c.x))
    start = c.builder.reduce_scatter(grad, "avg", 2, "dp")
    c.tag(start, Traffic.OTHER)
    yield from pause(r, 2)
    reduced = c.builder.wait(start)
    if maybe(r, 0.7):
        c.outputs.append(reduced)
    yield from pause(r, 1)
    c.call(aten.sub_.Tensor, c.builder.placeholder(2, 2), reduced)


def barrier(c: Context, r: Random) -> Iterator[None]:
    """An unknown effect, on the chain of compute or on an input of its own."""
    kind = r.choice(["reads", "writes", "apart"])
    if kind == "reads":
        c.call(effect_ops.barrier, c.x)
    else:
        x = c.builder.placeholder(2) if kind == "apart" else c.call(aten.clone, c.x)
        c.call(effect_ops.barrier_, x)
        yield
        c.use(x)
    yield


def random_numbers(c: Context, r: Random) -> Iterator[None]:
    """Each draw advances the generator, so the order of the draws is visible in the values."""
    if maybe(r, 0.5):
        c.use(c.call(aten.rand_like, c.x))
    else:
        c.use(c.call(aten.bernoulli, c.call(aten.abs, c.call(aten.sin, c.x))))
    yield


#: name -> (how often, block)
BLOCKS: dict[str, tuple[int, Block]] = {
    "fsdp_param": (10, fsdp_param), "fsdp_recompute": (3, fsdp_recompute),
    "fsdp_chain": (2, fsdp_chain), "fsdp_grad": (7, fsdp_grad), "ddp_grad": (4, ddp_grad),
    "hsdp_grad": (2, hsdp_grad), "tensor_parallel": (2, tensor_parallel),
    "expert_parallel": (1, expert_parallel), "broadcast": (1, broadcast), "compute": (3, compute),
    "coalesced": (1, coalesced), "in_place": (1, in_place), "legacy_ops": (1, legacy_ops),
    "oddity": (1, oddity), "mutated_param": (2, mutated_param), "mutated_value": (2, mutated_value),
    "optimizer_step": (1, optimizer_step), "barrier": (1, barrier),
    "random_numbers": (1, random_numbers),
}  # fmt: skip
