"""torch's names on graphs captured from real models: legal, and equal values on all ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch.utils._ordered_set import OrderedSet

from torch_patches import compat_api
from torch_patches.captured import load_captured
from torch_patches.testing.beside_torch import infos, launches
from torch_patches.testing.spmd_interpreter import expand_group, random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")


def by_default(gm: fx.GraphModule) -> None:
    compat_api.schedule_overlap_bucketing(gm)


def merged_later(gm: fx.GraphModule) -> None:
    compat_api.schedule_overlap_bucketing(
        gm,
        collective_bucketing=True,
        prioritize_bucketing_during_scheduling=False,
        pre_bucketing_fsdp_collectives=False,
    )


def manually(gm: fx.GraphModule) -> None:
    compat_api.manual_overlap_bucketing(gm, ["layers.*", ["tok_embeddings", "norm", "output"]])


def unscheduled(gm: fx.GraphModule) -> None:
    info = infos(gm, {})
    order = OrderedSet(gm.graph.nodes)
    compat_api.OverlapPreservingBucketer(gm.graph, info, order).bucket_collectives()
    gm.recompile()


@pytest.mark.parametrize("change", [by_default, merged_later, manually, unscheduled])
@pytest.mark.parametrize("which", ["fw", "bw"])
def test_values_are_equal_on_all_ranks(change, which):
    """A Llama of two layers under HSDP, bit by bit."""
    captured = load_captured(DATA / "llama_2l_hsdp2x4.json.gz")
    world_size = captured.info["world_size"]
    groups = {g: expand_group(ranks, world_size) for g, ranks in captured.groups.items()}
    before = captured.graphs[which]
    after = copy.deepcopy(before)
    change(after)
    after.graph.lint()
    assert sum(launches(after).values()) < sum(launches(before).values())
    if change is not merged_later:  # there each gather may hide under compute of its own
        assert launches(after)["gather"] < launches(before)["gather"]
    inputs = random_inputs(before, world_size, seed=0, high=256, scale=0.02)
    expected = pytree.tree_leaves(run_spmd(before, inputs, groups, world_size))
    actual = pytree.tree_leaves(run_spmd(after, inputs, groups, world_size))
    for one, other in zip(expected, actual, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["llama_3l_ddp8", "moe_3l_dp4_ep2", "llama_2l_fsdp4_tp2"])
def test_other_models_are_scheduled(name):
    """Among them torch's cycle on a DDP backward (PITFALLS 26); a second run does no harm."""
    graphs = load_captured(DATA / f"{name}.json.gz").graphs
    for gm in [graphs[which] for which in graphs if which != "joint"]:
        before = launches(gm)
        for _ in range(2):
            compat_api.schedule_overlap_bucketing(
                gm, collective_bucketing=True, pre_bucketing_fsdp_collectives=False
            )
            gm.graph.lint()
        assert sum(launches(gm).values()) <= sum(before.values())
