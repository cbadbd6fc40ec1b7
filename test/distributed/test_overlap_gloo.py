"""Overlap scheduling on gloo processes: what is planned is run, with the numbers of a plain run.

::

    Inductor, 2 ranks         "auto" | "topo_span" + scheduling, control dependencies, buffer reuse
    graphs run eagerly        FSDP on 2, HSDP on 2 x 2: the bits of "none"; DDP on 4
    shards of unequal length  FSDP on 2: both ranks plan the same

By a GPU's constants the kernels of so small a model are too short to hide anything, so most plans
are made with ``balanced_estimate``, and with a memory cap that suits a model of half a megabyte.
gloo's all-reduce of four ranks adds in an order that depends on an element's place in the buffer,
which merging changes; of two ranks it does not (``test_strategies_gloo.py``).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import Say, run_program, run_ranks
from torch_patches.testing.training import (
    Comparison,
    Workload,
    balanced_estimate,
    compare,
    train,
)

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=1), steps=1)
#: Neither vocabulary nor hidden width divides by two.
UNEVEN = Workload(ModelConfig(layers=1, vocab=131, ffn_multiple=219 / 64), steps=1)
#: Nine tensors in the block, embedding, norm, head.
PARAMETERS = 12
ROOMY = {"max_memory_increase_ratio": 1.0}
BALANCED = {**ROOMY, "custom_runtime_estimation": balanced_estimate}
#: Two or three of the block's tensors a bucket.
AUTO = {**BALANCED, "bucketing_mode": "auto", "bucket_cap_mb": 0.08}
SPAN = {**BALANCED, "bucketing_mode": "topo_span", "enable_overlap_scheduling": True,
        "max_topo_span": 25}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run, and the one it must agree with."""

    backend: str
    flags: dict[str, Any]
    reference: str
    workload: Workload = WORKLOAD


HSDP, DDP = replace(WORKLOAD, strategy="hsdp"), replace(WORKLOAD, strategy="ddp")
TWO_STEPS = replace(WORKLOAD, steps=2)
GPU = {**ROOMY, "bucketing_mode": "auto"}
RUNS = {
    "none": Run("eager", {}, "none"),
    "auto": Run("eager", AUTO, "none"),
    "ddp none": Run("eager", {}, "ddp none", DDP),
    "ddp auto": Run("eager", AUTO, "ddp none", DDP),
    "hsdp none": Run("eager", {}, "hsdp none", HSDP),
    "hsdp auto": Run("eager", AUTO, "hsdp none", HSDP),
    "uneven none": Run("eager", {}, "uneven none", UNEVEN),
    "uneven GPU constants": Run("eager", GPU, "uneven none", UNEVEN),
    "Inductor auto": Run("inductor", AUTO, "uncompiled", TWO_STEPS),
    "Inductor topo_span": Run("inductor", SPAN, "uncompiled", TWO_STEPS),
    "uncompiled": Run("uncompiled", {}, "uncompiled", TWO_STEPS),
}
#: By the number of ranks; the graphs run eagerly.
SCHEDULED = {
    2: ["auto", "uneven GPU constants"],
    4: ["hsdp auto", "ddp auto"],
}
BY_EAGER = [(ranks, name) for ranks, names in SCHEDULED.items() for name in names]
BY_INDUCTOR = ["Inductor auto", "Inductor topo_span"]
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Result:
    """One rank's run: launches, reports, generated code and the number of donated buffers of each
    graph if any, and distance to its reference."""

    launches: dict[str, dict[str, int]]
    reports: list[dict[str, Any]]
    codes: list[str]
    donated: list[int]
    plans: list[tuple[Any, ...]]
    comparison: Comparison


Results = list[dict[str, Result]]


def work(rank: int, say: Say, names: Sequence[str]) -> dict[str, Result]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler

    torch.set_num_threads(1)
    runs, codes, plans = {}, {}, {}
    donated: dict[str, list[int]] = {name: [] for name in names}
    get_donated_buffers = Scheduler.get_donated_buffers

    def count_donated(scheduler: Any) -> Any:
        found = get_donated_buffers(scheduler)
        donated[name].append(len(found))
        return found

    for name in names:
        run, codes[name], plans[name] = RUNS[name], list[str](), list[tuple[Any, ...]]()
        flags = {PREFIX + flag: value for flag, value in run.flags.items()}
        flags["cpp.simdlen"] = 1  # scalar code compiles faster
        planned = _planned(plans[name]) if name == "uneven none" else contextlib.nullcontext()
        with (
            mock.patch.object(GraphLowering, "save_output_code", codes[name].append),
            mock.patch.object(Scheduler, "get_donated_buffers", count_donated),
            planned,
        ):
            runs[name] = train(run.workload, run.backend, flags, say)
    return {
        name: Result(
            run.launches,
            run.reports,
            codes[name],
            donated[name],
            plans[name],
            compare(run, runs[RUNS[name].reference]),
        )
        for name, run in runs.items()
    }


