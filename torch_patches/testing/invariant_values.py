"""Runs a graph on all ranks before and after a change, and compares what comes out.

    expected = execute(gm, description)
    check_values(gm, changed, expected, description)

Values are compared bit for bit, or within a tolerance where sums may round otherwise; so are shapes,
strides and which of the inputs and outputs share storage.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from torch_patches.testing.spmd_interpreter import SpmdInterpreter
from torch_patches.testing.strategies import Description


class CaseError(ValueError):
    """The input graph breaks a rule by itself."""


class InvariantError(AssertionError):
    """The pipeline broke an invariant; ``letter`` says which."""

    def __init__(self, letter: str, problem: str) -> None:
        super().__init__(f"({letter}) {problem}")
        self.letter = letter

    @property
    def kind(self) -> str:
        """The letter, and the error's type where the pipeline raised: failures of one kind have one
        cause as far as one can tell."""
        raised = re.search(r"raised (\w+)", str(self))
        return self.letter + (f" {raised[1]}" if raised else "")


@dataclass(frozen=True, eq=False)
class Execution:
    """Results, final inputs and shared storages of one interpreted run, rank by rank."""

    results: list[Any]
    inputs: list[list[Any]]
    aliasing: list[set[tuple[int, int]]]


def execute(gm: fx.GraphModule, description: Description) -> Execution:
    """One run on the description's inputs.

    Raises:
        SpmdError: a value in flight is read or written, ranks disagree, ...
    """
    inputs = description.inputs(gm)
    interpreter = SpmdInterpreter(gm, description.groups, description.world_size)
    results = interpreter.run(inputs)
    aliasing = [
        _shared([*given, *pytree.tree_leaves(result)])
        for given, result in zip(inputs, results, strict=True)
    ]
    return Execution(results, inputs, aliasing)


def _shared(values: Sequence[Any]) -> set[tuple[int, int]]:
    """Pairs of places whose tensors share a storage."""
    storages = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else None for v in values]
    pairs = itertools.combinations(range(len(values)), 2)
    return {(i, j) for i, j in pairs if storages[i] is not None and storages[i] == storages[j]}


def check_values(
    gm: fx.GraphModule,
    after: fx.GraphModule,
    expected: Execution,
    description: Description,
    tolerance: float | None = None,
) -> None:
    """Raises ``InvariantError`` where ``after`` gives something else than ``gm`` did.

    Args:
        tolerance: relative to the largest value of a tensor; None: bit for bit.
    """
    try:
        found = execute(after, description)
    except Exception as error:
        raise InvariantError("b", f"the result does not run: {error}") from error
    for rank in range(description.world_size):
        _compare(expected.results[rank], found.results[rank], f"rank {rank}, output", tolerance)
        _compare(
            expected.inputs[rank],
            found.inputs[rank],
            f"rank {rank}, final value of input",
            tolerance,
        )
        lost = expected.aliasing[rank] - found.aliasing[rank]
        new = found.aliasing[rank] - expected.aliasing[rank]
        if lost or new:
            places = f"new {sorted(new)}, lost {sorted(lost)} (inputs first, then outputs)"
            raise InvariantError("f", f"rank {rank}: other values share storage: {places}")


def _compare(expected: Any, found: Any, what: str, tolerance: float | None) -> None:
    old, new = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    if len(old) != len(new):
        raise InvariantError("f", f"{what}s: {len(old)} before, {len(new)} after")
    for place, (a, b) in enumerate(zip(old, new, strict=True)):
        if not isinstance(a, torch.Tensor):
            if type(a) is not type(b) or a != b:
                raise InvariantError("f", f"{what} {place}: {a} before, {b} after")
        elif geometry(a) != geometry(b):
            raise InvariantError("f", f"{what} {place}: {geometry(a)}, then {geometry(b)}")
        elif not _agree(a, b, tolerance):
            raise InvariantError("a", f"{what} {place}: {a.tolist()} before, {b.tolist()} after")


def _agree(a: torch.Tensor, b: torch.Tensor, tolerance: float | None) -> bool:
    if tolerance is None or not a.is_floating_point() or not a.numel():
        return torch.equal(_bits(a), _bits(b))
    scale = a.detach().float().nan_to_num().abs().max().item() or 1.0
    return torch.allclose(a.float(), b.float(), rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def geometry(t: torch.Tensor) -> tuple[Any, ...]:
    """Shape, stride, dtype, device; the stride of a dimension that is never stepped along is 0.

    Ops and their fake kernels disagree about such strides, and nobody can see them.
    """
    sizes = [str(size) for size in t.shape]
    empty = "0" in sizes
    strides = [
        "0" if empty or size == "1" else str(stride)
        for size, stride in zip(sizes, t.stride(), strict=True)
    ]
    return (sizes, strides, t.dtype, t.device)
