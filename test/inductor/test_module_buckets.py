"""Which collectives share a module bucket, and what is told about those that do not.

``optimized`` compares the values of four ranks in every test.  Every weight of these graphs is a
(2, 4) shard of fp32, so a gather has 64 bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.module_graphs import (
    SIZE,
    ModuleGraph,
    backward,
    forward,
    merged,
    optimized,
    refused,
    tag,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten


def in_backward(*waits: fx.Node) -> None:
    """As the joint graph of a forward and a backward has it."""
    for wait in waits:
        for node in (wait, wait.args[0]):
            node.meta["partitioner_tag"] = "is_backward"


# ------------------------------------------------------------------- one for each key of a module


@pytest.mark.parametrize("plan", [("layers.*",), None], ids=["modules", "transformer_block"])
def test_one_gather_for_each_module(plan: Any) -> None:
    _, report = optimized(forward(3, count=3), plan)
    assert merged(report) == {f"AG layers.{i} dp x3": 1 for i in range(3)}
    assert report.collectives_after == {"all_gather": 3}


@pytest.mark.parametrize("plan", [("layers.*",), None], ids=["modules", "transformer_block"])
def test_one_scatter_and_one_regather_for_each_module(plan: Any) -> None:
    _, report = optimized(backward(3, regather=True), plan)
    kinds = ("AG", "RS")
    assert merged(report) == {f"{k} layers.{i} dp x2": 1 for i in range(3) for k in kinds}


def test_groups_and_dtypes_are_apart() -> None:
    """Experts have their own group, with the same ranks; bf16 weights are another bucket."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        h = b.layer(h)
        with b.inside("layers.0.experts"):
            h = b.use(b.use(h, b.shard(), "ep"), b.shard(), "ep")
        for _ in range(2):
            weight = b.gather_and_wait(b.shard(torch.bfloat16), 2, "dp")
            h = b.call(aten.mm, h, b.call(aten._to_copy, weight, dtype=torch.float32))
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 2, "AG layers.0 ep x2": 1}
    assert sorted((x.group, x.dtype) for x in report.buckets) == [
        ("dp", "bfloat16"), ("dp", "float32"), ("ep", "float32"),
    ]  # fmt: skip


def test_reduce_ops_are_apart() -> None:
    b = ModuleGraph("fwd_nn_module_stack")
    x, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        grads = [b.call(aten.mm, x, g) for _ in range(4)]
        waits = [
            b.scatter_and_wait(v, op, 2, "dp")
            for v, op in zip(grads, ("sum", "avg", "sum", "avg"), strict=True)
        ]
    _, report = optimized(b.output(*waits))
    assert sorted((x.reduce_op, len(x.members)) for x in report.buckets) == [("avg", 2), ("sum", 2)]


def test_forward_and_backward_are_apart() -> None:
    """A graph of both passes: layers.0 gathers p and q, then in the backward p and q again."""
    b = ModuleGraph()
    h, p, q = b.placeholder(SIZE, SIZE), b.shard(), b.shard()
    with b.inside("layers.0"):
        h = b.use(b.use(h, p), q)
        again = [b.gather_and_wait(x, 2, "dp") for x in (p, q)]
        in_backward(*again)
        for weight in again:
            h = b.call(aten.mm, h, weight)
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 2}


def test_activations_stay_as_they_are() -> None:
    """Gathers of what the module computes (tensor parallelism) are on the critical path."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        for _ in range(2):
            h = b.layer(h, 1)
            halves = b.gather_and_wait(b.call(aten.slice.Tensor, h, 0, 0, 2), 2, "cp")
            h = b.call(aten.mm, h, halves)
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 1}
    assert refused(report) == {"NOT_PARAMETER_TRAFFIC": 2}


def test_hsdp_reduces_replicas_behind_their_scatters() -> None:
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    out = []
    for number in (1, 0):
        with b.inside(f"layers.{number}"):
            for _ in range(2):
                out.append(b.reduce_and_wait(b.gradient(saved, g), "sum", "replicas"))
            g = b.call(aten.mm, g, saved)
    _, report = optimized(b.output(g, *out))
    assert merged(report) == {
        f"{kind} layers.{i} {group} x2": 1
        for i in (0, 1)
        for kind, group in (("RS", "dp"), ("AR", "replicas"))
    }


def hsdp_of_four() -> fx.GraphModule:
    """One module; gradients leave in the reverse of the order of registration."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    out = []
    with b.inside("layers.0"):
        for place in range(4):
            scattered = b.gradient(saved, g)
            out.append(b.reduce_and_wait(scattered, "sum", "replicas"))
            for wait in (scattered, out[-1]):
                tag(wait, f"layers.0.w{place}", index=3 - place, place=place)
    return b.output(*out)


