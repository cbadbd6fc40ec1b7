"""Repeated blocks of many kinds of models, and that every owner is in exactly one entry."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    ModuleScope,
    clean_parameter_name,
    read_module_stacks,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.blocks import (
    Owner,
    find_blocks,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Traffic
from torch_patches.captured import load_captured
from torch_patches.testing.gathers import Sharded
from torch_patches.testing.named_models import (
    LINEAR,
    MODELS,
    assert_covers,
    blocks_in,
    llama,
    owner_of,
)
from torch_patches.testing.traced import trace

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("known", ["stacks", "names"])
def test_plan_of_a_model(model: str, known: str) -> None:
    names, plan = MODELS[model]
    owners = [owner_of(n) if known == "stacks" else Owner((), n) for n in names]
    found = find_blocks(owners)
    assert found.plan == plan
    assert found.uncovered == ()
    assert_covers(found, owners)


@pytest.mark.parametrize("model", MODELS)
def test_backward_gives_the_plan_of_the_forward(model: str) -> None:
    names, plan = MODELS[model]
    owners = [owner_of(n) for n in reversed(names)]
    assert find_blocks(owners, backward=True).plan == plan


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"one_layer", "nothing_repeats"}))
def test_direction_is_seen_from_the_numbers_of_the_blocks(model: str) -> None:
    """Not of a single block, and not where nothing is numbered."""
    names, plan = MODELS[model]
    assert find_blocks([owner_of(n) for n in reversed(names)]).plan == plan


def test_graph_of_both_passes_counts_as_forward() -> None:
    names, plan = MODELS["encoder_decoder"]
    assert find_blocks([owner_of(n) for n in [*names, *reversed(names)]]).plan == plan


def test_several_microbatches() -> None:
    names, plan = MODELS["llama"]
    assert find_blocks([owner_of(n) for n in names * 3]).plan == plan
    assert find_blocks([owner_of(n) for n in names[::-1] * 3]).plan == plan


# -- any model ------------------------------------------------------------------------------------

COMPONENTS = ["a", "b", "0", "1", "2", "x1", "x2"]
PATHS = st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=5)
KINDS = st.sampled_from([None, "user.A", "user.B", LINEAR])


@st.composite
def any_owner(draw: Any) -> Owner:
    """Any stack of nested modules, and a parameter of its own, of another module, or none."""
    path = draw(PATHS)
    called = draw(st.sets(st.integers(1, len(path))))
    stack = tuple(ModuleScope(".".join(path[:n]), draw(KINDS)) for n in sorted(called))
    whose = draw(st.sampled_from(["own", "other", "none"]))
    if whose == "none":
        return Owner(stack, None)
    return Owner(stack, ".".join([*(path if whose == "own" else draw(PATHS)), "w"]))


@settings(max_examples=300, deadline=None)
@given(st.lists(any_owner(), max_size=30), st.sampled_from([None, False, True]))
def test_every_owner_is_in_exactly_one_entry(owners: list[Owner], backward: bool | None) -> None:
    found = find_blocks(owners, backward)
    assert_covers(found, owners)
    assert find_blocks(owners, backward) == found
    assert [s.entry for s in found.stacks if s.entry not in found.plan] == []
    assert all(owners[index].parameter is None for index in found.uncovered)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(MODELS)), st.randoms())
def test_two_models_side_by_side(one: str, other: str, rng: random.Random) -> None:
    """The plan of each is a part of the plan of both, in whatever way their owners alternate."""
    names = {"left": MODELS[one][0], "right": MODELS[other][0]}
    left, right = ([owner_of(f"{side}.{n}") for n in names[side]] for side in ("left", "right"))
    turns = [0] * len(left) + [1] * len(right)
    rng.shuffle(turns)
    sides = [iter(left), iter(right)]
    owners = [next(sides[turn]) for turn in turns]
    found = find_blocks(owners, backward=False)
    assert_covers(found, owners)
    real = blocks_in(found, owners)
    plain = {"toy_mlp", "toy_attributes", "nothing_repeats"}
    for side, model, part in (("left", one, left), ("right", other, right)):
        if model not in plain:
            alone = find_blocks(part, backward=False)
            assert blocks_in(alone, part) == {b for b in real if b.startswith(f"{side}.")}


def test_work_is_linear() -> None:
    """Steps of the interpreter for twice the layers: at most twice as many, times 1.1 (ARCHITECTURE,
    invariant 8)."""

    def steps(layers: int) -> int:
        owners = [owner_of(n) for n in ["tok_embeddings.weight", *llama(layers), "output.weight"]]
        count = 0

        def tracer(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += 1
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            find_blocks(owners)
        finally:
            sys.settrace(before)
        return count

    assert steps(80) <= 2.2 * steps(40)


# -- real models ----------------------------------------------------------------------------------


class GatheredLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(Sharded().stored_shape((8, 8))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ Sharded().read(self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = GatheredLinear(), GatheredLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.wq(x).relu())


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = Attention()
        self.experts = nn.ModuleList([Attention() for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        for expert in self.experts:
            x = x + expert(x)
        return x


class Model(nn.Module):
    """Embedding, dense and expert layers, a tower as nn.Sequential, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = GatheredLinear(), GatheredLinear()
        self.layers = nn.ModuleList([Block(0), Block(2), Block(2)])
        self.tower = nn.Sequential(Block(0), Block(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.tower(x))


def owners_in(graph: torch.fx.Graph) -> list[Owner]:
    return [Owner(stack, None) for stack in read_module_stacks(collect(graph)).values()]


def test_compiled_model() -> None:
    traced = trace(Model, (4, 8))
    forward, backward = traced.split
    assert traced.joint is not None
    for gm in (forward, backward, traced.joint):
        owners = owners_in(gm.graph)
        found = find_blocks(owners)
        assert found.plan == (("embed",), "layers.*", "tower.*", ("head",))
        assert_covers(found, owners)
        assert blocks_in(found, owners) == {
            "layers.0",
            "layers.1",
            "layers.2",
            "tower.0",
            "tower.1",
        }


def test_compiled_model_by_its_parameters_names() -> None:
    names = [clean_parameter_name(i.name) for i in trace(Model, (4, 8)).inputs if i.name]
    found = find_blocks([Owner((), name) for name in names])
    assert found.plan == (("embed",), "layers.*", "tower.*", ("head",))


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json.gz")), ids=lambda p: p.name.split(".")[0])
def test_captured_graphs(path: Path) -> None:
    """Every graph of a model gives one plan, though no class is known and a backward mixes blocks."""
    for name, gm in load_captured(path).graphs.items():
        skeleton = collect(gm.graph)
        stacks = read_module_stacks(skeleton)
        carrying = [c for c in skeleton.collectives if c.traffic is not Traffic.OTHER]
        if not carrying:
            assert (path.name, name) == ("llama_3l_ddp8.json.gz", "fw")  # all-reduces only
            continue
        owners = [Owner(stacks[c.index], None) for c in carrying]
        found = find_blocks(owners, backward=name == "bw" or None)
        assert found.plan == (("tok_embeddings",), "layers.*", ("norm", "output"))
        assert_covers(found, owners)
