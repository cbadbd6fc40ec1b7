"""Symbolic sizes: they stay symbolic, no decision guards on one, nothing is compiled again for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx as fx
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.backend import aot_eager_comm_overlap
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.graph_builder import GraphBuilder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MODES = {
    "topo_span": Options("topo_span"),
    "copied": Options("topo_span", bucket_mode="default"),
    "auto": Options("auto", insert_overlap_deps=True),
    "transformer_block": Options("transformer_block", insert_overlap_deps=True),
    "fused": Options("topo_span", fuse_chained_all_gathers=True),
}
FIXED, SYMBOLIC = 4, 3
Build = Callable[[], tuple[fx.GraphModule, ShapeEnv]]


def symbolic_graph() -> tuple[fx.GraphModule, ShapeEnv]:
    """Activations of a backed size, an all-to-all whose splits are known at run time only, weights
    of a fixed and of a symbolic number of rows, and gradients of both."""
    env = ShapeEnv()
    b = GraphBuilder(FakeTensorMode(shape_env=env))
    h = b.placeholder(b.symbol(48).meta["val"], 64)
    fixed = [b.placeholder(32, 64) for _ in range(FIXED)]
    rows = b.symbol(16).meta["val"]
    symbolic = [b.placeholder(rows, 64) for _ in range(SYMBOLIC)]
    counts = b.placeholder(2, dtype=torch.int64)
    splits = [
        b.call(aten._local_scalar_dense, b.call(aten.select.int, counts, 0, i)) for i in (0, 1)
    ]
    for split in splits:
        torch._check(split.meta["val"] >= 0)
    for weight in fixed:
        h = b.call(aten.mm, h, b.gather_and_wait(weight, 2, "g"))
    sent = b.call(c10d.all_to_all_single, h, splits, splits, "g")
    outputs = [b.call(aten.mm, b.wait(sent), b.gather_and_wait(b.placeholder(32, 64), 2, "g"))]
    for weight in symbolic:
        gathered = b.gather_and_wait(weight, 2, "g")
        outputs.append(
            b.scatter_and_wait(b.call(aten.mul.Tensor, gathered, gathered), "sum", 2, "g")
        )
    for _ in fixed:
        gradient = b.call(aten.mm, b.call(aten.t, h), h)
        outputs.append(b.scatter_and_wait(gradient, "sum", 2, "g"))
    return b.output(*outputs), env


def known_of_symbols(env: ShapeEnv) -> tuple[Any, ...]:
    """All that a compile has found out of its symbols, and would guard on."""
    return (
        [str(guard.expr) for guard in env.guards],
        {str(symbol): str(value) for symbol, value in env.replacements.items()},
        {str(symbol): str(known) for symbol, known in env.var_to_range.items()},
        {
            str(symbol): list(map(str, asserts))
            for symbol, asserts in env.deferred_runtime_asserts.items()
        },
        sorted(map(str, env.divisible)),
    )


def symbolic_bytes(gm: fx.GraphModule) -> list[str]:
    """Shapes of what the collectives give, as expressions."""
    waits = [n for n in gm.graph.nodes if n.target is c10d.wait_tensor.default]
    return sorted(str(tuple(wait.meta["val"].shape)) for wait in waits)


def swapped_graph() -> tuple[fx.GraphModule, ShapeEnv]:
    """The other way round: backed splits of an all-to-all, and weights whose number of rows is known
    at run time only."""
    env = ShapeEnv()
    b = GraphBuilder(FakeTensorMode(shape_env=env))
    splits = [b.symbol(24), b.symbol(40)]
    h = b.placeholder(splits[0].meta["val"] + splits[1].meta["val"], 64)
    count = b.call(aten.select.int, b.placeholder(1, dtype=torch.int64), 0, 0)
    rows = b.call(aten._local_scalar_dense, count).meta["val"]
    torch._check(rows >= 0)
    h = b.wait(b.call(c10d.all_to_all_single, h, splits, splits, "g"))
    for _ in range(FIXED + 1):
        h = b.call(aten.mm, h, b.gather_and_wait(b.placeholder(32, 64), 2, "g"))
    outputs = [h]
    for _ in range(SYMBOLIC):
        gathered = b.gather_and_wait(b.placeholder(rows, 64), 2, "g")
        product = b.call(aten.mul.Tensor, gathered, gathered)
        outputs.append(b.scatter_and_wait(product, "sum", 2, "g"))
    for _ in range(FIXED):
        gradient = b.call(aten.mm, b.call(aten.t, h), h)
        outputs.append(b.scatter_and_wait(gradient, "sum", 2, "g"))
    return b.output(*outputs), env


@pytest.mark.parametrize("build", [symbolic_graph, swapped_graph], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_shapes_stay_symbolic_and_no_guard_is_added(mode: str, build: Build) -> None:
    gm, env = build()
    before, shapes = known_of_symbols(env), symbolic_bytes(gm)
    asked: list[str] = []
    with as_on_gpu(), pytest.MonkeyPatch.context() as patch:
        evaluate = ShapeEnv.evaluate_expr
        patch.setattr(
            ShapeEnv,
            "evaluate_expr",
            lambda self, expression, *a, **k: (
                asked.append(str(expression)),
                evaluate(self, expression, *a, **k),
            )[1],
        )
        report = optimize_graph(gm, MODES[mode])
    assert known_of_symbols(env) == before
    assert asked == []  # not even a question that a guard could come of
    assert sorted((b.kind, len(b.members)) for b in report.buckets) == [
        ("all_gather", FIXED + SYMBOLIC + 1),
        ("reduce_scatter", FIXED + SYMBOLIC),
    ]
    if mode != "copied":
        assert symbolic_bytes(gm) == shapes
    for node in gm.graph.nodes:
        values: list[object] = []
        fx.node.map_aggregate((node.args, node.kwargs), values.append)
        assert not any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in values)
    gm.graph.lint()


def test_a_run_time_size_refuses_what_copying_would_have_to_split() -> None:
    """On a CPU, where reduce-scatters are copied: the splits of a bucket would be numbers."""
    gm, env = symbolic_graph()
    before = known_of_symbols(env)
    report = optimize_graph(gm, MODES["topo_span"])
    reasons = {r.reason for r in report.refusals if "reduce_scatter" in "".join(r.members)}
    assert reasons == {RefusalReason.SYMBOLIC_SIZE}
    assert known_of_symbols(env) == before


# -- compiled functions ----------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch._dynamo.reset()
    counters.clear()
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def steps(world: dist.ProcessGroup, options: dict[str, Any] | None) -> tuple[int, int]:
    """Trains with several batch sizes and sizes of a gathered weight; how many graphs were made,
    and how many buckets."""

    def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            weight = funcol.all_gather_tensor_autograd(shard, 0, world)
            x = torch.tanh(x @ weight.t()) @ weight
        return x

    backend = "aot_eager" if options is None else aot_eager_comm_overlap
    compiled = torch.compile(step, backend=backend, fullgraph=True, options=options)
    counters.clear()
    for rows, width in ((3, 4), (5, 6), (8, 10), (9, 12)):
        x = torch.ones(rows, 8)
        shards = [torch.ones(width, 8, requires_grad=True) for _ in range(3)]
        torch._dynamo.mark_dynamic(x, 0)
        for shard in shards:
            torch._dynamo.mark_dynamic(shard, 0)
        compiled(x, *shards).sum().backward()
    return counters["stats"]["unique_graphs"], counters["inductor"]["comm_overlap_buckets"]


def costs(node: fx.Node, size_bytes: int | None) -> float | None:
    """ms; by the usual estimate "auto" sees nothing to gain in so small a model."""
    if "c10d" in str(node.target):
        return 1.0
    return 2.0 if "mm" in str(node.target) else None


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_nothing_is_compiled_again(world: dist.ProcessGroup, mode: str) -> None:
    options = {"bucketing_mode": mode, "custom_runtime_estimation": costs}
    graphs, buckets = steps(world, options)
    assert graphs == 1
    assert buckets > 0
    torch._dynamo.reset()
    assert steps(world, None) == (1, 0)


def test_static_marks_compile_once_for_each_size(world: dist.ProcessGroup) -> None:
    """``mark_static``: one graph a size, each with its own buckets; none for a size seen before."""

    def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            x = x @ funcol.all_gather_tensor_autograd(shard, 0, world)
        return x

    compiled = torch.compile(step, backend=aot_eager_comm_overlap, fullgraph=True)
    shards = [torch.nn.Parameter(torch.ones(4, 8)) for _ in range(3)]
    for rows in (3, 5, 3, 5):
        x = torch.ones(rows, 8)
        torch._dynamo.mark_static(x, 0)
        compiled(x, *shards).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2
    assert counters["inductor"]["comm_overlap_buckets"] == 2 * 2
