"""An op whose arguments are given by keyword is read like one whose arguments stand in order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import FlopCounter
from torch_patches._inductor.fx_passes.comm_overlap.estimate.fusion import memory_traffic
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph import chains
from torch_patches._inductor.fx_passes.comm_overlap.graph.evenness import pads_by_nothing
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import does_work
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import Description

aten = torch.ops.aten

#: Ops on a contiguous matrix of 4 x 4.
CALLS: list[tuple[Any, Callable[[fx.Node], list[Any]]]] = [
    (aten.mm.default, lambda x: [x, x]),
    (aten.addmm.default, lambda x: [x, x, x]),
    (aten.permute.default, lambda x: [x, [1, 0]]),
    (aten.transpose.int, lambda x: [x, 0, -1]),
    (aten.t.default, lambda x: [x]),
    (aten.view.default, lambda x: [x, [16]]),
    (aten.reshape.default, lambda x: [x, [2, 8]]),
    (aten.constant_pad_nd.default, lambda x: [x, [0, 0]]),
    (aten.constant_pad_nd.default, lambda x: [x, [0, 1]]),
    (aten.slice.Tensor, lambda x: [x, 0, 0, 4]),
    (aten.slice.Tensor, lambda x: [x, 0, 0, 2]),
    (aten.expand.default, lambda x: [x, [4, 4]]),
    (aten.mul.Tensor, lambda x: [x, x]),
    (aten.cat.default, lambda x: [[x, x]]),
]


def by_keyword(node: fx.Node) -> None:
    """Changes the call in place."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    node.args, node.kwargs = (), {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def facts(target: Any, arguments: Callable[[fx.Node], list[Any]], change: bool) -> list[object]:
    b = GraphBuilder()
    node = b.call(target, *arguments(b.placeholder(4, 4)))
    if change:
        by_keyword(node)
    view = chains.kind_of_view(node)
    gm = b.output(b.call(aten.relu, node))
    return [
        FlopCounter().flops(node),
        view,
        chains.permutation(node) if view == "permute" else None,
        pads_by_nothing(node),
        does_work(node),
        list(memory_traffic(gm.graph).values()),
        live_bytes(gm.graph).at_node,
    ]


@pytest.mark.parametrize(("target", "arguments"), CALLS)
def test_same_is_read_of_it(target: Any, arguments: Callable[[fx.Node], list[Any]]) -> None:
    assert facts(target, arguments, change=True) == facts(target, arguments, change=False)


@pytest.mark.parametrize("form", ["default", "coalesced"])
@pytest.mark.parametrize("scatters", [False, True])
def test_casts_and_scalings_at_merged_collectives(form: str, scatters: bool) -> None:
    """What is absorbed by a copying bucket: casts in front of it and behind it, and scalings."""
    b = GraphBuilder()
    outputs = []
    for _ in range(2):
        if scatters:
            cast = b.call(aten._to_copy, b.placeholder(4), dtype=torch.float64)
            reduced = b.reduce_and_wait(cast, "sum", "g")
            last = b.call(aten.div.Tensor, reduced, 2.0)
        else:
            cast = b.call(aten._to_copy, b.placeholder(4), dtype=torch.bfloat16)
            last = b.call(aten._to_copy, b.gather_and_wait(cast, 2, "g"), dtype=torch.float32)
        by_keyword(cast)
        by_keyword(last)
        outputs.append(last)
    outcome = check_invariants(
        b.output(*outputs),
        Description(2, {"g": [[0, 1]]}),
        Options("topo_span", None, bucket_mode=form),
    )
    assert outcome.buckets == 1