def test_hsdp_replicas_take_the_members_of_the_scatters() -> None:
    """A cap of two gradients (64 bytes each); four shards of 32 bytes would be within it."""
    _, report = optimized(hsdp_of_four(), bucket_cap_mb=128 / 2**20)
    assert merged(report) == {"RS layers.0 dp x2": 2, "AR layers.0 replicas x2": 2}


def test_hsdp_replicas_are_in_the_order_of_registration() -> None:
    gm, _ = optimized(hsdp_of_four(), bucket_mode="coalesced")
    starts = [n for n in gm.graph.nodes if "all_reduce_coalesced" in str(n.target)]
    scatters = [n for n in gm.graph.nodes if "reduce_scatter_tensor_coalesced" in str(n.target)]
    products = [n for n in gm.graph.nodes if n.target is aten.mm.default]
    assert scatters[0].args[0] == products[::-1]
    sources = [wait.args[0] for wait in starts[0].args[0]]
    assert [part.args[1] for part in sources] == [0, 1, 2, 3]  # of the scatters' results


@pytest.mark.parametrize(("plan", "label"), [("layers.*", "layers.0"), ("embed", "-")])
def test_hsdp_replicas_of_lone_scatters_are_merged_by_themselves(plan: str, label: str) -> None:
    """The scatters have two groups; covered by the plan or not."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        scattered = [b.gradient(saved, g, group) for group in ("dp", "ep")]
        out = [b.reduce_and_wait(wait, "sum", "replicas") for wait in scattered]
    _, report = optimized(b.output(*out), (plan,), module_plan_unmatched="warn")
    assert merged(report) == {f"AR {label} replicas x2": 1}


def test_ddp_reduces_each_module_at_once() -> None:
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    out = []
    for number in (1, 0):
        with b.inside(f"layers.{number}"):
            for _ in range(3):
                out.append(b.reduce_and_wait(b.call(aten.mm, saved, g), "avg", "dp"))
            g = b.call(aten.mm, g, saved)
    _, report = optimized(b.output(g, *out))
    assert merged(report) == {"AR layers.0 dp x3": 1, "AR layers.1 dp x3": 1}


# ------------------------------------------------------------------- visits


def two_layers(b: ModuleGraph) -> dict[str, list[fx.Node]]:
    return {f"layers.{i}": [b.shard(), b.shard()] for i in range(2)}


def test_two_microbatches_have_their_own_buckets() -> None:
    b = ModuleGraph()
    shards = two_layers(b)
    out = []
    for _ in range(2):
        h = b.placeholder(SIZE, SIZE)
        for path, (p, q) in shards.items():
            with b.inside(path):
                h = b.use(b.use(h, p), q)
        out.append(h)
    _, report = optimized(b.output(*out))
    assert merged(report) == {"AG layers.0 dp x2": 2, "AG layers.1 dp x2": 2}


def test_interleaved_microbatches_have_their_own_buckets() -> None:
    """layers.0 of both, layers.1 of both: a visit ends where its first parameter comes again."""
    b = ModuleGraph()
    shards = two_layers(b)
    hs = [b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)]
    for path, (p, q) in shards.items():
        with b.inside(path):
            hs = [b.use(b.use(h, p), q) for h in hs]
    _, report = optimized(b.output(*hs))
    assert merged(report) == {"AG layers.0 dp x2": 2, "AG layers.1 dp x2": 2}
    pairs = [[int(name.rpartition("_")[2]) if name[-1].isdigit() else 0 for name in x.members]
             for x in report.buckets]  # fmt: skip
    assert pairs == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_shared_layer_has_a_bucket_for_each_run() -> None:
    b = ModuleGraph()
    h, p, q = b.placeholder(SIZE, SIZE), b.shard(), b.shard()
    for _ in range(3):
        with b.inside("shared"):
            h = b.use(b.use(h, p), q)
    _, report = optimized(b.output(h), ("shared",))
    assert merged(report) == {"AG shared dp x2": 3}


def test_gradients_of_two_microbatches() -> None:
    """Each gradient is reduced twice; the tags tell that they belong to one parameter."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved = b.placeholder(SIZE, SIZE)
    out = []
    for _ in range(2):
        g = b.placeholder(SIZE, SIZE)
        with b.inside("layers.0"):
            out += [b.gradient(saved, g), b.gradient(saved, g)]
        for place, wait in enumerate(out[-2:]):
            tag(wait, f"layers.0.w{place}", place, place)
    _, report = optimized(b.output(*out))
    assert merged(report) == {"RS layers.0 dp x2": 2}


def test_visits_of_the_backward_count_by_themselves() -> None:
    """The backward gathers r, then p, which the forward has gathered: no second visit."""
    b = ModuleGraph()
    h, p, q, r = b.placeholder(SIZE, SIZE), b.shard(), b.shard(), b.shard()
    with b.inside("layers.0"):
        h = b.use(b.use(h, p), q)
        again = [b.gather_and_wait(x, 2, "dp") for x in (r, p)]
        in_backward(*again)
        for weight in again:
            h = b.call(aten.mm, h, weight)
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 2}


