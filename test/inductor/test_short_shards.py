"""Ranks with a short shard plan as the others do: nothing that a plan reads differs between them.

One rank has all rows of each shard; the other has fewer and pads them.  Which compute stands in front
of the pad, and what the optimizer keeps behind a reduction, has the local size.
"""

import operator

import pytest
import torch
import torch.fx as fx

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.fusion import memory_traffic
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import make_model
from torch_patches._inductor.fx_passes.comm_overlap.estimate.shards import shared_shard_bytes
from torch_patches._inductor.fx_passes.comm_overlap.forecast import forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag, TagSource, Traffic
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.module_graphs import ModuleGraph, tag

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


def pad_in_front(rows: int) -> fx.GraphModule:
    """The pad stands in front of the cast."""
    b = Rank(rows)
    for _ in range(8):
        low = b.call(aten._to_copy, b.padded(b.shard()), dtype=torch.bfloat16)
        weight = b.call(aten._to_copy, b.gather_and_wait(low, RANKS, "g"), dtype=torch.float32)
        b.h = b.call(aten.mm, b.h, weight)
    return b.output(b.h)


def zeros_in_front(rows: int) -> fx.GraphModule:
    """Zeros of what the cast is like are joined to it."""
    b = Rank(rows)
    for _ in range(8):
        low = b.call(aten._to_copy, b.shard(), dtype=torch.bfloat16)
        if rows < FULL:
            low = b.call(aten.cat, [low, b.call(aten.new_zeros, low, [FULL - rows, WIDTH])])
        weight = b.call(aten._to_copy, b.gather_and_wait(low, RANKS, "g"), dtype=torch.float32)
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
    "make",
    [
        cast_in_front,
        pad_in_front,
        zeros_in_front,
        quantized_in_front,
        activations_in_front,
        optimizer_behind,
    ],
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


@pytest.mark.parametrize("form", ["default", "coalesced"])
@pytest.mark.parametrize("make", [cast_in_front, pad_in_front, zeros_in_front])
def test_buckets_are_estimated_alike(make, form):
    """What is made of casts has no other kernels and bytes where the shard is short."""
    for rows in (FULL - 1, 1):
        full, short = (
            torch_patches.optimize_graph(
                make(n), bucketing_mode="topo_span", bucket_mode=form, max_memory_increase_gb=None
            )
            for n in (FULL, rows)
        )
        assert [len(b.members) for b in full.buckets] == [len(b.members) for b in short.buckets]
        assert full.buckets
        assert full.total_ms_after == short.total_ms_after
        assert full.compute_ms_after == short.compute_ms_after
        assert full.peak_bytes_after == short.peak_bytes_after


def test_what_reads_members_of_a_bucket_counts_as_an_even_share() -> None:
    """Before they are merged and afterwards, when a second look finds the bucket."""
    gm = optimizer_behind(FULL)
    before = [shared_shard_bytes(collect(gm.graph))[n] for n in products_of(gm)]
    pipeline.run_post_grad(gm.graph, Options("topo_span", None, bucket_mode="default"))
    assert len(collect(gm.graph).collectives) < 8
    assert [shared_shard_bytes(collect(gm.graph))[n] for n in products_of(gm)] == before


def products_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is aten.mul.Tensor]


def modules_of_small_casts(rows: int) -> fx.GraphModule:
    """Two modules of six and two weights of 256 rows; all kernels are bound by their launch."""
    b = ModuleGraph()
    h = b.placeholder(16, 256)
    for number, count in enumerate((6, 2)):
        with b.inside(f"layers.{number}"):
            for place in range(count):
                low = b.call(aten._to_copy, b.placeholder(rows, 256), dtype=torch.bfloat16)
                if rows < 256:
                    low = b.call(aten.constant_pad_nd, low, [0, 0, 0, 256 - rows])
                wait = b.gather_and_wait(low, RANKS, "dp")
                tag(wait, f"layers.{number}.w{place}", 6 * number + place, 6 * number + place)
                weight = b.call(aten._to_copy, wait, dtype=torch.float32)
                h = b.call(aten.mm, h, b.call(aten.t, weight))
                for _ in range(2 * number):
                    h = b.call(aten.relu, h)
                h = b.call(aten.mm, h, weight)
    return b.output(h)


