"""Random collective graphs and options, for hypothesis and for long fuzzing runs.

A graph is drawn as a ``Recipe``: which blocks (see ``graph_blocks``), and how they interleave.  The
same recipe always gives the same graph.

    @given(cases(), all_options())
    def test_...(case, options):
        check_invariants(case.gm, case.description, options)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torch.fx as fx
from hypothesis import strategies as st
from torch._functorch._aot_autograd import descriptors as aot
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import (
    MODULE_MODES,
    ModulePlanEntries,
    Options,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag
from torch_patches.testing.estimations import ESTIMATIONS
from torch_patches.testing.graph_blocks import BLOCKS
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.graph_context import FSDP_GROUPS, GROUPS, WORLD_SIZE, Context
from torch_patches.testing.spmd_interpreter import random_inputs

#: Blocks whose collectives are never merged, whatever the options.
UNMERGEABLE = ("tensor_parallel", "expert_parallel", "broadcast", "compute", "in_place", "barrier",
               "random_numbers")  # fmt: skip


#: The last dtype is the one gathered; the others are cast to it first.
PARAMETER_DTYPES = (
    (torch.float32,), (torch.float32,), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.bfloat16,),
)  # fmt: skip

#: Modules that nodes are made in; those of ``layers`` share their classes.
_MODULES = ("embed", "layers.0", "layers.0.attention", "layers.1", "layers.1.attention", "layers.2", "norm")  # fmt: skip
_STACK_MARKS = ("nn_module_stack", "nn_module_stack", "fwd_nn_module_stack")


class Block(torch.nn.Module):
    """Stands for the class of the repeated modules."""


#: What a graph says of its collectives: nothing, tags of most of them, or descriptors of its inputs
#: and outputs, from which a pass makes the tags.
TAGS = ("none", "marks", "descriptors")


@dataclass(frozen=True)
class Description:
    """What running a graph needs besides the graph.

    Args:
        world_size: ranks that run it.
        groups: rank lists by group name, for ``SpmdInterpreter``.
        values: by place among the placeholders: what each rank is given, where random tensors do
            not serve (sizes, groups).
        integers: tensors hold small integers, exact in any order of addition.
        high, scale: of random values, as :func:`random_inputs` has them.
    """

    world_size: int = WORLD_SIZE
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=lambda: dict(GROUPS))
    values: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    integers: bool = False
    high: int = 2048
    scale: float = 1.0

    def inputs(self, gm: fx.GraphModule, seed: int = 0) -> list[list[Any]]:
        """``inputs[rank]``: new tensors each time, equal for equal seeds."""
        drawn = random_inputs(gm, self.world_size, seed, high=self.high, scale=self.scale)
        for rank, values in enumerate(drawn):
            for place, given in self.values.items():
                values[place] = given[rank]
            if self.integers:
                values[:] = [_integral(value) for value in values]
        return drawn


def _integral(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.mul_(4).round_() if is_float else value


@dataclass(frozen=True)
class Recipe:
    """Blocks with their seeds, and the seed of the interleaving and of the outputs' order.

    Args:
        tags: one of :data:`TAGS`.
        modules: nodes know which modules made them.
    """

    blocks: tuple[tuple[str, int], ...]
    schedule_seed: int = 0
    integers: bool = False
    tags: str = "none"
    modules: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """A graph with what it takes to run it, and where it came from.

    Args:
        truth: what the blocks know of their collectives, by the start's name; indices are those of
            "marks".
    """

    gm: fx.GraphModule
    description: Description
    recipe: Recipe
    truth: Mapping[str, CollectiveTag] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"build_case({self.recipe!r})"


def build_case(recipe: Recipe) -> Case:
    """The graph of a recipe; blocks are resumed in a random order, with a bias to go on."""
    r = Random(recipe.schedule_seed)
    builder = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
    context = Context(
        builder,
        builder.placeholder(4, 4, name="x"),
        fsdp_groups=r.choice(FSDP_GROUPS),
        dtypes=r.choice(PARAMETER_DTYPES),
    )
    if recipe.tags == "descriptors":  # an export with a named parameter has named all of them
        context.new_parameter(builder.placeholder(2, name="unused"))
    running = [BLOCKS[name][1](context, Random(seed)) for name, seed in recipe.blocks]
    stickiness, current, window = r.choice([0.0, 0.5, 0.9]), 0, r.choice([2, 4, 100])
    while running:
        if r.random() >= stickiness or current >= len(running):
            current = r.randrange(min(len(running), window))
        try:
            next(running[current])
        except StopIteration:
            running.pop(current)
    gm = builder.output(*_outputs(context, r))
    if recipe.tags == "marks":
        _write_tags(context, Random(recipe.schedule_seed))
    elif recipe.tags == "descriptors":
        _describe(gm.graph, context)
    if recipe.modules:
        _write_modules(gm.graph, Random(recipe.schedule_seed))
    places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    values = {places[node]: tuple(given) for node, given in context.values.items()}
    truth = {start.name: tag for start, tag in context.tags.items()}
    return Case(gm, Description(values=values, integers=recipe.integers), recipe, truth)


def _outputs(context: Context, r: Random) -> list[fx.Node | None]:
    """The outputs in any order, some twice, with Nones; sometimes an input among them."""
    outputs: list[fx.Node | None] = [context.x, *context.outputs]
    for value in list(outputs):
        if r.random() < 0.1:
            outputs.append(value)
    outputs += [None] * r.choice([0, 0, 1])
    if context.params and r.random() < 0.1:
        outputs.append(r.choice(context.params)[0])
    r.shuffle(outputs)
    return outputs


def _write_tags(context: Context, r: Random) -> None:
    """As a joint pass would have; collectives that appeared later have none."""
    for start, tag in context.tags.items():
        if r.random() < 0.9:
            waits = [user for user in start.users if "wait_tensor" in str(user.target)]
            for node in (start, *waits):
                node.meta[TAG_MARK] = tag


def _write_modules(graph: fx.Graph, r: Random) -> None:
    """Runs of nodes in one module, as a model makes them; some nodes know none, as those of passes.

    Blocks are interleaved, so modules come in any order and again; some graphs hold two models.
    """
    roots = r.choice([("self",), ("self",), ("self",), ("self", "other")])
    stay = r.choice([0.5, 0.8, 0.95])
    root, path = roots[0], _MODULES[0]
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if r.random() >= stay:
            root, path = r.choice(roots), r.choice(_MODULES)
        if r.random() < 0.8:
            node.meta[r.choice(_STACK_MARKS)] = _stack(f"L['{root}']", path)


def _stack(root: str, path: str) -> dict[str, tuple[str, type]]:
    """The root, then what holds the module, then the module, as Dynamo has it."""
    steps = path.split(".")
    stack: dict[str, tuple[str, type]] = {"0": (root, torch.nn.Module)}
    for depth in range(1, len(steps) + 1):
        kind = Block if depth == 2 else torch.nn.Module
        stack[str(depth)] = (".".join([root, *steps[:depth]]), kind)
    return stack


def _describe(graph: fx.Graph, context: Context) -> None:
    """Descriptors as AOT export has them: parameters by name, the rest by number."""
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        parameter = context.inputs.get(node)
        plain = aot.PlainAOTInput(number)
        node.meta["desc"] = plain if parameter is None else aot.ParamAOTInput(parameter.name)
    output = graph.output_node()
    output.meta["desc"] = [
        aot.GradAOTOutput(aot.ParamAOTInput(context.gradients[value].name))
        if value in context.gradients
        else aot.PlainAOTOutput(number)
        for number, value in enumerate(output.args[0])  # type: ignore[arg-type]
    ]


# ---------------------------------------------------------------- drawing


def random_recipe(
    r: Random,
    names: Sequence[str] | None = None,
    most: int = 12,
    tags: Sequence[str] = ("none",),
) -> Recipe:
    """Up to ``most`` blocks; a recipe favours a few kinds, so that there is something to merge."""
    population = list(names or BLOCKS)
    weights = [BLOCKS[name][0] for name in population]
    favoured = r.choices(population, weights, k=3)
    count = r.randint(1, most)
    drawn = [
        r.choice(favoured) if r.random() < 0.6 else r.choices(population, weights)[0]
        for _ in range(count)
    ]
    blocks = tuple((name, r.randrange(10_000)) for name in drawn)
    seed, integers = r.randrange(10_000), r.random() < 0.5
    told = tags[0] if len(tags) == 1 else r.choice(tags)
    return Recipe(blocks, seed, integers, told, modules=r.random() < 0.7)


CAPS_MB: tuple[Any, ...] = (
    None, None, None, 100.0, 100.0, 100.0, 1e-5, 5e-5, 1e-4, 2e-4, (5e-5, 1e-4), (2e-5, 100.0), (1e-4, 2e-5, 1e-3),
)  # fmt: skip


def random_options(r: Random) -> Options:
    """Caps of a few of the tiny tensors (16 to 256 bytes), or none; spans of a few nodes, or none."""
    scheduling = _random_scheduling(r) if r.random() < 0.6 else {}
    mode = "auto" if scheduling and r.random() < 0.6 else "topo_span"
    options = Options(
        bucketing_mode=mode,
        max_topo_span=r.choice([None, None, None, 0, 3, 8, 20, 40, 1500, 1500]),
        bucket_cap_mb=r.choice(CAPS_MB),
        primary_fsdp_group_only=r.random() < 0.2,
        bucket_mode=r.choice([None, "default", "default", "coalesced"]),
        **scheduling,
    )
    return replace(options, **_random_modules(r)) if r.random() < 0.35 else options


def _random_scheduling(r: Random) -> dict[str, Any]:
    """Options of a schedule, most of them bounds that bind in graphs of tiny tensors."""
    estimation = r.choice([None, *ESTIMATIONS])
    return {
        "enable_overlap_scheduling": True,
        "insert_overlap_deps": False,
        "max_memory_increase_gb": r.choice([None, None, 0.0, 1e-6]),
        "max_memory_increase_ratio": r.choice([None, 0.0, 0.1, 10.0]),
        "max_in_flight_gb": r.choice([None, None, 0.0, 3e-7]),
        "max_compute_pre_fetch": r.choice([None, 0, 2, 10]),
        "gpus_per_node": r.choice([1, 2, 8]),
        "compute_slowdown": r.choice([1.0, 1.2, 2.0]),
        "link_sharing": r.choice([0.0, 1.0]),
        "custom_runtime_estimation": estimation,
        "estimation_digest": None if estimation is None else estimation.uuid(),
    }


#: No two entries of a plan match one name, which would be an error of the user's; the last two name
#: parameters too.
PLANS: tuple[ModulePlanEntries, ...] = (
    ("layers.*",), ("layers.*",), ("layers.*", ("embed", "norm")), ("layers.*.attention", "layers.2"),
    (("layers.0", "layers.1"), "layers.2", "norm"), ("layers.[0-1]", "other.layers.*"),
    ("layers.*", ("p0", "p2", "p3")), (("p[0-4]",), ("p[5-9]",), "nowhere.*"),
)  # fmt: skip


def _random_modules(r: Random) -> dict[str, Any]:
    """Buckets of modules, placed by these or by the estimates."""
    mode = r.choice(MODULE_MODES)
    return {
        **_random_scheduling(r),
        "bucketing_mode": mode,
        "enable_overlap_scheduling": r.random() < 0.25,
        "module_bucket_plans": r.choice(PLANS) if mode == "modules" else None,
        "module_plan_unmatched": "warn",  # which modules a graph has is drawn too
        "module_prefetch_depth": r.choice([0, 1, 1, 2]),
        "module_deferral_depth": r.choice([0, 1, 1, 2]),
        "module_uncovered": r.choice(["bucket", "leave"]),
    }


#: Seeds rather than hypothesis's own generator, which draws few and repetitive graphs; what fails is
#: cut down by ``minimise`` instead of by hypothesis.
_generators = st.integers(0, 2**32 - 1).map(Random)


def recipes(
    names: Sequence[str] | None = None, most: int = 12, tags: Sequence[str] = ("none",)
) -> st.SearchStrategy[Recipe]:
    """Recipes of the named blocks, of all blocks by default."""
    return _generators.map(lambda r: random_recipe(r, names, most, tags))


def cases(
    names: Sequence[str] | None = None, most: int = 12, tags: Sequence[str] = ("none",)
) -> st.SearchStrategy[Case]:
    """Graphs of the named blocks, of all blocks by default."""
    return recipes(names, most, tags).map(build_case)


def all_options() -> st.SearchStrategy[Options]:
    """Options that bucket, in every combination of bounds and forms."""
    return _generators.map(random_options)
