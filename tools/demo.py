"""The main job, shown: a Llama under per-parameter FSDP, compiled with and without bucketing.

Two gloo processes on this machine's CPU train a small model twice, once with
``bucketing_mode = "none"`` and once with ``"topo_span"``, first by running the post-grad graphs
eagerly (only the bucketing differs, so every bit must agree), then under full Inductor (where
fusion may differ in the last bits, so there is a bound).  Prints a table, writes a report file, and a
picture of what ``"auto"`` is estimated to do to a model of real sizes on GPUs.  Exits with 1 if a claim
does not hold, 2 if it could not finish.

    make demo
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for draw_timeline

from draw_timeline import draw_file

import torch_patches
from torch_patches.testing.models import ModelConfig
from torch_patches.testing.processes import RankFailed, RanksTimedOut, Say, run_ranks
from torch_patches.testing.training import Comparison, TrainingRun, Workload, compare, train

WORLD_SIZE = 2
MODE_FLAG = "aten_distributed_optimizations.bucketing_mode"
MODES = ("none", "topo_span")
BACKENDS = ("eager", "inductor")
PHASES = ("forward", "backward")

INDUCTOR_BOUND = 1e-5
"""Largest difference of an element over the largest magnitude in its tensor.  float32 has 6e-8
between neighbours; a fused kernel may round sums over a few hundred elements differently."""

SIGN_OF_LIFE_S = 4.0

#: The backward of four layers of Llama-3-8B's sizes on 8 ranks (docs/data/README.md).
DRAWN = Path(__file__).resolve().parents[1] / "docs" / "data" / "llama8b_4l_fsdp8.json.gz"


@dataclass(frozen=True)
class RunFigures:
    """One training run without its tensors."""

    launches: dict[str, dict[str, int]]
    compile_s: dict[str, float]
    step_ms: float
    last_loss: float
    reports: list[dict[str, Any]]

    @staticmethod
    def of(run: TrainingRun) -> RunFigures:
        step_ms = statistics.median(run.step_ms) if run.step_ms else 0.0
        return RunFigures(run.launches, run.compile_s, step_ms, run.losses[-1].item(), run.reports)


@dataclass(frozen=True)
class RankFigures:
    """What one rank found: by backend and mode, and by backend how the two modes compare."""

    runs: dict[str, dict[str, RunFigures]]
    comparisons: dict[str, Comparison]


@dataclass(frozen=True)
class Claim:
    """A sentence and whether it held."""

    text: str
    holds: bool


def demo_workload(layers: int) -> Workload:
    return Workload(ModelConfig(layers=layers, dim=64), steps=3, timed_steps=15)


# -- in each rank ---------------------------------------------------------------------------------


def work(rank: int, say: Say, workload: Workload) -> RankFigures:
    """Trains under every backend and mode."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORLD_SIZE))
    _quieten_torch()
    runs: dict[str, dict[str, RunFigures]] = {}
    comparisons = {}
    for backend in BACKENDS:
        trained = {}
        for mode in MODES:
            say(f"{backend}, bucketing_mode={mode}")
            trained[mode] = train(workload, backend, {MODE_FLAG: mode}, _prefixed(say, mode))
        runs[backend] = {mode: RunFigures.of(run) for mode, run in trained.items()}
        comparisons[backend] = compare(trained["topo_span"], trained["none"])
    return RankFigures(runs, comparisons)


def _prefixed(say: Say, prefix: str) -> Callable[[str], None]:
    return lambda text: say(f"  {prefix}: {text}")


def _quieten_torch() -> None:
    """torch warns that the model uses selective checkpointing, once for each rank."""
    if "TORCH_LOGS" not in os.environ:
        import logging

        torch._logging.set_logs(all=logging.ERROR)


# -- progress -------------------------------------------------------------------------------------


class Progress:
    """One line for each step of rank 0, and a sign of life in between."""

    def __init__(self) -> None:
        self.started = self.printed = time.monotonic()
        self.doing = "starting"

    def on_message(self, rank: int, text: str) -> None:
        if rank == 0:
            self.doing = text
            self._print(text)

    def on_tick(self) -> None:
        if time.monotonic() - self.printed > SIGN_OF_LIFE_S:
            self._print(f"  ... still: {self.doing.strip()}")

    def _print(self, text: str) -> None:
        self.printed = time.monotonic()
        print(f"[{self.printed - self.started:4.0f} s] {text}", flush=True)


# -- what is claimed ------------------------------------------------------------------------------


def judge(ranks: list[RankFigures]) -> list[Claim]:
    """Every claim the demo makes, judged on every rank."""
    return [
        Claim(
            "every kind of collective is launched less often, forward and backward", _drops(ranks)
        ),
        Claim(
            "the launches counted by the profiler are those the reports announce", _agrees(ranks)
        ),
        Claim("no pass gave a graph up", not any(r["failure"] for r in _reports(ranks))),
        Claim("both ranks launch the same collectives in the same order", _same_schedule(ranks)),
        Claim(
            "losses and gradients are bitwise equal (same graphs run eagerly)",
            all(rank.comparisons["eager"].bitwise_equal for rank in ranks),
        ),
        Claim(
            f"losses and gradients agree within {INDUCTOR_BOUND:g} (Inductor)",
            all(r.comparisons["inductor"].max_relative <= INDUCTOR_BOUND for r in ranks),
        ),
    ]


