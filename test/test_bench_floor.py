"""tools/_bench_floor.py: the floor is reached by the best orders of graphs worked out by hand, and nothing
gets below it: no random order, no planner, on generated graphs and on captured ones."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.fx as fx

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES, Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import simulate
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches.captured import load_captured
from torch_patches.testing import torch_scheduler
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.strategies import build_case, random_options, random_recipe

aten = torch.ops.aten
ROOT = Path(__file__).parents[1]
DATA = ROOT / "test" / "data"

#: ms of a matrix product, of launching a collective, and of moving 256 bytes (8 x 8 floats).
MM, LAUNCH, MOVE = 10.0, 2.0, 8.0
SLOWDOWN = 1.25


def _tool(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return _tool("_bench_floor")


def stated(node: fx.Node, size_bytes: int | None) -> float:
    if collective_kind(node) is not None:
        own = node.meta["val"]
        size = own.numel() * own.itemsize if size_bytes is None else size_bytes
        return LAUNCH + MOVE * size / 256
    return MM if node.target is aten.mm.default else 0.0


def model_of(slowdown: float = SLOWDOWN, sharing: float = 1.0) -> RuntimeModel:
    host = HostCosts(0.0, 0.0, 0.0, 0.0)
    return RuntimeModel(custom=stated, host=host, interference=Interference(slowdown, sharing))


class Lines(GraphBuilder):
    """Square matrices in, products and all-reduces of them."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.placeholder(8, 8)

    def mm(self, *factors: fx.Node) -> fx.Node:
        return self.call(aten.mm, factors[0], factors[-1])

    def reduce(self, a: fx.Node, group: str = "g") -> fx.Node:
        return self.reduce_and_wait(a, "sum", group)


def as_it_stands(gm: fx.GraphModule, model: RuntimeModel) -> float:
    skeleton = collect(gm.graph)
    return simulate(gm.graph.nodes, skeleton, model, model.node_costs(gm.graph, skeleton)).total_ms


# -- by hand --------------------------------------------------------------------------------------


def test_compute_beside_a_collective_is_slower(tool: ModuleType) -> None:
    """start, mm, mm, wait: 20 of compute, 10 of a reduction: in those 10, 8 of the 20 are done."""
    b = Lines()
    start = b.all_reduce(b.x, "sum", "g")
    one = b.mm(b.x)
    gm = b.output(b.mm(one), b.wait(start))
    found = tool.floor_of(gm.graph, collect(gm.graph), model_of())
    assert found == tool.Floor(compute_ms=20.0, contention_ms=pytest.approx(2.0))
    assert as_it_stands(gm, model_of()) == pytest.approx(found.ms) == pytest.approx(22.0)
    assert tool.floor_of(gm.graph, collect(gm.graph), model_of(1.0)).ms == 20.0


def test_what_only_a_collective_makes_ready_waits_for_it(tool: ModuleType) -> None:
    """reduce -> two mm -> reduce, and an mm that depends on nothing: the first two mm begin at 10,
    the second reduction ends 10 after them, under which the third mm may run."""
    b = Lines()
    first = b.reduce(b.x)
    free = b.placeholder(8, 8)
    last = b.all_reduce(b.mm(b.mm(first, first), first), "sum", "g")
    beside = b.mm(free)
    gm = b.output(b.wait(last), beside)
    found = tool.floor_of(gm.graph, collect(gm.graph), model_of())
    # the third mm takes 12.5 under the last reduction, hence 2.5 more than that one
    assert as_it_stands(gm, model_of()) == pytest.approx(42.0)
    # 40 along the path; slow time: 8 + 20 + 8, and 1/5 of 20 ms of traffic
    assert found.ms == pytest.approx(40.0)


def test_collectives_that_depend_on_each_other_pay_for_each_launch(tool: ModuleType) -> None:
    """reduce -> reduce: 20, and so it is for two groups on one link.

    Of reduce and mm -> reduce, which could be one launch, 16 have to move: the product and its
    reduction take 10 + 8 of slow time, and 16 + 2 a fifth more (22 where they are not merged).
    """
    b = Lines()
    chained = b.output(b.reduce(b.reduce(b.x)))
    b = Lines()
    beside = b.output(b.reduce(b.x), b.reduce(b.mm(b.x)))
    b = Lines()
    groups = b.output(b.reduce(b.x), b.reduce(b.x, "h"))

    def floor(gm: fx.GraphModule, model: RuntimeModel) -> float:
        return tool.floor_of(gm.graph, collect(gm.graph), model).ms

    assert floor(chained, model_of()) == 20.0 == as_it_stands(chained, model_of())
    assert floor(beside, model_of()) == pytest.approx(21.6)
    assert as_it_stands(beside, model_of()) == pytest.approx(30.0)
    assert floor(groups, model_of()) == 20.0 == as_it_stands(groups, model_of())
    assert floor(groups, model_of(sharing=0.0)) == 10.0


