"""The demo's verdict: it passes on a good result, and every claim can fail.  The README shows what it
prints and draws."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pages import blocks_of

from torch_patches import _compat, optimize_graph
from torch_patches.captured import load_captured
from torch_patches.testing.training import Comparison, TrainingRun, compare

ROOT = Path(__file__).parent.parent
PATH = ROOT / "tools" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_under_test", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


BEFORE = {"forward": {"all_gather": 3}, "backward": {"all_gather": 2, "reduce_scatter": 3}}
AFTER = {"forward": {"all_gather": 1}, "backward": {"all_gather": 1, "reduce_scatter": 1}}


def _report(phase: str) -> dict[str, Any]:
    return {
        "collectives_before": dict(BEFORE[phase]),
        "collectives_after": dict(AFTER[phase]),
        "failure": None,
        "schedule_hash": f"hash of {phase}",
    }


def _good_ranks(demo: ModuleType) -> list[Any]:
    """Both ranks of a run in which every claim holds; each its own objects."""
    none = demo.RunFigures(BEFORE, {}, 1.0, 4.0, [])
    ours = demo.RunFigures(AFTER, {}, 1.0, 4.0, [_report("forward"), _report("backward")])
    runs = {backend: {"none": none, "topo_span": ours} for backend in demo.BACKENDS}
    equal = Comparison(True, 0.0, 0.0, "", 8)
    close = Comparison(False, 1e-7, 1e-9, "loss", 8)
    rank = demo.RankFigures(runs, {"eager": equal, "inductor": close})
    return [copy.deepcopy(rank), copy.deepcopy(rank)]


def _failed(demo: ModuleType, ranks: list[Any]) -> list[str]:
    return [claim.text for claim in demo.judge(ranks) if not claim.holds]


def _ours(rank: Any, backend: str = "inductor") -> Any:
    return rank.runs[backend]["topo_span"]


def _differ(rank: Any, backend: str, relative: float) -> None:
    rank.comparisons[backend] = Comparison(False, relative, relative, "loss", 8)


# What is spoilt on rank 1, and a word of the claim that must fail.
SPOILT: list[tuple[str, Callable[[Any], object]]] = [
    ("less often", lambda rank: _ours(rank).launches["backward"].update(reduce_scatter=3)),
    ("profiler", lambda rank: _ours(rank, "eager").launches["forward"].update(all_gather=2)),
    ("profiler", lambda rank: _ours(rank).reports.clear()),
    ("gave a graph up", lambda rank: _ours(rank).reports[0].update(failure="KeyError: 'val'")),
    ("same order", lambda rank: _ours(rank).reports[1].update(schedule_hash="other")),
    ("bitwise", lambda rank: _differ(rank, "eager", 1e-9)),
    ("within", lambda rank: _differ(rank, "inductor", 2e-5)),
    ("within", lambda rank: _differ(rank, "inductor", math.inf)),
]


def test_good_result_passes(demo: ModuleType) -> None:
    assert _failed(demo, _good_ranks(demo)) == []


@pytest.mark.parametrize(("word", "spoil"), SPOILT)
def test_spoilt_result_fails(demo: ModuleType, word: str, spoil: Callable[[Any], object]) -> None:
    ranks = _good_ranks(demo)
    spoil(ranks[1])
    assert any(word in text for text in _failed(demo, ranks))


def _run(*values: float) -> TrainingRun:
    return TrainingRun([torch.tensor(1.0)], [{"weight": torch.tensor(values)}])


def test_equal_runs_compare_equal() -> None:
    comparison = compare(_run(1.0, 2.0), _run(1.0, 2.0))
    assert comparison == Comparison(True, 0.0, 0.0, "", 2)


def test_difference_is_relative_to_the_largest_element() -> None:
    comparison = compare(_run(1.0, 4.0), _run(2.0, 4.0))
    assert not comparison.bitwise_equal
    assert (comparison.max_absolute, comparison.max_relative) == (1.0, 0.25)
    assert comparison.worst == "gradient of weight, step 0"


def test_not_a_number_is_never_close() -> None:
    assert compare(_run(1.0, math.nan), _run(1.0, 2.0)).max_relative == math.inf


# -- what the README shows ------------------------------------------------------------------------


def _planned_ranks(demo: ModuleType) -> list[Any]:
    """Both ranks, as the demo's own graphs let expect them: each launch is announced by a report."""
    graphs = load_captured(ROOT / "docs" / "data" / "demo_2l_fsdp2.json.gz").graphs
    reports = [
        json.loads(optimize_graph(graphs[name], bucketing_mode="topo_span").to_json())
        for name in ("fw", "bw")
    ]
    before, after = (
        {
            phase: report[f"collectives_{side}"]
            for phase, report in zip(demo.PHASES, reports, strict=True)
        }
        for side in ("before", "after")
    )
    none = demo.RunFigures(before, {}, 64.5, 4.0, [])
    ours = demo.RunFigures(after, {}, 11.2, 4.0, reports)
    runs = {backend: {"none": none, "topo_span": ours} for backend in demo.BACKENDS}
    steps, parameters = demo.demo_workload(2).steps, before["forward"]["all_gather"]
    equal = Comparison(True, 0.0, 0.0, "", steps * (1 + parameters))
    rank = demo.RankFigures(runs, {"eager": equal, "inductor": equal})
    return [copy.deepcopy(rank), copy.deepcopy(rank)]


def test_readme_shows_its_table_and_picture(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the table only the times come from a machine, and bitwise equality from a run."""
    if not _compat.has_prebucketing():
        pytest.skip("torch < 2.13: the graphs and their costs are those of 2.13")
    files = {"--report": tmp_path / "r.json", "--picture": tmp_path / "p.svg"}
    arguments = [str(word) for pair in files.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    monkeypatch.setattr(demo, "run_ranks", lambda *args, **kwargs: _planned_ranks(demo))
    assert demo.main() == 0
    (table,) = (b.text for b in blocks_of("README.md") if b.language == "text")
    assert table in capsys.readouterr().out
    assert json.loads(files["--report"].read_text())["ranks"]
    assert files["--picture"].read_text() == (ROOT / "docs" / "timeline.svg").read_text()
