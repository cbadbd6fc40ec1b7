"""What bucketing with default flags does to captured graphs: launches, peak memory, displacement.

    python tools/bench_prebucketing.py /tmp/llama32_8.json.gz [...]

A Markdown table, one row for each graph and form.  "GPU" rows judge the graph as if it ran on GPUs;
"CPU" rows let it be: gloo needs the copying form for reduce-scatters.  Peaks come from
``estimate/memory.py`` with all inputs live throughout; "freed" lets inputs other than gathered
parameters die after their last use, as a compiled backward does with saved activations.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import torch.fx as fx

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Traffic
from torch_patches.captured import load_captured
from torch_patches.testing.backends import as_on_gpu

GIB = 2**30
FORMS = (None, "default", "coalesced")


@dataclass(frozen=True)
class Row:
    """One graph, bucketed in one way.

    Args:
        before, after: launches by kind.
        peaks: live bytes before and after, inputs live throughout.
        freed_peaks: the same with inputs that die.
        displaced: share of the nodes that changed their order.
        cpu_s: process time of the whole pipeline, recompiling included.
    """

    before: dict[str, int]
    after: dict[str, int]
    peaks: tuple[int, int]
    freed_peaks: tuple[int, int]
    displaced: float
    cpu_s: float


def measure(gm: fx.GraphModule, form: str | None) -> Row:
    """Buckets a copy of ``gm`` with default flags but the form."""
    after = copy.deepcopy(gm)
    kept = _gathered_inputs(gm.graph)
    start = time.process_time()
    report = torch_patches.optimize_graph(after, bucket_mode=form)
    seconds = time.process_time() - start
    return Row(
        before=dict(report.collectives_before),
        after=dict(report.collectives_after),
        peaks=(peak_bytes(gm.graph).peak_bytes, peak_bytes(after.graph).peak_bytes),
        freed_peaks=(_freed_peak(gm.graph, kept), _freed_peak(after.graph, kept)),
        displaced=report.displaced_share,
        cpu_s=seconds,
    )


def _freed_peak(graph: fx.Graph, kept: Set[int]) -> int:
    """With all inputs dying after their last use, but those with a place in ``kept``."""
    inputs = graph.find_nodes(op="placeholder")
    return peak_bytes(graph, free_inputs=True, kept={inputs[place] for place in kept}).peak_bytes


def _gathered_inputs(graph: fx.Graph) -> set[int]:
    """Places of the inputs that parameter gathers read."""
    pending = [
        c.start
        for c in collect(graph).collectives
        if c.kind is CollectiveKind.ALL_GATHER and c.traffic is Traffic.PARAMETER
    ]
    seen = set(pending)
    while pending:
        fresh = [n for n in pending.pop().all_input_nodes if n not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    inputs = graph.find_nodes(op="placeholder")
    return {place for place, node in enumerate(inputs) if node in seen}


def _launches(row: Row) -> str:
    return ", ".join(f"{k} {n} -> {row.after.get(k, 0)}" for k, n in row.before.items())


def _peak(peaks: tuple[int, int]) -> str:
    before, after = peaks
    return f"{before / GIB:.2f} -> {after / GIB:.2f} ({after / max(before, 1):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="captures (tools/capture_graph.py)")
    print("| file | graph | as on | form | launches | peak GiB | peak GiB, freed | moved | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in parser.parse_args().files:
        graphs = load_captured(path).graphs
        for name in [n for n in ("fw", "bw") if n in graphs]:
            for device in ("GPU", "CPU"):
                for form in FORMS:
                    with as_on_gpu() if device == "GPU" else contextlib.nullcontext():
                        row = measure(graphs[name], form)
                    cells = [path.name.removesuffix(".json.gz"), name, device, form or "(auto)"]
                    cells += [_launches(row), _peak(row.peaks), _peak(row.freed_peaks)]
                    cells += [f"{row.displaced:.1%}", f"{row.cpu_s:.1f}"]
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
