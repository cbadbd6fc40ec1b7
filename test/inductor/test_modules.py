"""Which module made a collective: names as Dynamo writes them, and who is asked in a start's place.

The spellings of names were printed by torch 2.11, 2.13 and 2.14 for the models in here.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    ModuleScope,
    ModuleStackError,
    clean_parameter_name,
    read_module_stacks,
)
from torch_patches.testing.gathers import Sharded
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.traced import trace

aten = torch.ops.aten
LINEAR = "torch.nn.modules.linear.Linear"


def stack_meta(*entries: tuple[str, Any]) -> dict[int, tuple[str, Any]]:
    """As in ``node.meta``; the keys mean nothing."""
    return {1000 - place: entry for place, entry in enumerate(entries)}


def gathers(*metas: dict[str, Any]) -> fx.GraphModule:
    """One gathered parameter for each, whose start has the metadata."""
    b = GraphBuilder()
    waits = []
    for place, meta in enumerate(metas):
        start = b.all_gather(b.placeholder((4,), name=f"p{place}"), 2, "g")
        start.meta.update(meta)
        waits.append(b.wait(start))
    return b.output(*waits)


def stacks_of(gm: fx.GraphModule, fn: Any = None) -> list[tuple[ModuleScope, ...]]:
    return list(read_module_stacks(collect(gm.graph), fn).values())


def paths_of(gm: fx.GraphModule, fn: Any = None) -> list[list[str]]:
    return [[scope.path for scope in stack] for stack in stacks_of(gm, fn)]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("L['self'].layers.0", "layers.0"),
        ("L['self']._modules['layers']._modules['0'].attention", "layers.0.attention"),
        ("L['self'].layers['0']", "layers.0"),
        ("L['self'].layers[0]", "layers.0"),
        ('L["self"].layers["a b"]', "layers.a_b"),
        ("L['self'].towers.text-1.proj", "towers.text-1.proj"),
        ("L['fn'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("L['fn'].__self__.layers.0", "layers.0"),
        ("L['fn'].__defaults__[0].layers.0", "layers.0"),
        ("L['model'].layers.0", "layers.0"),
        ("G['model'].layers.0", "layers.0"),
        ("layers.0", "layers.0"),
        ("_orig_mod.layers.0", "layers.0"),
        ("L['s'].ck.0.__dict__['_modules']['_checkpoint_wrapped_module'].attention", "ck.0.attention"),
        ("L['s'].ck.0._checkpoint_wrapped_module.attention", "ck.0.attention"),
        ("L['self']._fsdp_wrapped_module.layers.0", "layers.0"),
        # what a plan would read as a pattern
        ("L['self'].d.a*[1]", "d.a_.1"),
    ],
)  # fmt: skip
def test_module_name(name: str, path: str) -> None:
    assert paths_of(gathers({"nn_module_stack": stack_meta((name, "x.Y"))})) == [[path]]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("layers.3.attention.wq.weight", "layers.3.attention.wq.weight"),
        ("_orig_mod.layers.3._checkpoint_wrapped_module.wq.weight", "layers.3.wq.weight"),
        ("_fsdp_wrapped_module.norm.bias", "norm.bias"),
        ("layers.0.wq.parametrizations.weight.original", "layers.0.wq.weight"),
        ("layers.0.wq.parametrizations.weight.original1", "layers.0.wq.weight"),
        ("L['self']._modules['layers']._modules['0']._parameters['w']", "layers.0.w"),
        (
            "L['s']._modules['wq']._modules['parametrizations']._modules['weight']"
            "._parameters['original']",
            "wq.weight",
        ),
        ("pos_embed", "pos_embed"),
    ],
)
def test_parameter_name(name: str, clean: str) -> None:
    assert clean_parameter_name(name) == clean


# -- where a stack is read ------------------------------------------------------------------------


def test_class_is_its_qualified_name_and_the_base_class_is_unknown() -> None:
    """Captured graphs have ``torch.nn.Module`` in every place."""
    meta = stack_meta(
        ("L['self'].a", nn.Linear), ("L['self'].a.b", "x.Y"), ("L['self'].a.b.c", nn.Module)
    )
    (stack,) = stacks_of(gathers({"nn_module_stack": meta}))
    assert [scope.kind for scope in stack] == [LINEAR, "x.Y", None]


def test_order_of_sources() -> None:
    forward = {"nn_module_stack": stack_meta(("L['s'].a", None))}
    backward = {"fwd_nn_module_stack": stack_meta(("L['s'].b", None))}
    custom = {"custom": {"module_fqn": "layers.0.wq"}}
    gm = gathers(forward | backward | custom, backward | custom, custom, {"custom": {"x": 1}})
    assert paths_of(gm) == [["a"], ["b"], ["layers.0.wq"], []]


def test_wrapper_and_its_module_are_one_of_the_inner_class() -> None:
    meta = stack_meta(("L['s'].ck.0", "CheckpointWrapper"), ("L['s'].ck.0._checkpoint_wrapped_module", "Block"))  # fmt: skip
    assert stacks_of(gathers({"nn_module_stack": meta})) == [(ModuleScope("ck.0", "Block"),)]


def test_function_is_asked_first_for_every_node_around() -> None:
    """It knows only the wait; the start's metadata says something else."""
    gm = gathers({"nn_module_stack": stack_meta(("L['s'].other", None))})
    fn = lambda node: [("L['self'].mine", nn.Linear)] if "wait" in node.name else []  # noqa: E731
    assert stacks_of(gm, fn) == [(ModuleScope("mine", LINEAR),)]
    assert paths_of(gm, lambda node: []) == [["other"]]


