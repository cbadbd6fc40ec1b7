"""The architecture's invariants over generated graphs.

Graphs come from ``torch_patches.testing.strategies``; ``check_invariants`` runs the pipeline on
copies of each and compares all ranks before and after.  A failure prints a program that shows it.
``test_invariant_checks.py`` proves that the check can fail.  Longer runs:
``python tools/fuzz.py --minutes 10``.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import HealthCheck, Phase, given, settings

from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.graph_code import builder_code
from torch_patches.testing.graph_context import SIZE_OF
from torch_patches.testing.invariants import Outcome
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import (
    UNMERGEABLE,
    Case,
    Description,
    all_options,
    build_case,
    cases,
    random_options,
    random_recipe,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
COPY = Options("topo_span", None, 100.0, bucket_mode="default")
COALESCED = dataclasses.replace(COPY, bucket_mode="coalesced")

# The check cuts a failing graph down by itself, better than hypothesis can from a seed.
property_test = settings(
    deadline=None,
    report_multiple_bugs=False,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def check(case: Case, options: Options, shrink: bool = True) -> Outcome:
    return check_invariants(case.gm, case.description, options, trusted=True, shrink=shrink)


def unscheduled(options: Options) -> Options:
    return dataclasses.replace(options, bucketing_mode="topo_span", enable_overlap_scheduling=False)


# ---------------------------------------------------------------- the property


@settings(property_test, max_examples=100, derandomize=True)
@given(cases(), all_options())
def test_invariants_hold(case: Case, options: Options) -> None:
    check(case, options)


@settings(property_test, max_examples=20, print_blob=True)
@given(cases(), all_options())
def test_invariants_hold_with_a_new_seed(case: Case, options: Options) -> None:
    check(case, options)


@settings(property_test, max_examples=30, derandomize=True)
@given(cases(UNMERGEABLE, most=8), all_options())
def test_a_graph_with_nothing_to_merge_stays_as_it_is(case: Case, options: Options) -> None:
    text = str(case.gm.graph)
    options = unscheduled(options)
    assert check(case, options).buckets == 0
    pipeline.run_post_grad(case.gm.graph, options)
    assert str(case.gm.graph) == text


# ---------------------------------------------------------------- what is generated


def test_generated_graphs_cover_what_they_claim() -> None:
    """Of 60 graphs some have every kind of collective, every fence and several buckets."""
    kinds: set[str] = set()
    fences: set[str] = set()
    members = 0
    for seed in range(60):
        r = random.Random(seed)
        gm = build_case(random_recipe(r)).gm
        skeleton = collect(gm.graph)
        kinds |= {c.kind.value for c in skeleton.collectives}
        fences |= {b.kind.name for b in skeleton.barriers}
        report = pipeline.run_post_grad(gm.graph, unscheduled(random_options(r)))
        members += sum(len(b.members) for b in report.buckets) if report else 0
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"}
    assert fences == {"EFFECT", "MUTATION", "RNG"}
    assert members >= 60


def test_a_recipe_always_gives_the_same_graph() -> None:
    recipe = random_recipe(random.Random(1))
    assert str(build_case(recipe).gm.graph) == str(build_case(recipe).gm.graph)


def test_builder_code_rebuilds_the_graph() -> None:
    """Also sizes and groups as inputs, coalesced collectives and custom ops."""
    for seed in range(12):
        gm = build_case(random_recipe(random.Random(seed))).gm
        program = "\n".join(builder_code(gm))
        names: dict[str, Any] = {}
        exec(_IMPORTS + program, names)
        assert [n.name for n in gm.graph.nodes if n.op == "placeholder"] == [
            n.name for n in names["gm"].graph.nodes if n.op == "placeholder"
        ]
        assert builder_code(names["gm"])[-1].count(",") == builder_code(gm)[-1].count(",")
        assert len(names["gm"].graph.nodes) == len(gm.graph.nodes)


_IMPORTS = """
import torch, operator
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch_patches.testing.graph_builder import GraphBuilder, Group
"""


# ---------------------------------------------------------------- found by these tests
#
# Each a graph that once broke an invariant, cut down.


def test_a_bucket_that_moves_away_brings_nothing_into_span() -> None:
    """Two scatters 5 working nodes apart stay apart under a bound of 4, in a second run too.

    AG(a)  RS(x)  AG(b)  W  W  W  RS(y)      the gathers merge and leave the scatters 4 apart
    """
    b = GraphBuilder()
    a, c = b.placeholder(2), b.placeholder(2)
    x, y = b.placeholder(4), b.placeholder(4)
    starts = [
        b.all_gather(a, 2, "dp"),
        b.reduce_scatter(x, "sum", 2, "dp"),
        b.all_gather(c, 2, "dp"),
    ]
    waits = [b.wait(start) for start in starts]
    gm = b.output(*waits, b.scatter_and_wait(y, "sum", 2, "dp"))
    options = dataclasses.replace(COALESCED, max_topo_span=4)
    assert check_invariants(gm, Description(), options).buckets == 1


@pytest.mark.parametrize("options", [COPY, COALESCED], ids=["copying", "coalesced"])
def test_a_bucketed_group_stays_the_primary_one(options: Options) -> None:
    """A bucket of two gathers is one launch, but its group still has the most parameters."""
    b = GraphBuilder()
    groups = ["world", "dp", "dp", "world"]
    gathered = [b.gather_and_wait(b.placeholder(2, 2), SIZE_OF[g], g) for g in groups]
    options = dataclasses.replace(options, primary_fsdp_group_only=True)
    assert check_invariants(b.output(*gathered), Description(), options).buckets == 1


def test_an_absorbed_cast_hands_on_its_place_behind_a_write() -> None:
    """p -> AG;  q.copy_(2 q);  q -> cast -> AG, where both casts are absorbed by the bucket"""
    b = GraphBuilder()
    p, q = b.placeholder(2, 2), b.placeholder(2, 2)
    first = b.gather_and_wait(b.call(aten._to_copy, p, dtype=torch.bfloat16), 2, "dp")
    b.call(aten.copy_, q, b.call(aten.mul.Tensor, q, 2.0))
    second = b.gather_and_wait(b.call(aten._to_copy, q, dtype=torch.bfloat16), 2, "dp")
    assert check_invariants(b.output(first, second), Description(), COPY).buckets == 1


def test_casts_on_both_sides_of_a_write_are_not_absorbed() -> None:
    """p -> cast -> AG;  p.add_(1);  p -> cast -> AG: one cast of the bucket would read one p"""
    b = GraphBuilder()
    p = b.placeholder(2, 2)
    first = b.gather_and_wait(b.call(aten._to_copy, p, dtype=torch.bfloat16), 2, "dp")
    b.call(aten.add_.Tensor, p, 1.0)
    second = b.gather_and_wait(b.call(aten._to_copy, p, dtype=torch.bfloat16), 2, "dp")
    assert check_invariants(b.output(first, second), Description(), COPY).buckets == 1


def _launches(gm: fx.GraphModule, options: Options) -> list[str]:
    pipeline.run_post_grad(gm.graph, options)
    return [f"{c.kind.value} {c.group}" for c in collect(gm.graph).collectives]


def test_an_alias_of_a_scale_leaves_the_launch_order() -> None:
    """RS -> W -> mul by an input, or by an alias of it: a gradient in both cases."""

    def build(aliased: bool) -> fx.GraphModule:
        b = GraphBuilder()
        x, y, scale = b.placeholder(4), b.placeholder(4), b.placeholder(())
        factor = b.call(aten.alias, scale) if aliased else scale
        first = b.call(aten.mul.Tensor, b.scatter_and_wait(x, "sum", 2, "dp"), factor)
        return b.output(first, b.scatter_and_wait(y, "sum", 2, "dp"))

    assert _launches(build(True), COPY) == _launches(build(False), COPY)


def test_an_alias_before_a_second_wait_leaves_the_launch_order() -> None:
    """RS(x) with two waits, a gather of another group, RS(neg(y)): hoist or sink, but always one.

    The search for the cheaper side must not depend on how many steps lead to a node.
    """

    def build(aliased: bool) -> fx.GraphModule:
        b = GraphBuilder()
        x, y, z = b.placeholder(4), b.placeholder(4), b.placeholder(4)
        start = b.reduce_scatter(x, "sum", 2, "dp")
        waits = [b.wait(start), b.wait(b.call(aten.alias, start) if aliased else start)]
        other = b.gather_and_wait(z, 2, "tp")
        last = b.scatter_and_wait(b.call(aten.neg, y), "sum", 2, "dp")
        return b.output(*waits, other, last)

    assert _launches(build(True), COPY) == _launches(build(False), COPY)
