"""Tags written on a joint graph reach the graphs that are bucketed, whole and unmistaken.

    model -> Dynamo -> joint graph -> run_joint -> partition -> forward, backward

Nothing here has a process group; what is gathered and how: ``torch_patches/testing/gathers.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions

import torch_patches  # noqa: F401  (registers the flags and the hooks)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import is_cast, is_view
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import run_joint, run_post_grad
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveTag,
    RecordedInput,
    TagSource,
)
from torch_patches.testing import traced_models as models
from torch_patches.testing.gathers import Chained, Quantised, Replicated, Sharded
from torch_patches.testing.traced import Traced, export_joint, trace, trace_inductor

OPTIONS = Options("topo_span")
FLAGS = {"aten_distributed_optimizations.bucketing_mode": "topo_span"}
S = Sharded()

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
W0, W1, W2 = "layers.0.weight", "layers.1.weight", "layers.2.weight"
#: Carries neither a parameter nor a gradient.
OTHER = ("other", None, None)


def parameter(name: str, index: int) -> tuple[str, str, int]:
    return ("parameter", name, index)


def gradient(name: str, index: int) -> tuple[str, str, int]:
    return ("gradient", name, index)


def tags_in(gm: fx.GraphModule) -> list[tuple[object, ...]]:
    """(kind, traffic, parameter, index) of each collective, sorted; kind alone without a tag."""
    found: list[tuple[object, ...]] = []
    for c in collect(gm.graph).collectives:
        tag = tag_of(c.start)
        what = () if tag is None else (tag.traffic.value, tag.parameter, tag.index)
        found.append((c.kind.value, *what))
    return sorted(found, key=repr)


def expected(*collectives: tuple[str, tuple[object, ...]]) -> list[tuple[object, ...]]:
    return sorted(((kind, *what) for kind, what in collectives), key=repr)


def tag(graph: fx.Graph, inputs: tuple[RecordedInput, ...]) -> None:
    run_joint(graph, OPTIONS, inputs)


def traced(build: Callable[[], nn.Module], partition: str, width: int = models.WIDTH) -> Traced:
    return trace(build, (models.BATCH, width), partition=partition, joint_pass=tag)


# ---------------------------------------------------------------- what each model's graphs hold


@dataclass(frozen=True)
class Model:
    """A model with the collectives of its forward and backward graph."""

    build: Callable[[], nn.Module]
    forward: list[tuple[object, ...]]
    backward: list[tuple[object, ...]]
    width: int = models.WIDTH


GATHERS = [(GATHER, parameter(W0, 0)), (GATHER, parameter(W1, 1))]
SCATTERS = [(SCATTER, gradient(W0, 0)), (SCATTER, gradient(W1, 1))]
REDUCES = [(REDUCE, gradient(W0, 0)), (REDUCE, gradient(W1, 1))]
PLAIN = (expected(*GATHERS), expected(*SCATTERS))
#: With a third layer, whose backward gathers all but the first weight again.
THREE = (
    expected(*GATHERS, (GATHER, parameter(W2, 2))),
    expected(
        *SCATTERS,
        (SCATTER, gradient(W2, 2)),
        (GATHER, parameter(W1, 1)),
        (GATHER, parameter(W2, 2)),
    ),
)

MODELS = {
    "fsdp": Model(lambda: models.Mlp([Sharded(dtype=torch.bfloat16)] * 2), *PLAIN),
    "cast after the gather": Model(
        lambda: models.Mlp([Sharded(dtype=torch.bfloat16, cast_after=True)] * 2), *PLAIN
    ),
    "uneven shards": Model(
        lambda: models.Mlp([Sharded(missing_rows=1)] * 2, width=7), *PLAIN, width=7
    ),
    "bias registered first, used last": Model(
        lambda: models.Mlp([S], bias=True),
        expected((GATHER, parameter(W0, 1)), (GATHER, parameter("layers.0.bias", 0))),
        expected((SCATTER, gradient(W0, 1)), (SCATTER, gradient("layers.0.bias", 0))),
    ),
    "used in reverse": Model(lambda: models.ReversedMlp([S] * 2), *PLAIN),
    "hsdp": Model(
        lambda: models.Mlp([Sharded("tp", 2, replicas="dp")] * 2),
        expected(*GATHERS),
        expected(*SCATTERS, *REDUCES),
    ),
    "ddp": Model(lambda: models.Mlp([Replicated()] * 2), [], expected(*REDUCES)),
    "ddp with a divide": Model(
        lambda: models.Mlp([Replicated(divisor=4.0)] * 2), [], expected(*REDUCES)
    ),
    "quantised": Model(
        lambda: models.Mlp([Quantised()] * 2), expected(*GATHERS, *GATHERS), expected(*SCATTERS)
    ),
    "chained gathers": Model(
        lambda: models.Mlp([Chained()] * 2),
        expected(*GATHERS, *GATHERS),
        expected(*SCATTERS, *SCATTERS),
    ),
    "frozen": Model(
        lambda: models.FrozenMlp([S] * 2), expected(*GATHERS), expected((SCATTER, gradient(W1, 1)))
    ),
    "accumulated": Model(lambda: models.AccumulatingMlp([S] * 2), *PLAIN),
    "sequence parallel": Model(
        lambda: models.SequenceParallel([S] * 2),
        expected(*GATHERS, (GATHER, OTHER), (SCATTER, OTHER)),
        expected(*SCATTERS, (GATHER, OTHER)),
    ),
    "gathered buffer": Model(
        lambda: models.GatheredBuffer([S] * 2),
        expected(*GATHERS, (GATHER, OTHER)),
        expected(*SCATTERS),
    ),
    "gathered input": Model(
        lambda: models.GatheredInput([S] * 2),
        expected(*GATHERS, (GATHER, OTHER)),
        expected(*SCATTERS),
    ),
    "gathered product": Model(
        lambda: models.GatheredProduct([S] * 2),
        # The square is the model's own, so bottom-up it comes behind the layers'.
        expected((GATHER, parameter(W0, 0)), (GATHER, parameter(W1, 1)), (GATHER, OTHER)),
        expected((SCATTER, gradient(W0, 0)), (SCATTER, gradient(W1, 1)), (SCATTER, OTHER)),
    ),
    "gathers recomputed": Model(lambda: models.Mlp([S] * 3, recompute=True), *THREE),
    "uneven gathers recomputed": Model(
        lambda: models.Mlp([Sharded(missing_rows=1)] * 3, recompute=True, width=7), *THREE, width=7
    ),
    "blocks recomputed": Model(lambda: models.RecomputedMlp([S] * 3), *THREE),
}

everything = pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
both_partitions = pytest.mark.parametrize("partition", ["default", "min_cut"])


@both_partitions
@everything
def test_partition_keeps_tags(model: Model, partition: str) -> None:
    graphs = traced(model.build, partition, model.width)
    forward, backward = graphs.split
    assert tags_in(forward) == model.forward
    assert tags_in(backward) == model.backward
    sources = {t.source for t in _tags(forward, backward)}
    assert sources == {TagSource.DYNAMO}


@both_partitions
def test_what_checkpointing_repeats_carries_its_tag(partition: str) -> None:
    """How much that is, is torch's choice: two gathers on 2.13, none on 2.11."""
    forward, backward = traced(lambda: models.CheckpointedMlp([S] * 3), partition).split
    assert tags_in(forward) == THREE[0]
    assert set(tags_in(backward)) <= set(THREE[1])
    assert len([t for t in tags_in(backward) if t[0] == SCATTER]) == 3