@pytest.mark.parametrize(
    "answer", [None, "layers.0", [1], [("a",)], [("a", 3)], [(1, nn.Linear)], {"a": nn.Linear}]
)
def test_wrong_answer_of_the_function_is_an_error(answer: Any) -> None:
    with pytest.raises(ModuleStackError, match="module_stack_fn must return"):
        stacks_of(gathers({}), lambda node: answer)


def test_raising_function_is_an_error_with_its_text() -> None:
    def fail(node: fx.Node) -> Any:
        raise KeyError("no such module")

    with pytest.raises(ModuleStackError, match=r"module_stack_fn raised KeyError.*no such module"):
        stacks_of(gathers({}), fail)


# -- around a start that knows nothing ------------------------------------------------------------


def named(node: fx.Node, path: str) -> fx.Node:
    node.meta["nn_module_stack"] = stack_meta((f"L['self'].{path}", None))
    return node


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("start wait prepare view user", "start"),
        ("wait prepare view user", "wait"),
        ("prepare view user", "prepare"),
        ("view user", "user"),  # another rank may have no such view
        ("user", "user"),
        ("", None),
    ],
)
def test_who_is_asked_for_a_gather(known: str, expected: str | None) -> None:
    """p -> cast -> gather -> wait -> view -> mm"""
    b = GraphBuilder()
    cast = b.call(aten._to_copy.default, b.placeholder((4, 8)), dtype=torch.bfloat16)
    start = b.all_gather(cast, 2, "g")
    wait = b.wait(start)
    view = b.call(aten.view.default, wait, [8, 8])
    user = b.call(aten.mm.default, view, view)
    nodes = {"start": start, "wait": wait, "prepare": cast, "view": view, "user": user}
    for name in known.split():
        named(nodes[name], name)
    assert paths_of(b.output(user)) == [[expected] if expected else []]


def test_what_others_read_too_does_not_speak_for_a_gather() -> None:
    """The cast is of another module, which shares it; the gather's user speaks."""
    b = GraphBuilder()
    cast = named(b.call(aten._to_copy.default, b.placeholder((4, 8)), dtype=torch.bfloat16), "a")
    other = b.call(aten.relu.default, cast)
    user = named(b.call(aten.relu.default, b.wait(b.all_gather(cast, 2, "g"))), "b")
    assert paths_of(b.output(other, user)) == [["b"]]


