"""Every code block of every page runs, here or where EXAMPLES says; links, flags and tests named exist.

Blocks are found by ``pages.py``, so that a new one, or a new page, needs no entry: Python runs block by
block in one namespace for each page, commands run in order in a folder that looks like this repository,
and what they are said to print is compared.  A block that is neither fails.

What would need GPUs, several machines or minutes runs scaled down, by these rules:

- ``torch-patches capture DIR -- PROGRAM`` and ``TORCH_PATCHES_CAPTURE=DIR PROGRAM`` run a program of
  three lines instead of PROGRAM; the graphs that the next commands read are those of ``test/data``.
- ``torchrun ... -m torch_patches calibrate`` runs with one rank, ``--quick``.
- ``python`` or ``torchrun`` with a file of ``tools/`` runs up to the point where its arguments are read;
  those in REAL run for good.
- ``make TARGET`` is resolved and not run (``make -n``): ``make test`` is what runs this.
- ``pip install`` is looked up among the package's extras.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pages import ROOT, Block, all_pages, blocks_in, blocks_of, commands_of, text_of, words
from torch._inductor import config as inductor_config

import torch_patches
from torch_patches import _compat, cli, config
from torch_patches.testing.models import Llama, ModelConfig

PAGES = all_pages()
#: Its Python needs two ranks: test/distributed/test_examples.py runs it.
EXAMPLES = "examples/README.md"
#: What the demo prints: test/test_demo_claims.py compares it.
OF_THE_DEMO = "README.md"
WITH_BLOCKS = [page for page in PAGES if page != EXAMPLES and blocks_of(page)]
REAL = ("tools/show_collectives.py",)
#: Traces a model, for ten seconds.
TRACES = "--model"
PROGRAM = """
import torch, torch_patches
from torch_patches.backend import aot_eager_comm_overlap
x = torch.ones(2, 2, requires_grad=True)
torch.compile(lambda x: x @ x, backend=aot_eager_comm_overlap)(x).sum().backward()
"""
#: A test as the pages name it: the file, two colons, the function.
TEST = re.compile(r"`(test/[\w/]+\.py)::(\w+)`")


class _Parsed(Exception):
    """A tool has read its arguments."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like this repository, as far as the pages name files; flags are as they
    were afterwards."""
    for folder in ("test/data", "docs/data"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "graphs").mkdir()
    for name in ("rank0_000", "rank1_000"):
        graph = ROOT / "test" / "data" / "llama_3l_fsdp8.json.gz"
        shutil.copy(graph, tmp_path / "graphs" / f"{name}.json.gz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with no_flags_set():
        yield tmp_path


def no_flags_set() -> Any:
    """Flags as in a new process, and as they were afterwards."""
    flags: dict[str, Any] = {flag.full_name: flag.default for flag in config.FLAGS}
    return inductor_config.patch({**flags, "post_grad_custom_post_pass": None})


# -- running --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_run(page: str, elsewhere: Path) -> None:
    compiled = torch.compile(lambda x: (x @ x).sum(), backend=aot_eager())
    namespace: dict[str, Any] = {
        "torch": torch,
        "torch_patches": torch_patches,
        "model": Llama(ModelConfig(layers=2)),
        "compiled": compiled,
        "batch": torch.ones(2, 2, requires_grad=True),
    }
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, str(block), "exec"), namespace)
            printed = out.getvalue()
        elif block.language == "console":
            run_commands(block)
        elif block.language == "text":
            if page == OF_THE_DEMO and not printed:
                continue
            shown_is_printed(tuple(block.text.splitlines()), printed, str(block))
        else:
            pytest.fail(f"{block}: nothing runs a block of {block.language!r}")


def aot_eager() -> Any:
    from torch_patches.backend import aot_eager_comm_overlap

    return aot_eager_comm_overlap


def run_commands(block: Block) -> None:
    for command in commands_of(block):
        with contextlib.redirect_stdout(io.StringIO()) as out, no_flags_set():
            status = run_command(command.text)
        assert status == command.status, (str(block), command.text, out.getvalue())
        if status == 0:
            for file in re.findall(r"(?:-o|--chrome|--plot|--save) (\S+)", command.text):
                assert not command.text.startswith("torch-patches") or Path(file).stat().st_size
        shown_is_printed(command.shown, out.getvalue(), f"{block}: {command.text}")


def shown_is_printed(shown: tuple[str, ...], printed: str, where: str) -> None:
    """Each line, whatever the spaces; figures are those of torch 2.13, whose costs the graphs have."""
    if _compat.has_prebucketing():
        for line in shown:
            assert words(line) in words(printed), (where, line, printed)


def run_command(command: str) -> int:
    """Exit status of a command, by the rules above; an unknown one is an error."""
    arguments = shlex.split(command, comments=True)
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    if arguments[0].startswith("TORCH_PATCHES_CAPTURE="):
        return captured(arguments[0].partition("=")[2])  # what the command sets for its program
    match arguments:
        case ["torch-patches", "capture", folder, "--", *_]:
            return captured(folder)
        case ["torch-patches", *_] if "--compare" in arguments and not _compat.has_prebucketing():
            return 0  # torch < 2.13: not what is compared
        case ["torch-patches", *rest]:
            return cli.main(rest)
        case ["torchrun", *rest] if "calibrate" in rest:
            return calibrated(rest[rest.index("calibrate") + 1])
        case ["python" | "torchrun", *rest]:
            place = next(i for i, each in enumerate(rest) if each.startswith("tools/"))
            return run_tool(rest[place], rest[place + 1 :])
        case ["make", *rest]:
            done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, check=False)
            return done.returncode
        case ["pip", "install", what]:
            extra = re.fullmatch(r"\.\[(\w+)\]", what)
            return 0 if extra and f'"{extra[1]}"' in text_of("setup.py") else 1
    raise AssertionError(f"no rule runs {command!r}")


def captured(folder: str) -> int:
    """The program runs once for all pages; later commands get its file."""
    if not _CAPTURED:
        before = set(Path(folder).iterdir())
        status = cli.main(["capture", folder, "--", sys.executable, "-c", PROGRAM])
        _CAPTURED.extend(path.read_bytes() for path in set(Path(folder).iterdir()) - before)
        return status if len(_CAPTURED) == 1 else 1
    Path(folder, "rank0_002.json.gz").write_bytes(_CAPTURED[0])
    return 0


#: The file that the program left.
_CAPTURED: list[bytes] = []


def calibrated(table: str) -> int:
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, {**one, **at}):
        return cli.main(["calibrate", table, "--quick", "--backend", "gloo"])


def run_tool(path: str, arguments: list[str]) -> int:
    """A tool up to its arguments, or, of REAL, to its end."""
    real = path in REAL and TRACES not in arguments
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parse(parser, *args, **kwargs)
        raise _Parsed

    with (
        mock.patch.object(sys, "argv", [path, *arguments]),
        mock.patch.object(sys, "path", [str(Path(path).resolve().parent), *sys.path]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse if real else parse_only),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        except _Parsed:
            return 0
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


# -- what makes sure of that ----------------------------------------------------------------------


def test_blocks_are_found() -> None:
    text = (
        "a\n\n    indented\n\n- list\n\n  ```python\n  x = 1\n  ```\n\n```\nbare\n```\n~~~sh\nls\n"
    )
    found = [(block.language, block.line) for block in blocks_in(text)]
    assert found == [("indented", 3), ("python", 8), ("", 12), ("sh", 15)]
    for language in ("python", "console", "text"):
        for page in PAGES:
            marked = re.findall(rf"^ *```{language}$", text_of(page), re.MULTILINE)
            assert len(marked) == sum(b.language == language for b in blocks_of(page)), page


@pytest.mark.parametrize("language", ["", "sh", "bash", "indented", "json"])
def test_block_that_nothing_runs_fails(
    language: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "blocks_of", lambda page: [Block(page, 1, language, "ls\n")])
    with pytest.raises(pytest.fail.Exception, match="nothing runs a block"):
        test_blocks_run("docs/new.md", elsewhere)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (Block("new.md", 1, "python", "1 / 0\n"), ZeroDivisionError),
        (Block("new.md", 1, "text", "not printed\n"), AssertionError),
        (Block("new.md", 1, "console", "$ ls\n"), AssertionError),
        (Block("new.md", 1, "console", "no command\n"), ValueError),
        (Block("new.md", 1, "console", "$ torch-patches replay none.gz\n"), AssertionError),
        (Block("new.md", 1, "console", "$ torch-patches --help\nno such line\n"), AssertionError),
        (Block("new.md", 1, "console", "$ python tools/demo.py --no-such\n"), AssertionError),
        (Block("new.md", 1, "console", "$ python tools/none.py\n"), FileNotFoundError),
        (Block("new.md", 1, "console", "$ make no-such-target\n"), AssertionError),
        (Block("new.md", 1, "console", "$ pip install '.[none]'\n"), AssertionError),
    ],
)
def test_block_that_is_wrong_fails(
    block: Block, problem: type[BaseException], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "blocks_of", lambda page: [block])
    monkeypatch.setattr(_compat, "has_prebucketing", lambda: True)
    with pytest.raises(problem):
        test_blocks_run("new.md", elsewhere)


def test_examples_are_python_only() -> None:
    """All of which test/distributed/test_examples.py runs."""
    assert {block.language for block in blocks_of(EXAMPLES)} == {"python"}


# -- what pages name ------------------------------------------------------------------------------


def anchors_of(page: str) -> set[str]:
    """Anchors of a page's titles, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower().replace("`", "")).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text_of(page))):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.relative_to(ROOT).as_posix()), link


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    for file, function in TEST.findall(text_of(page)):
        assert re.search(rf"def {function}\(", text_of(file)), f"{file}::{function}"


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page: str) -> None:
    for path in re.findall(
        r"(?<![\w/.-])(?:tools|test|examples|torch_patches)/[\w/]+(?<!_x)\.(?:py|toml)",
        text_of(page),
    ):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    known = {flag.name for flag in config.FLAGS}
    families = "max|module|bucket|bucketing|fuse|enable|insert|cross_rank|estimate|calibration|keep"
    named = set(re.findall(rf"`((?:{families})_\w+)(?: = [^`]+)?`", text_of(page)))
    assert named - OF_OTHERS <= known, named - known - OF_OTHERS


