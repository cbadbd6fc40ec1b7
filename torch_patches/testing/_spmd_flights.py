"""Which memory belongs to collectives between their start and their wait.

The memory half of `spmd_interpreter`: told about tensors only, it answers whether a tensor may be
read or written now. Tensors are compared by the bytes they cover, so two slices of one buffer are
apart, and a view is the same as its base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def storage_of(t: Tensor) -> int:
    """Equal for a tensor and its views."""
    return t.untyped_storage()._cdata


def _byte_starts(t: Tensor) -> Tensor:
    """Byte address within the storage of every element of `t`."""
    extent = 1 + sum((s - 1) * st for s, st in zip(t.shape, t.stride(), strict=True))
    index = torch.arange(int(extent)).as_strided(t.shape, t.stride()).flatten()
    return (index + int(t.storage_offset())) * t.element_size()


def _byte_range(t: Tensor) -> tuple[int, int]:
    last = sum((s - 1) * st for s, st in zip(t.shape, t.stride(), strict=True))
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + int(last + 1) * t.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share an element; empty ones meet each other."""
    if a.numel() == 0 or b.numel() == 0:
        return a.numel() == b.numel()
    (a0, a1), (b0, b1) = _byte_range(a), _byte_range(b)
    if a0 >= b1 or b0 >= a1:
        return False
    if (a.is_contiguous() and b.is_contiguous()) or a.element_size() != b.element_size():
        return True
    return bool(torch.isin(_byte_starts(a), _byte_starts(b)).any())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested structure."""
    if isinstance(value, Tensor):
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def written(target: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an overload's schema says it writes."""
    if not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable):
        return []
    arguments = target._schema.arguments
    values = {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in names for t in tensors_in(values.get(name))]


@dataclass(frozen=True, eq=False)
class Flight:
    """One output of one start on one rank: `output` holds poison until `data` is copied in."""

    node_name: str
    payload: Tensor
    output: Tensor
    data: Tensor

    def poison(self) -> None:
        """Fills the output with values that a test notices."""
        dtype = self.output.dtype
        if dtype.is_floating_point or dtype.is_complex:
            self.output.fill_(math.nan)
        else:
            largest = 1 if dtype == torch.bool else torch.iinfo(dtype).max
            self.output.fill_(min(largest, torch.iinfo(torch.int64).max))


@dataclass
class FlightTable:
    """The collectives between start and wait, by storage. Keeps their tensors alive until then."""

    by_output: dict[int, list[Flight]] = field(default_factory=dict)
    by_payload: dict[int, list[Flight]] = field(default_factory=dict)

    def add(self, flight: Flight) -> None:
        flight.poison()
        self.by_output.setdefault(storage_of(flight.output), []).append(flight)
        self.by_payload.setdefault(storage_of(flight.payload), []).append(flight)

    def arriving(self, t: Tensor) -> list[Flight]:
        """The flights whose output is (partly) in `t`."""
        return [f for f in self.by_output.get(storage_of(t), ()) if _overlap(f.output, t)]

    def sending(self, t: Tensor) -> list[Flight]:
        """The flights whose payload is (partly) in `t`."""
        return [f for f in self.by_payload.get(storage_of(t), ()) if _overlap(f.payload, t)]

    def land(self, flights: Sequence[Flight]) -> None:
        """Reveals the data and forgets the flights."""
        for flight in flights:
            for table, t in ((self.by_output, flight.output), (self.by_payload, flight.payload)):
                table[storage_of(t)].remove(flight)
                if not table[storage_of(t)]:
                    del table[storage_of(t)]
            flight.output.copy_(flight.data)

    def all(self) -> list[Flight]:
        return [f for flights in self.by_output.values() for f in flights]
