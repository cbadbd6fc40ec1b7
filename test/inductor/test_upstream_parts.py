"""Parts of the tool that makes the stack for PyTorch: manifest, places in torch's files, files that
move, trees, drift."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_patches import _compat

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_upstream_stack
from upstream.anchors import AnchorError, apply_edit
from upstream.drift import find_drift, find_large
from upstream.errors import StackError, UnknownTreeError
from upstream.manifest import Commit, Edit, OutOfTree, load_manifest
from upstream.message import measured_table, message
from upstream.rewrite import moved_source, moved_test, renamed
from upstream.ruff import formatted_change
from upstream.tree import find_tree, git_environment

ROOT = Path(__file__).parents[2]
MANIFEST = load_manifest()
INSTALLED = Path(torch.__file__).parents[1]
RELEASE = ".".join(map(str, _compat.torch_release()))


# -- the manifest ---------------------------------------------------------------------------------

COMMIT = """
[[commit]]
title = "[inductor] One"
summary = "s"
motivation = "m"
gives_up = "u"
gains = "g"
modules = ["plan.py"]
"""
TOP = 'torch = ["2.13"]\nmax_lines = 800\nflags_left_out = []\n'


def test_manifest_of_one_commit(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOP + COMMIT)
    (commit,) = load_manifest(tmp_path).commits
    assert (commit.title, commit.modules) == ("[inductor] One", ("plan.py",))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (COMMIT.replace("gains", "gain"), "unknown key 'gain'"),
        (COMMIT.replace('gains = "g"', ""), "gains is missing"),
        (COMMIT.replace('"g"', '" "'), "gains is empty"),
        (COMMIT.replace("[inductor] One", "One"), "a title starts with its tag"),
        (COMMIT + COMMIT, "two commits with this title"),
        (COMMIT.replace('modules = ["plan.py"]', ""), "nothing is in it"),
        (COMMIT.replace('["plan.py"]', '"plan.py"'), "is no list"),
        (COMMIT + "fault = true", "a fix says what was measured"),
        (COMMIT + 'versions = ["2.13"]', "versions and absent go together"),
        (COMMIT + 'versions = ["1.0"]\nabsent = "new"', "torch 1.0 is not known"),
        (
            COMMIT + '[[commit.edit]]\nfile = "f"\nscope = ""\nplace = "over"\ntext = "t"',
            "place 'over' is none of",
        ),
        (
            COMMIT + '[[commit.edit]]\nfile = "f"\nscope = ""\nplace = "after"\ntext = "t"',
            "statement and match say where",
        ),
        (
            COMMIT + '[[commit.edit]]\nfile = "f"\nscope = ""\nplace = "end"',
            "either text, or a generator",
        ),
    ],
)
def test_mistakes_of_the_manifest_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.toml").write_text(TOP + text)
    with pytest.raises(StackError, match=re.escape(sentence)):
        load_manifest(tmp_path)


# -- places in torch's files ----------------------------------------------------------------------

SOURCE = '''\
class A:
    """A."""

    x: int = 1

    def f(self, y):
        if (
            y
            and self.x
        ):
            y = 2
        for i in y:
            y = 2
        return y
'''


def edit(
    place: str, statement: str = "", match: str = "", scope: str = "A.f", part: str = ""
) -> Edit:
    return Edit("a.py", scope, place, "t", statement, match, part)


@pytest.mark.parametrize(
    ("where", "text", "old", "new"),
    [
        (edit("before", "For", "in y"), "a = 1\n", "        for", "        a = 1\n        for"),
        (
            edit("after", "For", "in y"),
            "a = 1\n",
            "        return",
            "        a = 1\n        return",
        ),
        (edit("replace", "Return", "y"), "return 1", "return y", "return 1"),
        (
            edit("within", "If", "and self.x", part=" +and self.x\n"),
            "",
            "            and self.x\n",
            "",
        ),
        (edit("end", scope="A"), "\nz = 1", "return y\n", "return y\n\n    z = 1\n"),
    ],
)
def test_our_lines_go_to_their_place(where: Edit, text: str, old: str, new: str) -> None:
    assert SOURCE.count(old) == 1
    assert apply_edit(SOURCE, where, text) == SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (edit("before", "Assign", "y = 2"), "2 statements Assign match"),
        (edit("before", "While", "y"), "0 statements While match"),
        (edit("before", "For", "in y", scope="A.g"), "0 of A.g are there"),
        (edit("within", "For", "in y", part="z"), "0 parts match 'z'"),
    ],
)
def test_a_place_must_be_there_once(where: Edit, sentence: str) -> None:
    with (
        pytest.raises(AnchorError, match=re.escape(f"a.py: {sentence}"))
        if where.scope == "A.g"
        else (pytest.raises(AnchorError, match=re.escape(sentence)))
    ):
        apply_edit(SOURCE, where, "t")


def test_no_line_of_torch_is_kept_here() -> None:
    """Texts of edits, longer than a keyword or a name, are not in the file that they go into."""
    if RELEASE not in MANIFEST.torch:
        pytest.skip("other releases have other lines")
    compared = 0
    for commit in MANIFEST.commits:
        for where in commit.edits:
            file = INSTALLED / where.file
            theirs = (
                {line.strip() for line in file.read_text().splitlines()} if file.exists() else set()
            )
            ours = [line.strip() for line in where.text.splitlines()]
            compared += len(ours)
            assert not [line for line in ours if len(line) > 30 and line in theirs]
            assert not [t for t in theirs if len(t) > 40 and (t in where.match or t in where.part)]
    assert compared > 50


# -- files that move ------------------------------------------------------------------------------


def test_names_change_in_imports_texts_and_identifiers() -> None:
    source = (
        '"""See ``torch_patches.testing.a`` and torch_patches."""\n'
        "from torch_patches._inductor.fx_passes.comm_overlap.plan import (\n    Plan,\n)\n"
        "op = torch.ops.torch_patches_x.y  # of torch_patches.flags\n"
    )
    assert moved_source(source, "a.py") == (
        '"""See ``torch.testing._internal.distributed.comm_overlap.a`` and comm_overlap."""\n'
        "from torch._inductor.fx_passes.comm_overlap.plan import Plan\n"
        "op = torch.ops.comm_overlap_x.y  # of torch._inductor.fx_passes.comm_overlap.flags\n"
    )


@pytest.mark.parametrize(
    "line",
    ["import torch_patches", "from torch_patches import _hooks", "import torch_patches.config"],
)
def test_what_has_no_place_in_the_tree_cannot_be_imported(line: str) -> None:
    with pytest.raises(StackError, match=r"a\.py: imports torch_patches"):
        moved_source(line, "a.py")


def test_every_longer_name_is_changed_as_a_whole() -> None:
    assert renamed("torch_patches.flagship") == "comm_overlap.flagship"
    assert (
        renamed("torch_patches.flags.FLAGS") == "torch._inductor.fx_passes.comm_overlap.flags.FLAGS"
    )


def test_part_of_a_test_file() -> None:
    source = (
        "import math\n\nN = 1\nM = 2\n\n\ndef helper():\n    return N\n\n\ndef other():\n    return M\n\n\n"
        "@pytest.fixture\ndef given():\n    return 3\n\n\ndef test_a(given):\n    assert helper()\n\n\ndef test_b():\n    assert other()\n"
    )
    moved = moved_test(source, "t.py", ("test_a",), ())
    assert "helper" in moved and "N = 1" in moved and "return 3" in moved
    assert "other" not in moved and "M = 2" not in moved and "test_b" not in moved
    assert moved == moved_test(source, "t.py", (), ("test_b",))
    assert moved.endswith("raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))\n")
    assert "import pytest\n" in moved and "import sys\n" in moved
    with pytest.raises(StackError, match="there is no test test_c"):
        moved_test(source, "t.py", ("test_c",), ())


def test_method_of_a_test_class_is_left_out() -> None:
    source = "import math\n\n\nclass TestA:\n    def test_a(self):\n        pass\n\n    def test_b(self):\n        pass\n"
    moved = moved_test(source, "t.py", (), ("TestA.test_a",))
    assert "test_a" not in moved and "test_b" in moved


# -- trees ----------------------------------------------------------------------------------------


def fake_tree(root: Path, version: str) -> Path:
    (root / "torch/_inductor").mkdir(parents=True)
    (root / "torch/_inductor/config.py").touch()
    (root / "torch/version.py").write_text(f"__version__ = {version!r}\n")
    return root


def test_known_trees_are_found_by_every_path(tmp_path: Path) -> None:
    root = fake_tree(tmp_path / "lib/python3.11/site-packages", "2.13.1+cu130")
    for path in (root, root / "torch", tmp_path):
        found = find_tree(str(path), ["2.13"], tmp_path)
        assert (found.root, found.release, found.is_checkout) == (root, "2.13", False)
        assert not found.can_run


@pytest.mark.parametrize(
    ("version", "sentence"),
    [("2.99.0", "torch 2.99.0 is not known"), ("2.130.0", "torch 2.130.0 is not known")],
)
def test_other_releases_are_refused(tmp_path: Path, version: str, sentence: str) -> None:
    with pytest.raises(UnknownTreeError, match=re.escape(sentence)):
        find_tree(str(fake_tree(tmp_path, version)), ["2.13"], tmp_path)
    with pytest.raises(UnknownTreeError, match=re.escape(sentence)):
        find_tree(version, ["2.13"], tmp_path)


def test_what_is_no_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownTreeError, match="no torch there"):
        find_tree(str(tmp_path), ["2.13"], tmp_path)
    root = fake_tree(tmp_path, "2.13.1")
    with pytest.raises(UnknownTreeError, match="misspelt: no torch there"):
        find_tree(str(root / "misspelt"), ["2.13"], tmp_path)


def test_git_sees_nothing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of git sets ``GIT_DIR``: the commits would go to the user's repository."""
    monkeypatch.setenv("GIT_DIR", "/mine")
    environment = git_environment("A B <a@b.org>")
    assert "GIT_DIR" not in environment
    assert (environment["GIT_AUTHOR_NAME"], environment["GIT_AUTHOR_EMAIL"]) == ("A B", "a@b.org")
    for wrong in ("A B", "<a@b.org>", "A <ab>", "A <a@b> c"):
        with pytest.raises(StackError, match="is no author"):
            git_environment(wrong)


