"""What each argument of torch's scheduler does here: the table of ``docs/drop_in.md``, row by row."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import _compat, compat_api
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
    CalibrationTable,
    save_calibration,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import LinkClass
from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import CollectiveTimes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import EstimationError
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.compat_api import OverlapScheduler, schedule_overlap_bucketing
from torch_patches.config import PREFIX, FlagError
from torch_patches.testing.beside_torch import (
    HOMES,
    WorldSketch,
    fixed_times,
    held,
    launches,
    words,
)

aten = torch.ops.aten
#: ms
TIMES = fixed_times(mm=10.0, gather=4.0, scatter=6.0, reduce=6.0)
PAGE = Path(__file__).parents[2] / "docs" / "drop_in.md"


@pytest.fixture(autouse=True)
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counters.clear()
    yield
    dist.destroy_process_group()


def sketch() -> WorldSketch:
    return WorldSketch(dist.group.WORLD.group_name)


def run(s: WorldSketch, estimation=TIMES, **arguments) -> fx.GraphModule:
    given = {"pre_bucketing_fsdp_collectives": False, **arguments}
    return schedule_overlap_bucketing(s.done(), custom_runtime_estimation=estimation, **given)


def merged(s: WorldSketch, estimation=TIMES, **arguments) -> fx.GraphModule:
    return run(s, estimation, collective_bucketing=True, **arguments)


def behind(products: int, gathers: int = 1, rows: int = 4) -> WorldSketch:
    """Products, then gathers that the last product needs."""
    s = sketch()
    for _ in range(products):
        s.mm()
    for weight in [s.end(s.start(rows=rows)) for _ in range(gathers)]:
        s.results.append(s.call(aten.mm, weight, s.x))
    return s


def scattered(count: int) -> WorldSketch:
    """Gradients of 256 bytes."""
    s = sketch()
    for start in [s.scatter(s.placeholder(8, 8)) for _ in range(count)]:
        s.end(start)
    return s


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gigabytes", "moved"), [(300 / 2**30, True), (100 / 2**30, False)])
def test_max_in_flight_gb(gigabytes, moved):
    """A gather has 256 bytes."""
    order = words(run(behind(1), max_in_flight_gb=gigabytes))
    assert order == ("gather mm wait mm" if moved else "mm gather wait mm")


@pytest.mark.parametrize(("kernels", "order"), [
    (200, "mm mm gather mm wait mm"),
    (1, "mm mm gather mm wait mm"),
    (0, "mm mm mm gather wait mm"),
])  # fmt: skip
def test_max_compute_pre_fetch(kernels, order):
    """One product is enough to hide 4 ms; none is allowed with 0."""
    assert words(run(behind(3), max_compute_pre_fetch=kernels)) == order


@pytest.mark.parametrize(
    ("caps", "moved"),
    [
        ((1.0, 0.05), True),  # torch's defaults: at least 32 MiB
        ((None, None), True),  # no bound
        ((None, 0.05), False),  # 224 bytes
        ((None, 0.06), True),  # 268
        ((200 / 2**30, None), False),
        ((300 / 2**30, None), True),
        ((1.0, 0.04), False),  # the smaller one
    ],
)
def test_memory_caps(caps, moved):
    """At the product of 64 rows live 2048 bytes that it reads and as many that it makes, and inputs
    of 384; the gather would add 256."""
    s = sketch()
    wide = s.call(aten.cat, [s.x] * 8)
    s.results.append(s.call(aten.sum, s.call(aten.mm, wide, s.x)))
    s.mm(s.end(s.start()))
    gigabytes, ratio = caps
    gm = run(s, max_memory_increase_gb=gigabytes, max_memory_increase_ratio=ratio)
    assert counters["inductor"]["overlap_original_mem"] == 4480
    assert words(gm) == ("gather mm wait mm" if moved else "mm gather wait mm")


@pytest.mark.parametrize(("caps", "moved"), [((1.0, 0.05), False), ((None, None), True)])
def test_memory_without_caps(caps, moved):
    """The same with 128 MiB read and as many made; the gather would add 64, more than the 32 that
    are always allowed by default."""
    s = sketch()
    tall = s.placeholder(1 << 22, 8)
    s.results.append(s.call(aten.sum, s.call(aten.mm, tall, s.x)))
    s.results.append(s.call(aten.mm, s.end(s.start(rows=1 << 20)), s.x))
    gigabytes, ratio = caps
    gm = run(s, max_memory_increase_gb=gigabytes, max_memory_increase_ratio=ratio)
    assert words(gm) == ("gather mm wait mm" if moved else "mm gather wait mm")


@pytest.mark.parametrize(("distance", "left"), [(3, 1), (1, 2), (0, 4)])
def test_max_coll_distance(distance, left):
    """Four gradients of one key."""
    assert launches(merged(scattered(4), max_coll_distance=distance))["scatter"] == left


@pytest.mark.parametrize(("gigabytes", "left"), [(0.5, 1), (None, 1), (600 / 2**30, 2)])
def test_max_off_bucket_gb(gigabytes, left):
    """Buckets of gradients of 256 bytes each hold that; None: no bound of its own."""
    assert launches(merged(scattered(4), max_off_bucket_gb=gigabytes))["scatter"] == left


def test_max_off_bucket_gb_is_not_for_gathers():
    gm = merged(behind(1, gathers=4), max_off_bucket_gb=600 / 2**30)
    assert launches(gm)["gather"] == 1


# -- estimates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "order"), [
    (1.0, "mm gather mm wait mm"),
    (0.3, "gather mm mm wait mm"),
])  # fmt: skip
def test_compute_overlap_multipler(factor, order):
    """4 ms are hidden by one product of 10, by two of 3."""
    assert words(run(behind(2), compute_overlap_multipler=factor)) == order


def test_compute_that_hides_nothing():
    run(behind(2), compute_overlap_multipler=0.0)
    assert counters["inductor"]["overlap_scheduling_exposed"] == 1


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_a_wrong_multiplier_raises(factor):
    with pytest.raises(FlagError, match="compute_overlap_multipler"):
        run(behind(1), compute_overlap_multipler=factor)


def test_custom_runtime_estimation_decides():
    """A pointwise op that takes 10 ms hides; what is not known takes no time."""

    def make():
        s = sketch()
        s.results.append(s.call(aten.tanh, s.x))
        s.mm(s.end(s.start()))
        return s

    def slow(node, size_bytes):
        return 10.0 if node.target is aten.tanh.default else TIMES(node, size_bytes)

    run(make(), slow)
    assert counters["inductor"]["overlap_scheduling_exposed"] == 0
    run(make())
    assert counters["inductor"]["overlap_scheduling_exposed"] == 1


def test_custom_runtime_estimation_is_asked_for_buckets():
    """What merging saves is what it says of the bucket's bytes."""
    asked = []

    def estimate(node, size_bytes):
        asked.append(size_bytes)
        return TIMES(node, size_bytes)

    merged(behind(1, gathers=2), estimate)
    assert 512 in asked


