"""DDP's reducer inside of compiled autograd's graph: its all-reduces are gradient traffic.

torch's ``DistributedDataParallel`` with ``torch._dynamo.config.optimize_ddp = "python_reducer"``::

    new gradient -> copy over an empty tensor (or: add to the gradient so far) = g
    g -> div by the world size -> all_reduce -> wait -> copy over g -> output
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._dynamo import compiled_autograd
from torch._functorch._aot_autograd import descriptors as aot
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import cli
from torch_patches._inductor.fx_passes.comm_overlap.graph.accumulated import (
    Accumulated,
    find_accumulated,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import (
    record_inputs,
    recorded_from_names,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import tag_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    InputKind,
    RecordedInput,
    RefusalReason,
    TagSource,
    Traffic,
)
from torch_patches.captured import CapturedGroup, save_captured
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
OTHER = RecordedInput(InputKind.OTHER)


# -- graphs made by hand --------------------------------------------------------------------------


def reduced(b: GraphBuilder, gradient: fx.Node) -> fx.Node:
    """What the hook of DDP does to a gradient."""
    wait = b.reduce_and_wait(b.call(aten.div.Tensor, gradient, 2), "sum", "g")
    return b.call(aten.copy, gradient, wait)


def compressed(b: GraphBuilder, gradient: fx.Node) -> fx.Node:
    """What its hook for float16 does."""
    half = b.call(aten.div.Tensor, b.call(aten._to_copy, gradient, dtype=torch.float16), 2)
    return b.call(aten.copy, gradient, b.reduce_and_wait(half, "sum", "g"))


def first_gradient(b: GraphBuilder, product: fx.Node) -> fx.Node:
    """What AccumulateGrad does where there is none yet."""
    empty = b.call(aten.new_empty_strided, product, [4, 4], [4, 1])
    return b.call(aten.copy, empty, product)


def describe(gm: fx.GraphModule, outputs: Sequence[Any]) -> fx.GraphModule:
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = aot.PlainAOTInput(place)
    (output,) = gm.graph.find_nodes(op="output")
    output.meta["desc"] = list(outputs)
    return gm


def first_step(reduce: Any = reduced) -> fx.GraphModule:
    """Inputs: an activation, a gradient of it, the parameter, which the graph does not read."""
    b = GraphBuilder()
    x, dy, _ = (b.placeholder(4, 4) for _ in range(3))
    product = b.call(aten.mm, b.call(aten.t, dy), x)
    return describe(b.output(reduce(b, first_gradient(b, product))), [aot.PlainAOTOutput(0)])


def later_step() -> fx.GraphModule:
    """The same with the gradient so far, which is written over."""
    b = GraphBuilder()
    x, dy, _, before = (b.placeholder(4, 4) for _ in range(4))
    product = b.call(aten.mm, b.call(aten.t, dy), x)
    written = reduced(b, b.call(aten.add.Tensor, before, product))
    mutated = aot.InputMutationAOTOutput(aot.PlainAOTInput(3))
    return describe(b.output(written, written), [mutated, aot.PlainAOTOutput(0)])


def tag_of_the_reduction(gm: fx.GraphModule, recorded: Sequence[RecordedInput]) -> Any:
    tag_graph(gm.graph, recorded)
    (collective,) = collect(gm.graph).collectives
    return collective.tag


PARAMETER = RecordedInput(InputKind.PARAMETER, "", 0, gradient_outputs=(0,))


@pytest.mark.parametrize("reduce", [reduced, compressed])
def test_dynamo_tells_the_gradient(reduce: Any) -> None:
    tag = tag_of_the_reduction(first_step(reduce), [OTHER, OTHER, PARAMETER])
    assert (tag.traffic, tag.source, tag.place) == (Traffic.GRADIENT, TagSource.DYNAMO, 2)


def test_a_gradient_that_is_added_to_is_told_by_what_is_written_over() -> None:
    parameter = RecordedInput(InputKind.PARAMETER, "", 0, (0,), (3,))
    tag = tag_of_the_reduction(later_step(), [OTHER, OTHER, parameter, OTHER])
    assert (tag.traffic, tag.source, tag.place) == (Traffic.GRADIENT, TagSource.DYNAMO, 2)


@pytest.mark.parametrize("make", [first_step, later_step])
def test_structure_decides_where_nobody_tells(make: Any) -> None:
    tag = tag_of_the_reduction(make(), ())
    assert (tag.traffic, tag.source) == (Traffic.GRADIENT, TagSource.STRUCTURE)
    bare = make()
    for node in bare.graph.nodes:
        node.meta.pop("desc", None)
    (collective,) = collect(bare.graph).collectives
    assert (collective.tag, collective.traffic) == (None, Traffic.GRADIENT)


def test_an_output_that_dynamo_does_not_call_a_gradient_is_none() -> None:
    tag = tag_of_the_reduction(first_step(), [OTHER, OTHER, RecordedInput(InputKind.PARAMETER)])
    assert (tag.traffic, tag.source) == (Traffic.OTHER, TagSource.DYNAMO)


def test_what_is_written_over_is_not_what_is_returned() -> None:
    """The reduction's result is lost: it leads to no gradient."""

    def lost(b: GraphBuilder, gradient: fx.Node) -> fx.Node:
        return b.call(aten.copy, b.reduce_and_wait(gradient, "sum", "g"), gradient)

    tag = tag_of_the_reduction(first_step(lost), [OTHER, OTHER, PARAMETER])
    assert tag.traffic is not Traffic.GRADIENT


