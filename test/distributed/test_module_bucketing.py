"""Module bucketing on two gloo processes: one launch for each block, and the numbers of FSDP2.

::

    Llama of two blocks, every parameter sharded on 2 ranks; 3 SGD steps, then one under the profiler
      graphs run eagerly    "none" | "transformer_block" | "modules", bit for bit
      aot_eager             uncompiled | ours in both modes | eager FSDP2, bit for bit
      Inductor              uncompiled | "transformer_block", within 1e-5

By a GPU's constants the kernels of so small a model are too short to hide anything, so some plans are
made with ``balanced_estimate``.  The same with four ranks, by hand::

    python test/distributed/test_module_bucketing.py 4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

import torch_patches
from torch_patches.testing.models import Llama, ModelConfig
from torch_patches.testing.processes import Say, run_ranks
from torch_patches.testing.training import (
    Comparison,
    TrainingRun,
    Workload,
    balanced_estimate,
    compare,
    train,
)

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=2))
#: Nine tensors in each of the two blocks; embedding, norm, head.
PARAMETERS = 21


def half_blocks() -> list[list[str] | str]:
    """A plan without strings: attention and MLP of each block apart, each with its norm."""
    model = Llama(WORKLOAD.model)
    halves = [
        half
        for block in model.layers
        for half in (
            [block.attention_norm, block.attention],
            [block.ffn_norm, block.feed_forward],
        )
    ]
    return torch_patches.plan_from_modules(
        model, [model.tok_embeddings, *halves, [model.norm, model.output]]
    )


ROOMY = {"max_memory_increase_ratio": 1.0, "custom_runtime_estimation": balanced_estimate}
BLOCKS = {**ROOMY, "bucketing_mode": "transformer_block"}
MODULES = {**ROOMY, "bucketing_mode": "modules", "module_bucket_plans": half_blocks()}


@dataclass(frozen=True)
class Run:
    """One training run, and those it must agree with."""

    backend: str
    flags: dict[str, Any]
    references: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    strategy: str = "fsdp"


RUNS = {
    "none": Run("eager", {}),
    "blocks": Run("eager", BLOCKS, ("none",)),
    "modules": Run("eager", MODULES, ("none",)),
    "FSDP2": Run("uncompiled", {}, (), None, "fsdp2"),
    "aot_eager blocks": Run("aot_eager", {}, ("uncompiled", "FSDP2"), BLOCKS),
    "aot_eager modules": Run("aot_eager", MODULES, ("uncompiled", "FSDP2")),
    "uncompiled": Run("uncompiled", {}),
    "Inductor blocks": Run("inductor", BLOCKS, ("uncompiled",)),
}
BY_EAGER = ["blocks", "modules", "aot_eager blocks", "aot_eager modules"]
BY_INDUCTOR = ["Inductor blocks"]
#: Buckets and what is alone in its entry (the embedding): forward gathers, gathers repeated in the
#: backward, reduce-scatters.  The embedding is not needed again; norm and head are gathered again
#: for the norm, since the head still is there.
LAUNCHES = {"blocks": (4, 3, 4), "modules": (6, 5, 6)}
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Result:
    """One rank's run: launches, reports and distances to its references."""

    launches: dict[str, dict[str, int]]
    reports: list[dict[str, Any]]
    comparisons: dict[str, Comparison]


Results = list[dict[str, Result]]


def work(rank: int, say: Say, names: Sequence[str]) -> dict[str, Result]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch

    torch.set_num_threads(1)
    runs = {name: _train(RUNS[name], say) for name in names}
    return {
        name: Result(
            run.launches,
            run.reports,
            {other: compare(run, runs[other]) for other in RUNS[name].references},
        )
        for name, run in runs.items()
    }


def _train(run: Run, say: Say) -> TrainingRun:
    flags = {PREFIX + flag: value for flag, value in run.flags.items()}
    if run.backend == "eager" and flags:
        # Such graphs keep their order, and torch 2.11 cannot run control dependencies.
        flags[PREFIX + "insert_overlap_deps"] = False
    flags["cpp.simdlen"] = 1  # scalar code compiles faster
    workload = replace(WORKLOAD, strategy=run.strategy)
    return train(workload, run.backend, flags, say, run.options)


def _run(ranks: int, names: Sequence[str]) -> Results:
    """Those of these names, and what they refer to."""
    references = [other for name in names for other in RUNS[name].references]
    both = list(dict.fromkeys([*references, *names]))
    return run_ranks(work, ranks, timeout_s=TIMEOUT_S, arguments=(both,))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All runs.  An empty cache: where there is a hit, no pass runs and nothing is reported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        return _run(2, [*BY_EAGER, *BY_INDUCTOR])