def test_a_second_gather_does_not_end_a_visit_of_scatters() -> None:
    """p of the next microbatch is gathered between the scatters of p and q."""
    b = ModuleGraph()
    saved, g, p = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE), b.shard()
    out = []
    with b.inside("layers.0"):
        for place, name in enumerate("pq"):
            weight = b.gather_and_wait(p, 2, "dp")
            tag(weight, "layers.0.p", place=0)
            g = b.call(aten.mm, g, weight)
            out.append(b.gradient(saved, g))
            tag(out[-1], f"layers.0.{name}", place=place)
    _, report = optimized(b.output(g, *out))
    assert merged(report) == {"RS layers.0 dp x2": 1}


# ------------------------------------------------------------------- refused, and why


def test_a_path_outside_of_the_module_splits_a_bucket() -> None:
    """q's gather is written over by what the module made of p: q.copy_(head(h(p)))."""
    b = ModuleGraph()
    h, p, q, r = b.placeholder(SIZE, SIZE), b.shard(), b.shard(), b.shard()
    with b.inside("layers.0"):
        h = b.use(b.use(h, p), r)
    with b.inside("head"):
        b.call(aten.copy_, q, b.call(aten.slice.Tensor, h, 0, 0, SIZE // 2))
    with b.inside("layers.0"):
        h = b.use(h, q)
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 1}
    (refusal,) = report.refusals
    assert refusal.members == ("all_gather_into_tensor_default_2",)
    assert refusal.reason is RefusalReason.PREFETCH
    assert refusal.detail == "module bucket layers.0"


def test_what_is_left_over_is_merged_by_itself() -> None:
    """Two gathers in front of the write, two behind it: two buckets, and the report says why."""
    b = ModuleGraph()
    h, shards = b.placeholder(SIZE, SIZE), [b.shard() for _ in range(4)]
    with b.inside("layers.0"):
        h = b.use(b.use(h, shards[0]), shards[1])
        for shard in shards[2:]:
            b.call(aten.copy_, shard, b.call(aten.slice.Tensor, h, 0, 0, SIZE // 2))
        h = b.use(b.use(h, shards[2]), shards[3])
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 2}
    assert refused(report) == {"PREFETCH": 2}


def test_a_side_effect_splits_a_module() -> None:
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        h = b.layer(h)
        b.call(barrier, h)
        h = b.layer(h)
    _, report = optimized(b.output(h))
    assert merged(report) == {"AG layers.0 dp x2": 2}
    assert refused(report) == {"BARRIER": 2}


def test_alone_in_its_module() -> None:
    """One gather each: buckets of one are none, although both gathers have one key."""
    _, report = optimized(forward(2, count=1))
    assert merged(report) == {}
    assert refused(report) == {"ALONE_IN_MODULE": 2}
    assert {r.detail for r in report.refusals} == {f"module bucket layers.{i}" for i in range(2)}


def test_a_replica_that_is_the_only_one_of_its_key_is_alone() -> None:
    """One of two scatters of a bucket is reduced further."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        one, other = b.gradient(saved, g), b.gradient(saved, g)
        replica = b.reduce_and_wait(one, "sum", "replicas")
    _, report = optimized(b.output(replica, other))
    assert merged(report) == {"RS layers.0 dp x2": 1}
    assert refused(report) == {"ALONE_IN_KEY": 1}


@pytest.mark.parametrize(("cap_bytes", "sizes"), [(64, []), (128, [2, 2]), (192, [3]), (256, [4])])
def test_a_cap_splits_a_module(cap_bytes: int, sizes: list[int]) -> None:
    """Four gathers of 64 bytes; 192 of them leave one over."""
    _, report = optimized(forward(1, count=4), bucket_cap_mb=cap_bytes / 2**20)
    assert [len(x.members) for x in report.buckets] == sizes
    over = {64: {"BYTE_CAP": 4}, 128: {"BYTE_CAP": 2}, 192: {"BYTE_CAP": 1}, 256: {}}
    assert refused(report) == over[cap_bytes]


def test_caps_by_index_count_the_buckets_of_a_key() -> None:
    """The first bucket may hold two gathers, all others four."""
    caps = (128 / 2**20, 256 / 2**20)
    _, report = optimized(forward(2, count=4), bucket_cap_mb=caps)
    assert [len(x.members) for x in report.buckets] == [2, 2, 4]


def test_caps_by_index_count_the_buckets_of_a_visit() -> None:
    """Six gathers of one module: two in the first bucket, four in the second."""
    caps = (128 / 2**20, 256 / 2**20)
    _, report = optimized(forward(1, count=6), bucket_cap_mb=caps)
    assert [len(x.members) for x in report.buckets] == [2, 4]
