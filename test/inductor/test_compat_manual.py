"""Plans of modules under torch's names, beside torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import compat_api
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlanError
from torch_patches.compat_api import ManualOverlapScheduler, manual_overlap_bucketing
from torch_patches.config import FlagError
from torch_patches.testing.beside_torch import held, launches, of_torch, without_gpu, words
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
BOTH = pytest.mark.parametrize(
    "manual",
    [of_torch("manual_overlap_bucketing"), manual_overlap_bucketing],
    ids=["torch", "ours"],
)


@pytest.fixture(autouse=True)
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counters.clear()
    with without_gpu():
        yield
    dist.destroy_process_group()


def two_modules(named: bool = True, backward: bool = False, size: int = 8) -> fx.GraphModule:
    """``first`` and ``second``: each gathers two weights and multiplies by both; then, where
    ``backward``, scatters two gradients."""
    b, group = GraphBuilder(), dist.group.WORLD.group_name
    x = b.placeholder(size, size)
    results = []
    for name in ("first", "second"):
        before = set(b.graph.nodes)
        for _ in range(2):
            weight = b.gather_and_wait(b.placeholder(size // 2, size), 2, group)
            x = b.call(aten.mm, x, weight)
        if backward:
            results += [b.scatter_and_wait(x, "sum", 2, group) for _ in range(2)]
        for node in b.graph.nodes:
            if node not in before and node.op == "call_function":
                node.meta["path"] = name
                if named:
                    stack = {"0": ("L['self']", nn.Module), "1": (f"L['self'].{name}", nn.Linear)}
                    node.meta["nn_module_stack"] = stack
    return b.output(x, *results)


def paths(node: fx.Node) -> list[tuple[str, type]]:
    """For graphs without stacks."""
    return [("", nn.Module), (node.meta["path"], nn.Linear)] if "path" in node.meta else []


@BOTH
def test_one_bucket_for_each_module(manual):
    gm = two_modules()
    assert manual(gm, ["first", "second"]) is gm
    assert launches(gm) == {"gather": 2, "wait": 2}


@BOTH
def test_an_empty_plan_leaves_four(manual):
    gm = two_modules()
    assert launches(manual(gm, []))["gather"] == 4


@BOTH
def test_one_bucket_for_several_modules(manual):
    assert launches(manual(two_modules(), [["first", "second"]]))["gather"] == 1


@BOTH
def test_what_no_entry_covers_stays(manual):
    assert launches(manual(two_modules(), ["second"]))["gather"] == 3


@BOTH
def test_gradients_are_bucketed_too(manual):
    gm = manual(two_modules(backward=True), ["first", "second"])
    assert launches(gm) == {"gather": 2, "scatter": 2, "wait": 4}


@BOTH
def test_the_next_gather_runs_under_this_modules_compute(manual):
    """In front of the first module's wait, or behind it."""
    order = words(manual(two_modules(), ["first", "second"]))
    assert order in (
        "gather gather wait mm mm wait mm mm",
        "gather wait gather mm mm wait mm mm",
    )


@BOTH
def test_a_function_that_knows_the_modules(manual):
    gm = two_modules(named=False)
    assert launches(manual(gm, ["first", "second"], module_stack_fn=paths))["gather"] == 2


def test_patterns():
    """torch has none."""
    assert launches(manual_overlap_bucketing(two_modules(), ["*"]))["gather"] == 2


@BOTH
def test_the_scheduler_is_the_same(manual):
    """And returns its module."""
    home = compat_api if manual is manual_overlap_bucketing else None
    scheduler = home.ManualOverlapScheduler if home else of_torch("ManualOverlapScheduler")
    gm = two_modules()
    assert scheduler(gm, ["first", "second"], False).run() is gm
    assert launches(gm)["gather"] == 2


def test_overlap_is_held_by_dependencies():
    """Products of 8192 x 8192 take longer than a gather is launched.

    The second module's gather goes in front of the first's wait, which the products need anyway, and
    its two waits behind the product that hides it.
    """
    gm = two_modules(size=8192)
    manual_overlap_bucketing(gm, ["first", "second"], insert_overlap_deps=True)
    assert words(gm) == "gather gather wait wait mm mm wait wait mm mm"
    assert held(gm) == ["wait", "wait", "wait"]


def test_buckets_are_counted():
    manual_overlap_bucketing(two_modules(), ["first", "second"])
    assert counters["inductor"]["collective_buckets"] == 2


def test_mode():
    gm = manual_overlap_bucketing(two_modules(), ["first", "second"], bucket_mode="coalesced")
    assert launches(gm) == {"gather": 2, "wait": 4}
    with pytest.raises(FlagError, match="'custom_ops_multidtype' is not allowed"):
        ManualOverlapScheduler(two_modules(), ["first"], False, None, "custom_ops_multidtype")


def test_an_entry_without_match_warns(caplog):
    """torch says nothing."""
    gm = manual_overlap_bucketing(two_modules(), ["first", "secnod"])
    assert launches(gm)["gather"] == 3
    assert "secnod" in caplog.text and "second" in caplog.text


@pytest.mark.parametrize("plan", [["first", ["first", "second"]], ["first", "*"]])
def test_entries_that_overlap_raise(plan):
    """The second one only where the graph is known."""
    with pytest.raises((FlagError, ModulePlanError), match="first"):
        manual_overlap_bucketing(two_modules(), plan)


def test_a_plan_of_a_wrong_type_raises():
    with pytest.raises(FlagError, match=r"module_bucket_plans=..."):
        manual_overlap_bucketing(two_modules(), [1])


def test_a_second_run_changes_nothing():
    gm = two_modules(size=8192)
    manual_overlap_bucketing(gm, ["first", "second"], insert_overlap_deps=True)
    once, count = str(gm.graph), counters["inductor"]["collective_buckets"]
    manual_overlap_bucketing(gm, ["first", "second"], insert_overlap_deps=True)
    assert str(gm.graph) == once
    assert counters["inductor"]["collective_buckets"] == count
