"""tools/bench_modules.py: blocks and their starts on captures and by hand, what torch's copies cost,
and a run of the tool."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._inductor.fx_passes import bucketing

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveKind,
    Refusal,
    RefusalReason,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import BucketReport, Report
from torch_patches.captured import load_captured
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
ROOT = Path(__file__).parents[1]
LLAMA = ROOT / "test" / "data" / "llama_3l_fsdp8.json.gz"
#: A Llama of 3 layers: embedding, layers, norm with head.
BLOCKS = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm+output"]


@pytest.fixture(scope="module", autouse=True)
def tools() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def blocks_of(tools: None) -> ModuleType:
    return importlib.import_module("_bench_blocks")


@pytest.fixture(scope="module")
def measuring(tools: None) -> ModuleType:
    return importlib.import_module("_bench_measure")


@pytest.fixture(scope="module")
def bench(tools: None) -> ModuleType:
    return importlib.import_module("bench_modules")


# -- blocks of a capture --------------------------------------------------------------------------


def test_blocks_of_a_capture(blocks_of: ModuleType) -> None:
    graphs = load_captured(LLAMA).graphs
    for name in ("fw", "bw"):
        assert blocks_of.block_plan(graphs[name].graph) == [*BLOCKS[:-1], ["norm", "output"]]
    forward = blocks_of.Blocks.of(graphs["fw"].graph)
    # 9 parameters a layer, and 3 more; one gather each.
    assert len(forward.keys) == 30
    assert list(dict.fromkeys(key[:2] for key in forward.keys.values())) == [
        (block, "all_gather") for block in BLOCKS
    ]
    backward = blocks_of.Blocks.of(graphs["bw"].graph)
    found = {key[:2] for key in backward.keys.values()}
    # The embedding's table is not gathered again.
    assert found == {(b, "all_gather") for b in BLOCKS[1:]} | {
        (b, "reduce_scatter") for b in BLOCKS
    }


def test_torch_makes_one_start_a_block(bench: ModuleType) -> None:
    forward = bench.run_case(LLAMA, "fw", bench.Ours("topo_span", {}), ["ours"], False)
    backward = bench.run_case(LLAMA, "bw", bench.Ours("topo_span", {}), ["ours"], False)
    assert forward.before.launches == {"all_gather": 30}
    assert forward.torch.launches == {"all_gather": 5}
    assert forward.torch.carrying == 5
    assert backward.torch.launches == {"all_gather": 4, "reduce_scatter": 5}
    # Copies into and out of buckets cost something, ours are not looked at.
    assert forward.torch.compute_ms > forward.before.compute_ms
    assert (forward.ours.error, forward.ratio) == ("skipped", 0.0)


def test_an_exception_is_a_result(bench: ModuleType) -> None:
    case = bench.run_case(LLAMA, "fw", bench.Ours("no such mode", {}), ["torch"], True)
    assert "FlagError" in case.ours.error
    assert case.check is None
    assert "no such mode" in bench.table([case])


# -- one start for each block, by hand ------------------------------------------------------------

A, B = ("layers.0", "all_gather", "g", "float32", "", False), ("layers.1",) + ("x",) * 5


def starts_of(*names: str, **merged: int) -> list[fx.Node]:
    """Nodes of these names; ``merged`` ones are the bucket of that index."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in (*names, *merged)]
    for node in nodes:
        if node.name in merged:
            node.meta[BUCKET_MARK] = {
                "bucket": merged[node.name],
                "members": 2,
                "traffic": "parameter",
            }
    return nodes


def bucket(*members: str) -> BucketReport:
    return BucketReport("all_gather", "g", "float32", None, "default", members, 8, 1, "end")


def checked(
    blocks_of: ModuleType,
    keys: dict[str, Any],
    starts: list[fx.Node],
    buckets: tuple[BucketReport, ...] = (),
    refused: tuple[str, ...] = (),
) -> Any:
    refusal = Refusal(refused, RefusalReason.DEPENDENCY)
    report = Report(mode="x", buckets=buckets, refusals=(refusal,) if refused else ())
    return blocks_of.check_blocks(starts, blocks_of.Blocks(lambda node: "", keys, report))


def test_one_bucket_for_each_key_is_right(blocks_of: ModuleType) -> None:
    keys = {"a0": A, "a1": A, "b0": B}
    check = checked(blocks_of, keys, starts_of("b0", bucket0=0), (bucket("a0", "a1"),))
    assert (check.keys, check.single, check.violations, check.merged_blocks) == (2, 2, (), 0)


def test_two_starts_need_a_refusal(blocks_of: ModuleType) -> None:
    keys = {"a0": A, "a1": A}
    check = checked(blocks_of, keys, starts_of("a0", "a1"))
    assert (check.keys, check.single) == (1, 0)
    assert check.violations == ("layers.0 all_gather g float32  False: 2 starts",)
    check = checked(blocks_of, keys, starts_of("a0", "a1"), refused=("a1",))
    assert check.violations == ()
    assert check.refused == (
        f"layers.0 all_gather g float32  False: 2 starts, {RefusalReason.DEPENDENCY.value}",
    )