def test_a_capture_keeps_what_dynamo_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay(**told: Any) -> int:
        info = {"inputs": ["", "", ""], "accumulated": [{"before": None, "outputs": [0], **told}]}
        groups = {"g": CapturedGroup((0, 1))}
        save_captured(tmp_path / "bw.json.gz", {"bw": first_step()}, info, groups)
        return cli.main(["replay", str(tmp_path / "bw.json.gz"), "--mode", "topo_span", "--json"])

    assert replay(parameter=2) == 0
    report = json.loads(capsys.readouterr().out)["graphs"]["bw"]["report"]
    assert report["told_by"] == {"dynamo": 1}
    assert [r["reason"] for r in report["refusals"]] == [RefusalReason.ALONE_IN_KEY.value]
    for parameter in (3, "2", None):
        assert replay(parameter=parameter) == 2
        assert "info.accumulated: malformed" in capsys.readouterr().err


# -- what Dynamo's graph tells --------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[None]:
    from torch._inductor import config

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ours = torch._dynamo.config.patch(optimize_ddp="python_reducer")
    # DDP sets this one when it is made.
    with ours, config.patch(_fuse_ddp_communication=False):
        yield
    torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_records_of_compiled_autograd() -> None:
    """Tensors stand in one list there; the second step has the gradients so far among them."""
    found: list[list[Accumulated]] = []
    records: list[tuple[RecordedInput, ...]] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(find_accumulated(gm.graph))
        records.append(record_inputs(gm))
        return gm.forward

    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    forward = torch.compile(model, backend="eager", fullgraph=True)
    backward = torch.compile(backend=keep, fullgraph=True)
    for _ in range(2):
        with compiled_autograd._enable(backward):
            forward(torch.ones(2, 4)).sum().backward()
    first, later = found
    assert [gradient.before for gradient in first] == [None] * 4
    assert sorted(place for gradient in first for place in gradient.outputs) == [0, 1, 2, 3]
    held = {gradient.before for gradient in later} | {gradient.parameter for gradient in later}
    assert len(held) == 8 and None not in held
    for accumulated, recorded in zip(found, records, strict=True):
        parameters = {i for i, r in enumerate(recorded) if r.kind is InputKind.PARAMETER}
        assert parameters == {gradient.parameter for gradient in accumulated}
        names = [record.name for record in recorded]
        assert recorded_from_names(names, accumulated) == recorded
