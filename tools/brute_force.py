"""How far "auto" is from the best schedule and the best buckets of small graphs, found by trying all.

    python tools/brute_force.py --graphs 300 --seed 0

Two families: small models with sizes of real ones (``torch_patches/testing/optimum.py``), and the
generated graphs of the fuzz campaign, in which products and collectives take random times.  Prints a table for
tools/results/oracle.md and the numbers of the worst graphs, which ``--show`` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch.fx as fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.estimations import Estimation
from torch_patches.testing.graph_code import builder_code
from torch_patches.testing.optimum import (
    FREE,
    Comparison,
    best_order,
    best_partition,
    small_model,
)
from torch_patches.testing.strategies import build_case, random_recipe

Compare = Callable[[fx.GraphModule, Options], Comparison | None]
_BLOCKS = ("fsdp_param", "fsdp_grad", "ddp_grad", "tensor_parallel", "compute", "fsdp_recompute")
_WORST = 3


@dataclass(frozen=True)
class Kind:
    """One row: which graphs, against what."""

    name: str
    draw: Callable[[Random], tuple[fx.GraphModule, Options]]
    compare: Compare


@dataclass(frozen=True)
class Found:
    """One graph that could be tried to the end; ``seed`` draws it again."""

    seed: str
    comparison: Comparison


def _model_to_order(r: Random) -> tuple[fx.GraphModule, Options]:
    return small_model(r, r.choice([1, 2, 2, 3]), r.choice([0, 1, 1])), FREE


def _model_to_merge(r: Random) -> tuple[fx.GraphModule, Options]:
    layers = r.randint(2, 5)
    return small_model(r, layers, r.randint(0, min(4, 8 - layers))), FREE


def _fuzzed(most: int) -> Callable[[Random], tuple[fx.GraphModule, Options]]:
    def draw(r: Random) -> tuple[fx.GraphModule, Options]:
        gm = build_case(random_recipe(r, _BLOCKS, most)).gm
        own = Estimation(
            heavy_ms=r.choice([0.5, 2.0, 10.0]),
            light_ms=0.0,  # nodes that are fused cannot be told apart by a run
            latency_ms=r.choice([0.1, 1.0, 4.0]),
            ms_per_kib=r.choice([0.5, 5.0, 50.0]),
        )
        return gm, replace(FREE, custom_runtime_estimation=own, estimation_digest=own.uuid())

    return draw


KINDS = (
    Kind("schedule, small models", _model_to_order, best_order),
    Kind("schedule, fuzzed graphs", _fuzzed(3), best_order),
    Kind("buckets, small models", _model_to_merge, best_partition),
    Kind("buckets, fuzzed graphs", _fuzzed(8), best_partition),
)


def measure(kind: Kind, graphs: int, seed: int) -> list[Found]:
    """The first so many graphs that can be tried to the end."""
    found: list[Found] = []
    number = 0
    while len(found) < graphs:
        name = f"{seed}/{kind.name}/{number}"
        comparison = kind.compare(*kind.draw(Random(name)))
        if comparison is not None and comparison.tried > 1:
            found.append(Found(name, comparison))
        number += 1
    return found


def row(name: str, gaps: Sequence[float], extra: str = "") -> str:
    """Gaps as a line of the table."""
    gaps = sorted(gaps)
    exact = sum(gap < 1e-6 for gap in gaps) / len(gaps)
    at = [gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.9, 1.0)]
    cells = " | ".join(f"{100 * gap:.1f}%" for gap in at)
    return f"| {name} | {len(gaps)} | {100 * exact:.0f}% | {cells} | {extra} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0."""
    options = _parser().parse_args(arguments)
    with as_on_gpu():
        if options.show is not None:
            kind = next(k for k in KINDS if k.name == options.show.split("/")[1])
            gm, given = kind.draw(Random(options.show))
            print("\n".join(builder_code(gm)), given, kind.compare(gm, given), sep="\n")
            return 0
        print(
            "| | graphs | best found | median gap | 90th | worst | tried |\n|---|---|---|---|---|---|---|"
        )
        worst: list[str] = []
        for kind in KINDS:
            found = measure(kind, options.graphs, options.seed)
            tried = f"{sum(f.comparison.tried for f in found):,}"
            print(row(kind.name, [f.comparison.gap for f in found], tried), flush=True)
            if kind.compare is best_order:
                kept = [f.comparison.kept_gap for f in found]
                print(row(f"{kind.name}, compute in order", kept, tried), flush=True)
            found.sort(key=lambda f: -f.comparison.kept_gap)
            worst += [f"{f.seed}: {f.comparison}" for f in found[:_WORST]]
        print("\nworst:", *worst, sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=300, help="of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--show", help="print one graph: its number as the list of the worst has it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