@contextlib.contextmanager
def _planned(plans: list[tuple[Any, ...]]) -> Iterator[None]:
    """Each graph of a run is planned under several caps and estimates; the graph itself is run."""
    import torch

    import torch_patches
    from torch_patches.testing import eager_backend

    run_eagerly = eager_backend._run_eagerly

    def plan(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        for ratio, cap, custom in itertools.product(
            (0.02, 0.2, 0.36), (None, 0.08), (None, balanced_estimate)
        ):
            report = torch_patches.optimize_graph(
                copy.deepcopy(gm),
                bucketing_mode="auto",
                max_memory_increase_ratio=ratio,
                bucket_cap_mb=cap,
                custom_runtime_estimation=custom,
            )
            plans.append(
                (ratio, cap, custom, report.way, report.schedule_hash, report.total_ms_after)
            )
        return run_eagerly(gm, inputs, **kwargs)

    with mock.patch.object(eager_backend, "_run_eagerly", plan):
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """By the number of ranks.

    An empty cache: where there is a hit, no pass runs and nothing is reported.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        for ranks, names in SCHEDULED.items():
            names = [*names, *BY_INDUCTOR] if ranks == 2 else names
            both = dict.fromkeys([*(RUNS[name].reference for name in names), *names])
            found[ranks] = run_ranks(work, ranks, timeout_s=TIMEOUT_S, arguments=([*both],))
    return found


@pytest.fixture(scope="module")
def inductor(results: dict[int, Results]) -> Results:
    return results[2]


# -- Inductor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_inductor_agrees_with_the_uncompiled_model(inductor: Results, name: str) -> None:
    for rank in inductor:
        assert rank[name].comparison.tensors == 2 * (1 + PARAMETERS)
        assert rank[name].comparison.max_relative < 1e-5, rank[name].comparison


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_the_backward_is_given_buffers_of_the_forward(inductor: Results, name: str) -> None:
    """So the gradients above are computed with donated buffers, which kernels may write over."""
    for rank in inductor:
        forward, backward = rank[name].donated
        assert forward == 0 and backward > 0


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_inductor_launches_what_was_planned(inductor: Results, name: str) -> None:
    plain = {"forward": {"all_gather": PARAMETERS},
             "backward": {"all_gather": PARAMETERS - 1, "reduce_scatter": PARAMETERS}}  # fmt: skip
    for rank in inductor:
        for report, phase in zip(rank[name].reports, plain, strict=True):
            assert report["collectives_before"] == plain[phase]
            assert report["collectives_after"] == rank[name].launches[phase]
            assert all(1 < rank[name].launches[phase][kind] < n for kind, n in plain[phase].items())


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_ranks_plan_the_same_under_inductor(inductor: Results, name: str) -> None:
    assert _plans(inductor[0][name]) == _plans(inductor[1][name])


_LAUNCH = re.compile(r"(buf\d+) = torch\.ops\._c10d_functional\.(?:all_gather|reduce_scatter)")
_MEMBER = re.compile(r"(buf\d+) = (buf\d+)\[\d+\]")
_WAIT = re.compile(r"_c10d_functional\.wait_tensor\.default\((buf\d+)\)")


def _matmuls_in_flight(code: str) -> list[int]:
    """For each launch in the code: matmuls between it and the first wait for it."""
    matmuls, launched, owner, found = 0, dict[str, int](), dict[str, str](), dict[str, int]()
    for line in code[code.index("def call") :].splitlines():
        if match := _LAUNCH.search(line):
            launched[match[1]], owner[match[1]] = matmuls, match[1]
        elif (match := _MEMBER.search(line)) and match[2] in launched:
            owner[match[1]] = match[2]
        elif match := _WAIT.search(line):
            start = owner[match[1]]
            found.setdefault(start, matmuls - launched[start])
        matmuls += line.strip().startswith("extern_kernels.mm(")
    return [found[start] for start in launched]


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_generated_code_has_the_planned_overlap(inductor: Results, name: str) -> None:
    for rank in inductor:
        assert len(rank[name].codes) == 2
        for report, code in zip(rank[name].reports, rank[name].codes, strict=True):
            assert report["control_dependencies"] > 0
            planned = [
                sum(compute.startswith("mm") for compute in span["hidden_by"])
                for span in report["spans"]
            ]
            found = _matmuls_in_flight(code)
            assert sum(map(bool, planned)) >= 3
            assert len(found) == len(planned)
            assert all(f >= p for f, p in zip(found, planned, strict=True)), (found, planned)
            assert "# reuse" in code


# -- graphs that run eagerly ----------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "name"), BY_EAGER)
def test_losses_and_gradients_are_those_without(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    for rank in results[ranks]:
        comparison = rank[name].comparison
        assert comparison.tensors == 1 + PARAMETERS
        if name == "ddp auto":
            assert comparison.max_relative < 1e-6, comparison
        else:
            assert comparison.bitwise_equal, comparison


@pytest.mark.parametrize(("ranks", "name"), BY_EAGER)
def test_ranks_plan_the_same(results: dict[int, Results], ranks: int, name: str) -> None:
    first, *others = [_plans(rank[name]) for rank in results[ranks]]
    assert first and all(plan["schedule_hash"] for plan in first)
    assert all(other == first for other in others)


@pytest.mark.parametrize(("ranks", "name"), BY_EAGER)
def test_there_are_fewer_launches_and_less_is_exposed(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    for rank in results[ranks]:
        launched = [counts for counts in rank[name].launches.values() if counts]
        for report, counts in zip(rank[name].reports, launched, strict=True):
            before = report["collectives_before"]
            assert report["collectives_after"] == counts
            assert all(counts[kind] < number for kind, number in before.items())
            assert report["exposed_ms_after"] < 0.5 * report["exposed_ms_before"]


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, name in BY_EAGER if "GPU" not in name]
)
def test_collectives_are_hidden_by_matmuls(
    results: dict[int, Results], ranks: int, name: str
) -> None:
    for report in results[ranks][0][name].reports:
        hidden = [span for span in report["spans"] if span["hidden_ms"] >= 0.9]
        assert len(hidden) >= 3
        assert all(any(c.startswith("mm") for c in span["hidden_by"]) for span in hidden)


def _plans(result: Result) -> list[dict[str, Any]]:
    """What ranks must agree on, of each graph: without names, which may be a rank's own."""
    return [
        {
            **{name: report[name] for name in ("schedule_hash", "way", "total_ms_after")},
            "buckets": [(b["form"], b["size_bytes"], len(b["members"])) for b in report["buckets"]],
            "spans": [
                [span[name] for name in ("kind", "start_ms", "end_ms", "hidden_ms", "exposed_ms")]
                for span in report["spans"]
            ],
        }
        for report in result.reports
    ]


# -- unequal shards -------------------------------------------------------------------------------


def test_ranks_with_unequal_shards_plan_the_same_under_any_cap(
    results: dict[int, Results],
) -> None:
    first, second = [rank["uneven none"].plans for rank in results[2]]
    assert len(first) == 24
    assert first == second


# -- the compile cache ----------------------------------------------------------------------------

PROGRAM = """
import json, logging, sys, torch, torch_patches
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_patches.testing.training import balanced_estimate

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("torch_patches").addHandler(handler)

def step(x, *parameters):  # matmuls alone need no C++ compiler
    for p in parameters:
        x = x @ funcol.all_gather_tensor_autograd(p, 0, dist.group.WORLD)
    return x

def run(name, value):
    torch._dynamo.reset(), counters.clear(), warnings.clear()
    flags = {"bucketing_mode": "auto", "max_memory_increase_ratio": 4.0, name: value}
    options = {"aten_distributed_optimizations." + flag: value for flag, value in flags.items()}
    parameters = [torch.ones(4, 8, requires_grad=True) for _ in range(4)]
    torch.compile(step, options=options)(torch.ones(8, 8), *parameters).sum().backward()
    found = ["fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"]
    print(json.dumps([*(counters["inductor"][n] for n in found), len(warnings)]))

run("custom_runtime_estimation", balanced_estimate)
run("custom_runtime_estimation", lambda node, size: 1.0)
run("custom_runtime_estimation", lambda node, size: 2.0)
run("calibration_file", sys.argv[1])
table = json.load(open(sys.argv[1]))
table["kernel_issue_us"] += 1
json.dump(table, open(sys.argv[1], "w"))
run("calibration_file", sys.argv[1])
"""


def test_second_process_hits_the_cache(tmp_path: Path) -> None:
    """Hits, misses, bypasses (of forward and backward) and warnings of each compile."""
    table = tmp_path / "table.json"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        table.write_text(
            json.dumps({"format": "torch_patches.calibration", "version": 1, "device": "x",
                        "kernel_issue_us": 1.0 + len(found)})
        )  # fmt: skip
        output = run_program(PROGRAM, str(table), environment=environment, timeout_s=300)
        found.append([json.loads(line) for line in output.splitlines()])
    miss, hit, not_cached, not_again = [0, 2, 0, 0], [2, 0, 0, 0], [0, 0, 2, 1], [0, 0, 2, 0]
    assert found[0] == [miss, not_cached, not_again, miss, miss]
    # The second process starts with the content that the first one ended with.
    assert found[1] == [hit, not_cached, not_again, hit, miss]
