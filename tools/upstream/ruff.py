"""ruff with what is known of PyTorch's rules (``pytorch_rules.toml`` beside this file)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from upstream.errors import StackError

CONFIG = Path(__file__).parent / "pytorch_rules.toml"


def formatted(source: str) -> str:
    """``source`` in the tree's line length."""
    return _run(["format", "-q", "--stdin-filename", "generated.py", "-"], source)


def formatted_change(before: str, after: str) -> str:
    """``after`` with the lines formatted that differ from ``before``, and no others: what the
    maintainers' formatter made of the rest may differ from what this one would."""
    old, new = before.splitlines(), after.splitlines()
    if old == new:
        return after
    first = _equal(old, new)
    # Lines that are equal from both ends count once: what is repeated is what was put in.
    last = len(new) - min(_equal(old[::-1], new[::-1]), len(old) - first, len(new) - first)
    span = f"{first + 1}:1-{min(max(last, first + 1) + 2, len(new))}:1"
    command = ["format", "-q", "--range", span, "--stdin-filename", "changed.py", "-"]
    return _run(command, after)


def _equal(old: Sequence[str], new: Sequence[str]) -> int:
    """How many of the first lines are the same."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(old), len(new)))


def tidy(files: Sequence[Path]) -> None:
    """Formats files of ours in place and sorts their imports; in tests, drops unused ones."""
    if not files:
        return
    paths = [str(path) for path in files]
    # Twice: sorted imports are formatted, and lines that the formatter split are sorted.
    _run(["check", "-q", "--fix", "--select", "I,F401", "--exit-zero", *paths])
    _run(["format", "-q", *paths])
    _run(["check", "-q", "--fix", "--select", "I", "--exit-zero", *paths])


def complaints(files: Sequence[Path]) -> str:
    """What ruff says of the files; empty if nothing."""
    paths = [str(path) for path in files]
    done = _call(["check", "-q", "--output-format", "concise", *paths])
    return done.stdout.strip() if done.returncode else ""


def _call(arguments: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    command, *rest = arguments
    call = [
        sys.executable,
        "-m",
        "ruff",
        command,
        "--config",
        str(CONFIG),
        "--no-cache",
        *rest,
    ]
    return subprocess.run(call, input=text, capture_output=True, text=True, check=False)


def _run(arguments: list[str], text: str | None = None) -> str:
    done = _call(arguments, text)
    if done.returncode:
        raise StackError(f"ruff {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