def test_each_start_but_one_needs_a_refusal(blocks_of: ModuleType) -> None:
    keys = {"a0": A, "a1": A, "a2": A, "a3": A}
    starts = starts_of("a0", "a1", bucket0=0)
    made = (bucket("a2", "a3"),)
    assert checked(blocks_of, keys, starts, made, refused=("a0",)).violations
    assert not checked(blocks_of, keys, starts, made, refused=("a0", "a3")).violations


def test_a_lost_start_is_a_violation(blocks_of: ModuleType) -> None:
    assert checked(blocks_of, {"a0": A, "b0": B}, starts_of("a0")).violations


def test_bucket_of_two_blocks_is_counted(blocks_of: ModuleType) -> None:
    check = checked(blocks_of, {"a0": A, "b0": B}, starts_of(bucket0=0), (bucket("a0", "b0"),))
    assert (check.single, check.merged_blocks, check.violations) == (2, 1, ())


def test_uncovered_collectives_are_counted(blocks_of: ModuleType) -> None:
    outside = ("", *A[1:])
    check = checked(blocks_of, {"a0": A, "c0": outside, "c1": outside}, starts_of("a0", "c0", "c1"))
    assert (check.keys, check.unlabelled, check.violations) == (1, 2, ())


# -- what could have been hidden, by hand ---------------------------------------------------------


def model_of(**ms: float) -> RuntimeModel:
    """Given times of products ("mm") and of kinds of collectives; all else is free."""

    def stated(node: fx.Node, size_bytes: int | None) -> float:
        kind = collective_kind(node)
        name = "mm" if node.target is aten.mm.default else kind.value if kind else ""
        return ms.get(name, 0.0)

    quiet = Interference(compute_slowdown=1.0, link_sharing=0.0)
    return RuntimeModel(custom=stated, host=HostCosts(0.0, 0.0, 0.0, 0.0), interference=quiet)


