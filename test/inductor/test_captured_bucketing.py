"""Bucketing on graphs captured from real models: counts, values on all ranks, displacement."""

import copy
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches.captured import load_captured
from torch_patches.testing.spmd_interpreter import expand_group, random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
DATA = Path(__file__).parents[1] / "data"
CAPTURES = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))


def graphs_of(name, kinds=("fw", "bw")):
    captured = load_captured(DATA / f"{name}.json.gz")
    return captured, {k: captured.graphs[k] for k in captured.graphs if k in kinds}


def test_there_are_captures():
    assert len(CAPTURES) >= 10


@pytest.mark.parametrize("form", ["default", "coalesced"])
@pytest.mark.parametrize("name", CAPTURES)
def test_bucketed_graph_is_legal_and_little_is_displaced(name, form):
    _, graphs = graphs_of(name)
    for gm in graphs.values():
        report = optimize_graph(gm, Options("topo_span", bucket_mode=form))
        gm.graph.lint()
        assert report.failure is None
        assert report.displaced_share <= 0.10
        again = optimize_graph(gm, Options("topo_span", bucket_mode=form))
        assert again.buckets == ()


@pytest.mark.parametrize("form", ["default", "coalesced"])
@pytest.mark.parametrize(
    "name", ["llama_3l_fsdp8", "llama_2l_hsdp2x4", "llama_3l_ddp8", "llama_2l_s0s0_4x2"]
)
def test_values_are_bitwise_equal_on_all_ranks(name, form):
    captured, graphs = graphs_of(name)
    world_size = captured.info["world_size"]
    groups = {g: expand_group(ranks, world_size) for g, ranks in captured.groups.items()}
    for gm in graphs.values():
        if not collect(gm.graph).collectives:
            continue
        after = copy.deepcopy(gm)
        report = optimize_graph(after, Options("topo_span", bucket_mode=form, bucket_cap_mb=1.0))
        assert report.buckets
        inputs = random_inputs(gm, world_size, seed=0, high=256, scale=0.02)
        expected = pytree.tree_leaves(run_spmd(gm, inputs, groups, world_size))
        actual = pytree.tree_leaves(run_spmd(after, inputs, groups, world_size))
        assert len(expected) == len(actual) > 0
        for one, other in zip(expected, actual, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()


def test_tensor_parallel_and_expert_collectives_are_never_touched():
    for name, group in (("llama_2l_fsdp4_tp2", "3"), ("moe_3l_dp4_ep2", "3")):
        _, graphs = graphs_of(name)
        for gm in graphs.values():
            report = optimize_graph(gm, Options("topo_span"))
            assert report.buckets
            kinds = {x.kind for x in report.buckets if x.group == group}
            assert kinds <= {"all_reduce"}  # gradients of parameters replicated over the group


def test_both_fsdp_groups_of_a_mixture_of_experts_are_served():
    _, graphs = graphs_of("moe_3l_dp4_ep2")
    report = optimize_graph(graphs["fw"], Options("topo_span"))
    assert {x.group: len(x.members) for x in report.buckets} == {"0": 32, "1": 6}


class TestCounts:
    def test_fsdp_gathers_and_scatters_become_one_each_under_a_large_cap(self):
        _, graphs = graphs_of("llama_3l_fsdp8")
        options = Options("topo_span", bucket_cap_mb=100.0, max_topo_span=None)
        forward = optimize_graph(graphs["fw"], options)
        backward = optimize_graph(graphs["bw"], options)
        assert forward.collectives_before["all_gather"] >= 3 * 9
        assert forward.collectives_after == {"all_gather": 1}
        assert backward.collectives_after == {"all_gather": 1, "reduce_scatter": 1}

    def test_small_cap_gives_several_buckets_within_it(self):
        _, graphs = graphs_of("llama_3l_fsdp8")
        report = optimize_graph(graphs["fw"], Options("topo_span", bucket_cap_mb=0.25))
        assert len(report.buckets) >= 2
        assert all(x.size_bytes <= 0.25 * 2**20 for x in report.buckets)

    def test_span_bound_splits_the_backward(self):
        _, graphs = graphs_of("llama_3l_fsdp8")
        bound = Options("topo_span", bucket_cap_mb=100.0, max_topo_span=200)
        report = optimize_graph(graphs["bw"], bound)
        assert report.collectives_after["reduce_scatter"] >= 2
        assert 0 < report.max_span <= 200
        assert report.closes["span"] >= 1

    def test_hsdp_all_reduces_are_bucketed_behind_the_scatters(self):
        _, graphs = graphs_of("llama_2l_hsdp2x4")
        report = optimize_graph(graphs["bw"], Options("topo_span"))
        assert report.collectives_after["reduce_scatter"] == 1
        assert report.collectives_after["all_reduce"] == 1

    def test_ddp_all_reduces_merge(self):
        _, graphs = graphs_of("llama_3l_ddp8")
        report = optimize_graph(graphs["bw"], Options("topo_span"))
        assert report.collectives_before["all_reduce"] >= 3 * 9
        assert report.collectives_after["all_reduce"] == 1


class TestEightLayers:
    """75 parameters: nine in each of 8 layers, embedding, norm and head."""

    def _launches(self, graph, **options):
        _, graphs = graphs_of("llama_8l_fsdp8")
        report = optimize_graph(graphs[graph], Options("topo_span", **options))
        return report.collectives_before, report.collectives_after

    @pytest.mark.parametrize("form", ["default", "coalesced"])
    def test_one_gather_at_100_mb(self, form):
        before, after = self._launches("fw", bucket_cap_mb=100.0, bucket_mode=form)
        assert before == {"all_gather": 75}
        assert after == {"all_gather": 1}

    def test_at_most_12_gathers_at_2_mb(self):
        _, after = self._launches("fw", bucket_cap_mb=2.0)
        assert 2 <= after["all_gather"] <= 12

    def test_span_bound_of_1500_splits_the_scatters_in_two(self):
        before, after = self._launches("bw", bucket_cap_mb=100.0)
        assert before["reduce_scatter"] == 75
        assert after["reduce_scatter"] == 2

    def test_one_scatter_without_a_span_bound(self):
        _, after = self._launches("bw", bucket_cap_mb=100.0, max_topo_span=None)
        assert after["reduce_scatter"] == 1
