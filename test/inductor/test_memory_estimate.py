"""Live bytes along an order, computed by hand; and what default bucketing does to a real model."""

import copy
import gzip
import lzma
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes, peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.storages import can_view
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import SYMBOLIC_DIM_FALLBACK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches.captured import load_captured
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.synthetic import training_graph

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]


def peak(gm, **options):
    """In elements of fp32, and the name of the op at the peak."""
    found = peak_bytes(gm.graph, **options)
    return found.peak_bytes / 4, None if found.node is None else str(found.node.target)


class TestCompute:
    def test_inputs_are_live_throughout(self):
        b = GraphBuilder()
        b.placeholder(100)
        x = b.placeholder(10)
        assert peak(b.output(b.call(aten.neg, x))) == (100 + 10 + 10, "aten.neg.default")

    def test_graph_without_work_has_its_inputs(self):
        b = GraphBuilder()
        assert peak(b.output(b.placeholder(7))) == (7, None)

    def test_input_and_output_of_a_node_live_at_the_same_time(self):
        """x(10) -> a(10) -> b(10) -> c(10): two of them beside the input, never three."""
        b = GraphBuilder()
        x = b.placeholder(10)
        for _ in range(3):
            x = b.call(aten.neg, x)
        assert peak(b.output(x)) == (10 + 10 + 10, "aten.neg.default")

    def test_what_is_read_later_stays(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        first = b.call(aten.neg, x)
        second = b.call(aten.abs, first)
        third = b.call(aten.exp, second)
        gm = b.output(b.call(aten.add.Tensor, third, first))
        # neg is still live when add makes its result of exp: neg, exp, add
        assert peak(gm) == (10 + 30, "aten.exp.default")

    def test_outputs_live_to_the_end(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        outputs = [b.call(aten.neg, x) for _ in range(5)]
        assert peak(b.output(*outputs))[0] == 10 + 50

    def test_what_nobody_reads_dies_at_once(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        for _ in range(5):
            b.call(aten.neg, x)
        assert peak(b.output(x))[0] == 10 + 10

    def test_bytes_follow_the_dtype(self):
        b = GraphBuilder()
        x = b.placeholder(8, dtype=torch.bfloat16)
        gm = b.output(b.call(aten._to_copy, x, dtype=torch.float64))
        assert peak_bytes(gm.graph).peak_bytes == 8 * 2 + 8 * 8


class TestPhases:
    """in elements: x(10) -> neg(10) -> cat(20) -> result"""

    def _live(self, **options):
        b = GraphBuilder()
        b.placeholder(7)  # nobody reads it
        x = b.placeholder(10)
        a = b.call(aten.neg, x)
        live = live_bytes(b.output(b.call(aten.cat, [a, a])).graph, **options)
        return live.inputs / 4, [n / 4 for n in live.at_node], [n / 4 for n in live.after]

    def test_a_node_runs_beside_its_inputs_and_then_they_are_freed(self):
        # unused, x, neg, cat, output
        assert self._live() == (17, [17, 17, 27, 47, 37], [17, 17, 27, 37, 37])

    def test_freed_inputs_die_at_their_last_use_and_unused_ones_at_the_end(self):
        inputs, at_node, after = self._live(free_inputs=True)
        assert (inputs, at_node) == (17, [17, 17, 27, 37, 27])
        assert after == [17, 17, 17, 27, 20]

    def test_input_that_is_returned_outlives_the_graph(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        gm = b.output(b.call(aten.view, x, [2, 5]), b.call(aten.neg, x))
        assert live_bytes(gm.graph, free_inputs=True).after[-1] == 4 * 20


class TestStorage:
    def test_views_cost_nothing_and_keep_what_they_view(self):
        """The view of a is read at the end, so a lives beside every later node."""
        b = GraphBuilder()
        x = b.placeholder(10)
        a = b.call(aten.neg, x)
        view = b.call(aten.slice.Tensor, b.call(aten.view, a, [2, 5]), 0, 0, 1)
        other = b.call(aten.exp, b.call(aten.abs, x))
        gm = b.output(b.call(aten.add.Tensor, b.call(aten.view, other, [2, 5]), view))
        assert peak(gm)[0] == 10 + 10 + 10 + 10

    def test_views_are_known_by_schema(self):
        b = GraphBuilder()
        x = b.placeholder(2, 5)
        gm = b.output(b.call(aten.neg, b.call(aten.swapaxes, x, 0, 1)))
        assert peak(gm)[0] == 10 + 10

    @pytest.mark.parametrize("op", [(aten.reshape, [10]), (aten.contiguous,)])
    def test_reshape_costs_a_copy_only_where_the_layout_demands_it(self, op):
        def of(transposed):
            b = GraphBuilder()
            x = b.placeholder(2, 5)
            source = b.call(aten.t, x) if transposed else x
            return peak(b.output(b.call(op[0], source, *op[1:])))[0]

        assert of(transposed=False) == 10
        assert of(transposed=True) == 20

    @pytest.mark.parametrize("unknown", ["source", "result"])
    def test_reshape_without_metadata_counts_as_a_view(self, unknown):
        """Of its input or of itself, as graphs by hand have it."""
        b = GraphBuilder()
        x = b.call(aten.t, b.placeholder(2, 4))
        reshaped = b.call(aten.reshape, x, [8])
        gm = b.output(b.call(aten.relu, b.placeholder(8)), reshaped)
        del (x if unknown == "source" else reshaped).meta["val"]
        assert peak(gm) == (3 * 8, "aten.relu.default")

    def test_reshape_of_a_column_slice_is_a_view_if_rows_stay(self):
        b = GraphBuilder()
        part = b.call(aten.slice.Tensor, b.placeholder(2, 8), 1, 0, 4)
        gm = b.output(b.call(aten.reshape, part, [2, 2, 2]))
        assert peak(gm)[0] == 16

    @settings(deadline=None)  # the first example imports; machines are shared
    @given(st.data())
    def test_reshape_is_a_view_where_torch_says_so(self, data):
        shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=4))
        whole = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
        source = whole[tuple(slice(0, n, data.draw(st.sampled_from([1, 2]))) for n in whole.shape)]
        if data.draw(st.booleans()):
            source = source.unsqueeze(0).expand(2, *source.shape)
        wanted = data.draw(st.sampled_from(_shapes_of(source.numel())))
        try:
            source.view(wanted)
            torch_can = True
        except RuntimeError:
            torch_can = False
        assert can_view(source.shape, source.stride(), wanted) == torch_can

    def test_write_in_place_makes_no_storage(self):
        b = GraphBuilder()
        a = b.call(aten.neg, b.placeholder(10))
        written = b.call(aten.add_.Tensor, a, 1)
        gm = b.output(b.call(aten.exp, written))
        assert peak(gm) == (10 + 10 + 10, "aten.exp.default")

    def test_each_of_several_results_dies_by_itself(self):
        """Two results of 10; the first is read, then dead, when the second is read."""
        b = GraphBuilder()
        xs = [b.placeholder(10) for _ in range(2)]
        copies = b.call(aten._foreach_copy, xs, xs)
        first, second = b.getitem(copies, 0), b.getitem(copies, 1)
        a = b.call(aten.neg, first)
        gm = b.output(b.call(aten.add.Tensor, b.call(aten.exp, a), second))
        # 20 of inputs; copies 20 + neg 10; first dies; then second, neg, exp; second, exp, add
        assert peak(gm) == (20 + 30, "aten.neg.default")

    def test_parts_of_a_split_share_the_storage_of_the_whole(self):
        b = GraphBuilder()
        whole = b.call(aten.neg, b.placeholder(10))
        parts = b.call(aten.split_with_sizes, whole, [4, 6])
        small = b.call(aten.abs, b.getitem(parts, 0))
        gm = b.output(b.call(aten.exp, small), b.getitem(parts, 1))
        assert peak(gm) == (10 + 10 + 4 + 4, "aten.exp.default")

    def test_functional_write_into_a_slice_clones_the_whole_buffer_in_eager_mode(self):
        """40 in a buffer, two slices of 10 written: 2 x 40 by PyTorch, 2 x 10 in compiled code."""
        b = GraphBuilder()
        x = b.placeholder(10)
        buffer = b.call(aten.cat, [x] * 4)
        into = [b.call(aten.slice.Tensor, buffer, 0, 10 * i, 10 * i + 10) for i in (1, 2)]
        copies = b.call(aten._foreach_copy, into, [x, x])
        gm = b.output(b.getitem(copies, 0), b.getitem(copies, 1))
        assert peak(gm) == (10 + 40 + 20, "aten._foreach_copy.default")
        assert peak(gm, eager=True) == (10 + 40 + 80, "aten._foreach_copy.default")

    @pytest.mark.parametrize("op", ["copy", "slice_scatter", "select_scatter"])
    def test_so_do_single_writes(self, op):
        b = GraphBuilder()
        x = b.placeholder(10)
        part = b.call(aten.slice.Tensor, b.call(aten.cat, [x] * 4), 0, 10, 20)
        arguments = {
            "copy": (x,),
            "slice_scatter": (x,),
            "select_scatter": (b.call(aten.select.int, x, 0, 0), 0, 0),
        }
        gm = b.output(b.call(getattr(aten, op), part, *arguments[op]))
        assert peak(gm)[0] == 10 + 40 + 10
        assert peak(gm, eager=True)[0] == 10 + 40 + 40


class TestCollectives:
    def test_payload_lives_until_the_wait_and_the_result_from_the_start(self):
        """cast(10) -> AG(20) ... compute(10) ... W: all three beside the input of 10."""
        b = GraphBuilder()
        x = b.placeholder(10)
        start = b.all_gather(b.call(aten.neg, x), 2, "g")
        b.call(aten.exp, x)
        gm = b.output(b.wait(start))
        assert peak(gm) == (10 + 10 + 20 + 10, "aten.exp.default")

    def test_payload_is_dead_behind_the_wait(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        wait = b.gather_and_wait(b.call(aten.neg, x), 2, "g")
        gm = b.output(wait, b.call(aten.exp, x))
        assert peak(gm)[0] == 10 + 20 + 10

    def test_each_payload_of_a_coalesced_launch_lives_until_its_own_wait(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        first, second = b.all_gather_coalesced([b.call(aten.neg, x) for _ in range(2)], 2, "g")
        one = b.wait(first)
        b.call(aten.exp, b.placeholder(30))
        gm = b.output(one, b.wait(second))
        # at exp: the inputs 10 and 30, both results, the second payload
        assert peak(gm) == (10 + 30 + 40 + 10 + 30, "aten.exp.default")

    def test_results_of_a_coalesced_launch_live_until_its_last_wait(self):
        """One work holds them all: the first is used and dead, yet held until the second wait."""
        b = GraphBuilder()
        x = b.placeholder(10)
        first, second = b.all_gather_coalesced([x, x], 2, "g")
        used = b.call(aten.neg, b.call(aten.slice.Tensor, b.wait(first), 0, 0, 5))
        two = b.wait(second)
        gm = b.output(used, b.call(aten.exp, two))
        after = dict(zip(gm.graph.nodes, live_bytes(gm.graph).after, strict=True))
        assert after[used] == 4 * (10 + 40 + 5)
        assert after[two] == 4 * (10 + 20 + 5)

    def test_payloads_of_a_coalesced_launch_in_eager_mode_live_until_its_last_wait(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        first, second = b.all_gather_coalesced([b.call(aten.neg, x) for _ in range(2)], 2, "g")
        one = b.wait(first)
        gm = b.output(one, b.wait(second))
        place = list(gm.graph.nodes).index(one)
        assert live_bytes(gm.graph).after[place] == 4 * (10 + 40 + 10)
        assert live_bytes(gm.graph, eager=True).after[place] == 4 * (10 + 40 + 20)

    def test_all_reduce_sends_a_copy(self):
        b = GraphBuilder()
        start = b.all_reduce(b.call(aten.neg, b.placeholder(10)), "sum", "g")
        b.call(aten.exp, b.placeholder(30))
        gm = b.output(b.wait(start))
        # at exp: the inputs 10 and 30, the result, exp; neg is dead
        assert peak(gm) == (40 + 10 + 30, "aten.exp.default")

    def test_second_wait_holds_nothing(self):
        b = GraphBuilder()
        x = b.placeholder(10)
        one = b.wait(b.all_gather(b.call(aten.neg, x), 2, "g"))
        gm = b.output(b.wait(b.call(aten.view, one, [4, 5])))
        assert live_bytes(gm.graph).after[-3] == 4 * (10 + 20)

    def test_wait_in_front_of_a_view_of_the_result(self):
        b = GraphBuilder()
        start = b.all_gather(b.placeholder(10), 2, "g")
        gm = b.output(b.wait(b.call(aten.alias, start)))
        assert peak(gm)[0] == 30


class TestOptions:
    def _backward(self):
        """p0 -> AG -> W;  saved activation s -> x;  s is dead when the largest node comes."""
        b = GraphBuilder()
        p, s = b.placeholder(10), b.placeholder(50)
        w = b.gather_and_wait(p, 2, "g")
        small = b.call(aten.slice.Tensor, b.call(aten.mul.Tensor, s, s), 0, 0, 20)
        last = b.call(aten.mul.Tensor, small, w)
        return b.output(b.call(aten.cat, [last] * 10)), p, s

    def test_inputs_may_die_after_their_last_use(self):
        gm, _, _ = self._backward()
        # cat: last 20, its result 200; before it the inputs 60 unless freed
        assert peak(gm)[0] == 60 + 20 + 200
        assert peak(gm, free_inputs=True)[0] == 20 + 200

    def test_unless_the_caller_keeps_them(self):
        gm, p, s = self._backward()
        assert peak(gm, free_inputs=True, kept={p})[0] == 10 + 20 + 200
        assert peak(gm, free_inputs=True, kept={p, s})[0] == 60 + 20 + 200

    def test_shared_sizes_stand_for_what_a_node_makes(self):
        """A shard of 9 elements here; all ranks count 10."""
        b = GraphBuilder()
        x = b.placeholder(9)
        a = b.call(aten.neg, x)
        view = b.call(aten.view, a, [3, 3])
        gm = b.output(b.call(aten.exp, view))
        assert peak(gm)[0] == 27
        assert peak(gm, sizes={x: 40, a: 40, view: 4000})[0] == 10 + 10 + 9

    def test_shared_size_of_several_results_is_split_evenly(self):
        """22 bytes for 4 results of other sizes: 7 for the first, 5 for each of the others."""
        b = GraphBuilder()
        whole = b.placeholder(20)
        parts = [b.call(aten.slice.Tensor, whole, 0, 0, n) for n in (1, 2, 3, 4)]
        made = b.call(aten._foreach_neg, parts)
        gm = b.output(b.getitem(made, 0), b.getitem(made, 1))
        live = live_bytes(gm.graph, sizes={made: 22})
        # the list keeps all of them until the last is taken out
        assert live.at_node[-4:] == (80 + 22, 80 + 22, 80 + 22, 80 + 7 + 5)
        assert live.after[-4:] == (80 + 22, 80 + 22, 80 + 7 + 5, 80 + 7 + 5)

    def test_symbolic_sizes_count_by_the_shared_fallback(self):
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        b = GraphBuilder(mode)
        x = b.placeholder(val=mode.from_tensor(torch.empty(5, 7)))
        guards = len(mode.shape_env.guards)
        gm = b.output(b.call(aten.neg, x))
        assert peak(gm)[0] == 2 * SYMBOLIC_DIM_FALLBACK**2
        assert len(mode.shape_env.guards) == guards


def _shapes_of(numel):
    """Shapes of so many elements, with and without ones."""
    if numel == 0:
        return [[0], [2, 0]]
    shapes = [[numel], [1, numel], [numel, 1]]
    for a in range(2, numel + 1):
        if numel % a == 0:
            shapes += [[a, numel // a], [a, 1, numel // a]]
            shapes += [[a, c, numel // a // c] for c in (2, 3, 4) if numel // a % c == 0]
    return shapes


def test_more_of_the_same_layers_need_the_same_transient_memory():
    """Each layer frees what it made but its gradient (8 of them, 2x4 bf16)."""

    def transient(layers):
        gm = training_graph(layers)
        (output,) = gm.graph.find_nodes(op="output")
        kept = [n.meta["val"] for n in (*gm.graph.find_nodes(op="placeholder"), *output.args[0])]
        return peak_bytes(gm.graph).peak_bytes - sum(t.numel() * t.element_size() for t in kept)

    assert transient(2) == transient(8)


@pytest.fixture(scope="module")
def llama_32_layers(tmp_path_factory):
    """Llama-3-8B on 8 ranks."""
    path = tmp_path_factory.mktemp("capture") / "llama_32l_fsdp8.json.gz"
    packed = ROOT / "test" / "data" / "llama_32l_fsdp8.json.xz"
    path.write_bytes(gzip.compress(lzma.decompress(packed.read_bytes()), compresslevel=1))
    return load_captured(path).graphs


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("form", [None, "default"])
def test_llama_3_8b_at_default_flags(llama_32_layers, form):
    """At most a third of the launches, within 2% of the peak: the promise of default flags."""
    launches = {}
    for name in ("fw", "bw"):
        gm = llama_32_layers[name]
        after = copy.deepcopy(gm)
        report = optimize_graph(after, Options("topo_span", bucket_mode=form))
        assert report.failure is None
        for kind, count in report.collectives_before.items():
            launches[name, kind] = (count, report.collectives_after[kind])
        for options in ({}, {"free_inputs": True}):
            before = peak_bytes(gm.graph, **options).peak_bytes
            assert peak_bytes(after.graph, **options).peak_bytes <= 1.02 * before
    assert {k: n for k, (n, _) in launches.items()} == {
        ("fw", "all_gather"): 291,
        ("bw", "all_gather"): 290,
        ("bw", "reduce_scatter"): 291,
    }
    assert all(after <= 98 for _, after in launches.values()), launches
