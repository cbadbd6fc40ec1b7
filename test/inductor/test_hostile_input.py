"""Graphs and flags that nobody means: numbers beyond any machine, subgraphs and results in odd places,
sizes that have no value. No pass may fail on one, or overlook what it does."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.notices import STRICT_VARIABLE
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import BucketCapError
from torch_patches._inductor.fx_passes.comm_overlap.plan import BarrierKind, RefusalReason
from torch_patches.testing import effect_ops
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.invariants import find_violation
from torch_patches.testing.strategies import Description

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails inside a pass raises, instead of leaving the graph."""
    monkeypatch.setenv(STRICT_VARIABLE, "1")


def gathers() -> fx.GraphModule:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    for shard in [b.placeholder(4, 8) for _ in range(4)]:
        x = b.call(aten.mm, x, b.gather_and_wait(shard, 2, "g"))
    return b.output(x)


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_reductions_by_an_object_are_not_merged_and_not_named_after_it(mode: str) -> None:
    """From torch 2.15 on the op may be a ReduceOp, which in a graph is an input without a tensor.  It
    may hold a factor, and the input's name need not be that of the other ranks."""
    hashes = []
    for name in ("op", "factor"):
        b = GraphBuilder()
        starts = [b.all_reduce(b.placeholder(8, 8), "sum", "g") for _ in range(3)]
        by = b.opaque_placeholder(name)
        gm = b.output(*map(b.wait, starts))
        for start in starts[:2]:
            start.args = (start.args[0], by, "g")
        skeleton = collect(gm.graph)
        assert [c.key is None for c in skeleton.collectives] == [True, True, False]
        refusals = [c.refusal for c in skeleton.collectives]
        assert refusals == [RefusalReason.KIND_NOT_MERGEABLE] * 2 + [None]
        report = torch_patches.optimize_graph(gm, bucketing_mode=mode, overlap=True)
        assert report.failure is None
        assert report.collectives_after == {"all_reduce": 3}
        hashes.append(report.schedule_hash)
    assert hashes[0] == hashes[1]


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("bucket_cap_mb", 1e308),
        ("bucket_cap_mb", [1.0, 1e308]),
        ("bucket_cap_mb", lambda index: math.inf),
        ("max_memory_increase_gb", 1e300),
        ("max_memory_increase_ratio", 1e308),
        ("max_in_flight_gb", 1e300),
    ],
)
def test_a_cap_beyond_any_machine_is_no_cap(mode: str, name: str, value: Any) -> None:
    arguments = {"bucketing_mode": mode, "overlap": True, name: value}
    report = torch_patches.optimize_graph(gathers(), **arguments)
    assert report.failure is None
    assert report.collectives_before == {"all_gather": 4}
    assert report.collectives_after["all_gather"] < 4


@pytest.mark.parametrize("answer", [None, math.nan, "25", [25]])
def test_a_cap_function_that_gives_no_number_is_the_users_mistake(answer: Any) -> None:
    gm = gathers()
    before = str(gm.graph)
    with pytest.raises(
        BucketCapError, match=r"bucket_cap_mb, a function, returned .* for bucket 0"
    ):
        torch_patches.optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=lambda _: answer)
    assert str(gm.graph) == before


def test_a_cap_function_that_raises_is_the_users_mistake() -> None:
    with pytest.raises(BucketCapError, match=r"raised ZeroDivisionError: .* for bucket 0"):
        torch_patches.optimize_graph(
            gathers(), bucketing_mode="topo_span", bucket_cap_mb=lambda index: 25 / index
        )


@pytest.mark.parametrize("name", [".", "missing.json"])
def test_a_calibration_file_that_cannot_be_read_is_told_with_its_flag(
    tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / name)
    with pytest.raises(OSError, match=r"optimizations\.calibration_file: ") as caught:
        torch_patches.optimize_graph(gathers(), calibration_file=path)
    assert caught.value.filename == path
    assert isinstance(caught.value, FileNotFoundError) == (name != ".")


# ---------------------------------------------------------------- higher-order ops


def called_from(path: str, inside: str) -> fx.GraphModule:
    """A subgraph, which a module below the graph's may hold, between two gathers."""
    i = GraphBuilder()
    y = i.call(aten.relu, i.placeholder(8, 8))
    if inside == "effect":
        i.call(effect_ops.barrier_, y)
    elif inside == "collective":
        y = i.reduce_and_wait(y, "sum", "g")
    elif inside == "random":
        y = i.call(aten.bernoulli.p, y, 0.5)
    subgraph = i.output(y)

    b = GraphBuilder()
    x, *shards = b.placeholder(8, 8), b.placeholder(4, 8), b.placeholder(4, 8)
    x = b.call(aten.mm, x, b.gather_and_wait(shards[0], 2, "g"))
    called = b.graph.call_function(invoke_subgraph, (b.graph.get_attr(path), "s", x))
    called.meta["val"] = (x.meta["val"],)
    x = b.call(aten.mm, b.getitem(called, 0), b.gather_and_wait(shards[1], 2, "g"))
    b.graph.output((x,))
    root = torch.nn.Module()
    *above, name = path.split(".")
    holder = root
    for step in above:
        holder.add_module(step, torch.nn.Module())
        holder = holder.get_submodule(step)
    holder.add_module(name, subgraph)
    return fx.GraphModule(root, b.graph)


@pytest.mark.parametrize("path", ["subgraph", "held.below.subgraph"])
@pytest.mark.parametrize(
    "inside, kind",
    [
        ("nothing", None),
        ("effect", BarrierKind.EFFECT),
        ("collective", BarrierKind.EFFECT),
        ("random", BarrierKind.RNG),
    ],
)
def test_what_a_subgraph_does_is_seen_wherever_it_is_held(
    path: str, inside: str, kind: BarrierKind | None
) -> None:
    barriers = collect(called_from(path, inside).graph).barriers
    assert [b.kind for b in barriers] == ([] if kind is None else [kind])


