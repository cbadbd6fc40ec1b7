"""tools/test_matrix.py: what a run counts, and the table that keeps other versions' rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOL = Path(__file__).resolve().parents[1] / "tools" / "test_matrix.py"

TESTS = """
import os

import pytest

def test_passes(): assert os.environ["TORCH_PATCHES_ALLOW_UNTESTED_TORCH"] == "1"

@pytest.mark.skip(reason="to be counted")
def test_is_skipped(): pass

@pytest.mark.parametrize("number", [1, 2])
def test_fails(number): assert number == FAILS
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_matrix_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_matrix_tool"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def only_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters find a torch that is its version: it is asked for nothing else, and takes seconds."""
    stub = tmp_path / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(f"__version__ = {str(torch.__version__)!r}")
    monkeypatch.setenv("PYTHONPATH", str(stub.parent))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.usefixtures("only_a_version")
def test_a_run_is_counted_and_its_row_replaces_the_last(tool: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "versions.md"
    other = tool.Row("2.0", "2.0.1", "3.9", 7, 0, 0, 1, "")
    tool.record(out, other)
    out.write_text(out.read_text() + "\nwhat failed\n")
    tests = tmp_path / "test_few.py"
    # `FAILS` is no number: both parameters fail, then one of them
    for value, failed, passed in (("None", 2, 1), ("1", 1, 2)):
        tests.write_text(TESTS.replace("FAILS", value))
        arguments = ["--versions", "own", "--env", f"own={sys.executable}", "--out", str(out)]
        code = tool.main([*arguments, "--pytest-args", str(tests), "-p", "no:cacheprovider"])
        assert code == 1
        first, second, *notes = out.read_text().splitlines()[-4:]
        assert notes == ["", "what failed"]
        assert cells(first)[:6] == ["2.0", "2.0.1", "3.9", "7", "0", "0"]
        found = cells(second)
        assert found[:2] == ["own", torch.__version__]
        assert found[3:6] == [str(passed), str(failed), "1"]


def test_what_cannot_be_made_is_no_success(tool: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "versions.md"
    arguments = ["--versions", "own", "--env", f"own={tmp_path / 'nowhere'}", "--out", str(out)]
    assert tool.main(arguments) == 1
    assert not out.exists()


@pytest.mark.usefixtures("only_a_version")
def test_the_newest_torch_is_not_run_twice(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    out, tests = tmp_path / "versions.md", tmp_path / "test_few.py"
    tests.write_text("def test_passes(): pass")
    given = ["--env", f"newest={sys.executable}", "--env", f"{release}={sys.executable}"]
    for versions, rows in (("newest", ["newest"]), (f"newest {release}", [release, "newest"])):
        arguments = ["--versions", *versions.split(), *given, "--out", str(out)]
        assert tool.main([*arguments, "--pytest-args", str(tests), "-p", "no:cacheprovider"]) == 0
        assert [cells(line)[0] for line in out.read_text().splitlines()[8:]] == rows
        assert ("has its own row" in capsys.readouterr().out) == (versions != "newest")


def test_a_malformed_environment_is_refused(tool: ModuleType) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--env", "2.11"])
