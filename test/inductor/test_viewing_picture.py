"""What is recorded of a run gives the run again, keeps no graph, and costs a compile nothing."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_patches import optimize_graph
from torch_patches._hooks import PostGradPass
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.report import NoStoryError, Report
from torch_patches._inductor.fx_passes.comm_overlap.reporting import Before, Observed
from torch_patches.captured import load_captured
from torch_patches.viewing import record
from torch_patches.viewing.picture import Picture, Run
from torch_patches.viewing.record import StoryRecord, observe

pytestmark = pytest.mark.usefixtures("as_on_gpu")
DATA = Path(__file__).parents[1] / "data"
CASES = [
    ("llama_8l_fsdp8", "fw", "auto"),
    ("llama_8l_fsdp8", "bw", "topo_span"),
    ("llama_2l_fsdp4_tp2", "fw", "transformer_block"),
    ("moe_3l_dp4_ep2", "bw", "auto"),
    ("llama_3l_ddp8", "bw", "auto"),
]


def load(file: str, graph: str) -> fx.GraphModule:
    return load_captured(DATA / f"{file}.json.gz").graphs[graph]


def story_of(report: Report) -> StoryRecord:
    assert report.failure is None and isinstance(report.story, StoryRecord)
    return report.story


@pytest.mark.parametrize(("file", "graph", "mode"), CASES)
def test_the_runs_are_those_of_the_report(file: str, graph: str, mode: str) -> None:
    gm = load(file, graph)
    starts = [node.name for node in gm.graph.nodes]
    seen: list[Observed] = []

    def keep(observed: Observed) -> StoryRecord:
        seen.append(observed)
        return observe(observed)

    report = pipeline.optimize_graph(gm, Options(mode), keep)
    picture = story_of(report).picture
    check_run(picture.before, seen[0].before)
    check_run(picture.after, seen[0].after)
    assert picture.before.total_ms == report.total_ms_before
    assert picture.after.total_ms == report.total_ms_after
    assert picture.after.peak_bytes == report.peak_bytes_after <= picture.cap_bytes
    assert len(picture.displaced) == report.moved
    assert set(picture.displaced) <= set(starts)
    assert [flight.launch.start for flight in picture.after.flights] == [
        span.start for span in report.spans
    ]


def check_run(run: Run, forecast: Any) -> None:
    """Stops add up to what is exposed, and nothing on the compute stream lies on another."""
    timeline = forecast.timeline
    assert (run.total_ms, run.exposed_ms) == (timeline.total_ms, timeline.exposed_ms)
    spans = [(s.start_ms, s.end_ms, s.exposed_ms, s.hidden_ms) for s in timeline.spans]
    assert [(f.start_ms, f.end_ms, f.exposed_ms, f.hidden_ms) for f in run.flights] == spans
    assert sum(s.end_ms - s.start_ms for s in run.stops) == pytest.approx(run.exposed_ms)
    lane = sorted(
        [(k.start_ms, k.end_ms) for k in run.kernels] + [(s.start_ms, s.end_ms) for s in run.stops]
    )
    assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(lane))
    times = [point.ms for point in run.memory]
    assert times == sorted(times) and times[-1] == run.total_ms
    assert max(point.live_bytes for point in run.memory) == run.peak_bytes


def test_edges_before_are_those_of_the_graph_as_it_was_given() -> None:
    """The rewrite gives the nodes other inputs; the record has the old ones."""
    gm = load("llama_8l_fsdp8", "fw")
    edges = {n.name: [i.name for i in n.all_input_nodes] for n in gm.graph.nodes}
    record = story_of(optimize_graph(gm)).before
    told = {
        name: [record.names[i] for i in sources]
        for name, sources in zip(record.names, record.inputs, strict=True)
    }
    assert told == edges
    assert {n.name: [i.name for i in n.all_input_nodes] for n in gm.graph.nodes} != edges


def test_buckets_are_told_by_their_place_in_the_report() -> None:
    gm = load("llama_8l_fsdp8", "fw")
    report = optimize_graph(gm)
    after = story_of(report).picture.after
    made = [flight.launch for flight in after.flights if flight.launch.bucket is not None]
    assert sorted(launch.bucket for launch in made if launch.bucket is not None) == list(
        range(len(report.buckets))
    )
    for launch in made:
        assert launch.size_bytes == report.buckets[launch.bucket or 0].size_bytes


def test_buckets_of_an_earlier_run_are_not_this_ones() -> None:
    gm = load("llama_8l_fsdp8", "fw")
    assert optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=1).buckets
    earlier = {node.name for node in gm.graph.nodes if BUCKET_MARK in node.meta}
    report = optimize_graph(gm, bucketing_mode="auto")
    launches = [flight.launch for flight in story_of(report).picture.after.flights]
    old = [launch for launch in launches if launch.start in earlier]
    assert old and all(launch.bucket is None for launch in old)
    assert len([x for x in launches if x.bucket is not None]) == len(report.buckets)


def test_a_story_keeps_no_graph() -> None:
    gm = load("llama_8l_fsdp8", "bw")
    report = optimize_graph(gm)
    graph = weakref.ref(gm.graph)
    del gm
    gc.collect()
    assert graph() is None
    assert story_of(report).picture.after.flights


def test_a_story_survives_pickle_and_a_picture_is_json() -> None:
    report = optimize_graph(load("llama_8l_fsdp8", "fw"))
    again: Report = pickle.loads(pickle.dumps(report))
    assert story_of(again).picture == story_of(report).picture
    told = dataclasses.asdict(story_of(report).picture)
    told_again = json.loads(json.dumps(told, default=lambda value: value.value))
    assert told_again["after"]["total_ms"] == report.total_ms_after


def test_the_report_as_json_has_no_story() -> None:
    report = optimize_graph(load("llama_8l_fsdp8", "fw"))
    told = json.loads(report.to_json())
    assert "story" not in told and len(told["spans"]) == len(report.spans)


@pytest.mark.parametrize("observed", [False, True])
def test_who_does_not_observe_pays_nothing(observed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a record nor the names that it needs are made."""
    made: list[Before] = []
    before_of = Before.of

    def keep(*args: Any) -> Before:
        made.append(before_of(*args))
        return made[-1]

    monkeypatch.setattr(Before, "of", keep)
    gm = load("llama_8l_fsdp8", "fw")
    observer = observe if observed else None
    report = pipeline.run_post_grad(gm.graph, Options("auto"), observer=observer)
    assert report is not None and report.failure is None
    assert [bool(each.inputs) for each in made] == [observed]
    assert (report.story is not None) == observed


