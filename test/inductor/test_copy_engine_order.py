"""Inductor launches gathers by the copy engines in the order of the graph, whatever its activations take.

Ranks that launched them in another order would copy each other's bytes of another parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_patches  # noqa: F401  registers the flags
from torch_patches._inductor.fx_passes.comm_overlap.graph import copy_engines

PREFIX = "aten_distributed_optimizations."
LAUNCH = re.compile(r"(\w+)\.all_gather_into_tensor(?:_coalesced)?\.default\(\[?(\w+)")


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copy_engines, "LEAST_BYTES", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def step(x: torch.Tensor, large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """The large one is gathered first, and used last."""
    group = dist.group.WORLD
    a, b = (funcol.all_gather_tensor(shard, 0, group) for shard in (large, small))
    h = torch.sin(torch.relu(x @ b) @ b.t()) @ b
    return h.sum(0) @ a


def launched(batch: int, flag: bool) -> list[tuple[str, str]]:
    """Namespace and first input of each gather in the code that Inductor makes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    large, small = (torch.randn(32, n, requires_grad=True) for n in (4096, 256))
    flags = {PREFIX + "bucketing_mode": "topo_span", PREFIX + "bucket_cap_mb": 1e-6}
    patches = {"force_disable_caches": True, **flags, PREFIX + "copy_engine_gathers": flag}
    with config.patch(patches), torch.no_grad():
        compiled = torch.compile(step, fullgraph=True)
        _, (code, *_) = run_and_get_code(compiled, torch.randn(batch, 256), large, small)
    return LAUNCH.findall(code)


@pytest.mark.usefixtures("eight_ranks")
def test_the_order_is_that_of_the_graph_for_any_batch() -> None:
    usual = [source for _, source in launched(64, flag=False)]
    assert len(usual) == 2
    for batch in (64, 8192):
        assert launched(batch, flag=True) == [("comm_overlap", source) for source in usual]
