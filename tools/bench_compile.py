"""How work and memory of a mode grow with the graph: synthetic FSDP graphs bound by communication.

    python tools/bench_scaling.py --mode auto --nodes 4000 14000 36000 100000
    python tools/bench_scaling.py --mode topo_span --dense --nodes 1500 6000    # to a million edges

One JSON line for each size, each in a process of its own: nodes, collectives, counted operations, CPU
seconds (process time, garbage collection on, the whole of ``optimize_graph``), peak resident memory of
the process, and what it had before; then the exponents of a straight line through the logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import torch_patches
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.synthetic import dense_graph, training_graph

#: Nodes of a layer of the synthetic graph.
_PER_LAYER = 80
#: Nodes of a dense graph for each that reads all the others.
_PER_READER = 6


def measure(mode: str, nodes: int, width: int, dense: bool) -> dict[str, object]:
    if dense:
        gm = dense_graph(nodes // _PER_READER)
    else:
        gm = training_graph(max(nodes // _PER_LAYER, 1), width=width)
    edges = sum(len(node.all_input_nodes) for node in gm.graph.nodes)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with as_on_gpu():
        report = torch_patches.optimize_graph(gm, bucketing_mode=mode, keep_story=False)
    seconds = time.process_time() - started
    return {
        "mode": mode,
        "nodes": len(gm.graph.nodes),
        "edges": edges,
        "collectives": sum(report.collectives_before.values()),
        "launches": sum(report.collectives_after.values()),
        "way": report.way,
        "ms": [round(report.total_ms_before, 2), round(report.total_ms_after, 2)],
        "operations": report.operations,
        "cpu_s": round(seconds, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "graph_mib": before_kib >> 10,
        "torch": torch.__version__,
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log value over log size, by least squares."""
    xs, ys = [math.log(s) for s in sizes], [math.log(v) for v in values]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    pairs = list(zip(xs, ys, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4000, 14000, 36000, 100000])
    parser.add_argument("--width", type=int, default=1024, help="of the square weights")
    parser.add_argument("--dense", action="store_true", help="nodes / 6 squared edges")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(
            json.dumps(
                measure(arguments.mode, arguments.nodes[0], arguments.width, arguments.dense)
            )
        )
        return
    rows = []
    for nodes in arguments.nodes:
        command = [sys.executable, __file__, "--inside", "--mode", arguments.mode]
        command += ["--nodes", str(nodes), "--width", str(arguments.width)]
        command += ["--dense"] if arguments.dense else []
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(line.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    if len(rows) > 1:
        sizes = [row["nodes"] for row in rows]
        found = {
            name: round(exponent(sizes, [row[name] for row in rows]), 3)
            for name in ("operations", "cpu_s")
        }
        print(json.dumps({"exponents": found}))


if __name__ == "__main__":
    main()
