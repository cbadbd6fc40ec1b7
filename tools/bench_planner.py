"""Our planner beside torch's on the same captured graphs, all judged by one simulator.

    python tools/bench_planner.py --capture /tmp/graphs         # makes the graphs (minutes, no GPU)
    python tools/bench_planner.py /tmp/graphs/*.json.gz [--ours auto] > run.txt
    python tools/bench_planner.py --cases run.txt other_run.txt --out table.md    # one table of both

One JSON line for each graph and planner as it is done, then a Markdown table, one of what is lost and could
be won on each graph, and the geometric means.
Planners: ``input`` (nothing runs), ``torch+pre`` and ``torch`` (``schedule_overlap_bucketing`` with and
without FSDP pre-bucketing, everything else as torch's flags have it), ``ours``.  torch runs without a GPU
because it is told the constants of our device table (``torch_patches/testing/torch_scheduler.py``).

Columns: simulated ms of the whole graph on H100s (``estimate/timeline.py``), over the bound of BASELINES
(``_bench_bound.py``), and over the floor, that no order and no merge can beat in this simulator
(``_bench_floor.py``); ms during which compute stands still, by process group; ms of compute more than in the
input (copies into and out of buckets); peak GiB with inputs kept, and with inputs freed but for gathered
parameters; CPU seconds of the pass (process time, collector on, without the recompiling that Inductor does once behind
all passes); launches by kind.

The second table has ours, torch's better setting and the floor of each graph, what the floor consists of
(before and behind its window or chain, kernels and collectives in it, contention), and by what ours is
slower than its kernels alone: exposed before the first kernel, behind the last one, in between; the rest
is contention and waiting for the host.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.fx as fx

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the _bench modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _bench_captures
from _bench_bound import lower_bound
from _bench_floor import floor_of
from _bench_measure import GIB, Planner, exposed_at_the_ends, measure, planned, simulated

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches.captured import load_captured
from torch_patches.testing import torch_scheduler

INPUT, TORCH_PRE, TORCH, OURS = "input", "torch+pre", "torch", "ours"
#: torch deciding by our times instead of its own formulas (``--torch-estimates``).
TORCH_PRE_OUR_TIMES, TORCH_OUR_TIMES = "torch+pre, our times", "torch, our times"


@dataclass(frozen=True)
class Case:
    """One graph after one planner.

    Args:
        file, graph: the capture, and "fw" or "bw" of it.
        planner: see the module.
        error: why there is no result; all else is then 0.
        total_ms, compute_ms: of the simulated run, and of its compute nodes alone.
        bound_ms: that no order of the input can beat: all compute, or the heaviest chain of one group.
        floor_ms: that no order and no merge of the input can beat.
        floor_parts: what it consists of, in ms.
        exposed_ms: by process group.
        first_ms, last_ms: the part of it before the first and behind the last kernel.
        peak_bytes, freed_peak_bytes: inputs kept; inputs freed, gathered parameters kept.
        cpu_s: process time of the planner.
        launches: by kind.
        nodes: of the result.
    """

    file: str
    graph: str
    planner: str
    error: str = ""
    total_ms: float = 0.0
    compute_ms: float = 0.0
    bound_ms: float = 0.0
    floor_ms: float = 0.0
    floor_parts: dict[str, float] = field(default_factory=dict)
    exposed_ms: dict[str, float] = field(default_factory=dict)
    first_ms: float = 0.0
    last_ms: float = 0.0
    peak_bytes: int = 0
    freed_peak_bytes: int = 0
    cpu_s: float = 0.0
    launches: dict[str, int] = field(default_factory=dict)
    nodes: int = 0


# -- planners -------------------------------------------------------------------------------------


def planners(arguments: argparse.Namespace, model: RuntimeModel) -> dict[str, Planner]:
    """By name, in the order of the table."""

    def with_torch(pre_bucketing: bool, our_estimates: bool) -> Planner:
        return lambda gm: torch_scheduler.schedule(
            gm, model, pre_bucketing=pre_bucketing, our_estimates=our_estimates
        )

    def ours(gm: fx.GraphModule) -> fx.GraphModule:
        options = {"bucketing_mode": arguments.ours, **arguments.ours_options}
        report = torch_patches.optimize_graph(gm, keep_story=False, **options)
        if report.failure:
            raise RuntimeError(report.failure)
        return gm

    result: dict[str, Planner] = {INPUT: lambda gm: gm}
    if arguments.torch_estimates in ("torch", "both"):
        result |= {TORCH_PRE: with_torch(True, False), TORCH: with_torch(False, False)}
    if arguments.torch_estimates in ("ours", "both"):
        result |= {TORCH_PRE_OUR_TIMES: with_torch(True, True)}
        result |= {TORCH_OUR_TIMES: with_torch(False, True)}
    return result | {OURS: ours}


# -- measuring ------------------------------------------------------------------------------------


def run_case(path: Path, graph: str, name: str, planner: Planner, model: RuntimeModel) -> Case:
    """Loads ``graph`` afresh, plans and measures it.  An exception of the planner is a result."""
    label = path.name.removesuffix(".json.gz")
    with planned(path, graph, planner) as done:
        if done.error:
            return Case(label, graph, name, error=done.error)
        measured = measure(done, model)
        ends = exposed_at_the_ends(done.gm.graph, simulated(done.gm.graph, model))
        measured["first_ms"], measured["last_ms"] = ends
        if name == INPUT:
            skeleton = collect(done.gm.graph)
            floor = floor_of(done.gm.graph, skeleton, model)
            measured["bound_ms"] = lower_bound(done.gm.graph, skeleton, model).ms
            measured |= {"floor_ms": floor.ms, "floor_parts": asdict(floor)}
        return Case(label, graph, name, cpu_s=done.cpu_s, **measured)


# -- output ---------------------------------------------------------------------------------------


def by_graph(cases: Sequence[Case]) -> Iterator[dict[str, Case]]:
    """Cases of each graph, by planner."""
    graphs: dict[tuple[str, str], dict[str, Case]] = {}
    for case in cases:
        graphs.setdefault((case.file, case.graph), {})[case.planner] = case
    yield from graphs.values()


def table(cases: Sequence[Case]) -> str:
    """The Markdown tables and the geometric means."""
    heads = "file|graph|planner|ms|over bound|over floor|exposed ms by group|copies ms|peak GiB|freed GiB|CPU s"
    lines = [f"| {heads.replace('|', ' | ')} | launches |", "|---" * 12 + "|"]
    for group in by_graph(cases):
        lines += [f"| {' | '.join(cells(case, group[INPUT]))} |" for case in group.values()]
    return "\n".join([*lines, "", *losses(cases), "", *summary(cases)])


def cells(case: Case, before: Case) -> list[str]:
    """One row of the table; ``before`` is the input of the same graph."""
    head = [case.file, case.graph, case.planner]
    if case.error:
        return [*head, case.error.replace("|", "/").replace("\n", " "), *[""] * 8]
    exposed = ", ".join(f"{group} {ms:.1f}" for group, ms in case.exposed_ms.items())
    launches = ", ".join(f"{kind} {count}" for kind, count in case.launches.items())
    return [
        *head,
        f"{case.total_ms:.1f}",
        f"{case.total_ms / before.bound_ms:.3f}",
        f"{case.total_ms / before.floor_ms:.3f}",
        exposed,
        f"{case.compute_ms - before.compute_ms:+.1f}",
        _against(case.peak_bytes, before.peak_bytes),
        _against(case.freed_peak_bytes, before.freed_peak_bytes),
        f"{case.cpu_s:.2f}",
        launches,
    ]


def _against(size: int, before: int) -> str:
    return f"{size / GIB:.2f} ({size / max(before, 1):.3f})"


def losses(cases: Sequence[Case]) -> list[str]:
    """What can be won on each graph, and where ours loses; see the module."""
    heads = "file|graph|ours ms|torch ms|floor ms|ours / torch|floor / torch|floor is|ours loses"
    lines = [f"| {heads.replace('|', ' | ')} |", "|---" * 9 + "|"]
    for group in by_graph(cases):
        before, ours = group[INPUT], group.get(OURS)
        if ours is None or ours.error or not before.launches:
            continue
        peer = next(iter(peers_of(group)), None)
        parts = {name.removesuffix("_ms"): ms for name, ms in before.floor_parts.items()}
        row = [before.file, before.graph, f"{ours.total_ms:.1f}"]
        row += ["" if peer is None else f"{peer.total_ms:.1f}", f"{before.floor_ms:.1f}"]
        for case_ms in (ours.total_ms, before.floor_ms):
            row.append("" if peer is None else f"{case_ms / peer.total_ms:.3f}")
        row += [_listed(parts), _listed(lost(ours))]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def lost(case: Case) -> dict[str, float]:
    """Why a graph takes longer than its kernels alone, in ms."""
    exposed = sum(case.exposed_ms.values())
    return {
        "first": case.first_ms,
        "last": case.last_ms,
        "exposed between": exposed - case.first_ms - case.last_ms,
        "contention and host": case.total_ms - case.compute_ms - exposed,
    }


def peers_of(group: Mapping[str, Case]) -> list[Case]:
    """torch's settings that ended, the fastest result first."""
    found = [c for name, c in group.items() if name not in (INPUT, OURS) and not c.error]
    return sorted(found, key=lambda case: case.total_ms)


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if abs(ms) >= 0.05)


