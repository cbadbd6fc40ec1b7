"""Ways to read a parameter that is stored as this rank's shard, in bare functional collectives.

Groups are names, so a model that reads its parameters this way is traced without a process group
(see ``traced.py``).  Each way says what shard it stores of a full tensor and gives the full tensor
back; its gradient takes the matching way:

=============  ============================================  ========================================
way            reading                                       gradient
=============  ============================================  ========================================
``Sharded``    (cast, pad,) all-gather (, slice, cast)       cast, (pad,) reduce-scatter (, slice);
                                                             then an all-reduce if replicated (HSDP)
``Replicated`` cast                                          all-reduce (, divide)
``Quantised``  int8 data and their scale, two all-gathers    reduce-scatter
``Chained``    all-gather on one group, then on another      reduce-scatter on both
=============  ============================================  ========================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed._functional_collectives  # registers the ops' fake kernels
import torch.nn.functional as F
from torch import Tensor

_c10d = torch.ops._c10d_functional


def all_gather(x: Tensor, group_size: int, group: str) -> Tensor:
    """The group's tensors one behind the other."""
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), group_size, group))


def reduce_scatter(x: Tensor, op: str, group_size: int, group: str) -> Tensor:
    """This rank's part of the reduced tensor."""
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x.contiguous(), op, group_size, group))


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The reduced tensor, on every rank."""
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group))


class Way(Protocol):
    """How a parameter is stored and read."""

    def stored_shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard that this rank keeps of a tensor of shape ``full``."""
        ...

    def read(self, stored: Tensor) -> Tensor:
        """The tensor to compute with."""
        ...


# ---------------------------------------------------------------- sharded: FSDP, HSDP


@dataclass(frozen=True)
class Sharded:
    """Rows over a group of ranks, and copies of that over the replicas (FSDP, HSDP).

    Args:
        group, group_size: ranks that share the rows.
        dtype: to gather and compute in, None for the stored one; gradients travel as stored.
        replicas: group of the ranks with the same rows, None where there are none.
        missing_rows: rows by which this rank's shard is shorter than the largest one.
        cast_after: gather as stored and cast what came.
    """

    group: str = "dp"
    group_size: int = 4
    dtype: torch.dtype | None = None
    replicas: str | None = None
    missing_rows: int = 0
    cast_after: bool = False

    def stored_shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return (-(-full[0] // self.group_size) - self.missing_rows, *full[1:])

    def read(self, stored: Tensor) -> Tensor:
        return _ReadSharded.apply(stored, self)


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rows]) if rows else x


class _ReadSharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, way: Sharded) -> Tensor:
        ctx.way, ctx.rows, ctx.dtype = way, stored.shape[0], stored.dtype
        dtype = way.dtype or stored.dtype
        shard = stored if way.cast_after else stored.to(dtype)
        full = all_gather(_padded(shard, way.missing_rows), way.group_size, way.group)
        full = full[: full.shape[0] - way.missing_rows] if way.missing_rows else full
        # torch 2.11 loses the gradient behind a cast that casts nothing.
        return full.to(dtype) if dtype is not full.dtype else full

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        way = ctx.way
        gradient = _padded(gradient.to(ctx.dtype), way.missing_rows)
        shard = reduce_scatter(gradient, "avg", way.group_size, way.group)
        if way.replicas is not None:
            shard = all_reduce(shard, "avg", way.replicas)
        return shard[: ctx.rows] if way.missing_rows else shard, None


# ---------------------------------------------------------------- replicated: DDP


@dataclass(frozen=True)
class Replicated:
    """A copy on each rank (DDP).

    Args:
        group: ranks with a copy.
        dtype: to compute in, None for the stored one.
        divisor: gradients are added up and divided by it; None: the collective averages.
    """

    group: str = "dp"
    dtype: torch.dtype | None = None
    divisor: float | None = None

    def stored_shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return full

    def read(self, stored: Tensor) -> Tensor:
        return _ReadReplicated.apply(stored, self)


