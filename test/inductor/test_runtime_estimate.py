"""What compute nodes and collectives are estimated to cost; numbers are worked out by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import flop_counter

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import (
    ComputeCost,
    FlopCounter,
    compute_costs,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES, Device, Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.fusion import memory_traffic
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import (
    collective_ms,
    link_of,
    stays_in_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    EstimationError,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import is_joint_copy
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import SYMBOLIC_DIM_FALLBACK
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, Traffic
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
KIB = 1024

#: Round numbers: 1 TFLOPS for float32, 1 GB/s of memory, no least time.
ROUND = Device(
    "round", {torch.float32: 1.0, torch.bfloat16: 2.0}, 1.0, Link(0, 0, 1), Link(0, 0, 1),
    kernel_us=0.0, matmul_efficiency=1.0, dram_efficiency=1.0,
)  # fmt: skip


def total(gm: fx.GraphModule) -> tuple[int, int, int]:
    """Bytes read, bytes written, kernels."""
    traffic = memory_traffic(gm.graph).values()
    return (
        sum(t.read_bytes for t in traffic),
        sum(t.written_bytes for t in traffic),
        sum(t.launches for t in traffic),
    )


# -- fused regions --------------------------------------------------------------------------------


def test_pointwise_chain_reads_once_and_writes_once() -> None:
    """x (1 KiB) -> relu -> mul(x) -> cast to bf16 -> output."""
    b = GraphBuilder()
    x = b.placeholder(256)
    product = b.call(aten.mul.Tensor, b.call(aten.relu, x), x)
    gm = b.output(b.call(aten._to_copy, product, dtype=torch.bfloat16))
    assert total(gm) == (KIB, KIB // 2, 1)


def test_value_that_leaves_the_region_is_written_too() -> None:
    """x -> relu -> (output, mul -> output)."""
    b = GraphBuilder()
    x = b.placeholder(256)
    relu = b.call(aten.relu, x)
    gm = b.output(relu, b.call(aten.mul.Tensor, relu, 2.0))
    assert total(gm) == (KIB, 2 * KIB, 1)


def test_what_a_fused_kernel_reads_besides_its_region_counts() -> None:
    """relu(x) -> add(relu, y): the first input of the add is in registers, the other in memory."""
    b = GraphBuilder()
    x, y = b.placeholder(256), b.placeholder(256)
    gm = b.output(b.call(aten.add.Tensor, b.call(aten.relu, x), y))
    assert total(gm) == (2 * KIB, KIB, 1)


def test_what_is_read_through_two_views_is_read_once() -> None:
    b = GraphBuilder()
    x = b.placeholder(256)
    gm = b.output(b.call(aten.mm, b.call(aten.view, x, [16, 16]), b.call(aten.view, x, [16, 16])))
    assert total(gm) == (KIB, KIB, 1)


def test_matrix_product_between_two_pointwise_ops_keeps_them_apart() -> None:
    """x (16 x 16) -> relu -> mm -> add(relu): the add reads both results from memory."""
    b = GraphBuilder()
    x = b.placeholder(16, 16)
    relu = b.call(aten.relu, x)
    gm = b.output(b.call(aten.add.Tensor, b.call(aten.mm, relu, relu), relu))
    # relu: 1 + 1; mm: reads relu once + writes; add: reads mm and relu + writes
    assert total(gm) == (KIB + KIB + 2 * KIB, 3 * KIB, 3)


def test_views_are_free_and_part_of_a_tensor_is_read_in_part() -> None:
    b = GraphBuilder()
    x = b.placeholder(256)
    half = b.call(aten.slice.Tensor, x, 0, 0, 128)
    gm = b.output(b.call(aten.relu, b.call(aten.view, half, [8, 16])))
    assert total(gm) == (KIB // 2, KIB // 2, 1)


def test_what_is_only_read_through_views_is_written_too() -> None:
    """mm -> view -> transpose -> relu: the relu reads the product from memory."""
    b = GraphBuilder()
    x = b.placeholder(16, 16)
    view = b.call(aten.view, b.call(aten.mm, x, x), [256, 1])
    gm = b.output(b.call(aten.relu, b.call(aten.t, view)))
    assert total(gm) == (2 * KIB, 2 * KIB, 2)


def test_only_a_copy_of_tensors_over_themselves_computes_nothing() -> None:
    """Of others it copies, and another op on equal lists is no copy."""
    b = GraphBuilder()
    one, other = b.placeholder(4), b.placeholder(4)
    assert is_joint_copy(b.call(aten._foreach_copy, [one], [one]))
    pieces = [b.getitem(b.call(aten.split.Tensor, one, 2), 0), other]
    assert not is_joint_copy(b.call(aten._foreach_copy, pieces, pieces))
    assert not is_joint_copy(b.call(aten._foreach_copy, [one], [other]))
    assert not is_joint_copy(b.call(aten._foreach_add.List, [one], [one]))


def test_embedding_reads_the_rows_it_picks() -> None:
    b = GraphBuilder()
    table, rows = b.placeholder(1000, 64), b.placeholder(4, dtype=torch.int64)
    gm = b.output(b.call(aten.embedding, table, rows))
    assert total(gm) == (4 * 64 * 4 + 4 * 8, 4 * 64 * 4, 1)


# -- roofline -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda b: b.call(aten.mm, b.placeholder(8, 16), b.placeholder(16, 4)), 2 * 8 * 16 * 4),
        (
            lambda b: b.call(
                aten.addmm, b.placeholder(4), b.placeholder(8, 16), b.placeholder(16, 4)
            ),
            2 * 8 * 16 * 4,
        ),
        (
            lambda b: b.call(aten.bmm, b.placeholder(3, 8, 16), b.placeholder(3, 16, 4)),
            2 * 3 * 8 * 16 * 4,
        ),
        (lambda b: b.call(aten.relu, b.placeholder(8)), 0),
    ],
)
def test_flops(build: Callable[[GraphBuilder], fx.Node], expected: int) -> None:
    assert FlopCounter().flops(build(GraphBuilder())) == expected


def test_flops_of_attention_are_those_of_its_two_products() -> None:
    """2 heads of 8 tokens and width 16, in the variant for the CPU."""
    b = GraphBuilder()
    q = b.placeholder(1, 2, 8, 16)
    out = b.call(aten._scaled_dot_product_flash_attention_for_cpu, q, q, q)
    assert FlopCounter().flops(out) == 2 * (2 * 2 * 8 * 8 * 16)


def test_keys_count_for_every_query_head_that_shares_them() -> None:
    """4 query heads on 2 keys: as many operations as 4 on 4.  torch 2.11 alone refuses to count it."""
    b = GraphBuilder()
    q, k = b.placeholder(1, 4, 8, 16), b.placeholder(1, 2, 8, 16)
    out = b.call(aten._scaled_dot_product_flash_attention_for_cpu, q, k, k)
    assert FlopCounter().flops(out) == 4 * (2 * 2 * 8 * 8 * 16)


def test_what_a_formula_refuses_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass goes on by memory alone, as for an op without a formula."""

    def refuses(*args: object, **kwargs: object) -> int:
        raise AssertionError("shapes are incompatible")

    b = GraphBuilder()
    q = b.placeholder(1, 2, 8, 16)
    out = b.call(aten._scaled_dot_product_flash_attention_for_cpu, q, q, q)
    packet = aten._scaled_dot_product_flash_attention
    monkeypatch.setitem(flop_counter.flop_registry, packet, refuses)
    assert FlopCounter().flops(out) == 0


