"""What a backend cannot do in the coalesced form is copied, whatever was asked for."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten


def forms(gm, bucket_mode):
    report = optimize_graph(gm, Options("topo_span", bucket_mode=bucket_mode))
    return [(x.kind, x.form) for x in report.buckets]


@pytest.mark.parametrize("bucket_mode", [None, "coalesced"])
class TestCpu:
    def test_reduce_scatters_are_copied(self, bucket_mode):
        b = GraphBuilder()
        gm = b.output(*[b.scatter_and_wait(b.placeholder(4), "sum", 2, "g") for _ in range(2)])
        assert forms(gm, bucket_mode) == [("reduce_scatter", "default")]

    def test_gathers_and_all_reduces_are_not(self, bucket_mode):
        b = GraphBuilder()
        waits = [b.gather_and_wait(b.placeholder(4), 2, "g") for _ in range(2)]
        waits += [b.reduce_and_wait(b.placeholder(4), "sum", "g") for _ in range(2)]
        found = forms(b.output(*waits), bucket_mode)
        assert found == [("all_gather", "coalesced"), ("all_reduce", "coalesced")]

    def test_complex_gathers_are_copied(self, bucket_mode):
        b = GraphBuilder()
        xs = [b.placeholder(4, dtype=torch.complex64) for _ in range(2)]
        gm = b.output(*[b.gather_and_wait(x, 2, "g") for x in xs])
        assert forms(gm, bucket_mode) == [("all_gather", "default")]

    def test_symbolic_reduce_scatters_are_left_alone(self, bucket_mode):
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        b = GraphBuilder(mode)
        xs = [b.placeholder(val=mode.from_tensor(torch.empty(n, 3))) for n in (4, 8)]
        gm = b.output(*[b.scatter_and_wait(x, "sum", 2, "g") for x in xs])
        report = optimize_graph(gm, Options("topo_span", bucket_mode=bucket_mode))
        assert report.buckets == ()
        assert {r.reason for r in report.refusals} == {RefusalReason.SYMBOLIC_SIZE}


def test_gpu_reduce_scatters_are_not_copied(as_on_gpu):
    b = GraphBuilder()
    gm = b.output(*[b.scatter_and_wait(b.placeholder(4), "sum", 2, "g") for _ in range(2)])
    assert forms(gm, None) == [("reduce_scatter", "coalesced")]


class TestSharedSizes:
    """A chain over sub-meshes takes the sizes of the end that all ranks share."""

    def _sizes(self, rows):
        """Inner gather of ``rows`` (uneven between outer coordinates), outer gather of 7 padded."""
        from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect

        b = GraphBuilder()
        inner = b.gather_and_wait(b.placeholder(rows, 4), 2, "inner")
        cut = b.call(aten.slice.Tensor, inner, 0, 0, 2 * rows - 1) if rows == 4 else inner
        outer_in = cut if rows == 4 else b.call(aten.constant_pad_nd, cut, [0, 0, 0, 1])
        outer = b.gather_and_wait(outer_in, 2, "outer")
        return [c.size_bytes for c in collect(b.output(outer).graph).collectives]

    def test_uneven_inner_groups_agree(self):
        assert self._sizes(4) == self._sizes(3) == [7 * 4 * 4, 14 * 4 * 4]

    def test_even_shards_keep_their_own_sizes(self):
        from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect

        b = GraphBuilder()
        inner = b.gather_and_wait(b.placeholder(4, 4), 2, "inner")
        outer = b.gather_and_wait(inner, 2, "outer")
        scattered = b.scatter_and_wait(b.placeholder(16, 4), "sum", 2, "outer")
        again = b.scatter_and_wait(scattered, "sum", 2, "inner")
        found = collect(b.output(outer, again).graph).collectives
        assert [c.size_bytes for c in found] == [128, 256, 256, 128]
