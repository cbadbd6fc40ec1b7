"""Our module bucketing beside torch's ``manual_overlap_bucketing``, judged by one simulator.

    python tools/bench_planner.py --capture /tmp/graphs          # makes the graphs (minutes, no GPU)
    python tools/bench_modules.py /tmp/graphs/*.json.gz --check > run.txt
    python tools/bench_modules.py --cases run.txt --out table.md  # the table of earlier runs

One JSON line for each graph as it is done, then a Markdown table and means.  Each graph is planned in
a process of its own, three times from a fresh copy: ``before`` (nothing runs), ``torch`` (torch's
function with its defaults and the plan "tok_embeddings", each "layers.N", ["norm", "output"]) and
``ours`` (``optimize_graph``).  Process groups are registered under the capture's names.

Columns: simulated ms, ms of compute standing still, peak GiB with inputs held and with inputs freed
but for gathered parameters, launches by kind, collectives of parameters and gradients that are hidden
to 95%, CPU seconds of the pass.  The JSON also has, for ours, the block collectives that are exposed
although their neighbour's compute is longer than its link is busy (``exposed_blocks``), and with
``--check`` whether each block, group, dtype, phase and direction has one start or a refusal.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the _bench modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _bench_blocks
from _bench_measure import GIB, Planned, measure, planned, simulated

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.plan import MERGEABLE_KINDS
from torch_patches.testing import torch_scheduler


@dataclass(frozen=True)
class Side:
    """One graph after one planner.

    Args:
        error: why there is no result; all else is then 0.
        total_ms, compute_ms: of the simulated run, and of its compute nodes alone.
        uncorrected_ms: of the run where torch's copies into gathers are taken to write the whole
            gathered buffer.
        exposed_ms: by process group.
        peak_bytes, freed_peak_bytes: inputs held; inputs freed, gathered parameters kept.
        launches: by kind.
        nodes: of the result.
        hidden, carrying: collectives of parameters and gradients that are hidden, of how many.
        cpu_s: process time of the planner.
    """

    error: str = ""
    total_ms: float = 0.0
    compute_ms: float = 0.0
    uncorrected_ms: float = 0.0
    exposed_ms: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    freed_peak_bytes: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    hidden: int = 0
    carrying: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class ModuleCase:
    """One line: a graph and its three sides.

    Args:
        mode: bucketing mode of ours.
        ratio: ms of ours over torch's; 0 where one of them is missing.
        exposed_blocks: see ``_bench_blocks.Exposed``.
        check: see ``_bench_blocks.Check``; None without ``--check``.
    """

    file: str
    graph: str
    mode: str
    torch_version: str
    before: Side
    torch: Side
    ours: Side
    ratio: float = 0.0
    exposed_blocks: list[dict[str, Any]] = field(default_factory=list)
    check: dict[str, Any] | None = None


# -- one graph ------------------------------------------------------------------------------------


def run_case(path: Path, graph: str, ours_as: Ours, skip: Sequence[str], check: bool) -> ModuleCase:
    """Plans and measures one graph of a capture, in this process."""
    model = RuntimeModel()
    with planned(path, graph, lambda gm: gm) as done:
        before = side(done, model)
    torch_side = Side(error="skipped")
    if "torch" not in skip:
        with planned(path, graph, lambda gm: by_torch(gm, model)) as done:
            torch_side = side(done, model)
    ours = Side(error="skipped")
    more: dict[str, Any] = {}
    if "ours" not in skip:
        ours, more = run_ours(path, graph, ours_as, model, check)
    both = not (torch_side.error or ours.error)
    return ModuleCase(
        file=path.name.removesuffix(".json.gz"),
        graph=graph,
        mode=ours_as.mode,
        torch_version=torch.__version__,
        before=before,
        torch=torch_side,
        ours=ours,
        ratio=ours.total_ms / torch_side.total_ms if both and torch_side.total_ms else 0.0,
        **more,
    )


def by_torch(gm: fx.GraphModule, model: RuntimeModel) -> fx.GraphModule:
    plan = _bench_blocks.block_plan(gm.graph)
    return torch_scheduler.manual(gm, plan, model.device)


def run_ours(
    path: Path, graph: str, ours: Ours, model: RuntimeModel, check: bool
) -> tuple[Side, dict[str, Any]]:
    """Our side, and what only ours is asked for."""
    with planned(path, graph, ours) as done:
        result = side(done, model)
        if done.error:
            return result, {}
        run = simulated(done.gm.graph, model)
        exposed = _bench_blocks.exposed_blocks(run, model, ours.blocks)
        more: dict[str, Any] = {"exposed_blocks": [asdict(each) for each in exposed]}
        if check:
            starts = [c.start for c in run.skeleton.collectives]
            more["check"] = asdict(_bench_blocks.check_blocks(starts, ours.blocks))
        return result, more


class Ours:
    """Our planner; remembers what the input's collectives belong to, and the report."""

    def __init__(self, mode: str, options: Mapping[str, Any]) -> None:
        self.mode, self.options = mode, dict(options)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        before = _bench_blocks.Blocks.of(gm.graph)
        report = torch_patches.optimize_graph(gm, bucketing_mode=self.mode, **self.options)
        if report.failure:
            raise RuntimeError(report.failure)
        self.blocks = replace(before, report=report)
        return gm


