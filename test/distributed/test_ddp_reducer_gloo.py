"""torch's DDP with its reducer in the graph: all-reduces merged, gradients as without merging."""

from __future__ import annotations

from typing import Any

from torch_patches.testing.processes import Say, run_ranks


def work(rank: int, say: Say) -> dict[str, Any]:
    """Gradients, merged and not, and the launches of the merged backward."""
    import torch
    from torch import nn
    from torch._dynamo import compiled_autograd
    from torch.nn.parallel import DistributedDataParallel

    from torch_patches._inductor.fx_passes.comm_overlap import pipeline
    from torch_patches.backend import aot_eager_comm_overlap

    launches: list[tuple[dict[str, int], dict[str, int]]] = []
    told: list[dict[str, int]] = []
    run = pipeline.run_post_grad

    def keep(*arguments: Any, **options: Any) -> Any:
        report = run(*arguments, **options)
        if report is not None:
            launches.append((report.collectives_before, report.collectives_after))
            told.append(report.told_by)
        return report

    pipeline.run_post_grad = keep
    torch._dynamo.config.optimize_ddp = "python_reducer"

    def gradients(backend: Any) -> list[list[float]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
        model = torch.compile(DistributedDataParallel(layers), backend="eager", fullgraph=True)
        backward = torch.compile(backend=backend, fullgraph=True, dynamic=False)
        loss = model(torch.arange(32.0).view(4, 8) / 16 + rank).sin().sum()
        with compiled_autograd._enable(backward):
            loss.backward()
        return [p.grad.flatten().tolist() for p in layers.parameters() if p.grad is not None]

    say("aot_eager")
    plain = gradients("aot_eager")
    say("merged")
    merged = gradients(aot_eager_comm_overlap)
    return {"plain": plain, "merged": merged, "launches": launches, "told": told}


def test_all_reduces_of_the_reducer_are_merged() -> None:
    results = run_ranks(work, 2, timeout_s=200.0)
    for result in results:
        assert result["launches"] == [({"all_reduce": 3}, {"all_reduce": 1})]
        assert result["told"] == [{"dynamo": 3}]
        assert result["merged"] == result["plain"] == results[0]["plain"]
        assert len(result["plain"]) == 3 and any(any(row) for row in result["plain"])
