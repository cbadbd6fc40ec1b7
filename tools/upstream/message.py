"""Commit messages, in the form that ghstack makes pull requests of."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from upstream.errors import StackError
from upstream.manifest import Commit, Measured

_WIDTH = 80
_UNMEASURED = "Nothing by itself: until the flags come, no compile reaches it."


def message(
    commit: Commit, files: Sequence[str], repository: Path, later: Sequence[str] = ()
) -> str:
    """The whole text.

    Args:
        commit: what it is of.
        files: paths in the tree that it adds.
        repository: ours, where the measured tables are.
        later: test files of later commits that use what it adds; told where it has none itself.

    Raises:
        StackError: a measured row is not found.
    """
    tests = [path for path in files if path.startswith("test/")]
    parts = [
        commit.title,
        "Summary:\n" + _wrapped(commit.summary),
        "Motivation:\n" + _wrapped(commit.motivation),
        "What it gives up:\n" + _wrapped(commit.gives_up),
        "What it gains:\n" + _wrapped(commit.gains),
    ]
    parts.append("\n".join(["| old | new |", "|---|---|", *_old_and_new(commit, files)]))
    table = measured_table(commit.measured, repository) if commit.measured else _UNMEASURED
    parts.append(f"Measured:\n{table}")
    parts.append("Test Plan:\n" + _plan(tests, later))
    return "\n\n".join(parts) + "\n"


def _old_and_new(commit: Commit, files: Sequence[str]) -> list[str]:
    """Rows of the table; what has nothing in torch to stand for is new."""
    if commit.replaces:
        return [f"| `{old}` | `{new}` |" for old, new in commit.replaces]
    added = [path for path in files if path.startswith("torch/")] or list(files)
    return [f"| (none) | `{path}` |" for path in added]


def measured_table(measured: Measured, repository: Path) -> str:
    """The rows asked for, under the header of the first row's table.

    Raises:
        StackError: a row is not there.
    """
    lines = (repository / measured.page).read_text().splitlines()
    chosen: list[str] = []
    header: list[str] = []
    for pattern in measured.rows:
        found = [
            i for i, line in enumerate(lines) if line.startswith("|") and re.search(pattern, line)
        ]
        if not found:
            raise StackError(f"{measured.page}: no row matches {pattern!r}")
        header = header or _header(lines, found[0])
        chosen += [lines[i] for i in found if lines[i] not in chosen]
    return "\n".join([_wrapped(measured.note), "", *header, *chosen])


def _header(lines: Sequence[str], row: int) -> list[str]:
    first = row
    while first > 0 and lines[first - 1].startswith("|"):
        first -= 1
    return list(lines[first : first + 2])


def _plan(tests: Sequence[str], later: Sequence[str]) -> str:
    lines = [f"python -m pytest {path}" for path in tests or later]
    if later and not tests:
        lines.insert(0, "Importable by itself. With the commits behind it:")
    return "\n".join(lines) or "Importable by itself; later commits use it."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
