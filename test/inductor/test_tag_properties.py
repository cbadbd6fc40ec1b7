"""Tags on generated graphs: what they rule out, what they order, and how they are found.

A graph comes with tags as a joint pass leaves them ("marks", on most collectives), or with AOT
descriptors from which the pipeline makes them.  The blocks that built it know the truth.  Longer
runs: ``python tools/fuzz.py --lanes graphs --tags marks descriptors``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping

import pytest
import torch.fx as fx
from hypothesis import HealthCheck, Phase, given, settings
from torch._functorch._aot_autograd import descriptors as aot

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import plan_tags, tag_graph
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_topo_span
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    CollectiveTag,
    InputKind,
    RecordedInput,
    TagSource,
    Traffic,
)
from torch_patches.testing.graph_code import IMPORTS, builder_code
from torch_patches.testing.graph_variants import vary
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import (
    Case,
    all_options,
    build_case,
    cases,
    random_options,
    random_recipe,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")

property_test = settings(
    deadline=None,
    report_multiple_bugs=False,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TAGGED = ("marks", "descriptors")
described = cases(tags=("descriptors",))


# ---------------------------------------------------------------- what is done with tags


@settings(property_test, max_examples=40, derandomize=True)
@given(cases(tags=TAGGED), all_options())
def test_invariants_hold_with_tags(case: Case, options: Options) -> None:
    check_invariants(case.gm, case.description, options, trusted=True)


@settings(property_test, max_examples=8, print_blob=True)
@given(cases(tags=TAGGED), all_options())
def test_invariants_hold_with_tags_and_a_new_seed(case: Case, options: Options) -> None:
    check_invariants(case.gm, case.description, options, trusted=True)


@settings(property_test, max_examples=100, derandomize=True)
@given(cases(tags=TAGGED), all_options())
def test_buckets_obey_tags(case: Case, options: Options) -> None:
    for bucket in _buckets(case, options):
        _check_members(bucket)
        _check_payload_order(bucket)


def _buckets(case: Case, options: Options) -> tuple[Bucket, ...]:
    """Planned, not made: members are nodes of the graph as it was."""
    if case.recipe.tags == "descriptors":
        tag_graph(case.gm.graph)
    skeleton = collect(case.gm.graph)
    return plan_topo_span(skeleton, contract(case.gm.graph, skeleton), options).buckets


def _check_members(bucket: Bucket) -> None:
    """All tagged, none OTHER, all parameters or all gradients."""
    tags = [tag_of(member.start) for member in bucket.members]
    kinds = {None if tag is None else tag.traffic for tag in tags}
    assert kinds in ({Traffic.PARAMETER}, {Traffic.GRADIENT}), kinds


def _check_payload_order(bucket: Bucket) -> None:
    """That of the graph's inputs, whatever the order of use."""
    tags = [tag_of(bucket.members[place].start) for place in bucket.payload_order]
    indices = [tag.place for tag in tags if tag is not None and tag.place is not None]
    if len(indices) == len(tags):
        assert indices == sorted(indices)


def test_generated_graphs_can_break_these_rules() -> None:
    """Without their tags, collectives tagged OTHER or not at all get into buckets, mixed with
    others and in another order; and with them there is something left to merge."""
    members = broken_members = broken_orders = 0
    for seed in range(60):
        r = random.Random(seed)
        case, options = build_case(random_recipe(r, tags=("marks",))), random_options(r)
        members += sum(len(bucket.members) for bucket in _buckets(case, options))
        bare = build_case(random_recipe(random.Random(seed)))
        for bucket in _buckets(bare, options):
            starts = [_counterpart(case, member.start) for member in bucket.members]
            tags = [tag_of(start) for start in starts]
            broken_members += any(t is None or t.traffic is Traffic.OTHER for t in tags)
            in_order = [
                t.place for i in bucket.payload_order if (t := tags[i]) and t.place is not None
            ]
            broken_orders += in_order != sorted(in_order)
    assert members > 40
    assert broken_members > 4
    assert broken_orders > 4


def _counterpart(case: Case, node: fx.Node) -> fx.Node:
    return next(n for n in case.gm.graph.nodes if n.name == node.name)


# ---------------------------------------------------------------- how tags are found


@settings(property_test, max_examples=80, derandomize=True)
@given(described)
def test_tagging_finds_what_the_blocks_have_built(case: Case) -> None:
    found = {start.name: tag for start, tag in plan_tags(case.gm.graph).items()}
    for name, truth in case.truth.items():
        tag = found[name]
        assert (tag.traffic, tag.parameter) == (truth.traffic, truth.parameter), name


