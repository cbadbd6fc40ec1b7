"""Reading the skeleton: which nodes are collectives, of what key, and what keeps them apart."""

import operator

import pytest
import torch
import torch.fx as fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.wrap import wrap  # a higher-order op that no pass knows
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._ordered_set import OrderedSet

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import (
    SYMBOLIC_DIM_FALLBACK,
    report_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BarrierKind,
    CollectiveKind,
    RefusalReason,
    Traffic,
)
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def only(gm: fx.GraphModule):
    (collective,) = collect(gm.graph).collectives
    return collective


def _group_of(mesh, dims):
    raise NotImplementedError


class TestKinds:
    def test_all_gather_has_key_bytes_and_wait(self):
        b = GraphBuilder()
        x = b.placeholder(4, 8, dtype=torch.bfloat16)
        start = b.all_gather(x, 2, "fsdp")
        wait = b.wait(start)
        found = only(b.output(wait))
        assert found.kind is CollectiveKind.ALL_GATHER
        assert (found.start, found.waits) == (start, (wait,))
        assert (found.key.group, found.key.group_size) == ("fsdp", 2)
        assert found.key.dtype is torch.bfloat16
        assert (found.input_bytes, found.output_bytes, found.size_bytes) == (64, 128, 128)
        assert found.refusal is None

    def test_reduce_scatter_has_reduce_op_and_counts_its_input(self):
        b = GraphBuilder()
        found = only(b.output(b.scatter_and_wait(b.placeholder(4, 8), "avg", 2, "fsdp")))
        assert found.kind is CollectiveKind.REDUCE_SCATTER
        assert found.key.reduce_op == "avg"
        assert (found.size_bytes, found.output_bytes) == (128, 64)

    def test_all_reduce_group_size_is_unknown_without_a_registry(self):
        b = GraphBuilder()
        found = only(b.output(b.reduce_and_wait(b.placeholder(4), "sum", "dp")))
        assert found.kind is CollectiveKind.ALL_REDUCE
        assert (found.key.group_size, found.ranks) == (None, None)

    @pytest.mark.parametrize(
        ("build", "kind"),
        [
            (lambda b, x: b.all_to_all(x, [2, 2], [2, 2], "ep"), CollectiveKind.ALL_TO_ALL),
            (lambda b, x: b.broadcast(x, 0, "ep"), CollectiveKind.BROADCAST),
        ],
    )
    def test_cannot_merge_all_to_all_and_broadcast(self, build, kind):
        b = GraphBuilder()
        found = only(b.output(b.wait(build(b, b.placeholder(4)))))
        assert found.kind is kind
        assert found.refusal is RefusalReason.KIND_NOT_MERGEABLE

    def test_legacy_namespace_names_the_group_by_its_ranks(self):
        b = GraphBuilder()
        legacy = torch.ops.c10d_functional
        starts = []
        for ranks in ([0, 1], [0, 1], [2, 3]):
            node = b.graph.call_function(
                legacy.all_gather_into_tensor.default, (b.placeholder(4), "", ranks, 2)
            )
            with b.fake_mode:
                node.meta["val"] = torch.empty(8)
            starts.append(node)
        waits = [b.call(legacy.wait_tensor, s) for s in starts]
        first, second, third = collect(b.output(*waits).graph).collectives
        assert first.key == second.key
        assert first.key != third.key
        assert first.key.group_size == 2

    def test_coalesced_start_has_a_wait_for_each_getitem(self):
        b = GraphBuilder()
        parts = b.all_gather_coalesced([b.placeholder(4), b.placeholder(6)], 2, "fsdp")
        waits = [b.wait(p) for p in parts]
        found = only(b.output(*waits))
        assert found.waits == tuple(waits)
        assert (found.input_bytes, found.output_bytes) == (40, 80)
        assert found.refusal is RefusalReason.COALESCED_IN_INPUT

    def test_coalesced_result_is_there_at_the_first_of_its_waits(self):
        """Its place is counted in working nodes: the start, the sum, and what stands between."""
        b = GraphBuilder()
        one, two = b.all_gather_coalesced([b.placeholder(4), b.placeholder(4)], 2, "fsdp")
        gathered = b.wait(one)
        for _ in range(3):
            gathered = b.call(aten.tanh, gathered)
        found = only(b.output(gathered, b.wait(two)))
        assert found.wait_position - found.position < 3
        assert len(found.waits) == 2

    def test_coalesced_reductions_of_the_input_are_not_merged(self):
        b = GraphBuilder()
        xs = [b.placeholder(4), b.placeholder(6)]
        parts = b.reduce_scatter_coalesced(xs, "sum", 2, "fsdp")
        parts += b.all_reduce_coalesced(xs, "sum", "fsdp")
        found = collect(b.output(*map(b.wait, parts)).graph).collectives
        assert {c.refusal for c in found} == {RefusalReason.COALESCED_IN_INPUT}
        assert [c.output_bytes for c in found] == [20, 40]

    def test_group_that_is_computed_is_named_by_the_computation(self):
        """Of a mesh and a list of dimensions; equal ones are one group."""
        b = GraphBuilder()
        mesh = b.opaque_placeholder("mesh")
        waits = []
        for dims in ([0, 1], [0, 1], [0, 2]):
            group = b.graph.call_function(_group_of, (mesh, dims))
            start = b.graph.call_function(
                c10d.all_gather_into_tensor.default, (b.placeholder(4), 2, group)
            )
            with b.fake_mode:
                start.meta["val"] = torch.empty(8)
            waits.append(b.wait(start))
        first, second, third = collect(b.output(*waits).graph).collectives
        assert first.group == second.group != third.group

    @pytest.mark.parametrize("form", ["in_place", "out"])
    def test_cannot_merge_forms_that_write_an_argument(self, form):
        b = GraphBuilder()
        x, out = b.placeholder(4), b.placeholder(8)
        if form == "in_place":
            start = b.call(c10d.all_reduce_, x, "sum", "dp")
        else:
            start = b.call(c10d.all_gather_into_tensor_out, x, 2, "dp", out=out)
        skeleton = collect(b.output(b.wait(start)).graph)
        assert skeleton.collectives[0].refusal is RefusalReason.MUTATES_ARGUMENT
        assert [k.kind for k in skeleton.barriers] == [BarrierKind.MUTATION]

    def test_collective_inside_control_deps_is_seen_and_not_merged(self):
        b = GraphBuilder()
        x, y = b.placeholder(4), b.placeholder(4, 4)
        mm = b.call(aten.mm, y, y)
        start = b.all_gather(x, 2, "fsdp")
        gm = b.output(b.wait(start), mm)
        preserve_node_ordering(gm.graph, {start: OrderedSet([mm])})
        found = only(gm)
        assert found.kind is CollectiveKind.ALL_GATHER
        assert found.key.group == "fsdp"
        assert len(found.waits) == 1
        assert found.refusal is RefusalReason.WRAPPED


