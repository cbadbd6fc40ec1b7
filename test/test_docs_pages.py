"""The pages about concepts, modes, reports, troubles, numerics and design: what they show runs, here.

Commands run on copies of this repository's graphs, under the paths that the pages name; lines below a
command are what it prints.  Python runs block by block, in one namespace for each page.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from torch_patches import _compat, cli, config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("concepts", "modes", "reading_a_report", "troubleshooting", "numerics", "design")
TEXTS = {page: (DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES}
DATA = Path("test/data")
#: With this comment a command ends with that exit status.
STATUS = re.compile(r"# exit status (\d)")
#: A test as the pages name it: the file, two colons, the function.
TEST = re.compile(r"`(test/[\w/]+\.py)::(\w+)`")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXTS[page], re.DOTALL | re.MULTILINE)


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Each command of a page, with the lines that it is said to print; "..." stands for others."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks_of(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line.strip() not in ("", "..."):
                found[-1][1].append(line)
    return found


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like this repository, as far as the pages name files; flags are as they
    were afterwards."""
    shutil.copytree(ROOT / DATA, tmp_path / DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with inductor_config.patch({flag.full_name: flag.default for flag in config.FLAGS}):
        yield tmp_path


def test_every_command_of_a_page_is_found() -> None:
    for page in PAGES:
        lines = re.findall(r"^\$ (torch-patches .*)$", TEXTS[page], re.MULTILINE)
        assert lines == [command for command, _ in commands_of(page)]
    assert all(commands_of(page) for page in PAGES if page != "design")


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_commands_print_what_is_shown(
    page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, shown in commands_of(page):
        program, *arguments = shlex.split(command, comments=True)
        assert program == "torch-patches"
        status = STATUS.search(command)
        assert cli.main(arguments) == int(status[1] if status else 0), command
        printed = words(capsys.readouterr().out)
        if not _compat.has_prebucketing():
            continue  # figures are those of the torch that the graphs were captured with, or newer
        for line in shown:
            assert words(line) in printed, (command, printed)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")])
def test_python_runs(page: str, elsewhere: Path) -> None:
    namespace: dict[str, Any] = {"torch": torch}
    for block in blocks_of(page, "python"):
        exec(compile(block, f"docs/{page}.md", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[page]):
        assert link.startswith("https://") or (DOCS / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    for file, function in TEST.findall(TEXTS[page]):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"def {function}\(", text), f"{file}::{function}"


def test_numerics_names_a_test_for_each_claim() -> None:
    rows = re.findall(r"^\| (?!claim|-)(.+) \| (.+) \|$", TEXTS["numerics"], re.MULTILINE)
    assert len(rows) > 8
    assert all(TEST.search(shown_by) for _, shown_by in rows)


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    known = {flag.name for flag in config.FLAGS}
    families = "max|module|bucket|bucketing|fuse|enable|insert|cross_rank|estimate|calibration|keep"
    named = set(re.findall(rf"`((?:{families})_\w+)(?: = [^`]+)?`", TEXTS[page]))
    assert named <= known, named - known


def test_modes_has_a_section_for_each_mode() -> None:
    titles = re.findall(r"^## `(\w+)`$", TEXTS["modes"], re.MULTILINE)
    assert titles == list(config.BUCKETING_MODES)


def test_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(docs/{page}.md)" in readme for page in PAGES)
