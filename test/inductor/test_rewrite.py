"""Merging buckets: both forms, every shape of member, values and layout unchanged on all ranks."""

import copy
import operator

import pytest
import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing import FileCheck

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK, collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import Emitter
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import (
    displaced_share,
    max_consecutive_compute_between_reduce_scatters,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import tensors_of, wait_source
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import check_order, relink
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import Traffic
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
FORMS = ("default", "coalesced")
#: And the copying form as it is made for graphs that are run op by op.
WAYS = (*FORMS, "eager")
GROUPS = {"g": [[0, 1]], "h": [[0, 1]]}


def optimized(gm, way, **options):
    """A bucketed copy of ``gm`` and the report."""
    after = copy.deepcopy(gm)
    eager = way == "eager"
    form = "default" if eager else way
    report = optimize_graph(
        after, Options("topo_span", bucket_mode=form, run_eagerly=eager, **options)
    )
    return after, report


def assert_same_behaviour(before: fx.GraphModule, after: fx.GraphModule):
    """Bitwise equal outputs on both ranks, with equal strides and no new aliasing."""
    inputs = random_inputs(before, 2, seed=0)
    expected = run_spmd(before, copy.deepcopy(inputs), GROUPS, 2)
    actual = run_spmd(after, copy.deepcopy(inputs), GROUPS, 2)
    for one, other in zip(expected, actual, strict=True):
        one, other = list(tensors_of(one)), list(tensors_of(other))
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        assert aliases(one) == aliases(other)


def aliases(tensors):
    storages = [t.untyped_storage().data_ptr() if t.numel() else i for i, t in enumerate(tensors)]
    return [storages.index(s) for s in storages]


def assert_metadata_right(gm: fx.GraphModule):
    """``meta["val"]`` of every call is what its op returns on its arguments."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        arguments, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        mode = next(tensors_of(node.meta["val"])).fake_mode
        with mode:
            fresh = list(tensors_of(node.target(*arguments, **kwargs)))
        stored = list(tensors_of(node.meta["val"]))
        assert [(t.shape, t.stride(), t.dtype) for t in fresh] == [
            (t.shape, t.stride(), t.dtype) for t in stored
        ], node


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


class TestForms:
    def _two_gathers(self):
        """p0 -> AG -> W -> neg;  p1 -> AG -> W -> neg"""
        b = GraphBuilder()
        waits = [b.gather_and_wait(b.placeholder(*s), 2, "g") for s in ((2, 3), (4,))]
        return b.output(*[b.call(aten.neg, w) for w in waits])

    def test_coalesced_keeps_the_waits_of_its_members(self):
        """Others may know them: order dependencies, moves, names in a profile."""
        gm = self._two_gathers()
        waits = [n for n in gm.graph.nodes if wait_source(n) is not None]
        users = [list(wait.users) for wait in waits]
        optimize_graph(gm, Options("topo_span", bucket_mode="coalesced"))
        assert [n for n in gm.graph.nodes if wait_source(n) is not None] == waits
        assert [list(wait.users) for wait in waits] == users
        for wait in waits:
            part = wait_source(wait)
            assert part.target is operator.getitem
            assert BUCKET_MARK in part.args[0].meta

    def test_coalesced_is_one_launch_with_a_wait_for_each_member(self):
        after, _ = optimized(self._two_gathers(), "coalesced")
        FileCheck().check_count("all_gather_into_tensor_coalesced.default", 1, exactly=True).run(
            str(after.graph)
        )
        assert targets(after).count("_c10d_functional.wait_tensor.default") == 2
        assert not [t for t in targets(after) if "cat" in t or "copy" in t or "clone" in t]

    def test_waits_stand_together_whether_or_not_they_read_a_view_of_the_start(self):
        """A view that one rank alone has would else keep a wait, and its memory, further down."""

        def order(op):
            b = GraphBuilder()
            one, other = (b.all_gather(b.placeholder(4), 2, "g") for _ in range(2))
            h = b.call(aten.neg, b.wait(one))
            view = other if op is None else b.call(op, other)
            gm = b.output(b.call(aten.add.Tensor, h, b.wait(view)))
            after, _ = optimized(gm, "coalesced")
            return [
                t for t in targets(after) if t.startswith(("aten.", "_c10d")) and "alias" not in t
            ]

        assert order(None) == order(aten.alias)
        assert order(None)[-4:-2] == ["_c10d_functional.wait_tensor.default"] * 2

    @pytest.mark.parametrize("way", WAYS)
    def test_a_bucket_carries_what_its_members_carried(self, way):
        """Behind a cat, structure sees no parameter; ranks with pads there would count them."""
        after, _ = optimized(self._two_gathers(), way)
        assert [c.traffic for c in collect(after.graph).collectives] == [Traffic.PARAMETER]

    @pytest.mark.parametrize(
        ("way", "copy_out"), [("default", "_foreach_copy"), ("eager", "split_with_sizes_copy")]
    )
    def test_copying_is_one_launch_one_wait_and_one_copy_each_way(self, way, copy_out):
        after, _ = optimized(self._two_gathers(), way)
        found = targets(after)
        assert found.count("_c10d_functional.all_gather_into_tensor.default") == 1
        assert found.count("_c10d_functional.wait_tensor.default") == 1
        copies = [t for t in found if "cat" in t or "copy" in t or "clone" in t]
        assert copies == ["aten.cat.default", f"aten.{copy_out}.default"]

    def test_no_choice_means_zero_copy(self):
        _, report = optimized(self._two_gathers(), None)
        assert [x.form for x in report.buckets] == ["coalesced"]

    @pytest.mark.parametrize("way", ["default", "eager"])
    def test_copies_do_not_grow_with_the_bucket(self, way):
        def copies(members):
            b = GraphBuilder()
            gm = b.output(*[b.gather_and_wait(b.placeholder(4), 2, "g") for _ in range(members)])
            after, _ = optimized(gm, way)
            return len([t for t in targets(after) if "cat" in t or "copy" in t])

        assert copies(4) == copies(40) == 2


def _gather(b, x):
    return b.gather_and_wait(x, 2, "g")


def _scatter(b, x):
    return b.scatter_and_wait(x, "sum", 2, "g")


def _reduce(b, x):
    return b.reduce_and_wait(x, "avg", "g")


KINDS = {"gather": _gather, "scatter": _scatter, "reduce": _reduce}


@pytest.mark.parametrize("form", WAYS)
@pytest.mark.parametrize("kind", KINDS)
class TestMembers:
    def _check(self, b, form, *waits):
        gm = b.output(*waits)
        after, report = optimized(gm, form)
        assert len(report.buckets) == 1
        assert len(report.buckets[0].members) == len(waits)
        assert_same_behaviour(gm, after)
        assert_metadata_right(after)
        return after

    def test_different_shapes(self, form, kind):
        b = GraphBuilder()
        shapes = [(2,), (4, 3), (2, 3, 5), (6, 1)]
        self._check(b, form, *[KINDS[kind](b, b.placeholder(*s)) for s in shapes])

    def test_zero_sized(self, form, kind):
        b = GraphBuilder()
        shapes = [(0,), (2, 3), (2, 0)]
        self._check(b, form, *[KINDS[kind](b, b.placeholder(*s)) for s in shapes])

    def test_non_contiguous(self, form, kind):
        b = GraphBuilder()
        transposed = b.call(aten.t, b.placeholder(3, 4))
        sliced = b.call(aten.slice.Tensor, b.placeholder(4, 6), 1, 1, 4)
        expanded = b.call(aten.expand, b.placeholder(4, 1), [4, 3])
        waits = [KINDS[kind](b, x) for x in (transposed, sliced, expanded)]
        self._check(b, form, *waits)

    def test_bfloat16(self, form, kind):
        b = GraphBuilder()
        xs = [b.placeholder(4, 3, dtype=torch.bfloat16) for _ in range(3)]
        self._check(b, form, *[KINDS[kind](b, x) for x in xs])

    def test_several_users_and_an_output_of_the_wait(self, form, kind):
        b = GraphBuilder()
        waits = [KINDS[kind](b, b.placeholder(4, 2)) for _ in range(2)]
        casts = [b.call(aten._to_copy, w, dtype=torch.float64) for w in waits]
        gm = b.output(*casts, *waits, waits[0])
        after, report = optimized(gm, form)
        assert len(report.buckets) == 1
        assert_same_behaviour(gm, after)

    def test_views_between_start_and_wait(self, form, kind):
        b = GraphBuilder()
        waits = []
        for _ in range(2):
            start = KINDS[kind](b, b.placeholder(4, 2)).args[0]
            waits.append(b.wait(b.call(aten.alias, b.call(aten.detach, start))))
        for node in [n for n in b.graph.nodes if not n.users and n not in waits]:
            b.graph.erase_node(node)
        self._check(b, form, *waits)

    def test_two_waits_on_one_start(self, form, kind):
        b = GraphBuilder()
        first = KINDS[kind](b, b.placeholder(4, 2))
        second = KINDS[kind](b, b.placeholder(4, 2))
        again = b.wait(first.args[0])
        gm = b.output(first, second, again)
        after, report = optimized(gm, form)
        assert len(report.buckets) == 1
        inputs = random_inputs(gm, 2, seed=0)
        for one, other in zip(
            run_spmd(gm, inputs, GROUPS, 2), run_spmd(after, inputs, GROUPS, 2), strict=True
        ):
            assert all(map(torch.equal, one, other))

    def test_second_run_changes_nothing(self, form, kind):
        b = GraphBuilder()
        gm = b.output(*[KINDS[kind](b, b.placeholder(4, 2)) for _ in range(3)])
        once, _ = optimized(gm, form)
        twice, report = optimized(once, form)
        assert report.buckets == ()
        assert twice.code == once.code

    def test_no_dangling_mark_and_metadata_carried(self, form, kind):
        b = GraphBuilder()
        gm = b.output(*[KINDS[kind](b, b.placeholder(4, 2)) for _ in range(2)])
        for node in gm.graph.nodes:
            node.meta["custom"] = {"of": node.name}
        after, _ = optimized(gm, form)
        marked = [n for n in after.graph.nodes if BUCKET_MARK in n.meta]
        assert [n.meta[BUCKET_MARK] for n in marked] == [
            {"bucket": 0, "members": 2, "traffic": "parameter" if kind == "gather" else "gradient"}
        ]
        assert all("custom" in n.meta for n in after.graph.nodes if n.op == "call_function")


class TestScalars:
    @pytest.mark.parametrize("form", WAYS)
    @pytest.mark.parametrize("build", [_gather, _reduce])
    def test_scalar_members(self, form, build):
        b = GraphBuilder()
        gm = b.output(build(b, b.placeholder(())), build(b, b.placeholder(3)))
        after, report = optimized(gm, form)
        assert len(report.buckets) == 1
        assert_same_behaviour(gm, after)
        assert_metadata_right(after)


class TestCasts:
    def _casts(self, shared, device_cast=False):
        b = GraphBuilder()
        outputs, waits = [], []
        for _ in range(2):
            cast = b.call(aten._to_copy, b.placeholder(4), dtype=torch.bfloat16)
            waits.append(b.gather_and_wait(cast, 2, "g"))
            if shared:
                outputs.append(b.call(aten.neg, cast))
        return b.output(*waits, *outputs)

    def test_cast_is_absorbed_by_a_copying_bucket(self):
        gm = self._casts(shared=False)
        after, _ = optimized(gm, "default")
        assert targets(after).count("aten._to_copy.default") == 1
        assert_same_behaviour(gm, after)
        assert_metadata_right(after)

    def test_cast_that_somebody_else_reads_is_kept(self):
        gm = self._casts(shared=True)
        after, _ = optimized(gm, "default")
        assert targets(after).count("aten._to_copy.default") == 2
        assert_same_behaviour(gm, after)

    def test_casts_from_different_dtypes_are_kept(self):
        b = GraphBuilder()
        xs = [b.placeholder(4, dtype=d) for d in (torch.float32, torch.float64)]
        casts = [b.call(aten._to_copy, x, dtype=torch.bfloat16) for x in xs]
        gm = b.output(*[b.gather_and_wait(c, 2, "g") for c in casts])
        after, report = optimized(gm, "default")
        assert len(report.buckets) == 1
        assert targets(after).count("aten._to_copy.default") == 2
        assert_same_behaviour(gm, after)


class TestSymbolicSizes:
    @pytest.mark.parametrize("form", FORMS)
    def test_members_merge_without_writing_a_size(self, form):
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        b = GraphBuilder(mode)
        waits = [
            b.gather_and_wait(b.placeholder(val=mode.from_tensor(torch.empty(n, 3))), 2, "g")
            for n in (5, 7)
        ]
        gm = b.output(*waits)
        guards = len(mode.shape_env.guards)
        after = copy.copy(gm)
        report = optimize_graph(after, Options("topo_span", bucket_mode=form, bucket_cap_mb=1e4))
        assert [x.form for x in report.buckets] == ["coalesced"]
        assert len(mode.shape_env.guards) == guards
        leaves = []
        for node in after.graph.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
        assert not [x for x in leaves if isinstance(x, torch.SymInt)]


class TestGroupArgument:
    @pytest.mark.parametrize("form", FORMS)
    def test_group_node_is_reused_and_stands_before_the_bucket(self, form):
        b = GraphBuilder()
        x, y = b.placeholder(4), b.placeholder(4)
        mesh = b.opaque_placeholder("mesh")
        starts = []
        for source in (x, y):
            group = b.graph.call_function(getattr, (mesh, "g"))
            start = b.graph.call_function(
                torch.ops._c10d_functional.all_gather_into_tensor.default, (source, 2, group)
            )
            with b.fake_mode:
                start.meta["val"] = torch.empty(8)
            starts.append(start)
        gm = b.output(*[b.wait(s) for s in starts])
        report = optimize_graph(gm, Options("topo_span", bucket_mode=form))
        assert len(report.buckets) == 1
        (start,) = [n for n in gm.graph.nodes if BUCKET_MARK in n.meta]
        assert isinstance(start.args[2], fx.Node)
        gm.graph.lint()

    @pytest.mark.parametrize("form", FORMS)
    def test_legacy_namespace_keeps_its_arguments(self, form):
        b = GraphBuilder()
        legacy = torch.ops.c10d_functional
        waits = []
        for _ in range(2):
            start = b.graph.call_function(
                legacy.all_reduce.default, (b.placeholder(4), "sum", "tag", [0, 1], 2)
            )
            with b.fake_mode:
                start.meta["val"] = torch.empty(4)
            waits.append(b.call(legacy.wait_tensor, start))
        gm = b.output(*waits)
        after = copy.deepcopy(gm)
        report = optimize_graph(after, Options("topo_span", bucket_mode=form))
        assert len(report.buckets) == 1
        (start,) = [n for n in after.graph.nodes if BUCKET_MARK in n.meta]
        assert start.args[1:] == ("sum", "tag", [0, 1], 2)
        assert_same_behaviour(gm, after)


class TestPlacement:
    """Only what must move moves."""

    def _displaced(self, gm, form):
        before = [n for n in gm.graph.nodes if wait_source(n) is None]  # all go into the bucket
        report = optimize_graph(gm, Options("topo_span", bucket_mode=form))
        assert len(report.buckets) == 1
        assert report.displaced_share == displaced_share(before, list(gm.graph.nodes))
        return report.displaced_share

    @pytest.mark.parametrize("form", FORMS)
    def test_gathers_go_to_the_first_member_and_compute_stays(self, form):
        """p_i -> AG -> W;  x = mm(x, W_i)"""
        b = GraphBuilder()
        x = b.placeholder(4, 4)
        for _ in range(6):
            x = b.call(aten.mm, x, b.gather_and_wait(b.placeholder(2, 4), 2, "g"))
        assert self._displaced(b.output(x), form) == 0

    @pytest.mark.parametrize("form", FORMS)
    def test_scatters_go_to_the_last_member_and_compute_stays(self, form):
        b = GraphBuilder()
        x, waits = b.placeholder(4, 4), []
        for _ in range(6):
            x = b.call(aten.mm, x, x)
            waits.append(b.scatter_and_wait(x, "sum", 2, "g"))
        gm = b.output(x, *waits)
        assert self._displaced(gm, form) == 0
        assert max_consecutive_compute_between_reduce_scatters(gm.graph) == 6

    @pytest.mark.parametrize("form", FORMS)
    def test_late_waits_stay_late(self, form):
        """All waits at the end: the merged wait must not move up to its start."""
        b = GraphBuilder()
        x, starts = b.placeholder(4, 4), []
        for _ in range(3):
            x = b.call(aten.mm, x, x)
            starts.append(b.reduce_scatter(x, "sum", 2, "g"))
        x = b.call(aten.mm, x, x)
        gm = b.output(x, *[b.wait(s) for s in starts])
        optimize_graph(gm, Options("topo_span", bucket_mode=form))
        names = targets(gm)
        last_mm = max(i for i, t in enumerate(names) if t == "aten.mm.default")
        assert names.index("_c10d_functional.wait_tensor.default") > last_mm

    def test_casts_move_up_with_their_gather_and_nothing_else_does(self):
        b = GraphBuilder()
        x = b.placeholder(4, 4, dtype=torch.bfloat16)
        for _ in range(3):
            cast = b.call(aten._to_copy, b.placeholder(2, 4), dtype=torch.bfloat16)
            w = b.gather_and_wait(cast, 2, "g")
            for _ in range(5):
                x = b.call(aten.mm, x, w)
        gm = b.output(x)
        report = optimize_graph(gm, Options("topo_span", bucket_mode="coalesced"))
        assert report.displaced_share == pytest.approx(2 / 18)  # two casts of 3 + 15 nodes

    @pytest.mark.parametrize("form", FORMS)
    def test_mutation_of_a_payload_is_not_crossed(self, form):
        """AG(x0) -> W;  x1.add_(1);  AG(x1) -> W: the second gather must read the new value."""
        b = GraphBuilder()
        x0, x1 = b.placeholder(4), b.placeholder(4)
        first = b.gather_and_wait(x0, 2, "g")
        b.call(aten.add_.Tensor, x1, 1)
        second = b.gather_and_wait(x1, 2, "g")
        b.call(aten.add_.Tensor, x0, 1)  # after the first gather has read it
        gm = b.output(first, second)
        after, _ = optimized(gm, form)
        assert_same_behaviour(gm, after)

    @pytest.mark.parametrize("form", FORMS)
    def test_copies_in_follow_the_write_of_their_payload(self, form):
        """AG_a; buffer.copy_(AG_a); AG_b(buffer): where the bucket of a sinks, the write is late."""
        b = GraphBuilder()
        first_a, first_b, buffer, far = (b.placeholder(2, 4) for _ in range(4))
        gathered = b.gather_and_wait(first_a, 2, "g")
        update = b.call(aten.slice.Tensor, gathered, 0, 0, 2)
        other = b.gather_and_wait(first_b, 2, "h")
        b.call(aten.copy_, buffer, update)
        late = b.gather_and_wait(buffer, 2, "h")
        for dtype in [torch.float64, torch.float32] * 4:  # many casts: sinking is cheaper
            far = b.call(aten._to_copy, far, dtype=dtype)
        gm = b.output(gathered, other, late, b.gather_and_wait(far, 2, "g"))
        after, report = optimized(gm, form)
        assert len(report.buckets) == 2
        assert_same_behaviour(gm, after)

    def test_no_op_views_do_not_change_the_order_of_the_rest(self):
        def order(no_ops):
            b = GraphBuilder()
            x, waits = b.placeholder(4, 4), []
            for _ in range(4):
                x = b.call(aten.mm, x, x)
                y = b.call(aten.alias, x) if no_ops else x
                w = b.scatter_and_wait(y, "sum", 2, "g")
                waits.append(b.call(aten.alias, w) if no_ops else w)
            gm = b.output(x, *waits)
            optimize_graph(gm, Options("topo_span"))
            return [t for t in targets(gm) if "alias" not in t]

        assert order(no_ops=True) == order(no_ops=False)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_bucket_stands_behind_those_that_feed_it(self, way):
        """g0 -> RS -> AR, g1 -> RS -> AR, mm x 8, g2 -> RS: what the last one needs does not move up
        with the all-reduces, over other compute (neg), with or without a view in front of one."""

        def order(no_ops):
            b = GraphBuilder()
            x, y, waits = b.placeholder(4, 4), b.placeholder(4), []
            for place in range(3):
                for _ in range(1 if place < 2 else 8):
                    x, y = b.call(aten.mm, x, x), b.call(aten.neg, y)
                w = b.scatter_and_wait(x, "sum", 2, "g")
                w = b.call(aten.alias, w) if no_ops and place == 1 else w
                waits.append(b.reduce_and_wait(w, "sum", "h") if place < 2 else w)
            after, report = optimized(b.output(x, y, *waits), way)
            assert [len(bucket.members) for bucket in report.buckets] == [3, 2]
            names = [t for t in targets(after) if "alias" not in t]
            assert names[:20] == ["aten.mm.default", "aten.neg.default"] * 10
            return names

        assert order(no_ops=True) == order(no_ops=False)


class TestMetrics:
    def test_max_consecutive_compute_counts_from_the_start_or_the_last_scatter(self):
        b = GraphBuilder()
        x = b.placeholder(4, 4)
        for run in (3, 5, 1):
            for _ in range(run):
                x = b.call(aten.mm, x, x)
            w = b.scatter_and_wait(b.call(aten.neg, x), "sum", 2, "g")
        for _ in range(9):
            x = b.call(aten.mm, x, x)
        assert max_consecutive_compute_between_reduce_scatters(b.output(x, w).graph) == 5

    def test_attention_of_a_higher_order_op_counts_as_compute(self):
        b = GraphBuilder()
        x = b.placeholder(4, 4)
        attention = torch.ops.higher_order.flex_attention
        for _ in range(2):
            node = b.graph.call_function(attention, (x, x, x))
            node.meta["val"] = (x.meta["val"],)
            x = b.getitem(node, 0)
        gm = b.output(b.scatter_and_wait(x, "sum", 2, "g"))
        assert max_consecutive_compute_between_reduce_scatters(gm.graph) == 2

    def test_max_consecutive_compute_without_scatters_is_zero(self):
        b = GraphBuilder()
        x = b.placeholder(4, 4)
        assert (
            max_consecutive_compute_between_reduce_scatters(b.output(b.call(aten.mm, x, x)).graph)
            == 0
        )

    def test_displaced_share_is_what_lies_outside_a_longest_common_subsequence(self):
        graph = fx.Graph()
        nodes = [graph.call_function(operator.add, (1, 2)) for _ in range(5)]
        moved = [nodes[4], *nodes[:4]]
        assert displaced_share(nodes, nodes) == 0
        assert displaced_share(nodes, moved) == pytest.approx(1 / 5)
        assert displaced_share(nodes, nodes[::-1]) == pytest.approx(4 / 5)
        assert displaced_share(nodes, nodes[:2]) == 0  # only survivors count


def test_bucket_membership_is_read_back_as_already_bucketed():
    b = GraphBuilder()
    gm = b.output(*[b.gather_and_wait(b.placeholder(4), 2, "g") for _ in range(2)])
    optimize_graph(gm, Options("topo_span"))
    (found,) = collect(gm.graph).collectives
    assert found.refusal is not None
    assert len(found.waits) == 2


def test_what_leaves_the_graph_is_replaced_at_the_end_through_every_step():
    """a becomes b, and b becomes c; the output, which is read once, has c."""
    b = GraphBuilder()
    first = b.call(aten.neg, b.placeholder(2))
    second, third = b.call(aten.neg, first), b.call(aten.neg, first)
    gm = b.output({"x": [first, second]}, first)
    emitter = Emitter(gm.graph, frozenset(), False)
    emitter.replace(first, second)
    second.args = (gm.graph.find_nodes(op="placeholder")[0],)
    third.args = second.args
    emitter.replace(second, third)
    emitter.erase([first, second])
    assert not first._erased
    emitter.finish()
    assert first._erased
    (output,) = gm.graph.find_nodes(op="output")
    assert list(output.all_input_nodes) == [third]
    gm.graph.lint()


def unary_chain():
    graph = fx.Graph()
    first = graph.placeholder("x")
    second = graph.call_function(aten.relu.default, (first,))
    third = graph.call_function(aten.neg.default, (second,))
    graph.output(third)
    return graph, second, third


def test_the_check_of_an_order_sees_a_reader_in_front():
    graph, second, third = unary_chain()
    check_order(graph)
    first, *_, output = graph.nodes
    relink(graph, [first, third, second, output])
    with pytest.raises(RuntimeError, match="reads what stands behind"):
        check_order(graph)


def test_the_check_of_an_order_sees_what_is_in_another_graph():
    graph, _, third = unary_chain()
    third.args = (unary_chain()[1],)
    with pytest.raises(RuntimeError, match="not in the graph"):
        check_order(graph)


def test_the_check_of_an_order_sees_one_name_twice():
    graph, second, third = unary_chain()
    third.name = second.name
    with pytest.raises(RuntimeError, match="one name"):
        check_order(graph)
