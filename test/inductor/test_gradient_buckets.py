"""Buckets of all-reduces: DDP's small first one and absorbed divide, HSDP's replicas."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_topo_span
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveTag,
    RefusalReason,
    TagSource,
    Traffic,
)
from torch_patches.captured import load_captured
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
DATA = Path(__file__).parents[1] / "data"
FORMS = ("default", "coalesced")
MIB_ELEMENTS = 1 << 18  # fp32 elements in 1 MiB
GROUPS = {"dp": [[0, 1, 2, 3]], "shard": [[0, 1], [2, 3]], "replicate": [[0, 2], [1, 3]]}


def optimized(gm, **options):
    after = copy.deepcopy(gm)
    return after, optimize_graph(after, Options("topo_span", **options))


def count(gm, *ops):
    return sum(n.target in ops for n in gm.graph.nodes)


def assert_same_values(before, after):
    """Bitwise equal outputs on four ranks, with equal strides, none sharing its storage."""
    inputs = random_inputs(before, 4, seed=0)
    expected = run_spmd(before, copy.deepcopy(inputs), GROUPS, 4)
    actual = run_spmd(after, copy.deepcopy(inputs), GROUPS, 4)
    for one, other in zip(expected, actual, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        assert len({t.untyped_storage().data_ptr() for t in other}) == len(other)


def assert_metadata_right(gm):
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        arguments, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with value.fake_mode:
            fresh = node.target(*arguments, **kwargs)
        found = (value.shape, value.stride(), value.dtype)
        assert (fresh.shape, fresh.stride(), fresh.dtype) == found, node


class TestFirstBucket:
    """g_i -> AR -> W -> output"""

    def _plan(self, mib, build=None, **options):
        b = GraphBuilder()
        build = build or (lambda x: b.reduce_and_wait(x, "avg", "dp"))
        waits = [build(b.placeholder(int(m * MIB_ELEMENTS))) for m in mib]
        report = optimize_graph(b.output(*waits), Options("topo_span", **options))
        return [len(x.members) for x in report.buckets], [r.reason for r in report.refusals]

    @pytest.mark.parametrize("cap", [None, 25.0])
    def test_first_all_reduce_bucket_is_small(self, cap):
        sizes, _ = self._plan([0.5] * 8, bucket_cap_mb=cap)
        assert sizes == [2, 6]

    @pytest.mark.parametrize("cap", [(25.0,), lambda index: 25.0])
    def test_caps_by_bucket_are_obeyed(self, cap):
        sizes, _ = self._plan([0.5] * 8, bucket_cap_mb=cap)
        assert sizes == [8]

    def test_a_smaller_cap_rules(self):
        sizes, _ = self._plan([0.25] * 4, bucket_cap_mb=0.5)
        assert sizes == [2, 2]

    def test_a_large_first_member_goes_alone_and_says_why(self):
        sizes, reasons = self._plan([8, 0.5, 0.5])
        assert sizes == [2]
        assert reasons == [RefusalReason.FIRST_BUCKET]

    def test_a_member_above_the_cap_itself_is_refused_for_the_cap(self):
        _, reasons = self._plan([0.5, 0.5, 0.5], bucket_cap_mb=0.25)
        assert reasons == [RefusalReason.BYTE_CAP, RefusalReason.BYTE_CAP, RefusalReason.LEFT_OVER]

    def test_without_a_cap_all_reduces_are_bucketed_by_25_mb(self):
        """Whatever the largest one is, and whatever saturates: as in torch's DDP."""
        sizes, reasons = self._plan([2, 500, *[8] * 7, 32, 20, 5, 0.5])
        assert sizes == [3, 3, 2]
        assert reasons == [
            RefusalReason.FIRST_BUCKET,
            RefusalReason.BYTE_CAP,
            RefusalReason.BYTE_CAP,
            RefusalReason.BYTE_CAP,
            RefusalReason.LEFT_OVER,
        ]

    @pytest.mark.parametrize("form", FORMS)
    def test_the_default_cap_leaves_the_peak_of_ddp_alone(self, form):
        """One embedding of 500 MiB and 30 gradients of 32 MiB, each divided afterwards."""
        b = GraphBuilder()
        x, outputs = b.placeholder(1, 64), []
        for mib in (0.5, 500, *[32] * 30):
            gradient = b.call(aten.mm, b.placeholder(int(mib * MIB_ELEMENTS / 64), 1), x)
            outputs.append(b.call(aten.div.Tensor, b.reduce_and_wait(gradient, "sum", "dp"), 4))
        gm = b.output(*outputs)
        before = peak_bytes(gm.graph, True).peak_bytes
        optimize_graph(gm, Options("topo_span", bucket_mode=form))
        assert peak_bytes(gm.graph, True).peak_bytes <= 1.02 * before

    def test_scatters_and_gathers_have_no_small_first_bucket(self):
        b = GraphBuilder()
        xs = [b.placeholder(MIB_ELEMENTS) for _ in range(4)]
        gm = b.output(
            *[b.scatter_and_wait(x, "avg", 2, "shard") for x in xs],
            *[b.gather_and_wait(x, 2, "shard") for x in xs],
        )
        report = optimize_graph(gm, Options("topo_span"))
        assert [len(x.members) for x in report.buckets] == [4, 4]

    @pytest.mark.parametrize("replicas_first", [False, True])
    def test_all_reduces_over_replicas_have_none_either(self, replicas_first):
        b = GraphBuilder()
        waits = [replicated(b, b.placeholder(2 * MIB_ELEMENTS), replicas_first) for _ in range(4)]
        report = optimize_graph(b.output(*waits), Options("topo_span"))
        assert [len(x.members) for x in report.buckets] == [4, 4]

    def test_captured_ddp_graph(self):
        """30 all-reduces of 0.83 MiB together (3 layers of dim 64): all fit the first bucket."""
        gm = load_captured(DATA / "llama_3l_ddp8.json.gz").graphs["bw"]
        sizes = [c.size_bytes for c in collect(gm.graph).collectives]
        assert len(sizes) == 30 and 0.8 * 2**20 < sum(sizes) < 2**20
        _, report = optimized(gm)
        assert [len(x.members) for x in report.buckets] == [30]

    def test_captured_ddp_graph_of_a_wide_model(self):
        """The same graph as if its model were 16 times as large, 13 MiB: the first bucket ends."""
        gm = load_captured(DATA / "llama_3l_ddp8.json.gz").graphs["bw"]
        skeleton = collect(gm.graph)
        wide = [dataclasses.replace(c, size_bytes=16 * c.size_bytes) for c in skeleton.collectives]
        skeleton = dataclasses.replace(skeleton, collectives=tuple(wide))
        plan = plan_topo_span(skeleton, contract(gm.graph, skeleton), Options("topo_span"))
        # the gradient of the head comes first, 16 times 64 KiB, which is exactly 1 MiB
        assert [len(x.members) for x in plan.buckets] == [29]
        assert [r.reason for r in plan.refusals] == [RefusalReason.FIRST_BUCKET]