@pytest.mark.parametrize("gb", [0.001, 0.002])
@pytest.mark.parametrize("form", [None, "default", "coalesced"])
def test_moved_casts_are_no_compute_that_was_to_hide(gb, form):
    """A cast that a copying bucket takes over stands on other ranks in front of a pad.  Fuzzing found
    launch orders that differed, since only those ranks missed it under an earlier gather."""
    reports = [
        pipeline.optimize_graph(
            modules_of_small_casts(rows),
            Options(
                "modules",
                module_bucket_plans=("layers.*",),
                enable_overlap_scheduling=True,
                insert_overlap_deps=False,
                module_prefetch_depth=50,
                max_in_flight_gb=gb,
                bucket_mode=form,
            ),
        )
        for rows in (256, 255)
    ]
    assert reports[0].schedule_hash == reports[1].schedule_hash
    assert reports[0].way == reports[1].way == ("as asked, copied" if form is None else "as asked")


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


@pytest.mark.parametrize("make", [cast_in_front, pad_in_front])
def test_a_parameter_counts_as_an_even_share_up_to_the_input(make) -> None:
    gm = make(1)
    counted = shared_shard_bytes(collect(gm.graph))
    shards = gm.graph.find_nodes(op="placeholder")[1:]
    assert {counted[shard] for shard in shards} == {FULL * WIDTH * 4}


@pytest.mark.parametrize("part_first", [True, False])
def test_a_shard_and_a_part_of_it_count_as_the_shard_with_views_and_without(
    part_first: bool,
) -> None:
    """Both are gathered together; a view between decided which of them told how large the shard is."""
    for padded in (False, True):
        b = GraphBuilder()
        shard = b.placeholder(4, 4)
        whole = b.call(aten.constant_pad_nd, shard, [0, 0]) if padded else shard
        payloads = [b.call(aten.slice.Tensor, b.call(aten.reshape, shard, [16]), 0, 0, 4), whole]
        waits = b.all_gather_coalesced(payloads[:: 1 if part_first else -1], 2, "g")
        gm = b.output(*map(b.wait, waits))
        assert shared_shard_bytes(collect(gm.graph))[shard] == 16 * 4, padded


def test_a_shard_counts_once_in_a_bucket_of_two_gathers_of_it_with_a_view_and_without() -> None:
    for viewed in (False, True):
        b = GraphBuilder()
        shard = b.placeholder(4, 4)
        again = b.call(aten.view, shard, [4, 4]) if viewed else shard
        gm = b.output(b.gather_and_wait(b.call(aten.cat, [shard, again]), 2, "g"))
        assert shared_shard_bytes(collect(gm.graph))[shard] == 16 * 4, viewed


def joined_with_itself(viewed: bool) -> fx.GraphModule:
    """A cast that is gathered together with itself, and one that is not."""
    b = Rank(FULL)
    low = b.call(aten._to_copy, b.shard(), dtype=torch.bfloat16)
    again = b.call(aten.view, low, [FULL, WIDTH]) if viewed else low
    payloads = [b.call(aten.cat, [low, again])]
    payloads.append(b.call(aten._to_copy, b.shard(), dtype=torch.bfloat16))
    return b.output(*(b.gather(payload) for payload in payloads))


@pytest.mark.parametrize("form", ["default", "coalesced"])
def test_what_is_joined_with_itself_is_no_pad_with_a_view_and_without(form: str) -> None:
    reports = [
        torch_patches.optimize_graph(joined_with_itself(viewed), bucket_mode=form)
        for viewed in (False, True)
    ]
    assert [len(report.buckets) for report in reports] == [1, 1]
    assert reports[0].total_ms_after == reports[1].total_ms_after


def test_what_is_joined_with_itself_is_no_view_of_it() -> None:
    found = []
    for viewed in (False, True):
        b = Rank(FULL)
        doubled = b.call(aten.mul.Tensor, b.shard(), 2.0)
        again = b.call(aten.view, doubled, [FULL, WIDTH]) if viewed else doubled
        both = b.call(aten.cat, [doubled, again])
        last = b.call(aten.neg, both)
        idle = {both, again} - {doubled}
        traffic = memory_traffic(b.output(last).graph, idle)
        found.append([traffic[doubled], traffic[last]])
    assert found[0] == found[1]


