"""What is generated for module bucketing: ``test_properties.py`` checks the invariants on it."""

from __future__ import annotations

import random

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import read_module_stacks
from torch_patches._inductor.fx_passes.comm_overlap.options import MODULE_MODES
from torch_patches.testing.graph_variants import vary
from torch_patches.testing.module_graphs import SIZE, ModuleGraph
from torch_patches.testing.strategies import TAGS, build_case, random_options, random_recipe

pytestmark = pytest.mark.usefixtures("as_on_gpu")
MARKS = {"nn_module_stack", "fwd_nn_module_stack"}


def test_generated_options_reach_module_buckets() -> None:
    """Of 200 examples both modes make buckets with a name, at each depth, and some are in no plan."""
    reached: set[tuple[str, int, int]] = set()
    uncovered = 0
    for seed in range(200):
        r = random.Random(seed)
        case, options = build_case(random_recipe(r, tags=TAGS)), random_options(r)
        if not options.reads_modules:
            continue
        report = pipeline.run_post_grad(case.gm.graph, options)
        if report is None:
            continue
        uncovered += bool(report.uncovered)
        if any(bucket.label for bucket in report.buckets):
            depths = (options.module_prefetch_depth, options.module_deferral_depth)
            reached.add((options.bucketing_mode, *depths))
    assert {mode for mode, _, _ in reached} == set(MODULE_MODES)
    assert {prefetch for _, prefetch, _ in reached} == {0, 1, 2}
    assert {deferral for _, _, deferral in reached} == {0, 1, 2}
    assert uncovered >= 5


def test_variants_keep_their_modules() -> None:
    """Starts that know their modules keep them, whatever views and names are around them."""
    known = 0
    for seed in range(20):
        gm = build_case(random_recipe(random.Random(seed))).gm
        variant = vary(gm, random.Random(seed))
        before, after = collect(gm.graph), collect(variant.graph)
        found, varied = read_module_stacks(before), read_module_stacks(after)
        for collective in before.collectives:
            if MARKS.isdisjoint(collective.start.meta):
                continue  # judged by what is around it: see the next test
            assert found[collective.index] == varied[collective.index]
            known += 1
    assert known >= 30


def test_the_order_of_users_decides_nothing() -> None:
    """AG -> W -> mm in layers.0, mm in layers.1; only the products know their modules."""

    def build(swapped: bool) -> list[str]:
        b = ModuleGraph()
        h, weight = b.placeholder(SIZE, SIZE), b.gather_and_wait(b.shard(), 2, "dp")
        for path in ("layers.0", "layers.1"):
            with b.inside(path):
                h = b.call(torch.ops.aten.mm.default, h, weight)
        gm = b.output(h)
        if swapped:  # the first user becomes the last one in the dict, and reads the same
            first = next(iter(weight.users))
            first.replace_input_with(weight, gm.graph.find_nodes(op="placeholder")[0])
            first.args = (first.args[0], weight)
        (stack,) = read_module_stacks(collect(gm.graph)).values()
        return [scope.path for scope in stack]

    assert build(swapped=True) == build(swapped=False)
