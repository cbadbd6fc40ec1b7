"""The greedy by size: torch's function, which only finds buckets, and autoparallel's, which makes them.

Sizes are those of the gathered tensor: rows x 256 floats, so that 1024 rows are 1 MB.
"""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.bucketing import (
    is_all_gather_into_tensor,
    is_all_reduce_tensor,
    is_reduce_scatter_tensor,
)

from torch_patches.compat_api import bucket_collectives, greedy_bucket_collective_by_mb
from torch_patches.config import PREFIX, FlagError
from torch_patches.testing.beside_torch import of_torch
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
BOTH = pytest.mark.parametrize(
    "greedy",
    [of_torch("greedy_bucket_collective_by_mb"), greedy_bucket_collective_by_mb],
    ids=["torch", "ours"],
)
ROWS_OF_A_MB = 1024


def same_key(node: fx.Node) -> object:
    """Group and dtype, as torch's callers have it."""
    return node.args[-1], node.meta["val"].dtype


def gathers(*megabytes: float, apart: int = 0, groups: str = "") -> fx.GraphModule:
    """Gathers of inputs by two ranks, each used once; so many working nodes between them."""
    b = GraphBuilder()
    results, x = [], b.placeholder(1, 256)
    for place, size in enumerate(megabytes):
        shard = b.placeholder(int(size * ROWS_OF_A_MB) // 2, 256)
        results.append(b.gather_and_wait(shard, 2, groups[place] if groups else "g"))
        for _ in range(apart):
            x = b.call(aten.tanh, x)
    return b.output(*results, x)


def sizes(buckets: list[list[fx.Node]]) -> list[int]:
    return [len(bucket) for bucket in buckets]


def capped(megabytes: float):
    return lambda index: megabytes


@BOTH
def test_four_small_gathers_are_one_bucket(greedy):
    gm = gathers(0.01, 0.01, 0.01, 0.01)
    text = gm.code
    (found,) = greedy(gm, capped(25.0), is_all_gather_into_tensor, same_key)
    assert found == [n for n in gm.graph.nodes if is_all_gather_into_tensor(n)]
    assert gm.code == text


@BOTH
def test_six_of_5_mb_at_10_mb_are_pairs(greedy):
    found = greedy(gathers(*[5.0] * 6), capped(10.0), is_all_gather_into_tensor, same_key)
    assert sizes(found) == [2, 2, 2]


@pytest.mark.parametrize(("span", "buckets"), [(80, [2, 2, 2]), (1500, [6])])
def test_gathers_apart_are_bounded_by_the_span(span, buckets):
    """50 nodes between neighbours; torch has no such bound."""
    gm = gathers(*[0.01] * 6, apart=50)
    with inductor_config.patch({PREFIX + "max_topo_span": span}):
        found = greedy_bucket_collective_by_mb(
            gm, capped(25.0), is_all_gather_into_tensor, same_key
        )
        assert sizes(found) == buckets
        assert [len(b.members) for b in bucket_collectives(gm).buckets] == buckets


@pytest.mark.parametrize(("primary", "buckets"), [(True, [5]), (False, [5, 2])])
def test_a_minority_group(primary, buckets):
    """Gathers on g and h in turn: five and two."""
    gm = gathers(*[0.01] * 7, groups="ghghggg")
    with inductor_config.patch({PREFIX + "primary_fsdp_group_only": primary}):
        found = greedy_bucket_collective_by_mb(
            gm, capped(25.0), is_all_gather_into_tensor, same_key
        )
        assert sizes(found) == buckets
        assert [len(b.members) for b in bucket_collectives(gm).buckets] == buckets


def test_caps_by_bucket():
    """1 MB, then 3: torch reads the first one only."""
    gm = gathers(*[1.0] * 5)
    caps = {0: 2.0, 1: 3.0}
    found = greedy_bucket_collective_by_mb(
        gm, caps.__getitem__, is_all_gather_into_tensor, same_key
    )
    assert sizes(found) == [2, 3]


@BOTH
def test_only_what_the_filters_let_through(greedy):
    gm = gathers(*[0.01] * 4)
    chosen = [n for n in gm.graph.nodes if is_all_gather_into_tensor(n)][1:]

    def is_last_two(wait: fx.Node) -> bool:
        return wait.args[0] in chosen[1:]

    def is_chosen(node: fx.Node) -> bool:
        return node in chosen

    assert greedy(gm, capped(25.0), is_chosen, same_key) == [chosen]
    assert greedy(gm, capped(25.0), is_chosen, same_key, is_last_two) == [chosen[1:]]


@BOTH
def test_only_what_shares_the_key(greedy):
    gm = gathers(*[0.01] * 4, groups="gghh")
    key = same_key
    assert sizes(greedy(gm, capped(25.0), is_all_gather_into_tensor, key)) == [2, 2]
    assert sizes(greedy(gm, capped(25.0), is_all_gather_into_tensor, lambda node: 0)) == [4]


def test_members_need_not_be_adjacent():
    """torch starts over where another key comes between."""
    found = greedy_bucket_collective_by_mb(
        gathers(*[0.01] * 4, groups="ghgh"), capped(25.0), is_all_gather_into_tensor, same_key
    )
    assert sizes(found) == [2, 2]


@BOTH
def test_what_depends_on_a_member_stays_out(greedy):
    """g1 gathers what g0 gathered."""
    b = GraphBuilder()
    first = b.gather_and_wait(b.placeholder(2, 4), 2, "g")
    second = b.gather_and_wait(first, 2, "g")
    third = b.gather_and_wait(b.placeholder(2, 4), 2, "g")
    gm = b.output(first, second, third)
    (found,) = greedy(gm, capped(25.0), is_all_gather_into_tensor, same_key)
    assert [node.args[0].name for node in found] == ["in0", "in1"]


@BOTH
@pytest.mark.parametrize("kind", ["scatter", "reduce"])
def test_reductions(greedy, kind):
    """Whatever they carry, small ones too: the filters decide."""
    b = GraphBuilder()
    results = []
    for _ in range(3):
        x = b.placeholder(4, 4)
        done = (
            b.scatter_and_wait(x, "sum", 2, "g")
            if kind == "scatter"
            else (b.reduce_and_wait(x, "sum", "g"))
        )
        results.append(b.call(aten.sum, done))
    gm = b.output(*results)
    is_kind = is_reduce_scatter_tensor if kind == "scatter" else is_all_reduce_tensor
    assert sizes(greedy(gm, capped(25.0), is_kind, same_key)) == [3]


@BOTH
def test_nothing_to_do(greedy):
    gm = gathers(0.01)
    assert greedy(gm, capped(25.0), is_all_gather_into_tensor, same_key) == []
    assert greedy(gm, capped(25.0), is_reduce_scatter_tensor, same_key) == []


def test_a_bad_flag_raises():
    with inductor_config.patch({PREFIX + "max_topo_span": -1}), pytest.raises(FlagError):
        greedy_bucket_collective_by_mb(
            gathers(0.01), capped(25.0), is_all_gather_into_tensor, same_key
        )
