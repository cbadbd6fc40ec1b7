"""Buckets of modules and the compile cache, and what a user sees of errors in their flags.

Names of modules and the order of registration decide such buckets, and torch's key of a graph sees
neither: two models with equal code must not share an entry.  Only matmuls are compiled, so that no
C++ compiler has to run; the collectives are recorded by torch's fake process group.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import torch_patches
from torch_patches import _hooks, config
from torch_patches.backend import aot_eager_comm_overlap
from torch_patches.testing.processes import run_program

PREFIX = config.PREFIX

PROGRAM = """
import json, logging, sys, torch, torch_patches
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
import stacks  # beside the cache

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("torch_patches").addHandler(handler)

class Block(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(4, 8)))

    def forward(self, x):
        for p in (self.a, self.b):
            x = x @ funcol.all_gather_tensor_autograd(p, 0, dist.group.WORLD)
        return x

class Net(nn.Module):
    def __init__(self, blocks, names="ab"):
        super().__init__()
        self.blocks = blocks
        for name in blocks:
            self.add_module(name, Block(names))

    def forward(self, x):
        for name in self.blocks:
            x = getattr(self, name)(x)
        return x

def run(model, **flags):
    torch._dynamo.reset(), counters.clear(), warnings.clear()
    flags = {"max_memory_increase_ratio": 4.0, "bucket_mode": "coalesced", **flags}
    options = {"aten_distributed_optimizations." + flag: value for flag, value in flags.items()}
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model, options=options)(torch.ones(8, 8)).sum().backward()
    found = ["fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"]
    print(json.dumps([counters["inductor"][name] for name in found] + [len(warnings)]))

net = lambda: Net(["h0", "h1"])
renamed = lambda: Net(["g0", "h1"])  # another module, nothing else
registered = lambda: Net(["h0", "h1"], "ba")
for flags in (
    {"bucketing_mode": "transformer_block"},
    {"bucketing_mode": "modules", "module_bucket_plans": ["*"]},
    {"bucketing_mode": "topo_span"},
):
    for model in (net, net, renamed, registered):
        run(model(), **flags)
run(net(), bucketing_mode="modules", module_bucket_plans=[["h0", "h1"]])
run(net(), bucketing_mode="transformer_block", module_prefetch_depth=2)
anonymous = lambda node: [("h0", "Block")]
for function in (anonymous, anonymous, stacks.all_in_one, stacks.Stacks(sys.argv[1])):
    run(net(), bucketing_mode="modules", module_bucket_plans=["h0", "h1"], module_stack_fn=function,
        module_plan_unmatched="warn")
"""

STACKS = """
def all_in_one(node):
    return [("h0", "Block")]

class Stacks:
    def __init__(self, number):
        self.number = number

    def __call__(self, node):
        return [("h0", "Block")]

    def uuid(self):
        return self.number
"""

#: Of forward and backward: hits, misses, bypasses; warnings.
MISS, HIT = [0, 2, 0, 0], [2, 0, 0, 0]
NOT_CACHED, NOT_AGAIN = [0, 0, 2, 1], [0, 0, 2, 0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """What each compile of ``PROGRAM`` found in the cache, in a first and in a second process."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "stacks.py").write_text(STACKS)
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": f"{root}{os.pathsep}{folder}",
    }
    found = []
    for number in ("1", "2"):
        output = run_program(PROGRAM, number, environment=environment, timeout_s=300)
        found.append([json.loads(line) for line in output.splitlines()])
    return found


@pytest.mark.parametrize("mode", ["transformer_block", "modules"])
def test_other_names_or_registration_do_not_share_an_entry(
    found: list[list[list[int]]], mode: str
) -> None:
    first = 0 if mode == "transformer_block" else 4
    assert found[0][first : first + 4] == [MISS, HIT, MISS, MISS]


def test_topo_span_shares_them(found: list[list[list[int]]]) -> None:
    """It reads neither, so the code of these models is equal: else the test above shows nothing."""
    assert found[0][8:12] == [MISS, HIT, HIT, HIT]


def test_other_flags_do_not_share_an_entry(found: list[list[list[int]]]) -> None:
    assert found[0][12:14] == [MISS, MISS]


