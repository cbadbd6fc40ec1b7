"""Which starts the copy engines take, what they send then, and who holds which part of the ring."""

import random

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.copy_engine_op import Ring
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.copy_engines import (
    LEAST_BYTES,
    ring_bytes,
    use_copy_engines,
)
from torch_patches.testing.graph_builder import GraphBuilder, Group

aten = torch.ops.aten
LOW = torch.bfloat16


# -- single starts --------------------------------------------------------------------------------


def test_small_activations_and_other_groups_stay() -> None:
    b = GraphBuilder()
    side = 2048
    weights = [b.placeholder(n // 2, side) for n in (side, 1024, side)]
    small, large, elsewhere = weights
    h = b.call(aten.relu, b.placeholder(side // 2, side))
    gathered = [
        b.gather_and_wait(small, 2, "g"),  # 16 MiB: large enough
        b.gather_and_wait(large, 2, "g"),  # 8 MiB: just
        b.gather_and_wait(b.placeholder(512, 512), 2, "g"),
        b.gather_and_wait(elsewhere, 2, "h"),
        b.gather_and_wait(h, 2, "g"),
    ]
    gm = b.output(*(b.call(aten.relu, g) for g in gathered))
    collectives = collect(gm.graph).collectives
    taken = use_copy_engines(collectives, {"g"})
    assert [one.index for one in taken] == [0, 1]
    assert [one.size_bytes for one in taken] == [2 * LEAST_BYTES, LEAST_BYTES]
    assert ring_bytes(taken) == 2 * LEAST_BYTES  # twice half of 16 MiB
    gm.graph.lint()


def test_a_cast_that_others_read_is_sent_as_it_is() -> None:
    b = GraphBuilder()
    cast = b.call(aten._to_copy.default, b.placeholder(1024, 4096), dtype=LOW)
    gm = b.output(b.gather_and_wait(cast, 2, "g"), b.call(aten.relu, cast))
    (one,) = use_copy_engines(collect(gm.graph).collectives, {"g"})
    assert one.start.args[0] is cast and one.start.kwargs == {}


def test_a_graph_that_is_run_as_it_is_keeps_its_casts() -> None:
    """Nobody removes there what is no longer read."""
    b = GraphBuilder()
    cast = b.call(aten._to_copy.default, b.placeholder(1024, 4096), dtype=LOW)
    gm = b.output(b.gather_and_wait(cast, 2, "g"))
    (one,) = use_copy_engines(collect(gm.graph).collectives, {"g"}, fold_casts=False)
    assert one.start.args[0] is cast and one.start.kwargs == {}


def test_a_cast_stays_where_its_source_may_change_behind_it() -> None:
    b = GraphBuilder()
    weight = b.placeholder(1024, 4096)
    cast = b.call(aten._to_copy.default, weight, dtype=LOW)
    b.call(aten.mul_.Tensor, weight, 0.5)
    gm = b.output(b.gather_and_wait(cast, 2, "g"))
    for one in use_copy_engines(collect(gm.graph).collectives, {"g"}):
        assert one.start.args[0] is cast and one.start.kwargs == {}


def test_groups_that_are_no_names_stay() -> None:
    b = GraphBuilder()
    gm = b.output(b.gather_and_wait(b.placeholder(1024, 4096), 2, "g"))
    (one,) = collect(gm.graph).collectives
    one.start.args = (*one.start.args[:2], Group("g"))  # as a graph for several ranks has it
    assert use_copy_engines((one,), {"g"}) == []


def test_a_gather_of_integers_sends_no_rounded_ones() -> None:
    b = GraphBuilder()
    cast = b.call(aten._to_copy.default, b.placeholder(1024, 4096, dtype=torch.int64), dtype=LOW)
    gm = b.output(b.gather_and_wait(cast, 2, "g"))
    for one in use_copy_engines(collect(gm.graph).collectives, {"g"}):
        assert one.start.args[0] is cast and one.start.kwargs == {}


# -- the ring -------------------------------------------------------------------------------------


def test_parts_follow_each_other_and_begin_anew_at_the_end() -> None:
    ring: Ring[str] = Ring(100)
    assert ring.take(40) == (0, [])
    ring.hold(0, 40, "a")
    assert ring.take(40) == (40, [])
    ring.hold(40, 40, "b")
    assert ring.take(40) == (0, ["a"])  # 20 are left at the end
    ring.hold(0, 40, "c")
    assert ring.take(60) == (40, ["b"])
    ring.hold(40, 60, "d")
    assert ring.holders() == ["c", "d"]
    assert ring.take(100) == (0, ["c", "d"])


def test_more_than_the_ring_has_is_refused() -> None:
    with pytest.raises(ValueError, match="101 bytes of 100"):
        Ring[str](100).take(101)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_gets_what_another_one_holds(seed: int) -> None:
    r = random.Random(seed)
    ring: Ring[int] = Ring(1000)
    held: dict[int, tuple[int, int]] = {}
    for token in range(200):
        size = r.randrange(1, 501)
        begin, done = ring.take(size)
        for other in done:
            del held[other]
        assert begin >= 0 and begin + size <= 1000
        assert all(end <= begin or begin + size <= first for first, end in held.values())
        ring.hold(begin, size, token)
        held[token] = begin, begin + size
    assert list(held) == ring.holders() == sorted(held)
