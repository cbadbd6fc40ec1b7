"""Runs a built stack: after each commit its modules import in the tree and its tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from upstream.build import Built, Stack
from upstream.errors import StackError
from upstream.ruff import complaints
from upstream.tree import link_rest

#: Runs in the tree.  Our package must not help: an import of it fails.
_RUNNER = """
import importlib, importlib.abc, os, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch_patches":
            raise ImportError(f"{name} is not part of the tree")

sys.meta_path.insert(0, Blocked())
root, modules, tests = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
sys.path.insert(0, root)
import torch
assert os.path.dirname(os.path.dirname(torch.__file__)) == root, torch.__file__
for name in modules:
    importlib.import_module(name)
if not tests:
    raise SystemExit(0)
import pytest
options = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", root, "-c", os.devnull, "--tb=short"]
raise SystemExit(pytest.main([*options, *tests]))
"""


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
    if stack.tree.is_checkout:
        raise StackError("a checkout has no binaries of this commit; check an installed torch")
    link_rest(stack.tree, stack.repository.root)
    problems = []
    try:
        for number, built in enumerate(stack.commits, 1):
            if numbers and number not in numbers:
                continue
            problem = _problem_of(stack, built, timeout_s, python)
            told = "FAILED" if problem else "ok"
            tell(f"{number:3} {built.lines:4} lines  {told}  {built.commit.title}")
            if problem:
                problems.append(f"{number} {built.commit.title}: {problem}")
    finally:
        stack.repository.git("reset", "-q", "--hard")
        stack.repository.git("checkout", "-q", "comm_overlap")
    return problems


def _problem_of(stack: Stack, built: Built, timeout_s: float, python: str) -> str:
    try:
        return _check_commit(stack, built, timeout_s, python)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:g} s"
    except OSError as error:  # there is no such interpreter
        raise StackError(f"{python}: {error.strerror}") from error


def _check_commit(stack: Stack, built: Built, timeout_s: float, python: str) -> str:
    repo = stack.repository
    tests = [path for path in built.files if path.startswith("test/")]
    if built.commit.fault:
        repo.git("checkout", "-q", f"{built.sha}~1")
        repo.git("checkout", "-q", built.sha, "--", *tests)
        done = _run(stack, [], tests, timeout_s, python)
        repo.git("reset", "-q", "--hard")
        if done.returncode == 0:
            return "its tests pass without it"
        if done.returncode != 1:
            return f"its tests do not run without it:\n{_tail(done)}"
    repo.git("checkout", "-q", built.sha)
    modules = [_module(path) for path in built.files if path.startswith("torch/")]
    done = _run(stack, modules, tests, timeout_s, python)
    if done.returncode:
        return _tail(done)
    ours = [repo.root / path for path in built.files if path.endswith(".py")]
    return complaints(ours) if ours else ""


def _run(
    stack: Stack,
    modules: Sequence[str],
    tests: Sequence[str],
    timeout_s: float,
    python: str,
) -> subprocess.CompletedProcess[str]:
    root = stack.repository.root.resolve()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
    command = [python, "-c", _RUNNER, str(root), " ".join(modules), " ".join(tests)]
    return subprocess.run(
        command,
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def _module(path: str) -> str:
    return str(Path(path).with_suffix("")).replace("/", ".")


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).strip()[-3000:]