def replicated(b, x, replicas_first=False, scale=False):
    """x -> RS over the shards -> [div] -> AR over the replicas, or the other way round."""
    if replicas_first:
        return b.scatter_and_wait(b.reduce_and_wait(x, "sum", "replicate"), "sum", 2, "shard")
    node = b.scatter_and_wait(x, "sum", 2, "shard")
    if scale:
        node = b.call(aten.div.Tensor, b.call(aten.view, node, [-1]), 2)
    return b.reduce_and_wait(node, "sum", "replicate")


def scatters_and_reduces(gm, report):
    """Members of the buckets of scatters, and the scatters that those of all-reduces belong to."""
    collectives = {c.start.name: c for c in collect(gm.graph).collectives}
    kinds = {c.index: c.kind.value for c in collectives.values()}
    scatter_of = {}
    for c in collectives.values():
        if c.feeder is not None and kinds[c.feeder] != c.kind.value:
            pair = (c.index, c.feeder) if c.kind.value == "all_reduce" else (c.feeder, c.index)
            scatter_of[pair[0]] = pair[1]
    scatters, reduces = [], []
    for bucket in report.buckets:
        members = [collectives[name].index for name in bucket.members]
        if bucket.kind == "reduce_scatter":
            scatters.append(sorted(members))
        elif bucket.kind == "all_reduce":
            reduces.append(sorted(scatter_of[i] for i in members))
    return sorted(scatters), sorted(reduces)