def test_what_made_a_gradient_speaks_for_its_reduction() -> None:
    """mm -> view -> reduce-scatter -> all-reduce; what comes behind is not asked first."""
    b = GraphBuilder()
    x = b.placeholder((8, 8))
    gradient = named(b.call(aten.mm.default, x, x), "made")
    view = b.call(aten.view.default, gradient, [8, 8])
    shard = b.scatter_and_wait(view, "sum", 2, "g")
    reduced = b.reduce_and_wait(shard, "sum", "h")
    after = named(b.call(aten.view.default, reduced, [4, 8]), "behind")
    assert paths_of(b.output(after, gradient)) == [["made"], ["made"]]


def test_an_input_beside_what_made_a_gradient_does_not_end_the_search() -> None:
    """A stored gradient + mm -> all-reduce."""
    b = GraphBuilder()
    stored, x = b.placeholder((8, 8)), b.placeholder((8, 8))
    made = named(b.call(aten.mm.default, x, x), "made")
    total = b.call(aten.add.Tensor, stored, made)
    assert paths_of(b.output(b.reduce_and_wait(total, "sum", "g"))) == [["made"]]


def test_inputs_beside_what_made_a_gradient_do_not_count() -> None:
    """More of them than the search looks at nodes."""
    b = GraphBuilder()
    x = b.placeholder((8, 8))
    stored = [b.placeholder((8, 8)) for _ in range(40)]
    made = named(b.call(aten.mm.default, x, x), "made")
    joined = b.call(aten.cat.default, [*stored, made])
    assert paths_of(b.output(b.reduce_and_wait(joined, "sum", "g"))) == [["made"]]


@pytest.mark.parametrize(("between", "expected"), [(10, ["far"]), (40, [])])
def test_search_ends_after_some_nodes(between: int, expected: list[str]) -> None:
    """mm -> neg -> ... -> neg -> all-reduce: long chains would make the search quadratic."""
    b = GraphBuilder()
    x = b.placeholder((8, 8))
    node = named(b.call(aten.mm.default, x, x), "far")
    for _ in range(between):
        node = b.call(aten.neg.default, node)
    assert paths_of(b.output(b.reduce_and_wait(node, "sum", "g"))) == [expected]


def gradient_of_two(rank: str) -> fx.GraphModule:
    """neg -> [view or pad] -> add -> all-reduce, beside it mm -> add: who is nearer?"""
    b = GraphBuilder()
    x = b.placeholder((8, 8))
    far = named(b.call(aten.neg.default, x), "first")
    near = named(b.call(aten.mm.default, x, x), "second")
    if rank == "view":
        far = b.call(aten.view.default, far, [8, 8])
    elif rank == "pad":
        far = b.call(aten.constant_pad_nd.default, far, [0, 0])
    elif rank == "zeros":
        far = b.call(aten.cat.default, [far, b.call(aten.new_zeros.default, far, [0, 8])])
    total = b.call(aten.add.Tensor, far, near)
    return b.output(b.reduce_and_wait(total, "sum", "g"))


@pytest.mark.parametrize("rank", ["plain", "view", "pad", "zeros"])
def test_what_only_some_ranks_have_is_no_step_of_the_way(rank: str) -> None:
    assert paths_of(gradient_of_two(rank)) == [["first"]]


@pytest.mark.parametrize("rank", ["plain", "view", "pad"])
def test_what_two_gathers_share_speaks_for_neither_padded_or_not(rank: str) -> None:
    b = GraphBuilder()
    payload = named(b.call(aten._to_copy.default, b.placeholder((4, 8)), dtype=torch.half), "a")
    if rank == "view":
        payload = b.call(aten.view.default, payload, [4, 8])
    elif rank == "pad":
        payload = b.call(aten.constant_pad_nd.default, payload, [0, 0])
    assert paths_of(b.output(*(b.gather_and_wait(payload, 2, "g") for _ in range(2)))) == [[], []]


# -- roots ----------------------------------------------------------------------------------------


def rooted(*names: str) -> list[list[str]]:
    return paths_of(gathers(*({"nn_module_stack": stack_meta((n, None))} for n in names)))


