"""Checks the invariants on random collective graphs for a while.

    python tools/fuzz_graphs.py --minutes 10 --seed 0

Prints a progress line every 5 s and a result line at the end.  Failures do not stop it: each kind
is cut down once, printed as a program and written to --out; with any, the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.invariants import CaseError, InvariantError
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import TAGS, Case, build_case, random_options, random_recipe

_PROGRESS_SECONDS = 5


@dataclass
class _Tally:
    examples: int = 0
    with_buckets: int = 0
    members: int = 0
    displaced: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        failed = ", ".join(f"({k}) {n}" for k, n in sorted(self.failures.items())) or "none"
        share = self.displaced / max(self.with_buckets, 1)
        return (
            f"{self.examples} graphs, {self.with_buckets} with buckets, {self.members} members, "
            f"mean displaced {share:.1%}, failures: {failed}"
        )


def _run_example(seed: int, number: int, tags: Sequence[str], tally: _Tally, out: Path) -> None:
    """Each example has its own generator, so that one can be run again alone."""
    r = random.Random(f"{seed}/{number}")
    case, options = build_case(random_recipe(r, tags=tags)), random_options(r)
    tally.examples += 1
    try:
        outcome = check_invariants(case.gm, case.description, options, trusted=True, shrink=False)
        tally.with_buckets += outcome.buckets > 0
        tally.members += outcome.members
        tally.displaced += outcome.displaced_share
    except CaseError as error:
        tally.failures["illegal input: a bug of the generator"] += 1
        print(f"example {number} of seed {seed}: {error}", flush=True)
    except InvariantError as error:
        tally.failures[error.letter] += 1
        if tally.failures[error.letter] == 1:
            print(f"FAILED: example {number} of seed {seed}", flush=True)
            _report_failure(case, options, out / f"failure_{error.letter}_{seed}_{number}.py")


def _report_failure(case: Case, options: Options, path: Path) -> None:
    try:
        check_invariants(case.gm, case.description, options, trusted=True)
    except InvariantError as error:
        problem, program = str(error).split("\n\n", 1)
        quoted = "\n".join(f"# {line}" for line in problem.splitlines())
        path.write_text(f"{quoted}\n{program}\n")
        print(f"{error}\nwritten to {path}", flush=True)


def main() -> int:
    """Runs until the time is up; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--examples", type=int, default=None, help="stop after so many")
    parser.add_argument(
        "--tags",
        nargs="+",
        choices=TAGS,
        default=list(TAGS),
        help="what graphs tell of their collectives; default: each in some graphs",
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for failures")
    arguments = parser.parse_args()
    start = reported = time.monotonic()
    tally = _Tally()
    number = arguments.first
    while time.monotonic() - start < 60 * arguments.minutes:
        if arguments.examples is not None and tally.examples >= arguments.examples:
            break
        # in turn as on GPUs and as on gloo, which needs copies for some kinds
        with as_on_gpu() if number % 2 else contextlib.nullcontext():
            _run_example(arguments.seed, number, arguments.tags, tally, arguments.out)
        number += 1
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            print(f"{reported - start:.0f} s: {tally}", flush=True)
    result = "FAILED" if tally.failures else "OK"
    print(f"{result}: seed {arguments.seed}, {time.monotonic() - start:.0f} s, {tally}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
