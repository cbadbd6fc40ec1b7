"""Ranks whose graphs differ in the padding of short shards launch the same collectives.

A vocabulary of 131 and a hidden width of 219 do not divide by two ranks: rank 1 pads embedding,
head and MLP weights before each gather and cuts their gradients after each reduce-scatter; rank 0
does neither.

Where structure alone does not tell (a parameter that is scaled before the gather, activations), and
where a rank has no rows at all, the graphs differ just so.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import Say, run_ranks
from torch_patches.testing.training import Workload, compare, train

PREFIX = "aten_distributed_optimizations."
WORKLOAD = Workload(ModelConfig(layers=1, vocab=131, ffn_multiple=219 / 64), steps=1)
SPANS = (0, 20, 45, 1500)


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


def _launches(build: Any, size: int, spans: tuple[int, ...]) -> list[tuple[list[str], bool]]:
    """For each span: schedule hashes, and whether results and gradients are as without buckets."""
    import torch

    from torch_patches.backend import aot_eager_comm_overlap

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[build() for _ in range(8)])
    hashes: list[str] = []

    class Reports(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "report"):
                hashes.append(record.report.schedule_hash)

    handler, logger = Reports(), logging.getLogger("torch_patches")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def step(function: Any) -> list[torch.Tensor]:
        result = function(torch.ones(3, size))
        result.sum().backward()
        gradients = [p.grad.to_local().clone() for p in model.parameters()]
        model.zero_grad()
        return [result.detach(), *gradients]

    expected = step(model)
    found = []
    for span in spans:
        torch._dynamo.reset()
        hashes.clear()
        options = {"max_topo_span": span}
        actual = step(torch.compile(model, backend=aot_eager_comm_overlap, options=options))
        equal = all(torch.allclose(a, e) for a, e in zip(actual, expected, strict=True))
        found.append((list(hashes), equal))
    logger.removeHandler(handler)
    return found


def scaled(rank: int, say: Say, spans: tuple[int, ...]) -> list[tuple[list[str], bool]]:
    """Seven rows on two ranks, scaled shard by shard: rank 1 pads in front of the gather."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(7, 7)
            self.w = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = (self.w * 0.5).redistribute(placements=[Replicate()]).to_local()
            return torch.tanh(x @ w)

    return _launches(Scaled, 7, spans)


def empty(rank: int, say: Say, spans: tuple[int, ...]) -> list[tuple[list[str], bool]]:
    """Three rows on 2 x 2 ranks: one has none, and zeros in the place of its chunk."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    class Sharded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(3, 3)
            self.w = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.w.redistribute(placements=[Replicate(), Replicate()]).to_local()
            return torch.tanh(x @ w)

    return _launches(Sharded, 3, spans)


@pytest.mark.parametrize(
    ("program", "ranks_count", "spans"), [(scaled, 2, (12, 30)), (empty, 4, (20, 1500))]
)
def test_ranks_plan_the_same_whatever_their_rows(
    program: Any, ranks_count: int, spans: tuple[int, ...]
) -> None:
    results = run_ranks(program, ranks_count, arguments=(spans,), timeout_s=120.0)
    assert all(result == results[0] for result in results)
    assert all(hashes and equal for hashes, equal in results[0])
