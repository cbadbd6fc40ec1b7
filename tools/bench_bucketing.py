"""CPU seconds of the bucketing pipeline on synthetic FSDP training graphs.

    python tools/bench_bucketing.py --layers 57 --span 70

One JSON line for each merge form: nodes, buckets, counted operations, CPU seconds (process time,
garbage collection on; median of the repeats; the whole pipeline, recompiling included).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches.testing.synthetic import training_graph


def measure(gm: fx.GraphModule, options: Options, repeats: int) -> dict[str, object]:
    seconds = []
    for _ in range(repeats):
        work = copy.deepcopy(gm)
        before = time.process_time()
        report = optimize_graph(work, options)
        seconds.append(time.process_time() - before)
    return {
        "form": options.bucket_mode,
        "nodes": len(gm.graph.nodes),
        "buckets": len(report.buckets),
        "operations": report.operations,
        "cpu_s": round(statistics.median(seconds), 3),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=57)
    parser.add_argument("--span", type=int, default=70, help="max_topo_span")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    gm = training_graph(arguments.layers, compute=12)
    for form in ("coalesced", "default"):
        options = Options("topo_span", bucket_mode=form, max_topo_span=arguments.span)
        print(json.dumps(measure(gm, options, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
