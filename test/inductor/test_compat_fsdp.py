"""Bucketing of FSDP's collectives in front of a schedule, beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTOutput,
)
from torch._inductor import config as inductor_config
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat
from torch_patches.compat_api import (
    identify_fsdp_groups,
    pre_bucket_fsdp_collectives,
    tag_collectives_for_bucketing,
)
from torch_patches.config import PREFIX, FlagError
from torch_patches.testing.beside_torch import launches, of_torch
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
_THEIRS = of_torch("identify_fsdp_groups")
IDENTIFY = [pytest.param(identify_fsdp_groups, id="ours")]
PRE_BUCKET = [pytest.param(pre_bucket_fsdp_collectives, id="ours")]
if _THEIRS is not None:  # from 2.13 on
    IDENTIFY.append(pytest.param(_THEIRS, id="torch"))
    PRE_BUCKET.append(pytest.param(of_torch("pre_bucket_fsdp_collectives"), id="torch"))


@pytest.fixture(autouse=True)
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Groups:
    """Two groups of both ranks: FSDP's, and that of tensor parallelism."""

    def __init__(self) -> None:
        self.fsdp, self.tp = (dist.new_group([0, 1]).group_name for _ in range(2))


def fsdp_and_tp(groups: Groups, cast: bool = False) -> fx.GraphModule:
    """Two weights gathered (from bf16 ones where ``cast``), and a product of both."""
    b = GraphBuilder()
    weights = []
    for _ in range(2):
        shard = b.placeholder(4, 8, dtype=torch.bfloat16 if cast else torch.float32)
        if cast:
            shard = b.call(torch.ops.prims.convert_element_type, shard, torch.float32)
        weights.append(b.gather_and_wait(shard, 2, groups.fsdp))
    product = b.call(aten.mm, weights[0], weights[1])
    return b.output(b.gather_and_wait(product, 2, groups.tp))


# -- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("identify", IDENTIFY)
def test_groups_that_gather_one_input(identify):
    groups = Groups()
    names, size = identify(fsdp_and_tp(groups))
    assert isinstance(names, OrderedSet)
    assert list(names) == [groups.fsdp] and size == 2


@pytest.mark.parametrize("identify", IDENTIFY)
def test_groups_in_the_order_of_their_first_gathers(identify):
    groups = Groups()
    b = GraphBuilder()
    order = [groups.tp, groups.fsdp, groups.tp]
    gm = b.output(*[b.gather_and_wait(b.placeholder(4, 8), 2, group) for group in order])
    assert list(identify(gm)[0]) == [groups.tp, groups.fsdp]


@pytest.mark.parametrize("identify", IDENTIFY)
def test_no_groups(identify):
    b = GraphBuilder()
    gm = b.output(b.scatter_and_wait(b.placeholder(4, 8), "sum", 2, Groups().fsdp))
    assert identify(gm) == (OrderedSet(), None)


def test_descriptors_tell_a_buffer_from_a_parameter():
    """Both are gathers of one input: torch takes both."""
    groups = Groups()
    b = GraphBuilder()
    parameter, buffer = b.placeholder(4, 8), b.placeholder(4, 8)
    parameter.meta["desc"], buffer.meta["desc"] = ParamAOTInput("w"), BufferAOTInput("b")
    gathers = [
        b.gather_and_wait(parameter, 2, groups.fsdp),
        b.gather_and_wait(buffer, 2, groups.tp),
    ]
    gm = b.output(*gathers)
    gm.graph.output_node().meta["desc"] = [PlainAOTOutput(0), PlainAOTOutput(1)]
    tag_collectives_for_bucketing(gm)
    assert list(identify_fsdp_groups(gm)[0]) == [groups.fsdp]


# -- buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [False, True], ids=["plain", "behind a cast"])
@pytest.mark.parametrize("pre_bucket", PRE_BUCKET)
def test_two_fsdp_gathers_merge_and_the_other_stays(pre_bucket, cast):
    groups = Groups()
    gm = fsdp_and_tp(groups, cast)
    assert pre_bucket(gm, bucket_cap_mb=2000.0) is None
    assert launches(gm)["gather"] == 2
    assert launches(gm)["wait"] == 2
    left = [n for n in gm.graph.nodes if "all_gather" in str(n.target) and groups.tp in n.args]
    assert len(left) == 1


@pytest.mark.parametrize("pre_bucket", PRE_BUCKET)
def test_the_cap(pre_bucket):
    """Gathered weights have 256 bytes each; 300 hold one."""
    gm = fsdp_and_tp(Groups())
    pre_bucket(gm, bucket_cap_mb=300 / 2**20)
    assert launches(gm)["gather"] == 3