def test_equal_models_hit_in_a_second_process(found: list[list[list[int]]]) -> None:
    assert found[1][:14] == [HIT] * 14


def test_stack_functions_that_can_be_told_apart_are_cached(found: list[list[list[int]]]) -> None:
    """A lambda is not, with one warning; a function of a module is, and one with a ``uuid()``, which
    is another one in the second process."""
    assert found[0][14:] == [NOT_CACHED, NOT_AGAIN, MISS, MISS]
    assert found[1][14:] == [NOT_CACHED, NOT_AGAIN, HIT, MISS]


# -- errors ---------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w(x)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def installed_with_defaults() -> Iterator[None]:
    _hooks.install()
    with inductor_config.patch({flag.full_name: flag.default for flag in config.FLAGS}):
        yield


def compile_error(backend: str, flags: dict[str, Any]) -> str:
    """What a user reads who compiles with these flags."""
    torch._dynamo.reset()
    chosen: Any = aot_eager_comm_overlap if backend == "aot_eager" else "inductor"
    values = {PREFIX + name: value for name, value in flags.items()}
    with inductor_config.patch(values), pytest.raises(Exception) as error:
        torch.compile(Net(), backend=chosen)(torch.ones(2, 4))
    torch._dynamo.reset()
    return str(error.value)


ERRORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "matches nothing": (
        {"module_bucket_plans": ["layer.*", "head"]},
        ("ModulePlanError", "'layer.*' (entry 0 of the module plan) matches no parameter",
         "Nearest: 'layers.*'", 'module_plan_unmatched = "warn"'),
    ),
    "two entries match": (
        {"module_bucket_plans": ["layers.*", ["head", "layers.1.w"]]},
        ("ModulePlanError", "'layers.*' (entry 0 of the module plan)",
         "'layers.1.w' (in entry 1 of the module plan)",
         "both match the parameter 'layers.1.w.bias' (and 1 more)"),
    ),
    "not well-formed": (
        {"module_bucket_plans": ["layers.[3-1]"]},
        ("FlagError", f"torch._inductor.config.{PREFIX}module_bucket_plans",
         "has [3-1], where 3 is above 1"),
    ),
    "no plan": (
        {},
        ("FlagError", f"'modules' needs {PREFIX}module_bucket_plans, which is None",
         "'transformer_block', which finds the modules"),
    ),
    "no such bucket": (
        {"module_bucket_plans": ["layers.*", "head"], "module_overlap_with": {"layers.7": "head"}},
        ("ModulePlanError", "no bucket of this graph is named 'layers.7'"),
    ),
    "no such module": (
        {"module_bucket_plans": ["layers.*", "head"], "module_overlap_with": {"head": "layer.1"}},
        ("ModulePlanError", "no module of this graph is named 'layer.1'", "layers.1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("case", ERRORS)
def test_plan_errors_reach_the_user(case: str, backend: str) -> None:
    """Although Dynamo wraps what a backend raises."""
    flags, texts = ERRORS[case]
    error = compile_error(backend, {"bucketing_mode": "modules", **flags})
    for text in texts:
        assert text in error


def unread_warnings(caplog: pytest.LogCaptureFixture, **flags: Any) -> list[str]:
    values = {PREFIX + name: value for name, value in flags.items()}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torch_patches"), inductor_config.patch(values):
        for _ in range(2):
            config.read_options()
            torch_patches.optimize_graph(torch.fx.symbolic_trace(Net()))
    return [text for text in caplog.messages if "no effect" in text]


def test_flags_without_effect_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    config._warn_unread.cache_clear()
    flags: dict[str, Any] = {"module_bucket_plans": ["layers.*"],
                             "module_overlap_with": {"layers.1": "layers.0"}}  # fmt: skip
    plans, overlap = PREFIX + "module_bucket_plans", PREFIX + "module_overlap_with"
    found = unread_warnings(caplog, bucketing_mode="topo_span", **flags)
    assert found == [f"{plans}, {overlap}: no effect with bucketing_mode = 'topo_span'"]
    found = unread_warnings(caplog, bucketing_mode="transformer_block", **flags)
    assert found == [f"{plans}: no effect with bucketing_mode = 'transformer_block'"]
    assert unread_warnings(caplog, bucketing_mode="modules", **flags) == []
