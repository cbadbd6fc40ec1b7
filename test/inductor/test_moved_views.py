"""Views move with their gather where a mutation behind orders them: other ranks have no such view."""

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.reorder import move_nodes
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import Gather, find_gathers
from torch_patches.testing.schedule_sketch import Sketch, plan, schedule, text

aten = torch.ops.aten


def mutated(view: bool, first: bool = False) -> fx.GraphModule:
    """A shard that is written behind its gather, and where ``first`` says so in front of it too;
    kernels in between.  With or without a view on the way to the gather."""
    s = Sketch()
    shard = s.call(aten.clone, s.placeholder(4, 8))
    h = s.mm(s.x, s.x)
    if first:
        s.call(aten.add_.Tensor, shard, 1.0)
    for _ in range(3):
        h = s.mm(h, s.x)
    read = s.call(aten.alias, shard) if view else shard
    weight = s.gather_and_wait(read, 2, "g")
    h = s.mm(h, weight)
    s.call(aten.add_.Tensor, read, 1.0)
    return s.end(h, shard)


def gather_of(gm: fx.GraphModule) -> Gather:
    nodes = list(gm.graph.nodes)
    (found,) = find_gathers(collect(gm.graph), {node: place for place, node in enumerate(nodes)})
    return found


@pytest.mark.parametrize("first", [False, True])
def test_a_view_changes_no_schedule(first: bool) -> None:
    """Found by tools/fuzz.py: the gather behind a view stayed where it was."""
    graphs = [mutated(view, first) for view in (False, True)]
    totals = [schedule(gm).total_ms for gm in graphs]
    assert totals == [50.0, 50.0]
    assert [text(gm) for gm in graphs] == ["mm mm mm s0 mm w0 mm"] * 2


@pytest.mark.parametrize("view", [False, True])
def test_nothing_moves_over_a_mutation_in_front(view: bool) -> None:
    gm = mutated(view, first=True)
    order = list(gm.graph.nodes)
    gather = gather_of(gm)
    writes = [place for place, node in enumerate(order) if node.target is aten.add_.Tensor]
    assert gather.earliest == writes[0] + 1
    move_nodes(gm.graph, collect(gm.graph), [(m.node, m.place) for m in plan(gm).moves])
    gm.graph.lint()
    moved = list(gm.graph.nodes)
    assert moved.index(order[writes[0]]) < moved.index(gather.collective.start)
    assert moved.index(gather.collective.start) < moved.index(order[writes[1]])