def test_larger_of_arithmetic_and_memory_counts() -> None:
    """mm of 1000 x 1000: 2e9 flops at 1 TFLOPS is 2 ms; 12 MB at 1 GB/s is 12 ms."""
    b = GraphBuilder()
    x = b.placeholder(1000, 1000)
    mm = b.call(aten.mm, x, b.placeholder(1000, 1000))
    b.output(mm)
    assert compute_costs(b.graph, ROUND)[mm].ms == pytest.approx(12.0)
    fast_memory = replace(ROUND, dram_gb_per_s=1e6)
    assert compute_costs(b.graph, fast_memory)[mm].ms == pytest.approx(2.0)


def test_dtype_of_the_operands_chooses_the_rate() -> None:
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        b = GraphBuilder()
        x = b.placeholder(1000, 1000, dtype=dtype)
        mm = b.call(aten.mm, x, x)
        b.output(mm)
        times.append(compute_costs(b.graph, replace(ROUND, dram_gb_per_s=1e6))[mm].ms)
    assert times == [pytest.approx(2.0), pytest.approx(1.0)]


def test_small_kernel_takes_a_launch_and_a_view_nothing() -> None:
    b = GraphBuilder()
    x = b.placeholder(8)
    view = b.call(aten.view, x, [2, 4])
    relu = b.call(aten.relu, view)
    b.output(relu)
    times = compute_costs(b.graph, DEVICES["H100"])
    assert times[relu].ms == pytest.approx(0.003)
    assert view not in times


