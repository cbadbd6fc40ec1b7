"""``tools/bench_compile.py``: what a row says, the exponent, and the picture."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import bench_compile as tool
from bench_compile import Case, exponents, measure, plot

from torch_patches import _compat

needs_peer = pytest.mark.skipif(
    not _compat.has_prebucketing(), reason="torch < 2.13: not what is compared"
)


@needs_peer
def test_rows_of_both_planners_and_their_picture(tmp_path: Path) -> None:
    rows = [
        measure(Case(nodes=nodes, width=1024), planner)
        for nodes in (160, 320)
        for planner in ("topo_span", "torch+pre")
    ]
    ours = [row for row in rows if row["planner"] == "topo_span"]
    assert [row["collectives"] for row in ours] == [32, 64]
    assert all(row["launches"] < row["collectives"] and row["operations"] > 0 for row in ours)
    assert all(row["cpu_s"] > 0 and row["peak_mib"] >= row["graph_mib"] for row in rows)
    assert {row["nodes_before"] for row in rows} == {162, 322}
    plot(rows, tmp_path / "compile.svg")
    # matplotlib names the marks of each line once, and uses them at each point
    text = (tmp_path / "compile.svg").read_text()
    assert "<svg" in text and len(re.findall('<use [^>]*style="fill: #(1f77b4|ff7f0e)', text)) >= 4


def test_a_planner_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tool._plan

    def failing(gm, planner):
        if len(gm.graph.nodes) > 100:
            raise RuntimeError("cyclic")
        return plan(gm, planner)

    monkeypatch.setattr(tool, "_plan", failing)
    assert measure(Case(nodes=160), "topo_span")["error"] == "RuntimeError: cyclic"


def test_a_planner_that_does_not_end_gets_no_larger_graph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, str]] = []

    def run(case: Case, planner: str, limit_s: float) -> dict[str, object] | None:
        asked.append((case.nodes, planner))
        return None if planner == "torch" and case.nodes > 100 else {"planner": planner, "nodes": 1}

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "exponents", lambda rows: {})
    monkeypatch.setattr(sys, "argv", ["tool", "--nodes", "200", "100", "300", "--beside", "torch"])
    tool.main()
    assert [nodes for nodes, planner in asked if planner == "torch"] == [100, 200]
    assert [nodes for nodes, planner in asked if planner == "auto"] == [100, 200, 300]
    assert '"not_done_after_s": 600.0' in capsys.readouterr().out


def test_exponent_of_a_square() -> None:
    rows = [{"nodes": n, "operations": 3 * n * n, "cpu_s": 2.0 * n} for n in (10, 100, 500)]
    assert exponents(rows) == {"operations": 2.0, "cpu_s": 1.0}