#: Flags and arguments of torch, and names in graphs, that look like flags of ours.
OF_OTHERS = {"max_coll_distance", "max_bucket_memory_gb", "max_off_bucket_gb", "bucket_exposed_first",
             "bucket_only_internode_comms", "enable_fusion_regions", "module_fqn", "bucket_collectives",
             "bucket_cap_mb_by_bucket_idx",
             "bucket_all_gathers_fx", "module_stacks", "module_classes"}  # fmt: skip


def test_numerics_names_a_test_for_each_claim() -> None:
    rows = re.findall(r"^\| (?!claim|-)(.+) \| (.+) \|$", text_of("docs/numerics.md"), re.MULTILINE)
    assert len(rows) > 8
    assert all(TEST.search(shown_by) for _, shown_by in rows)


@pytest.mark.parametrize("page", ["README.md", "docs/modes.md"])
def test_each_mode_has_a_row_with_its_page(page: str) -> None:
    for mode in config.BUCKETING_MODES:
        row = re.search(rf'^\| \[?`"?{mode}"?`(.*)\|', text_of(page), re.MULTILINE)
        assert row, mode
        assert mode == "none" or ".md" in row[1], mode


def test_readme_links_every_page() -> None:
    readme = text_of("README.md")
    pages = [page for page in PAGES if page.startswith("docs/") and page != "docs/data/README.md"]
    assert all(f"({page})" in readme for page in pages)


def test_every_subcommand_is_on_the_page() -> None:
    shown = re.findall(
        r"torch[-_]patches (calibrate|capture|diff|explain|replay|report)\b",
        text_of("docs/commands.md"),
    )
    assert set(shown) == set(cli.COMMANDS)
