"""Runs the test-suite on every supported torch, each in an environment of its own.

    python tools/test_matrix.py                                  # 2.11 to 2.15, and the newest release
    python tools/test_matrix.py --versions 2.11 2.14 --env 2.11=/envs/torch211
    python tools/test_matrix.py --pytest-args -k "not gloo"      # what behind it goes to pytest

Environments are made in ``.matrix`` and kept; torch is several GB in each where its wheel brings CUDA
(``TORCH_INDEX_URL`` names an index of CPU wheels).  ``newest`` is what pip would install today: a release
that the package does not support yet is tried all the same, since its failures are the work to be done; one
that is among the versions is not run twice.

One row for each version goes into ``--out``, which keeps the rows of other versions; the exit code is that
of the worst run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bootstrap

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".matrix"
OUT = ROOT / "tools" / "results" / "versions.md"
NEWEST = "newest"
#: A release that is not known yet is tried; without it the package changes nothing there (_compat.py).
ALLOW_UNTESTED_VARIABLE = "TORCH_PATCHES_ALLOW_UNTESTED_TORCH"
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15", NEWEST)
HEAD = (
    "| torch asked for | torch | Python | passed | failed | skipped | seconds | commit | date | "
    "pytest arguments |\n|---|---|---|---|---|---|---|---|---|---|\n"
)
TITLE = "# The test-suite by torch release\n\n```console\n$ make test-matrix\n```\n\n"


@dataclass(frozen=True)
class Row:
    """The run of one version; ``passed`` and so on by pytest's summary, which is its last line."""

    asked: str
    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    seconds: int
    arguments: str

    def text(self) -> str:
        cells = (self.asked, self.torch, self.python, self.passed, self.failed, self.skipped)
        more = (self.seconds, commit(), datetime.date.today().isoformat(), self.arguments or " ")
        return "| " + " | ".join(map(str, (*cells, *more))) + " |"


def environment(version: str, given: dict[str, Path]) -> Path:
    """The interpreter that has this torch and the test tools, installed if need be."""
    if version in given:
        return bootstrap.named_python(str(given[version]))
    python = ENVIRONMENTS / version / "bin" / "python"
    if not bootstrap.works(python):
        base = bootstrap.find_base_python()
        subprocess.run([base, "-m", "venv", "--clear", python.parents[1]], check=True)
    index = os.environ.get("TORCH_INDEX_URL")
    source = ["--index-url", index] if index else []
    wanted = ["--upgrade", "torch"] if version == NEWEST else [f"torch=={version}.*"]
    pip = [str(python), "-m", "pip", "install"]
    subprocess.run([*pip, *wanted, *source], check=True)
    subprocess.run([*pip, "-e", ".[test,tools]"], check=True, cwd=ROOT)
    return python


def release(python: Path) -> str:
    """``2.15`` for an interpreter that has torch 2.15.0."""
    show = "import torch; print('.'.join(torch.__version__.split('.')[:2]))"
    return subprocess.check_output([python, "-c", show], text=True).strip()


def run(version: str, python: Path, arguments: Sequence[str]) -> Row:
    """Runs pytest; its output goes on to the terminal."""
    show = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
    torch, python_version = subprocess.check_output([python, "-c", show], text=True).split()
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), ALLOW_UNTESTED_VARIABLE: "1"}
    start, last = time.monotonic(), ""
    process = subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line if line.strip() else last
    process.wait()
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    failed = counted.get("failed", 0) + counted.get("error", 0)
    if process.returncode and not failed:
        failed = 1  # no summary: pytest itself went down
    seconds = round(time.monotonic() - start)
    passed, skipped = counted.get("passed", 0), counted.get("skipped", 0)
    given = " ".join(arguments)
    return Row(version, torch, python_version, passed, failed, skipped, seconds, given)


def commit() -> str:
    """Of this checkout, with a mark if it is changed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def record(out: Path, row: Row) -> None:
    """Puts the row into the table, in the place of the one of the same version; what stands below
    the table stays."""
    old = out.read_text().splitlines() if out.exists() else []
    last = max((place for place, line in enumerate(old) if line.startswith("|")), default=len(old))
    kept = [line for line in old if line.startswith("| ") and not line.startswith("| torch asked")]
    kept = [line for line in kept if line.split("|")[1].strip() != row.asked]
    rows = sorted([*kept, row.text()], key=lambda line: line.split("|")[1])
    out.write_text(TITLE + HEAD + "\n".join([*rows, *old[last + 1 :]]) + "\n")


def named_environment(text: str) -> tuple[str, Path]:
    """``2.11=/envs/torch211``."""
    version, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not VERSION=PATH")
    return version, Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), help="such as 2.11")
    parser.add_argument("--env", type=named_environment, action="append", default=[])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pytest-args", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args(argv)
    worst = 0
    for version in options.versions:
        try:
            python = environment(version, dict(options.env))
        except (bootstrap.MissingRequirementError, subprocess.CalledProcessError) as problem:
            print(f"test_matrix: torch {version}: {problem}", file=sys.stderr)
            worst = 1
            continue
        if version == NEWEST and release(python) in options.versions:
            print(f"test_matrix: the newest torch is {release(python)}, which has its own row")
            continue
        row = run(version, python, options.pytest_args)
        record(options.out, row)
        print(HEAD + row.text(), flush=True)
        worst = max(worst, min(row.failed, 1))
    return worst


if __name__ == "__main__":
    sys.exit(main())
