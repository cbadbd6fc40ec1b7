"""``OverlapPreservingBucketer``, beside torch's on the same graphs.

Sketches: ``A( mm )A`` is a gather that starts, is hidden by mm, and is waited for; ``R`` scatters.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat
from torch_patches.compat_api import OverlapPreservingBucketer
from torch_patches.config import PREFIX, FlagError
from torch_patches.testing.beside_torch import (
    WorldSketch,
    held,
    infos,
    launches,
    of_torch,
    words,
)

BUCKETERS = {"ours": OverlapPreservingBucketer}
if _compat.has_drop_in_signatures():  # older ones differ in defaults
    BUCKETERS["torch"] = of_torch("OverlapPreservingBucketer")
BOTH = pytest.mark.parametrize("bucketer", BUCKETERS.values(), ids=BUCKETERS.keys())


@pytest.fixture(autouse=True)
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counters.clear()
    yield
    dist.destroy_process_group()


def sketch() -> WorldSketch:
    return WorldSketch(dist.group.WORLD.group_name)


def bucketed(bucketer, s: WorldSketch, scheduled=None, **arguments) -> fx.GraphModule:
    gm = s.done()
    order = OrderedSet(scheduled or gm.graph.nodes)
    bucketer(gm.graph, infos(gm, s.hiding), order, **arguments).bucket_collectives()
    gm.graph.lint()
    gm.recompile()
    return gm


def buckets_made() -> int:
    return counters["inductor"]["collective_buckets"]


# -- what may share a bucket ----------------------------------------------------------------------


@BOTH
def test_a_hidden_and_an_exposed_gather_end_as_one_start_and_one_wait(bucketer):
    """A( mm )A  B()B."""
    s = sketch()
    s.end(s.start(), s.mm())
    s.end(s.start())
    gm = bucketed(bucketer, s)
    assert launches(gm) == {"gather": 1, "wait": 1}
    assert words(gm) == "gather mm wait"
    assert buckets_made() == 1


@BOTH
@pytest.mark.parametrize("hidden", [True, False], ids=["hidden", "unhidden"])
def test_a_scatter_between_two_gathers(bucketer, hidden):
    """A( mm )A  R( [mm] )R  B( mm )B: a hidden one keeps them apart."""
    s = sketch()
    s.end(s.start(), s.mm())
    scatter = s.scatter(s.mm())
    s.end(scatter, *([s.mm()] if hidden else []))
    s.end(s.start(), s.mm())
    gm = bucketed(bucketer, s)
    assert launches(gm)["gather"] == (2 if hidden else 1)
    assert buckets_made() == (0 if hidden else 1)


@BOTH
@pytest.mark.parametrize("needs", [True, False], ids=["needed", "independent"])
def test_nested_intervals(bucketer, needs):
    """A( B( mm )B mm' )A: where mm', which hides A, needs B, the two stay."""
    s = sketch()
    outer, inner = s.start(), s.start()
    gathered = s.end(inner, s.mm())
    s.end(outer, s.mm(gathered if needs else s.x))
    gm = bucketed(bucketer, s)
    assert launches(gm)["gather"] == (2 if needs else 1)


@BOTH
def test_a_reduction_and_a_scatter_never_share_a_bucket(bucketer):
    """Equal group, op and dtype."""
    s = sketch()
    source = s.mm()
    scatter, reduction = s.scatter(source), s.all_reduce(source, "sum", s.world)
    s.end(scatter)
    s.end(reduction)
    gm = bucketed(bucketer, s)
    assert launches(gm) == {"scatter": 1, "reduce": 1, "wait": 2}
    assert buckets_made() == 0


@BOTH
@pytest.mark.parametrize(("mode", "waits"), [("coalesced", 3), ("default", 1), (None, 1)])
def test_three_scatters(bucketer, mode, waits):
    """Coalesced: one start with three waits; else one."""
    s = sketch()
    for start in [s.scatter(s.placeholder(8, 8)) for _ in range(3)]:
        s.end(start)
    gm = bucketed(bucketer, s, bucket_mode=mode)
    assert launches(gm) == {"scatter": 1, "wait": waits}


def test_gathers_are_coalesced_too():
    """torch copies them, whatever was asked for."""
    s = sketch()
    s.end(s.start())
    s.end(s.start())
    gm = bucketed(OverlapPreservingBucketer, s, bucket_mode="coalesced")
    assert launches(gm) == {"gather": 1, "wait": 2}


@BOTH
def test_reductions_merge(bucketer):
    s = sketch()
    for start in [s.all_reduce(s.placeholder(8, 8), "sum", s.world) for _ in range(3)]:
        s.end(start)
    assert launches(bucketed(bucketer, s)) == {"reduce": 1, "wait": 1}


@BOTH
def test_gathers_of_what_is_computed_merge_too(bucketer):
    """No parameter: whoever made collective_info knows what is worth it."""
    s = sketch()
    for start in [s.all_gather(node, 2, s.world) for node in (s.mm(), s.mm())]:
        s.end(start)
    assert launches(bucketed(bucketer, s))["gather"] == 1


# -- arguments ------------------------------------------------------------------------------------


def several(count: int, hide_first: int = 0) -> WorldSketch:
    """Gathers of 256 bytes, one behind the other; the first ones are hidden."""
    s = sketch()
    for place in range(count):
        start = s.start()
        s.end(start, *([s.mm()] if place < hide_first else []))
    return s


@BOTH
def test_bucket_memory(bucketer):
    """600 bytes: two of four."""
    gm = bucketed(bucketer, several(4), max_bucket_memory_gb=600 / 2**30)
    assert launches(gm)["gather"] == 2


@BOTH
@pytest.mark.parametrize(("distance", "left"), [(3, 1), (1, 2), (0, 4)])
def test_distance_in_collectives(bucketer, distance, left):
    """Of the first and the last member."""
    gm = bucketed(bucketer, several(4), max_coll_distance=distance)
    assert launches(gm)["gather"] == left


@BOTH
def test_no_bucketing_still_orders(bucketer):
    """``scheduled`` has the second mm in front of the first."""
    s = sketch()
    first, second = s.mm(), s.mm()
    s.end(s.start())
    s.end(s.start())
    gm = s.done()
    order = list(gm.graph.nodes)
    order.remove(second)
    order.insert(order.index(first), second)
    info = infos(gm, {})
    bucketer(gm.graph, info, OrderedSet(order), collective_bucketing=False).bucket_collectives()
    assert launches(gm)["gather"] == 2
    assert buckets_made() == 0
    if bucketer is OverlapPreservingBucketer:  # torch takes the graph to be in this order
        assert list(gm.graph.nodes) == order


@BOTH
def test_overlap_is_held_by_dependencies(bucketer):
    """On the compute that hides, and on the wait."""
    s = sketch()
    s.end(s.start(), s.mm())
    gm = bucketed(bucketer, s, insert_overlap_deps=True)
    assert held(gm) == ["mm", "wait"]
    assert words(gm) == "gather mm wait"


@BOTH
def test_a_buckets_overlap_is_held_by_dependencies(bucketer):
    s = sketch()
    s.end(s.start(), s.mm())
    s.end(s.start())
    gm = bucketed(bucketer, s, insert_overlap_deps=True)
    assert held(gm) == ["mm", "wait"]
    assert launches(gm) == {"gather": 1, "wait": 1}


@pytest.mark.parametrize(("first", "merged"), [(True, [1, 2]), (False, [0, 1]), (None, [0, 1])])
def test_exposed_first(first, merged):
    """H( mm )H  A()A  B()B with room for two: which two."""
    s = several(3, hide_first=1)
    starts = [start.name for start in s.graph.nodes if "all_gather" in start.name]
    gm = bucketed(
        OverlapPreservingBucketer,
        s,
        max_bucket_memory_gb=600 / 2**30,
        bucket_exposed_first=first,
    )
    left = {node.name for node in gm.graph.nodes}
    assert [place for place, name in enumerate(starts) if name not in left] == merged


@BOTH
def test_only_groups_that_gather_parameters(bucketer):
    """Two gathers of inputs on one group, two of products on another."""
    s = sketch()
    other = dist.new_group([0, 1]).group_name
    for start in [s.start(), s.start()]:
        s.end(start)
    for start in [s.all_gather(s.mm(), 2, other) for _ in range(2)]:
        s.end(start)
    both = s.placeholder(8, 8)  # a second input, so that torch sees no parameter in the products
    for node in [n for n in s.graph.nodes if "mm" in n.name]:
        node.args = (node.args[0], both)
    gm = bucketed(bucketer, s, bucket_only_internode_comms=True)
    assert launches(gm)["gather"] == 3
    groups = [n.args[-1] for n in gm.graph.nodes if "all_gather" in str(n.target)]
    assert groups.count(other) == 2


def test_collectives_without_info_stay():
    s = several(3)
    gm = s.done()
    info = infos(gm, {})
    info.popitem()
    OverlapPreservingBucketer(gm.graph, info, OrderedSet(gm.graph.nodes)).bucket_collectives()
    assert launches(gm)["gather"] == 2


@pytest.mark.parametrize("mode", ["custom_ops_multidtype", "flat"])
def test_modes_that_we_do_not_have(mode):
    with pytest.raises(FlagError, match=rf"bucket_mode=...\): '{mode}' is not allowed"):
        bucketed(OverlapPreservingBucketer, several(2), bucket_mode=mode)


@pytest.mark.skipif(
    not _compat.has_config(PREFIX + "bucket_mode"), reason="no such flag of torch's"
)
def test_the_flag_is_the_default_mode():
    with torch._inductor.config.patch({PREFIX + "bucket_mode": "coalesced"}):
        gm = bucketed(OverlapPreservingBucketer, several(2))
    assert launches(gm) == {"gather": 1, "wait": 2}


def test_nodes_of_another_graph():
    gm = several(2).done()
    with pytest.raises(ValueError, match="is not a node of the graph"):
        OverlapPreservingBucketer(gm.graph, {}, OrderedSet(several(2).done().graph.nodes))


@BOTH
def test_the_first_bucket_of_reductions_is_like_the_others(bucketer):
    """Not as with DDP, whose first bucket holds 1 MB: these have 2 MB each."""
    s = sketch()
    for start in [s.all_reduce(s.placeholder(2048, 256), "sum", s.world) for _ in range(2)]:
        s.end(start)
    assert launches(bucketed(bucketer, s)) == {"reduce": 1, "wait": 1}


@pytest.mark.parametrize("known", [True, False])
def test_scatters_on_gloo_are_copied(known):
    """Coalesced ones give wrong numbers there.  A group that nobody knows may be gloo's."""
    group = "unknown"
    if known:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD.group_name
    s = sketch()
    for start in [s.scatter(s.placeholder(8, 8), group) for _ in range(2)]:
        s.end(start)
    gm = bucketed(OverlapPreservingBucketer, s, bucket_mode="coalesced")
    assert launches(gm) == {"scatter": 1, "wait": 1}
