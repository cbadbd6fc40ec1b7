"""What module modes do where the whole of what was asked for does not fit, or is not best."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from torch_patches import _cache_facts
from torch_patches._inductor.fx_passes.comm_overlap import module_names, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import make_model
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import memory_limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import make_bucket
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_buckets import split_for_memory
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import (
    label_collectives,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_ways import (
    FULL_WAYS,
    _at_most,
    _WayPlanner,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import find_gathers
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import read_track
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CloseReason,
    MergeForm,
    Plan,
    RefusalReason,
)
from torch_patches.captured import load_captured
from torch_patches.testing.module_graphs import (
    SIZE,
    ModuleGraph,
    backward,
    forward,
    optimized,
    tag,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
LLAMA = Path(__file__).parents[1] / "data" / "llama_8l_fsdp8.json.gz"


def captured(name: str) -> fx.GraphModule:
    return load_captured(LLAMA).graphs[name]


@pytest.mark.parametrize("graph", ["fw", "bw"])
@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.2, None])
def test_neither_cap_nor_time_is_exceeded(graph: str, ratio: float | None) -> None:
    gm = captured(graph)
    options = Options("transformer_block", max_memory_increase_ratio=ratio)
    report = pipeline.run_post_grad(gm.graph, options)
    assert report is not None
    assert report.total_ms_after <= report.total_ms_before + 1e-6
    allowed = (1 + ratio) if ratio is not None else 1.02 + (32 << 20) / report.peak_bytes_before
    assert report.peak_bytes_after <= allowed * report.peak_bytes_before
    held = (1 + ratio) if ratio is not None else 1.02 + (32 << 20) / report.held_peak_bytes_before
    assert report.held_peak_bytes_after <= held * report.held_peak_bytes_before


def test_small_models_are_bound_by_the_host_and_take_copying_buckets() -> None:
    """Nine members cost the host 90 us if coalesced, 20 us of copies if not."""
    _, report = optimized_capture(Options("transformer_block"))
    assert report.way == "as asked, copied"
    assert {bucket.form for bucket in report.buckets} == {"default"}
    asked = replace(Options("transformer_block"), bucket_mode="coalesced")
    _, other = optimized_capture(asked)
    assert other.way == "as asked"
    assert report.total_ms_after < other.total_ms_after


def optimized_capture(options: Options) -> tuple[fx.GraphModule, pipeline.Report]:
    gm = captured("fw")
    report = pipeline.run_post_grad(gm.graph, options)
    assert report is not None
    return gm, report


def test_less_is_done_where_memory_is_short_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module_names.warn_reduced.cache_clear()
    gm = captured("bw")
    tight = Options("transformer_block", bucket_mode="coalesced", max_memory_increase_ratio=0.01)
    with caplog.at_level(logging.WARNING):
        report = pipeline.run_post_grad(gm.graph, tight)
    assert report is not None
    assert report.way not in FULL_WAYS
    assert report.buckets  # fewer bytes each, but not nothing
    free = pipeline.run_post_grad(
        captured("bw").graph, replace(tight, max_memory_increase_ratio=1.0)
    )
    assert free is not None
    assert free.way in FULL_WAYS
    assert len(report.buckets) > len(free.buckets)
    assert [r.levelname for r in caplog.records if "max_memory_increase_gb" in r.getMessage()] == [
        "WARNING"
    ]


def test_what_memory_keeps_back_starts_in_parts() -> None:
    """Of four gathers of 64 bytes there is room for 130: the two that are used first go ahead."""
    gm = forward(1, count=4)
    skeleton = collect(gm.graph)
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    gathers = {g.collective.index: g for g in find_gathers(skeleton, place)}
    bucket = make_bucket(skeleton.collectives, MergeForm.COALESCED, CloseReason.END)
    free = 2 * gathers[0].flight_bytes + 2
    plan = split_for_memory(Plan((bucket,)), gathers, {0: free})
    assert [[m.index for m in b.members] for b in plan.buckets] == [[0, 1], [2, 3]]
    assert [(r.members, r.reason) for r in plan.refusals] == [
        (tuple(c.start.name for c in skeleton.collectives[2:]), RefusalReason.MEMORY)
    ]
    assert split_for_memory(Plan((bucket,)), gathers, {0: 4 * free}).buckets == (bucket,)
    assert split_for_memory(Plan((bucket,)), gathers, {0: 1}).buckets == (bucket,)


def test_reductions_chained_in_opposite_orders_close_no_cycle() -> None:
    """x0 -> y0 and y1 -> x1, where x go over dp and y over replicas: one of both pairs may merge."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    out = []
    with b.inside("layers.0"):
        for chain in (("dp", "replicas"), ("replicas", "dp"), ("dp", "replicas")):
            gradient = b.call(aten.mm, saved, g)
            for group in chain:
                gradient = b.reduce_and_wait(gradient, "sum", group)
            out.append(gradient)
    _, report = optimized(b.output(*out))  # raises where it is left untouched
    assert report.failure is None
    assert len(report.buckets) >= 1