def test_a_report_without_a_story_says_why(tmp_path: Path) -> None:
    report = pipeline.run_post_grad(load("llama_8l_fsdp8", "fw").graph, Options("auto"))
    assert report is not None
    for write in (report.to_html, report.to_chrome_trace):
        with pytest.raises(NoStoryError, match="nobody observed"):
            write(tmp_path / "x")
    with pytest.raises(NoStoryError, match="it broke"):
        Report("auto", failure="it broke").to_html(tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [False, True])
def test_optimize_graph_keeps_the_story_unless_told_not_to(kept: bool) -> None:
    report = optimize_graph(load("llama_3l_fsdp8", "fw"), keep_story=kept)
    assert report.failure is None
    assert (report.story is not None) == kept


def test_options_that_were_set_come_first_and_functions_go_by_name() -> None:
    def half(node: fx.Node, size_bytes: int | None) -> float | None:
        return None

    report = optimize_graph(
        load("llama_8l_fsdp8", "fw"),
        bucketing_mode="topo_span",
        max_topo_span=77,
        bucket_cap_mb=lambda index: 30.0,
        custom_runtime_estimation=half,
    )
    options = story_of(report).options
    first = set(list(options)[:4])
    assert first == {
        "bucketing_mode",
        "max_topo_span",
        "bucket_cap_mb",
        "custom_runtime_estimation",
    }
    assert options["max_topo_span"] == "77" and "half" in options["custom_runtime_estimation"]
    constants = story_of(report).constants
    assert (constants["host.kernel_us"], constants["device.kernel_us"]) == ("5.0", "3.0")
    assert "0x" not in options["bucket_cap_mb"] and "lambda" in options["bucket_cap_mb"]


def test_a_graph_that_nothing_improves_has_two_equal_runs() -> None:
    """An all-to-all alone: the picture is there, and nothing has moved."""
    from torch_patches.testing.graph_builder import GraphBuilder

    b = GraphBuilder()
    x = b.placeholder(8, 8)
    moved = b.wait(b.all_to_all(x, [4, 4], [4, 4], "g"))
    report = optimize_graph(b.output(b.call(torch.ops.aten.relu, moved)))
    picture: Picture = story_of(report).picture
    assert picture.before.flights[0].exposed_ms == picture.after.flights[0].exposed_ms > 0
    assert picture.displaced == ()


# -- compiles -------------------------------------------------------------------------------------


def test_a_compile_is_observed_where_its_log_is_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, logger="torch_patches"):
        PostGradPass(Options("auto"))(load("llama_8l_fsdp8", "fw").graph)
    reports = [record.report for record in caplog.records if hasattr(record, "report")]
    assert len(reports) == 1
    reports[0].to_html(tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size > 50_000


def test_a_compile_without_a_log_is_not_observed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(record, "observe", seen.append)
    with caplog.at_level(logging.WARNING, logger="torch_patches"):
        PostGradPass(Options("auto"))(load("llama_8l_fsdp8", "fw").graph)
    assert seen == []


def test_a_failing_observer_costs_the_story_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(observed: Observed) -> StoryRecord:
        raise KeyError("observer")

    monkeypatch.delenv("TORCH_PATCHES_STRICT")
    gm = load("llama_8l_fsdp8", "fw")
    report = pipeline.optimize_graph(gm, Options("auto"), fail)
    assert report.buckets and report.total_ms_after > 0 and report.story is None
    assert "could not keep what draws a run" in caplog.text
