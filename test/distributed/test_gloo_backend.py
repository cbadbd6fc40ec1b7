"""Buckets on real gloo under full Inductor, where a waited buffer is reused before other waits.

::

    RS(a) -> W -> /4      Inductor divides in the buffer of RS(a), and only then waits for RS(b)
    RS(b) -> W -> /4
"""

from __future__ import annotations

from typing import Any

import pytest

from torch_patches.testing.processes import Say, run_ranks

PREFIX = "aten_distributed_optimizations."
FORMS: tuple[str | None, ...] = ("off", None, "coalesced", "default")


def work(rank: int, say: Say) -> list[list[Any]]:
    """Results of one step for each form; in each process."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch._inductor import config

    import torch_patches  # noqa: F401  registers the flags

    torch.set_num_threads(1)

    def step(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> list[torch.Tensor]:
        def scatter(t: torch.Tensor) -> torch.Tensor:
            return funcol.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD)

        def gather(t: torch.Tensor) -> torch.Tensor:
            return funcol.all_gather_tensor(t, 0, dist.group.WORLD)

        # sums in place of what was scattered first, then two terminal ones
        return [scatter(a) / 4, scatter(b) / 4, scatter(d), gather(a) + gather(b)]

    inputs = [torch.arange(96.0).view(8, 12) + rank * i for i in (1, 2, 3)]
    results = []
    for form in FORMS:
        say(f"form {form}")
        torch._dynamo.reset()
        flags: dict[str, Any] = {"force_disable_caches": True}
        if form != "off":
            flags |= {PREFIX + "bucketing_mode": "topo_span", PREFIX + "bucket_mode": form}
        with config.patch(flags):
            outputs = torch.compile(step, fullgraph=True)(*inputs)
        results.append([t.tolist() for t in outputs])
    return results


@pytest.fixture(scope="module")
def by_form() -> list[dict[str | None, list[Any]]]:
    results = run_ranks(work, 2, timeout_s=240.0)
    return [dict(zip(FORMS, result, strict=True)) for result in results]


@pytest.mark.parametrize("form", FORMS[1:])
def test_results_are_those_without_bucketing(
    by_form: list[dict[str | None, list[Any]]], form: str | None
) -> None:
    for rank in by_form:
        assert rank[form] == rank["off"]