def side(done: Planned, model: RuntimeModel) -> Side:
    """Measures a finished graph."""
    if done.error:
        return Side(error=done.error)
    # By name: what torch's buckets carry cannot be seen behind its custom ops.
    carrying = [
        span
        for span in simulated(done.gm.graph, model).timeline.spans
        if span.collective.kind in MERGEABLE_KINDS
        and span.collective.start.name not in done.activations
    ]
    hidden = sum(not _bench_blocks.is_exposed(span, model) for span in carrying)
    before = simulated(done.gm.graph, model, uncorrected=True).timeline.total_ms
    figures = measure(done, model) | {"uncorrected_ms": before}
    return Side(cpu_s=done.cpu_s, hidden=hidden, carrying=len(carrying), **figures)


# -- output ---------------------------------------------------------------------------------------


def table(cases: Sequence[ModuleCase]) -> str:
    """The Markdown table, and what follows from it."""
    heads = "file|graph|planner|ms|ours / torch|exposed ms|held GiB|freed GiB|launches|hidden|CPU s"
    lines = [f"| {heads.replace('|', ' | ')} |", "|---" * 11 + "|"]
    for case in cases:
        for name, found in (("input", case.before), ("torch", case.torch), ("ours", case.ours)):
            if found.error != "skipped":
                ratio = f"{case.ratio:.3f}" if name == "ours" and case.ratio else ""
                row = [case.file, case.graph, name, *cells(found, ratio)]
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", *summary(cases)])


def cells(found: Side, ratio: str) -> list[str]:
    """The measured columns of one row."""
    if found.error:
        return [found.error.replace("|", "/").replace("\n", " "), *[""] * 7]
    exposed = ", ".join(f"{group} {ms:.1f}" for group, ms in found.exposed_ms.items())
    return [
        f"{found.total_ms:.1f}",
        ratio,
        exposed,
        f"{found.peak_bytes / GIB:.2f}",
        f"{found.freed_peak_bytes / GIB:.2f}",
        ", ".join(f"{kind} {count}" for kind, count in found.launches.items()),
        f"{found.hidden} of {found.carrying}",
        f"{found.cpu_s:.2f}",
    ]


def summary(cases: Sequence[ModuleCase]) -> list[str]:
    """Ratios over the graphs that have both sides and collectives, and what the check found."""
    with_both = [case for case in cases if case.ratio and case.before.launches]
    ratios = [case.ratio for case in with_both]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        faster = sum(ratio <= 1.0 for ratio in ratios)
        lines = [
            f"ours / torch, ms: {mean:.3f} over {len(ratios)} graphs (largest {max(ratios):.3f}); "
            f"ours not above torch on {faster}"
        ]
    else:
        lines = ["ours / torch, ms: no graph has both"]
    for case in cases:
        where = f"{case.file} {case.graph}"
        lines += [f"exposed although it could hide: {where}: {e}" for e in case.exposed_blocks]
        for violation in (case.check or {}).get("violations", ()):
            lines.append(f"not one start: {where}: {violation}")
    return lines


def parse_case(line: str) -> ModuleCase:
    """A case from its JSON line."""
    found = json.loads(line)
    found |= {name: Side(**found[name]) for name in ("before", "torch", "ours")}
    return ModuleCase(**found)


def read_cases(path: Path) -> Iterator[ModuleCase]:
    """Cases of an earlier run's output, whose other lines are skipped."""
    lines = path.read_text().splitlines()
    yield from (parse_case(line) for line in lines if line.startswith("{"))


# -- command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="captures (tools/capture_graph.py)")
    add("--mode", default="transformer_block", help="bucketing_mode of ours")
    add("--options", default="{}", help="more arguments of optimize_graph for ours, as JSON")
    add("--graphs", default="fw,bw", help="which graphs of each file")
    add("--only", default="", help="only files whose name holds one of these, such as moe,hsdp")
    add("--skip", default="", help="leave out: torch, ours")
    add("--check", action="store_true", help="one start a block, or a refusal; else exit code 1")
    add("--jobs", type=int, default=1, help="graphs at once; each may take 1 GB")
    add("--cases", type=Path, nargs="+", default=[], help="add the JSON lines of earlier runs")
    add("--out", type=Path, help="also write the table there")
    add(
        "--here",
        action="store_true",
        help="plan in this process (what the others are started with)",
    )
    arguments = parser.parse_args(argv)
    if not (arguments.files or arguments.cases):
        parser.error("give captures to read, or --cases of earlier runs")
    return arguments


def in_own_process(item: tuple[Path, str], arguments: argparse.Namespace) -> ModuleCase | None:
    """The case of a graph, planned by another process; None if that process failed."""
    path, graph = item
    command = [sys.executable, __file__, str(path), "--here", "--graphs", graph]
    command += ["--mode", arguments.mode, "--skip", arguments.skip]
    command += ["--options", arguments.options]
    command += ["--check"] if arguments.check else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{path.name} {graph}: process ended with {done.returncode}", file=sys.stderr)
        return None
    print(lines[0], flush=True)
    return parse_case(lines[0])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    words = [word for word in arguments.only.split(",") if word]
    chosen = [f for f in arguments.files if not words or any(word in f.name for word in words)]
    work = [(path, graph) for path in chosen for graph in arguments.graphs.split(",")]
    if arguments.here:
        for path, graph in work:
            ours = Ours(arguments.mode, json.loads(arguments.options))
            case = run_case(path, graph, ours, arguments.skip, arguments.check)
            print(json.dumps(asdict(case)), flush=True)
        return 0
    cases = [case for path in arguments.cases for case in read_cases(path)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda item: in_own_process(item, arguments), work))
    cases += [case for case in done if case is not None]
    text = table(cases)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    broken = any((case.check or {}).get("violations") for case in cases)
    return int(None in done or (arguments.check and broken))


if __name__ == "__main__":
    sys.exit(main())
