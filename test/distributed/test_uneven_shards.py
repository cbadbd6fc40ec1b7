"""Ranks whose graphs differ in the padding of short shards launch the same collectives.

A vocabulary of 131 and a hidden width of 219 do not divide by two ranks: rank 1 pads embedding,
head and MLP weights before each gather and cuts their gradients after each reduce-scatter; rank 0
does neither.
"""

from __future__ import annotations

from typing import Any

import pytest

from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import Say, run_ranks
from torch_patches.testing.training import Workload, compare, train

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=2, vocab=131, ffn_multiple=219 / 64), steps=1)
SPANS = (0, 20, 45, 90, 1500)


def work(rank: int, say: Say) -> list[tuple[list[str], list[int], bool]]:
    """For each span: schedule hashes, buckets, whether losses and gradients are bitwise equal."""
    import torch

    torch.set_num_threads(1)
    reference = train(WORKLOAD, "eager", {}, say)
    results = []
    for span in SPANS:
        flags: dict[str, Any] = {
            PREFIX + "bucketing_mode": "topo_span",
            PREFIX + "max_topo_span": span,
        }
        run = train(WORKLOAD, "eager", flags, say)
        hashes = [report["schedule_hash"] for report in run.reports]
        buckets = [len(report["buckets"]) for report in run.reports]
        results.append((hashes, buckets, compare(run, reference).bitwise_equal))
    return results


@pytest.fixture(scope="module")
def ranks() -> list[list[tuple[list[str], list[int], bool]]]:
    return run_ranks(work, 2, timeout_s=200.0)


def test_ranks_plan_the_same(ranks: list[list[tuple[list[str], list[int], bool]]]) -> None:
    assert [hashes for hashes, _, _ in ranks[0]] == [hashes for hashes, _, _ in ranks[1]]


def test_spans_make_a_difference(ranks: list[list[tuple[list[str], list[int], bool]]]) -> None:
    assert len({tuple(buckets) for _, buckets, _ in ranks[0]}) >= 3


def test_losses_and_gradients_are_bitwise_equal(
    ranks: list[list[tuple[list[str], list[int], bool]]],
) -> None:
    assert all(equal for rank in ranks for _, _, equal in rank)
