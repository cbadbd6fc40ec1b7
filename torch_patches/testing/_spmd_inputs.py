"""Random inputs for the placeholders of an SPMD graph, from their fake values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor


def _hint(size: int | torch.SymInt, name: str) -> int:
    """A symbolic size's hint; unbacked ones have none, and a guess would differ from the graph."""
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise ValueError(f"placeholder {name}: {size} has no hint")
    return int(size.node.hint)


def _values(
    shape: Sequence[int], dtype: torch.dtype, high: int, scale: float, generator: torch.Generator
) -> Tensor:
    """Normal numbers times `scale`, or integers in [0, high)."""
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator) * scale
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)
    largest = 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, high - 1)
    return torch.randint(0, largest + 1, shape, generator=generator).to(dtype)


def _like(fake: Any, name: str, high: int, scale: float, generator: torch.Generator) -> Any:
    """A real value for one placeholder: a tensor of that geometry, an int, or None for the rest."""
    if isinstance(fake, torch.SymInt) or (isinstance(fake, int) and not isinstance(fake, bool)):
        return _hint(fake, name)
    if not isinstance(fake, Tensor):
        return fake if isinstance(fake, (bool, float, str)) else None
    shape = [_hint(s, name) for s in fake.shape]
    stride = [_hint(s, name) for s in fake.stride()]
    # An expanded dim (stride 0) has one element in memory.
    stored = [1 if st == 0 else s for s, st in zip(shape, stride, strict=True)]
    result = torch.empty_strided(stored, stride, dtype=fake.dtype)
    result.copy_(_values(stored, fake.dtype, high, scale, generator))
    return result if stored == shape else result.as_strided(shape, stride)


def random_inputs(
    gm: fx.GraphModule,
    world_size: int,
    seed: int = 0,
    replicated: Callable[[fx.Node], bool] | None = None,
    *,
    high: int = 2048,
    scale: float = 1.0,
) -> list[list[Any]]:
    """`inputs[rank]` for `SpmdInterpreter.run`, from the placeholders' `meta["val"]`.

    `replicated(placeholder)` says whose values are equal on all ranks; each rank still gets its
    own tensor. A placeholder without a value (a DeviceMesh) gets None.
    """
    inputs: list[list[Any]] = [[] for _ in range(world_size)]
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        same = replicated is not None and replicated(node)
        for rank in range(world_size):
            generator = torch.Generator()
            # Any injective mix of the three will do; the factors bound ranks and placeholders.
            generator.manual_seed((seed * 100_003 + index) * 65_537 + (0 if same else rank))
            inputs[rank].append(_like(node.meta.get("val"), node.name, high, scale, generator))
    return inputs