def test_only_changed_lines_are_formatted() -> None:
    before = "a = {1:2}\nb = 1\n\n\nc = {1:2}\n"
    after = before.replace("b = 1", "b = {1:2}")
    assert formatted_change(before, after) == before.replace("b = 1", "b = {1: 2}")
    assert formatted_change(before, before) == before


def test_measured_rows_come_from_the_page() -> None:
    for commit in MANIFEST.commits:
        if commit.measured is not None:
            table = measured_table(commit.measured, ROOT)
            page = (ROOT / commit.measured.page).read_text()
            rows = [line for line in table.splitlines() if line.startswith("|")]
            assert len(rows) > 2 and all(row in page for row in rows)
            lost = replace(commit.measured, rows=("^no such row",))
            with pytest.raises(StackError, match="no row matches"):
                measured_table(lost, ROOT)


def test_what_replaces_nothing_is_said_to_be_new() -> None:
    texts = dict.fromkeys(("summary", "motivation", "gives_up", "gains"), "text")
    commit = Commit("[inductor] New", **texts)
    text = message(commit, ["torch/new.py", "test/test_new.py"], ROOT)
    assert "| old | new |\n|---|---|\n| (none) | `torch/new.py` |\n\nMeasured:\nNothing" in text
    assert text.endswith("Test Plan:\npython -m pytest test/test_new.py\n")


