"""The command ``torch-patches``: subcommands, errors, exit statuses, capture and diff."""

from __future__ import annotations

import builtins
import gzip
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_patches import cli
from torch_patches.captured import load_captured
from torch_patches.testing.graph_builder import GraphBuilder

ROOT = Path(__file__).parents[1]
DATA = ROOT / "test" / "data"
SMALL = DATA / "llama_1l_fsdp8_dynamic_seq_inductor.json.gz"
OTHER = DATA / "llama_2l_fsdp8_noreshard.json.gz"


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


# -- the command ----------------------------------------------------------------------------------


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_patches", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert re.fullmatch(r"torch_patches \d+\.\d+\.\d+\n", done.stdout)


def test_entry_point_is_registered() -> None:
    assert '"torch-patches = torch_patches.cli:main"' in (ROOT / "setup.py").read_text()


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\s", text, re.MULTILINE)
    assert "exit status: 0" in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"\nexample:\n  torch-patches {name} " in text
    assert "--json" in text


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "keep the graphs of a program's compiles" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [(), ("fly",), ("diff",), ("diff", "a", "b", "--no-such-option"), ("replay",)]
)
def test_wrong_usage_is_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["diff", "replay"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"\x1f\x8b garbage", "gzip"),
        (b"", "one class is expected"),
        (b"\xff\xfe\x00", "neither a capture nor a text"),
        (b"import os; os.abort()", "one class is expected"),
    ],
)
def test_an_unreadable_file_is_one_line(
    command: str,
    content: bytes | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert run(command, *[path] * (2 if command == "diff" else 1)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert error.startswith(f"torch-patches {command}: ")


@pytest.mark.parametrize(
    "ranks", [[0] * 8, [], [-1, *range(7)], [2**60, *range(7)], ["a"], [True, *range(2, 9)]]
)
def test_groups_that_torch_cannot_make_are_told(
    ranks: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(gzip.decompress(SMALL.read_bytes()))
    document |= {"graphs": {}}
    for group in document["groups"].values():
        group["ranks"] = ranks
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert run("replay", path) == 2
    error = capsys.readouterr().err
    assert "x.json.gz: group '0': " in error and error.count("\n") == 1


def test_outputs_are_checked_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is planned, and what is read stays."""
    from torch_patches.captured import files

    monkeypatch.setattr(files, "load_any", lambda *a, **k: pytest.fail("it was read"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "profile.json").write_text("{}")
    (tmp_path / "g.json.gz").write_bytes(b"")
    for arguments, said in (
        (("replay", "g.json.gz", "--save", "folder"), "folder: Is a directory"),
        (("replay", "g.json.gz", "--save", "no/x.json.gz"), "no/x.json.gz: No such file"),
        (("replay", "g.json.gz", "--save", "g.json.gz"), "would be overwritten"),
        (("report", "g.json.gz", "-o", "folder"), "folder: Is a directory"),
        (("report", "g.json.gz", "-o", "a", "--chrome", "a"), "would be overwritten"),
        (("report", "g.json.gz", "-o", "profile.json", "--profile", "profile.json"), "overwritten"),
        (("report", "g.json.gz", "--chrome", "no/x"), "no/x: No such file"),
    ):
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert (tmp_path / "profile.json").read_text() == "{}"


def test_a_file_that_cannot_be_written_has_its_own_name_in_the_error(tmp_path: Path) -> None:
    captured = load_captured(SMALL)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        captured.save(tmp_path / "folder")
    assert caught.value.filename == str(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_options_without_effect_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--rank", "1", "--compile", "0/0", "--size", "s0=4")
    assert run("replay", SMALL, "--graph", "nothing", *given) == 2
    error = capsys.readouterr().err
    for name in ("rank", "compile", "size"):
        assert f"warning: --{name} has no effect on a capture" in error


@pytest.mark.parametrize(
    "command",
    [("replay", SMALL), ("diff", SMALL, SMALL), ("explain", SMALL, "all_gather_into_tensor")],
)
def test_a_terminal_sees_that_a_file_is_read(
    command: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading a large one takes ten seconds."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(*command)
    assert f"reading {SMALL.name}" in capsys.readouterr().err
    run(*command, "--json")
    assert "reading" not in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torch_patches.cli import diff

    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(diff, "run", interrupt)
    assert run("diff", "a", "b") == 130
    assert capsys.readouterr().err == ""


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_patches.cli import diff

    def fail(arguments: object) -> int:
        raise KeyError("a fault")

    monkeypatch.setattr(diff, "run", fail)
    with pytest.raises(KeyError):
        run("diff", "a", "b")


def test_a_missing_extra_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **keywords)

    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    monkeypatch.setattr("importlib.import_module", _importing(without_rich))
    assert run("replay", SMALL, "--graph", "fw") == 2
    assert "pip install 'torch_patches[tools]'" in capsys.readouterr().err
    # For machines no table is needed.
    assert run("replay", SMALL, "--graph", "fw", "--json") == 0


def _importing(hook: Callable[..., Any]) -> Callable[[str], Any]:
    def import_module(name: str, package: str | None = None) -> Any:
        hook(name)
        return sys.modules[name]

    return import_module


def test_a_closed_pipe_is_no_error() -> None:
    command = (
        f"{sys.executable} -m torch_patches diff {SMALL} {SMALL} | true; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr


# -- diff -----------------------------------------------------------------------------------------


def test_equal_captures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", SMALL, SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["fw: equal", "bw: equal"]


def test_first_difference_of_captures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", SMALL, OTHER, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    forward = found["graphs"]["fw"]
    assert (forward["a"]["launches"], forward["b"]["launches"]) == (12, 21)
    assert forward["a"]["schedule_hash"] != forward["b"]["schedule_hash"]
    first = forward["first_difference"]
    # Both gather the embedding, a layer's nine parameters and a norm; then one has its output layer.
    assert first["index"] == 11
    assert first["a"] != first["b"]
    assert first["a"].startswith("all_gather bfloat16 [[")


def test_one_launch_more_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{count}.json.gz" for count in (2, 3)]
    for path, count in zip(paths, (2, 3), strict=True):
        save_gathers(path, ["g"] * count)
    assert run("diff", *paths) == 1
    text = capsys.readouterr().out
    assert "differ from launch 2 on (2 launches" in text
    assert "A: no more" in text


def test_names_of_groups_do_not_matter_their_order_does(tmp_path: Path) -> None:
    """Two ranks of a mesh call their groups otherwise."""
    a, renamed, swapped = (tmp_path / f"{name}.json.gz" for name in ("a", "renamed", "swapped"))
    save_gathers(a, ["1", "1", "5"])
    save_gathers(renamed, ["2", "2", "6"])
    save_gathers(swapped, ["1", "5", "1"])
    assert run("diff", a, renamed) == 0
    assert run("diff", a, swapped) == 1


def test_order_after_the_passes_counts(tmp_path: Path) -> None:
    """Equal inputs, and two streams in another order behind the passes: seen, since groups are
    numbered as they come in the input."""
    from torch_patches.captured import save_captured

    paths = [tmp_path / "a.json.gz", tmp_path / "b.json.gz"]
    for path, after in zip(paths, (["1", "5"], ["5", "1"]), strict=True):
        graphs = {"fw": gathers(["1", "5"]), "fw_after": gathers(after)}
        save_captured(path, graphs, {}, {})
    assert run("diff", *paths) == 1


def gathers(groups: list[str]) -> Any:
    b = GraphBuilder()
    return b.output(*(b.wait(b.all_gather(b.placeholder(4, 8), 2, group)) for group in groups))


def save_gathers(path: Path, groups: list[str]) -> None:
    from torch_patches.captured import save_captured

    save_captured(path, {"fw": gathers(groups)}, {}, {})


# -- capture --------------------------------------------------------------------------------------

PROGRAM = """
import torch, torch_patches
from torch_patches.backend import aot_eager_comm_overlap
x = torch.ones(2, 2, requires_grad=True)
print("from the program")
torch.compile(lambda x: x @ x, backend=aot_eager_comm_overlap)(x).sum().backward()
"""


def test_capture_runs_a_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", PROGRAM]
    assert run("capture", tmp_path / "graphs", "--json", "--", *program) == 0
    captured = capfd.readouterr()
    found = json.loads(captured.out)
    assert "from the program" in captured.err
    assert found["returncode"] == 0
    (file,) = found["files"]
    assert (file["file"], file["rank"]) == ("rank0_000.json.gz", 0)
    assert list(file["graphs"]) == ["joint", "fw", "fw_after", "bw", "bw_after"]
    assert load_captured(tmp_path / "graphs" / "rank0_000.json.gz").graphs


@pytest.mark.parametrize(
    ("program", "said"),
    [("pass", "no graphs: does the program import"), (f"{PROGRAM}\nraise SystemExit(7)", "with 7")],
)
def test_capture_without_graphs_or_with_a_failure(
    program: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("capture", tmp_path, "--", sys.executable, "-c", program) == 1
    assert said in capfd.readouterr().err


def test_of_a_program_that_failed_early_nothing_is_guessed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("capture", tmp_path, "--", sys.executable, "-c", "raise SystemExit(3)") == 1
    err = capfd.readouterr().err
    assert "the program ended with 3" in err and "does the program import" not in err


def test_capture_of_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("capture", tmp_path, "--", "/no/such/program") == 2
    assert "no such program" in capsys.readouterr().err


def test_settings_of_the_callers_log_come_back() -> None:
    """``main`` may be called from a program that logs."""
    logger = logging.getLogger("torch_patches")
    before = (list(logger.handlers), logger.level, logger.propagate)
    assert run("diff", "no.json.gz", "file.json.gz") == 2
    assert (logger.handlers, logger.level, logger.propagate) == before
