"""What tags are used for: what may be merged, in which order it lies, and that they stay."""

import copy
from typing import Any

import torch
import torch.fx as fx
from torch._functorch._aot_autograd import descriptors as aot
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions

from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK, tag_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import plan_tags, tag_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveTag,
    InputKind,
    RecordedInput,
    RefusalReason,
    TagSource,
    Traffic,
)
from torch_patches.testing.described_graph import V, W, three_gathers

c10d = torch.ops._c10d_functional


def test_inner_graph_of_a_compile_is_left_alone() -> None:
    """No descriptors, but Dynamo told of the outer graph."""
    gm = three_gathers()
    for node in gm.graph.nodes:
        node.meta.pop("desc", None)
    recorded = (RecordedInput(InputKind.PARAMETER, "w", 0),)
    report = pipeline.run_post_grad(gm.graph, Options("topo_span"), recorded)
    assert report is not None and report.buckets == ()
    assert {refusal.reason for refusal in report.refusals} == {RefusalReason.NOT_TAGGED}
    assert report.told_by == {"untold": 3}


def test_payload_order_ignores_registration() -> None:
    """Registration comes from a rank's own objects; the graph is the same on all ranks."""
    orders = []
    for indices in ((0, 1), (1, 0)):
        gm = three_gathers()
        names = [n for n in gm.graph.nodes if n.meta.get("desc") in (W, V)]
        for place, node in enumerate(names):
            node.meta["desc"] = aot.PlainAOTInput(place)
        recorded = tuple(RecordedInput(InputKind.PARAMETER, f"p{i}", i) for i in indices)
        tag_graph(gm.graph, recorded)
        report = pipeline.optimize_graph(gm, Options("topo_span", bucket_mode="coalesced"))
        assert len(report.buckets) == 1
        (merged,) = gm.graph.find_nodes(
            op="call_function", target=c10d.all_gather_into_tensor_coalesced.default
        )
        orders.append([node.name for node in merged.args[0]])
    assert orders[0] == orders[1]


def test_saved_activation_is_left_alone_and_payload_follows_registration() -> None:
    gm = three_gathers()
    report = pipeline.optimize_graph(gm, Options("topo_span", bucket_mode="coalesced"))
    (bucket,) = report.buckets
    assert len(bucket.members) == 2
    assert [r.reason for r in report.refusals] == [RefusalReason.NOT_PARAMETER_TRAFFIC]
    assert report.told_by == {"descriptors": 3}
    (merged,) = gm.graph.find_nodes(
        op="call_function", target=c10d.all_gather_into_tensor_coalesced.default
    )
    assert [node.meta["desc"] for node in merged.args[0]] == [W, V]
    assert tag_of(merged) == CollectiveTag(Traffic.PARAMETER, TagSource.DESCRIPTORS)


def test_without_tags_structure_takes_it_for_a_parameter() -> None:
    gm = three_gathers()
    for node in gm.graph.nodes:
        node.meta.pop("desc", None)
    report = pipeline.optimize_graph(gm, Options("topo_span"))
    assert [len(bucket.members) for bucket in report.buckets] == [3]
    assert report.told_by == {"structure": 3}


def test_collective_that_appeared_after_the_tags_is_left_alone() -> None:
    gm = three_gathers()
    tag_graph(gm.graph)
    late = gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)[0]
    del late.meta[TAG_MARK]
    report = pipeline.optimize_graph(gm, Options("topo_span"))
    assert report.buckets == ()
    reasons = {refusal.members: refusal.reason for refusal in report.refusals}
    assert reasons[(late.name,)] is RefusalReason.NOT_TAGGED


def pickled(gm: fx.GraphModule, fake_mode: Any) -> fx.GraphModule:
    """There and back, with collectives allowed, as AOTAutograd's cache has it."""
    return GraphPickler.loads(GraphPickler.dumps(gm, PicklerOptions(ops_filter=None)), fake_mode)


def test_tags_survive_copies() -> None:
    gm = three_gathers()
    tag_graph(gm.graph)
    expected = [tag_of(node) for node in gm.graph.nodes]
    assert {tag.parameter for tag in expected if tag is not None} >= {"layer.w", "layer.v"}
    fake_mode = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    for copied in (copy.deepcopy(gm), pickled(gm, fake_mode)):
        assert [tag_of(node) for node in copied.graph.nodes] == expected


def test_names_of_nodes_do_not_matter_and_twice_is_once() -> None:
    gm, renamed = three_gathers(), three_gathers()
    for number, node in enumerate(renamed.graph.nodes):
        node._rename(f"n{number}")
    of_gm, of_renamed = (list(plan_tags(each.graph).values()) for each in (gm, renamed))
    assert of_gm == of_renamed
    tag_graph(gm.graph)
    before = [tag_of(node) for node in gm.graph.nodes]
    tag_graph(gm.graph)
    assert [tag_of(node) for node in gm.graph.nodes] == before
