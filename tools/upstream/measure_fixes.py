"""What the fixes of torch's own files change, in numbers: one row for each, for one torch.

    python tools/upstream/measure_fixes.py                   # the installed torch, without the fixes
    python tools/upstream/measure_fixes.py --tree OUT/tree   # a stack that --check made importable

The scenarios are those of the fixes' own tests.  ``tools/results/upstream_fixes.md`` has both runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent / "new" / "test" / "inductor"


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, help="a tree whose torch is used")
    options = parser.parse_args()
    sys.path[:1] = [*([str(options.tree.resolve())] if options.tree else []), str(TESTS)]
    import torch

    print(f"torch {torch.__version__} of {Path(torch.__file__).parents[1]}")
    for text, scenario in _scenarios():
        print(f"| {text} | {_told(scenario)} |")


def _scenarios() -> list[tuple[str, Callable[[], object]]]:
    import test_greedy_bucket_caps as caps
    import test_greedy_bucket_dependents as dependents
    import test_overlap_memory_caps as memory
    import test_overlap_roofline_without_gpu as roofline
    import test_overlap_without_memory_cap as without

    def layers(case: Any) -> object:
        def three(x: Any, y: Any) -> Any:
            for _ in range(3):
                x, y = case.reduce(x) + 1, case.reduce(y) + 1
            return x, y

        return case.buckets(three, 2)

    def growth(case: Any) -> object:
        increase, peak = case.allowed_increase(1.0, 0.5)
        return f"{increase / peak:.6g} of the peak"

    return [
        (
            "roofline: ms of x + 1, 2**20 fp32, no GPU",
            _of(roofline.TestRooflineWithoutGpu, lambda case: f"{case.estimate(1 << 20):.6f}"),
        ),
        (
            "greedy caps: members of the buckets of 9 gathers of 1 MiB, caps 2, 3, 4 MB",
            _of(caps.TestGreedyBucketCaps, lambda case: case.sizes_of_buckets(9, [2.0, 3.0, 4.0])),
        ),
        (
            "greedy dependents: buckets of 3 layers of 2 reductions, 0 to 5 in graph order",
            _of(dependents.TestGreedyBucketDependents, layers),
        ),
        (
            "memory caps: allowed increase at 1 GB and half the peak",
            _of(memory.TestMemoryCaps, growth),
        ),
        (
            "no memory cap: order of 4 gathers (S) and products (m)",
            _of(without.TestWithoutMemoryCap, lambda case: case.order(None, None)),
        ),
    ]


def _of(kind: Any, scenario: Callable[[Any], object]) -> Callable[[], object]:
    """The scenario with what the test's class sets up around it."""

    def run() -> object:
        case = kind()
        case.setUp()
        try:
            return scenario(case)
        finally:
            case.doCleanups()

    return run


def _told(scenario: Callable[[], object]) -> object:
    try:
        return scenario()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:70]}"


if __name__ == "__main__":
    main()
