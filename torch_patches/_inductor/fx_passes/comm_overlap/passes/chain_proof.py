"""Is a chain of gathers, or of reduce-scatters, one collective, and over ranks in which order?

Gathers: every element is followed through the chain.  The chain is one gather if the result is, row by
row, the whole shard of one rank after the other.  Which piece of each gather the ranks are found in
gives the order that one group must have.

Reduce-scatters are the same the other way round: each step keeps one of the pieces that the rows are
cut into, and what is left must be one piece of the whole input.

The map is followed by digits (``graph/index_map.py``), which works for any size.  Views that cut across
them (six elements as 3 x 2 and as 2 x 3) are followed element by element if there are few.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import (
    Link,
    kind_of_view,
    permutation,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.index_map import (
    SHARD,
    Digit,
    IndexMap,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import first_argument
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import expression_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, RefusalReason

#: Elements that are followed one by one.
MAX_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Proof:
    """A chain is one collective.

    Args:
        coordinates: for each rank of it, in order, the place in each group of the chain.
        shape: of the chain's result; ints or expressions.
    """

    coordinates: tuple[tuple[int, ...], ...]
    shape: tuple[Any, ...]


def prove(links: Sequence[Link], sizes: Sequence[int]) -> Proof | RefusalReason:
    """The proof, or why there is none.

    Args:
        links: of one kind, without obstacles.
        sizes: ranks of each link's group.
    """
    source = first_argument(links[0].collective.start)
    assert isinstance(source, fx.Node)
    shape = _shape_of(source)
    if shape is None:
        return RefusalReason.CHAIN_UNEVEN
    gathers = links[0].collective.kind is CollectiveKind.ALL_GATHER
    if not gathers and not _is_divisible(shape, math.prod(sizes)):
        return RefusalReason.CHAIN_ORDER
    by_digits = _follow_gathers if gathers else _follow_scatters
    found = by_digits(links, sizes, shape)
    if found is not None:
        return found
    if any(link.collective.has_symbolic_size for link in links):
        return RefusalReason.CHAIN_SYMBOLIC
    if math.prod(shape) * (math.prod(sizes) if gathers else 1) <= MAX_ELEMENTS:
        by_element = _gather_elements if gathers else _scatter_elements
        found = by_element(links, sizes, shape)
    return RefusalReason.CHAIN_ORDER if found is None else found


def _shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Sizes as ints or expressions; None where one is 0."""
    sizes = tuple(expression_of(size) for size in node.meta["val"].shape)
    return None if 0 in sizes else sizes


def _is_divisible(shape: Sequence[Any], ranks: int) -> bool:
    """One reduce-scatter cuts the payload's own rows."""
    return bool(shape) and isinstance(shape[0], int) and shape[0] % ranks == 0


# -- by digits ------------------------------------------------------------------------------------


def _viewed(found: IndexMap | None, nodes: Sequence[fx.Node]) -> IndexMap | None:
    for node in nodes:
        if found is None:
            return None
        kind = kind_of_view(node)
        if kind == "permute":
            found = found.permuted(permutation(node))
        elif kind == "reshape":
            shape = _shape_of(node)
            found = None if shape is None else found.reshaped(shape)
    return found


def _follow_gathers(
    links: Sequence[Link], sizes: Sequence[int], shape: tuple[Any, ...]
) -> Proof | None:
    found: IndexMap | None = IndexMap.of_shard(shape)
    for number, (link, size) in enumerate(zip(links, sizes, strict=True)):
        found = _viewed(found, link.between)
        if found is None:
            return None
        found = found.gathered(number, size)
    assert found is not None
    digits = found.digits()
    order = tuple(digit for digit in digits if digit.source != SHARD)
    if digits != (*order, *IndexMap.of_shard(shape).digits()):
        return None
    return Proof(_coordinates(order, len(sizes)), found.shape)


