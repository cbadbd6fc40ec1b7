"""Views move with their gather where a mutation behind orders them: other ranks have no such view."""

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.reorder import move_nodes
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import Gather, find_gathers
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches.testing import hiding_sketch
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


def shared(view: bool) -> hiding_sketch.Sketch:
    """A shard gathered in two groups, one of which merges with what starts behind a third group's."""
    s = hiding_sketch.Sketch()
    shard = s.placeholder(4, 8)
    read = s.call(aten.alias, shard) if view else shard
    first, other = s.all_gather(read, 2, "g"), s.all_gather(read, 2, "h")
    third = s.start("k")
    last = s.start("g")
    hidden_by = s.mm()
    for start in (first, last):
        s.end(start, hidden_by)
    s.end(other)
    s.end(third)
    return s


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("limits", [None, Limits(1 << 40)], ids=["graph", "places"])
@pytest.mark.parametrize("view", [False, True])
def test_a_shared_view_does_not_move_down(
    view: bool, limits: Limits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other gather that reads it would start behind the third group's, on one rank only."""
    monkeypatch.setitem(hiding_sketch.GROUPS, "k", [[0, 1]])
    s = shared(view)
    outcome = hiding_sketch.bucket(s.done(), s.hiding, Options("topo_span"), limits)
    assert outcome.buckets == [[0, 3]]
    assert [c.group for c in collect(outcome.after.graph).collectives] == ["h", "k", "g"]
