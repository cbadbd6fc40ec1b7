"""Gathered parameters that stay for the backward: which, within what, and what the split makes of it.

Four square weights of 64 KiB on four ranks.  The backward gathers three of them again: the input needs
no gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap import keeping, notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.forecast import joint_peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    collect,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.kept_gathers import plan_kept_gathers
from torch_patches.backend import _repeat_whole_chains
from torch_patches.testing.eager_backend import post_grad_eager
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.models import fully_shard_simple
from torch_patches.testing.traced import Traced, trace

KIB = 1 << 10
WEIGHT = 128 * 128 * 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    finally:
        dist.destroy_process_group()


class Layers(nn.Module):
    def __init__(self, rows: int = 128, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, rows, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[..., :128].sin()
        return x


def traced(
    mesh: DeviceMesh,
    options: Options,
    partition: str = "min_cut",
    placements: tuple[Any, ...] = (Shard(0), Shard(0)),
    rows: int = 128,
) -> tuple[Traced, Any]:
    reports: list[Any] = []

    def build() -> nn.Module:
        model = Layers(rows)
        fully_shard_simple(model, mesh, placements=placements)
        return model

    def joint_pass(graph: fx.Graph, inputs: Any) -> None:
        reports.append(pipeline.run_joint(graph, options, inputs))
        if partition == "default":
            _repeat_whole_chains(graph)  # as our backend does

    made = trace(build, (4, 128), partition=partition, joint_pass=joint_pass)
    return made, reports[0]


def gathered_again(made: Traced) -> int:
    """Parameters that the backward gathers: two launches each, unless they are fused."""
    kinds = [c.kind.value for c in collect(made.split[1].graph).collectives]
    return kinds.count("all_gather")


def options(cap_bytes: float | None, **more: Any) -> Options:
    gb = None if cap_bytes is None else cap_bytes / (1 << 30)
    return Options("auto", keep_gathered_parameters=True, max_memory_increase_gb=gb, **more)


@pytest.mark.parametrize("partition", ["min_cut", "default"])
@pytest.mark.parametrize(
    ("cap_bytes", "kept"), [(0, 0), (WEIGHT - 1, 0), (WEIGHT, 1), (2.5 * WEIGHT, 2), (None, 3)]
)
def test_as_many_as_the_cap_allows_the_last_ones_first(
    mesh: DeviceMesh, partition: str, cap_bytes: float | None, kept: int
) -> None:
    """Without a cap 2% of the peak, at least 32 MiB, which is more than all three."""
    made, report = traced(mesh, options(cap_bytes), partition)
    assert gathered_again(made) == 2 * (3 - kept)
    if not kept:
        assert report is None
        return
    assert report.kept_bytes == kept * WEIGHT
    assert made.joint is not None
    gathers = [c for c in collect(made.joint.graph).collectives if c.kind.value == "all_gather"]
    results = [c.start.name for c in gathers[1::2]]
    assert list(report.kept_gathers) == results[4 - kept :]
    assert (
        f"{kept} gathered parameters kept ({kept * WEIGHT / KIB / KIB:.1f} MiB)" in report.summary()
    )


def test_what_is_fused_is_kept_as_one(mesh: DeviceMesh) -> None:
    made, report = traced(mesh, options(2 * WEIGHT, fuse_chained_all_gathers=True))
    assert gathered_again(made) == 1
    assert (len(report.fusions), len(report.kept_gathers)) == (4, 2)


def joint_by_hand(*, backward: bool = False, bucketed: bool = False) -> fx.Graph:
    """A gather of a parameter that the backward would repeat."""
    b = GraphBuilder()
    wait = b.gather_and_wait(b.placeholder(2, 4), 2, "g")
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    product = b.call(torch.ops.aten.mm, wait, b.placeholder(4, 4))
    product.meta["partitioner_tag"] = "is_backward"
    gm = b.output(product)
    for node in (start, wait):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if backward:
            node.meta["partitioner_tag"] = "is_backward"
        if bucketed:
            node.meta[BUCKET_MARK] = {"bucket": 0, "members": 2, "traffic": "parameter"}
    return gm.graph


@pytest.mark.parametrize(
    ("made", "kept"), [({}, 1), ({"backward": True}, 0), ({"bucketed": True}, 0)]
)
def test_only_single_gathers_of_the_forward(made: dict[str, bool], kept: int) -> None:
    graph = joint_by_hand(**made)
    repeated = frozenset(n for n in graph.nodes if n.meta.get("recompute") is not None)
    assert len(plan_kept_gathers(collect(graph), repeated, 1 << 30)) == kept


def test_off_and_none_keep_nothing(mesh: DeviceMesh) -> None:
    for given in (Options("auto"), Options("none", keep_gathered_parameters=True)):
        made, report = traced(mesh, given)
        assert gathered_again(made) == 6
        assert report is None


def test_the_share_is_of_a_peak_without_what_is_repeated(mesh: DeviceMesh) -> None:
    """Four shards, the gradients' payload and little else: not the three weights between."""
    made, _ = traced(mesh, Options("auto"))
    assert made.joint is not None
    graph = made.joint.graph
    repeated = frozenset(n for n in graph.nodes if n.meta.get("recompute") is not None)
    skeleton = collect(graph)
    assert repeated
    peak = joint_peak_bytes(graph, skeleton, repeated)
    # Some of the weights are dead where the peak of the whole would be.
    assert WEIGHT < peak < joint_peak_bytes(graph, skeleton, frozenset()) - 1.5 * WEIGHT
    ratio = 1.01 * WEIGHT / peak
    share = Options("auto", keep_gathered_parameters=True, max_memory_increase_ratio=ratio)
    assert gathered_again(traced(mesh, share)[0]) == 4


def test_ranks_with_short_shards_keep_the_same() -> None:
    """130 rows on 4 ranks: 33, 33, 33 and 31."""
    found = set()
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            flat = init_device_mesh("cpu", (4,))
            ratio = Options("auto", keep_gathered_parameters=True, max_memory_increase_ratio=0.55)
            _, report = traced(flat, ratio, placements=(Shard(0),), rows=130)
            found.add((report.kept_bytes, len(report.kept_gathers)) if report else None)
        finally:
            dist.destroy_process_group()
    assert len(found) == 1
    assert found != {None}


def test_in_a_compile(mesh: DeviceMesh) -> None:
    model = Layers()
    fully_shard_simple(model, mesh, placements=(Shard(0), Shard(0)))
    flags = {"bucketing_mode": "topo_span", "keep_gathered_parameters": True}
    counters.clear()
    torch._dynamo.reset()
    with inductor_config.patch({config.PREFIX + name: value for name, value in flags.items()}):
        compiled = torch.compile(model, backend=post_grad_eager, fullgraph=True)
        compiled(torch.randn(4, 128)).sum().backward()
    assert counters["inductor"]["comm_overlap_kept_gathers"] == 3


def test_a_failure_keeps_nothing_and_says_so(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    notices.warn_not_kept.cache_clear()
    monkeypatch.setattr(keeping, "plan_kept_gathers", lambda *args: 1 / 0)
    made, report = traced(mesh, options(None))
    assert gathered_again(made) == 6
    assert report is None
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING and "kept" in r.message]
    assert "keep_gathered_parameters = False" in warning.getMessage()