def test_symbolic_sizes_count_as_the_fallback_whatever_the_hint() -> None:
    times = []
    for hint in (7, 7000, None):
        b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
        rows = SYMBOLIC_DIM_FALLBACK if hint is None else b.symbol(hint).meta["val"]
        x = b.placeholder(rows, 4096)
        mm = b.call(aten.mm, x, b.placeholder(4096, 4096))
        b.output(mm)
        times.append(compute_costs(b.graph, DEVICES["H100"])[mm].ms)
    assert times[0] == times[1] == times[2] > DEVICES["H100"].kernel_us / 1e3


# -- collectives ----------------------------------------------------------------------------------

LINK = Link(base_us=10.0, hop_us=1.0, gb_per_s=100.0)


@pytest.mark.parametrize(
    ("kind", "microseconds"),
    [
        # 4 ranks, 4 MB: 3 hops, 3/4 of 4e6 bytes at 1e5 bytes a microsecond
        (CollectiveKind.ALL_GATHER, 10 + 3 + 30),
        (CollectiveKind.REDUCE_SCATTER, 10 + 3 + 30),
        (CollectiveKind.ALL_REDUCE, 10 + 2 * (3 + 30)),
        (CollectiveKind.ALL_TO_ALL, 10 + 1 + 30),
        (CollectiveKind.BROADCAST, 10 + 3 + 40),
    ],
)
def test_ring_model(kind: CollectiveKind, microseconds: float) -> None:
    assert collective_ms(kind, 4e6, 4, LINK) == pytest.approx(microseconds / 1e3)


def test_group_of_one_and_unknown_group() -> None:
    assert collective_ms(CollectiveKind.ALL_GATHER, 1e9, 1, LINK) == pytest.approx(0.01)
    unknown = collective_ms(CollectiveKind.ALL_GATHER, 1e6, None, LINK)
    assert unknown == collective_ms(CollectiveKind.ALL_GATHER, 1e6, 8, LINK)


@pytest.mark.parametrize(
    ("ranks", "inside"),
    [
        (range(8), True),
        ((0, 2, 4, 6), True),
        (range(8, 16), True),
        ((0, 8, 16), False),
        (range(16), False),
        (range(6), False),  # so that ranks 6 to 11, across two nodes, get the same answer
        ((0, 1, 3), False),
        ((5,), True),
    ],
)
def test_link_is_that_of_all_groups_of_the_shape(ranks: tuple[int, ...], inside: bool) -> None:
    assert stays_in_node(ranks, gpus_per_node=8) is inside
    device = DEVICES["H100"]
    expected = device.intra_node if inside else device.inter_node
    assert link_of(device, len(ranks), ranks, 8) is expected


def test_link_of_an_unregistered_group() -> None:
    device = DEVICES["H100"]
    assert link_of(device, 8, None, 8) is device.intra_node
    assert link_of(device, 16, None, 8) is device.inter_node


# -- the model ------------------------------------------------------------------------------------


def gather_under_mm() -> fx.GraphModule:
    b = GraphBuilder()
    x = b.placeholder(64, 64)
    start = b.all_gather(x, 2, "g")
    return b.output(b.wait(start), b.call(aten.mm, x, x))