def triton_kernel(as_dict: bool) -> fx.GraphModule:
    """A functional Triton kernel returns its results by name; a tuple of them is the same."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    b = GraphBuilder()
    x = b.placeholder(256, 256)
    arguments: dict[str, Any] = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)]}
    arguments |= {"tma_descriptor_metadata": {}, "kwargs": {"x": x}, "tensors_to_clone": []}
    kernel = b.graph.call_function(triton_kernel_wrapper_functional, (), arguments)
    with b.fake_mode:
        made = {"big": torch.empty(256, 256), "small": torch.empty(16)}
    kernel.meta["val"] = made if as_dict else tuple(made.values())
    big, small = (
        b.graph.call_function(operator.getitem, (kernel, name if as_dict else place))
        for place, name in enumerate(made)
    )
    big.meta["val"], small.meta["val"] = made["big"], made["small"]
    late = b.call(aten.neg, b.call(aten.relu, big))
    return b.output(late, b.call(aten.neg, small))


def test_results_by_name_have_bytes_and_lifetimes_of_their_own() -> None:
    by_name, by_place = (
        live_bytes(gm.graph).at_node
        for gm in (triton_kernel(as_dict=True), triton_kernel(as_dict=False))
    )
    assert by_name == by_place
    assert by_name[1] >= 2 * 4 * 256 * 256  # the kernel: what it reads and what it makes


# ---------------------------------------------------------------- metadata


def step() -> fx.GraphModule:
    """Gathers, and gradients that are reduced over shards and then over replicas."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    for shard in [b.placeholder(4, 8) for _ in range(3)]:
        x = b.call(aten.mm, x, b.gather_and_wait(shard, 2, "g"))
    shards = [b.scatter_and_wait(x, "sum", 2, "g") for _ in range(3)]
    return b.output(*(b.reduce_and_wait(shard, "sum", "replicas") for shard in shards))


def test_any_node_may_lack_its_metadata() -> None:
    names = [node.name for node in step().graph.nodes if node.op != "output"]
    for name in ("all", *names):
        gm = step()
        for node in gm.graph.nodes:
            if name in ("all", node.name):
                node.meta.pop("val", None)
        report = torch_patches.optimize_graph(gm)
        assert report.failure is None, name
        gm.graph.lint()


# ---------------------------------------------------------------- what no schedule moves


@pytest.mark.parametrize("mode", ["topo_span", "auto", "transformer_block"])
@pytest.mark.parametrize("form", ["in place", "read before its wait"])
def test_a_chain_that_ends_with_what_stays(form: str, mode: str) -> None:
    b = GraphBuilder()
    x = y = b.placeholder(8, 8)
    outputs = []
    for _ in range(4):
        y = b.call(aten.mm, y, x)
        shard = b.scatter_and_wait(y, "sum", 2, "dp")
        op = c10d.all_reduce_ if form == "in place" else c10d.all_reduce
        start = b.call(op, shard, "sum", "tp")
        outputs.append(b.wait(start))
        if form == "read before its wait":
            outputs.append(b.call(aten.view, start, [32]))
    for _ in range(3):
        y = b.call(aten.mm, y, y)
    flags = Options(mode, enable_overlap_scheduling=True)
    assert find_violation(b.output(y, *outputs), Description(), flags, trusted=True).buckets


@pytest.mark.parametrize("mode", ["topo_span", "auto", "transformer_block"])
@pytest.mark.parametrize("form", ["out=", "read before its wait", "without a wait"])
def test_a_chain_that_begins_with_what_stays(form: str, mode: str) -> None:
    """HSDP: shards of gradients are reduced over replicas; the first reduction has to stay, the second
    ones are merged."""
    b = GraphBuilder()
    x, shards, extra = b.placeholder(8, 8), [], []
    for _ in range(3):
        if form == "out=":
            buffer = b.call(aten.empty.memory_format, [4, 8])
            start = b.call(c10d.reduce_scatter_tensor_out, x, "sum", 2, "g", out=buffer)
        else:
            start = b.reduce_scatter(x, "sum", 2, "g")
        if form == "read before its wait":
            extra.append(b.call(aten.view, start, [32]))
        shards.append(start if form == "without a wait" else b.wait(start))
    gm = b.output(*(b.reduce_and_wait(shard, "sum", "replicas") for shard in shards), *extra)
    report = torch_patches.optimize_graph(gm, bucketing_mode=mode, overlap=True)
    assert report.failure is None
    assert report.collectives_after == {"reduce_scatter": 3, "all_reduce": 1}


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_a_size_that_divides_by_the_difference_of_two_symbols(mode: str) -> None:
    """All symbols count as equal, and the difference of two of them as nothing."""
    b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
    one, two = b.symbol(64), b.symbol(128)
    shards = [b.placeholder(4, 8) for _ in range(3)]
    x = b.placeholder(8, 8)
    for shard in shards:
        x = b.call(aten.mm, x, b.gather_and_wait(shard, 2, "g"))
    rows = b.call(operator.floordiv, one, b.call(operator.sub, two, one))
    y = b.reduce_and_wait(b.call(aten.empty.memory_format, [rows, 8]), "sum", "g")
    report = torch_patches.optimize_graph(b.output(x, y), bucketing_mode=mode, overlap=True)
    assert report.failure is None
    assert report.collectives_after == {"all_gather": 1, "all_reduce": 1}
