"""The memory estimate against what graphs hold when they run, node by node.

Captured training steps run on CPU, one rank of groups that launch and allocate but send nothing;
and two ranks train on gloo.  MemTracker must see exactly the estimate.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch.distributed._tools.mem_tracker import MemTracker

from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes, peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches.captured import Captured, load_captured
from torch_patches.testing.measured_memory import (
    Conditions,
    allocator_peak_bytes,
    fake_groups,
    measure,
    real_inputs,
    with_group_names,
)
from torch_patches.testing.processes import Say, run_ranks

DATA = Path(__file__).parents[1] / "data"
# What an estimate from a graph cannot know: kernels' workspaces.  The bound of issue 4.
WITHIN = 0.03


@dataclass(frozen=True, eq=False)
class Case:
    """A graph of ``test/data`` as captured (form None) or merged; and the same on groups of here."""

    gm: fx.GraphModule
    runnable: fx.GraphModule
    inputs: list[Any]


@contextmanager
def running(name: str, which: str, form: str | None) -> Iterator[Case]:
    """The groups exist in the block."""
    capture = read(name)
    original = capture.graphs[which]
    gm = fx.GraphModule(original, copy.deepcopy(original.graph))
    if form is not None:
        optimize_graph(gm, Options("topo_span", bucket_mode=form))
        assert count_launches(gm) < count_launches(original) / 5
    with fake_groups(capture.groups) as names:
        yield Case(gm, with_group_names(gm, names), real_inputs(gm.graph))


@functools.cache
def read(name: str) -> Captured:
    return load_captured(DATA / f"{name}.json.gz")


def count_launches(gm: fx.GraphModule) -> int:
    return sum(collective_kind(node) is not None for node in gm.graph.nodes)


def has_copies(gm: fx.GraphModule) -> bool:
    return any(op_name(node.target) == "_foreach_copy" for node in gm.graph.nodes)


CASES = [
    ("llama_3l_fsdp8", "fw", None, False),
    ("llama_3l_fsdp8", "bw", None, False),
    ("llama_3l_fsdp8", "fw", "coalesced", False),
    ("llama_3l_fsdp8", "fw", "coalesced", True),
    ("llama_3l_fsdp8", "bw", "coalesced", False),
    ("llama_3l_fsdp8", "fw", "default", False),
    ("llama_3l_fsdp8", "bw", "default", False),
    ("llama_3l_fsdp8", "bw", "default", True),
    ("llama_3l_fsdp8_inductor", "bw", None, False),
    ("llama_2l_fsdp8_ac", "bw", None, False),
    ("llama_2l_hsdp2x4", "bw", None, False),
    ("llama_2l_hsdp2x4", "bw", "default", False),
    ("llama_3l_ddp8", "bw", None, False),
    ("llama_3l_ddp8", "bw", "coalesced", False),
    ("llama_2l_s0s0_4x2", "bw", None, False),
    ("llama_2l_fsdp4_tp2", "fw", None, False),
    ("moe_3l_dp4_ep2", "fw", None, False),
    ("moe_3l_dp4_ep2", "bw", None, False),
]


@pytest.mark.parametrize("free_inputs", [False, True], ids=["inputs_held", "inputs_freed"])
@pytest.mark.parametrize(("name", "which", "form", "eager"), CASES)
def test_every_node_holds_what_is_estimated(
    name: str, which: str, form: str | None, eager: bool, free_inputs: bool
) -> None:
    with running(name, which, form) as case:
        measured = measure(case.runnable, case.inputs, Conditions(free_inputs, eager))
    live = live_bytes(case.gm.graph, free_inputs, eager=eager)
    assert live.inputs == measured.inputs
    assert live.at_node == measured.at_node
    assert live.after == measured.after
    estimated = peak_bytes(case.gm.graph, free_inputs, eager=eager).peak_bytes
    assert estimated == measured.peak_bytes


@pytest.mark.parametrize("free_inputs", [False, True], ids=["inputs_held", "inputs_freed"])
@pytest.mark.parametrize("form", ["coalesced", "default"])
@pytest.mark.parametrize("which", ["fw", "bw"])
def test_allocator_peak_of_a_larger_model_is_near(
    which: str, form: str | None, free_inputs: bool
) -> None:
    """29 MB and more (dim 256), where workspaces are small: bf16 matmuls and attention have some.

    In the 3-layer capture (dim 64) they are 108 KB at most, 6% of its peak.
    """
    with running("llama_8l_fsdp8", which, form) as case:
        peak = allocator_peak_bytes(case.runnable, case.inputs, Conditions(free_inputs))
    estimated = peak_bytes(case.gm.graph, free_inputs).peak_bytes
    assert estimated == pytest.approx(peak, rel=WITHIN)
    assert estimated <= peak


def test_conditions_differ_where_they_should() -> None:
    """Or the tests above would measure one thing twice."""
    with running("llama_3l_fsdp8", "bw", "default") as case:
        assert any(op_name(node.target) == "_foreach_copy" for node in case.gm.graph.nodes)

        def peak(**conditions: bool) -> int:
            return measure(case.runnable, case.inputs, Conditions(**conditions)).peak_bytes

        assert peak(free_inputs=True) < 0.8 * peak()
        assert peak(eager=True) > 5 * peak()


@pytest.mark.parametrize("which", ["fw", "bw"])
def test_generated_code_has_the_measured_peak(which: str) -> None:
    """The node-by-node run frees as FX's code does.  All-reduces: nothing is held in flight."""
    with running("llama_3l_ddp8", which, None) as case:
        tracker = MemTracker()
        tracker.track_external(*(v for v in case.inputs if isinstance(v, torch.Tensor)))
        with torch.no_grad(), tracker:
            case.runnable(*case.inputs)
        total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        assert total == measure(case.runnable, case.inputs).peak_bytes