# -- drift ----------------------------------------------------------------------------------------


def test_package_and_manifest_fit() -> None:
    assert find_drift(MANIFEST) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: replace(c, modules=c.modules[1:]), "plan.py: in no commit"),
        (lambda c: replace(c, modules=("new.py", *c.modules)), "new.py: in the commit"),
        (lambda c: replace(c, modules=("check.py", *c.modules)), "check.py: in two commits"),
    ],
)
def test_drift_is_told(change: Callable[[Commit], Commit], sentence: str) -> None:
    commits = [change(c) if "Vocabulary" in c.title else c for c in MANIFEST.commits]
    (problem,) = find_drift(replace(MANIFEST, commits=tuple(commits)))
    assert sentence in problem


def test_reason_for_a_file_that_is_gone_is_drift() -> None:
    out = (*MANIFEST.out_of_tree, OutOfTree("torch_patches/gone.py", "a reason"))
    (problem,) = find_drift(replace(MANIFEST, out_of_tree=out))
    assert "'torch_patches/gone.py' matches no file" in problem


def test_commit_that_has_grown_too_large_is_drift() -> None:
    (commit,) = [c for c in MANIFEST.commits if "Control dependencies" in c.title]
    (problem,) = find_large(replace(MANIFEST, commits=(commit,), max_lines=100))
    assert problem.startswith("100 changed lines are allowed") and commit.title in problem


# -- the command ----------------------------------------------------------------------------------


def test_command_compares_package_and_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_upstream_stack.main(["--drift"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --torch and --out, or --drift"),
        (["--torch", "2.99", "--out", "OUT"], "torch 2.99 is not known"),
        (["--torch", "OUT", "--out", "OUT"], "no torch there"),
        (["--torch", "2.13", "--out", "OUT", "--commits", "1"], "go with --check"),
        (["--torch", "ENV", "--out", "OUT", "--check", "--commits", "0"], "there is no 0"),
        (["--torch", "ENV", "--out", "OUT", "--check", "--commits", "1-99"], "there is no "),
        (["--torch", "ENV", "--out", "OUT", "--author", "me"], "'me' is no author"),
        (["--torch", "ENV", "--out", "FILE"], "Not a directory"),
    ],
)
def test_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    (tmp_path / "file").touch()
    places = {
        "OUT": str(tmp_path),
        "FILE": str(tmp_path / "file"),
        "ENV": str(fake_tree(tmp_path / "site", "2.13.0")),
    }
    given = [places.get(text, text) for text in arguments]
    assert make_upstream_stack.main(given) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("make_upstream_stack: ") and sentence in err


def test_numbers_of_commits() -> None:
    assert make_upstream_stack._numbers("1-3,7") == [1, 2, 3, 7]
    assert make_upstream_stack._numbers("") == []
    with pytest.raises(StackError, match="numbers and ranges"):
        make_upstream_stack._numbers("first")
    with pytest.raises(StackError, match="numbers and ranges"):
        make_upstream_stack._numbers(",")
    with pytest.raises(StackError, match="5-3 has nothing in it"):
        make_upstream_stack._numbers("5-3")
