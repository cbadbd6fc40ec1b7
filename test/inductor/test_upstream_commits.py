"""Each commit of the stack for PyTorch runs in the tree: its modules import, its tests pass, ruff is
content, and a fix's tests fail without it.

All tests of a commit run, the first case of each and with fewer examples, and no other commit's; each
run is a fork of one process that has imported torch (``tools/upstream/server.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_patches import _compat

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from upstream.build import Built, Stack, build_stack
from upstream.check import check_commit, check_stack, runner_of
from upstream.errors import StackError
from upstream.manifest import load_manifest
from upstream.runner import Runner
from upstream.tree import find_tree

MANIFEST = load_manifest()
RELEASE = ".".join(map(str, _compat.torch_release()))
COMMITS = [commit for commit in MANIFEST.commits if commit.serves(RELEASE)]
#: Of a hypothesis test, which runs with all of them outside the tree.
EXAMPLES = 8
#: Of a commit; below the limit at which pytest ends everything.
TIMEOUT_S = 270
pytestmark = pytest.mark.skipif(
    RELEASE not in MANIFEST.torch, reason=f"the stack is made for {', '.join(MANIFEST.torch)}"
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    installed = Path(torch.__file__).parents[1]
    tree = find_tree(str(installed), MANIFEST.torch, Path("/nowhere"))
    return build_stack(tree, MANIFEST, tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def runner(stack: Stack) -> Iterator[Runner]:
    with runner_of(stack, examples=EXAMPLES) as runner:
        yield runner


@pytest.mark.parametrize("number", range(1, len(COMMITS) + 1))
def test_commit_runs_in_the_tree(stack: Stack, runner: Runner, number: int) -> None:
    built = stack.commits[number - 1]
    assert check_commit(stack, built, runner, TIMEOUT_S) == "", built.commit.title


def test_most_commits_share_a_server(stack: Stack, runner: Runner) -> None:
    """New ones are needed where a commit edits what the server has imported: the first, the last."""
    before = runner.started
    for words in ("Vocabulary", "Build small", "Tag parameter"):
        assert check_commit(stack, titled(stack, words), runner, TIMEOUT_S) == ""
    assert runner.started <= before + 1


# -- what is wrong is told ------------------------------------------------------------------------


def titled(stack: Stack, words: str) -> Built:
    (found,) = [built for built in stack.commits if words in built.commit.title]
    return found


def changed(stack: Stack, built: Built, path: str, text: str) -> Built:
    """The commit with more text at the end of a file."""
    repo = stack.repository
    repo.git("checkout", "-q", built.sha)
    file = repo.root / path
    file.write_text(file.read_text() + text)
    return amended(stack, built)


def amended(stack: Stack, built: Built) -> Built:
    repo = stack.repository
    repo.git("commit", "-q", "-a", "--amend", "--no-edit")
    made = replace(built, sha=repo.head())
    repo.git("checkout", "-q", "comm_overlap")
    return made


def test_broken_module_and_broken_test_are_told(stack: Stack, runner: Runner) -> None:
    """Also where the same files of the commit as it is were run just before, and after."""
    built = titled(stack, "Augmented graph with incremental")
    (test,) = [path for path in built.files if path.startswith("test/")]
    module = next(path for path in built.files if path.startswith("torch/"))
    assert check_commit(stack, built, runner, TIMEOUT_S) == ""
    for path, text, sentence in (
        (module, "\nraise ValueError('broken')\n", "ValueError: broken"),
        (test, "\n\ndef test_broken():\n    assert 1 == 2\n", "FAILED " + test + "::test_broken"),
    ):
        problem = check_commit(stack, changed(stack, built, path, text), runner, TIMEOUT_S)
        assert problem.startswith("ends with 1:") and sentence in problem
    assert check_commit(stack, built, runner, TIMEOUT_S) == ""


def test_file_that_the_server_has_imported_is_read_again(stack: Stack, runner: Runner) -> None:
    built = titled(stack, "Vocabulary")
    broken = changed(stack, built, "torch/_inductor/utils.py", "\nraise ValueError('broken')\n")
    problem = check_commit(stack, broken, runner, TIMEOUT_S)
    assert "cannot run the tree" in problem and "ValueError: broken" in problem


def test_fix_without_its_edit_and_fix_that_is_none(stack: Stack, runner: Runner) -> None:
    built = titled(stack, "cap of each bucket")
    stack.repository.git("checkout", "-q", built.sha)
    stack.repository.git("checkout", "-q", f"{built.sha}~1", "--", *built.edited)
    problem = check_commit(stack, amended(stack, built), runner, TIMEOUT_S)
    assert problem.startswith("ends with 1:") and "FAILED" in problem
    stack.repository.git("checkout", "-q", built.sha)
    stack.repository.git("commit", "-q", "--allow-empty", "-m", "behind the fix")
    late = replace(built, sha=stack.repository.head())
    assert check_commit(stack, late, runner, TIMEOUT_S) == "its tests pass without it"


def test_crash_slowness_and_litter_are_told(stack: Stack, runner: Runner) -> None:
    built = titled(stack, "Augmented graph with incremental")
    (test,) = [path for path in built.files if path.startswith("test/")]
    head = "\nimport os, pathlib, time\n\n"
    for text, limit, sentence in (
        ("os.kill(os.getpid(), 9)\n", TIMEOUT_S, "ends with -9"),
        ("time.sleep(99)\n", 1.5, "not done after 1.5 s"),
        ("pathlib.Path('torch/new.py').touch()\n", TIMEOUT_S, "leave the tree changed:\n?? torch"),
    ):
        problem = check_commit(stack, changed(stack, built, test, head + text), runner, limit)
        assert sentence in problem
        (stack.repository.root / "torch/new.py").unlink(missing_ok=True)
    assert stack.repository.git("branch", "--show-current") == "comm_overlap\n"


def test_chosen_commits_are_listed(stack: Stack) -> None:
    number = 1 + stack.commits.index(titled(stack, "Vocabulary"))
    good, broken = stack.commits[number - 1], replace(stack.commits[number], files=("torch/x.py",))
    told: list[str] = []
    shorter = replace(stack, commits=[*stack.commits[: number - 1], good, broken])
    (problem,) = check_stack(shorter, [number, number + 1], told.append)
    assert problem.startswith(f"{number + 1} {broken.commit.title}: ends with 1:")
    assert "No module named 'torch.x'" in problem
    assert told == [
        f"{number:3} {good.lines:4} lines  ok  {good.commit.title}",
        f"{number + 1:3} {broken.lines:4} lines  FAILED  {broken.commit.title}",
    ]


def test_a_short_set_is_run(runner: Runner, tmp_path: Path) -> None:
    """Examples of a test that names a number, and of one that does not; the first case of others."""
    file = tmp_path / "test_examples.py"
    for count, status in ((EXAMPLES, 0), (EXAMPLES + 1, 1)):
        file.write_text(f"""
import hypothesis
import pytest

seen = []


@pytest.mark.parametrize("case", [0, 1, 2])
def test_cases(case):
    assert case == 0


@hypothesis.given(hypothesis.strategies.integers())
@hypothesis.settings(max_examples=500, database=None)
def test_named(number):
    seen.append(number)


@hypothesis.given(hypothesis.strategies.integers())
def test_not_named(number):
    seen.append(number)


def test_seen():
    assert len(seen) == 2 * {count}
""")
        assert runner.run([], [str(file)], TIMEOUT_S).status == status


def test_interpreter_that_does_not_run(stack: Stack) -> None:
    with pytest.raises(StackError, match="/no/python: No such file"):
        check_stack(stack, [2], python="/no/python")