def _reports(ranks: list[RankFigures]) -> list[dict[str, Any]]:
    return [
        report
        for rank in ranks
        for backend in BACKENDS
        for report in rank.runs[backend]["topo_span"].reports
    ]


def _drops(ranks: list[RankFigures]) -> bool:
    for rank in ranks:
        for modes in rank.runs.values():
            for phase in PHASES:
                before, after = (modes[mode].launches[phase] for mode in MODES)
                if not before or any(after.get(kind, 0) >= n for kind, n in before.items()):
                    return False
    return True


def _agrees(ranks: list[RankFigures]) -> bool:
    """The forward is compiled first, so the reports are forward, backward."""
    for rank in ranks:
        for modes in rank.runs.values():
            reports = modes["topo_span"].reports
            if len(reports) != len(PHASES):
                return False
            for phase, report in zip(PHASES, reports, strict=True):
                if modes["none"].launches[phase] != report["collectives_before"]:
                    return False
                if modes["topo_span"].launches[phase] != report["collectives_after"]:
                    return False
    return True


def _same_schedule(ranks: list[RankFigures]) -> bool:
    hashes = [[r["schedule_hash"] for r in _reports([rank])] for rank in ranks]
    return all(h == hashes[0] for h in hashes)


# -- what is printed ------------------------------------------------------------------------------


def table(figures: RankFigures) -> str:
    """The result of rank 0 under Inductor."""
    runs = figures.runs["inductor"]
    reports = runs["topo_span"].reports
    lines = [_row("", *(f"{phase}: none -> topo_span" for phase in PHASES))]
    launches = [[runs[mode].launches[phase] for mode in MODES] for phase in PHASES]
    for kind in sorted({kind for pair in launches for counts in pair for kind in counts}):
        cells = [_arrow(before.get(kind, 0), after.get(kind, 0)) for before, after in launches]
        lines.append(_row(f"{kind} launches", *cells))
    lines.append(_row("payload, KiB", *(_arrow(*_kib(report)) for report in reports)))
    lines.append(_row("buckets", *(_arrow(0, len(report["buckets"])) for report in reports)))
    bounds = (f"{r['max_span']} (bound {r['max_topo_span']})" for r in reports)
    lines.append(_row("max span, nodes", *bounds))
    none, ours = (f"{runs[mode].step_ms:.1f}" for mode in MODES)
    lines.append(_row("median step, ms", f"{none} -> {ours}", "(gloo on CPU: no speed claim)"))
    for backend in BACKENDS:
        lines.append(_row(f"losses, gradients: {backend}", _closeness(figures, backend), ""))
    return "\n".join(lines)


def _row(name: str, first: str, second: str) -> str:
    return f"{name:<30}{first:>32}{second:>34}".rstrip()


def _arrow(before: object, after: object) -> str:
    return f"{before} -> {after}"


def _kib(report: dict[str, Any]) -> tuple[str, str]:
    sides = (report["groups_before"], report["groups_after"])
    before, after = (sum(group["size_bytes"] for group in side) / 1024 for side in sides)
    return f"{before:.1f}", f"{after:.1f}"


def _closeness(figures: RankFigures, backend: str) -> str:
    comparison = figures.comparisons[backend]
    if comparison.bitwise_equal:
        return f"bitwise equal ({comparison.tensors} tensors)"
    return f"within {comparison.max_relative:.1e} relative"


def write_report(
    path: Path, workload: Workload, ranks: list[RankFigures], claims: list[Claim]
) -> None:
    """Everything behind the table as JSON, the passes' reports included."""
    content = {
        "torch": torch.__version__,
        "torch_patches": torch_patches.__version__,
        "world_size": WORLD_SIZE,
        "workload": asdict(workload),
        "claims": [asdict(claim) for claim in claims],
        "ranks": [asdict(rank) for rank in ranks],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


# -- command --------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks (default 2)")
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds until it gives up (default 240)"
    )
    parser.add_argument("--report", type=Path, default=Path("demo_report.json"))
    parser.add_argument("--picture", type=Path, default=Path("demo_timeline.svg"))
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    workload = demo_workload(arguments.layers)
    progress = Progress()
    print(
        f"Training a {arguments.layers}-layer Llama on {WORLD_SIZE} gloo processes, "
        f"torch {torch.__version__}.  Inductor compiles C++: this takes a minute or three.",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="torch_patches_demo_") as cache:
        # A fresh cache: nothing shown here was compiled earlier.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        try:
            ranks: list[RankFigures] = run_ranks(
                work,
                WORLD_SIZE,
                timeout_s=arguments.timeout,
                arguments=(workload,),
                on_message=progress.on_message,
                on_tick=progress.on_tick,
            )
        except (RankFailed, RanksTimedOut) as problem:
            print(f"demo: {problem}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("demo: interrupted", file=sys.stderr)
            return 130
    claims = judge(ranks)
    write_report(arguments.report, workload, ranks, claims)
    print(f"\n{table(ranks[0])}\n")
    for claim in claims:
        print(f"{'ok  ' if claim.holds else 'FAIL'}  {claim.text}")
    arguments.picture.write_text(draw_file(DRAWN, "bw", "auto"), encoding="utf-8")
    print(f"\nreport:  {arguments.report.resolve()}")
    print(f"picture: {arguments.picture.resolve()}")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
