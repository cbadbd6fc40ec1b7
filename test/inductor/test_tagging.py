"""Which collectives of a graph with descriptors are tagged, as what, and with which parameter.

Graphs are those of ``torch_patches.testing.described_graph``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._functorch._aot_autograd import descriptors as aot

from torch_patches._inductor.fx_passes.comm_overlap import notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.graph_inputs import DescriptorMismatch
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import (
    is_tagged,
    plan_tags,
    tag_graph,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveTag,
    InputKind,
    RecordedInput,
    TagSource,
    Traffic,
)
from torch_patches.testing.described_graph import B, DescribedGraph, V, W, X
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

PARAMETER = CollectiveTag(Traffic.PARAMETER, TagSource.DESCRIPTORS, "layer.w", 0, 0)
GRADIENT = CollectiveTag(Traffic.GRADIENT, TagSource.DESCRIPTORS, "layer.w", 0, 0)
OTHER = CollectiveTag(Traffic.OTHER, TagSource.DESCRIPTORS)


def gradient_of(descriptor: Any) -> aot.GradAOTOutput:
    return aot.GradAOTOutput(descriptor)


def tags_of(gm: fx.GraphModule, recorded: tuple[RecordedInput, ...] = ()) -> list[CollectiveTag]:
    """Tags of the starts, in graph order."""
    tags = plan_tags(gm.graph, recorded)
    return [tags[node] for node in gm.graph.nodes if collective_kind(node) is not None]


# -- gathers --------------------------------------------------------------------------------------


def cast(s: DescribedGraph) -> fx.Node:
    return s.call(aten._to_copy, s.w, dtype=torch.bfloat16)


def padded_and_sliced(s: DescribedGraph) -> fx.Node:
    padded = s.call(aten.constant_pad_nd, s.w, [0, 0, 0, 2])
    return s.call(aten.slice.Tensor, padded, 0, 0, 10)


def first_of_a_chain(s: DescribedGraph) -> fx.Node:
    return s.call(aten.view, s.gather(s.w), [8, 16])


def quantised_data(s: DescribedGraph) -> fx.Node:
    scale = s.call(aten.div.Tensor, s.call(aten.amax, s.call(aten.abs, s.w), [1], True), 127.0)
    return s.call(aten._to_copy, s.call(aten.div.Tensor, s.w, scale), dtype=torch.int8)


def quantised_scale(s: DescribedGraph) -> fx.Node:
    return s.call(aten.amax, s.call(aten.abs, s.w), [1], True)


def quantised_with_a_buffer(s: DescribedGraph) -> fx.Node:
    return s.call(aten._to_copy, s.call(aten.mul.Tensor, s.w, s.b), dtype=torch.int8)


def padded_with_a_constant(s: DescribedGraph) -> fx.Node:
    zeros = s.call(aten.full, [2, 8], 0.0)
    return s.call(aten.cat, [s.w, zeros])


def padded_in_its_own_dtype(s: DescribedGraph) -> fx.Node:
    return s.call(aten.cat, [s.w, s.call(aten.new_zeros, s.w, [2, 8])])


def copied_into_a_buffer(s: DescribedGraph) -> fx.Node:
    return s.call(aten.copy, s.call(aten.empty_like, s.x), s.w)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda s: s.w,
        cast,
        padded_and_sliced,
        first_of_a_chain,
        quantised_data,
        quantised_scale,
        quantised_with_a_buffer,
        padded_with_a_constant,
        padded_in_its_own_dtype,
        copied_into_a_buffer,
    ],
)
def test_gather_of_one_parameter_is_tagged(prepare: Callable[[DescribedGraph], fx.Node]) -> None:
    s = DescribedGraph()
    gm = s.end((s.gather(prepare(s)), aot.PlainAOTOutput(0)))
    assert set(tags_of(gm)) == {PARAMETER}


@pytest.mark.parametrize(
    "payload",
    [
        lambda s: s.x,
        lambda s: s.b,
        lambda s: s.call(aten.mm, s.w, s.w),
        lambda s: s.call(aten.mm, s.w, s.v),
        lambda s: s.call(aten.add.Tensor, s.w, s.v),
        lambda s: s.call(aten.mul.Tensor, s.w, s.x),
        lambda s: s.call(aten.bernoulli, s.w),
        lambda s: s.call(aten.full, [8, 8], 0.0),
        lambda s: s.input(None),
        lambda s: s.input(aot.TangentAOTInput(aot.PlainAOTOutput(0))),
    ],
    ids=["data", "buffer", "mm(w, w)", "mm(w, v)", "w + v", "w * x", "random", "constant",
         "saved activation", "tangent"],
)  # fmt: skip
def test_other_gathers_are_not(payload: Callable[[DescribedGraph], fx.Node]) -> None:
    s = DescribedGraph()
    gm = s.end((s.gather(payload(s)), aot.PlainAOTOutput(0)))
    assert tags_of(gm) == [OTHER]


def test_reduction_of_a_parameter_is_no_gather() -> None:
    """w -> amax -> all_reduce(max): the scale of a quantised shard."""
    s = DescribedGraph()
    gm = s.end((s.reduce(s.call(aten.amax, s.w)), aot.PlainAOTOutput(0)))
    assert tags_of(gm) == [OTHER]


def test_parameter_gathered_twice_and_part_of_a_subclass() -> None:
    """Two gathers of w; v is the local part of a DTensor, whose mesh is an input of its own."""
    s = DescribedGraph()
    local = s.input(aot.SubclassGetAttrAOTInput(V, "_local_tensor"))
    mesh = s.opaque_placeholder("mesh")
    mesh.meta["desc"] = aot.SubclassGetAttrAOTInput(V, "device_mesh")
    outputs = [(s.gather(node), aot.PlainAOTOutput(i)) for i, node in enumerate((s.w, s.w, local))]
    tags = tags_of(s.end(*outputs))
    assert [(t.parameter, t.index) for t in tags] == [
        ("layer.w", 0),
        ("layer.w", 0),
        ("layer.v", 1),
    ]


@pytest.mark.parametrize("base", [aot.ViewBaseAOTInput, aot.SyntheticBaseAOTInput])
def test_base_of_a_parameter_is_the_parameter(base: Callable[[Any], object]) -> None:
    s = DescribedGraph()
    assert tags_of(s.end((s.gather(s.input(base(W))), aot.PlainAOTOutput(0)))) == [PARAMETER]


@torch.library.custom_op("test_tagging::quantise", mutates_args=())
def quantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).to(torch.int8)


@quantise.register_fake
def _(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values, dtype=torch.int8)


@torch.library.custom_op("test_tagging::counting", mutates_args=("calls",))
def counting(values: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    calls.add_(1)
    return values.clone()


@counting.register_fake
def _(values: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (lambda s, q: s.call(q, s.w, s.call(aten.amax, s.w)), PARAMETER),
        (lambda s, q: s.call(q, s.w, s.b), PARAMETER),
        (lambda s, q: s.call(q, s.w, s.x), OTHER),
        (lambda s, q: s.call(q, s.w, s.v), OTHER),
        (lambda s, q: s.call(torch.ops.test_tagging.counting, s.w, s.b), OTHER),
    ],
    ids=["own scale", "buffer scale", "data scale", "another parameter", "mutating"],
)
def test_somebodys_quantisation(payload: Any, expected: CollectiveTag) -> None:
    s = DescribedGraph()
    gathered = s.gather(payload(s, torch.ops.test_tagging.quantise))
    assert tags_of(s.end((gathered, aot.PlainAOTOutput(0)))) == [expected]


def test_chain_behind_the_wait_is_tagged_alike() -> None:
    """w -> all_gather -> wait -> cast -> view -> mm: up to the mm."""
    s = DescribedGraph()
    wait = s.gather(s.w)
    view = s.call(aten.view, s.call(aten._to_copy, wait, dtype=torch.float64), [8, 16])
    gm = s.end((s.call(aten.mm, s.x, view), aot.PlainAOTOutput(0)))
    tag_graph(gm.graph)
    tagged = [node.target for node in gm.graph.nodes if tag_of(node) == PARAMETER]
    assert tagged == [
        c10d.all_gather_into_tensor.default,
        c10d.wait_tensor.default,
        aten._to_copy.default,
        aten.view.default,
    ]


def straight_through_clamp(s: DescribedGraph, wait: fx.Node) -> fx.Node:
    """The gradient where the parameter is positive, elsewhere its decay."""
    shard = s.input(W, 4, 8)
    return s.call(aten.where.self, s.call(aten.gt.Scalar, shard, 0), wait, shard)


# -- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "finish",
    [
        lambda s, wait: wait,
        lambda s, wait: s.call(aten._to_copy, wait, dtype=torch.float64),
        lambda s, wait: s.call(aten.slice.Tensor, wait, 0, 0, 3),
        lambda s, wait: s.call(aten.div.Tensor, wait, 2),
        lambda s, wait: s.call(aten.add.Tensor, s.input(X, 4, 8), wait),
        lambda s, wait: s.reduce(wait),
        lambda s, wait: s.call(aten.neg, wait),
        lambda s, wait: s.call(aten.maximum, wait, wait),
        lambda s, wait: s.call(aten.maximum, wait, s.call(aten.view, wait, [4, 8])),
        straight_through_clamp,
    ],
    ids=[
        "as it is",
        "cast",
        "unpadded",
        "divided",
        "accumulated",
        "HSDP",
        "negated",
        "read twice",
        "read twice through a view",
        "straight-through clamp",
    ],
)
def test_reduction_that_ends_in_a_gradient_is_tagged(
    finish: Callable[[DescribedGraph, fx.Node], fx.Node],
) -> None:
    s = DescribedGraph()
    gm = s.end((finish(s, s.scatter(s.x)), gradient_of(W)))
    assert set(tags_of(gm)) == {GRADIENT}


@pytest.mark.parametrize(
    "outputs",
    [
        lambda s, wait: [(wait, aot.PlainAOTOutput(0))],
        lambda s, wait: [(wait, gradient_of(X))],
        lambda s, wait: [(wait, gradient_of(B))],
        lambda s, wait: [(wait, gradient_of(W)), (wait, aot.PlainAOTOutput(0))],
        lambda s, wait: [(wait, gradient_of(W)), (s.call(aten.sum, wait), aot.PlainAOTOutput(0))],
        lambda s, wait: [
            (s.call(aten.mul.Tensor, wait, s.call(aten.relu, s.input(X, 4, 8))), gradient_of(W))
        ],
        lambda s, wait: [(s.call(aten.mm, wait, s.w), gradient_of(W))],
        lambda s, wait: [(s.call(aten.sum, wait), gradient_of(W))],
    ],
    ids=["model output", "data's gradient", "buffer's gradient", "also an output", "also its norm",
         "times an activation", "multiplied", "summed"],
)  # fmt: skip
def test_other_reductions_are_not(outputs: Callable[[DescribedGraph, fx.Node], Any]) -> None:
    s = DescribedGraph()
    gm = s.end(*outputs(s, s.scatter(s.x)))
    assert tags_of(gm) == [OTHER]


def test_ddp_all_reduce_and_tied_gradients() -> None:
    """all_reduce(g1) + all_reduce(g2) -> the gradient of w."""
    s = DescribedGraph()
    total = s.call(aten.add.Tensor, s.reduce(s.x), s.reduce(s.x))
    assert tags_of(s.end((total, gradient_of(W)))) == [GRADIENT, GRADIENT]


def test_gradient_of_a_part_of_a_subclass() -> None:
    s = DescribedGraph()
    descriptor = aot.SubclassGetAttrAOTOutput(gradient_of(W), "_local_tensor")
    assert tags_of(s.end((s.scatter(s.x), descriptor))) == [GRADIENT]


def test_chain_behind_a_reduction_is_tagged_alike() -> None:
    """reduce_scatter -> wait -> cast -> view -> the gradient of w."""
    s = DescribedGraph()
    cast = s.call(aten._to_copy, s.scatter(s.x), dtype=torch.float64)
    gm = s.end((s.call(aten.view, cast, [32]), gradient_of(W)))
    tag_graph(gm.graph)
    tagged = [node.target for node in gm.graph.nodes if tag_of(node) == GRADIENT]
    assert tagged == [
        c10d.reduce_scatter_tensor.default,
        c10d.wait_tensor.default,
        aten._to_copy.default,
        aten.view.default,
    ]


def test_gradient_of_a_parameter_that_is_no_input_has_its_place() -> None:
    """A backward of its own returns gradients of parameters that it does not read."""
    s = DescribedGraph()
    away = aot.ParamAOTInput("away.w")
    gm = s.end((s.scatter(s.x), gradient_of(away)), (s.scatter(s.x), gradient_of(V)))
    assert [(t.parameter, t.index, t.place) for t in tags_of(gm)] == [
        ("away.w", 2, 2),
        ("layer.v", 1, 1),
    ]


# -- pairing outputs with descriptors -------------------------------------------------------------


def nested(gm: fx.GraphModule, descriptors: list[object]) -> fx.GraphModule:
    """The outputs (loss, (gradient, None)) instead of the flat ones."""
    (output,) = gm.graph.find_nodes(op="output")
    loss, gradient = output.args[0]
    output.args = ((loss, (gradient, None)),)
    output.meta["desc"] = descriptors
    return gm


def test_nested_outputs_are_paired_with_flat_descriptors() -> None:
    s = DescribedGraph()
    gm = s.end((s.x, None), (s.scatter(s.x), None))
    nested(gm, [aot.PlainAOTOutput(0), gradient_of(W), gradient_of(V)])
    assert tags_of(gm) == [GRADIENT]


def test_descriptors_of_another_number_raise_and_tag_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    s = DescribedGraph()
    gm = nested(s.end((s.x, None), (s.scatter(s.x), None)), [aot.PlainAOTOutput(0), None])
    with pytest.raises(DescriptorMismatch, match="3 outputs and 2 output descriptors"):
        tag_graph(gm.graph)
    monkeypatch.delenv(notices.STRICT_VARIABLE)
    notices.warn_untagged.cache_clear()
    pipeline.run_joint(gm.graph, Options("topo_span"))
    pipeline.run_joint(gm.graph, Options("topo_span"))
    assert not is_tagged(gm.graph)
    assert caplog.text.count("cannot be paired") == 1


# -- who tells ------------------------------------------------------------------------------------


def plain_graph() -> fx.GraphModule:
    """What torch.compile gives: inputs by index only; 1 is gathered, 0 is data and gathered too."""
    b = DescribedGraph()
    data, weight = b.input(aot.PlainAOTInput(0)), b.input(aot.PlainAOTInput(1))
    for unused in (b.w, b.v, b.b, b.x):
        unused.meta["desc"] = aot.PlainAOTInput(5)
    return b.end(
        (b.gather(data), aot.PlainAOTOutput(0)),
        (b.gather(weight), aot.PlainAOTOutput(1)),
        (b.scatter(data), gradient_of(aot.PlainAOTInput(1))),
    )


def test_records_of_dynamo_tell_data_from_parameters() -> None:
    recorded = (
        RecordedInput(InputKind.OTHER),
        RecordedInput(InputKind.PARAMETER, "layer.w", 7),
    )
    tags = tags_of(plain_graph(), recorded)
    assert tags == [
        CollectiveTag(Traffic.OTHER, TagSource.DYNAMO),
        CollectiveTag(Traffic.PARAMETER, TagSource.DYNAMO, "layer.w", 7, 1),
        CollectiveTag(Traffic.GRADIENT, TagSource.DYNAMO, "layer.w", 7, 1),
    ]


def test_without_records_structure_tells() -> None:
    tags = tags_of(plain_graph())
    assert tags == [
        CollectiveTag(Traffic.PARAMETER, TagSource.STRUCTURE, place=0),
        CollectiveTag(Traffic.PARAMETER, TagSource.STRUCTURE, place=1),
        CollectiveTag(Traffic.GRADIENT, TagSource.STRUCTURE, place=1),
    ]


def test_records_without_any_parameter_are_believed() -> None:
    """A part of a model that has activations only."""
    recorded = (RecordedInput(InputKind.OTHER), RecordedInput(InputKind.BUFFER, "b"))
    assert tags_of(plain_graph(), recorded) == [CollectiveTag(Traffic.OTHER, TagSource.DYNAMO)] * 3


def test_plain_tensors_that_are_trained_are_left_to_structure() -> None:
    recorded = (RecordedInput(InputKind.UNKNOWN), RecordedInput(InputKind.UNKNOWN))
    assert tags_of(plain_graph(), recorded) == tags_of(plain_graph())


@pytest.mark.parametrize("in_backward", [True, False])
def test_gradient_returned_as_an_ordinary_output(in_backward: bool) -> None:
    """A step that calls autograd inside returns gradients, and activations, like anything else."""
    s = DescribedGraph()
    wait = s.scatter(s.x)
    if in_backward:
        wait.meta["autograd_backward"] = True
    gm = s.end((wait, aot.PlainAOTOutput(0)))
    gradient = CollectiveTag(Traffic.GRADIENT, TagSource.STRUCTURE, place=0)
    assert tags_of(gm) == [gradient if in_backward else OTHER]


def test_reduction_to_an_output_of_a_function_of_plain_tensors() -> None:
    s = DescribedGraph()
    for node in (s.w, s.v, s.b, s.x):
        node.meta["desc"] = aot.PlainAOTInput(3)
    gm = s.end((s.scatter(s.x), aot.PlainAOTOutput(0)))
    assert [tag.traffic for tag in tags_of(gm)] == [Traffic.GRADIENT]


def test_without_records_no_arithmetic_is_taken_for_a_quantisation() -> None:
    s = DescribedGraph()
    for node in (s.w, s.v, s.b, s.x):
        node.meta["desc"] = aot.PlainAOTInput(3)
    gm = s.end((s.gather(s.call(aten.relu, s.w)), aot.PlainAOTOutput(0)))
    assert [tag.traffic for tag in tags_of(gm)] == [Traffic.OTHER]


def test_graph_without_descriptors_has_no_tags() -> None:
    b = GraphBuilder()
    gm = b.output(b.gather_and_wait(b.placeholder(4, 8), 2, "dp"))
    assert plan_tags(gm.graph) == {}
    assert [c.traffic for c in collect(gm.graph).collectives] == [Traffic.PARAMETER]
