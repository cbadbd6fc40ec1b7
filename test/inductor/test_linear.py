"""Merging by stretches: where gathers may start, and what reductions need."""

import pytest
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.plan import MergeForm, RefusalReason
from torch_patches.testing.hiding_sketch import Sketch, track_of

pytestmark = pytest.mark.usefixtures("as_on_gpu")


def merger_of(gm: fx.GraphModule, bound: int | None = None) -> LinearMerger:
    return LinearMerger(track_of(gm, collect(gm.graph)), bound)


def nested() -> fx.GraphModule:
    """A()  B()B  mm(B)  mm(A): the first to start is used last."""
    s = Sketch()
    first, second = s.start(), s.start()
    h = s.mm(s.x, s.wait(second))
    s.mm(h, s.wait(first))
    return s.done()


def test_can_merge_in_any_order_what_can_start_together() -> None:
    gm = nested()
    one, two = collect(gm.graph).collectives
    for first, other in ((one, two), (two, one)):
        assert merger_of(gm).can_merge(first, other)


@pytest.mark.parametrize(("bound", "fits"), [(511, False), (512, True), (None, True)])
def test_a_bucket_may_be_in_flight_as_a_whole(bound: int | None, fits: bool) -> None:
    """Two of 256 bytes; a third is too many for either bound."""
    gm = nested()
    one, two = collect(gm.graph).collectives
    merger = merger_of(gm, bound)
    assert merger.merge(one, two, MergeForm.COALESCED) is fits
    assert merger.why == ({} if fits else dict.fromkeys((0, 1), RefusalReason.MEMORY))