# -- two ranks on gloo ----------------------------------------------------------------------------


def train_two_ranks(rank: int, say: Say) -> list[tuple[str, int, int]]:
    """Case, estimated and measured peak of real graphs with real data; in each process."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch.distributed.device_mesh import init_device_mesh

    from torch_patches.testing.models import Llama, ModelConfig
    from torch_patches.testing.parallelize import fully_shard_simple

    rows: list[tuple[str, int, int]] = []

    def compiler(which: str) -> Any:
        def compile_graph(gm: fx.GraphModule, _: Any) -> Any:
            def run(*values: Any) -> Any:
                for form in (None, "coalesced", "default"):
                    say(f"{which} {form}")
                    rows.append(_measure_form(f"{which} {form}", gm, values, form))
                return gm.forward(*values)

            return make_boxed_func(run)

        return compile_graph

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(ModelConfig(layers=1, dim=64, heads=4, vocab=256, max_seq=32))
    fully_shard_simple(model, init_device_mesh("cpu", (2,)))
    backend = aot_autograd(fw_compiler=compiler("fw"), bw_compiler=compiler("bw"))
    tokens = torch.randint(256, (2, 32))
    loss = torch.compile(model, backend=backend, fullgraph=True)(tokens, tokens.roll(-1, 1))
    loss.backward()
    return rows


def _measure_form(
    case: str, gm: fx.GraphModule, values: tuple[Any, ...], form: str | None
) -> tuple[str, int, int]:
    merged = copy.deepcopy(gm)
    if form is not None:
        optimize_graph(merged, Options("topo_span", bucket_mode=form))
        assert count_launches(merged) < count_launches(gm) / 5
    conditions = Conditions(free_inputs=True, eager=True, real_groups=True)
    measured = measure(merged, values, conditions).peak_bytes
    return case, peak_bytes(merged.graph, True, eager=True).peak_bytes, measured


def test_two_ranks_on_gloo() -> None:
    """What the stand-in for a group holds is what a real one holds.

    Within the bound only: gloo's thread may let go of a payload after the wait has returned.
    """
    by_rank = run_ranks(train_two_ranks, 2, timeout_s=240.0)
    for rows in by_rank:
        assert len(rows) == 2 * 3
        for case, estimated, measured in rows:
            assert estimated == pytest.approx(measured, rel=WITHIN), case