# -- numbers --------------------------------------------------------------------------------------


def _comparisons(results: Results, name: str) -> list[Comparison]:
    found = [c for rank in results for c in rank[name].comparisons.values()]
    assert len(found) == len(results) * len(RUNS[name].references) > 0
    assert all(c.tensors == WORKLOAD.steps * (1 + PARAMETERS) for c in found)
    return found


@pytest.mark.parametrize("name", BY_EAGER)
def test_losses_and_gradients_are_bitwise_equal(results: Results, name: str) -> None:
    """Also to those of eager FSDP2."""
    assert all(c.bitwise_equal for c in _comparisons(results, name)), _comparisons(results, name)


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_inductor_agrees_with_the_uncompiled_model(results: Results, name: str) -> None:
    found = _comparisons(results, name)
    assert all(c.max_relative < 1e-5 for c in found), found


# -- launches -------------------------------------------------------------------------------------


def _check_launches(results: Results, name: str) -> None:
    mode = "modules" if "modules" in name else "blocks"
    gathers, again, scatters = LAUNCHES[mode]
    for rank in results:
        assert rank[name].launches["forward"] == {"all_gather": gathers}
        backward = {"all_gather": again, "reduce_scatter": scatters}
        assert rank[name].launches["backward"] == backward
        for phase, report in zip(("forward", "backward"), rank[name].reports, strict=True):
            assert report["collectives_after"] == rank[name].launches[phase]
            assert report["uncovered"] == []


@pytest.mark.parametrize("name", BY_EAGER)
def test_one_launch_for_each_module(results: Results, name: str) -> None:
    _check_launches(results, name)


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_one_launch_for_each_module_under_inductor(results: Results, name: str) -> None:
    _check_launches(results, name)


def test_without_there_is_one_launch_for_each_parameter(results: Results) -> None:
    """So that the tests above count something."""
    for rank in results:
        assert rank["none"].launches["forward"] == {"all_gather": PARAMETERS}
        backward = {"all_gather": PARAMETERS - 1, "reduce_scatter": PARAMETERS}
        assert rank["none"].launches["backward"] == backward


def test_fsdp2_launches_what_ours_does(results: Results) -> None:
    """One for each of its groups: embedding, two blocks, norm and head."""
    for rank in results:
        assert rank["FSDP2"].launches["forward"]["all_gather"] == 4
        assert rank["FSDP2"].launches["backward"]["reduce_scatter"] == 4


# -- plans ----------------------------------------------------------------------------------------


def test_plans_are_those_asked_for_or_found(results: Results) -> None:
    found = [["tok_embeddings"], "layers.*", ["norm", "output"]]
    for report in results[0]["blocks"].reports:
        assert report["module_plan"] == found
    for report in results[0]["modules"].reports:
        assert report["module_plan"] == MODULES["module_bucket_plans"]
        labels = {bucket["label"] for bucket in report["buckets"]}
        assert "layers.1.ffn_norm+layers.1.feed_forward" in labels


def _hidden(results: Results, name: str) -> None:
    """All but the first gather and the last reduction, and what has no matmul beside it.

    A bucket takes 1 ms and more by ``balanced_estimate``, each of its module's matmuls 1 ms.
    """
    forward, backward = results[0][name].reports
    assert (forward["way"], backward["way"]) == ("as asked", "as asked")
    blocks = [s for s in forward["spans"] if s["kind"] == "all_gather"]
    assert sum(bool(s["hidden_ms"]) for s in blocks) >= len(blocks) - 2, blocks
    scatters = [s for s in backward["spans"] if s["kind"] == "reduce_scatter"]
    assert sum(bool(s["hidden_ms"]) for s in scatters) >= len(scatters) - 2, scatters


@pytest.mark.parametrize("name", ["blocks", "modules", "aot_eager blocks", "aot_eager modules"])
def test_the_others_are_hidden(results: Results, name: str) -> None:
    _hidden(results, name)


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_the_others_are_hidden_under_inductor(results: Results, name: str) -> None:
    _hidden(results, name)
    assert all(report["control_dependencies"] > 0 for report in results[0][name].reports)


@pytest.mark.parametrize("name", BY_EAGER)
def test_ranks_plan_the_same(results: Results, name: str) -> None:
    hashes = [[report["schedule_hash"] for report in rank[name].reports] for rank in results]
    assert all(hashes[0])
    assert hashes[0] == hashes[1]


if __name__ == "__main__":
    for number, found in enumerate(_run(int(sys.argv[1]), BY_EAGER)):
        for case in BY_EAGER:
            print(number, case, found[case].comparisons, found[case].launches)