class TestReplicas:
    """Buckets of all-reduces have the members of the buckets of reduce-scatters."""

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("cap", [None, 0.3, 0.1, 0.05])
    def test_captured_hsdp_graph(self, cap, form):
        """DTensor reduces over the replicas first, then scatters."""
        gm = load_captured(DATA / "llama_2l_hsdp2x4.json.gz").graphs["bw"]
        _, report = optimized(gm, bucket_cap_mb=cap, bucket_mode=form)
        scatters, reduces = scatters_and_reduces(gm, report)
        assert scatters == reduces
        assert len(scatters) == {None: 1, 0.3: 2, 0.1: 5, 0.05: 4}[cap]

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("replicas_first", [False, True])
    @pytest.mark.parametrize("scale", [False, True])
    def test_can_follow_where_the_own_cap_would_cut_elsewhere(self, form, replicas_first, scale):
        """Scatters of 4, 4 and 8 KiB under a cap of 8: two buckets of 8 KiB and one of two."""
        b = GraphBuilder()
        sizes = (1024, 1024, 2048, 1024, 1024)
        waits = [replicated(b, b.placeholder(n), replicas_first, scale) for n in sizes]
        gm = b.output(*waits)
        after, report = optimized(gm, bucket_cap_mb=8 / 1024, bucket_mode=form)
        scatters, reduces = scatters_and_reduces(gm, report)
        assert scatters == reduces
        assert [len(x) for x in scatters] == [2, 2]
        assert_same_values(gm, after)

    def test_span_does_not_bound_the_all_reduces(self):
        """Scatters near each other, their all-reduces far apart."""
        b = GraphBuilder()
        shards = [b.scatter_and_wait(b.placeholder(8), "sum", 2, "shard") for _ in range(2)]
        reduced, x = [], b.placeholder(8)
        for shard in shards:
            for _ in range(10):
                x = b.call(aten.neg, x)
            reduced.append(b.reduce_and_wait(shard, "sum", "replicate"))
        gm = b.output(x, *reduced)
        _, report = optimized(gm, max_topo_span=6)
        assert [len(x.members) for x in report.buckets] == [2, 2]

    def test_cannot_join_all_reduces_of_scatters_in_different_buckets(self):
        b = GraphBuilder()
        waits = []
        for op in ("sum", "sum", "avg", "avg"):
            shard = b.scatter_and_wait(b.placeholder(8), op, 2, "shard")
            waits.append(b.reduce_and_wait(shard, "sum", "replicate"))
        gm = b.output(*waits)
        _, report = optimized(gm)
        scatters, reduces = scatters_and_reduces(gm, report)
        assert scatters == reduces == [[0, 2], [4, 6]]

    def test_those_of_scatters_without_a_bucket_merge_among_themselves(self):
        b = GraphBuilder()
        waits = []
        for op in ("sum", "avg", "max"):
            # 2 MiB each: more than a small first bucket, which these do not have
            shard = b.scatter_and_wait(b.placeholder(4 * MIB_ELEMENTS), op, 2, "shard")
            waits.append(b.reduce_and_wait(shard, "sum", "replicate"))
        _, report = optimized(b.output(*waits))
        assert [(x.kind, len(x.members)) for x in report.buckets] == [("all_reduce", 3)]

    def test_what_cannot_join_stays_single_with_a_reason(self):
        """A side effect between the all-reduces, not between the scatters."""
        b = GraphBuilder()
        shards = [b.scatter_and_wait(b.placeholder(8), "sum", 2, "shard") for _ in range(3)]
        waits = [b.reduce_and_wait(s, "sum", "replicate") for s in shards[:2]]
        b.graph.call_function(print, (b.placeholder(1),))
        waits.append(b.reduce_and_wait(shards[2], "sum", "replicate"))
        _, report = optimized(b.output(*waits))
        assert [(x.kind, len(x.members)) for x in report.buckets] == [
            ("reduce_scatter", 3),
            ("all_reduce", 2),
        ]
        assert [r.reason for r in report.refusals] == [RefusalReason.BARRIER]

    def test_compute_between_scatter_and_all_reduce_is_no_chain(self):
        b = GraphBuilder()
        shards = [b.scatter_and_wait(b.placeholder(8), "sum", 2, "shard") for _ in range(2)]
        waits = [b.reduce_and_wait(b.call(aten.cumsum, s, 0), "sum", "replicate") for s in shards]
        skeleton = collect(b.output(*waits).graph)
        assert [c.feeder for c in skeleton.collectives] == [None] * 4


