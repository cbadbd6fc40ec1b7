"""What collectives compute, for all ranks of a group at once, and the rank lists of groups.

The arithmetic half of `spmd_interpreter`: no FX in it, and nothing about starts and waits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REDUCERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul,
    "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
Partition = Sequence[Sequence[int]]


class SpmdError(RuntimeError):
    """The graph breaks a rule that real collectives have; the message names the nodes."""


@dataclass(frozen=True)
class Form:
    """What an op of the collective namespaces does."""

    kind: str
    coalesced: bool = False
    inplace: bool = False

    @staticmethod
    def of(name: str) -> Form | None:
        """`name` is the op's name without namespace and overload; None if it is not supported."""
        inplace = name.endswith("_")
        stem = name.removesuffix("_")
        coalesced = stem.endswith("_coalesced")
        kind = stem.removesuffix("_out").removesuffix("_coalesced")
        kinds = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce",
                 "all_to_all_single", "broadcast"}  # fmt: skip
        return Form(kind, coalesced, inplace) if kind in kinds else None


# ---------------------------------------------------------------- groups


def mesh_groups(
    mesh_shape: Sequence[int], dims_by_name: Mapping[str, Sequence[int]]
) -> dict[str, list[list[int]]]:
    """Rank lists of sub-meshes of a row-major mesh: {"tp": (1,), "world_column_major": (1, 0)}.

    `dims` are in the group's rank order, the slowest first.
    """
    mesh = torch.arange(math.prod(mesh_shape)).reshape(tuple(mesh_shape))
    groups = {}
    for name, dims in dims_by_name.items():
        rest = [d for d in range(mesh.dim()) if d not in dims]
        size = math.prod(mesh_shape[d] for d in dims)
        groups[name] = mesh.permute(rest + list(dims)).reshape(-1, size).tolist()
    return groups


def expand_group(ranks: Sequence[int], world_size: int) -> list[list[int]]:
    """The partition of the world into translates of `ranks`, in the same inner order.

    It is unique if it exists: the smallest rank not yet covered must begin the next translate.
    """
    lowest = min(ranks, default=0)
    covered: set[int] = set()
    partition: list[list[int]] = []
    for base in range(world_size):
        if base in covered:
            continue
        group = [base + r - lowest for r in ranks]
        if not group or len(set(group)) < len(group) or covered & set(group):
            break
        covered |= set(group)
        partition.append(group)
    if covered != set(range(world_size)) or list(ranks) not in partition:
        raise ValueError(f"ranks {list(ranks)} do not tile a world of {world_size} by translation")
    return partition


def check_partition(name: str, partition: Partition, world_size: int) -> None:
    """ValueError unless the lists are disjoint, of equal length and within the world."""
    members = [r for ranks in partition for r in ranks]
    if len(set(members)) < len(members) or not set(members) <= set(range(world_size)):
        raise ValueError(f"group {name!r}: {partition} is no partition within {world_size} ranks")
    if len({len(ranks) for ranks in partition}) > 1:
        raise ValueError(f"group {name!r}: rank lists of different lengths in {partition}")


# ---------------------------------------------------------------- collective arithmetic


def bind(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name; the first one, named differently from op to op, is "payload"."""
    names = [a.name for a in target._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    bound["payload"] = bound.pop(names[0])
    if "reduceOp" in bound:
        bound["reduce_op"] = bound.pop("reduceOp")
    return bound


def _reduce(payloads: Sequence[Tensor], op: str, reduce_dtype: torch.dtype | None) -> Tensor:
    """Left fold in rank order, rounding to `reduce_dtype` or the tensors' dtype at every step."""
    dtype = payloads[0].dtype
    if op not in REDUCERS:
        raise SpmdError(f"unknown reduce op {op!r}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise SpmdError(f"avg of {dtype} is not defined")
    first, *others = (p.to(reduce_dtype or dtype) for p in payloads)
    acc = functools.reduce(REDUCERS[op], others, first.clone())
    return (acc / len(payloads) if op == "avg" else acc).to(dtype).contiguous()


def _all_to_all(payloads: Sequence[Tensor], bound: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Row blocks by each rank's split sizes; both None means even splits (legacy op only)."""
    n = len(payloads)
    even = [[p.shape[0] // n] * n for p in payloads]
    sends = [b["input_split_sizes"] for b in bound]
    receives = [b["output_split_sizes"] for b in bound]
    sends = [e if s is None else list(s) for s, e in zip(sends, even, strict=True)]
    receives = [e if s is None else list(s) for s, e in zip(receives, even, strict=True)]
    for i in range(n):
        if len(sends[i]) != n or len(receives[i]) != n or sum(sends[i]) != payloads[i].shape[0]:
            raise SpmdError(f"splits {sends[i]} / {receives[i]} do not fit {n} ranks and the input")
        if receives[i] != [sends[j][i] for j in range(n)]:
            raise SpmdError(f"group rank {i} expects {receives[i]} rows, others send {sends}")
    blocks = [p.split(s) for p, s in zip(payloads, sends, strict=True)]
    return [torch.cat([blocks[j][i] for j in range(n)]).contiguous() for i in range(n)]


def compute(
    form: Form,
    payloads: Sequence[Tensor],
    bound: Sequence[Mapping[str, Any]],
    reduce_dtype: torch.dtype | None,
) -> list[Tensor]:
    """The data every member of one group receives, for one payload slot."""
    size = len(payloads)
    if form.kind == "all_to_all_single":
        return _all_to_all(payloads, bound)
    if len({p.shape for p in payloads}) > 1:
        raise SpmdError(f"shapes differ between ranks: {[tuple(p.shape) for p in payloads]}")
    if form.kind == "all_gather_into_tensor":
        rows = [p.reshape(1) if p.dim() == 0 else p for p in payloads]
        return [torch.cat(rows).contiguous()] * size
    if form.kind == "broadcast":
        if not 0 <= bound[0]["src"] < size:
            raise SpmdError(f"src {bound[0]['src']} is not a group rank below {size}")
        return [payloads[bound[0]["src"]].clone()] * size
    reduced = _reduce(payloads, bound[0]["reduce_op"], reduce_dtype)
    if form.kind == "all_reduce":
        return [reduced] * size
    if reduced.dim() == 0 or reduced.shape[0] % size:
        raise SpmdError(f"dim 0 of {tuple(reduced.shape)} is not divisible by the size {size}")
    return list(reduced.chunk(size)) if reduced.shape[0] else [reduced] * size
