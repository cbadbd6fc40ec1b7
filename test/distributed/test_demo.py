"""The main job on two gloo processes: fewer collectives, the same bits.

::

    Llama, every parameter sharded on 2 ranks
      torch.compile(backend=post_grad_eager)   "none" | "topo_span", coalesced | copying
      3 SGD steps, losses and gradients kept; one more step under the profiler

``make demo`` does the same under full Inductor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import RankFailed, RanksTimedOut, Say, run_ranks
from torch_patches.testing.training import Comparison, Workload, compare, train

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=1))
#: Nine tensors in the block, embedding, norm, head.
PARAMETERS = 12
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "coalesced": {PREFIX + "bucketing_mode": "topo_span", PREFIX + "bucket_mode": "coalesced"},
    "copying": {PREFIX + "bucketing_mode": "topo_span", PREFIX + "bucket_mode": "default"},
    "kept": {PREFIX + "bucketing_mode": "topo_span", PREFIX + "keep_gathered_parameters": True},
    "two gathers a bucket": {
        PREFIX + "bucketing_mode": "topo_span",
        # The block's largest tensors are 56 KiB: each bucket holds one or a few.
        PREFIX + "bucket_cap_mb": 0.06,
    },
}
BUCKETED = [name for name in FLAGS if name != "none"]
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Result:
    """One rank's run under one set of flags, next to the run without."""

    launches: dict[str, dict[str, int]]
    reports: list[dict[str, Any]]
    comparison: Comparison


def work(rank: int, say: Say) -> dict[str, Result]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch

    torch.set_num_threads(1)
    runs = {name: train(WORKLOAD, "eager", flags, say) for name, flags in FLAGS.items()}
    return {
        name: Result(run.launches, run.reports, compare(run, runs["none"]))
        for name, run in runs.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Result]]:
    return run_ranks(work, 2, timeout_s=TIMEOUT_S)


def test_unbucketed_run_launches_one_collective_a_parameter(ranks: list[dict[str, Result]]) -> None:
    for rank in ranks:
        assert rank["none"].launches["forward"] == {"all_gather": PARAMETERS}
        # The head is used last in the forward and first in the backward: it is not gathered again.
        backward = rank["none"].launches["backward"]
        assert backward == {"all_gather": PARAMETERS - 1, "reduce_scatter": PARAMETERS}
        assert rank["none"].reports == []


@pytest.mark.parametrize("form", ["coalesced", "copying"])
def test_bucketed_run_launches_one_collective_a_kind(
    ranks: list[dict[str, Result]], form: str
) -> None:
    for rank in ranks:
        assert rank[form].launches["forward"] == {"all_gather": 1}
        assert rank[form].launches["backward"] == {"all_gather": 1, "reduce_scatter": 1}


def test_kept_parameters_are_not_gathered_again(ranks: list[dict[str, Result]]) -> None:
    for rank in ranks:
        assert rank["kept"].launches["backward"] == {"reduce_scatter": 1}


def test_byte_cap_leaves_more_buckets(ranks: list[dict[str, Result]]) -> None:
    for rank in ranks:
        launches = rank["two gathers a bucket"].launches
        assert 1 < launches["forward"]["all_gather"] < PARAMETERS
        assert 1 < launches["backward"]["reduce_scatter"] < PARAMETERS


@pytest.mark.parametrize("name", BUCKETED)
def test_losses_and_gradients_are_bitwise_equal(ranks: list[dict[str, Result]], name: str) -> None:
    for rank in ranks:
        comparison = rank[name].comparison
        assert comparison.tensors == WORKLOAD.steps * (1 + PARAMETERS)
        assert comparison.bitwise_equal, comparison


@pytest.mark.parametrize("name", [name for name in BUCKETED if name != "kept"])
def test_reports_announce_what_was_launched(ranks: list[dict[str, Result]], name: str) -> None:
    for rank in ranks:
        forward, backward = [r for r in rank[name].reports if r["phase"] == "post-grad"]
        for phase, report in (("forward", forward), ("backward", backward)):
            assert report["collectives_before"] == rank["none"].launches[phase]
            assert report["collectives_after"] == rank[name].launches[phase]
            assert report["failure"] is None


@pytest.mark.parametrize("name", BUCKETED)
def test_ranks_plan_the_same(ranks: list[dict[str, Result]], name: str) -> None:
    hashes = [[report["schedule_hash"] for report in rank[name].reports] for rank in ranks]
    assert hashes[0] == hashes[1]
    assert all(hashes[0])


# -- the helper that runs the ranks ---------------------------------------------------------------


def _fail_on_one(rank: int, say: Say) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank one had enough")
    dist.barrier()


def _never_meet(rank: int, say: Say) -> None:
    import torch.distributed as dist

    say("waiting for the other")
    if rank == 0:
        dist.barrier()
    import time

    time.sleep(600)


def test_a_failing_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 failed after(.|\n)*rank one had enough"):
        run_ranks(_fail_on_one, 2, timeout_s=60)


def test_ranks_that_never_meet_are_ended() -> None:
    with pytest.raises(RanksTimedOut, match="not finished after 6 s"):
        run_ranks(_never_meet, 2, timeout_s=6)


def _environment_and_output(rank: int, say: Say) -> str | None:
    os.write(1, f"out {rank}\n".encode())
    os.write(2, f"error {rank}\n".encode())
    return os.environ.get("TEST_OF_RANKS")


def test_ranks_have_the_environment_and_output_of_the_call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the process that they are forks of was started before."""
    for value in ("one", "two"):
        monkeypatch.setenv("TEST_OF_RANKS", value)
        assert run_ranks(_environment_and_output, 2, timeout_s=60) == [value] * 2
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["out 0", "out 1"]
        assert {"error 0", "error 1"} <= set(err.splitlines())