def test_two_roots_are_not_one() -> None:
    assert rooted("L['encoder'].layers.0", "L['decoder'].layers.0") == [
        ["encoder.layers.0"],
        ["decoder.layers.0"],
    ]
    assert rooted("L['f'].__closure__[0].cell_contents.a", "L['f'].__closure__[1].cell_contents.a") == [["f_0.a"], ["f_1.a"]]  # fmt: skip


def test_two_roots_of_equal_names_are_told_apart_by_their_scope() -> None:
    assert rooted("L['m'].a", "G['m'].a") == [["L_m.a"], ["G_m.a"]]


def test_root_itself_is_a_module_only_among_others() -> None:
    one = stack_meta(("G['e']", "M"), ("G['e'].emb", LINEAR))
    other = stack_meta(("G['d']", "M"))
    assert paths_of(gathers({"nn_module_stack": one})) == [["emb"]]
    both = gathers({"nn_module_stack": one}, {"nn_module_stack": other})
    assert paths_of(both) == [["e", "e.emb"], ["d"]]


@pytest.mark.parametrize(("child", "loss"), [("head", "loss"), ("loss", "L_loss")])
def test_loss_beside_the_model_leaves_the_models_names_alone(child: str, loss: str) -> None:
    """The loss owns no parameter; its collective is of activations.  Its root may have the name of a
    child of the model."""
    b = GraphBuilder()
    start = named(b.all_gather(b.placeholder((4,)), 2, "g"), "layers.0")
    second = named(b.all_gather(b.placeholder((4,)), 2, "g"), child)
    hidden = b.call(aten.mul.Tensor, b.wait(start), b.wait(second))
    partial = b.all_reduce(hidden, "sum", "g")
    partial.meta["nn_module_stack"] = stack_meta(("L['loss']", "Loss"))
    result = b.call(aten.relu.default, b.wait(partial))
    assert paths_of(b.output(result)) == [["layers.0"], [child], [loss]]


# -- real models ----------------------------------------------------------------------------------


class Gathered(nn.Module):
    """As SimpleFSDP does it: a parametrization gathers what is stored."""

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return Sharded().read(stored)


def stored_linear() -> nn.Linear:
    linear = nn.Linear(8, 8, bias=False)
    linear.weight = nn.Parameter(torch.zeros(Sharded().stored_shape((8, 8))))
    parametrize.register_parametrization(linear, "weight", Gathered(), unsafe=True)
    return linear


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(stored_linear(), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = stored_linear()
        self.layers = nn.ModuleList([Block(), checkpoint_wrapper(Block())])
        self.towers = nn.ModuleDict({"0": Block(), "text": Block()})
        self.tail = nn.Sequential(Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        for tower in self.towers.values():
            x = tower(x)
        return self.tail(x)


def innermost(stacks: Sequence[tuple[ModuleScope, ...]]) -> list[str]:
    return [stack[-1].path for stack in stacks]


def test_compiled_model_of_every_container() -> None:
    forward, backward = trace(Model, (4, 8)).split
    names = [
        "embed",
        "layers.0.mlp.0",
        "layers.1.mlp.0",
        "towers.0.mlp.0",
        "towers.text.mlp.0",
        "tail.0.mlp.0",
    ]
    gathered = stacks_of(forward)
    assert innermost(gathered)[: len(names)] == names
    block = f"{__name__}.Block"
    assert gathered[1][0] == ModuleScope("layers.0", block)
    assert gathered[2][0] == ModuleScope("layers.1", block)
    skeleton = collect(backward.graph)
    stacks = read_module_stacks(skeleton)
    scatters = [stacks[c.index] for c in skeleton.collectives if c.kind.value == "reduce_scatter"]
    assert innermost(scatters) == names[::-1]


def test_compiled_function_of_two_models() -> None:
    def build() -> Any:
        student, teacher = Block(), Block()
        return lambda x: student(x) + teacher(x)

    stacks = stacks_of(trace(build, (4, 8)).split[0])
    first = innermost(stacks)
    assert len(first) == 2 and len({path.split(".")[0] for path in first}) == 2
    assert all(path.endswith(".mlp.0") for path in first)
