"""Captured graphs: round trip, the files in test/data."""

from __future__ import annotations

import gzip
import operator
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import CheckpointPolicy

from torch_patches.captured import (
    CapturedGroup,
    CaptureFormatError,
    OpaqueValue,
    load_captured,
    save_captured,
)

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = sorted(DATA.glob("*.json.gz"))

# Collectives of the forward and the backward graph.  A Llama of L layers has P = 9 L + 3 parameters;
# the embedding's gather is not repeated in the backward, which only scatters its gradient.
GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
EXPECTED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "llama_3l_fsdp8": ({GATHER: 30}, {GATHER: 29, SCATTER: 30}),
    "llama_8l_fsdp8": ({GATHER: 75}, {GATHER: 74, SCATTER: 75}),
    "llama_3l_fsdp8_inductor": ({GATHER: 30}, {GATHER: 29, SCATTER: 30}),
    "llama_2l_fsdp8_noreshard": ({GATHER: 21}, {SCATTER: 21}),
    "llama_2l_fsdp8_ac": ({GATHER: 21}, {GATHER: 20, SCATTER: 21}),
    "llama_2l_fsdp8_dynamic_batch": ({GATHER: 21}, {GATHER: 20, SCATTER: 21}),
    "llama_1l_fsdp8_dynamic_seq_inductor": ({GATHER: 12}, {GATHER: 11, SCATTER: 12}),
    "llama_2l_hsdp2x4": ({GATHER: 21}, {GATHER: 20, SCATTER: 21, REDUCE: 21}),
    "llama_3l_ddp8": ({}, {REDUCE: 30}),
    "llama_2l_s0s0_4x2": ({GATHER: 42}, {GATHER: 40, SCATTER: 42}),
    # Tensor parallel adds, forward: a gather before each of 4 sublayers, one before the last norm's
    # head and one of its logits; a scatter after each sublayer and after the embedding.  The
    # backward has their transposes, and an all-reduce for each of the 2 L + 1 norm weights.
    "llama_2l_fsdp4_tp2": (
        {GATHER: 21 + 6, SCATTER: 5},
        {GATHER: 20 + 5, SCATTER: 21 + 5, REDUCE: 5},
    ),
    # Two MoE layers: 1 dense layer with 9 parameters, 2 with 6 + router 1 + shared 3 + experts 3,
    # and 3 more; two all-to-all for each MoE layer and direction.
    "moe_3l_dp4_ep2": (
        {GATHER: 38, "all_to_all_single": 4},
        {GATHER: 37, SCATTER: 38, "all_to_all_single": 4},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def stored_captures() -> None:
    """Each load decodes."""


def count_collectives(module: fx.GraphModule) -> Counter[str]:
    return Counter(
        node.target._opname
        for node in module.graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional"
        and node.target is not torch.ops._c10d_functional.wait_tensor.default
    )


def stem(path: Path) -> str:
    return path.name.removesuffix(".json.gz")


# ------------------------------------------------------------------------------- the files in data


def test_every_file_has_an_expectation() -> None:
    assert {stem(path) for path in FILES} == set(EXPECTED)


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < 600_000


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_file_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    captured = load_captured(path)
    assert not dist.is_initialized()
    assert list(captured.graphs) == ["joint", "fw", "bw"]
    for module in captured.graphs.values():
        module.graph.lint()
        for node in module.graph.nodes:
            if node.op == "output":
                continue
            value = node.meta["val"]
            if isinstance(value, FakeTensor):
                assert value.fake_mode is captured.fake_mode
    forward, backward = EXPECTED[stem(path)]
    assert count_collectives(captured.graphs["fw"]) == forward
    assert count_collectives(captured.graphs["bw"]) == backward
    captured.save(tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_groups_of_collectives_are_recorded(path: Path) -> None:
    captured = load_captured(path)
    for module in captured.graphs.values():
        for node in module.graph.nodes:
            names = [argument for argument in node.args if isinstance(argument, str)]
            if names and getattr(node.target, "namespace", "") == "_c10d_functional":
                assert names[-1] in captured.groups
    assert all(len(set(ranks)) == len(ranks) for ranks in captured.groups.values())


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_file_says_nothing_about_the_machine(path: Path) -> None:
    text = gzip.decompress(path.read_bytes()).decode()
    for word in ("stack_trace", "site-packages", "/work", "/home", "/tmp", ".py"):
        assert word not in text


def test_metadata_survives() -> None:
    captured = load_captured(DATA / "llama_3l_fsdp8.json.gz")
    joint = captured.graphs["joint"]
    by_op: dict[str, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        by_op.setdefault(getattr(node.target, "_opname", node.op), []).append(node)
    policies = {node.meta.get("recompute") for node in by_op[GATHER]}
    assert policies == {CheckpointPolicy.MUST_RECOMPUTE}
    assert {node.meta["partitioner_tag"] for node in by_op[SCATTER]} == {"is_backward"}
    paths = [entry[0] for entry in by_op[GATHER][1].meta["nn_module_stack"].values()]
    assert paths[-1].endswith("layers.0.attention_norm")
    meshes = [node for node in by_op["placeholder"] if isinstance(node.meta["val"], OpaqueValue)]
    assert {node.meta["val"].type_name for node in meshes} == {"DeviceMesh"}
    assert {node.meta["desc"].attr for node in meshes} == {"device_mesh"}
    assert captured.group_descriptions == {"0": "default_pg"}
    names = captured.info["inputs"]
    assert "L['self']._modules['layers']._modules['0']._modules['attention']" in "".join(names)


def test_symbols_keep_hints() -> None:
    captured = load_captured(DATA / "llama_2l_fsdp8_dynamic_batch.json.gz")
    sizes = [
        size
        for node in captured.graphs["fw"].graph.nodes
        for size in getattr(node.meta.get("val"), "shape", ())
        if isinstance(size, torch.SymInt)
    ]
    assert {size.node.hint for size in sizes} >= {2}
    assert len({str(size) for size in sizes if size.node.expr.is_symbol}) == 1


def test_loading_in_a_fresh_process_initialises_nothing() -> None:
    code = (
        "import sys, torch.distributed as dist\n"
        "from torch_patches.captured import load_captured\n"
        "captured = load_captured(sys.argv[1])\n"
        "assert not dist.is_initialized()\n"
        "print(len(captured.graphs['fw'].graph.nodes))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(DATA / "llama_2l_hsdp2x4.json.gz")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(DATA.parents[1])},
        check=True,
    )
    assert int(done.stdout) > 100


# -------------------------------------------------------------------------------- graphs made here


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape) for shape in shapes))