@pytest.mark.parametrize("name", ["collective_estimator", "compute_estimator"])
def test_unknown_estimators_raise(name):
    with pytest.raises(FlagError, match=rf"{name}=...\): 'guess' is not allowed"):
        run(behind(1), **{name: "guess"})


def test_ranks_do_not_measure_for_themselves():
    gm = behind(1).done()
    text = gm.code
    with pytest.raises(FlagError, match="each rank decide by its own clock"):
        schedule_overlap_bucketing(gm, collective_estimator="benchmark")
    assert gm.code == text


def test_a_calibration_file_is_what_benchmarking_is_here(tmp_path):
    """A table of gathers by two ranks of a node: 7 ms at 256 bytes."""
    times = CollectiveTimes(CollectiveKind.ALL_GATHER, LinkClass.INTRA_NODE, 2, (256, 512), (7, 8))
    table = CalibrationTable("test", (times,), loaded_launch_us=0.0)
    save_calibration(tmp_path / "table.json", table)
    with inductor_config.patch({PREFIX + "calibration_file": str(tmp_path / "table.json")}):
        scheduler = OverlapScheduler(
            behind(1).done(), 5.0, 200, False, False, 1.0, 200, collective_estimator="benchmark"
        )
        scheduler.run()
    (info,) = scheduler.collective_info.values()
    assert info.estimated_time_ms == pytest.approx(7.0)


def test_enable_fusion_regions_changes_nothing():
    """Estimates know of fusion always."""
    texts = {run(behind(2, gathers=2), enable_fusion_regions=on).code for on in (True, False)}
    assert len(texts) == 1


@pytest.mark.skipif(not _compat.has_drop_in_signatures(), reason="this torch reads no profiles")
def test_pge_profile_path(tmp_path):
    """A trace of one gather of 64 floats by two ranks, 9 ms."""
    shape = {"Group size": 2, "In msg nelems": 32, "Out msg nelems": 64, "dtype": "Float"}
    named = {"Collective name": "_allgather_base", "Process Group Ranks": "[0, 1]", **shape}
    event = {"cat": "kernel", "name": "ncclDevKernel", "dur": 9000.0, "args": named}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    path = str(tmp_path / "trace.json")
    for custom, ms in ((None, 9.0), (TIMES, 4.0)):  # one's own estimation comes first
        scheduler = OverlapScheduler(
            behind(1).done(), 5.0, 200, False, False, 1.0, 200, custom, pge_profile_path=path
        )
        scheduler.run()
        (info,) = scheduler.collective_info.values()
        assert info.estimated_time_ms == pytest.approx(ms)


def test_pge_profile_path_must_exist(tmp_path):
    with pytest.raises((OSError, FlagError)):  # FlagError: this torch reads no profiles
        OverlapScheduler(
            behind(1).done(), 5.0, 200, False, False, 1.0, 200,
            pge_profile_path=str(tmp_path / "none.json"),
        )  # fmt: skip


# -- merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "waits"), [("default", 1), ("custom_ops", 1), ("coalesced", 2)])
def test_bucket_mode(mode, waits):
    gm = merged(behind(1, gathers=2), bucket_mode=mode)
    assert launches(gm) == {"gather": 1, "wait": waits}


