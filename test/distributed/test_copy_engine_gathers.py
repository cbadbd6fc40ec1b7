"""The flag copy_engine_gathers on two processes: where there are no GPUs, gloo does what the ops ask for."""

from __future__ import annotations

from typing import Any

import pytest

from torch_patches.testing.processes import Say, run_ranks

PREFIX = "aten_distributed_optimizations."
BACKENDS = ("aot_eager_comm_overlap", "inductor")
COUNTER = "comm_overlap_copy_engine_gathers"


def work(rank: int, say: Say) -> dict[str, Any]:
    """By backend: results with and without the flag, and what was counted with it."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch._dynamo.utils import counters
    from torch._inductor import config

    import torch_patches  # noqa: F401  registers the flags
    from torch_patches._inductor.fx_passes.comm_overlap import copy_engine_op
    from torch_patches._inductor.fx_passes.comm_overlap.graph import copy_engines

    torch.set_num_threads(1)
    copy_engines.LEAST_BYTES = 1  # type: ignore[misc]

    def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            low = shard.to(torch.bfloat16)
            x = x @ funcol.all_gather_tensor(low, 0, dist.group.WORLD)
        return x

    torch.manual_seed(rank)
    shards = [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        say(backend)
        results = []
        for flag in (False, True):
            torch._dynamo.reset()
            counters.clear()
            flags = {"force_disable_caches": True, PREFIX + "bucketing_mode": "topo_span"}
            with config.patch({**flags, PREFIX + "copy_engine_gathers": flag}), torch.no_grad():
                results.append(torch.compile(step, fullgraph=True, backend=backend)(x, *shards))
        counted = counters["inductor"][COUNTER]
        found[backend] = [result.float().tolist() for result in results], counted
    copy_engine_op.register()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ours, functional = torch.ops.comm_overlap, torch.ops._c10d_functional
    for dtype in (None, torch.bfloat16):
        sent = [shard.detach().to(dtype or shard.dtype) for shard in shards]
        given = [shard.detach() for shard in shards]
        got = [
            *ours.all_gather_into_tensor_coalesced(given, 2, name, dtype=dtype),
            ours.all_gather_into_tensor(given[0], 2, name, dtype=dtype),
        ]
        expected = [functional.all_gather_into_tensor(one, 2, name) for one in (*sent, sent[0])]
        found[f"op {dtype}"] = [
            torch.equal(functional.wait_tensor(a), functional.wait_tensor(b))
            for a, b in zip(got, expected, strict=True)
        ]
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(work, 2, timeout_s=240.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_those_without_it(by_rank: list[dict[str, Any]], backend: str) -> None:
    for found in by_rank:
        (without, with_it), counted = found[backend]
        assert without == with_it and counted > 0
    assert by_rank[0][backend][0] == by_rank[1][backend][0]


@pytest.mark.parametrize("dtype", ["None", "torch.bfloat16"])
def test_ops_do_what_the_functional_ones_do(by_rank: list[dict[str, Any]], dtype: str) -> None:
    for found in by_rank:
        assert found[f"op {dtype}"] == [True] * 4