class TestWaits:
    def test_wait_behind_views_belongs_to_its_start(self):
        b = GraphBuilder()
        start = b.all_gather(b.placeholder(4), 2, "fsdp")
        view = b.call(aten.view, b.call(aten.alias, b.call(aten.detach, start)), [2, 4])
        wait = b.wait(view)
        found = only(b.output(wait))
        assert found.waits == (wait,)
        assert found.refusal is None

    def test_start_with_two_waits(self):
        b = GraphBuilder()
        start = b.all_gather(b.placeholder(4), 2, "fsdp")
        waits = (b.wait(start), b.wait(start))
        assert only(b.output(*waits)).waits == waits

    def test_wait_on_placeholder_is_no_collective(self):
        b = GraphBuilder()
        assert collect(b.output(b.wait(b.placeholder(4))).graph).collectives == ()

    def test_cannot_merge_start_without_a_wait(self):
        b = GraphBuilder()
        assert only(b.output(b.all_gather(b.placeholder(4), 2, "g"))).refusal in (
            RefusalReason.NO_WAIT,
        )

    def test_cannot_merge_start_used_before_its_wait(self):
        b = GraphBuilder()
        start = b.all_gather(b.placeholder(4), 2, "fsdp")
        gm = b.output(b.wait(start), b.call(aten.neg, start))
        assert only(gm).refusal is RefusalReason.USED_BEFORE_WAIT


class _Group:
    def __init__(self, name):
        self.group_name = name


