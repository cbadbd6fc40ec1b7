"""Names, kinds and registration order of a compiled model's inputs, as Dynamo knows them."""

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from torch_patches._inductor.fx_passes.comm_overlap import notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import (
    record_inputs,
    recorded_from_names,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import InputKind, RecordedInput

PARAMETER, BUFFER, OTHER = InputKind.PARAMETER, InputKind.BUFFER, InputKind.OTHER


def recorded(function: Any, *args: Any) -> list[RecordedInput]:
    """What is recorded for every graph of one call."""
    records: list[RecordedInput] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        records.extend(record_inputs(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return records


def parameters(records: list[RecordedInput]) -> dict[str, int | None]:
    return {r.name: r.index for r in records if r.kind is PARAMETER}


class Block(nn.Module):
    """Uses its parameters in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(3))
        self.early = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.early) * self.scale + self.late


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.extra = nn.ParameterDict({"bias": nn.Parameter(torch.ones(3))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.extra["bias"]
        for block in self.blocks:
            x = block(x)
        return x


def test_index_is_the_order_of_registration_not_of_use() -> None:
    records = recorded(Model(), torch.ones(3))
    assert parameters(records) == {
        "blocks.0.late": 0,
        "blocks.0.early": 1,
        "blocks.1.late": 2,
        "blocks.1.early": 3,
        "extra.bias": 4,
    }
    assert [r.name for r in records if r.kind is BUFFER] == ["blocks.0.scale", "blocks.1.scale"]
    assert [r for r in records if r.kind is OTHER] == [RecordedInput(OTHER)]


def test_model_inside_a_trainer_or_a_closure() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Block()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    trainer = Trainer()
    expected = {"late": 0, "early": 1}
    assert parameters(recorded(trainer.step, torch.ones(3))) == expected
    assert parameters(recorded(lambda x: trainer.model(x), torch.ones(3))) == expected


def test_two_models_have_one_order() -> None:
    first, second = Block(), Block()
    records = recorded(lambda x: second(first(x)), torch.ones(3))
    assert sorted(r.index for r in records if r.kind is PARAMETER) == [0, 1, 2, 3]


def test_tied_parameter_has_the_name_it_was_registered_under_first() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(3, 3, bias=False)
            self.head = nn.Linear(3, 3, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    assert parameters(recorded(Tied(), torch.ones(3))) == {"embedding.weight": 0}


def test_model_behind_a_property() -> None:
    class Holder:
        def __init__(self) -> None:
            self._model = Block()

        @property
        def model(self) -> nn.Module:
            return self._model

    holder = Holder()
    records = recorded(lambda x: holder.model(x), torch.ones(3))
    assert parameters(records) == {"late": 0, "early": 1}


def test_parameter_as_an_argument_is_one_and_a_tensor_is_not() -> None:
    weight = nn.Parameter(torch.ones(3))
    records = recorded(lambda x, w: x * w, torch.ones(3), weight)
    assert sorted(r.kind.value for r in records) == ["other", "parameter"]
    assert parameters(records) == {"w": 0}


def test_names_alone_give_the_order_of_the_inputs() -> None:
    names = [
        "L['x']",
        "L['self']._modules['a']._parameters['w']",
        "L['self']._modules['a']._buffers['b']",
        "L['self']._modules['_orig_mod']._modules['a']._parameters['v']",
        "G['model']._parameters['g']",
        "___weird(L['self'])",
        "",
    ]
    assert recorded_from_names(names) == (
        RecordedInput(OTHER),
        RecordedInput(PARAMETER, "a.w", 0),
        RecordedInput(BUFFER, "a.b"),
        RecordedInput(PARAMETER, "a.v", 1),
        RecordedInput(PARAMETER, "g", 2),
        RecordedInput(OTHER),
        RecordedInput(OTHER),
    )


@pytest.mark.parametrize("model", [None, nn.Linear(2, 2), fx.symbolic_trace(nn.Linear(2, 2))])
def test_other_models_have_no_records(model: object) -> None:
    assert record_inputs(model) == ()


def test_graph_that_cannot_be_read_has_no_records(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(model: object) -> None:
        raise KeyError("Dynamo changed")

    monkeypatch.setattr(pipeline, "record_inputs", broken)
    with pytest.raises(KeyError):
        pipeline.record_inputs_of(None)
    monkeypatch.delenv(notices.STRICT_VARIABLE)
    notices.warn_untagged.cache_clear()
    assert pipeline.record_inputs_of(None) == ()
    assert "Dynamo changed" in caplog.text and "bucketing_mode" in caplog.text
