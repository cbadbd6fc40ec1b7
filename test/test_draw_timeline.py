"""The picture of a run: what it shows agrees with the report, and equal graphs give equal pictures."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from torch_patches import optimize_graph
from torch_patches.captured import load_captured
from torch_patches.testing.backends import as_on_gpu

ROOT = Path(__file__).parents[1]
LLAMA = ROOT / "test" / "data" / "llama_8l_fsdp8.json.gz"
TITLE = re.compile(r"(\w+): ([\d.]+) ms, compute stands still for ([\d.]+) ms, (\d+) launches")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "draw_timeline.py"
    spec = importlib.util.spec_from_file_location("draw_timeline_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if "text" in element.tag]


def test_figures_are_those_of_the_report(tool: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "x.svg"
    assert tool.main([str(LLAMA), "--graph", "fw", "-o", str(output)]) == 0
    svg = output.read_text()
    assert len(svg) < 60_000
    with as_on_gpu():
        report = optimize_graph(
            load_captured(LLAMA).graphs["fw"], bucketing_mode="transformer_block"
        )
    titles = [match.groups() for text in texts(svg) if (match := TITLE.fullmatch(text))]
    assert titles == [
        ("before", f"{report.total_ms_before:.2f}", f"{report.exposed_ms_before:.2f}",
         str(sum(report.collectives_before.values()))),
        ("transformer_block", f"{report.total_ms_after:.2f}", f"{report.exposed_ms_after:.2f}",
         str(sum(report.collectives_after.values()))),
    ]  # fmt: skip


def test_bars_are_the_run(tool: ModuleType) -> None:
    """Red adds up to the exposed time; compute to the kernels' time; and nothing lies on another."""
    gm = load_captured(LLAMA).graphs["fw"]
    found = tool.forecast(gm.graph, tool.collect(gm.graph), tool.make_model())
    plan = tool.parse_plan(["tok_embeddings", "layers.*", ["norm", "output"]])
    picture = tool.picture("x", found, {}, plan, [])
    bars = picture.lanes["compute"]
    shown = dict.fromkeys(bar.text for bar in bars if bar.text)
    assert list(shown) == ["tok_embeddings", *(f"layers.{n}" for n in range(8)), "norm+output"]
    red = sum(bar.end_ms - bar.start_ms for bar in bars if bar.colour == tool.STANDS)
    assert red == pytest.approx(found.timeline.exposed_ms)
    for lane in picture.lanes.values():
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(lane))
    assert len(picture.lanes["group 0"]) == len(found.timeline.spans)


def test_equal_files_give_equal_pictures(tool: ModuleType) -> None:
    first, second = (
        tool.draw_graph(load_captured(LLAMA).graphs["fw"], "transformer_block") for _ in range(2)
    )
    assert first == second
    assert len(first) < 60_000


def test_unknown_files_are_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path / "none.gz"), "-o", str(tmp_path / "x.svg")]) == 2
    assert "No such file" in capsys.readouterr().err
