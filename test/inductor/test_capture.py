"""``torch_patches.capture``: which graphs are written, and that nothing else changes."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_patches
from torch_patches import _compat, _hooks, recording
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.backend import aot_eager_comm_overlap
from torch_patches.captured import CapturedMesh, is_stub, load_captured
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.parallelize import fully_shard_simple

c10d = torch.ops._c10d_functional
PREFIX = "aten_distributed_optimizations."
LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh(fresh_inductor_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recording.VARIABLE, raising=False)
    counters.clear()


def sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard_simple(nn.Sequential(*[nn.Linear(8, 8) for _ in range(LAYERS)]), mesh)


def train(model: nn.Module, **options: Any) -> None:
    compiled = torch.compile(
        model, backend=aot_eager_comm_overlap, fullgraph=True, options=options or None
    )
    compiled(torch.ones(4, 8)).sum().backward()


def step(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name
    gathered = [c10d.wait_tensor(c10d.all_gather_into_tensor(p, 2, group)) for p in (first, second)]
    return x @ gathered[0] @ gathered[1]


def infer(**flags: Any) -> None:
    """Inductor, without a backward."""
    torch._dynamo.reset()
    with config.patch({PREFIX + name: value for name, value in flags.items()}), torch.no_grad():
        torch.compile(step, fullgraph=True)(
            torch.ones(4, 4), *(torch.ones(2, 4, requires_grad=True) for _ in range(2))
        )


# -- what is written ------------------------------------------------------------------------------


def test_one_file_has_the_graphs_of_a_compile(mesh: DeviceMesh, tmp_path: Path) -> None:
    with torch_patches.capture(tmp_path / "new" / "dir") as session:
        train(sharded(mesh))
    assert session.paths == [tmp_path / "new" / "dir" / "rank0_000.json.gz"]
    captured = load_captured(session.paths[0])
    assert list(captured.graphs) == ["joint", "fw", "fw_after", "bw", "bw_after"]
    starts = {name: len(collect(gm.graph).collectives) for name, gm in captured.graphs.items()}
    gathers = 2 * LAYERS  # weights and biases
    # The first weight's and the biases' gathers are not repeated in the backward: no gradient needs
    # them; each of six gradients is scattered.
    assert starts["fw"] == gathers
    assert starts["fw_after"] < starts["fw"]
    assert starts["bw_after"] < starts["bw"]
    marks = [n for n in captured.graphs["fw_after"].graph.nodes if BUCKET_MARK in n.meta]
    assert marks
    assert not any(BUCKET_MARK in n.meta for n in captured.graphs["fw"].graph.nodes)
    tags = [tag_of(c.start) for c in collect(captured.graphs["bw"].graph).collectives]
    assert all(tag is not None and tag.parameter for tag in tags)


def test_file_knows_meshes_groups_and_options(mesh: DeviceMesh, tmp_path: Path) -> None:
    with torch_patches.capture(tmp_path):
        train(sharded(mesh), max_topo_span=77)
    captured = load_captured(tmp_path / "rank0_000.json.gz")
    values = [n.meta["val"] for n in captured.graphs["joint"].graph.find_nodes(op="placeholder")]
    meshes = {value.mesh for value in values if not isinstance(value, torch.Tensor)}
    group = mesh.get_group().group_name
    if meshes or _compat.torch_release() >= (2, 13):  # before, a mesh was no input
        assert meshes == {CapturedMesh("cpu", (2,), (0, 1), ("dp",), (group,))}
    assert captured.groups[group] == (0, 1)
    assert captured.info["options"]["max_topo_span"] == 77
    assert captured.info["pipeline"] == "aot_eager_comm_overlap"
    assert (captured.info["rank"], captured.info["world_size"]) == (0, 2)
    assert any("_parameters['weight']" in name for name in captured.info["inputs"])
    captured.save(tmp_path / "again.json.gz")
    again = (tmp_path / "again.json.gz").read_bytes()
    assert again == (tmp_path / "rank0_000.json.gz").read_bytes()


def test_file_says_nothing_about_the_machine(mesh: DeviceMesh, tmp_path: Path) -> None:
    table = tmp_path / "secret_folder"
    with torch_patches.capture(tmp_path), torch.fx.traceback.annotate({"note": f"see {table}"}):
        train(sharded(mesh))
        infer(bucketing_mode="auto")
    files = sorted(tmp_path.glob("*.json.gz"))
    assert len(files) == 2
    for path in files:
        text = gzip.decompress(path.read_bytes()).decode()
        for word in ("stack_trace", "site-packages", "secret_folder", os.getcwd(), ".py"):
            assert word not in text


@pytest.mark.parametrize("mode", ["none", "topo_span"])
def test_inductor_graphs(tmp_path: Path, mode: str) -> None:
    with torch_patches.capture(tmp_path) as session:
        infer(bucketing_mode=mode)
    (path,) = session.paths
    captured = load_captured(path)
    after = [] if mode == "none" else ["fw_after"]
    assert list(captured.graphs) == ["joint", "fw", *after]
    assert captured.info["pipeline"] == "inductor"
    launches = [len(collect(captured.graphs[name].graph).collectives) for name in ("fw", *after)]
    assert launches == ([2] if mode == "none" else [2, 1])
    told = {tag_of(c.start).source.value for c in collect(captured.graphs["fw"].graph).collectives}  # type: ignore[union-attr]
    assert told == {"structure"}  # plain tensors, which Dynamo does not call parameters


def test_backward_of_inductor_is_the_backward(tmp_path: Path) -> None:
    with torch_patches.capture(tmp_path) as session:
        torch._dynamo.reset()
        x = torch.ones(4, 4, requires_grad=True)
        result = torch.compile(lambda x: x @ x)(x)
    assert list(load_captured(session.paths[0]).graphs) == ["joint", "fw"]
    result.sum().backward()  # compiled after the context's end
    graphs = load_captured(session.paths[0]).graphs
    assert list(graphs) == ["joint", "fw", "bw"]
    assert len(graphs["fw"].graph.find_nodes(op="placeholder")) == 1
    # grad @ x.T and x.T @ grad, and their sum
    products = [n for n in graphs["bw"].graph.nodes if "mm" in str(n.target)]
    assert len(products) == 2


def test_optimize_graph_is_captured(tmp_path: Path) -> None:
    b = GraphBuilder()
    gathered = [b.wait(b.all_gather(b.placeholder(4, 8), 2, "g")) for _ in range(2)]
    with torch_patches.capture(tmp_path) as session:
        torch_patches.optimize_graph(b.output(*gathered), bucketing_mode="topo_span")
    graphs = load_captured(session.paths[0]).graphs
    assert [len(collect(gm.graph).collectives) for gm in graphs.values()] == [2, 1]
    assert list(graphs) == ["fw", "fw_after"]


def test_inner_graphs_have_names_of_their_own(tmp_path: Path) -> None:
    def graph(size: int) -> torch.fx.Graph:
        b = GraphBuilder()
        return b.output(b.placeholder(size)).graph

    session = recording.Session(tmp_path)
    written = recording.Recording(session, {})
    for size in (1, 2, 3):
        written.before(graph(size))
        written.after(graph(size))
    graphs = load_captured(session.paths[0]).graphs
    shapes = {
        name: tuple(next(iter(gm.graph.nodes)).meta["val"].shape) for name, gm in graphs.items()
    }
    assert shapes == {
        "fw_inner0": (1,), "fw_inner0_after": (1,), "fw_inner1": (2,), "fw_inner1_after": (2,),
        "fw": (3,), "fw_after": (3,),
    }  # fmt: skip


def test_custom_operators_become_stubs_elsewhere(tmp_path: Path) -> None:
    with torch.library._scoped_library("capture_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("twice", torch.empty_like, "Meta")
        with torch_patches.capture(tmp_path), torch.no_grad():
            torch.compile(
                lambda x: torch.ops.capture_test.twice(x), backend=aot_eager_comm_overlap
            )(torch.ones(2))
    graph = load_captured(tmp_path / "rank0_000.json.gz").graphs["fw"].graph
    (node,) = (n for n in graph.nodes if n.op == "call_function")
    assert is_stub(node.target)
    assert tuple(node.meta["val"].shape) == (2,)


def test_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "capture_format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    graphs = load_captured(tmp_path / "graphs" / "rank0_000.json.gz").graphs
    assert list(graphs) == ["joint", "fw", "fw_after", "bw", "bw_after"]


# -- where and when -------------------------------------------------------------------------------


def test_environment_variable(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(recording.VARIABLE, str(tmp_path / "by_variable"))
    train(sharded(mesh))
    with torch_patches.capture(tmp_path / "inner"):
        train(sharded(mesh), max_topo_span=9)
    train(sharded(mesh), max_topo_span=8)
    names = sorted(p.name for p in (tmp_path / "by_variable").iterdir())
    assert names == ["rank0_000.json.gz", "rank0_001.json.gz"]
    assert [p.name for p in (tmp_path / "inner").iterdir()] == ["rank0_000.json.gz"]


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rank0_000.json.gz").write_text("mine")
    with torch_patches.capture(tmp_path):
        infer()
    assert (tmp_path / "rank0_000.json.gz").read_text() == "mine"
    assert load_captured(tmp_path / "rank0_001.json.gz").graphs


def test_a_cache_hit_elsewhere_is_a_miss_within(tmp_path: Path) -> None:
    infer(bucketing_mode="topo_span")
    counters.clear()
    infer(bucketing_mode="topo_span")
    hits = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    assert hits
    with torch_patches.capture(tmp_path) as session:
        infer(bucketing_mode="topo_span")
    assert len(session.paths) == 1
    # and what is compiled within does not fill the cache with something else
    counters.clear()
    infer(bucketing_mode="topo_span")
    assert counters["inductor"]["comm_overlap_buckets"] == 1


def test_nothing_compiled_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch_patches.capture(tmp_path):
        pass
    (record,) = [r for r in caplog.records if r.name == recording.__name__]
    assert "torch.compiler.reset()" in record.getMessage()


def test_without_a_capture_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recording.begin("inductor", None, Options()) is None
    assert _hooks.compile_patches(torch.nn.Linear(1, 1), {}) is None


def test_capturing_changes_no_generated_graph(tmp_path: Path) -> None:
    def text() -> str:
        graphs: list[str] = []
        keep = {"post_grad_custom_pre_pass": None, "post_grad_custom_post_pass": None}
        torch._dynamo.reset()

        def inner(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            compiled = torch._inductor.compile_fx.compile_fx_inner(gm, inputs, **kwargs)
            graphs.append(gm.print_readable(print_output=False))
            return compiled

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            return torch._inductor.compile_fx.compile_fx(gm, inputs, inner_compile=inner)

        with config.patch({**keep, "fx_graph_cache": False}), torch.no_grad():
            torch.compile(step, backend=backend)(
                torch.ones(4, 4), torch.ones(2, 4), torch.ones(2, 4)
            )
        return "".join(graphs)

    plain = text()
    with torch_patches.capture(tmp_path) as session:
        assert text() == plain
    assert session.paths


# -- trouble --------------------------------------------------------------------------------------


def test_a_graph_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_PATCHES_STRICT")
    b = GraphBuilder()
    graph = b.output(b.placeholder(2)).graph
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        graph.call_function(os.getcwd)
    session = recording.Session(tmp_path / "graphs")
    written = recording.Recording(session, {})
    written.add("joint", graph)
    written.add("fw", graph)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "getcwd" in record.getMessage()
    assert session.paths == []
    assert not session.directory.exists()


def test_a_full_disk_does_not_fail_the_compile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_PATCHES_STRICT")

    def fail(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with torch_patches.capture(tmp_path / "graphs"):
        infer(bucketing_mode="topo_span")
    assert "No space left" in caplog.text
    assert counters["inductor"]["comm_overlap_buckets"] == 1
    assert list((tmp_path / "graphs").iterdir()) == []


def test_recordings_survive_what_torch_does_to_config_values(tmp_path: Path) -> None:
    written = recording.Recording(recording.Session(tmp_path), {})
    ours = _hooks.PostGradPass(Options(), (), written)
    assert copy.deepcopy(ours).recording is written
    assert pickle.loads(pickle.dumps(ours)).recording is None
    assert ours.uuid() is None
    assert _hooks.PostGradPass(Options()).uuid() is not None


@pytest.mark.parametrize(
    "mesh_section",
    [
        {"device_type": "cpu", "shape": [2], "ranks": [0, 1, 2]},
        {"device_type": "cpu", "shape": [2], "ranks": [0, 0]},
        {"device_type": "cpu", "shape": [2], "ranks": ["0", "1"]},
        {"device_type": "cpu", "shape": [2], "ranks": [0, 1], "dim_names": ["a", "b"]},
        {"device_type": "cpu", "shape": [2], "ranks": [0, 1], "groups": [1]},
        {"device_type": 5, "shape": [2], "ranks": [0, 1]},
        {"device_type": "cpu", "shape": "2", "ranks": [0, 1]},
        {"device_type": "cpu", "shape": [1] * 17, "ranks": [0]},
        {"device_type": "cpu", "shape": [True, 2], "ranks": [0, 1]},
        7,
    ],
)
def test_hostile_meshes_are_refused(mesh_section: Any, tmp_path: Path) -> None:
    document = document_with(meshes=[mesh_section])
    with pytest.raises(torch_patches.captured.CaptureFormatError):
        load_captured(write(tmp_path / "x.json.gz", document))


@pytest.mark.parametrize(
    "marks",
    [
        {"tag": ["parameter", "dynamo", 5, 1, 1]},
        {"tag": ["else", "dynamo", "w", 1, 1]},
        {"tag": ["parameter"]},
        {"bucket": [1, 2, "else"]},
        {"bucket": ["1", 2, "other"]},
        {"scheduled": 5},
        ["tag"],
        "tag",
    ],
)
def test_hostile_marks_are_refused(marks: Any, tmp_path: Path) -> None:
    document = document_with(marks=marks)
    with pytest.raises(torch_patches.captured.CaptureFormatError):
        load_captured(write(tmp_path / "x.json.gz", document))


def document_with(meshes: Any = None, marks: Any = None) -> dict[str, Any]:
    x = {"name": "x", "op": "placeholder", "target": "x", "val": {"opaque": "T"}}
    output = {"name": "output", "op": "output", "target": "output", "args": [{"node": "x"}]}
    nodes = [x if marks is None else {**x, "meta": {"marks": marks}}, output]
    return {
        "format": 1, "torch": "2", "info": {}, "groups": {}, "symbols": {}, "module_stacks": [],
        "graphs": {"fw": {"nodes": nodes, "attributes": {}}},
        **({} if meshes is None else {"meshes": meshes}),
    }  # fmt: skip


def write(path: Path, document: Any) -> Path:
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_the_small_document_itself_loads(tmp_path: Path) -> None:
    mesh = {"device_type": "cpu", "shape": [2], "ranks": [0, 1]}
    good = document_with([mesh], {"tag": ["parameter", "dynamo", "w", 1, 1], "member": True})
    graph = load_captured(write(tmp_path / "x.json.gz", good)).graphs["fw"].graph
    assert not [n for n in graph.nodes if collective_kind(n) is not None]
    assert tag_of(next(iter(graph.nodes))) is not None
