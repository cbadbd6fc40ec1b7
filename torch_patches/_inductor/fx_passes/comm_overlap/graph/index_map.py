"""Where each element of a chain of gathers and views comes from.

    shard [2, 3] on every rank   -> gather over 4 ranks (source 0)   -> [8, 3]
    element (i, j) of it         =  element (i % 2, j) of rank number i // 2

A tensor is a list of dimensions, a dimension a list of *digits*, outermost first: (size, source,
stride).  The value of a digit times its stride is added to the address in its source: the flat shard,
or the number of a rank in one of the groups gathered over.  Views rearrange digits and cut them; they
never touch an element, so the map is exact for any size, and what it says holds on every rank.
Digits that lie in memory like one are one (``_merged``), which makes the list of all of a tensor's
digits unique for its map: two maps are equal exactly if their merged digits are.

Sizes may be symbolic (sympy expressions).  A digit is cut where the parts are whole numbers whatever the
symbols are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: Source of the elements themselves; groups gathered over are numbered from 0.
SHARD = -1

#: An int, or a sympy expression.
Extent = Any


@dataclass(frozen=True)
class Digit:
    """One place of a mixed-radix index.

    Args:
        size: values it takes.
        source: :data:`SHARD`, or the number of a group.
        stride: of its address there.
    """

    size: Extent
    source: int
    stride: Extent


@dataclass(frozen=True)
class IndexMap:
    """Digits of each dimension, outermost first."""

    dims: tuple[tuple[Digit, ...], ...]

    @staticmethod
    def of_shard(shape: Sequence[Extent]) -> IndexMap:
        """A tensor of ``shape`` whose elements are numbered row by row."""
        dims: list[tuple[Digit, ...]] = []
        stride: Extent = 1
        for size in reversed(shape):
            dims.append((Digit(size, SHARD, stride),))
            stride = stride * size
        return IndexMap(tuple(reversed(dims)))

    @property
    def shape(self) -> tuple[Extent, ...]:
        return tuple(_product(digit.size for digit in dim) for dim in self.dims)

    def gathered(self, source: int, ranks: int) -> IndexMap:
        """Pieces of ``ranks`` ranks one behind the other along the first dimension."""
        first = self.dims[0] if self.dims else ()
        return IndexMap(((Digit(ranks, source, 1), *first), *self.dims[1:]))

    def permuted(self, order: Sequence[int]) -> IndexMap:
        return IndexMap(tuple(self.dims[dim] for dim in order))

    def reshaped(self, shape: Sequence[Extent]) -> IndexMap | None:
        """The same elements row by row in another shape; None where a digit cannot be cut."""
        if tuple(shape) == self.shape:
            return self
        left = list(self.digits())
        dims: list[tuple[Digit, ...]] = []
        for size in reversed(shape):
            taken = _take(left, size)
            if taken is None:
                return None
            dims.append(taken)
        return IndexMap(tuple(reversed(dims))) if not left else None

    def digits(self) -> tuple[Digit, ...]:
        """Of all dimensions row by row, merged."""
        return _merged(digit for dim in self.dims for digit in dim)


def _product(sizes: Iterable[Extent]) -> Extent:
    return math.prod(sizes)


def _merged(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    result: list[Digit] = []
    for digit in digits:
        if digit.size == 1:
            continue
        last = result[-1] if result else None
        if (
            last is not None
            and last.source == digit.source
            and last.stride == digit.stride * digit.size
        ):
            result[-1] = Digit(last.size * digit.size, digit.source, digit.stride)
        else:
            result.append(digit)
    return tuple(result)


def _take(left: list[Digit], size: Extent) -> tuple[Digit, ...] | None:
    """Removes the innermost digits of ``left`` that make up ``size``; cuts the last if need be."""
    taken: list[Digit] = []
    while size != 1:
        if not left:
            return None
        digit = left.pop()
        if digit.size == size:
            taken.append(digit)
            break
        rest, above = _quotient(size, digit.size), _quotient(digit.size, size)
        if rest is not None:
            taken.append(digit)
            size = rest
        elif above is not None:
            taken.append(Digit(size, digit.source, digit.stride))
            left.append(Digit(above, digit.source, digit.stride * size))
            break
        else:
            return None
    return tuple(reversed(taken))


def _quotient(size: Extent, divisor: Extent) -> Extent | None:
    """``size / divisor`` where that is a whole number whatever the symbols are."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if size % divisor == 0 else None
    quotient, rest = (size / divisor).as_numer_denom()
    if rest != 1:
        return None
    return int(quotient) if quotient.is_Integer else quotient
