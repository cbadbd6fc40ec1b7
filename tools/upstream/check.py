"""Runs a built stack: after each commit its modules import in the tree and its tests pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from upstream.build import Built, Stack
from upstream.errors import StackError, TreeError
from upstream.ruff import complaints
from upstream.runner import Done, Runner
from upstream.tree import link_rest

_TESTS_FAILED = 1  # pytest's exit status


def check_stack(
    stack: Stack,
    numbers: Sequence[int] = (),
    tell: Callable[[str], None] = print,
    timeout_s: float = 900,
    python: str = sys.executable,
) -> list[str]:
    """Checks out one commit after the other and runs what it brings.

    Args:
        stack: as built; its tree ends at the last commit.
        numbers: of the commits to check, from 1; none for all.
        tell: gets a line for each commit.
        timeout_s: of one commit.
        python: the interpreter that the tree's binaries are of, with pytest and hypothesis.

    Returns:
        Problems, each with the commit's title.

    Raises:
        StackError: the tree cannot be run.
    """
    problems = []
    with runner_of(stack, python) as runner:
        for number, built in enumerate(stack.commits, 1):
            if numbers and number not in numbers:
                continue
            problem = check_commit(stack, built, runner, timeout_s)
            told = "FAILED" if problem else "ok"
            tell(f"{number:3} {built.lines:4} lines  {told}  {built.commit.title}")
            if problem:
                problems.append(f"{number} {built.commit.title}: {problem}")
    return problems


def runner_of(stack: Stack, python: str = sys.executable, examples: int | None = None) -> Runner:
    """For the stack's tree, which it makes importable; see :class:`Runner`.

    Raises:
        StackError: the tree cannot be run.
    """
    if stack.tree.is_checkout:
        raise StackError("a checkout has no binaries of this commit; check an installed torch")
    link_rest(stack.tree, stack.repository.root)
    return Runner(stack.repository.root, python, examples)


def check_commit(stack: Stack, built: Built, runner: Runner, timeout_s: float = 900) -> str:
    """What is wrong with a commit; empty if nothing.  The tree ends as it was, at the last commit.

    A fix is run without its edits first, where its tests must fail.

    Raises:
        StackError: there is no such interpreter.
    """
    try:
        return _problem_of(stack, built, runner, timeout_s)
    except TreeError as error:
        return str(error)
    finally:
        stack.repository.git("reset", "-q", "--hard")
        stack.repository.git("checkout", "-q", "comm_overlap")


def _problem_of(stack: Stack, built: Built, runner: Runner, timeout_s: float) -> str:
    repo = stack.repository
    tests = [path for path in built.files if path.startswith("test/")]
    if built.commit.fault:
        repo.git("checkout", "-q", f"{built.sha}~1")
        repo.git("checkout", "-q", built.sha, "--", *tests)
        done = runner.run([], tests, timeout_s)
        repo.git("reset", "-q", "--hard")
        if done.status == 0:
            return "its tests pass without it"
        if done.status != _TESTS_FAILED:
            return f"its tests do not run without it: {_told(done, timeout_s)}"
    repo.git("checkout", "-q", built.sha)
    modules = [_module(path) for path in built.files if path.startswith("torch/")]
    done = runner.run(modules, tests, timeout_s)
    if done.status != 0:
        return _told(done, timeout_s)
    if changed := repo.git("status", "--porcelain"):
        return f"its tests leave the tree changed:\n{changed}"
    ours = [repo.root / path for path in built.files if path.endswith(".py")]
    return complaints(ours) if ours else ""


def _told(done: Done, timeout_s: float) -> str:
    if done.status is None:
        return f"not done after {timeout_s:g} s:\n{done.output}"
    return f"ends with {done.status}:\n{done.output}"


def _module(path: str) -> str:
    return str(Path(path).with_suffix("")).replace("/", ".")
