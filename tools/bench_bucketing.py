"""CPU seconds of the bucketing pipeline on synthetic FSDP training graphs.

    python tools/bench_bucketing.py --layers 57 --span 70

One JSON line for each merge form: nodes, buckets, counted operations, CPU seconds (process time,
garbage collection on; median of the repeats).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import Options
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten


def training_graph(layers: int, per_layer: int = 8, compute: int = 12) -> fx.GraphModule:
    """Each layer: parameter gathers behind casts, a chain of compute, gradient scatters."""
    b = GraphBuilder()
    x, waits = b.placeholder(4, 4, dtype=torch.bfloat16), []
    value = x.meta["val"]
    for layer in range(layers):
        print(f"\rbuilding layer {layer + 1} of {layers}", end="", file=sys.stderr)
        for _ in range(per_layer):
            cast = b.call(aten._to_copy, b.placeholder(2, 4), dtype=torch.bfloat16)
            x = b.call(aten.mm, x, b.gather_and_wait(cast, 2, "g"))
            for _ in range(compute):
                x = b.graph.call_function(aten.neg.default, (x,))
                x.meta["val"] = value  # a shared fake value: the pass only reads shapes
            waits.append(b.scatter_and_wait(x, "sum", 2, "g"))
    print(file=sys.stderr)
    return b.output(x, *waits)


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
    gm = training_graph(arguments.layers)
    for form in ("coalesced", "default"):
        options = Options("topo_span", bucket_mode=form, max_topo_span=arguments.span)
        print(json.dumps(measure(gm, options, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
