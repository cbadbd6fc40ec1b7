"""Which collectives may be merged, and why others are not."""

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import Description

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten


def two_groups() -> tuple[fx.GraphModule, list[fx.Node]]:
    b = GraphBuilder()
    starts = [b.all_gather(b.placeholder(4), 2, group) for group in ("g", "g", "h")]
    return b.output(*map(b.wait, starts)), starts


def reasons(gm: fx.GraphModule, options: Options) -> dict[str, RefusalReason]:
    candidates, refusals = select_candidates(collect(gm.graph), options)
    found = {name: refusal.reason for refusal in refusals for name in refusal.members}
    assert found.keys().isdisjoint(c.start.name for c in candidates)
    assert len(found) + len(candidates) == 3
    return found


def test_all_that_can_be_merged_are_candidates() -> None:
    gm, _ = two_groups()
    assert reasons(gm, Options("topo_span")) == {}


def test_a_collective_without_metadata_is_refused_and_the_others_are_not() -> None:
    gm, starts = two_groups()
    for node in (starts[0], *starts[0].all_input_nodes):
        del node.meta["val"]
    assert reasons(gm, Options("topo_span")) == {starts[0].name: RefusalReason.NO_METADATA}


def test_groups_that_nobody_asked_for_are_refused() -> None:
    gm, starts = two_groups()
    options = Options("topo_span", only_groups=("g",))
    assert reasons(gm, options) == {starts[2].name: RefusalReason.NOT_ASKED_FOR}


@pytest.mark.parametrize("kind", ["transposed", "scalar"])
def test_payloads_that_need_another_form_in_a_coalesced_bucket(kind: str) -> None:
    """An all-reduce of what is not contiguous, and a gather of a scalar; three of each."""
    b = GraphBuilder()
    outputs = []
    for _ in range(3):
        if kind == "transposed":
            payload = b.call(aten.t, b.call(aten.neg, b.placeholder(2, 4)))
            outputs.append(b.reduce_and_wait(payload, "sum", "g"))
        else:
            outputs.append(b.gather_and_wait(b.placeholder(), 2, "g"))
    outcome = check_invariants(
        b.output(*outputs),
        Description(2, {"g": [[0, 1]]}, integers=True),
        Options("topo_span", None, bucket_mode="coalesced"),
    )
    assert outcome.buckets == 1
