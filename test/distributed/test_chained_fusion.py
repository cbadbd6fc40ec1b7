"""Chained collectives as one on four gloo processes, a 2 x 2 mesh.

::

    Llama, every parameter S(0)S(0)
      none         2 gathers and 2 reduce-scatters for each parameter
      gathers      bucketing "none", gathers fused: the same bits
      everything   "auto", reduce-scatters fused too: the same within their bound
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import Say, run_ranks
from torch_patches.testing.training import Comparison, Workload, compare, train

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=1, dim=32), strategy="s0s0", steps=2)
#: Nine tensors in the block, embedding, norm, head.
PARAMETERS = 12
GATHERS = {PREFIX + "fuse_chained_all_gathers": True}
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "gathers": GATHERS,
    "everything": {
        **GATHERS,
        PREFIX + "fuse_chained_reduce_scatters": True,
        PREFIX + "bucketing_mode": "auto",
    },
}
#: Unit roundoff of float32.
U = 2.0**-24


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
    return run_ranks(work, 4, timeout_s=300.0)


def test_each_parameter_is_gathered_once(ranks: list[dict[str, Result]]) -> None:
    for rank in ranks:
        assert rank["none"].launches["forward"] == {"all_gather": 2 * PARAMETERS}
        assert rank["gathers"].launches["forward"] == {"all_gather": PARAMETERS}
        # The head is used last in the forward and first in the backward: it is not gathered again.
        assert rank["none"].launches["backward"] == {
            "all_gather": 2 * (PARAMETERS - 1),
            "reduce_scatter": 2 * PARAMETERS,
        }
        assert rank["gathers"].launches["backward"] == {
            "all_gather": PARAMETERS - 1,
            "reduce_scatter": 2 * PARAMETERS,
        }


def test_fused_gathers_give_the_same_bits(ranks: list[dict[str, Result]]) -> None:
    for rank in ranks:
        assert rank["gathers"].comparison.bitwise_equal
        assert rank["gathers"].comparison.tensors == 2 * (1 + PARAMETERS)


def test_fused_collectives_are_bucketed(ranks: list[dict[str, Result]]) -> None:
    for rank in ranks:
        launches = rank["everything"].launches
        assert launches["forward"]["all_gather"] < PARAMETERS
        assert launches["backward"]["reduce_scatter"] < PARAMETERS
        (joint,) = [r for r in rank["everything"].reports if r["phase"] == "joint"]
        assert joint["saved_launches"] == 2 * PARAMETERS


def test_fused_reductions_differ_by_rounding(ranks: list[dict[str, Result]]) -> None:
    """Both orders are within (n - 1) u of the exact sum of n magnitudes, and n averaged values are no
    larger than the largest, here of four ranks; two steps of training carry it on."""
    for rank in ranks:
        comparison = rank["everything"].comparison
        assert comparison.max_relative < 2 * 3 * U * 16
        assert comparison.tensors == 2 * (1 + PARAMETERS)


def test_all_ranks_do_the_same(ranks: list[dict[str, Result]]) -> None:
    for name in FLAGS:
        assert len({repr(rank[name].launches) for rank in ranks}) == 1
    # Of all ranks one group; the hash of "gathers" has the names of each rank's own groups.
    hashes = [[r["schedule_hash"] for r in rank["everything"].reports] for rank in ranks]
    assert len(hashes[0]) == 3
    assert all(each == hashes[0] for each in hashes)
