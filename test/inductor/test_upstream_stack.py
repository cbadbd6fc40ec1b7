"""The stack for PyTorch: the commits that are built from the manifest, and what is refused.

The stack is built once for the installed torch, if it is a release that the stack knows;
``test_upstream_commits.py`` runs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_patches import _compat

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from upstream.anchors import AnchorError
from upstream.build import Built, Stack, build_stack
from upstream.drift import find_large
from upstream.errors import StackError
from upstream.manifest import Commit, Manifest, load_manifest
from upstream.ruff import formatted_change
from upstream.tree import TorchTree, find_tree

ROOT = Path(__file__).parents[2]
MANIFEST = load_manifest()
INSTALLED = Path(torch.__file__).parents[1]
RELEASE = ".".join(map(str, _compat.torch_release()))
on_known_torch = pytest.mark.skipif(
    RELEASE not in MANIFEST.torch, reason=f"the stack is made for {', '.join(MANIFEST.torch)}"
)


@pytest.fixture(scope="module")
def tree() -> TorchTree:
    return find_tree(str(INSTALLED), MANIFEST.torch, Path("/nowhere"))


@pytest.fixture(scope="module")
def stack(tree: TorchTree, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    return build_stack(tree, MANIFEST, tmp_path_factory.mktemp("stack"))


def titled(stack: Stack, words: str) -> tuple[int, Built]:
    """Number and commit whose title has these words."""
    (found,) = [(n, b) for n, b in enumerate(stack.commits, 1) if words in b.commit.title]
    return found


# -- trees that are changed -------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    name = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    return subprocess.run(
        ["git", *name, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def part_of_stack(**changes: object) -> Manifest:
    """The first fix only."""
    (commit,) = [c for c in MANIFEST.commits if "cap of each bucket" in c.title]
    return replace(MANIFEST, commits=(replace(commit, **changes),))  # type: ignore[arg-type]


def copied_tree(root: Path) -> Path:
    shutil.copytree(
        INSTALLED / "torch/_inductor",
        root / "torch/_inductor",
        ignore=shutil.ignore_patterns("__pycache__", "kernel", "codegen"),
    )
    shutil.copy(INSTALLED / "torch/version.py", root / "torch/version.py")
    return root


@on_known_torch
def test_checkout_is_cloned_and_left_alone(tmp_path: Path) -> None:
    root = copied_tree(tmp_path / "pytorch")
    (root / "version.txt").write_text(f"{RELEASE}.0a0\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "torch")
    head = git(root, "rev-parse", "HEAD")
    found = find_tree(str(root), MANIFEST.torch, tmp_path)
    assert found.is_checkout and found.release == RELEASE
    made = build_stack(found, part_of_stack(), tmp_path / "out")
    assert [built.edited for built in made.commits] == [("torch/_inductor/fx_passes/bucketing.py",)]
    assert git(root, "rev-parse", "HEAD") == head and not git(root, "status", "--porcelain")


@on_known_torch
def test_tree_whose_place_is_gone_is_refused(tmp_path: Path) -> None:
    root = copied_tree(tmp_path / "site")
    file = root / "torch/_inductor/fx_passes/bucketing.py"
    file.write_text(file.read_text().replace("cur_bucket_id += 1", "cur_bucket_id += 2 - 1"))
    found = find_tree(str(root), MANIFEST.torch, tmp_path)
    with pytest.raises(AnchorError, match=r"bucketing.py: greedy_bucket.*: 0 statements AugAssign"):
        build_stack(found, part_of_stack(), tmp_path / "out")


@on_known_torch
def test_stack_is_not_built_over_something_else(tree: TorchTree, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "mine").touch()
    with pytest.raises(StackError, match="tree is not empty"):
        build_stack(tree, part_of_stack(), tmp_path)
    (tmp_path / "other" / "patches").mkdir(parents=True)
    (tmp_path / "other" / "patches" / "0001-old.patch").touch()
    with pytest.raises(StackError, match="patches is not empty"):
        build_stack(tree, part_of_stack(), tmp_path / "other")


@on_known_torch
def test_torch_that_is_read_only_is_copied(tmp_path: Path) -> None:
    root = copied_tree(tmp_path / "site")
    folder = root / "torch/_inductor/fx_passes"
    for path in (folder / "bucketing.py", folder):
        path.chmod(path.stat().st_mode & ~0o222)
    found = find_tree(str(root), MANIFEST.torch, tmp_path)
    made = build_stack(found, part_of_stack(), tmp_path / "out", author="A <a@b.org>")
    copied = made.repository.root / folder.relative_to(root)
    assert copied.stat().st_mode & 0o200 and (copied / "bucketing.py").stat().st_mode & 0o200
    assert not folder.stat().st_mode & 0o200
    assert made.repository.git("log", "-1", "--format=%an %ae %cn") == "A a@b.org A\n"
    folder.chmod(0o755)


# -- what a commit may be -------------------------------------------------------------------------


def small_commit(**changes: object) -> Commit:
    texts = dict.fromkeys(("summary", "motivation", "gives_up", "gains"), "text")
    return Commit(**{"title": "[inductor] New", **texts, **changes})  # type: ignore[arg-type]


@on_known_torch
@pytest.mark.parametrize(
    ("commits", "sentence"),
    [
        ((small_commit(modules=("graph/nodes.py",)),), "sizes, which comes later or not at all"),
        (
            (
                small_commit(modules=("passes/near_names.py", "passes/module_pattern.py")),
                small_commit(title="[inductor] Next", modules=("graph/trail.py",)),
            ),
            "a module of graph/ behind one of passes/",
        ),
        ((small_commit(modules=("plan.py", "graph/groups.py")),), "100 changed lines are allowed"),
        ((small_commit(modules=("gone.py",)),), "gone.py is in the manifest and does not exist"),
        ((small_commit(moved=("torch_patches/_hooks.py",)),), "_hooks.py has no place in the tree"),
    ],
)
def test_commits_that_cannot_stand_are_refused(
    tree: TorchTree, tmp_path: Path, commits: tuple[Commit, ...], sentence: str
) -> None:
    with pytest.raises(StackError, match=re.escape(sentence)):
        build_stack(tree, replace(MANIFEST, commits=commits, max_lines=100), tmp_path)


@on_known_torch
def test_commit_that_this_torch_does_not_need_is_left_out_with_its_reason(
    tree: TorchTree, tmp_path: Path
) -> None:
    manifest = part_of_stack(versions=("0.1",), absent="it was fixed")
    made = build_stack(tree, manifest, tmp_path)
    assert not made.commits and [commit.absent for commit in made.left_out] == ["it was fixed"]


# -- the stack ------------------------------------------------------------------------------------


@on_known_torch
def test_every_module_of_the_package_is_in_the_last_tree(stack: Stack) -> None:
    folder = "_inductor/fx_passes/comm_overlap"
    ours = {
        p.relative_to(ROOT / "torch_patches")
        for p in (ROOT / "torch_patches" / folder).rglob("*.py")
    }
    tree = stack.repository.root / "torch"
    assert len(ours) > 90
    assert not [path for path in ours if not (tree / path).is_file()]


@on_known_torch
def test_commits_are_small_and_say_what_a_reviewer_asks(stack: Stack) -> None:
    asked = ("Summary:", "Motivation:", "What it gives up:", "What it gains:", "Test Plan:")
    asked += ("| old | new |", "Measured:")
    for built in stack.commits:
        assert built.lines <= 800
        text = stack.repository.git("log", "-1", "--format=%B", built.sha)
        assert text.splitlines()[0] == built.commit.title
        assert all(f"\n{heading}\n" in text for heading in asked)
    assert "| llama8l_ddp8 | bw | torch | RuntimeError" in stack.repository.git(
        "log", "-1", "--format=%B", titled(stack, "timeline with both")[1].sha
    )


@on_known_torch
def test_drift_counts_the_lines_that_a_commit_has(stack: Stack) -> None:
    _, built = titled(stack, "Control dependencies")
    alone = replace(MANIFEST, commits=(built.commit,))
    assert find_large(replace(alone, max_lines=built.lines)) == []
    assert find_large(replace(alone, max_lines=built.lines - 1))


@on_known_torch
def test_fixes_of_torch_come_first_and_need_nothing_of_ours(stack: Stack) -> None:
    fixes = [built for built in stack.commits if built.commit.fault]
    assert fixes == stack.commits[: len(fixes)]
    assert len(fixes) == (7 if RELEASE in ("2.13", "2.14") else 4)
    for built in fixes:
        assert "comm_overlap" not in stack.repository.git("show", "--format=", built.sha)


@on_known_torch
def test_fixes_apply_without_each_other(stack: Stack, tmp_path: Path) -> None:
    """All but one, which replaces the loop that the fix before it edits."""
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(stack.repository.root), str(again))
    refused = []
    for built in (built for built in stack.commits if built.commit.fault):
        git(again, "checkout", "-q", "-f", stack.base)
        patch = git(again, "show", built.sha)
        (tmp_path / "fix.patch").write_text(patch)
        try:
            git(again, "apply", "--index", str(tmp_path / "fix.patch"))
        except subprocess.CalledProcessError:
            refused.append(built.commit.title)
    (title,) = refused
    assert "Defer dependent" in title


@on_known_torch
def test_patches_applied_to_torch_give_the_last_tree(stack: Stack, tmp_path: Path) -> None:
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(stack.repository.root), str(again))
    git(again, "checkout", "-q", stack.base)
    patches = sorted((stack.repository.root.parent / "patches").glob("*.patch"))
    assert len(patches) == len(stack.commits)
    git(again, "am", "-q", *map(str, patches))
    assert not git(again, "diff", stack.commits[-1].sha)
    assert not [path.name for path in patches if "torch_patches" in path.read_text()]


@on_known_torch
def test_edits_stand_above_comments_and_as_the_formatter_would_have_them(stack: Stack) -> None:
    root, base = stack.repository.root, stack.base
    for path in sorted({path for built in stack.commits for path in built.edited}):
        before = stack.repository.git("show", f"{base}:{path}")
        after = (root / path).read_text()
        assert formatted_change(before, after) == after, path
    lines = (root / "torch/_inductor/fx_passes/post_grad.py").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "Apply overlap scheduling" in line)
    assert lines[at + 1].strip().startswith("if")
    assert "enable_overlap_scheduling" in lines[at + 1] + lines[at + 2]
