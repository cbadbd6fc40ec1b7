"""Plans from modules: the names of wrapped and unwrapped models.

The texts of errors are in test_module_plan_errors.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlanError,
    parse_plan,
)
from torch_patches.module_plans import plan_from_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(2)
        self.output = nn.Linear(2, 4)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_module("unused", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer.norm(layer.attention(hidden))
        return self.output(self.norm(hidden) * self.scale)


def whole_plan(model) -> list:
    return [[model.tok_embeddings], *model.layers, [model.norm, model.output]]


WHOLE = [["tok_embeddings"], "layers.0", "layers.1", "layers.2", ["norm", "output"]]


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


# -- plain models ---------------------------------------------------------------------------------


def test_plan_of_modules_is_the_plan_of_their_names() -> None:
    model = Model()
    assert plan_from_modules(model, whole_plan(model)) == WHOLE


def test_every_parameter_of_the_result_is_in_the_bucket_of_its_module() -> None:
    model = Model()
    plan = parse_plan(plan_from_modules(model, whole_plan(model)))
    buckets = {name: plan.bucket_of(name) for name, _ in model.named_parameters()}
    assert buckets.pop("scale") is None
    assert set(buckets.values()) == {
        *("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm+output")
    }
    assert plan.check(list(dict(model.named_parameters())), [], "error") == []


def test_names_and_patterns_may_stand_beside_modules() -> None:
    model = Model()
    plan = [[model.tok_embeddings, "scale"], "layers.[0-2]", ("norm", model.output)]
    assert plan_from_modules(model, plan) == [
        *(["tok_embeddings", "scale"], "layers.[0-2]", ["norm", "output"])
    ]


def test_sub_blocks() -> None:
    model = Model()
    assert plan_from_modules(model, [layer.attention for layer in model.layers]) == [
        *("layers.0.attention", "layers.1.attention", "layers.2.attention")
    ]


def test_parameters() -> None:
    model = Model()
    assert plan_from_modules(model, [model.scale, [model.output.weight, model.output.bias]]) == [
        *("scale", ["output.weight", "output.bias"])
    ]


def test_module_dict_and_other_iterables() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleDict({"enc": Block(), "dec": Block()})
    values = model.blocks.values
    assert plan_from_modules(model, [*values()]) == ["blocks.enc", "blocks.dec"]
    assert plan_from_modules(model, values()) == ["blocks.enc", "blocks.dec"]
    assert plan_from_modules(model, [values()]) == [["blocks.enc", "blocks.dec"]]
    assert plan_from_modules(model, (b for b in values())) == ["blocks.enc", "blocks.dec"]
    assert plan_from_modules(model, [model.blocks]) == ["blocks"]


def test_slice_of_a_module_list_is_one_bucket() -> None:
    """A slice is a new ModuleList, which the model does not hold: its items are asked for."""
    model = Model()
    with pytest.raises(ModulePlanError, match="a ModuleList that is not in the model"):
        plan_from_modules(model, [model.layers[:2]])
    assert plan_from_modules(model, [[*model.layers[:2]]]) == [["layers.0", "layers.1"]]


def test_shared_module_and_tied_parameter_have_their_first_name() -> None:
    model = Model()
    model.again = model.layers[1]
    model.output.weight = model.tok_embeddings.weight
    assert plan_from_modules(model, [model.again, model.again.norm]) == [
        *("layers.1", "layers.1.norm")
    ]
    assert plan_from_modules(model, [model.output.weight]) == ["tok_embeddings.weight"]


def test_names_agree_with_torch() -> None:
    model = Model()
    model.again = model.layers[1]
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters())
    owned = {**modules, **parameters}
    assert plan_from_modules(model, list(owned.values())) == list(owned)


def test_module_that_holds_itself_ends() -> None:
    model = Model()
    model.layers[0].parent = model
    assert plan_from_modules(model, [model.layers[0].norm]) == ["layers.0.norm"]


@pytest.mark.parametrize("text", ["layers..0", "norm"])
def test_texts_are_checked_as_those_of_a_plan(text: str) -> None:
    """The second one repeats the name of a module in the plan."""
    model = Model()
    with pytest.raises(ModulePlanError, match=f"entry 1 of the module plan.*{text}"):
        plan_from_modules(model, [model.norm, text])


def test_mapping_is_no_list() -> None:
    """Its keys, which iterating gives, are names in the user's code but not in the model."""
    model = Model()
    with pytest.raises(ModulePlanError, match="has a dict"):
        plan_from_modules(model, [{"norm": model.output}])


def test_name_with_a_bracket_is_refused() -> None:
    model = nn.Module()
    model.heads = nn.ModuleDict({"a[0]": Block()})
    with pytest.raises(ModulePlanError, match="cannot be written in a plan"):
        plan_from_modules(model, [model.heads["a[0]"]])


# -- wrapped models -------------------------------------------------------------------------------


