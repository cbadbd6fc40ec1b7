"""HSDP and DDP trained on gloo processes: fewer launches of every kind, the same numbers.

::

    HSDP   4 ranks, 2 x 2    gathers, reduce-scatters within a half, all-reduces across
    DDP    2 ranks           all-reduces only

Graphs run eagerly, so only the collectives differ between two runs.  Every group has two ranks:
a sum of two numbers has the same bits in any order, so nothing may differ at all.  gloo's all-reduce
adds in an order that depends on an element's place in the buffer, which merging changes: DDP of the
same model on 4 ranks differed by 6e-7 of a tensor's largest element (FSDP on 4 by nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import Say, run_ranks
from torch_patches.testing.training import Comparison, Workload, compare, train

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=1), steps=2)
#: Nine tensors in the block, embedding, norm, head.
PARAMETERS = 12
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Run:
    """One training run, and the one it must agree with."""

    backend: str
    flags: dict[str, Any]
    reference: str


RUNS = {
    "none": Run("eager", {}, "none"),
    "bucketed": Run("eager", {PREFIX + "bucketing_mode": "topo_span"}, "none"),
    "copying": Run(
        "eager",
        {PREFIX + "bucketing_mode": "topo_span", PREFIX + "bucket_mode": "default"},
        "none",
    ),
    "torch aot_eager": Run("aot_eager of torch", {}, "torch aot_eager"),
    "aot_eager": Run("aot_eager", {}, "torch aot_eager"),
}
UNBUCKETED = {"hsdp": ["none"], "ddp": ["none", "torch aot_eager"]}
#: The copying form of all-reduces is covered by HSDP's, the other backend by DDP.
BUCKETED = {"hsdp": ["bucketed", "copying"], "ddp": ["bucketed", "aot_eager"]}
EVERYTHING = [(strategy, name) for strategy, names in BUCKETED.items() for name in names]


@dataclass(frozen=True)
class Result:
    """One rank's run, next to its reference."""

    launches: dict[str, dict[str, int]]
    reports: list[dict[str, Any]]
    comparison: Comparison


Results = list[dict[str, Result]]


def work(rank: int, say: Say, strategy: str) -> dict[str, Result]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch

    torch.set_num_threads(1)
    workload = replace(WORKLOAD, strategy=strategy)
    runs = {
        name: train(workload, RUNS[name].backend, RUNS[name].flags, say)
        for name in [*UNBUCKETED[strategy], *BUCKETED[strategy]]
    }
    return {
        name: Result(run.launches, run.reports, compare(run, runs[RUNS[name].reference]))
        for name, run in runs.items()
    }


@pytest.fixture(scope="module")
def hsdp() -> Results:
    return run_ranks(work, 4, timeout_s=TIMEOUT_S, arguments=("hsdp",))


@pytest.fixture(scope="module")
def ddp() -> Results:
    return run_ranks(work, 2, timeout_s=TIMEOUT_S, arguments=("ddp",))


@pytest.mark.parametrize("name", UNBUCKETED["hsdp"])
def test_unbucketed_hsdp_launches_one_collective_a_parameter(hsdp: Results, name: str) -> None:
    for rank in hsdp:
        assert rank[name].launches["forward"] == {"all_gather": PARAMETERS}
        # The head is used last in the forward and first in the backward: it is not gathered again.
        assert rank[name].launches["backward"] == {
            "all_gather": PARAMETERS - 1,
            "reduce_scatter": PARAMETERS,
            "all_reduce": PARAMETERS,
        }


@pytest.mark.parametrize("name", BUCKETED["hsdp"])
def test_bucketed_hsdp_launches_one_collective_a_kind(hsdp: Results, name: str) -> None:
    for rank in hsdp:
        assert rank[name].launches["forward"] == {"all_gather": 1}
        backward = rank[name].launches["backward"]
        assert backward == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


@pytest.mark.parametrize("name", UNBUCKETED["ddp"])
def test_unbucketed_ddp_launches_one_collective_a_parameter(ddp: Results, name: str) -> None:
    for rank in ddp:
        assert rank[name].launches == {"forward": {}, "backward": {"all_reduce": PARAMETERS}}


@pytest.mark.parametrize("name", BUCKETED["ddp"])
def test_bucketed_ddp_launches_one_collective(ddp: Results, name: str) -> None:
    """All gradients together are smaller than the first bucket may be."""
    for rank in ddp:
        assert rank[name].launches == {"forward": {}, "backward": {"all_reduce": 1}}


@pytest.mark.parametrize(("strategy", "name"), EVERYTHING)
def test_losses_and_gradients_are_bitwise_equal(
    strategy: str, name: str, request: pytest.FixtureRequest
) -> None:
    for rank in request.getfixturevalue(strategy):
        comparison = rank[name].comparison
        assert comparison.tensors == WORKLOAD.steps * (1 + PARAMETERS)
        assert comparison.bitwise_equal, comparison


@pytest.mark.parametrize(("strategy", "name"), EVERYTHING)
def test_ranks_plan_the_same_and_report_it(
    strategy: str, name: str, request: pytest.FixtureRequest
) -> None:
    ranks: Results = request.getfixturevalue(strategy)
    hashes = [[report["schedule_hash"] for report in rank[name].reports] for rank in ranks]
    assert all(hashes[0])
    assert all(other == hashes[0] for other in hashes)
    for rank in ranks:
        reported = [report["collectives_after"] for report in rank[name].reports]
        assert reported == [launched for launched in rank[name].launches.values() if launched]
