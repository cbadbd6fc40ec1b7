"""The two phases as plain functions, alone and composed into a backend of one's own."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
)
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import compat_api
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK, tag_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason, TagSource, Traffic
from torch_patches.compat_api import bucket_collectives, tag_collectives_for_bucketing
from torch_patches.config import PREFIX, FlagError
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.parallelize import fully_shard_simple

KIB = 2**-10  # MB


def two_gathers(*descriptors):
    """gather(in0), gather(in1): 1 KiB each on two ranks; their inputs described as given."""
    b = GraphBuilder()
    inputs = [b.placeholder(128, name=f"in{i}") for i in range(2)]
    for node, descriptor in zip(inputs, descriptors, strict=False):
        node.meta["desc"] = descriptor
    gm = b.output(*[b.gather_and_wait(x, 2, "g") for x in inputs])
    gm.graph.output_node().meta["desc"] = [PlainAOTOutput(0), PlainAOTOutput(1)]
    return gm


def starts(gm):
    return [n for n in gm.graph.nodes if "all_gather" in str(n.target)]


# -- tagging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [lambda gm: gm, lambda gm: gm.graph], ids=["module", "graph"])
def test_parameters_are_tagged_and_buffers_are_not(of):
    gm = two_gathers(ParamAOTInput("layer.w"), BufferAOTInput("layer.b"))
    text = gm.code
    assert tag_collectives_for_bucketing(of(gm)) is None
    parameter, buffer = [tag_of(n) for n in starts(gm)]
    assert parameter.traffic is Traffic.PARAMETER and parameter.parameter == "layer.w"
    assert parameter.source is TagSource.DESCRIPTORS
    assert buffer.traffic is Traffic.OTHER
    assert gm.code == text


def test_a_graph_without_descriptors_is_not_tagged():
    gm = two_gathers()
    tag_collectives_for_bucketing(gm)
    assert not any(TAG_MARK in n.meta for n in gm.graph.nodes)


def test_outputs_that_cannot_be_paired_raise():
    gm = two_gathers(ParamAOTInput("v"), ParamAOTInput("w"))
    gm.graph.output_node().meta["desc"] = [GradAOTOutput(ParamAOTInput("v"))]
    with pytest.raises(ValueError, match=r"2 outputs and 1 output descriptors"):
        tag_collectives_for_bucketing(gm)
    assert not any(TAG_MARK in n.meta for n in gm.graph.nodes)


def test_nested_outputs_are_paired_flat():
    gm = two_gathers(ParamAOTInput("v"), ParamAOTInput("w"))
    output = gm.graph.output_node()
    first, second = output.args[0]
    output.args = (((first,), [second]),)
    tag_collectives_for_bucketing(gm)
    assert [tag_of(n).parameter for n in starts(gm)] == ["v", "w"]


def test_only_graphs_are_tagged():
    with pytest.raises(TypeError, match=r"takes an fx.Graph or fx.GraphModule, not Linear"):
        tag_collectives_for_bucketing(nn.Linear(1, 1))


# -- bucketing ------------------------------------------------------------------------------------


def test_tagged_parameters_are_bucketed():
    gm = two_gathers(ParamAOTInput("v"), ParamAOTInput("w"))
    tag_collectives_for_bucketing(gm)
    report = bucket_collectives(gm)
    assert report.collectives_after == {"all_gather": 1}
    assert gm.code.count("all_gather_into_tensor_coalesced.default(") == 1  # recompiled


def test_what_is_tagged_as_other_is_not():
    gm = two_gathers(ParamAOTInput("v"), BufferAOTInput("w"))
    tag_collectives_for_bucketing(gm)
    report = bucket_collectives(gm)
    assert report.collectives_after == {"all_gather": 2}
    reasons = {r.members[0]: r.reason for r in report.refusals}
    assert reasons[starts(gm)[1].name] is RefusalReason.NOT_PARAMETER_TRAFFIC


def test_without_a_tagging_call_descriptors_decide():
    assert bucket_collectives(two_gathers(ParamAOTInput("v"), ParamAOTInput("w"))).buckets
    assert not bucket_collectives(two_gathers(ParamAOTInput("v"), BufferAOTInput("w"))).buckets


def test_without_descriptors_structure_decides():
    assert bucket_collectives(two_gathers()).buckets
    assert bucket_collectives(two_gathers(PlainAOTInput(0), PlainAOTInput(1))).buckets


@pytest.mark.parametrize(
    ("cap", "buckets"),
    [(2 * KIB, 1), (1.5 * KIB, 0), ([2 * KIB], 1), (lambda index: 1.5 * KIB, 0), (25.0, 1)],
)
def test_the_cap(cap, buckets):
    assert len(bucket_collectives(two_gathers(), bucket_cap_mb=cap).buckets) == buckets


def test_the_mode_flag_does_not_matter_and_the_others_do():
    with inductor_config.patch({PREFIX + "bucketing_mode": "none", PREFIX + "max_topo_span": 1}):
        report = bucket_collectives(two_gathers())
    assert (report.mode, report.max_topo_span) == ("topo_span", 1)


@pytest.mark.parametrize("cap", [0, -1.0, "25", True, float("nan")])
def test_a_wrong_cap_raises(cap):
    with pytest.raises(FlagError, match=r"bucket_collectives\(bucket_cap_mb=...\)"):
        bucket_collectives(two_gathers(), bucket_cap_mb=cap)


def test_only_graph_modules_are_bucketed():
    with pytest.raises(TypeError, match=r"takes an fx.GraphModule, not Graph"):
        bucket_collectives(fx.Graph())


# -- a backend of one's own -----------------------------------------------------------------------


def example():
    """The code block of the module's docstring."""
    text = compat_api.__doc__.split("::\n", 1)[1].split("\nEach works alone", 1)[0]
    return textwrap.dedent(text)


class Model(nn.Module):
    """Two sharded parameters, and an input that is gathered, which looks like one."""

    def __init__(self, mesh):
        super().__init__()
        self.body = fully_shard_simple(nn.Linear(8, 8), mesh, reshard=False)

    def forward(self, x):
        c10d, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        x = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))
        return self.body(x)


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch._dynamo.reset()
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def train(text, mesh):
    """Launches after bucketing, forward and backward, of a model under the backend in ``text``."""
    seen = []
    scope = {"torch": torch, "model": Model(mesh)}
    with pytest.MonkeyPatch.context() as patch:
        original = compat_api.bucket_collectives
        patch.setattr(
            compat_api,
            "bucket_collectives",
            lambda *args, **kwargs: seen.append(original(*args, **kwargs)),
        )
        exec(text, scope)
        scope["model"](torch.ones(4, 8)).sum().backward()
    return [report.collectives_after for report in seen]


def test_the_example_buckets_parameters_and_gradients(mesh):
    """The gather of the input stays alone."""
    assert train(example(), mesh) == [{"all_gather": 2}, {"reduce_scatter": 1}]


def test_without_the_model_an_input_counts_as_a_parameter(mesh):
    text = example().replace("tag_collectives_for_bucketing(joint, model)", "pass")
    assert train(text, mesh) == [{"all_gather": 1}, {"reduce_scatter": 1}]