@everything
def test_nothing_is_tagged_without_the_joint_pass(model: Model) -> None:
    forward, backward = trace(model.build, (models.BATCH, model.width)).split
    assert not list(_tags(forward, backward))


@everything
def test_waits_casts_and_views_carry_the_tag_of_their_start(model: Model) -> None:
    for gm in traced(model.build, "min_cut", model.width).split:
        for c in collect(gm.graph).collectives:
            if c.tag is not None and c.tag.traffic.value == "parameter":
                assert {tag_of(n) for n in _chain(c.start)} == {tag_of(c.start)}


def test_a_chain_holds_what_follows_the_gather() -> None:
    """The test above would pass on empty chains: wait, slice and cast are there, again in the
    backward."""
    way = Sharded(dtype=torch.bfloat16, missing_rows=1, cast_after=True)
    graphs = traced(lambda: models.Mlp([way] * 3, recompute=True, width=7), "min_cut", 7)
    for gm in graphs.split:
        gathers = [c for c in collect(gm.graph).collectives if c.kind.value == GATHER]
        assert len(gathers) >= 2
        for c in gathers:
            names = {str(n.target) for n in _chain(c.start)}
            assert {"aten.slice.Tensor", "aten._to_copy.default"} <= names
            assert "_c10d_functional.wait_tensor.default" in names


def _chain(start: fx.Node) -> Iterator[fx.Node]:
    """Waits, casts and views behind a start, judged from outside."""
    pending = [start]
    while pending:
        for user in pending.pop().users:
            if "wait_tensor" in str(user.target) or is_cast(user) or is_view(user):
                yield user
                pending.append(user)


def _tags(*graphs: fx.GraphModule) -> Iterator[CollectiveTag]:
    for gm in graphs:
        yield from (t for n in gm.graph.nodes if (t := tag_of(n)) is not None)


# ---------------------------------------------------------------- one parameter, several gathers


@pytest.mark.parametrize("build", [models.TiedMlp, models.TwiceMlp])
@pytest.mark.parametrize(("partition", "gathers"), [("default", 2), ("min_cut", 1)])
def test_a_parameter_used_twice_has_one_tag(
    build: type[models.Mlp], partition: str, gathers: int
) -> None:
    """Its gathers too, where the partitioner (min-cut) does not make one of them."""
    layers = 3 if build is models.TiedMlp else 2
    forward, backward = traced(lambda: build([S] * layers), partition).split
    assert tags_in(forward) == expected(
        *[(GATHER, parameter(W0, 0))] * gathers, (GATHER, parameter(W1, 1))
    )
    assert tags_in(backward) == expected(*SCATTERS, (SCATTER, gradient(W0, 0)))


