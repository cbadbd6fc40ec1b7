"""The picture of a run: what it shows agrees with the report, and the pictures of the docs are its."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.fx as fx

from torch_patches import _compat, optimize_graph
from torch_patches.captured import CaptureFormatError, load_captured, save_captured
from torch_patches.testing.backends import as_on_gpu
from torch_patches.viewing import svg
from torch_patches.viewing.text import mib

ROOT = Path(__file__).parents[1]
LLAMA = ROOT / "test" / "data" / "llama_8l_fsdp8.json.gz"
TITLE = re.compile(r"([\w ]+): ([\d.]+) ms, compute stands still for ([\d.]+) ms, (\d+) launches")
#: Pictures of the docs: file, graph, mode.
DRAWN = [
    # timeline.svg (bw, auto) is the demo's: test_demo_claims.py
    ("timeline_blocks_fw", "fw", "transformer_block"),
    ("timeline_blocks_bw", "bw", "transformer_block"),
]


@dataclass(frozen=True)
class Seen:
    """A graph's report, and its picture."""

    report: Any
    picture: Any


@pytest.fixture(scope="module")
def seen() -> Seen:
    with as_on_gpu():
        report = optimize_graph(
            load_captured(LLAMA).graphs["fw"], bucketing_mode="transformer_block"
        )
    return Seen(report, report.story.picture)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "draw_timeline.py"
    spec = importlib.util.spec_from_file_location("draw_timeline_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def texts(drawn: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(drawn).iter() if "text" in element.tag]


def test_figures_are_those_of_the_report(tool: ModuleType, seen: Seen, tmp_path: Path) -> None:
    output = tmp_path / "x.svg"
    arguments = [str(LLAMA), "--graph", "fw", "--mode", "transformer_block", "-o", str(output)]
    assert tool.main(arguments) == 0
    drawn, report = output.read_text(), seen.report
    assert len(drawn) < 60_000
    titles = [match.groups() for text in texts(drawn) if (match := TITLE.fullmatch(text))]
    assert titles == [
        ("before", f"{report.total_ms_before:.2f}", f"{report.exposed_ms_before:.2f}",
         str(sum(report.collectives_before.values()))),
        ("after transformer_block", f"{report.total_ms_after:.2f}", f"{report.exposed_ms_after:.2f}",
         str(sum(report.collectives_after.values()))),
    ]  # fmt: skip
    assert f"peak {mib(report.peak_bytes_before)}" in texts(drawn)


def test_bars_are_the_run(seen: Seen) -> None:
    """Red adds up to the exposed time, blue to the kernels' time, and nothing lies on another."""
    for run in (seen.picture.before, seen.picture.after):
        lanes = svg.lanes_of(run, seen.report, 0.0, [])
        bars = lanes["compute"]
        shown = dict.fromkeys(bar.text for bar in bars if bar.text)
        assert list(shown) == [
            "tok_embeddings",
            *(f"layers.{n}" for n in range(8)),
            "norm",
            "output",
        ]
        red = sum(bar.end_ms - bar.start_ms for bar in bars if bar.colour == svg.STANDS)
        assert red == pytest.approx(run.exposed_ms)
        blue = sum(bar.end_ms - bar.start_ms for bar in bars if bar.colour in svg.COMPUTE)
        assert blue == pytest.approx(sum(k.end_ms - k.start_ms for k in run.kernels))
        for lane in lanes.values():
            assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(lane))
        assert len(lanes["group 0"]) == len(run.flights)
    named = {bar.text for bar in lanes["group 0"]}
    assert named >= {"layers.0", "layers.7", "norm+output"}


def test_gaps_that_nobody_sees_are_closed(seen: Seen) -> None:
    run = seen.picture.before
    fine = svg.lanes_of(run, seen.report, 0.0, [])["compute"]
    coarse = svg.lanes_of(run, seen.report, run.total_ms / 10, [])["compute"]
    assert len(coarse) < len(fine)
    assert {bar.text for bar in coarse} == {bar.text for bar in fine}


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("L['self']._modules['layers']._modules['0'].attention.wq", "layers.0"),
        ("L['self'].encoder.layers.11", "encoder.layers.11"),
        ("L['self'].norm", "norm"),
        ("tok_embeddings", "tok_embeddings"),
    ],
)
def test_blocks_end_at_their_number(module: str, block: str) -> None:
    assert svg.block_of(module) == block


def test_texts_are_escaped(seen: Seen) -> None:
    flights = tuple(
        replace(flight, launch=replace(flight.launch, group="<a> & b"))
        for flight in seen.picture.before.flights
    )
    picture = replace(seen.picture, before=replace(seen.picture.before, flights=flights))
    assert "group <a> & b" in texts(svg.draw(picture, seen.report))


@pytest.mark.parametrize(("name", "graph", "mode"), DRAWN)
def test_pictures_of_the_docs_are_drawn_by_it(
    tool: ModuleType, name: str, graph: str, mode: str
) -> None:
    if not _compat.has_prebucketing():
        pytest.skip("torch < 2.13: traffic and costs of the file are those of 2.13")
    drawn = tool.draw_file(ROOT / "docs" / "data" / "llama8b_4l_fsdp8.json.gz", graph, mode)
    kept = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == drawn, f"tools/draw_timeline.py makes docs/{name}.svg anew"
    assert len(drawn) < 60_000


def test_graph_without_collectives_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    gm = fx.symbolic_trace(lambda x: x + 1)
    save_captured(tmp_path / "none.json.gz", {"fw": gm}, {}, {})
    with pytest.raises(CaptureFormatError, match="no collectives"):
        tool.draw_file(tmp_path / "none.json.gz", "fw", "auto")
    with pytest.raises(CaptureFormatError, match="no graph 'bw', only fw"):
        tool.draw_file(tmp_path / "none.json.gz", "bw", "auto")


def test_unknown_files_are_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path / "none.gz"), "-o", str(tmp_path / "x.svg")]) == 2
    assert "No such file" in capsys.readouterr().err
