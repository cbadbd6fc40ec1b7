"""Weights that do not divide, and a mesh whose ranks are permuted, on four gloo processes.

Ranks see other graphs there, or the same groups in another order; one that fused alone would hang the
others, which the deadline would end.
"""

from __future__ import annotations

from typing import Any

import pytest

from torch_patches.testing.processes import Say, run_ranks

#: Shape, sharded dimension, ranks of the 2 x 2 mesh, and whether its chains are one collective.
CASES: dict[str, tuple[tuple[int, ...], int, list[int], bool]] = {
    "even": ((16, 3), 0, [0, 1, 2, 3], True),
    "15 rows": ((15,), 0, [0, 1, 2, 3], False),
    "5 rows": ((5, 3), 0, [0, 1, 2, 3], False),
    "empty shards": ((3,), 0, [0, 1, 2, 3], False),
    "columns of one row": ((1, 7), 1, [0, 1, 2, 3], False),
    "permuted alike": ((16, 3), 0, [1, 0, 3, 2], True),
    "permuted": ((16, 3), 0, [1, 0, 2, 3], False),
}


def work(rank: int, say: Say) -> dict[str, tuple[float, int]]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor_config
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    import torch_patches  # noqa: F401
    from torch_patches.testing.eager_backend import post_grad_eager

    torch.set_num_threads(1)

    class Squares(nn.Module):
        def __init__(self, full: torch.Tensor, mesh: DeviceMesh, dim: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(dim)] * 2))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            whole: Any = self.weight.redistribute(placements=[Replicate()] * 2)
            local = whole.to_local(grad_placements=[Partial()] * 2)
            return (local * local).sum() * factor

    prefix = "aten_distributed_optimizations.fuse_chained_"
    flags = {prefix + "all_gathers": True, prefix + "reduce_scatters": True}
    results: dict[str, tuple[float, int]] = {}
    for name, (shape, dim, order, _) in CASES.items():
        say(name)
        torch.manual_seed(0)
        full = torch.randint(-8, 8, shape).float()
        model = Squares(full, DeviceMesh("cpu", torch.tensor(order).view(2, 2)), dim)
        counters.clear()
        with inductor_config.patch(flags):
            compiled = torch.compile(model, backend=post_grad_eager, fullgraph=True)
            compiled(torch.tensor(1.0)).backward()
        gradient: Any = model.weight.grad
        # Each of four ranks adds 2 w.
        wrong = float((gradient.full_tensor() - 8 * full).abs().max())
        results[name] = (wrong, counters["inductor"]["comm_overlap_fused_chains"])
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[float, int]]]:
    return run_ranks(work, 4, timeout_s=240.0)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_decide_alike_and_get_the_gradient(
    ranks: list[dict[str, tuple[float, int]]], name: str
) -> None:
    fused = 2 if CASES[name][-1] else 0
    assert [rank[name] for rank in ranks] == [(0.0, fused)] * 4
