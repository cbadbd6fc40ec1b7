"""Bytes of tensors, with symbolic shapes kept symbolic and never guarded on.

A symbolic size enters a decision only through :data:`SYMBOLIC_DIM_FALLBACK`, which is equal on all
ranks whatever their hints are; hints are for reports.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: Every free symbol counts as this many elements when a decision needs a number.
SYMBOLIC_DIM_FALLBACK = 4096
#: More than any memory has: what caps are cut off at.
MOST_BYTES = 1 << 62


def tensor_bytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the elements of ``tensor``; symbolic where its shape is."""
    return tensor.numel() * tensor.element_size()


def total_bytes(tensors: Iterable[torch.Tensor]) -> int | torch.SymInt:
    """Sum of :func:`tensor_bytes`."""
    total: int | torch.SymInt = 0
    for tensor in tensors:
        total = total + tensor_bytes(tensor)
    return total


def decision_bytes(size: int | torch.SymInt) -> int:
    """``size`` with each symbol replaced by the fallback: the only form a decision may read.

    A size that has no value there (``s0 // (s1 - s0)``) counts as one symbol.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    try:
        return max(int(expression.subs(dict.fromkeys(symbols, SYMBOLIC_DIM_FALLBACK))), 0)
    except (ZeroDivisionError, TypeError, ValueError, OverflowError):  # of infinity and NaN, too
        return SYMBOLIC_DIM_FALLBACK


def bytes_in(amount: float, unit: int) -> int:
    """``amount`` of ``unit`` bytes, which a user gives: however large, the result is a number."""
    return int(min(amount * unit, MOST_BYTES))


def report_bytes(size: int | torch.SymInt) -> int:
    """``size`` by its hint, for people to read; the fallback where there is no hint."""
    if isinstance(size, torch.SymInt) and size.node.has_hint():
        return int(size.node.hint)
    return decision_bytes(size)


def has_symbols(tensor: torch.Tensor) -> bool:
    """Some dimension or stride of ``tensor`` is symbolic."""
    return torch.SymInt in {*map(type, tensor.shape), *map(type, tensor.stride())}


def known_contiguous(tensor: torch.Tensor) -> bool:
    """Contiguous for every value of its symbols; asking adds no guard."""
    if not has_symbols(tensor):
        return tensor.is_contiguous()
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if expression_of(stride) != expression_of(expected):
            return False
        expected = expected * size
    return True


def expression_of(size: int | torch.SymInt) -> object:
    """What two sizes must have in common to be equal whatever the symbols stand for."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