class TestGroups:
    def test_string_node_and_object_give_one_key(self):
        b = GraphBuilder()
        node = b.opaque_placeholder("pg")
        node.meta["val"] = _Group("fsdp")
        starts = []
        for group in ("fsdp", node, _Group("fsdp")):
            with b.fake_mode:
                value = torch.empty(8)
            starts.append(
                b.graph.call_function(
                    c10d.all_gather_into_tensor.default, (b.placeholder(4), 2, group)
                )
            )
            starts[-1].meta["val"] = value
        waits = [b.wait(s) for s in starts]
        node.meta["val"] = _Group("fsdp")
        b.graph.output(tuple(waits))
        keys = {c.key for c in collect(b.graph).collectives}
        assert len(keys) == 1

    def test_nodes_that_compute_one_group_give_one_key_whatever_their_names(self):
        def graph(rename):
            b = GraphBuilder()
            mesh, other = b.opaque_placeholder("mesh"), b.opaque_placeholder("other")
            starts = []
            for source in (mesh, mesh, other):
                group = b.graph.call_function(getattr, (source, "group"))
                group.meta["val"] = None
                start = b.graph.call_function(
                    c10d.all_gather_into_tensor.default, (b.placeholder(4), 2, group)
                )
                with b.fake_mode:
                    start.meta["val"] = torch.empty(8)
                starts.append(start)
            waits = [b.wait(s) for s in starts]
            b.graph.output(tuple(waits))
            if rename:
                for i, n in enumerate(b.graph.nodes):
                    n.name = f"renamed_{i}"
            return [c.key for c in collect(b.graph).collectives]

        first, second, third = graph(rename=False)
        assert first == second != third
        assert graph(rename=True) == [first, second, third]

    def test_mesh_placeholder_without_a_tensor_is_harmless(self):
        b = GraphBuilder()
        b.opaque_placeholder("mesh")
        assert only(b.output(b.gather_and_wait(b.placeholder(4), 2, "g"))).refusal is None


class TestPositions:
    def test_views_do_not_count(self):
        def position(no_ops):
            b = GraphBuilder()
            x = b.call(aten.neg, b.placeholder(4))
            for op in no_ops:
                x = b.call(op, x)
            x = b.call(aten.slice.Tensor, x, 0, 0, 4) if no_ops else x
            return only(b.output(b.gather_and_wait(x, 2, "g"))).position

        assert position([]) == position([aten.alias, aten.detach, aten.alias]) == 1

    def test_padding_and_cutting_of_shards_do_not_count(self):
        """A rank with a short shard pads before a gather and cuts after a scatter; others do not."""

        def positions(short):
            b = GraphBuilder()
            rows = 3 if short else 4
            waits = []
            for _ in range(3):
                shard = b.placeholder(rows, 2)
                if short:
                    shard = b.call(aten.constant_pad_nd, shard, [0, 0, 0, 1])
                b.gather_and_wait(shard, 2, "g")
                gradient = b.scatter_and_wait(b.call(aten.neg, b.placeholder(8, 2)), "sum", 2, "g")
                if short:
                    gradient = b.call(aten.slice.Tensor, gradient, 0, 0, rows)
                waits.append(gradient)
            return [c.position for c in collect(b.output(*waits).graph).collectives]

        assert positions(short=True) == positions(short=False)

    def test_slices_of_activations_count(self):
        b = GraphBuilder()
        x = b.call(aten.slice.Tensor, b.call(aten.neg, b.placeholder(4)), 0, 0, 2)
        y = b.call(aten.neg, x)
        gm = b.output(b.gather_and_wait(y, 2, "g"))
        assert only(gm).position == 3

    def test_transposes_count(self):
        b = GraphBuilder()
        x = b.call(aten.t, b.placeholder(4, 4))
        assert only(b.output(b.gather_and_wait(x, 2, "g"))).position == 1


class TestSymbolicSizes:
    def _graph(self, hint):
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        b = GraphBuilder(mode)
        x = b.placeholder(val=mode.from_tensor(torch.empty(hint, 8)))
        y = b.call(aten.neg, x)
        return mode, b.output(b.gather_and_wait(y, 2, "g"))

    def test_decision_uses_the_fallback_and_the_report_the_hint(self):
        found = {}
        for hint in (6, 10):
            mode, gm = self._graph(hint)
            guards = len(mode.shape_env.guards)
            found[hint] = only(gm)
            assert len(mode.shape_env.guards) == guards  # reading adds no guard
        assert found[6].has_symbolic_size
        assert found[6].size_bytes == found[10].size_bytes == 2 * SYMBOLIC_DIM_FALLBACK**2 * 4
        assert report_bytes(found[10].output_bytes) == 2 * 10 * 8 * 4


