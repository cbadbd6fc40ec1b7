"""What buckets of modules send lies in the order of FSDP2's parameters, that of registration.

    class Block:    registers d, b, a, c
    forward:        a, b, c, d          =>    AG{layers.0}(d, b, a, c)
    backward:       d, c, b, a          =>    RS{layers.0}(d, b, a, c)

The order of registration is known to Dynamo, not to the graph.  Each parameter has a size of its own,
by which it is told in a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.registration import bottom_up
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput
from torch_patches.testing.gathers import Sharded
from torch_patches.testing.traced import trace

RANKS = 4
WAY = Sharded("dp", RANKS)


def size_of(layer: int, name: str) -> int:
    """Rows of a parameter, so that no two have equally many."""
    return 4 * (1 + "abcdef".index(name) + 10 * layer)


class Inner(nn.Module):
    """Registers f in front of e and uses e first."""

    def __init__(self, layer: int, sharded: bool) -> None:
        super().__init__()
        for name in "fe":
            self.register_parameter(name, new_parameter(size_of(layer, name), sharded))

    def forward(self, x: Tensor) -> Tensor:
        return use(use(x, self.e), self.f)


class Block(nn.Module):
    """The inner module is registered between d and b; a module's own parameters come first."""

    def __init__(self, layer: int, sharded: bool) -> None:
        super().__init__()
        self.d = new_parameter(size_of(layer, "d"), sharded)
        self.inner = Inner(layer, sharded)
        for name in "bac":
            self.register_parameter(name, new_parameter(size_of(layer, name), sharded))

    def forward(self, x: Tensor) -> Tensor:
        x = use(use(self.inner(x), self.a), self.b)
        return use(use(x, self.c), self.d)


class Net(nn.Module):
    def __init__(self, sharded: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(layer, sharded) for layer in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def new_parameter(rows: int, sharded: bool) -> nn.Parameter:
    full = (rows, 3)
    return nn.Parameter(torch.ones(WAY.stored_shape(full) if sharded else full))


def use(x: Tensor, stored: Tensor) -> Tensor:
    """x [n, 3] -> [n, 3]"""
    weight = WAY.read(stored)
    return (x @ weight.t()).sin() @ weight


@pytest.fixture(scope="module")
def fsdp2_sizes() -> Iterator[list[list[int]]]:
    """Of each block: full sizes, in elements, in the order in which FSDP2 lays them out."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    model = Net(sharded=False)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for block in model.layers:
        fully_shard(block, mesh=mesh)
        group = block._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
        found.append([prod(parameter._orig_size) for parameter in group.fsdp_params])
    yield found
    dist.destroy_process_group()


def launched_sizes(gm: fx.GraphModule, op: str, per_element: int) -> dict[int, list[int]]:
    """Block -> sizes of its parameters in the coalesced launch, in elements of the full tensor."""
    found = {}
    for node in gm.graph.nodes:
        if op in str(node.target):
            sizes = [per_element * source.meta["val"].numel() for source in node.args[0]]
            found[0 if min(sizes) < 3 * size_of(1, "a") else 1] = sizes
    return found


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("mode", ["transformer_block", "modules", "topo_span"])
def test_payload_order_is_that_of_fsdp2(fsdp2_sizes: list[list[int]], mode: str) -> None:
    """``topo_span`` keeps the order of first use, so the models do tell."""
    plan = ["layers.*"] if mode == "modules" else None

    def tag(graph: fx.Graph, inputs: tuple[RecordedInput, ...]) -> None:
        pipeline.run_joint(graph, Options(mode), inputs)

    forward, backward = trace(Net, (5, 3), joint_pass=tag).split
    for gm in (forward, backward):
        torch_patches.optimize_graph(
            gm,
            bucketing_mode=mode,
            module_bucket_plans=plan,
            bucket_mode="coalesced",
            max_memory_increase_ratio=10.0,
            bucket_cap_mb=None if plan or mode == "transformer_block" else 0.002,
        )
    gathered = launched_sizes(forward, "all_gather_into_tensor_coalesced", RANKS)
    reduced = launched_sizes(backward, "reduce_scatter_tensor_coalesced", 1)
    assert [sorted(sizes) for sizes in fsdp2_sizes] == [
        sorted(3 * size_of(layer, name) for name in "abcdef") for layer in (0, 1)
    ]
    as_fsdp2 = dict(enumerate(fsdp2_sizes))
    if mode == "topo_span":
        assert gathered and gathered[0] != fsdp2_sizes[0][: len(gathered[0])]
    else:
        assert gathered == as_fsdp2
        assert reduced == as_fsdp2


def test_places_from_names_are_bottom_up() -> None:
    """named_parameters() has a module's own parameters first, FSDP2 last."""
    names = ["scale", "a.own", "a.inner.w", "a.inner.b", "c.w", "shift"]
    assert sorted(bottom_up(names), key=bottom_up(names).__getitem__) == [
        "a.inner.w", "a.inner.b", "a.own", "c.w", "scale", "shift",
    ]  # fmt: skip
