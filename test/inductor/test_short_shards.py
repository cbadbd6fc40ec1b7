"""Ranks with a short shard plan as the others do: nothing that a plan reads differs between them.

One rank has all rows of each shard; the other has fewer and pads them.  Which compute stands in front
of the pad, and what the optimizer keeps behind a reduction, has the local size.
"""

import pytest
import torch
import torch.fx as fx

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import make_model
from torch_patches._inductor.fx_passes.comm_overlap.forecast import forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag, TagSource, Traffic
from torch_patches.testing.graph_builder import GraphBuilder

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
WIDTH, RANKS = 512, 4
FULL = WIDTH // RANKS


class Rank(GraphBuilder):
    """One rank's graph; ``rows`` of each shard are its own."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.h = self.placeholder(WIDTH, WIDTH)

    def padded(self, shard: fx.Node) -> fx.Node:
        if self.rows == FULL:
            return shard
        return self.call(aten.constant_pad_nd, shard, [0, 0, 0, FULL - self.rows])

    def shard(self) -> fx.Node:
        return self.placeholder(self.rows, WIDTH)

    def gather(self, payload: fx.Node, group: str = "g") -> fx.Node:
        return self.gather_and_wait(self.padded(payload), RANKS, group)

    def reduced(self, gradient: fx.Node) -> fx.Node:
        wait = self.scatter_and_wait(gradient, "sum", RANKS, "g")
        if self.rows == FULL:
            return wait
        return self.call(aten.slice.Tensor, wait, 0, 0, self.rows)


def cast_in_front(rows: int) -> fx.GraphModule:
    b = Rank(rows)
    for _ in range(8):
        low = b.call(aten._to_copy, b.shard(), dtype=torch.bfloat16)
        weight = b.call(aten._to_copy, b.gather(low), dtype=torch.float32)
        b.h = b.call(aten.mm, b.h, weight)
    return b.output(b.h)


def quantized_in_front(rows: int) -> fx.GraphModule:
    """Scaled and clamped by what every rank has."""
    b = Rank(rows)
    for _ in range(8):
        scaled = b.call(aten.clamp, b.call(aten.mul.Tensor, b.shard(), 0.5), -1.0, 1.0)
        b.h = b.call(aten.mm, b.h, b.gather(scaled))
    return b.output(b.h)


def activations_in_front(rows: int) -> fx.GraphModule:
    """Gathers of another group whose payload is computed, beside those of parameters."""
    b = Rank(rows)
    for _ in range(6):
        local = b.call(aten.tanh, b.shard())
        b.h = b.call(aten.mm, b.h, b.gather(b.shard()))
        b.h = b.call(aten.add.Tensor, b.h, b.gather(local, "h"))
    return b.output(b.h)


def optimizer_behind(rows: int) -> fx.GraphModule:
    b = Rank(rows)
    results = []
    for _ in range(8):
        b.h = b.call(aten.mm, b.h, b.h)
        gradient = b.reduced(b.call(aten.mm, b.h, b.h))
        moment = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, b.shard(), 0.9), gradient)
        step = b.call(aten.mul.Tensor, moment, -0.1)
        results += [moment, b.call(aten.add.Tensor, b.shard(), step)]
    return b.output(b.h, *results)


@pytest.mark.parametrize("rows", [FULL - 1, FULL // 2, 1])
@pytest.mark.parametrize(
    "make", [cast_in_front, quantized_in_front, activations_in_front, optimizer_behind]
)
def test_plans_agree_under_any_cap(make, rows):
    for gb in (0.0, 0.001, None):
        for prefetch in (2, None):
            full, short = (
                torch_patches.optimize_graph(
                    make(n), max_memory_increase_gb=gb, max_compute_pre_fetch=prefetch
                )
                for n in (FULL, rows)
            )
            assert full.schedule_hash == short.schedule_hash
            assert full.way == short.way
            assert full.total_ms_after == short.total_ms_after


def test_a_pad_in_front_of_what_is_no_parameter_counts_nowhere() -> None:
    """As fuzzing found: under a cap of zero, eight bytes more on one rank are another plan."""

    def peaks(padded: bool) -> tuple[int, int]:
        b = GraphBuilder()
        data = b.placeholder(4, 4)
        payload = b.call(aten.constant_pad_nd, data, [0, 0]) if padded else data
        wait = b.gather_and_wait(payload, 2, "g")
        for node in (wait, wait.args[0]):
            node.meta[TAG_MARK] = CollectiveTag(Traffic.OTHER, TagSource.DYNAMO)
        gm = b.output(b.call(aten.sum, wait))  # the peak is where the gather starts
        found = forecast(gm.graph, collect(gm.graph), make_model())
        return found.peak_bytes, found.held_peak_bytes

    assert peaks(padded=True) == peaks(padded=False)