def test_a_gradient_counts_as_a_share_where_it_is_scattered_and_whole_where_it_is_not() -> None:
    b = Rank(1)
    scattered = b.reduced(b.call(aten.mm, b.h, b.h))
    reduced = b.reduce_and_wait(b.call(aten.mm, b.h, b.h), "sum", "g")
    gm = b.output(scattered, reduced)
    counted = shared_shard_bytes(collect(gm.graph))
    assert counted[scattered] == FULL * WIDTH * 4
    assert counted[reduced] == WIDTH * WIDTH * 4


def rearranged(of_parameter: bool) -> tuple[fx.Graph, list[fx.Node]]:
    """A gathered tensor that is cut and joined along another dimension; the nodes that copy."""
    b = Rank(FULL)
    payload = b.shard()
    if not of_parameter:
        payload = b.call(aten.mm, payload, b.h)
    pieces = b.call(aten.split.Tensor, b.gather_and_wait(payload, RANKS, "g"), FULL)
    joined = b.call(aten.cat, [b.call(operator.getitem, pieces, i) for i in range(RANKS)], 1)
    copied = b.call(aten.clone, b.call(aten.t, joined), memory_format=torch.contiguous_format)
    gm = b.output(b.call(aten.mm, b.h, b.call(aten.view, copied, [WIDTH, WIDTH])))
    return gm.graph, [joined, copied]


@pytest.mark.parametrize("of_parameter", [False, True])
def test_copies_of_activations_take_time_and_those_of_shards_do_not(of_parameter: bool) -> None:
    graph, copies = rearranged(of_parameter)
    expected = forecast(graph, collect(graph), make_model("H100"))
    taken = [node in expected.costs and expected.costs[node].ms > 0 for node in copies]
    assert taken == [not of_parameter] * 2


def test_copies_of_activations_have_no_position() -> None:
    graph, copies = rearranged(of_parameter=False)
    positions = collect(graph).positions
    assert [positions[node.next] - positions[node] for node in copies] == [0, 0]


def joined_with_zeros(b: Rank) -> fx.Node:
    """In the place of rows that are missing."""
    part = b.call(aten.mm, b.shard(), b.h)
    if b.rows < FULL:
        part = b.call(aten.cat, [part, b.call(aten.new_zeros, part, [FULL - b.rows, WIDTH])])
    return b.gather_and_wait(part, RANKS, "h")


def cut(b: Rank, wait: fx.Node) -> fx.Node:
    if b.rows == FULL:
        return wait
    part = b.call(aten.slice.Tensor, wait, 0, 0, b.rows)
    return b.call(aten.clone, part, memory_format=torch.contiguous_format)


def cut_behind_the_input(b: Rank) -> fx.Node:
    """An activation that was saved with all rows."""
    return b.gather_and_wait(b.padded(cut(b, b.placeholder(FULL, WIDTH))), RANKS, "h")


def cut_between(b: Rank) -> fx.Node:
    """Gathered over two dimensions of a mesh."""
    half = b.gather_and_wait(b.call(aten.tanh, b.placeholder(FULL // 2, WIDTH)), 2, "inner")
    return b.gather_and_wait(b.padded(cut(b, half)), RANKS, "h")


def cut_in_front_of_the_output(b: Rank) -> fx.Node:
    b.saved.append(cut(b, b.scatter_and_wait(b.h, "sum", RANKS, "h")))
    return b.h


@pytest.mark.parametrize("rows", [FULL - 1, 1])
@pytest.mark.parametrize(
    "part",
    [joined_with_zeros, cut_behind_the_input, cut_between, cut_in_front_of_the_output],
)
def test_copies_of_one_rank_are_no_kernels_whatever_is_copied(part, rows) -> None:
    """One kernel more is one collective less that "auto" lets start early."""

    def kernels(rows: int) -> int:
        b = Rank(rows)
        b.saved = []
        for _ in range(2):
            b.h = b.call(aten.mm, b.call(aten.mm, b.h, b.gather(b.shard())), part(b))
        gm = b.output(b.h, *b.saved)
        for c in collect(gm.graph).collectives:
            traffic = Traffic.PARAMETER if c.group == "g" else Traffic.OTHER
            for node in (c.start, *c.waits):
                node.meta[TAG_MARK] = CollectiveTag(traffic, TagSource.DYNAMO)
        found = forecast(gm.graph, collect(gm.graph), make_model("H100"))
        return sum(cost.launches for cost in found.costs.values())

    assert kernels(rows) == kernels(FULL)
