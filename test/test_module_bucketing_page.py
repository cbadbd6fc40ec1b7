"""docs/module_bucketing.md: its plans fit the models they speak of."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from torch_patches import plan_from_modules
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import parse_plan
from torch_patches.testing.models import Llama, ModelConfig, MoE, MoEConfig

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "module_bucketing.md").read_text(encoding="utf-8")
PLANS = re.findall(r"^\| [^`|]+ \| `(\[.*\])` \|$", PAGE, re.MULTILINE)


def names_of(model: Any) -> tuple[list[str], list[str]]:
    parameters = [name for name, _ in model.named_parameters()]
    return parameters, [name for name, _ in model.named_modules() if name]


def test_there_are_plans() -> None:
    assert len(PLANS) == 3


@pytest.mark.parametrize("text", PLANS)
def test_plans_fit(text: str) -> None:
    experts = "experts" in text
    model = MoE(MoEConfig(layers=4, dense_layers=0)) if experts else Llama(ModelConfig(layers=4))
    parameters, modules = names_of(model)
    plan = parse_plan(ast.literal_eval(text))
    assert plan.check(parameters, modules, "error") == []
    if not experts:
        assert all(plan.bucket_of(name) for name in parameters)


def test_code_without_strings_runs() -> None:
    model = Llama(ModelConfig(layers=2))
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "halves" in block
    ]
    (code,) = blocks
    found: dict[str, Any] = {"model": model, "torch_patches": __import__("torch_patches")}
    exec(code, found)
    assert found["plan"][1] == ["layers.0.attention_norm", "layers.0.attention"]
    plan = parse_plan(found["plan"])
    assert all(plan.bucket_of(name) for name in names_of(model)[0])
    assert found["plan"] == plan_from_modules(model, found["plan"])
