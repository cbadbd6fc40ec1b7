"""Which entry of a plan a collective belongs to, what no entry covers, payload order, ``explain``.

``optimized`` compares the values of four ranks in every test.
"""

from __future__ import annotations

import ast
import copy
import logging
from typing import Any

import pytest
import torch
import torch.fx as fx

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import module_names
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK, collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import label_collectives
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlanError,
    parse_plan,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.testing.module_graphs import (
    SIZE,
    ModuleGraph,
    backward,
    forward,
    merged,
    optimized,
    refused,
    tag,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten


def payloads(gm: fx.GraphModule) -> list[list[str]]:
    """Inputs of each coalesced bucket, in payload order."""
    starts = [n for n in gm.graph.nodes if BUCKET_MARK in n.meta and "coalesced" in str(n.target)]
    return [[x.name for x in start.args[0]] for start in starts]


# ------------------------------------------------------------------- plans


def attention_and_mlp(layers: int) -> fx.GraphModule:
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for number in range(layers):
        for part in ("attention", "feed_forward"):
            with b.inside(f"layers.{number}.{part}"):
                h = b.layer(h)
    return b.output(h)


def test_parts_of_blocks() -> None:
    plan = ("layers.*.attention", "layers.*.feed_forward")
    _, report = optimized(attention_and_mlp(2), plan)
    parts = ("attention", "feed_forward")
    assert merged(report) == {f"AG layers.{i}.{p} dp x2": 1 for i in range(2) for p in parts}


def test_several_blocks_in_a_bucket() -> None:
    _, report = optimized(forward(4), (("layers.[0-1]",), ("layers.2", "layers.3")))
    assert merged(report) == {"AG layers.[0-1] dp x4": 1, "AG layers.2+layers.3 dp x4": 1}


def test_the_innermost_module_of_the_plan_counts() -> None:
    """The module comes before the name of the parameter: b's weight, used by a."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path in ("a", "b"):
        with b.inside(path):
            for number in range(2):
                weight = b.gather_and_wait(b.shard(), 2, "dp")
                tag(weight, f"b.{path}{number}")
                h = b.call(aten.mm, h, weight)
    _, report = optimized(b.output(h), ("a", "b"))
    assert merged(report) == {"AG a dp x2": 1, "AG b dp x2": 1}


def test_a_module_that_another_one_calls_counts_before_it() -> None:
    """layers.0 and layers.1 call one adapter, which is no part of them by name."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path in ("layers.0", "layers.1"):
        with b.inside(path):
            h = b.layer(h)
            weights = [b.gather_and_wait(b.shard(), 2, "dp") for _ in range(2)]
            for weight in weights:
                for node in (weight, weight.args[0]):
                    inner = {"adapter": ("L['self'].adapter", torch.nn.Module)}
                    node.meta["nn_module_stack"] = node.meta["nn_module_stack"] | inner
                h = b.call(aten.mm, h, weight)
    _, report = optimized(b.output(h), ("layers.*", "adapter"))
    assert merged(report) == {
        "AG layers.0 dp x2": 1,
        "AG layers.1 dp x2": 1,
        "AG adapter dp x4": 1,
    }


def test_a_head_inside_the_loss_is_found_by_its_name() -> None:
    """The loss uses output.weight, and no entry names the loss."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path, parameter in (("norm", "norm.weight"), ("loss", "output.weight")):
        with b.inside(path):
            weight = b.gather_and_wait(b.shard(), 2, "dp")
            tag(weight, parameter)
            h = b.call(aten.mm, h, weight)
    _, report = optimized(b.output(h), (("norm", "output"),))
    assert merged(report) == {"AG norm+output dp x2": 1}
    assert report.uncovered == ()


def test_wrappers_are_no_part_of_names() -> None:
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("_orig_mod.layers.0._checkpoint_wrapped_module"):
        first = b.gather_and_wait(b.shard(), 2, "dp")
        h = b.call(aten.mm, h, first)
    second = b.gather_and_wait(b.shard(), 2, "dp")
    h = b.call(aten.mm, h, second)
    tag(first, "unknown")
    tag(second, "_orig_mod.layers.0._fsdp_wrapped_module.parametrizations.weight.original")
    _, report = optimized(b.output(h), ("layers.0",))
    assert merged(report) == {"AG layers.0 dp x2": 1}


def test_tied_embeddings_are_gathered_where_they_are_used() -> None:
    """One parameter, two modules: the embedding's bucket and the output's, not a second visit."""
    b = ModuleGraph()
    h, tied = b.placeholder(SIZE, SIZE), b.shard()
    for path in ("tok_embeddings", "output"):
        with b.inside(path):
            h = b.use(b.use(h, tied), b.shard())
    _, report = optimized(b.output(h), ("tok_embeddings", "output"))
    assert merged(report) == {"AG tok_embeddings dp x2": 1, "AG output dp x2": 1}


@pytest.mark.parametrize("prefix", ["", "self."], ids=["path", "with_root"])
def test_names_with_and_without_the_root(prefix: str) -> None:
    _, report = optimized(forward(2), (f"{prefix}layers.*",))
    assert merged(report) == {f"AG {prefix}layers.{i} dp x2": 1 for i in range(2)}


def test_two_models_have_their_roots_in_front() -> None:
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for root in ("teacher", "student"):
        with b.inside("layers.0", root):
            h = b.layer(h)
    _, report = optimized(b.output(h), ("teacher.layers.*", "student.layers.*"))
    assert merged(report) == {f"AG {r}.layers.0 dp x2": 1 for r in ("teacher", "student")}


# ------------------------------------------------------------------- what no entry covers


def with_embedding() -> fx.GraphModule:
    """Two weights of the embedding, then two layers of two weights."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path in ("embed", "layers.0", "layers.1"):
        with b.inside(path):
            h = b.layer(h)
    return b.output(h)


@pytest.mark.parametrize(
    ("treatment", "more", "reasons", "words"),
    [
        ("bucket", {"AG - dp x2": 1}, {}, "bucketed as by 'topo_span'"),
        ("leave", {}, {"NOT_IN_PLAN": 2}, "left as they are"),
    ],
)
def test_uncovered(
    treatment: str, more: Any, reasons: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    module_names.warn_uncovered.cache_clear()
    with caplog.at_level(logging.WARNING, "torch_patches"):
        for _ in range(2):
            _, report = optimized(with_embedding(), module_uncovered=treatment)
    assert merged(report) == {"AG layers.0 dp x2": 1, "AG layers.1 dp x2": 1, **more}
    assert refused(report) == reasons
    assert report.uncovered == ("embed",)
    (record,) = caplog.records  # once for both runs
    message = record.getMessage()
    assert "collectives of embed;" in message
    assert words in message


def test_covered_graphs_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    module_names.warn_uncovered.cache_clear()
    with caplog.at_level(logging.WARNING, "torch_patches"):
        optimized(with_embedding(), ("embed", "layers.*"))
    assert caplog.records == []


@pytest.mark.parametrize("plan", [("layers.*",), None], ids=["modules", "transformer_block"])
def test_activations_belong_to_no_entry(plan: Any) -> None:
    """What the head gathers is no parameter: it is neither planned for nor missed in the plan."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path in ("layers.0", "layers.1"):
        with b.inside(path):
            h = b.layer(h)
    with b.inside("head"):
        halves = b.gather_and_wait(b.call(aten.slice.Tensor, h, 0, 0, 2), 2, "cp")
        h = b.call(aten.mm, h, halves)
    _, report = optimized(b.output(h), plan)
    assert report.module_plan == ("layers.*",)
    assert report.uncovered == ()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (("layer.*",), "matches no parameter and no module of this graph"),
        (("layers.*", "layers.0"), "both match"),
    ],
)
def test_a_wrong_plan_is_an_error(plan: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModulePlanError, match=message):
        optimized(forward(2), plan)


# ------------------------------------------------------------------- payload order, report


def test_payload_order_is_that_of_registration() -> None:
    """Used in the order 0 1 2, registered as 2 0 1."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        for number, index in enumerate((2, 0, 1)):
            weight = b.gather_and_wait(b.placeholder(2, SIZE, name=f"p{number}"), 2, "dp")
            tag(weight, f"layers.0.w{number}", index, place=number)
            h = b.call(aten.mm, h, weight)
    gm, _ = optimized(b.output(h))
    assert payloads(gm) == [["p1", "p2", "p0"]]


def test_payload_order_without_registration_is_that_of_inputs() -> None:
    """The last input is used first."""
    b = ModuleGraph()
    h, *shards = (
        b.placeholder(SIZE, SIZE),
        *(b.placeholder(2, SIZE, name=f"p{i}") for i in range(3)),
    )
    with b.inside("layers.0"):
        for shard in reversed(shards):
            h = b.use(h, shard)
    gm, _ = optimized(b.output(h))
    assert payloads(gm) == [["p0", "p1", "p2"]]


def pasted(report: Report) -> Any:
    """The plan in the text of ``explain``."""
    (line,) = [x for x in report.explain().splitlines() if x.startswith("module_bucket_plans = ")]
    return ast.literal_eval(line.partition(" = ")[2])


def test_the_plan_that_explain_shows_gives_the_same_buckets() -> None:
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path in ("embed", "layers.0", "layers.1", "norm", "output"):
        with b.inside(path):
            h = b.layer(h)
    gm = b.output(h)
    _, found = optimized(gm, None)
    plan = pasted(found)
    assert plan == [["embed"], "layers.*", ["norm", "output"]]
    _, again = optimized(gm, parse_plan(plan).entries)
    assert merged(again) == merged(found)
    assert merged(found) == {
        "AG embed dp x2": 1,
        "AG layers.0 dp x2": 1,
        "AG layers.1 dp x2": 1,
        "AG norm+output dp x4": 1,
    }
    assert pasted(again) == plan
    assert "2 repeated blocks: layers.* (2)" in found.explain()


def test_optimize_graph_takes_the_plan_as_a_list() -> None:
    gm = copy.deepcopy(forward(2))
    report = torch_patches.optimize_graph(
        gm, bucketing_mode="modules", module_bucket_plans=[["layers.0", "layers.1"]]
    )
    assert merged(report) == {"AG layers.0+layers.1 dp x4": 1}
    assert "layers.0+layers.1: all_gather of 4 on dp" in report.explain()


def test_a_second_run_changes_nothing() -> None:
    gm, _ = optimized(backward(3, regather=True))
    text = str(gm.graph)
    _, report = optimized(gm)
    assert report.buckets == ()
    again, _ = optimized(gm, ("layers.[0-2]",))  # another plan, for buckets that are there already
    assert str(gm.graph) == text
    assert sum("coalesced" in str(n.target) for n in again.graph.nodes) == 6


def test_blocks_of_a_joint_graph_are_in_the_order_of_its_forward() -> None:
    """Its gradients come last; the embedding has none."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    shards = {name: b.shard() for name in ("embed", "layers.0", "layers.1", "head")}
    for name, shard in shards.items():
        with b.inside(name):
            h = b.use(h, shard)
    b.mark = "fwd_nn_module_stack"
    gradients = []
    for name in ("head", "layers.1", "layers.0"):
        with b.inside(name):
            gradients.append(b.gradient(h, h))
            for node in (gradients[-1].args[0], gradients[-1]):
                node.meta["partitioner_tag"] = "is_backward"
    skeleton = collect(b.output(h, *gradients).graph)
    assert label_collectives(skeleton, Options("transformer_block")).entries == (
        ("embed",),
        "layers.*",
        ("head",),
    )
