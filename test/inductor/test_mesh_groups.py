"""Process groups that are made when a compile starts: which, by whom, and which not.

A world of eight with a 4 x 2 mesh.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_patches
from torch_patches import _compat, config, mesh_groups
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import registered_ranks
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.testing.eager_backend import post_grad_eager
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
PREFIX = config.PREFIX


def names(mesh: DeviceMesh) -> tuple[str, str]:
    outer, inner = mesh.get_all_groups()
    return str(outer.group_name), str(inner.group_name)


class Weight(nn.Module):
    """One parameter, sharded as told."""

    def __init__(self, mesh: DeviceMesh, *placements: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(16, 4), mesh, placements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.full_tensor()


def members() -> list[list[int]]:
    return sorted(
        dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_names
    )


def compile_weight(model: nn.Module, **flags: bool) -> None:
    torch._dynamo.reset()
    with inductor_config.patch({PREFIX + name: value for name, value in flags.items()}):
        torch.compile(model, backend=post_grad_eager, fullgraph=True)(torch.randn(2, 16))


CREATE = {"fuse_chained_all_gathers": True, "create_flattened_groups": True}


def test_a_group_is_made_where_the_flag_allows(mesh: DeviceMesh) -> None:
    """Dimensions 0 and 2 of a 2 x 2 x 2 mesh: no group has just their ranks."""
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    model = Weight(cube, Shard(0), Replicate(), Shard(0))
    before = members()
    compile_weight(model, fuse_chained_all_gathers=True)
    assert members() == before
    counters.clear()
    compile_weight(model, **CREATE)
    assert members() == sorted([*before, [0, 1, 4, 5]])
    assert counters["inductor"]["comm_overlap_saved_launches"] == 1
    compile_weight(model, **CREATE)
    assert members() == sorted([*before, [0, 1, 4, 5]])


def test_no_group_is_made_where_one_is_or_none_is_needed(mesh: DeviceMesh) -> None:
    before = members()
    compile_weight(Weight(mesh, Shard(0), Shard(0)), **CREATE)  # the default group
    compile_weight(Weight(mesh, Shard(0), Shard(1)), **CREATE)
    compile_weight(Weight(mesh, Replicate(), Shard(0)), **CREATE)
    assert members() == before


def test_ranks_of_registered_groups(mesh: DeviceMesh) -> None:
    """In the order of the group; None for a group that this process does not know."""
    for group in mesh.get_all_groups():
        assert registered_ranks(group.group_name) == tuple(dist.get_process_group_ranks(group))
    assert registered_ranks("no such group") is None


def test_the_order_of_shards_is_the_order_of_ranks(mesh: DeviceMesh) -> None:
    """Cut by the inner dimension first: ranks 0 2 4 6 1 3 5 7, where torch keeps an order at all."""
    wanted = mesh_groups._Wanted(mesh, (1, 0))
    assert wanted.ranks() == (0, 2, 4, 6, 1, 3, 5, 7)
    before = members()
    name = mesh_groups._create(wanted)
    if _compat.torch_release() < (2, 12):
        assert name is None
        assert members() == before
    else:
        assert members() == sorted([*before, [0, 2, 4, 6, 1, 3, 5, 7]])
        assert mesh_groups._create(wanted) is None


@pytest.mark.usefixtures("as_on_gpu")
def test_a_graph_that_holds_its_mesh(mesh: DeviceMesh) -> None:
    """Of a bare graph, dimensions come from its chains: here from the last to the first."""
    outer, inner = names(mesh)
    b = GraphBuilder()
    wait = b.gather_and_wait(b.placeholder(2, 6), 4, outer)
    wait = b.gather_and_wait(wait, 2, inner)
    b.opaque_placeholder("mesh", mesh)
    gm = b.output(wait)
    report = torch_patches.optimize_graph(gm, bucketing_mode="topo_span", **CREATE)
    if _compat.torch_release() < (2, 12):  # it sorts the ranks of a group
        assert RefusalReason.CHAIN_NO_GROUP in {refusal.reason for refusal in report.refusals}
        return
    assert report.saved_launches == 1
    (gather,) = collect(gm.graph).collectives
    group = dist.distributed_c10d._resolve_process_group(gather.group)
    assert dist.get_process_group_ranks(group) == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("placements", "orders"),
    [
        ((Shard(0), Shard(0)), [(0, 1)]),
        ((Shard(0), Shard(1)), [(0,), (1,)]),
        ((_StridedShard(0, split_factor=2), Shard(0)), [(1, 0)]),
        ((_StridedShard(0, split_factor=2), Replicate()), [(0,)]),
    ],
)
def test_which_mesh_dimension_cuts_first(
    mesh: DeviceMesh, placements: tuple[Any, ...], orders: list[tuple[int, ...]]
) -> None:
    """FSDP over a tensor-parallel weight has strided shards: the inner dimension cut first."""
    spec = types.SimpleNamespace(mesh=mesh, placements=placements)
    assert sorted(_compat.shard_orders(spec)) == orders


def test_a_rank_outside_the_mesh_makes_none(mesh: DeviceMesh) -> None:
    elsewhere = DeviceMesh("cpu", torch.tensor([[4, 5], [6, 7]]))
    before = members()
    assert mesh_groups._create(mesh_groups._Wanted(elsewhere, (0, 1))) is None
    assert members() == before


def test_a_group_is_made_by_its_own_ranks(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of another pipeline stage do not compile this model, and must not be waited for."""
    given: list[dict[str, Any]] = []
    real = dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda *args, **kwargs: given.append(kwargs) or real(*args, **kwargs)
    )
    assert _compat.new_group_in_order([0, 1, 4, 5], "fake", "test") is not None
    assert given[0]["use_local_synchronization"] is True


def test_the_flag_alone_has_no_effect(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    config._warn_unread.cache_clear()
    model = Weight(init_device_mesh("cpu", (2, 2, 2)), Shard(0), Replicate(), Shard(0))
    before = members()
    compile_weight(model, create_flattened_groups=True)
    assert members() == before
    assert "create_flattened_groups: no effect with fuse_chained_all_gathers" in caplog.text