def test_custom_estimation_comes_first_and_none_leaves_it_to_the_model() -> None:
    gm = gather_under_mm()
    skeleton = collect(gm.graph)
    (gather,) = skeleton.collectives
    (mm,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    asked: list[int | None] = []

    def custom(node: fx.Node, size_bytes: int | None) -> float | None:
        asked.append(size_bytes)
        if node is gather.start:
            return None if size_bytes is None else size_bytes / 10
        return 7 if node is mm else None

    plain, model = RuntimeModel(), RuntimeModel(custom=custom)
    times = model.node_costs(gm.graph, skeleton)
    assert times[mm].ms == 7.0 != plain.node_costs(gm.graph, skeleton)[mm].ms
    assert model.collective_ms(gather) == plain.collective_ms(gather)
    assert model.collective_ms(gather, 50) == 5.0
    assert asked[-2:] == [None, 50]
    assert "H100" in model.describe() and "custom" in model.describe()


@pytest.mark.parametrize("given", [-1.0, float("nan"), float("inf"), 10**400, "3", True])
def test_custom_estimation_that_is_no_time_raises(given: object) -> None:
    gm = gather_under_mm()
    model = RuntimeModel(custom=lambda node, size: given)  # type: ignore[arg-type,return-value]
    with pytest.raises(EstimationError, match="custom_runtime_estimation returned"):
        model.node_costs(gm.graph, collect(gm.graph))


def test_custom_estimation_that_raises_raises() -> None:
    """Perhaps on this rank only; a graph left alone here hangs the ranks that changed theirs."""
    gm = gather_under_mm()

    def faulty(node: fx.Node, size_bytes: int | None) -> float:
        raise KeyError(node.name)

    with pytest.raises(EstimationError, match="custom_runtime_estimation raised KeyError"):
        RuntimeModel(custom=faulty).node_costs(gm.graph, collect(gm.graph))


def test_bucket_costs_less_than_its_members_apart() -> None:
    (gather,) = collect(gather_under_mm().graph).collectives
    model = RuntimeModel()
    apart = 2 * model.collective_ms(gather)
    assert model.collective_ms(gather, 2 * gather.size_bytes) < apart


def test_traffic_of_parameters_and_gradients_waits_for_a_place_beside_compute() -> None:
    """Once for each launch; what is on the critical path finds the processors free."""
    (gather,) = collect(gather_under_mm().graph).collectives
    model = RuntimeModel(interference=Interference(launch_us=30.0))
    alone = RuntimeModel(interference=Interference(launch_us=0.0))
    for traffic, us in ((Traffic.PARAMETER, 30.0), (Traffic.GRADIENT, 30.0), (Traffic.OTHER, 0.0)):
        one = replace(gather, traffic=traffic)
        for size in (None, 10 * gather.size_bytes):
            longer_ms = model.collective_ms(one, size) - alone.collective_ms(one, size)
            assert longer_ms * 1e3 == pytest.approx(us)


def test_no_longer_than_half_of_what_a_kernel_still_takes() -> None:
    gm = gather_under_mm()
    (gather,) = collect(gm.graph).collectives
    model = RuntimeModel(interference=Interference(launch_us=30.0))
    kernels = dict(zip(gm.graph.nodes, (ComputeCost(0.01, 1), ComputeCost(0.03, 1)), strict=False))
    beside = model.beside(kernels)
    # 3 of 4 times it is the long one, which has half of its 30 us left; else the short one's 5.
    assert beside.kernel_wait_us == pytest.approx((0.75 * 15 + 0.25 * 5) / 2)
    quiet = RuntimeModel(interference=Interference(launch_us=0.0))
    longer_ms = beside.collective_ms(gather) - quiet.collective_ms(gather)
    assert longer_ms * 1e3 == pytest.approx(6.25)
    assert beside.beside({}) is beside  # copies of a plan do not change what the input was like
    assert model.beside({}).collective_ms(gather) == quiet.collective_ms(gather)
    long = model.beside(dict.fromkeys(gm.graph.nodes, ComputeCost(1.0, 1)))
    assert long.collective_ms(gather) == model.collective_ms(gather)


def test_every_device_ranks_its_links_and_dtypes() -> None:
    for device in DEVICES.values():
        assert device.intra_node.gb_per_s > device.inter_node.gb_per_s
        assert device.matmul_tflops(torch.bfloat16) > device.matmul_tflops(torch.float32)
        assert device.matmul_tflops(torch.float64) == device.matmul_tflops(torch.float32)
