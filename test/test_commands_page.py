"""Every command of docs/commands.md that needs no torchrun runs, on a graph of this repository."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from torch_patches import _compat, cli

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
GRAPH = ROOT / "test" / "data" / "llama_3l_fsdp8.json.gz"
TABLE = ROOT / "tools" / "results" / "calibration_gloo_example.json"
COMMANDS = re.findall(r"^\$ torch-patches (.+)$", PAGE, re.MULTILINE)


def test_every_subcommand_is_on_the_page() -> None:
    shown = {command.split()[0] for command in COMMANDS}
    assert shown == set(cli.COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("capture")])
def test_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--compare torch" in command and not _compat.has_prebucketing():
        pytest.skip("torch < 2.13: not what is compared")
    (tmp_path / "graphs").mkdir()
    for name in ("rank0_000", "rank1_000"):
        shutil.copy(GRAPH, tmp_path / "graphs" / f"{name}.json.gz")
    shutil.copy(TABLE, tmp_path / "table.json")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)) == 0
    written = [word for word in command.split() if word.endswith((".html", ".png", "trace.json"))]
    assert all((tmp_path / name).stat().st_size for name in written)


def test_two_schedules_that_differ_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file planned in two modes: ``diff`` ends with 1."""
    monkeypatch.chdir(tmp_path)
    for mode in ("auto", "topo_span"):
        assert cli.main(["replay", str(GRAPH), "--mode", mode, "--save", f"{mode}.json.gz"]) == 0
    capsys.readouterr()
    assert cli.main(["diff", "auto.json.gz", "auto.json.gz"]) == 0
    assert cli.main(["diff", "auto.json.gz", "topo_span.json.gz"]) == 1