@pytest.fixture
def process_group():
    import torch.testing._internal.distributed.fake_pg  # registers "fake" before torch 2.12

    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_compiled_model() -> None:
    model = Model()
    compiled = torch.compile(model)
    assert plan_from_modules(compiled, whole_plan(compiled)) == WHOLE
    assert plan_from_modules(compiled, whole_plan(model)) == WHOLE
    assert plan_from_modules(model, whole_plan(compiled)) == WHOLE


def test_model_compiled_block_by_block() -> None:
    model = Model()
    blocks = list(model.layers)
    for number, block in enumerate(blocks):
        model.layers[number] = torch.compile(block)
    assert plan_from_modules(model, whole_plan(model)) == WHOLE
    assert plan_from_modules(model, blocks) == WHOLE[1:4]
    assert plan_from_modules(model, [model.layers[0].attention]) == ["layers.0.attention"]


def test_compiled_copy_of_a_block_that_the_model_holds_plain() -> None:
    model = Model()
    assert plan_from_modules(model, [torch.compile(model.layers[2])]) == ["layers.2"]


@pytest.mark.parametrize("outer", [lambda model: model, torch.compile])
def test_checkpoint_wrappers_inside_and_outside(outer) -> None:
    model = Model()
    model.layers[1] = torch.compile(checkpoint_wrapper(model.layers[1]))
    model.layers[2].attention = checkpoint_wrapper(model.layers[2].attention)
    wrapped = outer(checkpoint_wrapper(model))
    assert plan_from_modules(wrapped, whole_plan(model)) == WHOLE
    inside = [model.layers[1].norm, model.layers[2].attention.weight]
    assert plan_from_modules(wrapped, inside) == ["layers.1.norm", "layers.2.attention.weight"]


def test_ddp(process_group) -> None:
    model = Model()
    ddp = nn.parallel.DistributedDataParallel(model)
    for wrapped in (ddp, torch.compile(ddp)):
        assert plan_from_modules(wrapped, whole_plan(model)) == WHOLE
    model.module = nn.Linear(2, 2)  # a name like that of DDP's, in a module that is no DDP
    assert plan_from_modules(ddp, [model.module]) == ["module"]


def test_data_parallel() -> None:
    model = Model()
    assert plan_from_modules(nn.DataParallel(model), whole_plan(model)) == WHOLE


def test_fully_shard(process_group) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plan = [*whole_plan(model), model.scale]
    assert plan_from_modules(model, plan) == [*WHOLE, "scale"]


def test_fsdp1(process_group) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def shard(module: nn.Module) -> nn.Module:
        device = torch.device("cpu")
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=device)

    model = Model()
    for number, layer in enumerate(model.layers):
        model.layers[number] = shard(layer)
    wrapped = shard(model)
    assert plan_from_modules(wrapped, whole_plan(model)) == WHOLE
    inside = [model.layers[0].norm, model.layers[1].norm.weight]
    assert plan_from_modules(wrapped, inside) == ["layers.0.norm", "layers.1.norm.weight"]


def test_parametrized_parameter_has_its_own_name() -> None:
    model = Model()
    layer = model.layers[0].attention
    parametrize.register_parametrization(layer, "weight", Double())
    weights = layer.parametrizations.weight
    assert plan_from_modules(model, [weights.original]) == ["layers.0.attention.weight"]
    assert plan_from_modules(model, [weights]) == ["layers.0.attention.weight"]
    # The module that computes the weight keeps its path; it is below the layer as before.
    path = "layers.0.attention.parametrizations.weight.0"
    assert plan_from_modules(model, [weights[0]]) == [path]
    assert plan_from_modules(model, whole_plan(model)) == WHOLE


def test_parametrization_of_several_tensors() -> None:
    """Weight norm computes one weight from original0 and original1."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    model = nn.Sequential(layer)
    for name in ("original0", "original1"):
        owned = getattr(layer.parametrizations.weight, name)
        assert plan_from_modules(model, [owned]) == ["0.weight"]


def test_names_of_compiled_graphs_are_those_of_the_plan() -> None:
    """Dynamo's module stacks and parameter sources for a model with wrappers in between."""
    model = Model()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    paths: set[str] = set()

    def collect(graph_module, inputs):
        for node in graph_module.graph.nodes:
            for name, _ in node.meta.get("nn_module_stack", {}).values():
                paths.add(
                    name.replace("L['self'].", "").replace("_modules['", "").replace("']", "")
                )
        return graph_module.forward

    torch.compile(model, backend=collect)(torch.tensor([1, 2]))
    torch._dynamo.reset()
    plan = parse_plan(plan_from_modules(model, whole_plan(model)))
    found = {plan.bucket_of(path.replace("_checkpoint_wrapped_module.", "")) for path in paths}
    assert found - {None} == {
        *("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm+output")
    }, paths


def test_import_needs_no_inductor() -> None:
    """Alone, without the package around it, which installs hooks into the compiler."""
    folder = str(Path(torch_patches.__file__).parent)
    code = (
        "import sys, types\n"
        "package = types.ModuleType('torch_patches')\n"
        f"package.__path__ = [{folder!r}]\n"
        "sys.modules['torch_patches'] = package\n"
        "from torch_patches.module_plans import plan_from_modules\n"
        "print([name for name in sys.modules if name.startswith('torch._inductor')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