def _follow_scatters(
    links: Sequence[Link], sizes: Sequence[int], shape: tuple[Any, ...]
) -> Proof | None:
    """The digit of the piece that is kept leaves the map."""
    found: IndexMap | None = IndexMap.of_shard(shape)
    pieces: list[Digit] = []  # sources are groups, strides are of the elements
    inner: dict[Digit, int] = {}
    for number, (link, size) in enumerate(zip(links, sizes, strict=True)):
        found = _viewed(found, link.between)
        if found is None or not found.dims or not isinstance(found.shape[0], int):
            return None
        cut = found.reshaped((size, found.shape[0] // size, *found.shape[1:]))
        if cut is None:
            return None
        weight = 1
        for digit in reversed(cut.dims[0]):
            pieces.append(Digit(digit.size, number, digit.stride))
            inner[pieces[-1]] = weight
            weight *= digit.size
        found = IndexMap(cut.dims[1:])
    assert found is not None
    order = _numbering(found, pieces, inner)
    return None if order is None else Proof(_coordinates(order, len(sizes)), found.shape)


def _numbering(
    left: IndexMap, pieces: Sequence[Digit], inner: Mapping[Digit, int]
) -> tuple[Digit, ...] | None:
    """The digits that left a map, if they number its pieces, outermost first."""
    expected = math.prod(left.shape)
    if left.digits() not in ((), (Digit(expected, SHARD, 1),)):
        return None
    if not all(isinstance(piece.stride, int) for piece in pieces):
        return None
    order: list[Digit] = []
    for piece in sorted((p for p in pieces if p.size != 1), key=lambda piece: piece.stride):
        if piece.stride != expected:
            return None
        expected *= piece.size
        order.append(Digit(piece.size, piece.source, inner[piece]))
    return tuple(reversed(order))


@functools.lru_cache(maxsize=256)
def _coordinates(order: tuple[Digit, ...], groups: int) -> tuple[tuple[int, ...], ...]:
    """Places in each group, for each value of the digits."""
    result: list[tuple[int, ...]] = []
    for values in itertools.product(*(range(digit.size) for digit in order)):
        place = [0] * groups
        for digit, value in zip(order, values, strict=True):
            place[digit.source] += value * digit.stride
        result.append(tuple(place))
    return tuple(result)


# -- element by element ---------------------------------------------------------------------------


def _view_elements(elements: torch.Tensor, nodes: Sequence[fx.Node], pieces: int) -> torch.Tensor:
    """``elements`` viewed as by ``nodes``; its first ``pieces`` dimensions stay."""
    front = list(range(pieces))
    for node in nodes:
        kind = kind_of_view(node)
        if kind == "permute":
            elements = elements.permute(*front, *(pieces + dim for dim in permutation(node)))
        elif kind == "reshape":
            elements = elements.reshape(*elements.shape[:pieces], *node.meta["val"].shape)
    return elements


def _gather_elements(
    links: Sequence[Link], sizes: Sequence[int], shape: tuple[int, ...]
) -> Proof | None:
    """An element's number is its place in the shard, plus the shard's size times the number of its
    rank; ranks are numbered by their places in the groups, the first group's varying fastest."""
    count = math.prod(shape)
    elements = torch.arange(count).reshape(shape)
    weight = count
    for link, size in zip(links, sizes, strict=True):
        elements = _view_elements(elements, link.between, 0)
        parts = [elements + place * weight for place in range(size)]
        elements = torch.cat(parts) if elements.dim() else torch.stack(parts)
        weight *= size
    rows = elements.reshape(-1, count)
    if not torch.equal(rows % count, torch.arange(count).expand_as(rows)):
        return None
    ranks = rows // count
    if not torch.equal(ranks, ranks[:, :1].expand_as(ranks)):
        return None
    numbers = [int(number) for number in ranks[:, 0]]
    return Proof(tuple(_places(number, sizes) for number in numbers), tuple(elements.shape))


def _places(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    places: list[int] = []
    for size in sizes:
        places.append(number % size)
        number //= size
    return tuple(places)


def _scatter_elements(
    links: Sequence[Link], sizes: Sequence[int], shape: tuple[int, ...]
) -> Proof | None:
    """The pieces of each step become dimensions in front."""
    elements = torch.arange(math.prod(shape)).reshape(shape)
    for pieces, (link, size) in enumerate(zip(links, sizes, strict=True)):
        elements = _view_elements(elements, link.between, pieces)
        if elements.dim() == pieces or elements.shape[pieces] % size:
            return None
        elements = elements.reshape(
            *elements.shape[:pieces], size, elements.shape[pieces] // size,
            *elements.shape[pieces + 1 :],
        )  # fmt: skip
    left = tuple(elements.shape[len(sizes) :])
    count = math.prod(left)
    rows = elements.reshape(-1, count)
    begin = rows[:, :1]
    if not torch.equal(rows, begin + torch.arange(count)) or bool((begin % count).any()):
        return None
    order = [0] * len(rows)
    for row, first in enumerate(begin[:, 0].tolist()):
        order[first // count] = row
    every = list(itertools.product(*map(range, sizes)))
    return Proof(tuple(every[row] for row in order), left)
