"""Ranks whose graphs differ in views and shards choose one order of compute, at any memory cap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from test_earlier_others import SIZE, Lines, names, new_order

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("as_on_gpu")


def padded(with_pad: bool) -> Iterator[str]:
    """The same layer on a rank whose shard of the weight is short: it pads it before a gather."""
    b = Lines()
    grad = b.mm(b.x, b.w)
    dw = b.mm(b.x, grad)
    shard = b.placeholder(31 if with_pad else 32, 64)
    if with_pad:
        shard = b.call(aten.constant_pad_nd, shard, [0, 0, 0, 1])
    weight = b.gather_and_wait(shard, 2, "fsdp")
    start = b.all_reduce(b.mm(grad, weight), "sum", "tp")
    gm = b.output(dw, b.mm(b.wait(start), b.w))
    order = new_order(gm)
    assert order is not None
    for node in order:
        if node.op == "call_function" and node.target is not aten.constant_pad_nd.default:
            yield node.name


def test_a_rank_with_a_short_shard_has_the_same_order() -> None:
    assert list(padded(True)) == list(padded(False))


def two_reductions(alias_behind: str) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """Three products and their reduction move over dW; the peak is where the first one is made.

    The second reduction then only has to cross the last product and what follows.
    """
    b = Lines()
    wide, less_wide, less_tall = map(b.placeholder, [(64, 1024), (64, 512), (512, 64)])
    grad = b.mm(b.x, b.w)
    views = [b.mm(b.x, grad)]
    made = {"dw": views[0]}
    if alias_behind == "dw":
        views.append(b.call(aten.alias, grad))
    large = b.call(aten.cat, [grad] * 16)
    if alias_behind == "large":
        views.append(b.call(aten.alias, grad))
    made["last"] = b.mm(b.mm(b.mm(wide, large), less_wide), less_tall)
    first = b.all_reduce(made["last"], "sum", "tp")
    second = b.all_reduce(b.relu(grad), "sum", "other")
    made.update(first=first, second=second)
    while len(views) < 2:
        views.append(grad)
    return b.output(*views, b.mm(b.wait(first), b.wait(second))), made


def test_a_view_on_one_rank_shifts_no_bytes() -> None:
    """With room for the lesser move, for the larger one, and for both."""
    found: list[list[str]] = []
    for extra in range(0, 60 * SIZE, SIZE):
        orders = []
        for alias_behind in ("", "dw", "large"):
            gm, made = two_reductions(alias_behind)
            order = new_order(gm, extra)
            orders.append(names(order or list(gm.graph.nodes), made))
        assert orders[0] == orders[1] == orders[2]
        found += [orders[0]] if orders[0] not in found else []
    assert found == [
        ["dw", "second", "last", "first"],
        ["last", "first", "dw", "second"],
        ["second", "last", "first", "dw"],
    ]


def test_a_matrix_and_its_view_are_kept_once() -> None:
    """dW of x and x, or of x and a view that one rank has: two matrices fewer than dW of x and grad."""
    for aliased in (False, True):
        b = Lines()
        other = b.call(aten.alias, b.x) if aliased else b.x
        grad = b.mm(b.x, b.w)
        dw = b.mm(b.x, other)
        start = b.all_reduce(b.mm(grad, b.w), "sum", "tp")
        gm = b.output(dw, b.mm(b.wait(start), b.w))
        assert new_order(gm, 3 * SIZE) is not None
        assert new_order(gm, 3 * SIZE - 1) is None


def test_a_cast_of_a_short_shard_counts_as_an_even_one() -> None:
    """It is what hides the reduction, and keeps the shard.  31 rows of 64 on one rank, 32 on another."""

    def orders(rows: int) -> list[bool]:
        b = Lines()
        grad, shard = b.mm(b.x, b.w), b.placeholder(rows, 64)
        payload = b.call(aten._to_copy, shard, dtype=torch.float64)
        if rows < 32:
            payload = b.call(aten.constant_pad_nd, payload, [0, 0, 0, 32 - rows])
        weight = b.call(aten._to_copy, b.gather_and_wait(payload, 2, "fsdp"), dtype=torch.float32)
        start = b.all_reduce(b.relu(grad), "sum", "tp")
        gm = b.output(b.mm(b.wait(start), b.w), b.mm(weight, b.w))
        return [new_order(gm, extra) is not None for extra in range(5 * SIZE, 8 * SIZE, 128)]

    assert orders(31) == orders(32)
    assert len(set(orders(32))) == 2
