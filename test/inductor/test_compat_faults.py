"""torch's names with wrong arguments, with faults half way, and called twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.bucketing import is_all_gather_into_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._ordered_set import OrderedSet

from torch_patches import compat_api
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import EstimationError
from torch_patches.compat_api import (
    OverlapPreservingBucketer,
    OverlapScheduler,
    greedy_bucket_collective_by_mb,
    identify_fsdp_groups,
    manual_overlap_bucketing,
    pre_bucket_fsdp_collectives,
    schedule_overlap_bucketing,
)
from torch_patches.config import FlagError
from torch_patches.testing.beside_torch import WorldSketch, fixed_times, launches, words

LATER = {"prioritize_bucketing_during_scheduling": False}


@pytest.fixture(autouse=True)
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counters.clear()
    yield
    dist.destroy_process_group()


class Times:
    """By kind, in ms; the ``uuid`` tells it from other estimations."""

    estimate = staticmethod(fixed_times(mm=10.0, gather=4.0, scatter=6.0))

    def __call__(self, node: fx.Node, size_bytes: int | None) -> float | None:
        return self.estimate(node, size_bytes)

    def uuid(self) -> str:
        return "mm 10, gather 4, scatter 6"


def module() -> fx.GraphModule:
    """mm  A()A  mm(A)  B()B  mm(B)  R()R  R()R."""
    s = WorldSketch(dist.group.WORLD.group_name)
    s.mm()
    for _ in range(2):
        s.mm(s.end(s.start()))
    for _ in range(2):
        s.end(s.scatter(s.mm()))
    return s.done()


def text(gm: fx.GraphModule) -> str:
    """Nodes in order, with what they read."""
    return str(gm.graph)


# -- wrong arguments --------------------------------------------------------------------------------

WRONG = [-1, "3", [1], float("nan"), float("inf"), True]


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "compute_overlap_multipler",
        "max_coll_distance",
        "max_off_bucket_gb",
        "custom_runtime_estimation",
        "bucket_mode",
        "pre_bucketing_fsdp_collectives_bucket_cap_mb",
    ],
)
def test_arguments_of_the_schedule(name, value):
    gm = module()
    before = text(gm)
    with pytest.raises(
        FlagError, match=r"(OverlapScheduler|pre_bucket\w+)\(\w+=...\): .* not allowed"
    ):
        schedule_overlap_bucketing(gm, **{name: value})
    assert text(gm) == before


@pytest.mark.parametrize("value", [*WRONG, None, 2.5], ids=str)
def test_a_distance_is_a_whole_number(value):
    with pytest.raises(FlagError, match="max_coll_distance"):
        schedule_overlap_bucketing(module(), max_coll_distance=value)


@pytest.mark.parametrize("value", [*WRONG, None], ids=str)
@pytest.mark.parametrize("name", ["max_bucket_memory_gb", "max_coll_distance"])
def test_arguments_of_the_bucketer(name, value):
    gm = module()
    with pytest.raises(FlagError, match=rf"OverlapPreservingBucketer\({name}=...\)"):
        OverlapPreservingBucketer(gm.graph, {}, OrderedSet(gm.graph.nodes), **{name: value})


def test_a_profile_is_a_path():
    with pytest.raises(FlagError, match=r"pge_profile_path=...\): 2.5"):
        schedule_overlap_bucketing(module(), pge_profile_path=2.5)


@pytest.mark.parametrize("cap", [[1.0], lambda index: 1.0])
def test_a_cap_in_front_of_the_schedule_is_one_number(cap):
    """A list was read as no cap at all."""
    with pytest.raises(FlagError, match=r"pre_bucket_fsdp_collectives\(bucket_cap_mb=...\)"):
        pre_bucket_fsdp_collectives(module(), bucket_cap_mb=cap)


@pytest.mark.parametrize("cap", [*WRONG, None], ids=str)
def test_caps_that_a_function_tells(cap):
    with pytest.raises(FlagError, match="bucket_cap_mb_by_bucket_idx"):
        greedy_bucket_collective_by_mb(
            module(), lambda index: cap, is_all_gather_into_tensor, lambda node: 0
        )


@pytest.mark.parametrize("caps", [25.0, None, [25.0]])
def test_caps_are_a_function(caps):
    with pytest.raises(TypeError, match="takes a function"):
        greedy_bucket_collective_by_mb(module(), caps, is_all_gather_into_tensor, lambda node: 0)


@pytest.mark.parametrize(
    "function",
    [
        schedule_overlap_bucketing,
        pre_bucket_fsdp_collectives,
        identify_fsdp_groups,
        lambda gm: manual_overlap_bucketing(gm, ["layers.*"]),
        lambda gm: greedy_bucket_collective_by_mb(gm, None, None, None),
    ],
)
def test_a_graph_is_no_module(function):
    """What Inductor hands to a custom pass."""
    with pytest.raises(TypeError, match=r"takes an fx.GraphModule, not Graph; .*owning_module"):
        function(module().graph)


# -- faults half way --------------------------------------------------------------------------------


def broken(*args):
    raise ZeroDivisionError("for this test")


@pytest.mark.parametrize("bad", [-1.0, "x", float("nan")])
def test_a_bad_estimation_takes_back_what_was_merged_before(bad):
    """Gathers are merged in front of the schedule, which asks for times."""
    gm = module()
    before = text(gm)
    with pytest.raises(EstimationError):
        schedule_overlap_bucketing(gm, custom_runtime_estimation=lambda node, size: bad)
    assert text(gm) == before
    schedule_overlap_bucketing(gm)
    assert launches(gm)["gather"] == 1  # they are merged, if nothing fails


@pytest.mark.parametrize("where", ["overlap", "forecast", "insert_overlap_dependencies"])
def test_a_fault_takes_back_all(monkeypatch, where):
    """And counts nothing."""
    monkeypatch.delenv("TORCH_PATCHES_STRICT")
    monkeypatch.setattr(compat_api.overlap_scheduling, where, broken)
    gm = module()
    before = text(gm)
    schedule_overlap_bucketing(gm, collective_bucketing=True, insert_overlap_deps=True)
    assert text(gm) == before
    assert not counters["inductor"]


def test_a_fault_in_the_merges_behind_a_schedule_takes_back_all(monkeypatch):
    monkeypatch.delenv("TORCH_PATCHES_STRICT")
    monkeypatch.setattr(compat_api.overlap_preserving_bucketer, "check_plan", broken)
    gm = module()
    before = text(gm)
    schedule_overlap_bucketing(gm, collective_bucketing=True, **LATER)
    assert text(gm) == before
    assert not counters["inductor"]


# -- the result -------------------------------------------------------------------------------------

WAYS = [
    {"insert_overlap_deps": True},
    {"collective_bucketing": True},
    {"collective_bucketing": True, **LATER},
    {"collective_bucketing": True, "insert_overlap_deps": True, **LATER},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "+".join(way))
def test_infos_are_of_the_result(way):
    """Merges and dependencies replace starts, waits and compute."""
    gm = module()
    given = SimpleNamespace(**{"collective_bucketing": False, "insert_overlap_deps": False, **way})
    later = {name: way[name] for name in LATER if name in way}
    scheduler = OverlapScheduler(
        gm,
        5.0,
        200,
        given.collective_bucketing,
        given.insert_overlap_deps,
        1.0,
        200,
        Times(),
        **later,
    )
    scheduler.run()
    nodes = set(gm.graph.nodes)
    assert len(scheduler.collective_info) == sum(launches(gm).values()) - launches(gm)["wait"]
    for start, info in scheduler.collective_info.items():
        assert {start, info.start_node, info.wait_node, *info.hiding_nodes} <= nodes
    assert any(info.hiding_nodes for info in scheduler.collective_info.values())


@pytest.mark.parametrize("way", [{}, *WAYS], ids=lambda way: "+".join(way) or "default")
def test_a_second_run_changes_nothing_and_counts_again(way):
    gm, arguments = module(), {"custom_runtime_estimation": Times(), **way}
    schedule_overlap_bucketing(gm, **arguments)
    once, exposed = text(gm), counters["inductor"]["overlap_scheduling_exposed"]
    counters.clear()
    schedule_overlap_bucketing(gm, **arguments)
    assert text(gm) == once
    assert counters["inductor"]["collective_buckets"] == 0
    assert 0 < counters["inductor"]["overlap_scheduling_exposed"] <= exposed


def test_a_run_with_other_arguments_is_no_second_run():
    gm = module()
    unmerged = {"custom_runtime_estimation": Times(), "pre_bucketing_fsdp_collectives": False}
    schedule_overlap_bucketing(gm, **unmerged)
    assert launches(gm)["gather"] == 2
    schedule_overlap_bucketing(gm, collective_bucketing=True, **unmerged)
    assert launches(gm)["gather"] == 1


def test_keys_that_cannot_be_hashed():
    """torch compares them only."""
    buckets = greedy_bucket_collective_by_mb(
        module(),
        lambda index: 25.0,
        lambda node: "c10d" in str(node.target),
        lambda node: [str(node.target)],
    )
    assert [len(bucket) for bucket in buckets] == [2, 2]


def test_merges_in_front_tell_runs_apart_too():
    given = {"custom_runtime_estimation": Times()}
    gm = module()
    schedule_overlap_bucketing(gm, pre_bucketing_fsdp_collectives=False, **given)
    schedule_overlap_bucketing(gm, **given)
    assert launches(gm)["gather"] == 1


def test_what_is_no_flag_tells_runs_apart_too():
    """4 ms are hidden by one product of 10, by two of 3."""
    s = WorldSketch(dist.group.WORLD.group_name)
    s.mm(), s.mm(), s.mm(s.end(s.start()))
    gm, given = s.done(), {"custom_runtime_estimation": Times()}
    schedule_overlap_bucketing(gm, **given)
    assert words(gm) == "mm gather mm wait mm"
    schedule_overlap_bucketing(gm, compute_overlap_multipler=0.3, **given)
    assert words(gm) == "gather mm mm wait mm"


def test_buckets_are_in_graph_order():
    """g h g h g g with room for two: of g, of h, of g again."""
    s = WorldSketch(dist.group.WORLD.group_name)
    other = dist.new_group([0, 1]).group_name
    for group in ("", other, "", other, "", ""):
        s.end(s.start(group))
    gm = s.done()
    starts = [node for node in gm.graph.nodes if is_all_gather_into_tensor(node)]
    buckets = greedy_bucket_collective_by_mb(
        gm, lambda index: 600 / 2**20, is_all_gather_into_tensor, lambda node: node.args[-1]
    )
    places = [[starts.index(node) for node in bucket] for bucket in buckets]
    assert places == [[0, 2], [1, 3], [4, 5]]
