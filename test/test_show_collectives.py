"""The table of collectives: what it says of captured graphs, and that it changes nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.descriptors import ParamAOTInput

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.captured import load_captured
from torch_patches.optimize import optimize_graph
from torch_patches.testing.collective_rows import Source, show_graph
from torch_patches.testing.graph_builder import GraphBuilder

ROOT = Path(__file__).parents[1]
DATA = ROOT / "test" / "data"
FSDP = DATA / "llama_3l_fsdp8.json.gz"
TENSOR_PARALLEL = DATA / "llama_2l_fsdp4_tp2.json.gz"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "show_collectives.py"
    spec = importlib.util.spec_from_file_location("show_collectives_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool, capsys):
    """Output of the command; fails the test unless it succeeds."""

    def run(*arguments: object) -> str:
        assert tool.main([str(a) for a in arguments]) == 0
        return str(capsys.readouterr().out)

    return run


@pytest.fixture
def read(run):
    """One graph of its JSON."""

    def read(path: Path, graph: str, *arguments: object) -> Any:
        text = run(path, "--graph", graph, "--json", *arguments)
        return json.loads(text)["graphs"][graph]

    return read


# -- what it says ---------------------------------------------------------------------------------


def test_every_gather_of_the_forward_has_its_parameter_and_bucket(read):
    rows = read(FSDP, "fw")["collectives"]
    assert len(rows) == 30  # a 3-layer Llama has 9 parameters a layer and 3 beside
    assert {r["told_by"] for r in rows} == {"dynamo"}
    assert {r["traffic"] for r in rows} == {"parameter"}
    assert rows[0]["parameter"] == "tok_embeddings.weight"
    assert [r["parameter_index"] for r in rows] == list(range(30))
    assert {r["bucket"] for r in rows} == {0} and not any(r["why_not"] for r in rows)


def test_the_backward_has_tags_of_the_joint_graph(read):
    rows = read(FSDP, "bw")["collectives"]
    assert {(r["kind"], r["traffic"]) for r in rows} == {
        ("all_gather", "parameter"),
        ("reduce_scatter", "gradient"),
    }
    assert {r["parameter"] for r in rows} == {
        r["parameter"] for r in read(FSDP, "fw")["collectives"]
    }


def test_it_plans_what_a_pass_does(read):
    """The numbers of the library on the same graph and flags."""
    report = optimize_graph(load_captured(FSDP).graphs["fw"], max_topo_span=100)
    shown = read(FSDP, "fw", "--max-topo-span", 100)["report"]
    assert shown["collectives_after"] == report.collectives_after == {"all_gather": 3}


def test_activations_stay_alone_and_say_what_they_are_made_from(read):
    rows = read(TENSOR_PARALLEL, "fw")["collectives"]
    others = [r for r in rows if r["traffic"] == "other"]
    assert others and all(r["bucket"] is None for r in others)
    assert {r["why_not"] for r in others} == {RefusalReason.NOT_PARAMETER_TRAFFIC.value}
    assert "parameter tok_embeddings.weight" in others[0]["made_from"]
    backward = read(TENSOR_PARALLEL, "bw")["collectives"]
    others = [r for r in backward if r["traffic"] == "other"]
    assert any(name.startswith("saved ") for r in others for name in r["made_from"])


def test_parameters_do_not_say_what_they_are_made_from(read):
    rows = read(TENSOR_PARALLEL, "fw")["collectives"]
    assert not any(r["made_from"] for r in rows if r["traffic"] != "other")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--bucket-cap-mb", 0.001), RefusalReason.BYTE_CAP),
        (("--max-topo-span", 0), RefusalReason.SPAN_CAP),
    ],
)
def test_the_reason_names_the_flag_that_stood_in_the_way(read, flags, reason):
    rows = read(FSDP, "fw", *flags)["collectives"]
    assert reason.value in {r["why_not"] for r in rows}


def test_flags_reach_the_plan(run):
    text = run(FSDP, "--json", "--bucket-cap-mb", "8,25", "--max-topo-span", "none",
               "--primary-group-only", "--bucket-mode", "default")  # fmt: skip
    assert (
        json.loads(text)["options"].items()
        >= {
            "bucketing_mode": "topo_span",
            "bucket_cap_mb": [8.0, 25.0],
            "max_topo_span": None,
            "primary_fsdp_group_only": True,
            "bucket_mode": "default",
        }.items()
    )


def test_gpu_graphs_need_no_copies(read):
    def forms(*flags: str) -> set[str]:
        buckets = read(FSDP, "bw", *flags)["report"]["buckets"]
        return {b["form"] for b in buckets if b["kind"] == "reduce_scatter"}

    assert forms() == {"default"} and forms("--as-on-gpu") == {"coalesced"}


# -- which rows -----------------------------------------------------------------------------------


def test_only_leaves_the_rows_asked_for(read):
    def kinds(only: str) -> list[str]:
        return [r["kind"] for r in read(TENSOR_PARALLEL, "fw", "--only", only)["collectives"]]

    assert set(kinds("gathers")) == {"all_gather"}
    assert set(kinds("reductions")) == {"reduce_scatter"}
    assert len(kinds("gathers")) + len(kinds("reductions")) == 32
    assert len(kinds("unbucketed")) == 11


def test_both_split_graphs_are_shown_and_the_joint_one_on_request(run):
    graphs = json.loads(run(FSDP, "--json"))["graphs"]
    assert list(graphs) == ["fw", "bw"]
    assert list(json.loads(run(FSDP, "--json", "--graph", "joint"))["graphs"]) == ["joint"]


# -- the text -------------------------------------------------------------------------------------


def test_the_table_is_aligned_and_ends_with_a_summary(run):
    lines = run(TENSOR_PARALLEL, "--graph", "fw").splitlines()
    assert "flags bucketing_mode='topo_span'" in lines[0]
    assert "group 3: mesh_tp, 2 ranks: 0,1" in lines
    top = lines.index("fw: 32 collectives")
    header, rows = lines[top + 1], lines[top + 2 : top + 34]
    place = header.index("outcome")
    for row in rows:
        assert row[place:].startswith(("bucket ", "it carries")) and row[place - 2 : place] == "  "
    assert lines[-3].split() == ["all_gather", "parameter", "21", "148.6", "KiB", "1", "-"]
    assert lines[-1].endswith("6: it carries neither a parameter nor a gradient")


def test_long_names_keep_their_end(tool):
    assert tool._shortened("a.b") == "a.b"
    name = tool._shortened("x" * 60 + ".weight")
    assert len(name) == tool.NAME_WIDTH and name.startswith("...") and name.endswith(".weight")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**19, "2.5 MiB"), (2**31, "2.0 GiB")],
)
def test_sizes(tool, count, text):
    assert tool.size(count) == text


# -- other sources --------------------------------------------------------------------------------


def test_a_graph_without_descriptors_is_told_by_structure():
    b = GraphBuilder()
    gathered = [b.gather_and_wait(b.placeholder(4, name=name), 2, "g") for name in ("p", "q")]
    data = b.placeholder(4, name="data")
    moved = b.gather_and_wait(b.call(torch.ops.aten.sin, data), 2, "g")
    source = Source({"fw": b.output(*gathered, moved)}, (), {})
    first, second, last = show_graph(source, "fw", Options("topo_span")).rows
    assert {r.told_by for r in (first, second, last)} == {"structure"}
    assert (first.bucket, second.bucket, last.bucket) == (0, 0, None)
    assert last.made_from == ("input data",)


def test_a_split_graph_takes_tags_from_its_joint_graph():
    """joint: w -> cast -> gather; backward: saved cast -> gather."""

    def gather(cast: bool) -> Any:
        b = GraphBuilder()
        value = b.placeholder(4)
        if cast:
            value.meta["desc"] = ParamAOTInput("w")
            value = b.call(torch.ops.prims.convert_element_type, value, torch.float32)
        return b.output(b.gather_and_wait(value, 2, "g"))

    options = Options("topo_span")
    alone = Source({"bw": gather(cast=False)}, (), {})
    (row,) = show_graph(alone, "bw", options).rows
    assert (row.told_by, row.parameter) == ("structure", None)
    both = Source({"joint": gather(cast=True), "bw": gather(cast=False)}, (), {})
    (row,) = show_graph(both, "bw", options).rows
    assert (row.told_by, row.parameter) == ("descriptors", "w")


def test_a_model_is_compiled_on_the_spot(run):
    text = run("--model", "llama", "--mode", "ddp", "--mesh", 2, "--layers", 1, "--dim", 16,
               "--vocab", 32, "--heads", 2, "--graph", "bw", "--json")  # fmt: skip
    rows = json.loads(text)["graphs"]["bw"]["collectives"]
    assert len(rows) == 12 and {r["kind"] for r in rows} == {"all_reduce"}
    assert "layers.0.attention.wq.weight" in {r["parameter"] for r in rows}


# -- what it must not do --------------------------------------------------------------------------


def test_the_file_stays_as_it_is(run):
    before = hashlib.sha256(FSDP.read_bytes()).digest()
    run(FSDP)
    assert hashlib.sha256(FSDP.read_bytes()).digest() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((FSDP, "--graph", "forward"), "no graph 'forward', only joint, fw, bw"),
        ((FSDP, "--max-topo-span", "-1"), "max_topo_span=...): -1 is not allowed"),
        ((ROOT / "nothing.json.gz",), "No such file"),
        ((ROOT / "README.md",), "not a complete gzip file"),
    ],
)
def test_mistakes_give_one_line(tool, capsys, arguments, text):
    assert tool.main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], [str(FSDP), "--layers", "3"], ["--mode", "none"]])
def test_arguments_that_make_no_sense(tool, arguments):
    with pytest.raises(SystemExit):
        tool.main(arguments)
