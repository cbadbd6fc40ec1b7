"""The greedy: what goes into a bucket, and what closes it."""

import dataclasses

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.check import check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import (
    default_cap_bytes,
    saturation_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import (
    Merger,
    make_bucket,
    payload_order,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import identify_fsdp_groups
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import (
    MAX_DEFERRALS,
    greedy_buckets,
    plan_topo_span,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CloseReason,
    MergeForm,
    Plan,
    RefusalReason,
)
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
MIB_ELEMENTS = 1 << 18  # fp32 elements in 1 MiB


def plan_of(gm, **options):
    options.setdefault("bucketing_mode", "topo_span")
    skeleton = collect(gm.graph)
    return plan_topo_span(skeleton, contract(gm.graph, skeleton), Options(**options))


def sizes(plan):
    return [len(bucket.members) for bucket in plan.buckets]


def gathers(count, elements=MIB_ELEMENTS, group="fsdp", b=None):
    """p_i -> AG (of ``elements`` fp32 gathered on 2 ranks) -> W -> output"""
    b = b or GraphBuilder()
    return b, [b.gather_and_wait(b.placeholder(elements // 2), 2, group) for _ in range(count)]


def chain(b, node, length):
    """``length`` working nodes one after another."""
    for _ in range(length):
        node = b.call(aten.neg, node)
    return node


class TestByteCap:
    def test_can_bucket_four_small_gathers(self):
        b, waits = gathers(4, elements=16)
        plan = plan_of(b.output(*waits))
        assert sizes(plan) == [4]
        assert plan.buckets[0].close_reason is CloseReason.END

    def test_six_of_5_mb_at_10_mb_give_pairs(self):
        b, waits = gathers(6, elements=5 * MIB_ELEMENTS)
        plan = plan_of(b.output(*waits), bucket_cap_mb=10.0)
        assert sizes(plan) == [2, 2, 2]
        assert [x.close_reason.value for x in plan.buckets] == ["bytes", "bytes", "end"]

    def test_six_of_1_mb_with_caps_by_index_give_2_and_4(self):
        b, waits = gathers(6)
        assert sizes(plan_of(b.output(*waits), bucket_cap_mb=(2.0, 100.0))) == [2, 4]

    def test_last_cap_repeats(self):
        b, waits = gathers(7)
        assert sizes(plan_of(b.output(*waits), bucket_cap_mb=(3.0, 2.0))) == [3, 2, 2]

    def test_cap_may_be_a_function_of_the_index(self):
        b, waits = gathers(6)
        assert sizes(plan_of(b.output(*waits), bucket_cap_mb=lambda i: 4.0 - 2 * i)) == [4, 2]

    def test_cannot_bucket_what_is_larger_than_the_cap(self):
        b, waits = gathers(3)
        plan = plan_of(b.output(*waits), bucket_cap_mb=0.5)
        assert sizes(plan) == []
        assert {r.reason for r in plan.refusals} == {
            RefusalReason.BYTE_CAP,
            RefusalReason.LEFT_OVER,
        }

    def test_saturation_estimate_grows_with_the_group(self):
        inside, across = saturation_bytes(8), saturation_bytes(256)
        assert 10 << 20 <= inside < across <= 500 << 20
        assert saturation_bytes(None) == saturation_bytes(8)


class TestDefaultCap:
    """Without a cap: what saturates the network, or the largest of the key up to 500 MiB."""

    def _sizes(self, *mib, group_size=2):
        b = GraphBuilder()
        waits = [
            b.gather_and_wait(b.placeholder(m * MIB_ELEMENTS // group_size), group_size, "g")
            for m in mib
        ]
        return sizes(plan_of(b.output(*waits)))

    def test_small_members_fill_what_saturates(self):
        assert 48 << 20 < saturation_bytes(8) < 64 << 20
        assert self._sizes(*[16] * 6, group_size=8) == [3, 3]

    def test_a_bucket_may_be_as_large_as_the_largest_member(self):
        assert self._sizes(96, 16, 112, 64, 48, 16, group_size=8) == [2, 2]
        assert self._sizes(96, 16, 96, 64, 48, 16, group_size=8) == [2]  # the largest has 96

    def test_a_member_beyond_the_bound_does_not_lift_the_cap_above_it(self):
        assert self._sizes(400, 200, 300, 200, 2000, 1, 1, group_size=8) == [2, 2]

    def test_an_explicit_cap_is_not_lifted(self):
        b, waits = gathers(4, elements=40 * MIB_ELEMENTS)
        assert sizes(plan_of(b.output(*waits), bucket_cap_mb=50.0)) == []

    @pytest.mark.parametrize("group_size", [2, 8, 64, 1024])
    def test_weights_of_llama_3_8b_at_any_number_of_ranks(self, group_size):
        """bf16: 32 layers of norms, wq, wk, wv, wo, w1, w2, w3; embedding, norm, head: 291."""
        norm = 4096 // MIB_ELEMENTS  # less than one MiB counts as nothing here
        layer = [norm, 32, 8, 8, 32, norm, 112, 112, 112]
        weights = [1002, *layer * 32, norm, 1002]
        assert len(weights) == 291
        buckets = self._sizes(*weights, group_size=group_size)
        assert 291 - sum(buckets) + len(buckets) <= 98

    def test_the_cap_of_large_weights_is_one_for_all_group_sizes(self):
        for group_size in range(2, 1025):
            assert default_cap_bytes(group_size, 1002 << 20) == 500 << 20
            assert default_cap_bytes(group_size, 112 << 20) >= 112 << 20


class TestPhases:
    """A graph that holds forward and backward; gathers repeated in the backward say so."""

    def _plan(self, backward):
        b, waits = gathers(4, elements=16)
        for wait, repeated in zip(waits, backward, strict=True):
            wait.args[0].meta["autograd_backward"] = repeated
        return plan_of(b.output(*waits))

    def test_can_bucket_within_a_phase(self):
        plan = self._plan([False, True, False, True])
        assert [[m.index for m in x.members] for x in plan.buckets] == [[0, 2], [1, 3]]

    def test_cannot_bucket_a_repeated_gather_with_one_of_the_forward(self):
        plan = self._plan([False, False, False, True])
        assert [[m.index for m in x.members] for x in plan.buckets] == [[0, 1, 2]]
        assert [r.reason for r in plan.refusals] == [RefusalReason.ALONE_IN_KEY]


class TestSpan:
    def _two_gathers(self, apart):
        b = GraphBuilder()
        first = b.gather_and_wait(b.placeholder(4), 2, "fsdp")
        last = b.gather_and_wait(b.placeholder(4), 2, "fsdp") if not apart else None
        middle = chain(b, first, apart)
        last = last or b.gather_and_wait(b.placeholder(4), 2, "fsdp")
        return b.output(middle, last)

    def test_cannot_bucket_beyond_the_span(self):
        plan = plan_of(self._two_gathers(50), max_topo_span=20)
        assert sizes(plan) == []
        assert RefusalReason.SPAN_CAP in {r.reason for r in plan.refusals}

    @pytest.mark.parametrize("bound", [None, 80])
    def test_can_bucket_within_the_span(self, bound):
        plan = plan_of(self._two_gathers(50), max_topo_span=bound)
        assert sizes(plan) == [2]
        assert plan.buckets[0].span == 52  # the first start, its wait, and 50 others

    def test_span_is_exact(self):
        gm = self._two_gathers(50)
        assert sizes(plan_of(gm, max_topo_span=52)) == [2]
        assert sizes(plan_of(gm, max_topo_span=51)) == []

    def test_gathers_50_apart_with_span_80_give_two_buckets(self):
        b = GraphBuilder()
        node, waits = b.placeholder(4), []
        for _ in range(4):
            waits.append(b.gather_and_wait(b.placeholder(4), 2, "fsdp"))
            node = chain(b, node, 50)
        assert sizes(plan_of(b.output(node, *waits), max_topo_span=80)) == [2, 2]


class TestKeys:
    def test_can_bucket_members_that_are_not_adjacent(self):
        b = GraphBuilder()
        waits = [b.gather_and_wait(b.placeholder(4), 2, g) for g in ("a", "b", "a", "b")]
        plan = plan_of(b.output(*waits))
        assert [[m.index for m in x.members] for x in plan.buckets] == [[0, 2], [1, 3]]

    def test_cannot_bucket_scatter_with_all_reduce(self):
        b = GraphBuilder()
        gm = b.output(
            b.scatter_and_wait(b.placeholder(4), "sum", 2, "g"),
            b.reduce_and_wait(b.placeholder(4), "sum", "g"),
        )
        assert sizes(plan_of(gm)) == []

    @pytest.mark.parametrize("differ", ["dtype", "op", "group"])
    def test_cannot_bucket_across(self, differ):
        b = GraphBuilder()
        dtype = torch.bfloat16 if differ == "dtype" else torch.float32
        gm = b.output(
            b.scatter_and_wait(b.placeholder(4), "sum", 2, "g"),
            b.scatter_and_wait(
                b.placeholder(4, dtype=dtype),
                "avg" if differ == "op" else "sum",
                2,
                "h" if differ == "group" else "g",
            ),
        )
        plan = plan_of(gm)
        assert sizes(plan) == []
        assert [r.reason for r in plan.refusals] == [RefusalReason.ALONE_IN_KEY] * 2

    def test_cannot_bucket_activations(self):
        b = GraphBuilder()
        x = [b.call(aten.neg, b.placeholder(4)) for _ in range(2)]
        plan = plan_of(b.output(*[b.gather_and_wait(n, 2, "tp") for n in x]))
        assert sizes(plan) == []
        assert {r.reason for r in plan.refusals} == {RefusalReason.NOT_PARAMETER_TRAFFIC}

    def test_cannot_bucket_across_an_unknown_effect(self):
        b = GraphBuilder()
        waits = [b.gather_and_wait(b.placeholder(4), 2, "g") for _ in range(2)]
        b.graph.call_function(print, (waits[0],))
        waits += [b.gather_and_wait(b.placeholder(4), 2, "g") for _ in range(2)]
        plan = plan_of(b.output(*waits))
        assert [[m.index for m in x.members] for x in plan.buckets] == [[0, 1], [2, 3]]

    def test_what_a_side_effect_keeps_apart_says_so(self):
        b = GraphBuilder()
        waits = [b.gather_and_wait(b.placeholder(4), 2, "g")]
        b.graph.call_function(print, (waits[0],))
        waits += [b.gather_and_wait(b.placeholder(4), 2, "g")]
        plan = plan_of(b.output(*waits))
        assert sizes(plan) == []
        assert plan.refusals[0].reason is RefusalReason.BARRIER


class TestDependencies:
    def _greedy(self, gm):
        skeleton = collect(gm.graph)
        return greedy_buckets(skeleton.collectives, Merger(contract(gm.graph, skeleton)), Options())

    def test_dependent_candidate_goes_to_the_next_bucket(self):
        """a0 -> a1,  b0 -> b1 (each gather depends on the one before it)"""
        b = GraphBuilder()
        waits = []
        for _ in range(2):
            first = b.gather_and_wait(b.placeholder(4), 2, "g")
            second = b.gather_and_wait(b.call(aten.neg, first), 2, "g")
            waits += [first, second]
        # the second gathers have twice the elements, the same key
        plan = self._greedy(b.output(*waits))
        assert [[m.index for m in x.members] for x in plan.buckets] == [[0, 2], [1, 3]]
        assert plan.buckets[0].close_reason is CloseReason.DEPENDENCY

    def test_dependent_candidate_does_not_close_the_bucket_by_its_size(self):
        """A large gather that cannot join anyway must not keep small ones out."""
        b = GraphBuilder()
        first = b.gather_and_wait(b.placeholder(4), 2, "g")
        large = b.gather_and_wait(b.call(aten.expand, first, [64, 8]), 2, "g")
        rest = [b.gather_and_wait(b.placeholder(4), 2, "g") for _ in range(2)]
        plan = plan_of(b.output(large, *rest), bucket_cap_mb=1e-4)
        assert [[m.index for m in x.members] for x in plan.buckets] == [[0, 2, 3]]

    def test_chain_of_dependents_is_never_merged_and_the_work_is_bounded(self):
        def operations(length):
            b = GraphBuilder()
            node = b.placeholder(4, 4)
            for _ in range(length):
                node = b.call(aten.slice.Tensor, b.gather_and_wait(node, 2, "g"), 0, 0, 4)
            plan = self._greedy(b.output(node))
            assert sizes(plan) == []
            return plan.operations

        assert operations(8 * MAX_DEFERRALS) <= 2 * operations(4 * MAX_DEFERRALS) * 1.1

    def test_two_buckets_each_legal_alone_cannot_close_a_cycle_together(self):
        """A0 -> B0 and B1 -> A1: with {A0, A1} merged, {B0, B1} would wait for itself."""
        b = GraphBuilder()
        a0 = b.gather_and_wait(b.placeholder(4), 2, "a")
        b0 = b.gather_and_wait(b.call(aten.slice.Tensor, a0, 0, 0, 4), 2, "b")
        b1 = b.gather_and_wait(b.placeholder(4), 2, "b")
        a1 = b.gather_and_wait(b.call(aten.slice.Tensor, b1, 0, 0, 4), 2, "a")
        plan = plan_of(b.output(a0, b0, b1, a1))
        assert [[m.start.args[2] for m in x.members] for x in plan.buckets] == [["a", "a"]]
        assert RefusalReason.DEPENDENCY in {r.reason for r in plan.refusals}


class TestFsdpGroups:
    def _two_groups(self, first, second):
        b = GraphBuilder()
        _, one = gathers(first, 16, "major", b)
        _, two = gathers(second, 16, "minor", b)
        return b.output(*one, *two)

    def test_default_serves_both_groups(self):
        assert sizes(plan_of(self._two_groups(5, 2))) == [5, 2]

    def test_primary_only_leaves_the_minority_out(self):
        plan = plan_of(self._two_groups(5, 2), primary_fsdp_group_only=True)
        assert sizes(plan) == [5]
        assert [r.reason for r in plan.refusals] == [RefusalReason.NOT_PRIMARY_GROUP] * 2

    def test_primary_is_decided_by_count_not_by_order(self):
        plan = plan_of(self._two_groups(2, 5), primary_fsdp_group_only=True)
        assert [x.key.group for x in plan.buckets] == ["minor"]

    def test_tie_goes_to_the_first_to_appear(self):
        skeleton = collect(self._two_groups(2, 2).graph)
        assert [g.group for g in identify_fsdp_groups(skeleton, primary_only=True)] == ["major"]

    def test_group_of_replicas_is_no_minority(self):
        b = GraphBuilder()
        scattered = [b.scatter_and_wait(b.placeholder(4), "sum", 2, "shard") for _ in range(2)]
        reduced = [b.reduce_and_wait(s, "sum", "replicate") for s in scattered]
        plan = plan_of(b.output(*reduced), primary_fsdp_group_only=True)
        assert sizes(plan) == [2, 2]

    def test_empty_graph_gives_no_group(self):
        b = GraphBuilder()
        skeleton = collect(b.output(b.placeholder(4)).graph)
        assert identify_fsdp_groups(skeleton) == ()
        assert identify_fsdp_groups(skeleton, primary_only=True) == ()


class TestPayloadOrder:
    def _members(self, indices):
        b, waits = gathers(len(indices), 16)
        members = collect(b.output(*waits).graph).collectives
        pairs = zip(members, indices, strict=True)
        return [dataclasses.replace(m, parameter_index=i) for m, i in pairs]

    def test_order_of_the_parameters_where_known(self):
        assert payload_order(self._members([2, 0, 1])) == (1, 2, 0)

    def test_gathers_and_scatters_of_one_model_agree(self):
        """Parameters p0, p1, p2; used 2, 0, 1; gradients come in another order still."""
        b = GraphBuilder()
        parameters = [b.placeholder(4) for _ in range(3)]
        gathered = [b.gather_and_wait(parameters[i], 2, "g") for i in (2, 0, 1)]
        gradients = {i: b.scatter_and_wait(b.placeholder(4), "sum", 2, "g") for i in (1, 2, 0)}
        plan = plan_of(b.output(*[gradients[i] for i in range(3)], *gathered))
        assert [x.payload_order for x in plan.buckets] == [(1, 2, 0), (2, 0, 1)]

    def test_graph_order_where_not_known_for_all(self):
        assert payload_order(self._members([2, None, 1])) == (0, 1, 2)

    def test_members_handed_over_in_another_order_are_put_in_graph_order(self):
        members = self._members([None, None, None])
        bucket = make_bucket(members[::-1], MergeForm.COPY, CloseReason.END)
        assert bucket.members == tuple(members)


class TestCheck:
    def _checked(self, gm, groups, **changes):
        skeleton = collect(gm.graph)
        members = skeleton.collectives
        buckets = tuple(
            make_bucket([members[i] for i in g], MergeForm.COALESCED, CloseReason.END)
            for g in groups
        )
        buckets = tuple(dataclasses.replace(x, **changes) for x in buckets)
        return check_plan(skeleton, contract(gm.graph, skeleton), Plan(buckets))

    def test_legal_plan_is_unchanged(self):
        b, waits = gathers(4, 16)
        plan = self._checked(b.output(*waits), [[0, 1], [2, 3]])
        assert sizes(plan) == [2, 2]
        assert plan.refusals == ()

    def test_bucket_that_closes_a_cycle_is_given_up_and_the_rest_stays(self):
        b = GraphBuilder()
        first = b.gather_and_wait(b.placeholder(4), 2, "g")
        second = b.gather_and_wait(b.call(aten.neg, first), 2, "g")
        _, rest = gathers(2, 16, "g", b)
        plan = self._checked(b.output(first, second, *rest), [[0, 1], [2, 3]])
        assert [[m.index for m in x.members] for x in plan.buckets] == [[2, 3]]
        assert [r.reason for r in plan.refusals] == [RefusalReason.CHECK_FAILED]
        assert "cycle" in plan.refusals[0].detail

    def test_bucket_of_both_phases_is_given_up(self):
        b, waits = gathers(3, 16)
        waits[2].args[0].meta["autograd_backward"] = True
        plan = self._checked(b.output(*waits), [[0, 2]])
        assert "backward" in plan.refusals[0].detail

    @pytest.mark.parametrize(
        ("groups", "changes", "detail"),
        [
            ([[0, 1], [1, 2]], {}, "another bucket"),
            ([[0]], {}, "at least two"),
            ([[0, 1]], {"payload_order": (0, 0)}, "permutation"),
            ([[0, 3]], {}, "differ"),
        ],
    )
    def test_illegal_bucket_is_given_up(self, groups, changes, detail):
        b, waits = gathers(3, 16)
        _, other = gathers(1, 16, "other", b)
        plan = self._checked(b.output(*waits, *other), groups, **changes)
        assert detail in plan.refusals[-1].detail
