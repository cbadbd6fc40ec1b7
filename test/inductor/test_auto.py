"""Mode "auto" and scheduling on whole graphs: what is tried, what is kept, what is told.

Costs of the small graphs are given: a matrix product takes 10 ms, a collective 4 ms and 0.5 ms a KiB.
"""

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import overlap, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
    CalibrationTable,
    save_calibration,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.custom import EstimationError
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes import auto, choice
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import GIB, Way, memory_limits
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveKind,
    Plan,
    RefusalReason,
    Traffic,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.estimations import ESTIMATIONS
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.schedule_sketch import COSTS, FREE, Sketch, track_of
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
COMPUTE_BOUND, LATENCY_BOUND, BANDWIDTH_BOUND = ESTIMATIONS
GROUPS = {"g": [[0, 1]], "h": [[0, 1]]}
AUTO = Options("auto")


def layers(count: int, width: int = 16) -> GraphBuilder:
    """``count`` products, each with a weight gathered for it; the last product is ``b.last``."""
    b = GraphBuilder()
    h = b.placeholder(width, width)
    for _ in range(count):
        h = b.call(aten.mm, h, b.gather_and_wait(b.placeholder(width // 2, width), 2, "g"))
    b.last = h  # type: ignore[attr-defined]
    return b


def model(count: int) -> fx.GraphModule:
    b = layers(count)
    return b.output(b.last)  # type: ignore[attr-defined]


def optimize(gm: fx.GraphModule, **options: object) -> Report:
    options = {"custom_runtime_estimation": COMPUTE_BOUND, "max_memory_increase_gb": 1.0, **options}
    return torch_patches.optimize_graph(gm, **options)  # type: ignore[arg-type]


# -- what is chosen -------------------------------------------------------------------------------


def test_bandwidth_bound_graph_keeps_gathers_apart_and_hides_them() -> None:
    """Gathers of 6.35 ms under products of 5, slowed to 6: of all but the first 0.35 stick out."""
    report = optimize(model(6), custom_runtime_estimation=BANDWIDTH_BOUND)
    assert report.exposed_ms_before == pytest.approx(6 * 6.35, rel=0.01)
    assert report.collectives_after == {"all_gather": 6}
    assert report.exposed_ms_after == pytest.approx(6.35 + 5 * 0.35, rel=0.02)


@pytest.mark.parametrize(
    ("gather_ms", "behind", "first_is_faster"), [(45.0, 2, True), (25.0, 3, False)]
)
def test_activations_wait_for_a_gather_only_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, gather_ms: float, behind: int, first_is_faster: bool
) -> None:
    """Two products, a reduced activation, so many products, the last of which needs the gather: it is
    hidden neither in front nor behind."""
    monkeypatch.setitem(COSTS, CollectiveKind.ALL_GATHER, gather_ms)
    s = Sketch()
    h = s.mm(s.mm(s.x, s.x), s.x)
    h = s.scatter_and_wait(s.call(aten.relu, h), "sum", 2, "h")
    for _ in range(behind - 1):
        h = s.mm(h, s.x)
    best = auto.try_ways(track_of(s.end(s.mm(h, s.weight()))), AUTO, FREE)[0]
    waited_ms = {s.collective.traffic: s.exposed_ms for s in best.schedule.timeline.spans}
    assert (waited_ms[Traffic.OTHER] > 6.0) == first_is_faster
    assert best.name.endswith(", giving way") != first_is_faster
    assert best.schedule.timeline.total_ms == (71.0 if first_is_faster else 61.0)


def test_latency_bound_graph_is_merged() -> None:
    """20 ms a launch and 1 ms a product: one launch of all is best."""
    report = optimize(model(6), custom_runtime_estimation=LATENCY_BOUND)
    assert report.collectives_after == {"all_gather": 1}
    assert report.exposed_ms_after < report.exposed_ms_before / 4


def test_asked_for_caps_are_kept() -> None:
    """Members of 1 KiB each: caps of two of them."""
    report = optimize(
        model(6), custom_runtime_estimation=LATENCY_BOUND, bucket_cap_mb=2.1 * 1024 / 2**20
    )
    assert [len(bucket.members) for bucket in report.buckets] == [2, 2, 2]
    assert report.way == "as asked"


def test_topo_span_schedules_where_it_is_asked_to() -> None:
    plain = optimize(model(6), bucketing_mode="topo_span", bucket_cap_mb=1e-3)
    assert plain.moved == 0 and plain.exposed_ms_after == pytest.approx(plain.exposed_ms_before)
    scheduled = optimize(model(6), bucketing_mode="topo_span", bucket_cap_mb=1e-3, overlap=True)
    assert scheduled.moved > 0 and scheduled.exposed_ms_after < plain.exposed_ms_after / 4


def test_graph_without_anything_to_gain_is_left_alone() -> None:
    """One gather, used at once."""
    gm = model(1)
    before = gm.code
    report = optimize(gm)
    assert gm.code == before
    assert report.total_ms_after == report.total_ms_before


def test_way_that_breaks_its_promise_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is said to fail: all three of them are applied, merged in two ways and apart, or as
    many as may be; then the graph is as it was."""
    tried: list[str] = []

    def refuse(*args: object) -> str:
        tried.append("way")
        return "it is too large"

    monkeypatch.setattr(overlap, "_problem", refuse)
    for most in (choice.MAX_APPLIED_SMALL, 1):
        monkeypatch.setattr(choice, "MAX_APPLIED_SMALL", most)
        tried.clear()
        gm = model(6)
        before = gm.code
        report = optimize(gm, custom_runtime_estimation=LATENCY_BOUND)
        assert len(tried) == min(3, most)
        assert gm.code == before
        assert report.way == "input" and not report.buckets
        assert {refusal.reason for refusal in report.refusals} == {RefusalReason.NOT_BETTER}


def test_ddp_backward_is_bucketed_and_hidden() -> None:
    """torch 2.13's scheduler raises "cyclic extra dep(s)" on such graphs (PITFALLS 26)."""
    b = GraphBuilder()
    h = b.placeholder(16, 16)
    reduced = []
    for _ in range(8):
        h = b.call(aten.mm, h, h)
        reduced.append(
            b.call(aten.div.Tensor, b.reduce_and_wait(b.call(aten.mm, h, h), "sum", "g"), 2)
        )
    report = optimize(b.output(*reduced), custom_runtime_estimation=LATENCY_BOUND)
    assert report.failure is None
    assert report.collectives_after["all_reduce"] < 8
    assert report.total_ms_after < report.total_ms_before


def test_overlap_that_was_planned_and_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moves are left out of the rewrite: nothing hides, and every way is given up."""
    applied = overlap.apply_plan

    def without_moves(graph: fx.Graph, skeleton: object, plan: Plan, **options: bool) -> None:
        applied(graph, skeleton, replace(plan, moves=()), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(overlap, "apply_plan", without_moves)
    monkeypatch.setattr(overlap, "_problem", lambda *args: None)
    report = optimize(model(6), custom_runtime_estimation=BANDWIDTH_BOUND)
    assert report.way == "input"


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_overlap_preserving_merge_is_tried_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    tried: list[list[str]] = []

    def try_ways(*args: object) -> list[Way]:
        ways = auto.try_ways(*args)  # type: ignore[arg-type]
        tried.append([way.name for way in ways])
        return ways

    monkeypatch.setattr(choice, "try_ways", try_ways)
    optimize(model(6), bucketing_mode=mode, overlap=True, bucket_cap_mb=1.0)
    assert sorted(tried[0]) == ["after schedule", "as asked", "none"]


@pytest.mark.parametrize(("mode", "tried"), [("topo_span", True), ("auto", False)])
def test_overlap_preserving_merge_of_a_large_graph_is_tried_where_sizes_are_given(
    mode: str, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are searched, it would be too much work."""
    names: list[str] = []

    def try_ways(*args: object) -> list[Way]:
        ways = auto.try_ways(*args)  # type: ignore[arg-type]
        names.extend(way.name for way in ways)
        return ways

    monkeypatch.setattr(choice, "try_ways", try_ways)
    monkeypatch.setattr(auto, "is_small", lambda track: False)
    optimize(model(4), bucketing_mode=mode, overlap=True)
    assert ("after schedule" in names) is tried


def test_calibration_counts_where_the_call_is_the_opt_in(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_calibration(path, CalibrationTable(device="slow", dram_gb_per_s=1.0))
    slow = torch_patches.optimize_graph(model(2), calibration_file=str(path))
    assert "slow" in slow.estimates
    assert slow.total_ms_before > torch_patches.optimize_graph(model(2)).total_ms_before
    with pytest.raises(FileNotFoundError):
        torch_patches.optimize_graph(model(2), calibration_file=str(tmp_path / "none"))


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gb", "ratio", "allowed"),
    [
        (None, None, GIB // 50),  # 2% of 1 GiB is less than 32 MiB
        (1.0, None, GIB),
        (None, 0.5, GIB // 2),
        (1.0, 0.5, GIB // 2),
        (0.25, 0.5, GIB // 4),
        (0.0, None, 0),
        (None, 0.0, 0),
    ],
)
def test_caps_are_combined_by_minimum(gb: float | None, ratio: float | None, allowed: int) -> None:
    options = replace(AUTO, max_memory_increase_gb=gb, max_memory_increase_ratio=ratio)
    expected = max(allowed, 32 << 20) if gb is None and ratio is None else allowed
    assert memory_limits(options, GIB).peak_bytes == GIB + expected


def test_bound_on_prefetch_is_the_one_that_was_asked_for() -> None:
    """Without one, modules may be of any length."""
    asked = [replace(AUTO, max_compute_pre_fetch=3), Options("modules", max_compute_pre_fetch=3)]
    assert [memory_limits(options, GIB).prefetch_kernels for options in asked] == [3, 3]
    assert memory_limits(AUTO, GIB).prefetch_kernels == auto.DEFAULT_PREFETCH
    assert memory_limits(Options("modules"), GIB).prefetch_kernels is None


def test_default_cap_of_a_large_graph_is_its_share() -> None:
    assert memory_limits(AUTO, 100 * GIB).peak_bytes == 102 * GIB


def test_cap_of_nothing_is_kept() -> None:
    for estimation in ESTIMATIONS:
        report = optimize(
            model(8), custom_runtime_estimation=estimation, max_memory_increase_gb=0.0
        )
        assert report.peak_bytes_after <= report.peak_bytes_before


def test_more_memory_is_never_slower() -> None:
    times = [
        optimize(
            model(8), custom_runtime_estimation=LATENCY_BOUND, max_memory_increase_gb=kib / 2**20
        ).total_ms_after
        for kib in (0, 2, 4, 8, 16)
    ]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_bytes_in_flight_bound_merging_as_well_as_prefetch() -> None:
    report = optimize(model(8), custom_runtime_estimation=LATENCY_BOUND, max_in_flight_gb=0.0)
    assert not report.buckets
    assert report.exposed_ms_after == pytest.approx(report.exposed_ms_before)  # nor prefetched
    assert RefusalReason.MEMORY in {r.reason for r in report.refusals} | {RefusalReason.MEMORY}


# -- order ----------------------------------------------------------------------------------------


def test_nothing_crosses_a_side_effect() -> None:
    """A gather in front of one that is used behind it, and one that stands behind it."""
    b = GraphBuilder()
    x = b.placeholder(16, 16)
    early = b.all_gather(b.placeholder(8, 16), 2, "g")
    h = b.call(aten.mm, x, x)
    fence = b.call(barrier, x)
    late = b.all_gather(b.placeholder(8, 16), 2, "g")
    h = b.call(aten.mm, h, x)
    for start in (early, late):
        h = b.call(aten.mm, h, b.wait(start))
    gm = b.output(h)
    optimize(gm)
    order = list(gm.graph.nodes)
    assert order.index(early) < order.index(fence) < order.index(late)


def test_a_reduction_behind_a_side_effect_is_hidden_too() -> None:
    """barrier(x);  mm(x) -> RS -> W;  mm(y): the wait moves behind the second product."""
    b = GraphBuilder()
    x, y = (b.placeholder(4096, 4096, dtype=torch.bfloat16) for _ in range(2))
    b.call(barrier, x)
    reduced = b.scatter_and_wait(b.call(aten.mm, x, x), "sum", 8, "g")
    report = optimize(b.output(b.call(aten.mm, y, y), reduced))
    assert report.exposed_ms_before > 0.05
    assert report.exposed_ms_after == 0


def test_order_of_starts_is_the_same_for_other_names_and_hints() -> None:
    """What a plan reads is shared by all ranks: no names, no views that only some ranks have."""
    one, two = model(8), model(8)
    for number, node in enumerate(reversed(two.graph.nodes)):
        node.name = f"n{number}"
    for node in two.graph.find_nodes(op="placeholder")[2:5]:
        with two.graph.inserting_before(next(iter(node.users))):
            view = two.graph.call_function(aten.alias.default, (node,))
        view.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(view, delete_user_cb=lambda user, v=view: user is not v)
    for estimation in ESTIMATIONS:
        reports = [
            optimize(copy.deepcopy(gm), custom_runtime_estimation=estimation) for gm in (one, two)
        ]
        assert reports[0].schedule_hash == reports[1].schedule_hash
        assert reports[0].total_ms_after == reports[1].total_ms_after


def test_second_run_changes_nothing() -> None:
    gm = model(6)
    options = replace(
        AUTO, custom_runtime_estimation=COMPUTE_BOUND, estimation_digest=COMPUTE_BOUND.uuid()
    )
    assert pipeline.run_post_grad(gm.graph, options) is not None
    order = [node.name for node in gm.graph.nodes]
    assert pipeline.run_post_grad(gm.graph, options) is None
    assert [node.name for node in gm.graph.nodes] == order


def test_values_stay() -> None:
    for estimation, form in itertools.product(ESTIMATIONS, ("default", "coalesced")):
        b = layers(5)
        h = b.last  # type: ignore[attr-defined]
        grads = [b.scatter_and_wait(b.call(aten.mm, h, h), "sum", 2, g) for g in ("g", "h", "g")]
        gm = b.output(h, *grads)
        after = copy.deepcopy(gm)
        optimize(after, custom_runtime_estimation=estimation, bucket_mode=form)
        inputs = random_inputs(gm, 2, seed=0)
        for expected, found in zip(
            run_spmd(gm, inputs, GROUPS, 2), run_spmd(after, inputs, GROUPS, 2), strict=True
        ):
            assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def test_control_dependencies_hold_what_hides() -> None:
    gm = model(6)
    bound = {"custom_runtime_estimation": BANDWIDTH_BOUND}
    assert optimize(copy.deepcopy(gm), **bound).control_dependencies == 0
    report = optimize(gm, insert_overlap_deps=True, **bound)
    assert report.control_dependencies > 0
    assert "control_deps" in gm.code
    assert len(collect(gm.graph).collectives) == sum(report.collectives_after.values())


# -- what is told ---------------------------------------------------------------------------------


def test_report_has_times_memory_and_what_hides_what() -> None:
    gm = model(6)
    report = optimize(gm, custom_runtime_estimation=BANDWIDTH_BOUND)
    assert report.estimates == "H100 constants, 8 GPUs a node, after the custom estimation"
    assert list(report.exposed_by_group_before) == list(report.exposed_by_group_after) == ["g"]
    assert sum(report.exposed_by_group_after.values()) == pytest.approx(report.exposed_ms_after)
    assert report.peak_bytes_before > 0 and report.operations > 0
    names = {node.name for node in gm.graph.nodes}
    assert all(span.start in names and names.issuperset(span.hidden_by) for span in report.spans)
    assert sum(bool(span.hidden_by) for span in report.spans) == len(report.spans) - 1
    told = json.loads(report.to_json())
    assert told["total_ms_after"] == report.total_ms_after
    assert f"way: {report.way}" in report.summary() and "exposed" in report.summary()


def test_times_are_reported_where_nothing_is_scheduled() -> None:
    report = optimize(model(4), bucketing_mode="topo_span")
    assert report.total_ms_before > 0 and report.way == "as asked"


def test_every_collective_left_alone_has_a_reason() -> None:
    gm = model(6)
    report = optimize(gm)
    told = {name for bucket in report.buckets for name in bucket.members}
    told |= {name for refusal in report.refusals for name in refusal.members}
    assert told == {c.start.name for c in collect(model(6).graph).collectives}


def test_bad_estimation_raises() -> None:
    """It is the user's mistake, as a bad flag is."""
    with pytest.raises(EstimationError, match="-1"):
        optimize(model(2), custom_runtime_estimation=lambda node, size_bytes: -1.0)


def test_custom_estimation_is_asked_for_buckets() -> None:
    asked: set[int | None] = set()

    def estimation(node: fx.Node, size_bytes: int | None) -> float | None:
        asked.add(size_bytes)
        return LATENCY_BOUND(node, size_bytes)

    optimize(model(4), custom_runtime_estimation=estimation)
    assert None in asked and 4 * 1024 in asked  # four gathers of 1 KiB each


def test_work_grows_linearly() -> None:
    """Beyond the 200 kernels that a gather may start ahead, each slot of which is looked at."""
    short, long = optimize(model(640)).operations, optimize(model(1280)).operations
    assert 0 < long <= 2.2 * short