def test_compute_between_collectives_of_a_chain_adds_up(tool: ModuleType) -> None:
    """Eight times reduce, then two products side by side: 30 each, though a path has 20 of it."""
    b = Lines()
    value = b.x
    for _ in range(8):
        value = b.reduce(value)
        value = b.call(aten.add.Tensor, b.mm(value), b.mm(value))
    gm = b.output(value)
    found = tool.floor_of(gm.graph, collect(gm.graph), model_of())
    assert found.ms == pytest.approx(240.0) == pytest.approx(as_it_stands(gm, model_of()))


def test_those_that_can_be_merged_pay_for_one_launch(tool: ModuleType) -> None:
    """Three reductions of inputs have 8 to move each: 2 + 24, and one product is behind all."""
    b = Lines()
    one, two, three = [b.reduce(b.placeholder(8, 8)) for _ in range(3)]
    gm = b.output(b.mm(b.call(aten.cat, [one, two, three]), one))
    found = tool.floor_of(gm.graph, collect(gm.graph), model_of())
    assert found == tool.Floor(traffic_ms=26.0, tail_ms=10.0)


def test_traffic_is_bytes_over_bandwidth_of_the_busiest_link(tool: ModuleType) -> None:
    """Two gathers of 64 MiB within a node (370 GB/s, 8 us + 7 hops of 1 us: devices.py), which one
    launch can do, or a link each; then one of 16 ranks beside them (45 GB/s, 8 us + 15 * 1.5)."""
    b = GraphBuilder()
    small, large = b.placeholder(2**21), b.placeholder(2**20)
    inside = [b.gather_and_wait(small, 8, "g") for _ in range(2)]
    gm = b.output(*inside, b.gather_and_wait(large, 16, "i"))
    across = 2**26 * 15 / 16 / 45e6 + 30.5e-3
    assert tool.floor_of(gm.graph, collect(gm.graph), RuntimeModel()).ms == pytest.approx(across)
    b = GraphBuilder()
    small = b.placeholder(2**21)
    gm = b.output(*[b.gather_and_wait(small, 8, "g") for _ in range(2)])
    one = 2**26 * 7 / 8 / 370e6
    found = tool.floor_of(gm.graph, collect(gm.graph), RuntimeModel())
    assert found.traffic_ms == pytest.approx(2 * one + 15e-3) == pytest.approx(found.ms)