def test_a_mode_that_mixes_dtypes_raises():
    with pytest.raises(FlagError, match=r"OverlapScheduler\(bucket_mode=...\)"):
        run(behind(1), bucket_mode="custom_ops_multidtype")


@pytest.mark.parametrize("only", [True, False])
def test_bucket_only_internode_comms(only):
    """Gradients on a group that gathers nothing."""
    s = scattered(2)
    other = dist.new_group([0, 1]).group_name
    s.end(s.start(other))
    gm = merged(s, bucket_only_internode_comms=only)
    assert launches(gm)["scatter"] == (2 if only else 1)


@pytest.mark.parametrize(
    ("first", "gathers", "exposed"), [(True, 1, 4), (False, 4, 1)], ids=["merge", "schedule"]
)
def test_prioritize_bucketing_during_scheduling(first, gathers, exposed):
    """Four layers; a bucket takes as long as each gather, by :data:`TIMES`.

    Merging first makes one exposed bucket, which is as fast and has fewer launches.  Scheduling first
    hides each gather but the first under a product that needs the one before, so none can merge.
    """
    s, x = sketch(), None
    for _ in range(4):
        x = s.mm(x, s.end(s.start()))
    gm = merged(s, prioritize_bucketing_during_scheduling=first)
    assert launches(gm)["gather"] == gathers
    assert counters["inductor"]["overlap_scheduling_exposed"] == exposed


@pytest.mark.parametrize("first", [True, False], ids=["merge", "schedule"])
def test_copies_between_devices_stay_behind_each_other(first):
    """Merges after a schedule may move compute in front of a copy that it relies on being done."""
    s = behind(1, gathers=2)
    copied = s.call(torch.ops.prims.device_put, s.x, torch.device("cpu"), True)
    s.results.append(copied)
    merged(s, prioritize_bucketing_during_scheduling=first)
    assert copied.args[2] is first


@pytest.mark.parametrize(("first", "left"), [(True, 0), (False, 2)])
def test_bucket_exposed_first(monkeypatch, first, left):
    """mm A( )A B()B C()C, one in flight at a time, so that mm hides A only; buckets hold two.

    Exposed ones first: B and C.  Else A and B.
    """
    monkeypatch.setattr(compat_api.overlap_scheduling, "_BUCKET_GB", 600 / 2**30)
    s = behind(1, gathers=3)
    starts = [n.name for n in s.graph.nodes if "all_gather" in str(n.target)]
    gm = merged(
        s,
        max_in_flight_gb=300 / 2**30,
        bucket_exposed_first=first,
        prioritize_bucketing_during_scheduling=False,
    )
    alone = [n.name for n in gm.graph.nodes if n.name in starts]
    assert alone == [starts[left]]


# -- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("logs", [True, False])
def test_log_final_collectives_estimations(caplog, logs):
    with caplog.at_level("INFO"):
        run(behind(1), log_final_collectives_estimations=logs)
    told = [r.getMessage() for r in caplog.records if " hidden, 256 bytes" in r.getMessage()]
    assert len(told) == logs


def test_insert_overlap_deps():
    assert held(run(behind(1), insert_overlap_deps=True)) == ["mm", "wait"]
    assert held(run(behind(1), insert_overlap_deps=False)) == []


def test_a_graph_that_cannot_be_handled_stays(monkeypatch, caplog):
    """Whatever goes wrong inside, with one warning."""
    monkeypatch.delenv("TORCH_PATCHES_STRICT")
    gm = behind(1).done()
    text = gm.code

    def broken(*args):
        raise ZeroDivisionError("for the test of compat_api")

    monkeypatch.setattr(compat_api.overlap_scheduling, "overlap", broken)
    assert schedule_overlap_bucketing(gm, pre_bucketing_fsdp_collectives=False) is gm
    assert gm.code == text
    assert "ZeroDivisionError: for the test of compat_api" in caplog.text


def test_a_bad_estimation_raises():
    gm = behind(1).done()
    text = gm.code
    with pytest.raises(EstimationError):
        schedule_overlap_bucketing(gm, custom_runtime_estimation=lambda node, size: -1.0)
    assert gm.code == text


# -- the page -------------------------------------------------------------------------------------


def rows_of_the_page() -> dict[str, set[str]]:
    """Heading -> arguments in the first column of the table below it."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.strip("# `")
        elif line.startswith("| `"):
            found.setdefault(heading, set()).update(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


@pytest.mark.parametrize("name", sorted(HOMES))
def test_every_argument_is_in_the_page(name):
    arguments = set(inspect.signature(getattr(compat_api, name)).parameters) - {"gm", "graph"}
    told = rows_of_the_page()
    known = set().union(*(rows for heading, rows in told.items() if name in heading))
    assert arguments <= known, arguments - known


def test_the_page_names_no_other_argument():
    known = {
        argument
        for name in HOMES
        for argument in inspect.signature(getattr(compat_api, name)).parameters
    }
    assert set().union(*rows_of_the_page().values()) <= known