def summary(cases: Sequence[Case]) -> list[str]:
    """Geometric means over the graphs that have what they compare, and have collectives."""
    faster: list[float] = []
    possible: list[float] = []
    over_bound: list[float] = []
    over_floor: list[float] = []
    cpu: list[float] = []
    peaks: list[float] = []
    for group in by_graph(cases):
        ours = group.get(OURS)
        if ours is None or ours.error or not group[INPUT].launches:
            continue
        over_bound.append(group[INPUT].bound_ms / ours.total_ms)
        over_floor.append(group[INPUT].floor_ms / ours.total_ms)
        peaks.append(ours.freed_peak_bytes / max(group[INPUT].freed_peak_bytes, 1))
        peers = peers_of(group)
        if peers:
            faster.append(ours.total_ms / peers[0].total_ms)
            possible.append(group[INPUT].floor_ms / peers[0].total_ms)
            cpu.append(ours.cpu_s / min(c.cpu_s for c in peers))
    return [
        f"ours / torch's better setting, ms: {_mean(faster)} (largest {_largest(faster)})",
        f"floor / torch's better setting, ms: {_mean(possible)} (largest {_largest(possible)})",
        f"bound / ours: {_mean(over_bound)}; floor / ours: {_mean(over_floor)}",
        f"peak over the input's, inputs freed: {_mean(peaks)} (largest {_largest(peaks)})",
        f"CPU, ours / torch's faster setting: {_mean(cpu)} (largest {_largest(cpu)})",
    ]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "no graph"
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return f"{mean:.3f} over {len(values)} graphs"


