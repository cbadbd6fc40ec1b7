"""Ranks of one program whose graphs differ in the layout of their shards decide the same.

Each test builds the graph of a rank with a full shard and of one with a short or empty shard, as
DTensor writes them, and compares what decisions are made from.
"""

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import reads_only_shape
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag, TagSource, Traffic
from torch_patches.testing.graph_builder import GraphBuilder

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
LIKE_INPUT = [
    lambda b, x: b.call(aten.new_zeros, x, [1, 2]),
    lambda b, x: b.call(aten.new_empty, x, [1, 2]),
    lambda b, x: b.call(aten.new_ones, x, [1, 2]),
    lambda b, x: b.call(aten.new_full, x, [1, 2], 0.0),
    lambda b, x: b.call(aten.zeros_like, x),
    lambda b, x: b.call(aten.empty_like, x),
    lambda b, x: b.call(aten.ones_like, x),
    lambda b, x: b.call(aten.full_like, x, 0.0),
]


@torch.library.custom_op("torch_patches_test::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Stands for somebody's quantisation."""
    return x / 2


halved.register_fake(torch.empty_like)


@torch.library.custom_op("torch_patches_test::averaged", mutates_args=())
def averaged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Reads two tensors."""
    return (x + y) / 2


averaged.register_fake(lambda x, y: torch.empty_like(x))


def decisive(b, *outputs):
    """What plans read of each collective."""
    return [
        (c.kind, c.traffic, c.parameter_index, c.position, c.wait_position, c.size_bytes, c.feeder)
        for c in collect(b.output(*outputs).graph).collectives
    ]


def pad_rows(b, x, rows=1):
    return b.call(aten.constant_pad_nd, x, [0, 0, 0, rows])


def cut_rows(b, x, rows):
    return b.call(aten.slice.Tensor, x, 0, 0, rows)


def tag(node, traffic, place=0):
    node.meta[TAG_MARK] = CollectiveTag(traffic, TagSource.DESCRIPTORS, "p", place, place)


class TestMissingChunks:
    """Fewer rows than ranks in the inner group: zeros take the place of a missing chunk.

    wait -> split -> getitem ---------> pad -> cat -> RS inner
                        '-> new_zeros -> pad --^
    """

    def _gradients(self, missing):
        b = GraphBuilder()
        waits = []
        for _ in range(2):
            wait = b.scatter_and_wait(b.placeholder(4, 2), "sum", 2, "outer")
            if missing is not None:
                parts = b.call(aten.split.Tensor, cut_rows(b, wait, 1), 1)
                part = b.getitem(parts, 0)
                zeros = missing(b, part)
                wait = b.call(aten.cat, [pad_rows(b, part, 0), pad_rows(b, zeros, 0)])
            waits.append(b.scatter_and_wait(wait, "sum", 2, "inner"))
        return decisive(b, *waits)

    @pytest.mark.parametrize("missing", LIKE_INPUT)
    def test_gradients_stay_gradients(self, missing):
        full = self._gradients(None)
        assert {traffic for _, traffic, *_ in full} == {Traffic.GRADIENT}
        assert self._gradients(missing) == full

    def _parameters(self, other):
        b = GraphBuilder()
        x, other_input = b.placeholder(1, 2), b.placeholder(1, 2)
        if other is not None:
            x = b.call(aten.cat, [x, other(b, other_input)])
        return [row[1:5] for row in decisive(b, b.gather_and_wait(x, 2, "g"))]

    @pytest.mark.parametrize(
        "other",
        [
            *LIKE_INPUT,
            lambda b, x: pad_rows(b, b.call(aten.zeros_like, x)),
            lambda b, x: b.call(aten.full, [1, 2], 0.0),
        ],
    )
    def test_zeros_are_no_second_parameter(self, other):
        assert self._parameters(other) == self._parameters(None)

    def _local_chunk(self, empty):
        """all-reduce -> wait -> split -> this rank's chunk, or zeros where it has none"""
        b = GraphBuilder()
        wait = b.reduce_and_wait(b.placeholder(1, 2), "sum", "g")
        part = b.getitem(b.call(aten.split.Tensor, wait, 1), 0)
        return decisive(b, b.call(aten.new_zeros, part, [0, 2]) if empty else part)

    def test_a_rank_without_a_chunk_has_a_gradient_too(self):
        assert self._local_chunk(True) == self._local_chunk(False)

    def test_a_reader_of_the_shape_hides_no_reader_of_the_data(self):
        b = GraphBuilder()
        wait = b.scatter_and_wait(b.placeholder(4, 2), "sum", 2, "g")
        zeros = b.call(aten.zeros_like, wait)
        (found,) = decisive(b, zeros, b.call(aten.tanh, wait))
        assert found[1] is Traffic.OTHER

    def test_random_numbers_like_an_input_are_data(self):
        b = GraphBuilder()
        assert not reads_only_shape(b.call(aten.rand_like, b.placeholder(2)))


class TestPositions:
    def test_padding_behind_computation_on_a_parameter(self):
        """w -> mul -> [pad] -> AG: to structure, no parameter."""

        def rank(short):
            b = GraphBuilder()
            waits = []
            for _ in range(3):
                w = b.call(aten.mul.Tensor, b.placeholder(3 if short else 4, 2), 0.5)
                wait = b.gather_and_wait(pad_rows(b, w) if short else w, 2, "g")
                waits.append(b.call(aten.tanh, wait))
            return decisive(b, *waits)

        assert rank(True) == rank(False)

    def test_uneven_activations(self):
        """tanh -> split -> getitem -> clone -> [pad] -> AG -> [slice] -> tanh"""

        def rank(short):
            b = GraphBuilder()
            x = b.placeholder(7, 2)
            for _ in range(3):
                parts = b.call(aten.split.Tensor, b.call(aten.tanh, x), 4)
                x = b.call(aten.clone, b.getitem(parts, 1 if short else 0))
                if short:
                    x = pad_rows(b, x)
                x = b.call(aten.tanh, cut_rows(b, b.gather_and_wait(x, 2, "g"), 7))
            return decisive(b, x)

        assert rank(True) == rank(False)

    def test_unread_rests_of_another_graph(self):
        """Partitioned backward graphs hold the way to a gather of the forward, without it."""

        def rank(short):
            b = GraphBuilder()
            x = b.placeholder(3 if short else 4, 2)
            rest = b.call(aten.clone, b.call(aten.tanh, x))
            if short:
                pad_rows(b, rest)
            return decisive(b, b.gather_and_wait(b.placeholder(2), 2, "g"))

        assert rank(True) == rank(False)

    def test_parts_that_are_not_of_a_split_count(self):
        """Every rank has the getitem of an op with several results."""
        b = GraphBuilder()
        norm = b.call(aten.native_layer_norm, b.placeholder(4, 2), [2], None, None, 1e-5)
        gathered = b.gather_and_wait(b.getitem(norm, 0), 2, "g")
        assert decisive(b, b.call(aten.tanh, gathered))[0][3] == 2

    def test_rearrangements_between_computation_count(self):
        b = GraphBuilder()
        x = b.call(aten.clone, b.call(aten.tanh, b.placeholder(4)))
        x = b.gather_and_wait(b.call(aten.tanh, x), 2, "g")
        assert decisive(b, b.call(aten.tanh, x))[0][3] == 3


class TestChains:
    """Two inner groups of one outer group: 3 rows in one, 2 padded to 3 in the other."""

    def _gathers(self, rows, compute):
        """w -> AG inner -> slice -> computation -> [pad] -> AG outer"""
        b = GraphBuilder()
        inner = b.all_gather(b.placeholder((rows + 1) // 2, 2), 2, "inner")
        x = compute(b, cut_rows(b, b.wait(inner), rows))
        outer = b.all_gather(x if rows == 3 else pad_rows(b, x), 2, "outer")
        for start in (inner, outer):
            tag(start, Traffic.PARAMETER)
        return decisive(b, b.wait(outer))

    @pytest.mark.parametrize(
        "compute",
        [
            lambda b, x: x,
            lambda b, x: b.call(aten.mul.Tensor, x, 0.5),
            lambda b, x: b.call(aten.div.Tensor, b.call(aten.neg, x), b.call(aten.amax, x)),
            lambda b, x: b.call(aten.mul.Tensor, x, b.placeholder(2)),
            lambda b, x: b.call(torch.ops.torch_patches_test.halved, x),
        ],
    )
    def test_sizes_and_feeders_of_gathers(self, compute):
        full, short = self._gathers(3, compute), self._gathers(2, compute)
        assert full == short
        assert [row[-1] for row in full] == [None, 0]
        assert [row[-2] for row in full] == [24, 48]  # 3 and 6 rows of 2 fp32

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_a_shard_of_a_group_is_that_share_of_what_is_gathered(self, ranks):
        b = GraphBuilder()
        inner = b.all_gather(b.placeholder(2, 2), 2, "inner")
        outer = b.all_gather(b.wait(inner), ranks, "outer")
        for start in (inner, outer):
            tag(start, Traffic.PARAMETER)
        sizes = [row[-2] for row in decisive(b, b.wait(outer))]
        assert sizes == [32, 32 * ranks]  # 4 rows of 2 fp32

    def _reductions(self, rows):
        """Two gradients of a tied parameter -> RS outer -> [slice] -> add -> [pad] -> RS inner"""
        b = GraphBuilder()
        starts = [b.reduce_scatter(b.placeholder(6, 2), "sum", 2, "outer") for _ in range(2)]
        waits = [b.wait(start) for start in starts]
        if rows < 3:
            waits = [cut_rows(b, wait, rows) for wait in waits]
        x = b.call(aten.add.Tensor, *waits)
        inner = b.reduce_scatter(pad_rows(b, x, rows % 2), "sum", 2, "inner")
        for start in (*starts, inner):
            tag(start, Traffic.GRADIENT)
        return decisive(b, b.wait(inner))

    def test_sizes_behind_a_sum(self):
        assert self._reductions(3) == self._reductions(2)

    def test_a_joined_chain_has_a_feeder(self):
        def rank(missing):
            b = GraphBuilder()
            x = b.reduce_and_wait(b.placeholder(2, 2), "sum", "replicate")
            if missing:
                part = b.getitem(b.call(aten.split.Tensor, cut_rows(b, x, 1), 1), 0)
                x = b.call(aten.cat, [part, b.call(aten.full, [1, 2], 0.0)])
            return decisive(b, b.scatter_and_wait(x, "sum", 2, "shard"))

        assert rank(True) == rank(False)
        assert rank(True)[1][-1] == 0


class TestReadTwice:
    """An op that reads one tensor twice, and one that reads it and a view of it."""

    @pytest.mark.parametrize("op", [aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor])
    def test_a_gradient_times_itself(self, op):
        def rank(viewed):
            b = GraphBuilder()
            x = b.scatter_and_wait(b.placeholder(4, 2), "sum", 2, "g")
            return decisive(b, b.call(op, x, b.call(aten.alias, x) if viewed else x))

        assert rank(True) == rank(False)
        assert rank(True)[0][1] is Traffic.GRADIENT

    def test_somebodys_op_between_two_gathers(self):
        def rank(viewed):
            b = GraphBuilder()
            inner = b.all_gather(b.placeholder(2, 2), 2, "inner")
            x = b.wait(inner)
            again = b.call(aten.alias, x) if viewed else x
            both = b.call(torch.ops.torch_patches_test.averaged, x, again)
            outer = b.all_gather(both, 2, "outer")
            for start in (inner, outer):
                tag(start, Traffic.PARAMETER)
            return decisive(b, b.wait(outer))

        assert rank(True) == rank(False)
        assert rank(True)[1][-1] == 0


class TestWireForm:
    """all-reduce -> wait -> [slice -> clone] -> div by 4"""

    def _form(self, between, divide=True):
        b = GraphBuilder()
        outputs = []
        for _ in range(3):
            x = between(b, b.reduce_and_wait(b.placeholder(4, 4), "sum", "g"))
            outputs.append(b.call(aten.div.Tensor, x, 4) if divide else x)
        report = optimize_graph(b.output(*outputs), Options("topo_span", bucket_cap_mb=(25.0,)))
        return [(len(x.members), x.form) for x in report.buckets]

    @pytest.mark.parametrize(
        "between",
        [
            lambda b, x: x,
            lambda b, x: b.call(aten.slice.Tensor, x, 1, 0, 3),
            lambda b, x: b.call(aten.clone, b.call(aten.slice.Tensor, x, 1, 0, 3)),
            lambda b, x: b.call(aten.cat, list(_halves(b, x))),
            lambda b, x: b.call(aten.cat, [x, b.call(aten.new_zeros, x, [1, 4])]),
        ],
    )
    def test_short_shards_do_not_change_it(self, between):
        assert self._form(between) == [(3, "default")]

    def test_a_part_that_is_not_scaled_does(self):
        def between(b, x):
            first, second = _halves(b, x)
            return b.call(aten.add.Tensor, first, second)

        assert self._form(between) == [(3, "coalesced")]

    def test_no_scaling_at_all(self):
        assert self._form(lambda b, x: x, divide=False) == [(3, "coalesced")]


def _halves(b, x):
    parts = b.call(aten.split.Tensor, x, 2)
    return b.getitem(parts, 0), b.getitem(parts, 1)
