#!/usr/bin/env python
"""Random chains of gathers and reduce-scatters: fused exactly where all ranks get the same?

    python tools/fuzz_chains.py --examples 20000

Meshes of two and three dimensions of 1 to 4 ranks, every order of gathers, about half of the views
between not the identity; each chain is planned on every rank and run, beside one collective over
every group (``torch_patches/testing/chain_check.py``).  Ends with code 1 at the first failure, which
names the seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_patches.testing.chain_check import CHECKED_KINDS, ChainError, check_chain


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=20000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    begin = time.perf_counter()
    for kind in CHECKED_KINDS:
        counts: Counter[str] = Counter()
        for seed in range(options.first, options.first + options.examples):
            try:
                counts[check_chain(random.Random(seed), kind, f"{kind.value}, seed {seed}")] += 1
            except ChainError as error:
                print(f"FAILED: {error}")
                return 1
        took = time.perf_counter() - begin
        print(f"OK: {kind.value}, {options.examples} chains, {dict(counts)}, {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