def round_trip(tmp_path: Path, module: fx.GraphModule) -> fx.GraphModule:
    """Save, load, save; the two files are equal."""
    save_captured(tmp_path / "one.json.gz", {"fw": module}, {})
    loaded = load_captured(tmp_path / "one.json.gz")
    loaded.save(tmp_path / "two.json.gz")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()
    return loaded.graphs["fw"]


def test_arguments_round_trip(tmp_path: Path) -> None:
    """Every kind of argument that aten graphs hold."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.full((4, 2), float("-inf"), dtype=torch.float64) + x.to(torch.float64)
        parts = torch.split(torch.cat([y, x]), [3, 5])
        made = torch.zeros(2, device="cpu", dtype=torch.complex64) + 1j
        return parts[0], x.clone(memory_format=torch.contiguous_format), made, x[:, 1:], y[None]

    module = traced(function, (4, 2))
    loaded = round_trip(tmp_path, module)
    for ours, theirs in zip(loaded.graph.nodes, module.graph.nodes, strict=True):
        if ours.op != "output":  # whose text has the function's annotation
            assert ours.format_node() == theirs.format_node()


def test_views_share_storage(tmp_path: Path) -> None:
    """x -> mm -> view of it; add is another buffer"""
    module = traced(lambda x: ((y := x @ x).view(-1)[3:], y + 1), (4, 4))
    *_, output = round_trip(tmp_path, module).graph.nodes
    view, other = (node.meta["val"] for node in output.args[0])
    (base,) = (n.meta["val"] for n in output.graph.nodes if n.target is torch.ops.aten.mm.default)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert view.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert view.storage_offset() == 3


def test_symbolic_expressions_round_trip(tmp_path: Path) -> None:
    """Backed and unbacked sizes, products, floor division."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.empty(6, 4), symbolic_context=context)
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = fake
        flat = graph.call_function(torch.ops.aten.view.default, (x, [-1]))
        flat.meta["val"] = fake.view(-1)
        half = graph.call_function(operator.floordiv, (x, 2))
        half.meta["val"] = fake.shape[0] // 2
        kept = graph.call_function(torch.ops.aten.nonzero.default, (flat,))
        kept.meta["val"] = torch.nonzero(flat.meta["val"])
    graph.output((flat, half, kept))
    module = round_trip(tmp_path, fx.GraphModule({}, graph))
    values = [node.meta["val"] for node in module.graph.nodes if node.op != "output"]
    assert [values[0].shape[0].node.hint, values[1].shape[0].node.hint] == [6, 24]
    assert values[2].node.hint == 3
    assert values[3].shape[0].node.hint is None


def test_subgraphs_round_trip(tmp_path: Path) -> None:
    inner = traced(lambda x: x.sin(), (4,))
    graph = fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("body")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (x, body, body, (x,))))
    loaded = round_trip(tmp_path, fx.GraphModule({"body": inner}, graph))
    assert isinstance(loaded.body, fx.GraphModule)
    assert loaded.body.code == inner.code


def test_groups_given_by_the_caller(tmp_path: Path) -> None:
    groups = {"3": CapturedGroup((0, 2), "mesh_dp")}
    save_captured(tmp_path / "x.json.gz", {"fw": traced(torch.sin, (2,))}, {"a": [1]}, groups)
    loaded = load_captured(tmp_path / "x.json.gz")
    assert loaded.groups == {"3": (0, 2)}
    assert loaded.info == {"a": [1]}


def test_saving_refuses_other_functions(tmp_path: Path) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(os.getcwd))
    with pytest.raises(CaptureFormatError, match="getcwd"):
        save_captured(tmp_path / "x.json.gz", {"fw": fx.GraphModule({}, graph)}, {})