class Layers(GraphBuilder):
    """Nodes of ``layers.<number>``."""

    def at(self, layer: int, node: fx.Node) -> fx.Node:
        node.meta["nn_module_stack"] = {"": (f"L['self'].layers.{layer}", torch.nn.Module)}
        return node

    def gather(self, layer: int) -> fx.Node:
        return self.at(layer, self.all_gather(self.placeholder(4, 8), 2, "g"))

    def mm(self, layer: int, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.at(layer, self.call(aten.mm, a, b))


def gathers(prefetch: int, reduce_in: int | None = None) -> fx.GraphModule:
    """Three layers, gathered ``prefetch`` layers before their product; layer ``reduce_in`` also
    reduces its activations."""
    b = Layers()
    x = b.placeholder(8, 8)
    started = [b.gather(layer) for layer in range(prefetch)]
    for layer in range(3):
        if layer + prefetch < 3:
            started.append(b.gather(layer + prefetch))
        x = b.mm(layer, x, b.wait(started[layer]))
        if layer == reduce_in:
            x = b.wait(b.at(layer, b.all_reduce(x, "sum", "g")))
    return b.output(x)


def exposed(blocks_of: ModuleType, measuring: ModuleType, gm: fx.GraphModule, **ms: float) -> Any:
    model = model_of(**ms)
    run = measuring.simulated(gm.graph, model)
    found = blocks_of.exposed_blocks(run, model, blocks_of.Blocks.of(gm.graph))
    return [(e.block, e.cover, e.exposed_ms) for e in found]


def test_gathers_that_the_layer_before_could_hide(
    blocks_of: ModuleType, measuring: ModuleType
) -> None:
    """gather 0, mm 0, gather 1, mm 1, ...: the first gather has nothing to hide under."""
    found = exposed(blocks_of, measuring, gathers(0), mm=10.0, all_gather=4.0)
    assert found == [("layers.1", "layers.0", 4.0), ("layers.2", "layers.1", 4.0)]


def test_hidden_gathers_are_not_listed(blocks_of: ModuleType, measuring: ModuleType) -> None:
    assert exposed(blocks_of, measuring, gathers(1), mm=10.0, all_gather=4.0) == []


def test_gathers_longer_than_compute_are_not_listed(
    blocks_of: ModuleType, measuring: ModuleType
) -> None:
    """30 ms cannot hide under 10, wherever they start; 10 can."""
    assert exposed(blocks_of, measuring, gathers(0), mm=10.0, all_gather=30.0) == []
    assert len(exposed(blocks_of, measuring, gathers(0), mm=10.0, all_gather=10.0)) == 2


def test_other_traffic_takes_room_under_compute(
    blocks_of: ModuleType, measuring: ModuleType
) -> None:
    """Layer 0 reduces for 7 ms: with the gather that is more than its 10 ms of compute."""
    ms = {"mm": 10.0, "all_gather": 4.0, "all_reduce": 7.0}
    found = exposed(blocks_of, measuring, gathers(0, reduce_in=0), **ms)
    assert found == [("layers.2", "layers.1", 4.0)]


def test_buckets_of_two_layers_are_not_judged(blocks_of: ModuleType, measuring: ModuleType) -> None:
    """The gather of layer 1 stands for one of layer 2, too."""
    gm = gathers(0)
    model = model_of(mm=10.0, all_gather=4.0)
    _, second, third = (c.start for c in collect(gm.graph).collectives)
    blocks = blocks_of.Blocks.of(gm.graph)
    second.meta[BUCKET_MARK] = {"bucket": 0, "members": 2, "traffic": "parameter"}
    report = Report(mode="x", buckets=(bucket(second.name, third.name),))
    run = measuring.simulated(gm.graph, model)
    found = blocks_of.exposed_blocks(run, model, replace(blocks, report=report))
    assert [(e.block, e.cover) for e in found] == [("layers.2", "layers.1")]


def test_scatters_that_the_next_layer_could_hide(
    blocks_of: ModuleType, measuring: ModuleType
) -> None:
    """mm 2, scatter 2, mm 1, scatter 1, ...: the last scatter has nothing to hide under."""
    b = Layers()
    x = b.placeholder(8, 8)
    out = []
    for layer in (2, 1, 0):
        x = b.mm(layer, x, x)
        out.append(b.wait(b.at(layer, b.reduce_scatter(x, "sum", 2, "g"))))
    found = exposed(blocks_of, measuring, b.output(x, *out), mm=10.0, reduce_scatter=4.0)
    assert found == [("layers.2", "layers.1", 4.0), ("layers.1", "layers.0", 4.0)]


# -- what torch's copies cost ---------------------------------------------------------------------


@pytest.mark.skipif(not _compat.has_prebucketing(), reason="torch < 2.13: not what is compared")
def test_copy_into_a_gather_writes_one_part_of_it(measuring: ModuleType) -> None:
    """64 MiB of fp32 cast into 32 MiB of a 256 MiB buffer of 8 ranks: 96 MiB through memory."""
    b = GraphBuilder()
    x = b.placeholder(16 * 2**20)
    dtype = bucketing._ALL_DTYPES.index(torch.bfloat16)
    op = torch.ops.bucketing._pre_bucket_all_gather
    node = b.call(op, [x], 8, torch.bfloat16, [dtype], 0)
    gm = b.output(node)
    device = DEVICES["H100"]
    rate = device.dram_gb_per_s * device.dram_efficiency * 1e6
    model = RuntimeModel(device=device)
    assert measuring.simulated(gm.graph, model).costs[node].ms == pytest.approx(96 * 2**20 / rate)
    before = measuring.simulated(gm.graph, model, uncorrected=True)
    assert before.costs[node].ms == pytest.approx((64 + 256) * 2**20 / rate)


def test_only_torch_is_corrected(bench: ModuleType) -> None:
    case = bench.run_case(LLAMA, "fw", bench.Ours("topo_span", {}), [], False)
    assert case.before.uncorrected_ms == case.before.total_ms
    assert case.ours.uncorrected_ms == case.ours.total_ms


# -- the tool -------------------------------------------------------------------------------------


def test_the_tool(tmp_path: Path, bench: ModuleType) -> None:
    tool, out = ROOT / "tools" / "bench_modules.py", tmp_path / "table.md"
    other = LLAMA.with_name("llama_8l_fsdp8.json.gz")
    command = [sys.executable, str(tool), str(LLAMA), str(other), "--mode", "topo_span"]
    command += ["--graphs", "fw", "--only", "3l", "--check", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (case,) = map(bench.parse_case, lines)
    assert json.loads(lines[0])["file"] == "llama_3l_fsdp8"
    assert case.ratio == pytest.approx(case.ours.total_ms / case.torch.total_ms)
    assert case.check["keys"] == case.check["single"] == len(BLOCKS)
    assert out.read_text().count("| llama_3l_fsdp8 | fw |") == 3
    (tmp_path / "run.txt").write_text(done.stdout)
    assert list(bench.read_cases(tmp_path / "run.txt")) == [case]


def test_a_violation_fails_the_check(bench: ModuleType, tmp_path: Path) -> None:
    side = bench.Side()
    case = bench.ModuleCase("f", "fw", "x", "2.13", side, side, side)
    broken = replace(case, check={"violations": ["layers.0: 2 starts"]})
    for found, code in ((case, 0), (broken, 1)):
        path = tmp_path / "run.txt"
        path.write_text(json.dumps(bench.asdict(found)))
        assert bench.main(["--cases", str(path), "--check"]) == code


def test_kinds_in_the_model_are_those_of_collectives() -> None:
    """The stated times of this file are by these names."""
    found = {c.kind for c in collect(gathers(0, reduce_in=0).graph).collectives}
    assert found == {CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE}
