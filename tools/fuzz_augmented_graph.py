"""Compare AugmentedGraph with its brute-force model on many random scenarios.

    python tools/fuzz_augmented_graph.py --examples 50000 --seed 0

Ends with one result line.  On a difference it prints a Python program that shows it, as small as
leaving out operations and edges makes it, and exits with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_patches.testing.augmented_graph_model import (
    Mismatch,
    Scenario,
    check_scenario,
    minimise,
    random_scenario,
)

_PROGRESS_SECONDS = 5


def _scenario(seed: int, number: int) -> Scenario:
    """Each example has its own generator, so that one can be run again alone."""
    return random_scenario(random.Random(f"{seed}/{number}"))


def _report_failure(seed: int, number: int, scenario: Scenario) -> None:
    print(f"FAILED: example {number} of seed {seed}; smallest program found:")
    try:
        check_scenario(minimise(scenario))
    except Mismatch as mismatch:
        print(mismatch)


def main() -> int:
    """Run the examples; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = reported = time.monotonic()
    operations = 0
    for number in range(options.examples):
        scenario = _scenario(options.seed, number)
        operations += len(scenario.operations)
        try:
            check_scenario(scenario)
        except Mismatch:
            _report_failure(options.seed, number, scenario)
            return 1
        now = time.monotonic()
        if now - reported >= _PROGRESS_SECONDS:
            reported = now
            print(f"{number + 1}/{options.examples} examples, {now - start:.0f} s", flush=True)
    seconds = time.monotonic() - start
    print(
        f"OK: {options.examples} examples, {operations} operations, seed {options.seed}, "
        f"0 differences, {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