def _largest(values: Sequence[float]) -> str:
    return f"{max(values):.3f}" if values else "none"


def read_cases(path: Path) -> Iterator[Case]:
    """Cases of an earlier run's output, whose other lines are skipped."""
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            yield Case(**json.loads(line))


# -- command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="captures (tools/capture_graph.py)")
    add(
        "--capture", type=Path, metavar="DIR", help="make the captures that are missing there, stop"
    )
    add("--ours", default="topo_span", metavar="MODE", help="bucketing_mode of our planner")
    add(
        "--ours-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help='further arguments of optimize_graph, such as {"max_topo_span": null}',
    )
    add("--graphs", default="fw,bw", help="which graphs of each file")
    add("--planners", default="", help="only these, such as input,ours")
    add(
        "--torch-estimates",
        choices=("torch", "ours", "both"),
        default="torch",
        help="whose times torch's scheduler decides by",
    )
    add("--cases", type=Path, nargs="+", default=[], help="add the JSON lines of earlier runs")
    add("--out", type=Path, help="also write the table there")
    arguments = parser.parse_args(argv)
    if not (arguments.files or arguments.cases or arguments.capture):
        parser.error("give captures to read, --cases of earlier runs, or --capture DIR")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.capture is not None:
        return _bench_captures.make_all(arguments.capture)
    model = RuntimeModel()
    chosen = planners(arguments, model)
    if arguments.planners:
        names = {INPUT, *arguments.planners.split(",")}
        chosen = {name: planner for name, planner in chosen.items() if name in names}
    cases = [case for path in arguments.cases for case in read_cases(path)]
    for path in arguments.files:
        present = load_captured(path).graphs
        for graph in [name for name in arguments.graphs.split(",") if name in present]:
            for name, planner in chosen.items():
                cases.append(run_case(path, graph, name, planner, model))
                print(json.dumps(asdict(cases[-1])), flush=True)
    text = table(cases)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