def test_a_cast_of_a_parameter_costs_nothing_and_one_in_between_does(tool: ModuleType) -> None:
    """x -> cast -> relu -> cast -> mm.  3 us is the shortest kernel (devices.py)."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    cast = torch.ops.prims.convert_element_type
    low = b.call(cast, b.call(aten.relu, b.call(cast, x, torch.bfloat16)), torch.float32)
    gm = b.output(b.call(aten.mm, low, low))
    found = tool.floor_of(gm.graph, collect(gm.graph), RuntimeModel())
    assert tool.edge_nodes(gm.graph) == {next(iter(x.users))}
    assert found.ms == pytest.approx(6e-3)  # the second cast is one kernel with the relu


def test_a_graph_without_jobs_has_no_floor(tool: ModuleType) -> None:
    b = Lines()
    gm = b.output(b.x)
    assert tool.floor_of(gm.graph, collect(gm.graph), model_of()).ms == 0.0


def test_what_is_exposed_at_the_ends_is_told_apart() -> None:
    """reduce -> mm -> reduce -> mm -> reduce, and one that nobody waits for: 10 each, the last 20."""
    b = Lines()
    between = b.reduce(b.mm(b.reduce(b.x)))
    last = b.mm(between)
    gm = b.output(b.reduce(last), b.all_reduce(last, "sum", "h"))
    bench = _tool("_bench_measure")
    run = bench.simulated(gm.graph, model_of())
    assert run.timeline.exposed_ms == 40.0
    assert bench.exposed_at_the_ends(gm.graph, run) == (10.0, 20.0)


# -- nothing gets below it ------------------------------------------------------------------------


def random_graph(seed: int) -> fx.GraphModule:
    """Products and reductions of two groups, each of earlier values."""
    choose = random.Random(seed)
    b = Lines()
    values = [b.x, b.placeholder(8, 8)]
    for _ in range(choose.randint(3, 12)):
        left, right = choose.choice(values), choose.choice(values)
        if choose.random() < 0.5:
            values.append(b.mm(left, right))
        else:
            values.append(b.reduce(left, choose.choice("gh")))
    return b.output(*values[2:])


def random_order(graph: fx.Graph, choose: random.Random) -> list[fx.Node]:
    left, done = list(graph.nodes), dict[fx.Node, None]()
    while left:
        ready = [n for n in left if all(i in done for i in n.all_input_nodes)]
        node = choose.choice([n for n in ready if n.op != "output"] or ready)
        done[node] = None
        left.remove(node)
    return list(done)


@pytest.mark.parametrize("sharing", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(30))
def test_no_order_gets_below(tool: ModuleType, seed: int, sharing: float) -> None:
    gm, model = random_graph(seed), model_of(sharing=sharing)
    skeleton = collect(gm.graph)
    found = tool.floor_of(gm.graph, skeleton, model)
    costs = model.node_costs(gm.graph, skeleton)
    for attempt in range(25):
        order = random_order(gm.graph, random.Random(attempt))
        assert simulate(order, skeleton, model, costs).total_ms >= found.ms - 1e-9


def test_some_orders_reach_it(tool: ModuleType) -> None:
    """Of the 30 graphs above at least a third; a floor of zero would pass the test of no order."""
    reached = 0
    for seed in range(30):
        gm, model = random_graph(seed), model_of()
        skeleton = collect(gm.graph)
        found = tool.floor_of(gm.graph, skeleton, model)
        costs = model.node_costs(gm.graph, skeleton)
        orders = (random_order(gm.graph, random.Random(attempt)) for attempt in range(25))
        best = min(simulate(order, skeleton, model, costs).total_ms for order in orders)
        reached += best <= found.ms * 1.02
    assert reached >= 10


#: Bytes of the tiny generated tensors count, kernels and launches hardly.
SLOW = dataclasses.replace(
    DEVICES["H100"],
    dram_gb_per_s=1e-3,
    intra_node=Link(0.5, 0.1, 1e-4),
    inter_node=Link(0.5, 0.1, 1e-4),
)
MODELS = {
    "H100": RuntimeModel(),
    "bytes": RuntimeModel(SLOW, host=HostCosts(0.0, 0.0, 0.0, 0.0)),
    "two links": RuntimeModel(SLOW, interference=Interference(1.5, 0.0)),
}


@pytest.mark.parametrize("seed", range(40))
def test_no_planner_gets_below_on_generated_graphs(tool: ModuleType, seed: int) -> None:
    choose = random.Random(seed)
    gm, options = build_case(random_recipe(choose)).gm, random_options(choose)
    floors = {n: tool.floor_of(gm.graph, collect(gm.graph), m) for n, m in MODELS.items()}
    before = {name: kernels(tool, gm.graph, model) for name, model in MODELS.items()}
    with as_on_gpu() if seed % 2 else contextlib.nullcontext():
        pipeline.run_post_grad(gm.graph, options)
    for name, model in MODELS.items():
        # Kernels that come to be fused by a copy into a bucket may read a tensor once for all.
        now = kernels(tool, gm.graph, model)
        saved = sum(max(ms - now.get(node, 0.0), 0.0) for node, ms in before[name].items())
        assert floors[name].ms <= judged(gm.graph, model) + saved + 1e-9


def kernels(tool: ModuleType, graph: fx.Graph, model: RuntimeModel) -> dict[str, float]:
    """Their ms by name, without those that merging may do away with."""
    skeleton = dataclasses.replace(collect(graph), idle=frozenset())
    costs = model.node_costs(graph, skeleton).items()
    edge = tool.edge_nodes(graph)
    return {node.name: cost.ms for node, cost in costs if node not in edge}


def judged(graph: fx.Graph, model: RuntimeModel) -> float:
    return _tool("_bench_measure").simulated(graph, model).timeline.total_ms


def captured_graphs() -> Iterator[tuple[Path, str]]:
    for name in ("llama_2l_fsdp4_tp2", "llama_2l_hsdp2x4", "llama_3l_fsdp8", "moe_3l_dp4_ep2"):
        for graph in ("fw", "bw"):
            yield DATA / f"{name}.json.gz", graph


@pytest.mark.parametrize("options", [{"bucketing_mode": "auto"}, {"bucketing_mode": "topo_span"}])
@pytest.mark.parametrize(("path", "graph"), list(captured_graphs()))
def test_no_planner_gets_below_on_captured_graphs(
    tool: ModuleType, path: Path, graph: str, options: dict[str, str]
) -> None:
    captured = load_captured(path)
    gm = captured.graphs[graph]
    with (
        as_on_gpu(),
        torch_scheduler.process_groups(captured.groups),
    ):
        models = [*MODELS.values(), RuntimeModel(host=HostCosts(0.0, 0.0, 0.0, 0.0))]
        floors = [tool.floor_of(gm.graph, collect(gm.graph), model) for model in models]
        before = [judged(gm.graph, model) for model in models]
        torch_patches.optimize_graph(gm, **options)
        after = [judged(gm.graph, model) for model in models]
    for floor, first, last in zip(floors, before, after, strict=True):
        assert 0 < floor.ms <= min(first, last) + 1e-9