@settings(property_test, max_examples=40, derandomize=True)
@given(described)
def test_names_and_views_do_not_change_tags(case: Case) -> None:
    """Nor padding by nothing, nor the order of metadata."""
    variant = vary(case.gm, random.Random(len(case.gm.graph.nodes)))
    assert _by_collective(variant.graph) == _by_collective(case.gm.graph)


@settings(property_test, max_examples=40, derandomize=True)
@given(described)
def test_tagging_twice_is_tagging_once(case: Case) -> None:
    graph = case.gm.graph
    text = str(graph)
    tag_graph(graph)
    first = [tag_of(node) for node in graph.nodes]
    tag_graph(graph)
    assert [tag_of(node) for node in graph.nodes] == first
    assert str(graph) == text


@settings(property_test, max_examples=40, derandomize=True)
@given(described)
def test_dynamo_tells_what_descriptors_tell(case: Case) -> None:
    """Descriptors with numbers only, and records of Dynamo's inputs that name parameters."""
    described = _by_collective(case.gm.graph)
    plain = copy.deepcopy(case.gm)
    recorded = _numbered(plain.graph)
    told = _by_collective(plain.graph, recorded)
    assert {tag.source for tag in told.values()} <= {TagSource.DYNAMO}
    assert _without_source(told) == _without_source(described)


def _by_collective(
    graph: fx.Graph, recorded: tuple[RecordedInput, ...] = ()
) -> dict[int, CollectiveTag]:
    tags = plan_tags(graph, recorded)
    return {c.index: tags[c.start] for c in collect(graph).collectives}


def _without_source(tags: Mapping[int, CollectiveTag]) -> dict[int, tuple[object, ...]]:
    return {place: (tag.traffic, tag.parameter, tag.index) for place, tag in tags.items()}


def _numbered(graph: fx.Graph) -> tuple[RecordedInput, ...]:
    """Replaces names by numbers; what Dynamo would have recorded."""
    numbers: dict[str, int] = {}
    records: list[RecordedInput] = []

    def number(name: str) -> aot.PlainAOTInput:
        if name not in numbers:
            numbers[name] = len(records)
            index = sum(record.kind is InputKind.PARAMETER for record in records)
            records.append(RecordedInput(InputKind.PARAMETER, name, index))
        return aot.PlainAOTInput(numbers[name])

    for node in graph.find_nodes(op="placeholder"):
        old = node.meta["desc"]
        if isinstance(old, aot.ParamAOTInput):
            node.meta["desc"] = number(old.target)
        else:
            node.meta["desc"] = aot.PlainAOTInput(len(records))
            records.append(RecordedInput(InputKind.OTHER))
    output = graph.output_node()
    output.meta["desc"] = [
        aot.GradAOTOutput(number(d.grad_of.target)) if isinstance(d, aot.GradAOTOutput) else d
        for d in output.meta["desc"]
    ]
    return tuple(records)


# ---------------------------------------------------------------- what is generated


def test_tagged_graphs_cover_what_they_claim() -> None:
    """Of 60 graphs: parameters, gradients, neither, and collectives without a tag; and parameters
    used out of order."""
    traffic: set[Traffic | None] = set()
    reordered = 0
    for seed in range(60):
        case = build_case(random_recipe(random.Random(seed), tags=("marks",)))
        tags = [tag_of(c.start) for c in collect(case.gm.graph).collectives]
        traffic |= {None if tag is None else tag.traffic for tag in tags}
        indices = [tag.index for tag in tags if tag is not None and tag.index is not None]
        reordered += indices != sorted(indices)
    assert traffic == {None, *Traffic}
    assert reordered >= 20


def test_tags_leave_a_recipe_s_graph_as_it_is() -> None:
    recipe = random_recipe(random.Random(3))
    marked = random_recipe(random.Random(3), tags=("marks",))
    assert recipe.blocks == marked.blocks
    assert str(build_case(marked).gm.graph) == str(build_case(recipe).gm.graph)


@pytest.mark.parametrize("tags", TAGGED)
def test_builder_code_rebuilds_tags_and_descriptors(tags: str) -> None:
    for seed in range(8):
        gm = build_case(random_recipe(random.Random(seed), tags=(tags,))).gm
        names: dict[str, fx.GraphModule] = {}
        exec("\n".join([*IMPORTS, *builder_code(gm)]), names)
        for old, new in zip(gm.graph.nodes, names["gm"].graph.nodes, strict=True):
            assert tag_of(new) == tag_of(old)
            assert new.meta.get("desc") == old.meta.get("desc")