def test_work_is_near_linear() -> None:
    """Also where collectives of no parameter wait far behind (a cap of zero)."""

    def operations(layers: int) -> int:
        _, report = optimized(backward(layers, regather=True), max_memory_increase_gb=0.0)
        assert report.operations > 0
        return report.operations

    assert operations(24) <= 2 * operations(12) * 1.1 + 500


def test_a_depth_beyond_the_graph_costs_nothing() -> None:
    _, report = optimized(forward(3), module_prefetch_depth=10**12, module_deferral_depth=10**12)
    assert report.failure is None


class _One(torch.nn.Module):
    pass


class _Other(torch.nn.Module):
    pass


def test_the_outer_cache_key_knows_classes_and_module_fqn() -> None:
    """Blocks are found by class, and an AOTAutograd hit asks no inner key."""

    def digest(kind: type, fqn: str | None = None) -> str:
        graph = fx.Graph()
        node = graph.call_function(torch.neg, (graph.placeholder("x"),))
        node.meta["nn_module_stack"] = {"0": ("L['self'].towers.a", kind)}
        if fqn is not None:
            node.meta["custom"] = {"module_fqn": fqn}
        graph.output(node)
        return _cache_facts.metadata_digest(
            fx.GraphModule(torch.nn.Module(), graph), Options(bucketing_mode="transformer_block")
        )

    assert digest(_One) == digest(_One)
    assert digest(_One) != digest(_Other)
    assert digest(_One, "a") != digest(_One, "b")


def test_smaller_buckets_keep_the_users_cap() -> None:
    """By number, by index and by function."""
    assert _at_most(None, 4.0) == 4.0
    assert _at_most(8.0, 4.0) == 4.0
    assert _at_most((1.0, 8.0), 4.0) == (1.0, 4.0)
    by_index = _at_most(lambda index: 1.0 + 7.0 * index, 4.0)
    assert callable(by_index)
    assert [by_index(0), by_index(1)] == [1.0, 4.0]


@pytest.mark.parametrize("runs", [1, 4])
def test_halves_are_halves_of_one_run_of_a_module(runs: int) -> None:
    """Four weights a module, run by each of several microbatches: half of a run is two weights."""
    b = ModuleGraph()
    shards = [b.shard() for _ in range(4)]
    out = []
    for _ in range(runs):
        h = b.placeholder(SIZE, SIZE)
        with b.inside("layers.0"):
            for shard in shards:
                h = b.use(h, shard)
        out.append(h)
    gm = b.output(*out)
    skeleton = collect(gm.graph)
    options = Options("modules", module_bucket_plans=("layers.*",))
    model = make_model()
    track = read_track(tuple(gm.graph.nodes), skeleton, model, model.node_costs(gm.graph, skeleton),
                       live_bytes(gm.graph))  # fmt: skip
    limits = memory_limits(options, 1 << 40)
    planner = _WayPlanner(track, options, limits, label_collectives(skeleton, options))
    (way,) = planner.make("halves")
    assert [len(bucket.members) for bucket in way.plan.buckets] == [2] * (2 * runs)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (Options("transformer_block"), 0.1),
        (Options("modules", enable_overlap_scheduling=True), 0.02),
        (Options("auto"), 0.02),
    ],
)
def test_default_memory_cap(options: Options, share: float) -> None:
    """A GiB allows more than the least of 32 MiB in one case, and just that in the others."""
    allowed = memory_limits(options, 1 << 30).peak_bytes - (1 << 30)
    assert allowed == max(int(share * (1 << 30)), 32 << 20)


def test_parts_keep_the_order_of_registration() -> None:
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        for place in range(4):
            wait = b.gather_and_wait(b.shard(), 2, "dp")
            tag(wait, f"layers.0.w{place}", index=3 - place, place=place)
            h = b.call(aten.mm, h, wait)
    skeleton = collect(b.output(h).graph)
    place_of = {node: number for number, node in enumerate(b.graph.nodes)}
    gathers = {g.collective.index: g for g in find_gathers(skeleton, place_of)}
    bucket = make_bucket(skeleton.collectives, MergeForm.COALESCED, CloseReason.END)
    parts = split_for_memory(Plan((bucket,)), gathers, {0: 2 * gathers[0].flight_bytes}).buckets
    assert [part.payload_order for part in parts] == [(1, 0), (1, 0)]