# ---------------------------------------------------------------- what looks like a parameter


@both_partitions
def test_a_saved_activation_is_no_parameter(partition: str) -> None:
    """backward: saved hidden state -> all-gather, which structure takes for a parameter's."""
    graphs = traced(lambda: models.SavedActivation([S] * 2), partition)
    assert graphs.joint is not None
    gathers = [(GATHER, parameter(n, i)) for i, n in enumerate((W0, W1, "head.weight"))]
    scatters = [(SCATTER, gradient(n, i)) for i, n in enumerate((W0, W1, "head.weight"))]
    in_all = expected(*gathers, *scatters, (GATHER, OTHER), (GATHER, OTHER))
    assert tags_in(graphs.joint) == in_all
    forward, backward = graphs.split
    assert sorted(tags_in(forward) + tags_in(backward), key=repr) == in_all


def test_structure_alone_takes_a_saved_activation_for_a_parameter() -> None:
    """Why tags are needed: without them both gathers of the backward could be bucketed."""
    graphs = trace(
        lambda: models.SavedActivation([S] * 2), (models.BATCH, models.WIDTH), partition="default"
    )
    backward = graphs.split[1]
    traffic = {
        c.traffic.value for c in collect(backward.graph).collectives if c.kind.value == GATHER
    }
    assert "parameter" in traffic


@pytest.mark.parametrize("name", ["sequence parallel", "gathered buffer", "gathered input"])
def test_what_is_no_parameter_is_in_no_bucket(name: str) -> None:
    model = MODELS[name]
    for gm in traced(model.build, "min_cut").split:
        others = {
            c.start.name for c in collect(gm.graph).collectives if c.tag and c.tag.parameter is None
        }
        report = run_post_grad(gm.graph, OPTIONS)
        assert report is not None
        members = {m for bucket in report.buckets for m in bucket.members}
        assert len(members) == 2
        assert not others & members


# ---------------------------------------------------------------- without gradients


@pytest.mark.parametrize("name", ["fsdp", "quantised", "chained gathers", "gathered buffer"])
def test_an_inference_graph_is_tagged(name: str) -> None:
    """No joint graph, no backward: the pass runs on the only graph there is."""
    model = MODELS[name]
    graphs = trace(model.build, (models.BATCH, model.width), joint_pass=tag, train=False)
    assert graphs.joint is None and graphs.backward is None
    assert graphs.forward is not None
    assert tags_in(graphs.forward) == model.forward


# ---------------------------------------------------------------- copies


def _round_trip(gm: fx.GraphModule) -> fx.GraphModule:
    values = (n.meta.get("val") for n in gm.graph.nodes)
    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
    data = GraphPickler.dumps(gm, PicklerOptions(ops_filter=None))  # collectives too
    return GraphPickler.loads(data, mode)


@pytest.mark.parametrize("copied", [copy.deepcopy, _round_trip], ids=["deepcopy", "GraphPickler"])
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "quantised", "gathers recomputed"])
def test_copies_keep_tags(name: str, copied: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    for gm in traced(MODELS[name].build, "min_cut").split:
        before = [tag_of(n) for n in gm.graph.nodes]
        assert any(before)
        assert [tag_of(n) for n in copied(gm).graph.nodes] == before


# ---------------------------------------------------------------- AOT export


@pytest.mark.parametrize(
    "name", ["fsdp", "uneven shards", "bias registered first, used last", "hsdp", "quantised",
             "chained gathers", "gathered buffer", "gathered product", "sequence parallel"],
)  # fmt: skip
def test_descriptors_name_parameters(name: str) -> None:
    """As torch.compile's records do, without any."""
    model = MODELS[name]
    joint = export_joint(model.build, (models.BATCH, model.width))
    run_joint(joint.graph, OPTIONS)
    assert tags_in(joint) == sorted(model.forward + model.backward, key=repr)
    assert {t.source for t in _tags(joint)} == {TagSource.DESCRIPTORS}


# ---------------------------------------------------------------- through Inductor


@everything
def test_post_grad_passes_see_tags(model: Model) -> None:
    """Decompositions, joint passes, min-cut and post-grad passes stand in between."""
    graphs = trace_inductor(model.build, (models.BATCH, model.width), flags=FLAGS)
    forward, backward = graphs.split
    assert tags_in(forward) == model.forward
    assert tags_in(backward) == model.backward


def test_post_grad_passes_see_tags_of_an_inference_graph() -> None:
    model = MODELS["gathered buffer"]
    shape = (models.BATCH, model.width)
    graphs = trace_inductor(model.build, shape, flags=FLAGS, train=False)
    assert graphs.forward is not None and graphs.backward is None
    assert tags_in(graphs.forward) == model.forward


def test_flags_off_leave_no_tags() -> None:
    forward, backward = trace_inductor(
        MODELS["fsdp"].build, (models.BATCH, models.WIDTH), flags={}
    ).split
    assert not list(_tags(forward, backward))