DIVIDES = (aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar)


class TestDivide:
    """g_i -> AR -> W -> div by N -> output"""

    def _graph(self, divide, shapes=((4,), (2, 3), (5, 1)), dtype=torch.float32, between=None):
        b = GraphBuilder()
        outputs = []
        for place, shape in enumerate(shapes):
            wait = b.reduce_and_wait(b.placeholder(*shape, dtype=dtype), "sum", "dp")
            outputs.append(divide(b, between(b, wait) if between else wait, place))
        return b.output(*outputs)

    def _absorbed(self, gm, **options):
        after, report = optimized(gm, **options)
        assert_same_values(gm, after)
        assert_metadata_right(after)
        assert len(report.buckets) == 1
        return count(after, *DIVIDES) == 1, report.buckets[0].form

    @pytest.mark.parametrize("mode", [None, "default"])
    @pytest.mark.parametrize("op", DIVIDES)
    def test_equal_scalings_become_one(self, op, mode):
        gm = self._graph(lambda b, w, _: b.call(op, w, 3.0))
        assert self._absorbed(gm, bucket_mode=mode) == (True, "default")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_in_other_dtypes_too(self, dtype):
        gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 3), dtype=dtype)
        assert self._absorbed(gm) == (True, "default")

    def test_many_elements_give_the_same_bits(self):
        """Enough for vectors and their tails: the flat buffer cuts them elsewhere."""
        shapes = ((1001,), (7,), (33, 65))
        for dtype in (torch.float32, torch.bfloat16):
            gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 7), shapes, dtype)
            assert self._absorbed(gm) == (True, "default")

    def test_through_views_between_wait_and_divide(self):
        def flat(b, wait):
            return b.call(aten.view, b.call(aten.alias, wait), [-1])

        gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 2), between=flat)
        assert self._absorbed(gm) == (True, "default")

    def test_behind_scatters_too(self):
        b = GraphBuilder()
        waits = [replicated(b, b.placeholder(8), scale=True) for _ in range(3)]
        gm = b.output(*[b.call(aten.div.Tensor, w, 2) for w in waits])
        after, report = optimized(gm)
        assert [(x.kind, x.form) for x in report.buckets] == [
            ("reduce_scatter", "coalesced"),
            ("all_reduce", "default"),
        ]
        assert count(after, *DIVIDES) == 3 + 1  # one for each shard in front, one behind
        assert_same_values(gm, after)

    def test_explicit_coalesced_is_obeyed(self):
        gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 2))
        assert self._absorbed(gm, bucket_mode="coalesced") == (False, "coalesced")

    @pytest.mark.parametrize("mode", [None, "default"])
    def test_cannot_absorb_different_numbers(self, mode):
        gm = self._graph(lambda b, w, place: b.call(aten.div.Tensor, w, 2 + place))
        absorbed, form = self._absorbed(gm, bucket_mode=mode)
        assert not absorbed
        assert form == (mode or "coalesced")

    def test_cannot_absorb_different_ops(self):
        gm = self._graph(lambda b, w, place: b.call(DIVIDES[place], w, 2))
        assert self._absorbed(gm, bucket_mode="default") == (False, "default")

    def test_cannot_absorb_where_one_has_none(self):
        gm = self._graph(lambda b, w, place: b.call(aten.div.Tensor, w, 2) if place else w)
        assert self._absorbed(gm, bucket_mode="default")[1] == "default"
        after, _ = optimized(gm, bucket_mode="default")
        assert count(after, *DIVIDES) == 2

    def test_cannot_absorb_where_the_unscaled_is_read_too(self):
        b = GraphBuilder()
        waits = [b.reduce_and_wait(b.placeholder(4), "sum", "dp") for _ in range(2)]
        divided = [b.call(aten.div.Tensor, w, 2) for w in waits]
        gm = b.output(*divided, waits[0])
        assert self._absorbed(gm, bucket_mode="default") == (False, "default")

    def test_cannot_absorb_a_tensor_as_divisor(self):
        b = GraphBuilder()
        divisor = b.placeholder(())
        waits = [b.reduce_and_wait(b.placeholder(4), "sum", "dp") for _ in range(2)]
        gm = b.output(*[b.call(aten.div.Tensor, w, divisor) for w in waits])
        after, report = optimized(gm, bucket_mode="default")
        assert len(report.buckets) == 1
        assert count(after, *DIVIDES) == 2

    def test_cannot_absorb_behind_an_accumulation(self):
        def accumulate(b, wait):
            return b.call(aten.add.Tensor, wait, b.placeholder(*wait.meta["val"].shape))

        gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 2), between=accumulate)
        assert self._absorbed(gm, bucket_mode="default") == (False, "default")

    def test_cannot_absorb_a_change_of_dtype(self):
        gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 2), dtype=torch.int64)
        assert self._absorbed(gm, bucket_mode="default") == (False, "default")

    def test_cannot_absorb_a_change_of_layout(self):
        """Dividing a slice gives a dense tensor; what stands for it would have gaps."""

        def cut(b, wait):
            return b.call(aten.slice.Tensor, wait, 1, 0, 2)

        shapes = ((2, 4), (3, 3))
        gm = self._graph(lambda b, w, _: b.call(aten.div.Tensor, w, 2), shapes, between=cut)
        assert self._absorbed(gm, bucket_mode="default") == (False, "default")

    def test_cannot_absorb_symbolic_sizes(self):
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        b = GraphBuilder(mode)
        waits = [
            b.reduce_and_wait(b.placeholder(val=mode.from_tensor(torch.empty(n))), "sum", "dp")
            for n in (5, 7)
        ]
        gm = b.output(*[b.call(aten.div.Tensor, w, 2) for w in waits])
        report = optimize_graph(gm, Options("topo_span", bucket_cap_mb=100.0))
        assert [x.form for x in report.buckets] == ["coalesced"]
        assert count(gm, *DIVIDES) == 2

    def test_metadata_and_later_writes_are_carried_on(self):
        """The divided gradient is accumulated into in place, behind the merged copy."""
        b = GraphBuilder()
        outputs = []
        for _ in range(3):
            wait = b.reduce_and_wait(b.placeholder(4), "sum", "dp")
            # only a tag tells that what is written into is a gradient
            wait.args[0].meta[TAG_MARK] = CollectiveTag(Traffic.GRADIENT, TagSource.DESCRIPTORS)
            divided = b.call(aten.div.Tensor, wait, 4)
            divided.meta["custom"] = "divide"
            outputs.append(b.call(aten.add_.Tensor, divided, b.placeholder(4)))
        gm = b.output(*outputs)
        after, report = optimized(gm)
        assert [x.form for x in report.buckets] == ["default"]
        (divide,) = [n for n in after.graph.nodes if n.target in DIVIDES]
        assert divide.meta["custom"] == "divide"
        assert_same_values(gm, after)
