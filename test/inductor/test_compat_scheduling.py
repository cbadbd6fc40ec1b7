"""torch's scheduler under its names, beside torch's own on the same graphs.

Times are given (:data:`TIMES`), so that both decide by the same numbers.  Sketches: ``A( mm )A`` is a
gather that starts, is hidden by mm, and is waited for; ``R`` scatters.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import _compat
from torch_patches.compat_api import OverlapScheduler, schedule_overlap_bucketing
from torch_patches.testing.beside_torch import (
    WorldSketch,
    fixed_times,
    held,
    launches,
    of_torch,
    without_gpu,
    words,
)

aten = torch.ops.aten
#: ms
TIMES = fixed_times(mm=10.0, gather=4.0, scatter=6.0, reduce=6.0)
SCHEDULES = {"ours": schedule_overlap_bucketing}
if _compat.has_drop_in_signatures():
    SCHEDULES["torch"] = of_torch("schedule_overlap_bucketing")
BOTH = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())


@pytest.fixture(autouse=True)
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counters.clear()
    with without_gpu():
        yield
    dist.destroy_process_group()


def sketch() -> WorldSketch:
    return WorldSketch(dist.group.WORLD.group_name)


def run(schedule, s: WorldSketch | fx.GraphModule, estimation=TIMES, **arguments) -> fx.GraphModule:
    """Without what is not being tested; estimates, since torch would measure."""
    gm = s.done() if isinstance(s, WorldSketch) else s
    given = {"compute_estimator": "analytical", "pre_bucketing_fsdp_collectives": False}
    result = schedule(gm, custom_runtime_estimation=estimation, **{**given, **arguments})
    assert result is gm
    gm.graph.lint()
    return gm


def counted(*names: str) -> tuple[int, ...]:
    return tuple(counters["inductor"][f"overlap_scheduling_{name}"] for name in names)


# -- graphs ---------------------------------------------------------------------------------------


def gather_behind_compute() -> WorldSketch:
    """mm  A()A  mm(A)."""
    s = sketch()
    s.mm()
    s.mm(s.end(s.start()))
    return s


def layers(count: int) -> WorldSketch:
    """A()A mm(A), one layer after the other."""
    s, x = sketch(), None
    for _ in range(count):
        x = s.mm(x, s.end(s.start()))
    return s


def gradients(count: int) -> WorldSketch:
    """mm R()R, each product made of the last one."""
    s, x = sketch(), None
    for _ in range(count):
        x = s.mm(x)
        s.end(s.scatter(x))
    return s


def independent(count: int) -> WorldSketch:
    """mm  A()A  mm(A), several times."""
    s = sketch()
    for _ in range(count):
        s.mm()
        s.mm(s.end(s.start()))
    return s


# -- overlap and its counters ---------------------------------------------------------------------


@BOTH
def test_a_gather_is_started_in_front_of_the_compute(schedule):
    assert words(run(schedule, gather_behind_compute())) == "gather mm wait mm"
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (0, 0, 1)


@BOTH
def test_what_nothing_can_hide_is_exposed_and_not_badly(schedule):
    """A()A mm(A)."""
    assert words(run(schedule, layers(1))) == "gather wait mm"
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (1, 0, 0)


@BOTH
def test_the_first_of_several_layers_is_exposed(schedule):
    run(schedule, layers(4))
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (1, 0, 3)


@BOTH
def test_the_last_gradient_is_exposed(schedule):
    gm = run(schedule, gradients(3))
    assert words(gm).startswith("mm scatter mm scatter")
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (1, 0, 2)


@BOTH
def test_what_compute_could_have_hidden_is_badly_exposed(schedule):
    """A()A mm(A) R( mm )R: the mm is used up for R, and A could not wait for it."""
    s = sketch()
    scattered = s.scatter(s.mm(s.end(s.start())))
    s.end(scattered)
    s.mm()
    run(schedule, s)
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (1, 1, 2)


@BOTH
def test_two_groups_share_compute(schedule):
    s = sketch()
    other = dist.new_group([0, 1]).group_name
    s.mm()
    s.mm(s.end(s.start()), s.end(s.start(other)))
    assert words(run(schedule, s)) == "gather gather mm wait wait mm"
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (0, 0, 2)


@BOTH
def test_a_reduction_of_what_is_computed_is_waited_for_late(schedule):
    """mm  AR()AR  mm  mm(AR)."""
    s = sketch()
    reduced = s.wait(s.all_reduce(s.mm(), "sum", s.world))
    s.mm()
    s.mm(reduced)
    assert words(run(schedule, s)) == "mm reduce mm wait mm"
    assert counted("exposed", "bad_exposed") == (0, 0)


@BOTH
def test_counters_add_up_over_graphs(schedule):
    for _ in range(2):
        run(schedule, layers(3))
    assert counted("exposed", "potentially_hidden") == (2, 4)


def test_peaks_are_counted():
    """One gather under a product: 256 bytes are there earlier than in the input."""
    run(schedule_overlap_bucketing, gather_behind_compute())
    counts = counters["inductor"]
    assert 0 < counts["overlap_original_mem"] <= counts["rescheduled_mem"]


@BOTH
def test_a_graph_without_collectives(schedule):
    s = sketch()
    s.mm()
    assert words(run(schedule, s)) == "mm"
    assert counted("exposed", "potentially_hidden") == (0, 0)


# -- which gather wins ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("groups", ["one group", "two groups"])
@pytest.mark.parametrize("long_first", [True, False], ids=["long, short", "short, long"])
def test_the_gather_that_hides_more_is_started_first(schedule, groups, long_first):
    """mm  A()A  B()B  mm(A, B) with room for one in flight: 4 ms are hidden rather than 1.

    400 bytes: one gather of 256, with the payload of 128 that torch counts too.
    """
    s = sketch()
    group = s.world if groups == "one group" else dist.new_group([0, 1]).group_name
    s.mm()
    starts = [s.start(), s.start(group)]
    left, right = map(s.end, starts)
    s.mm(left, right)
    long = starts[0 if long_first else 1].name
    others = fixed_times(mm=5.0, gather=1.0)

    def estimate(node, size_bytes):
        return 4.0 if node.name == long else others(node, size_bytes)

    gm = run(schedule, s, estimate, max_in_flight_gb=400 / 2**30)
    first = next(n for n in gm.graph.nodes if "all_gather" in str(n.target))
    assert first.name == long
    assert words(gm).startswith("gather mm ")


# -- merging --------------------------------------------------------------------------------------


@BOTH
def test_hidden_gathers_become_one_bucket(schedule):
    gm = run(schedule, independent(3), collective_bucketing=True, bucket_mode="default")
    assert launches(gm) == {"gather": 1, "wait": 1}
    assert words(gm).startswith("gather mm wait")
    assert counters["inductor"]["collective_buckets"] == 1
    assert counted("exposed", "bad_exposed", "potentially_hidden") == (0, 0, 3)


@BOTH
def test_nothing_is_merged_unless_asked_for(schedule):
    assert launches(run(schedule, independent(3)))["gather"] == 3
    assert counters["inductor"]["collective_buckets"] == 0


def test_members_of_an_exposed_bucket_count_each():
    """Two gathers in front of the product of both, merged: nothing is hidden of either."""
    s = sketch()
    s.mm(s.end(s.start()), s.end(s.start()))
    gm = run(schedule_overlap_bucketing, s, collective_bucketing=True)
    assert launches(gm)["gather"] == 1
    assert counted("exposed", "bad_exposed") == (2, 0)


@BOTH
@pytest.mark.parametrize("bucketing", [True, False])
def test_fsdp_traffic_is_merged_first(schedule, bucketing):
    """By default, and whether or not the schedule merges more; that is no bucket of its."""
    gm = run(
        schedule,
        independent(3),
        collective_bucketing=bucketing,
        pre_bucketing_fsdp_collectives=True,
        pre_bucketing_fsdp_collectives_bucket_cap_mb=2000.0,
    )
    assert launches(gm)["gather"] == 1
    assert counters["inductor"]["collective_buckets"] == 0
    assert counted("exposed", "potentially_hidden") == (0, 1)


# -- order in Inductor ----------------------------------------------------------------------------


@BOTH
def test_overlap_is_held_by_dependencies(schedule):
    """On the compute that hides, and on the wait."""
    gm = run(schedule, gather_behind_compute(), insert_overlap_deps=True)
    assert words(gm) == "gather mm wait mm"
    assert held(gm)[:2] == ["mm", "wait"]


def test_nothing_else_is_held():
    """torch holds the last product too, which waits for the gather anyway."""
    gm = run(schedule_overlap_bucketing, gather_behind_compute(), insert_overlap_deps=True)
    assert held(gm) == ["mm", "wait"]


def test_a_merged_gather_is_held_too():
    for first in (True, False):
        gm = run(
            schedule_overlap_bucketing,
            independent(2),
            collective_bucketing=True,
            insert_overlap_deps=True,
            prioritize_bucketing_during_scheduling=first,
            bucket_mode="default",
        )
        assert launches(gm) == {"gather": 1, "wait": 1}
        assert held(gm)[0] == "mm" and "wait" in held(gm)


# -- the class ------------------------------------------------------------------------------------


def test_the_scheduler_itself():
    gm = independent(2).done()
    scheduler = OverlapScheduler(gm, 5.0, 200, False, False, 1.0, 200, TIMES)
    assert scheduler.run() is gm
    infos = scheduler.collective_info
    # The first product is issued 5 us behind the gather (HostCosts.kernel_us).
    exposed = [info.exposed_time_ms for info in infos.values()]
    assert exposed == pytest.approx([0.005, 0.0])
    assert [info.estimated_time_ms for info in infos.values()] == pytest.approx([4.0, 4.0])
    assert all(len(info.hiding_nodes) == 1 for info in infos.values())
    assert all(start is info.start_node for start, info in infos.items())


def test_the_module_is_recompiled():
    gm = run(schedule_overlap_bucketing, gather_behind_compute())
    lines = [line for line in gm.code.splitlines() if "all_gather" in line or ".mm." in line]
    assert "all_gather" in lines[0]
