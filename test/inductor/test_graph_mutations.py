"""What fuzzing is made of: pieces of graphs, mutations, and random flags."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches.flags import FLAGS, FlagError
from torch_patches.testing import flag_draws
from torch_patches.testing.captured_cases import CapturedGraphs
from torch_patches.testing.flag_draws import random_flags, read_flags
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.graph_context import GROUPS
from torch_patches.testing.graph_cuts import stretch
from torch_patches.testing.graph_mutations import MUTATIONS, mutate, retarget, shrink
from torch_patches.testing.invariant_values import execute
from torch_patches.testing.strategies import Case, Description, build_case, random_recipe

aten = torch.ops.aten
DATA = Path(__file__).parents[1] / "data"


def cases(count: int) -> list[Case]:
    return [build_case(random_recipe(random.Random(seed), most=8)) for seed in range(count)]


# ---------------------------------------------------------------- mutations


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_makes_other_programs_that_run(name: str, monkeypatch: Any) -> None:
    """Of 12 graphs some are changed, and of what is changed at least half can be run."""
    monkeypatch.setattr("torch_patches.testing.graph_mutations.MUTATIONS", {name: MUTATIONS[name]})
    changed = legal = 0
    for seed, case in enumerate(cases(12)):
        text = str(case.gm.graph)
        mutated, _ = mutate(case.gm, GROUPS, random.Random(seed))
        assert str(case.gm.graph) == text
        if _described(mutated) == _described(case.gm):
            continue
        changed += 1
        try:
            execute(mutated, case.description)
            legal += 1
        except Exception as error:
            print(error)
    assert changed >= 3
    assert 2 * legal >= changed


def _described(gm: fx.GraphModule) -> str:
    """With the order of nodes, and with their shapes."""
    return "\n".join(f"{n.format_node()} {n.meta.get('val')}" for n in gm.graph.nodes)


def test_mutations_are_drawn_from_the_generator_alone() -> None:
    case = cases(1)[0]
    one, other = (mutate(case.gm, GROUPS, random.Random(7)) for _ in range(2))
    assert one[1] == other[1]
    assert _described(one[0]) == _described(other[0])


def test_a_retargeted_collective_has_a_group_of_as_many_ranks() -> None:
    b = GraphBuilder()
    gm = b.output(b.gather_and_wait(b.placeholder(2), 2, "dp"))
    found = Counter[str]()
    for seed in range(20):
        retarget(gm, GROUPS, random.Random(seed))
        found[collect(gm.graph).collectives[0].group] += 1
    assert set(found) == {"dp", "tp", "fsdp_tp"}


def test_shrinking_works_shapes_out_anew() -> None:
    b = GraphBuilder()
    x = b.placeholder(6, 5)
    gm = b.output(b.call(aten.reshape, b.call(aten.sin, x), [30]))
    shapes = set()
    for seed in range(20):
        shrink(gm, GROUPS, random.Random(seed))
        node = next(n for n in gm.graph.nodes if "reshape" in str(n.target))
        shapes.add(node.meta["val"].numel())
    assert min(shapes) == 1


# ---------------------------------------------------------------- pieces of captures


def test_a_piece_of_a_capture_runs() -> None:
    """On all eight ranks, with groups that the capture does not have besides."""
    captured = CapturedGraphs([DATA / "llama_2l_hsdp2x4.json.gz"])
    sizes = []
    for seed in range(6):
        gm, description = captured.draw(random.Random(seed))
        assert collect(gm.graph).collectives
        results = execute(gm, description).results
        assert len(results) == 8
        sizes.append(len(gm.graph.nodes))
    assert {"near2", "far4", "1", "5"} <= set(description.groups)
    assert min(sizes) < 60


def test_a_piece_leaves_out_what_is_waited_for_outside() -> None:
    """x -> AG -> | W -> sin;  AG(y) -> W -> neg |: the cut is between the first start and its wait"""
    b = GraphBuilder()
    x, y = b.placeholder(2), b.placeholder(2)
    first = b.all_gather(x, 2, "dp")
    second = b.gather_and_wait(y, 2, "dp")
    used = b.call(aten.sin, b.wait(first))
    gm = b.output(b.call(aten.add.Tensor, used, b.call(aten.neg, second)))
    piece = stretch(gm, 1, 6)
    assert [c.start.name for c in collect(piece.graph).collectives] == [second.args[0].name]
    execute(piece, Description())


def test_a_constant_without_data_becomes_an_input_of_a_piece() -> None:
    """A capture does not have its data; kept inside, all that is made of it would be without."""
    b = GraphBuilder()
    x = b.placeholder(2)
    with b.fake_mode:
        constant = torch.ones(2)
    root = b.graph.owning_module = torch.nn.Module()
    root.constant = constant
    held = b.graph.get_attr("constant")
    held.meta["val"] = constant
    gathered = b.gather_and_wait(b.call(aten.add.Tensor, x, held), 2, "dp")
    b.graph.output((b.call(aten.neg, gathered),))
    gm = fx.GraphModule(root, b.graph)
    piece = stretch(gm, 0, 4)
    assert "get_attr" not in {node.op for node in piece.graph.nodes}
    assert len(piece.graph.find_nodes(op="placeholder")) == 2
    for result in execute(piece, Description()).results:
        assert not any(isinstance(value, FakeTensor) for value in pytree.tree_leaves(result))


# ---------------------------------------------------------------- flags


def test_every_flag_is_drawn_and_has_values_that_are_refused() -> None:
    drawn = {
        name for seed in range(400) for name in random_flags(random.Random(seed), Description())
    }
    names = {flag.name for flag in FLAGS}
    assert drawn == names
    assert set(flag_draws._BAD) == names


def test_drawn_flags_are_accepted() -> None:
    modes = Counter[str]()
    for seed in range(200):
        r = random.Random(seed)
        options = read_flags(random_flags(r, Description()), Description(), r)
        modes[options.bucketing_mode] += 1
    assert min(modes.values()) > 10
    assert len(modes) == 5


@pytest.mark.parametrize("name", [flag.name for flag in FLAGS])
def test_bad_values_are_refused_by_name(name: str) -> None:
    for value in flag_draws._BAD[name]:
        with pytest.raises(FlagError) as caught:
            config.options_from_arguments({name: value}, "optimize_graph")
        assert f"optimize_graph({name}=...): {value!r}" in str(caught.value)
