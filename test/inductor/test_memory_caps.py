"""Mode "auto" under one memory cap after another: more memory never makes a captured graph slower."""

import copy
from pathlib import Path

import pytest
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.captured import load_captured

DATA = Path(__file__).parents[1] / "data"
MIB_OF_GIB = 1 / 1024


def under(gm: fx.GraphModule, increase_mib: float) -> Report:
    """The graph is left as it is."""
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    report = optimize_graph(
        changed, Options("auto", max_memory_increase_gb=increase_mib * MIB_OF_GIB)
    )
    assert report.failure is None
    assert report.peak_bytes_after - report.peak_bytes_before <= increase_mib * 2**20
    return report


def check_more_memory_is_never_slower(name: str, increases_mib: tuple[float, ...]) -> list[float]:
    """Times, each no longer than the one before."""
    gm = load_captured(DATA / f"{name}.json.gz").graphs["bw"]
    times = [under(gm, mib).total_ms_after for mib in increases_mib]
    assert times == sorted(times, reverse=True)
    return times


def test_buckets_fit_where_all_of_one_size_exceed_the_cap() -> None:
    """Eight layers, 30 MiB at the peak, 54 MB of buckets: with 32 MiB more all sizes that the search
    sets out from exceed the cap, some by less than 1 MiB, and single launches take 6.5 ms."""
    times = check_more_memory_is_never_slower("llama_8l_fsdp8", (0, 16, 32, 64))
    assert times[0] < 3.5
    assert times[2] < 1.6


@pytest.mark.parametrize("name", ["llama_2l_hsdp2x4", "llama_3l_ddp8"])
def test_more_memory_is_never_slower(name: str) -> None:
    """Two and three layers: all weights are less than 1 MiB."""
    times = check_more_memory_is_never_slower(name, (0, 0.125, 0.25, 0.5, 1, 32))
    assert times[-1] < 0.75 * times[0]
