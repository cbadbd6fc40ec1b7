"""Lets every function that the passes call fail once, and looks at what becomes of the graph.

    python tools/inject_faults.py                        # all cases, first and one random call; 10 min
    python tools/inject_faults.py --case auto --calls 3 --seed 7 --error memory

CI does the same with a few places (test/inductor/test_faults.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_patches.testing.fault_check import CASES, FaultError, outcome_of_fault

ERRORS = {
    "key": lambda: KeyError("an error put in"),
    "memory": lambda: MemoryError("an error put in"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--error", choices=ERRORS, action="append", help="default: all")
    parser.add_argument(
        "--calls", type=int, default=1, help="random calls of each place, beside the first"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    os.environ["TORCH_PATCHES_STRICT"] = "0"
    random, failures = Random(given.seed), 0
    for name in given.case or CASES:
        case, seen = CASES[name], Counter[str]()
        for place in case.places():
            numbers = {1} | {random.randint(1, place.calls) for _ in range(given.calls)}
            for call in sorted(numbers):
                for kind in given.error or ERRORS:
                    try:
                        seen[f"{kind}: {outcome_of_fault(case, place, call, ERRORS[kind]())}"] += 1
                    except FaultError as error:
                        failures += 1
                        print(f"{name}: {error}", flush=True)
        print(name, dict(seen), flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
