"""Checks the invariants on random graphs under random flags, for a while.

    python tools/fuzz.py --minutes 60 --seed 0
    python tools/fuzz.py --seed 0 --first 417 --examples 1      # one example again, alone
    python tools/fuzz.py --lanes chains --minutes 2

What is tried: ``torch_patches/testing/fuzzing.py``.  Prints a progress line every 30 s and a result
line at the end.  Failures do not stop it: the first of each kind is cut down, printed as a program
and written to --out; with any, the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_patches.testing.fuzzing import LANES, WEIGHTS, Examples, FoundError, Tally
from torch_patches.testing.strategies import TAGS

CAPTURES = Path(__file__).resolve().parents[1] / "test" / "data"
_PROGRESS_SECONDS = 30


class Campaign:
    """Runs examples one after the other, and remembers what failed.

    Args:
        seed: of all examples; the n-th is drawn from ``Random(f"{seed}/{n}")``.
        lanes: some of :data:`LANES`.
        out: folder for programs that show failures.
    """

    def __init__(self, seed: int, lanes: Sequence[str], examples: Examples, out: Path) -> None:
        self.seed, self.out = seed, out
        self.tally = Tally()
        self._turns = [lane for lane in lanes for _ in range(WEIGHTS[lane])]
        self._examples = examples

    def run(self, number: int) -> None:
        """The example with this number."""
        lane = Random(f"{self.seed}/{number}/lane").choice(self._turns)
        try:
            self._draw(lane, number, self.tally, shrink=False)
        except FoundError as error:
            kind = f"{lane} {error.kind}"
            self.tally.failures[kind] += 1
            print(f"FAILED: example {number} of seed {self.seed}, {lane}", flush=True)
            if self.tally.failures[kind] == 1:
                self._report(lane, number)
        except Exception as error:
            self.tally.failures[f"{lane} {type(error).__name__} of the check"] += 1
            print(f"FAILED: example {number} of seed {self.seed}, {lane}", flush=True)
            traceback.print_exc()

    def _draw(self, lane: str, number: int, tally: Tally, shrink: bool) -> None:
        self._examples.run(lane, Random(f"{self.seed}/{number}"), tally, shrink)

    def _report(self, lane: str, number: int) -> None:
        """Once more, cut down."""
        try:
            self._draw(lane, number, Tally(), shrink=True)
        except FoundError as error:
            name = f"failure_{lane}_{error.kind}_{self.seed}_{number}.py".replace(" ", "_")
            quoted = "\n".join(f"# {line}" for line in error.problem.splitlines())
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_text(f"{quoted}\n{error.program}\n")
            print(f"{error}\n\n{error.program}\nwritten to {self.out / name}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until the time is up, or so many examples; the exit code."""
    options = _parser().parse_args(arguments)
    logging.getLogger("torch_patches").setLevel(logging.ERROR)  # what flags warn of is asked for
    logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)  # what is no program
    captures = [file for path in options.captures for file in _captures(path)]
    campaign = Campaign(options.seed, options.lanes, Examples(captures, options.tags), options.out)
    start = reported = time.monotonic()
    number = options.first
    while time.monotonic() - start < 60 * options.minutes:
        if options.examples is not None and number >= options.first + options.examples:
            break
        campaign.run(number)
        number += 1
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            print(f"{reported - start:.0f} s: {campaign.tally}", flush=True)
    tally = campaign.tally
    mutations = ", ".join(f"{n} {name}" for name, n in sorted(tally.mutations.items()))
    print(f"mutations: {mutations or 'none'}")
    result = "FAILED" if tally.failures else "OK"
    print(f"{result}: seed {options.seed}, {time.monotonic() - start:.0f} s, {tally}")
    return 1 if tally.failures else 0


def _captures(path: Path) -> list[Path]:
    return sorted(path.glob("*.json.gz")) if path.is_dir() else [path]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--examples", type=int, help="stop after so many")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument(
        "--tags",
        nargs="+",
        choices=TAGS,
        default=list(TAGS),
        help="what generated graphs tell of their collectives; default: each in some graphs",
    )
    parser.add_argument(
        "--captures",
        type=Path,
        nargs="+",
        default=[CAPTURES],
        help="captured graphs, or folders of them; an example depends on which there are",
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz_failures"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