class _ReadReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, way: Replicated) -> Tensor:
        ctx.way, ctx.dtype = way, stored.dtype
        return stored.view_as(stored) if way.dtype is None else stored.to(way.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        way, gradient = ctx.way, gradient.to(ctx.dtype)
        if way.divisor is None:
            return all_reduce(gradient, "avg", way.group), None
        return all_reduce(gradient, "sum", way.group) / way.divisor, None


# ---------------------------------------------------------------- quantised


@dataclass(frozen=True)
class Quantised:
    """Rows over a group, gathered as 8-bit integers together with a scale for each shard."""

    group: str = "dp"
    group_size: int = 4

    def stored_shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return (full[0] // self.group_size, *full[1:])

    def read(self, stored: Tensor) -> Tensor:
        return _ReadQuantised.apply(stored, self)


class _ReadQuantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, way: Quantised) -> Tensor:
        ctx.way = way
        scale = stored.abs().amax().clamp(min=1e-12) / 127.0
        data = (stored / scale).round().to(torch.int8)
        data = all_gather(data, way.group_size, way.group)
        scales = all_gather(scale.reshape(1), way.group_size, way.group)
        shards = data.view(way.group_size, -1).to(stored.dtype) * scales[:, None]
        return shards.view(data.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return reduce_scatter(gradient, "avg", ctx.way.group_size, ctx.way.group), None


# ---------------------------------------------------------------- two shard dimensions


@dataclass(frozen=True)
class Chained:
    """Rows over one group and each part again over another: a gather of a gather."""

    inner: str = "tp"
    inner_size: int = 2
    outer: str = "dp"
    outer_size: int = 2

    def stored_shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return (full[0] // (self.inner_size * self.outer_size), *full[1:])

    def read(self, stored: Tensor) -> Tensor:
        return _ReadChained.apply(stored, self)


class _ReadChained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, way: Chained) -> Tensor:
        ctx.way = way
        part = all_gather(stored, way.inner_size, way.inner)
        return all_gather(part, way.outer_size, way.outer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        way = ctx.way
        part = reduce_scatter(gradient, "avg", way.outer_size, way.outer)
        return reduce_scatter(part, "avg", way.inner_size, way.inner), None


# ---------------------------------------------------------------- activations


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, group_size: int) -> Tensor:
        ctx.group, ctx.group_size = group, group_size
        return all_gather(x, group_size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter(gradient, "sum", ctx.group_size, ctx.group), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, group_size: int) -> Tensor:
        ctx.group, ctx.group_size = group, group_size
        return reduce_scatter(x, "sum", group_size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(gradient, ctx.group_size, ctx.group), None, None


def gather_sequence(x: Tensor, group: str = "tp", group_size: int = 2) -> Tensor:
    """Sequence parallelism: the whole sequence; a reduce-scatter in the backward."""
    return _GatherSequence.apply(x, group, group_size)


def scatter_sequence(x: Tensor, group: str = "tp", group_size: int = 2) -> Tensor:
    """Sequence parallelism: this rank's part of the sum; an all-gather in the backward."""
    return _ScatterSequence.apply(x, group, group_size)


class _MatmulOfShards(torch.autograd.Function):
    """``x @ weight`` on parts of the sequence; the weight's gradient needs the whole of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str, group_size: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.group_size = group, group_size
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        whole_x = all_gather(x, ctx.group_size, ctx.group)
        whole_gradient = all_gather(gradient, ctx.group_size, ctx.group)
        return gradient @ weight.t(), whole_x.t() @ whole_gradient, None, None


def matmul_of_shards(x: Tensor, weight: Tensor, group: str = "tp", group_size: int = 2) -> Tensor:
    """The backward graph holds "saved activation -> all-gather", which looks like a parameter's."""
    return _MatmulOfShards.apply(x, weight, group, group_size)


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, previous: Tensor) -> Tensor:
        ctx.save_for_backward(previous)
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (previous,) = ctx.saved_tensors
        return previous + gradient, None


def accumulate(stored: Tensor, previous: Tensor) -> Tensor:
    """``stored``, whose gradient is added to ``previous``."""
    return _Accumulate.apply(stored, previous)
