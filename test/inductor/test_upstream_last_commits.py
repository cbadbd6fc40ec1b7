"""The last commits of the stack for PyTorch run in the tree, as ``test_upstream_commits.py`` says: the
other worker of CI can take them."""

from __future__ import annotations

import pytest
from test_upstream_commits import COMMITS, LAST, TIMEOUT_S, check_commit, pytestmark, runner, stack
from upstream.build import Stack
from upstream.runner import Runner

__all__ = ["pytestmark", "runner", "stack"]  # pytest finds them by name


@pytest.mark.parametrize("number", range(LAST, len(COMMITS) + 1))
def test_commit_runs_in_the_tree(stack: Stack, runner: Runner, number: int) -> None:
    built = stack.commits[number - 1]
    assert check_commit(stack, built, runner, TIMEOUT_S) == "", built.commit.title
