"""CPU time, work and memory of a mode by graph size, beside torch's own pass.

    python tools/bench_compile.py --mode auto --nodes 4000 14000 36000 100000
    python tools/bench_compile.py --beside torch torch+pre --limit-s 300 --plot compile.svg
    python tools/bench_compile.py DIR/*.json.gz --beside torch torch+pre
    python tools/bench_compile.py --mode topo_span --dense --nodes 1500 6000    # to a million edges

Without files: synthetic FSDP graphs bound by communication.  Files are captures
(tools/capture_graph.py), of which the forward and the backward are taken.  One JSON line for each
graph and planner, each in a process of its own: nodes, collectives, counted operations, CPU seconds
(process time, garbage collection on, without recompiling the graph, which Inductor does once for all
passes), peak resident memory of the process, and what it had before; then the exponents of a straight
line through the logarithms.  A planner that does not end within the limit is not given larger graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.fx as fx

import torch_patches.optimize  # else its import would be timed
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches.captured import load_captured
from torch_patches.testing import torch_scheduler
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.synthetic import dense_graph, training_graph

#: Nodes of a layer of the synthetic graph.
_PER_LAYER = 80
#: Nodes of a dense graph for each that reads all the others.
_PER_READER = 6
#: torch's pass, without and with its own bucketing of FSDP collectives in front.
PEERS = {"torch": False, "torch+pre": True}


@dataclass(frozen=True)
class Case:
    """One graph: of a file, or a synthetic one of about so many nodes."""

    file: str = ""
    graph: str = ""
    nodes: int = 0
    width: int = 1024
    dense: bool = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[fx.GraphModule]:
        """The graph; its process groups exist until the context ends."""
        if self.file:
            captured = load_captured(Path(self.file))
            gm, groups = captured.graphs[self.graph], captured.groups
        elif self.dense:
            gm, groups = dense_graph(self.nodes // _PER_READER), {"g": (0, 1)}
        else:
            layers = max(self.nodes // _PER_LAYER, 1)
            gm, groups = training_graph(layers, width=self.width), {"g": (0, 1)}
        with torch_scheduler.process_groups(groups):
            yield gm


def _plan(gm: fx.GraphModule, planner: str) -> tuple[fx.GraphModule, dict[str, Any]]:
    """The result, and what ours tells of it."""
    vars(gm)["recompile"] = lambda: None
    if planner in PEERS:
        return torch_scheduler.schedule(gm, RuntimeModel(), pre_bucketing=PEERS[planner]), {}
    report = torch_patches.optimize_graph(gm, bucketing_mode=planner, keep_story=False)
    return gm, {
        "collectives": sum(report.collectives_before.values()),
        "launches": sum(report.collectives_after.values()),
        "way": report.way,
        "ms": [round(report.total_ms_before, 2), round(report.total_ms_after, 2)],
        "operations": report.operations,
    }


def measure(case: Case, planner: str) -> dict[str, Any]:
    with Case(nodes=_PER_LAYER, width=4).opened() as gm, as_on_gpu():
        _plan(gm, planner)  # imports what the pass needs
    with case.opened() as gm, as_on_gpu():
        edges = sum(len(node.all_input_nodes) for node in gm.graph.nodes)
        found: dict[str, Any] = {
            "planner": planner,
            "graph": f"{Path(case.file).name.split('.')[0]} {case.graph}"
            if case.file
            else "synthetic",
            "nodes_before": len(gm.graph.nodes),
            "edges": edges,
        }
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        try:
            gm, told = _plan(gm, planner)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error!s:.120}"}
        return (
            found
            | told
            | {
                "cpu_s": round(time.process_time() - started, 2),
                "nodes": len(gm.graph.nodes),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "graph_mib": before_kib >> 10,
                "torch": torch.__version__,
            }
        )


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log value over log size, by least squares."""
    xs, ys = [math.log(s) for s in sizes], [math.log(v) for v in values]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    pairs = list(zip(xs, ys, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a in xs)


def exponents(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of counted operations and CPU time by nodes, of one planner's rows."""
    sizes = [row["nodes"] for row in rows]
    return {
        name: round(exponent(sizes, [row[name] for row in rows]), 3)
        for name in ("operations", "cpu_s")
        if all(row.get(name) for row in rows)
    }


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """CPU seconds by nodes in front of the pass, both logarithmic, a line for each planner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for planner in dict.fromkeys(row["planner"] for row in rows):
        points = sorted(
            (row["nodes_before"], row["cpu_s"])
            for row in rows
            if row["planner"] == planner and "error" not in row
        )
        if points:
            axes.loglog(*zip(*points, strict=True), marker="o", label=planner)
    axes.set_xlabel("nodes of the graph")
    axes.set_ylabel("CPU s of the pass")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def run(case: Case, planner: str, limit_s: float) -> dict[str, Any] | None:
    """In a process of its own; None if it does not end within the limit."""
    command = [sys.executable, __file__, "--inside", json.dumps([vars(case), planner])]
    try:
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="captures; synthetic graphs if none"
    )
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--beside", nargs="+", choices=list(PEERS), default=[])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4000, 14000, 36000, 100000])
    parser.add_argument("--width", type=int, default=1024, help="of the square weights")
    parser.add_argument("--dense", action="store_true", help="nodes / 6 squared edges")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each, wall clock")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="SVG or PNG")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        fields, planner = arguments.inside
        print(json.dumps(measure(Case(**fields), planner)))
        return
    cases = [Case(file, graph) for file in arguments.files for graph in ("fw", "bw")]
    if not cases:
        cases = [
            Case(nodes=nodes, width=arguments.width, dense=arguments.dense)
            for nodes in sorted(arguments.nodes)
        ]
    rows: list[dict[str, Any]] = []
    given_up: set[str] = set()
    for case in cases:
        for planner in (arguments.mode, *arguments.beside):
            if planner in given_up:
                continue
            row = run(case, planner, arguments.limit_s)
            if row is None:
                print(
                    json.dumps(
                        {"planner": planner, **vars(case), "not_done_after_s": arguments.limit_s}
                    )
                )
                if not case.file:
                    given_up.add(planner)
                continue
            rows.append(row)
            print(json.dumps(row), flush=True)
    for planner in (arguments.mode, *arguments.beside):
        own = [row for row in rows if row["planner"] == planner and "error" not in row]
        if len(own) > 1 and not arguments.files:
            print(json.dumps({"planner": planner, "exponents": exponents(own)}))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
