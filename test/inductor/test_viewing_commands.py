"""``torch-patches report`` and ``torch-patches explain`` on a capture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_patches.captured import load_captured
from torch_patches.cli import main

LLAMA = Path(__file__).parents[1] / "data" / "llama_8l_fsdp8.json.gz"


def test_report_writes_the_page_and_the_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "x.html", tmp_path / "t.json"
    given = ["report", str(LLAMA), "-o", str(page), "--chrome", str(trace), "--mode", "topo_span"]
    assert main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["graphs"]) == {"fw", "bw"}
    text = page.read_text()
    assert "forward</button>" in text and "backward</button>" in text
    assert told["graphs"]["bw"]["schedule_hash"] in text
    assert told["traces"] == [str(tmp_path / "t.fw.json"), str(tmp_path / "t.bw.json")]
    for name in told["traces"]:
        assert json.loads(Path(name).read_text())["traceEvents"]


def test_one_graph_has_the_trace_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(LLAMA), "--graph", "fw", "--chrome", "t.json"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama_8l_fsdp8.html", "t.json"]
    assert "fw: comm_overlap auto" in capsys.readouterr().out


def test_report_beside_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile with one slow gather of 2 MiB, which the graph does not have."""
    page, profile = tmp_path / "x.html", tmp_path / "p.json"
    given = ["report", str(LLAMA), "-o", str(page), "--graph", "fw", "--profile", str(profile)]
    event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 0, "dur": 5e5}
    args = {"Collective name": "a", "Out msg nelems": 2**19, "dtype": "Float"}
    profile.write_text(json.dumps({"traceEvents": [{**event, "args": args}]}))
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "1 measured collectives match none" in out
    assert "of the graph fw alone" in out and "of the graph fw alone" in page.read_text()
    assert "collectives of a step with no compute" in out
    assert "Measured beside estimated" in page.read_text()
    assert main([*given, "--steps", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["profile"]["rows"]
    assert [row["measured_ms"] for row in rows[:3]] == [0.0, 250.0, 250.0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--profile", "missing.json"], "missing.json: No such file"),
        (["--profile", "{data}"], "no trace of torch.profiler"),
        (["--steps", "0"], "above 0"),
        (["--mode", "sometimes"], "bucketing_mode"),
        (["--graph", "middle"], "no graph 'middle'"),
        (["-o", "{data}"], "would be overwritten"),
        (["-o", "no/such/folder/x.html", "--graph", "fw"], "No such file"),
    ],
)
def test_mistakes_are_one_line(
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy.json.gz").write_bytes(LLAMA.read_bytes())
    more = [word.replace("{data}", "copy.json.gz") for word in more]
    assert main(["report", "copy.json.gz", *more]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert (tmp_path / "copy.json.gz").read_bytes() == LLAMA.read_bytes()


def test_explain_tells_a_story(capsys: pytest.CaptureFixture[str]) -> None:
    gm = load_captured(LLAMA).graphs["fw"]
    name = next(node.name for node in gm.graph.nodes if "all_gather" in node.name)
    given = ["explain", str(LLAMA), name, "--graph", "fw", "--mode", "transformer_block"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"fw: {name}: all_gather of") and "before: runs from" in text
    assert main([*given, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["fw"]
    assert told["launch"]["kind"] == "all_gather" and told["before"]["launch"]["start"] == name


def test_explain_knows_both_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    """A reduce-scatter is in the backward only."""
    assert main(["explain", str(LLAMA), "reduce_scatter_tensor_3", "--mode", "topo_span"]) == 0
    assert capsys.readouterr().out.startswith("bw: reduce_scatter_tensor_3")
    assert main(["explain", str(LLAMA), "nothing_like_it", "--mode", "topo_span"]) == 2
    assert "no collective or parameter nothing_like_it" in capsys.readouterr().err
