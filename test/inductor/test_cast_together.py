"""Casts in front of the gathers of a zero-copy bucket are one kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import make_model
from torch_patches._inductor.fx_passes.comm_overlap.forecast import Forecast, forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.module_graphs import tag
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GROUPS = {"g": [[0, 1]]}


class Gathers(GraphBuilder):
    """Parameters that are cast to bfloat16 and gathered by two ranks."""

    def __init__(self) -> None:
        super().__init__(FakeTensorMode(shape_env=ShapeEnv()))
        self.waits: list[fx.Node] = []

    def low(self, source: fx.Node) -> fx.Node:
        return self.call(aten._to_copy, source, dtype=torch.bfloat16)

    def gather(self, payload: fx.Node) -> None:
        self.waits.append(self.gather_and_wait(payload, 2, "g"))

    def cast_gathers(self, *shapes: tuple[int, ...]) -> None:
        for shape in shapes:
            self.gather(self.low(self.placeholder(*shape)))

    def bucketed(
        self, *outputs: fx.Node, eager: bool = False
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graph and what becomes of it; both compute the same on two ranks."""
        for place, wait in enumerate(self.waits):
            tag(wait, f"p{place}", place, place)
        gm = self.output(*[self.call(aten.neg, wait) for wait in self.waits], *outputs)
        after = copy.deepcopy(gm)
        report = optimize_graph(
            after, Options("topo_span", bucket_mode="coalesced", run_eagerly=eager)
        )
        assert [len(bucket.members) for bucket in report.buckets] == [len(self.waits)]
        inputs = random_inputs(gm, 2, seed=0)
        expected = run_spmd(gm, copy.deepcopy(inputs), GROUPS, 2)
        found = run_spmd(after, inputs, GROUPS, 2)
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        return gm, after


def joined(gm: fx.GraphModule) -> list[list[int]]:
    """Sizes of the casts that are made together."""
    return [
        [value.numel() for value in node.meta["val"]]
        for node in gm.graph.nodes
        if op_name(node.target) == "_foreach_copy"
    ]


def test_all_casts_at_once() -> None:
    b = Gathers()
    b.cast_gathers((4, 8), (3,), (2, 2, 4))
    _, after = b.bucketed()
    assert joined(after) == [[32, 3, 16]]
    (start,) = after.graph.find_nodes(
        op="call_function", target=c10d.all_gather_into_tensor_coalesced.default
    )
    assert [tuple(node.meta["val"].shape) for node in start.args[0]] == [(4, 8), (3,), (2, 2, 4)]
    assert {node.meta["val"].dtype for node in start.args[0]} == {torch.bfloat16}


def test_strided_parameter() -> None:
    b = Gathers()
    b.cast_gathers((4, 8))
    b.gather(b.low(b.call(aten.t, b.placeholder(8, 4))))
    _, after = b.bucketed()
    assert joined(after) == [[32, 32]]


def test_graph_that_is_run_op_by_op_keeps_its_casts() -> None:
    """There it would be one more copy of each."""
    b = Gathers()
    b.cast_gathers((4, 8), (8,))
    _, after = b.bucketed(eager=True)
    assert joined(after) == []


def read_elsewhere(b: Gathers) -> fx.Node:
    return b.low(b.placeholder(4, 8))


def computed(b: Gathers) -> fx.Node:
    return b.low(b.call(aten.mul.Tensor, b.placeholder(4, 8), 2.0))


def low_already(b: Gathers) -> fx.Node:
    return b.placeholder(4, 8, dtype=torch.bfloat16)


def of_no_size(b: Gathers) -> fx.Node:
    return b.low(b.placeholder(0, 8))


def of_any_size(b: Gathers) -> fx.Node:
    return b.low(b.placeholder(b.symbol(4).meta["val"], 8))


@pytest.mark.parametrize("other", [read_elsewhere, computed, low_already, of_no_size, of_any_size])
def test_what_is_sent_from_where_it_is(other: Callable[[Gathers], fx.Node]) -> None:
    """It would be copied, or ranks could differ in it."""
    b = Gathers()
    b.cast_gathers((4, 8), (8,))
    payload = other(b)
    b.gather(payload)
    _, after = b.bucketed(*([b.call(aten.neg, payload)] if other is read_elsewhere else []))
    assert joined(after) == [[32, 8]]


def test_a_cast_in_front_of_a_write_stays() -> None:
    """The value from before the write is sent."""
    b = Gathers()
    b.cast_gathers((4, 8), (8,))
    written = b.placeholder(4, 8)
    low = b.low(written)
    b.call(aten.mul_.Tensor, written, 2.0)
    b.gather(low)
    _, after = b.bucketed()
    assert joined(after) == [[32, 8]]


def test_a_single_cast_stays() -> None:
    b = Gathers()
    b.cast_gathers((4, 8))
    b.gather(low_already(b))
    _, after = b.bucketed()
    assert joined(after) == []


def test_reductions_are_sent_from_where_they_are() -> None:
    b = Gathers()
    for _ in range(2):
        b.waits.append(b.scatter_and_wait(b.low(b.placeholder(4, 8)), "sum", 2, "g"))
    _, after = b.bucketed()
    assert joined(after) == []


# -- what it is expected to cost ------------------------------------------------------------------


def forecasts(count: int) -> tuple[Forecast, Forecast]:
    b = Gathers()
    b.cast_gathers(*[(64, 64)] * count)
    return tuple(forecast(gm.graph, collect(gm.graph), make_model()) for gm in b.bucketed())  # type: ignore[return-value]


def test_one_kernel_casts_all() -> None:
    before, after = forecasts(9)
    launched = [sum(cost.launches for cost in f.costs.values()) for f in (before, after)]
    assert launched[0] - launched[1] == 8


def test_casts_have_no_storage_of_their_own() -> None:
    """While the bucket flies, its payload and its results live, and nothing else."""
    _, after = forecasts(9)
    low = 9 * 64 * 64 * 2
    where = next(i for i, n in enumerate(after.order) if "all_gather" in n.name)
    inputs = 9 * 64 * 64 * 4
    assert after.held.at_node[where] == inputs + low + 2 * low


# -- what Inductor makes of it --------------------------------------------------------------------


@pytest.fixture
def two_ranks(fresh_inductor_cache: object) -> Iterator[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_generated_code_casts_once_and_copies_nothing(two_ranks: str) -> None:
    def step(*shards: torch.Tensor) -> list[torch.Tensor]:
        low = [shard.to(torch.bfloat16) for shard in shards]
        starts = [c10d.all_gather_into_tensor(each, 2, two_ranks) for each in low]
        return [c10d.wait_tensor(start) for start in starts]

    shards = [torch.randn(4, 8, requires_grad=True) for _ in range(12)]
    flags = {"bucketing_mode": "topo_span", "bucket_mode": "coalesced"}
    patches = {f"aten_distributed_optimizations.{name}": value for name, value in flags.items()}
    with config.patch(patches), torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), *shards)
    body = code[code.index("def call(") :]
    launch = body.index("all_gather_into_tensor_coalesced.default(")
    assert body[:launch].count("cpp_fused") == 1
    assert body.count("empty_strided_cpu(") == 12