class TestTraffic:
    def test_gather_of_a_parameter_through_casts_views_and_pads(self):
        b = GraphBuilder()
        x = b.placeholder(3, 4)
        x = b.call(aten.constant_pad_nd, x, [0, 0, 0, 1])
        x = b.call(aten._to_copy, x, dtype=torch.bfloat16)
        x = b.call(aten.view, x, [16])
        assert only(b.output(b.gather_and_wait(x, 2, "g"))).traffic is Traffic.PARAMETER

    def test_gather_of_compute_is_no_parameter(self):
        b = GraphBuilder()
        p = b.placeholder(4, 4)
        gm = b.output(b.gather_and_wait(b.call(aten.mm, p, p), 2, "g"))
        assert only(gm).traffic is Traffic.OTHER

    def test_scatter_that_ends_in_outputs_is_a_gradient(self):
        b = GraphBuilder()
        previous = b.placeholder(2)
        wait = b.scatter_and_wait(b.call(aten.neg, b.placeholder(4)), "sum", 2, "g")
        cast = b.call(aten._to_copy, wait, dtype=torch.float64)
        total = b.call(aten.add.Tensor, previous, wait)
        assert only(b.output(cast, total)).traffic is Traffic.GRADIENT

    def test_scatter_that_also_feeds_compute_is_no_gradient(self):
        b = GraphBuilder()
        wait = b.scatter_and_wait(b.placeholder(4, 4), "sum", 2, "g")
        product = b.call(aten.mm, wait, b.placeholder(4, 4))
        assert only(b.output(wait, product)).traffic is Traffic.OTHER

    def test_hsdp_scatter_then_all_reduce_are_both_gradients(self):
        b = GraphBuilder()
        wait = b.scatter_and_wait(b.placeholder(4), "sum", 2, "shard")
        gm = b.output(b.reduce_and_wait(wait, "sum", "replicate"))
        assert [c.traffic for c in collect(gm.graph).collectives] == [Traffic.GRADIENT] * 2