def gradients(groups: Groups, with_gather: bool = True) -> fx.GraphModule:
    """Two gradients scattered, and their parts reduced over replicas, on FSDP's group."""
    b = GraphBuilder()
    results = []
    if with_gather:
        results.append(b.gather_and_wait(b.placeholder(4, 8), 2, groups.fsdp))
    source = b.placeholder(8, 8)
    for _ in range(2):
        results.append(b.scatter_and_wait(source, "sum", 2, groups.fsdp))
    for _ in range(2):
        results.append(b.reduce_and_wait(source, "sum", groups.fsdp))
    return b.output(*results)


@pytest.mark.parametrize("pre_bucket", PRE_BUCKET)
def test_reductions_on_these_groups_merge_too(pre_bucket):
    gm = gradients(Groups())
    pre_bucket(gm, bucket_cap_mb=2000.0)
    assert launches(gm) == {"gather": 1, "scatter": 1, "reduce": 1, "wait": 3}


@pytest.mark.parametrize("pre_bucket", PRE_BUCKET)
def test_without_such_groups_nothing_merges(pre_bucket):
    gm = gradients(Groups(), with_gather=False)
    pre_bucket(gm, bucket_cap_mb=2000.0)
    assert launches(gm) == {"scatter": 2, "reduce": 2, "wait": 4}


@pytest.mark.parametrize("pre_bucket", PRE_BUCKET)
def test_reductions_on_other_groups_stay(pre_bucket):
    groups = Groups()
    b = GraphBuilder()
    results = [b.gather_and_wait(b.placeholder(4, 8), 2, groups.fsdp)]
    results += [b.reduce_and_wait(b.placeholder(4, 8), "sum", groups.tp) for _ in range(2)]
    gm = b.output(*results)
    pre_bucket(gm, bucket_cap_mb=2000.0)
    assert launches(gm)["reduce"] == 2


@pytest.mark.parametrize("pre_bucket", PRE_BUCKET)
def test_the_first_bucket_of_reductions_is_like_the_others(pre_bucket):
    """Not as with DDP, whose first bucket holds 1 MB: these have 2 MB each."""
    groups = Groups()
    b = GraphBuilder()
    results = [b.gather_and_wait(b.placeholder(4, 8), 2, groups.fsdp)]
    results += [b.reduce_and_wait(b.placeholder(2048, 256), "sum", groups.fsdp) for _ in range(2)]
    gm = b.output(*results)
    pre_bucket(gm, bucket_cap_mb=2000.0)
    assert launches(gm)["reduce"] == 1


def test_mode():
    gm = fsdp_and_tp(Groups())
    pre_bucket_fsdp_collectives(gm, mode="coalesced", bucket_cap_mb=2000.0)
    assert launches(gm) == {"gather": 2, "wait": 3}
    with pytest.raises(FlagError, match="'custom_ops_multidtype' is not allowed"):
        pre_bucket_fsdp_collectives(fsdp_and_tp(Groups()), mode="custom_ops_multidtype")


@pytest.mark.parametrize("cap", [0, -1.0, "25"])
def test_a_wrong_cap_raises(cap):
    with pytest.raises(FlagError, match=r"pre_bucket_fsdp_collectives\(bucket_cap_mb=...\)"):
        pre_bucket_fsdp_collectives(fsdp_and_tp(Groups()), bucket_cap_mb=cap)


def large(groups: Groups) -> fx.GraphModule:
    """Six gathers of 5 MB."""
    b = GraphBuilder()
    return b.output(
        *[b.gather_and_wait(b.placeholder(2560, 256), 2, groups.fsdp) for _ in range(6)]
    )


NEEDS_FLAGS = pytest.mark.skipif(
    not _compat.has_config(PREFIX + "pre_bucketing_fsdp_collectives_min_bucket_cap_mb"),
    reason="no such flags of torch's",
)


@NEEDS_FLAGS
@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({}, 1),
        ({"max_bucket_cap_mb": 12.0}, 3),
        ({"saturation_calibration_multiplier": 0.1}, 3),
        ({"saturation_calibration_multiplier": 0.1, "min_bucket_cap_mb": 17.0}, 2),
    ],
)
def test_default_cap(flags, left):
    """A ring of two saturates at 57 MB (``saturation_bytes``); torch's flags scale and bound it.

    By 0.1 that would be 5.7 MB, but 10 MB are the least by default.
    """
    gm = large(Groups())
    prefix = PREFIX + "pre_bucketing_fsdp_collectives_"
    with inductor_config.patch({prefix + name: value for name, value in flags.items()}):
        pre_bucket_fsdp_collectives(gm)
    assert launches(gm)["gather"] == left


def test_the_module_runs_as_before():
    """Recompiled: the code is that of the graph."""
    gm = fsdp_and_tp(Groups())
    pre_bucket_fsdp_collectives(gm, bucket_cap_mb=2000.0)
    assert gm.code.count("all_gather_into_tensor.default(") == 2
