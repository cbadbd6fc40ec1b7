"""Parameters that a graph's module holds itself, as modules of ``torch.export`` do, are its inputs."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._functorch._aot_autograd import descriptors as aot

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import run_spmd

aten = torch.ops.aten
COUNT = 3


def graph(kind: type, described: bool = False, deep: bool = False) -> fx.GraphModule:
    """x @ gather(w0) @ gather(w1) ..., where the module holds each w, read right before its use.

    Args:
        kind: of what is held: a Parameter, or a plain tensor.
        described: inputs have descriptors, as export leaves them.
        deep: what is held belongs to a submodule.
    """
    b = GraphBuilder()
    x = h = b.placeholder(4, 4)
    root = torch.nn.Module()
    holder = torch.nn.Module() if deep else root
    if deep:
        root.inner = holder
    if described:
        x.meta["desc"] = aot.PlainAOTInput(0)
    for number in range(COUNT):
        value = torch.arange(8.0).view(2, 4) + number
        setattr(
            holder, f"w{number}", torch.nn.Parameter(value) if kind is torch.nn.Parameter else value
        )
        with b.fake_mode:
            fake = torch.empty(2, 4)
        b.graph.owning_module = root
        name = f"inner.w{number}" if deep else f"w{number}"
        held = b.graph.get_attr(name)
        held.meta["val"] = fake
        if described:
            held.meta["desc"] = aot.ParamAOTInput(f"w{number}")
        h = b.call(aten.mm, h, b.gather_and_wait(held, 2, "g"))
    b.graph.output((h,))
    return fx.GraphModule(root, b.graph)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_held_parameters_are_merged(described: bool, deep: bool) -> None:
    gm = graph(torch.nn.Parameter, described, deep)
    x = [[torch.ones(4, 4)] for _ in range(2)]
    groups = {"g": [[0, 1]]}
    expected = run_spmd(gm, [list(rank) for rank in x], groups, 2)
    report = optimize_graph(gm, Options("topo_span"))
    assert [len(bucket.members) for bucket in report.buckets] == [COUNT]
    gm.graph.lint()
    found = run_spmd(gm, x, groups, 2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(expected, found, strict=True))


def test_held_constants_are_not() -> None:
    report = optimize_graph(graph(torch.Tensor), Options("topo_span"))
    assert report.buckets == ()
    assert {r.reason for r in report.refusals} == {RefusalReason.NOT_PARAMETER_TRAFFIC}