@torch.library.custom_op("torch_patches_test::unknown_effect", mutates_args=("x",))
def unknown_effect(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("torch_patches_test::send", mutates_args=())
def send(x: torch.Tensor) -> None:
    return None


def _barriers(build):
    b = GraphBuilder()
    x = b.placeholder(4)
    build(b, x)
    gm = b.output(b.gather_and_wait(x, 2, "g"))
    skeleton = collect(gm.graph)
    return [k.kind for k in skeleton.barriers], skeleton


class TestBarriers:
    @pytest.mark.parametrize(
        "build",
        [
            lambda b, x: b.call(torch.ops.torch_patches_test.unknown_effect, x),
            lambda b, x: b.graph.call_function(torch.ops.torch_patches_test.send.default, (x,)),
            lambda b, x: b.graph.call_method("add_", (x, 1)),
            lambda b, x: b.graph.call_function(print, (x,)),
            lambda b, x: b.graph.call_function(operator.setitem, (x, 0, 1)),
            lambda b, x: b.graph.call_function(wrap, (x,)),
        ],
        ids=["mutating", "void", "method", "print", "setitem", "higher_order"],
    )
    def test_unknown_side_effects_are_barriers(self, build):
        kinds, skeleton = _barriers(build)
        assert kinds == [BarrierKind.EFFECT]
        assert skeleton.collectives[0].segment == 1

    @pytest.mark.parametrize(
        ("op", "kinds"),
        [
            (aten.add_.Tensor, []),
            (torch.ops.torch_patches_test.unknown_effect.default, [BarrierKind.EFFECT]),
        ],
        ids=["known", "unknown"],
    )
    def test_functionalized_op_is_a_barrier_where_it_is_unknown(self, op, kinds):
        functionalized = torch.ops.higher_order.auto_functionalized
        found, _ = _barriers(lambda b, x: b.graph.call_function(functionalized, (op,), {"x": x}))
        assert found == kinds

    def test_op_whose_effect_is_registered_is_a_barrier(self):
        """It mutates nothing and returns a tensor; its twin without an effect is none."""
        from torch._higher_order_ops import effects

        with torch.library._scoped_library("effect_test", "DEF") as library:
            for name in ("logged", "plain"):
                library.define(f"{name}(Tensor x) -> Tensor")
                library.impl(name, torch.clone, "CompositeExplicitAutograd")
                library.impl(name, torch.empty_like, "Meta")
            logged, plain = torch.ops.effect_test.logged, torch.ops.effect_test.plain
            ordered = effects._EffectType.ORDERED
            handle = effects._register_effectful_op(logged.default, ordered)
            try:
                kinds, _ = _barriers(lambda b, x: b.graph.call_function(logged.default, (x,)))
                assert kinds == [BarrierKind.EFFECT]
                assert _barriers(lambda b, x: b.call(plain, x))[0] == []
            finally:
                if handle is not None:
                    handle.destroy()

    @pytest.mark.parametrize(
        "op",
        [
            "_c10d_functional.isend",
            "_c10d_functional.irecv",
            "_c10d_functional_autograd.all_to_all_single",
        ],
    )
    def test_communication_that_is_no_known_collective_is_a_barrier(self, op):
        namespace, name = op.split(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:  # point-to-point ops came after 2.11
            packet = torch.ops._c10d_functional_autograd.reduce_scatter_tensor
        kinds, skeleton = _barriers(
            lambda b, x: b.graph.call_function(packet.default, (x, 1, 0, "g"))
        )
        assert kinds == [BarrierKind.EFFECT]
        assert skeleton.collectives[0].segment == 1

    @pytest.mark.parametrize(
        "build",
        [
            lambda b, x: b.call(aten.mm, b.placeholder(2, 2), b.placeholder(2, 2)),
            lambda b, x: b.graph.call_function(operator.add, (1, 2)),
            lambda b, x: b.graph.call_function(aten._assert_async.msg, (x, "m")),
        ],
        ids=["mm", "scalar", "assert"],
    )
    def test_pure_and_local_ops_are_none(self, build):
        kinds, skeleton = _barriers(build)
        assert kinds == []
        assert skeleton.collectives[0].segment == 0

    def test_random_ops_keep_their_order_and_separate_nothing(self):
        kinds, skeleton = _barriers(
            lambda b, x: [b.call(aten.rand_like, x), b.call(aten.bernoulli.p, x, 0.5)]
        )
        assert kinds == [BarrierKind.RNG, BarrierKind.RNG]
        assert len(skeleton.order_dependencies) == 1
        assert skeleton.collectives[0].segment == 0

    def test_mutation_is_ordered_against_reads_of_the_same_storage_only(self):
        b = GraphBuilder()
        x, y = b.placeholder(4), b.placeholder(4)
        view = b.call(aten.view, x, [2, 2])
        start = b.all_gather(view, 2, "g")
        wait = b.wait(start)
        write = b.call(aten.copy_, x, y)
        other = b.call(aten.neg, y)
        after = b.call(aten.neg, view)
        gm = b.output(wait, other, after)
        pairs = collect(gm.graph).order_dependencies
        assert (start, write) in pairs
        assert (wait, write) in pairs  # the payload is in flight until the wait
        assert (write, after) in pairs
        assert not any(other in pair for pair in pairs)

    def test_each_higher_order_call_is_judged_by_its_own_graph(self):
        b = GraphBuilder()
        inner = fx.Graph()
        inner.output(inner.call_function(aten.neg.default, (inner.placeholder("x"),)))
        b._root.register_module("pure", fx.GraphModule(b._root, inner))
        inner = fx.Graph()
        inner.call_function(
            torch.ops.torch_patches_test.unknown_effect.default, (inner.placeholder("x"),)
        )
        inner.output(())
        b._root.register_module("impure", fx.GraphModule(b._root, inner))
        x = b.placeholder(4)
        calls = [
            b.graph.call_function(invoke_subgraph, (b.graph.get_attr(name), name, x))
            for name in ("pure", "impure")
        ]
        found = collect(b.output(b.gather_and_wait(x, 2, "g")).graph).barriers
        assert [(k.node, k.kind) for k in found] == [(calls[1], BarrierKind.EFFECT)]

    @pytest.mark.parametrize("form", ["keyword", "by_schema", "one_of_two"])
    def test_every_alias_of_a_storage_is_seen(self, form):
        """A view that is given its tensor by keyword, and an alias that only the schema tells of."""
        with torch.library._scoped_library("alias_test", "DEF") as library:
            library.define("same(Tensor(a) x) -> Tensor(a)")
            library.impl("same", lambda x: x, "CompositeExplicitAutograd")
            library.impl("same", lambda x: x.view_as(x), "Meta")
            library.define("both(Tensor(a) x) -> (Tensor(a), Tensor)")
            library.impl("both", lambda x: (x.view_as(x), x.clone()), "Meta")
            b = GraphBuilder()
            x = b.placeholder(4)
            if form == "keyword":
                alias = b.call(aten.view, x, [2, 2])
                alias.args, alias.kwargs = (), {"self": x, "size": [2, 2]}
            elif form == "one_of_two":
                alias = b.getitem(b.call(torch.ops.alias_test.both, x), 0)
            else:
                alias = b.call(torch.ops.alias_test.same, x)
            start = b.all_gather(x, 2, "g")
            write = b.call(aten.mul_.Tensor, alias, 2.0)
            pairs = collect(b.output(b.wait(start)).graph).order_dependencies
        assert (start, write) in pairs
