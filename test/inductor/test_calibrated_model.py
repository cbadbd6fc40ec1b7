"""The numbers of a calibration table, and what a runtime model takes from it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
    CalibrationTable,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import compute_costs
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import (
    DEVICES,
    Device,
    Link,
    LinkClass,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import (
    CollectiveTimes,
    Curve,
    MatmulRates,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import collective_ms
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    EstimationError,
    HostCosts,
    Interference,
    RuntimeModel,
    make_model,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
INTRA, INTER = LinkClass.INTRA_NODE, LinkClass.INTER_NODE


@pytest.fixture
def table() -> CalibrationTable:
    return gather_table(1.0, 3.0, 4.0)


def gather_table(*ms: float) -> CalibrationTable:
    """All-gathers over 4 ranks of a node, of 1000, 2000 and 4000 bytes."""
    return CalibrationTable(
        "test device",
        (CollectiveTimes(GATHER, INTRA, 4, (1000, 2000, 4000), ms),),
        (MatmulRates(torch.bfloat16, (10**9, 10**12), (1.0, 100.0)),),
        kernel_issue_us=1.0,
        collective_issue_us=2.0,
        coalesced_member_issue_us=3.0,
        wait_issue_us=4.0,
        compute_slowdown=1.5,
        loaded_launch_us=60.0,
    )


# -- its numbers ----------------------------------------------------------------------------------

LINK = Link(base_us=10.0, hop_us=1.0, gb_per_s=100.0)


@pytest.mark.parametrize(
    ("size_bytes", "ms"),
    [
        (1000, 1.0),
        (1500, 2.0),  # half way
        (2000, 3.0),
        (3000, 3.5),
        (4000, 4.0),
        (8000, 6.0),  # 1 ms each 2000 bytes, as between the last two
        (600, 0.2),  # 1 ms each 500 bytes, as between the first two
        (100, 0.01),  # the line is below zero; the link's base time stays
    ],
)
def test_between_and_beyond_the_points(table: CalibrationTable, size_bytes: int, ms: float) -> None:
    assert table.collective_ms(GATHER, size_bytes, 4, INTRA, LINK) == pytest.approx(ms)


def test_noise_at_a_small_size_does_not_count() -> None:
    """1000 bytes took 9 ms once, 2000 took 3: then 1000 bytes take at most 3."""
    table = gather_table(9.0, 3.0, 4.0)
    assert table.collective_ms(GATHER, 1000, 4, INTRA, LINK) == 3.0
    assert table.collective_ms(GATHER, 10, 4, INTRA, LINK) == 3.0


def test_latency_measured_below_the_devices_base_counts() -> None:
    table = gather_table(0.004, 0.005, 0.006)
    assert table.collective_ms(GATHER, 1, 4, INTRA, LINK) == pytest.approx(0.004, rel=1e-3)


@given(
    points=st.dictionaries(st.integers(1, 1 << 40), st.floats(1e-6, 1e6), min_size=2, max_size=12),
    sizes=st.lists(st.integers(0, 1 << 41), min_size=2, max_size=6),
)
def test_curve_rises_and_is_never_negative(points: dict[int, float], sizes: list[int]) -> None:
    amounts = sorted(points)
    curve = Curve.through(amounts, [points[a] for a in amounts])
    values = [curve.at(size) for size in sorted(sizes)]
    assert values[0] >= 0
    for low, high in itertools.pairwise(values):
        assert low <= high * (1 + 1e-9) + 1e-12
    largest = amounts[-1]
    assert curve.at(largest) == pytest.approx(points[largest])


def test_other_group_size_is_the_nearest_one_scaled_as_the_ring() -> None:
    table = CalibrationTable(
        "t",
        tuple(CollectiveTimes(GATHER, INTRA, g, (1000, 2000), (g, g + 1.0)) for g in (2, 16)),
    )
    for ranks, nearest in ((3, 2), (4, 2), (8, 16), (64, 16)):
        factor = collective_ms(GATHER, 2000, ranks, LINK) / collective_ms(
            GATHER, 2000, nearest, LINK
        )
        expected = (nearest + 1) * factor
        assert table.collective_ms(GATHER, 2000, ranks, INTRA, LINK) == pytest.approx(expected)
    # an unknown size counts as 8
    unknown = table.collective_ms(GATHER, 2000, None, INTRA, LINK)
    assert unknown == table.collective_ms(GATHER, 2000, 8, INTRA, LINK)


def test_equally_near_sizes_choose_the_smaller_whatever_the_files_order() -> None:
    """4 is twice 2 and half of 8."""
    entries = tuple(CollectiveTimes(GATHER, INTRA, g, (1000, 2000), (g, g + 1.0)) for g in (2, 8))
    given = [CalibrationTable("t", order) for order in (entries, entries[::-1])]
    values = {table.collective_ms(GATHER, 1000, 4, INTRA, LINK) for table in given}
    factor = collective_ms(GATHER, 1000, 4, LINK) / collective_ms(GATHER, 1000, 2, LINK)
    assert values == {2.0 * factor}


def test_what_was_not_measured_is_none(table: CalibrationTable) -> None:
    assert table.collective_ms(SCATTER, 1000, 4, INTRA, LINK) is None
    assert table.collective_ms(GATHER, 1000, 4, INTER, LINK) is None
    assert table.collective_ms(GATHER, 1000, 1, INTRA, LINK) is None
    assert table.matmul_ms(torch.float32, 10**9, DEVICES["H100"]) is None


def test_link_without_times_does_not_scale() -> None:
    free = Link(0.0, 0.0, float("inf"))
    times = CollectiveTimes(GATHER, INTRA, 2, (1000, 2000), (1.0, 2.0))
    assert CalibrationTable("t", (times,)).collective_ms(GATHER, 1000, 4, INTRA, free) == 1.0


@pytest.mark.parametrize(
    ("flops", "ms"),
    [
        (10**9, 1.0),  # at 1 TFLOPS
        (10**8, 0.1),  # smaller ones at the rate of the smallest
        (10**12, 10.0),  # at 100
        ((10**9 + 10**12) // 2, 5.5),
        (2 * 10**12 - 10**9, 19.0),  # 9 ms more for 999e9 more
    ],
)
def test_matmul_rates(table: CalibrationTable, flops: int, ms: float) -> None:
    assert table.matmul_ms(torch.bfloat16, flops, DEVICES["H100"]) == pytest.approx(ms)


def test_dtype_that_nobody_knows_counts_as_float32() -> None:
    table = CalibrationTable("t", matmul=(MatmulRates(torch.float32, (10**9,), (1.0,)),))
    device = DEVICES["H100"]
    assert table.matmul_ms(torch.float64, 10**9, device) == 1.0
    assert table.matmul_ms(torch.bfloat16, 10**9, device) is None


# -- the model ------------------------------------------------------------------------------------

ROUND = Device(
    "round", {torch.float32: 1.0, torch.bfloat16: 2.0}, 1e6, Link(0, 0, 1), Link(0, 0, 1),
    kernel_us=0.0, matmul_efficiency=1.0, dram_efficiency=1.0,
)  # fmt: skip


def products(dtype: torch.dtype) -> tuple[fx.Graph, fx.Node, fx.Node]:
    """mm of 1000 x 1000 (2e9 flops, 3e6 elements moved) and a relu of the result (2e6)."""
    b = GraphBuilder()
    x = b.placeholder(1000, 1000, dtype=dtype)
    mm = b.call(aten.mm, x, b.placeholder(1000, 1000, dtype=dtype))
    relu = b.call(aten.relu, mm)
    b.output(relu)
    return b.graph, mm, relu


def test_table_before_the_roofline_for_products_and_memory() -> None:
    table = CalibrationTable(
        "t",
        matmul=(MatmulRates(torch.bfloat16, (2 * 10**9,), (0.5,)),),
        dram_gb_per_s=1.0,
    )
    model = RuntimeModel(ROUND, table=table)
    graph, mm, relu = products(torch.bfloat16)
    costs = model.node_costs(graph, collect(graph))
    assert costs[mm].ms == pytest.approx(6.0)  # 6 MB at 1 GB/s, above 2e9 flops at 0.5 TFLOPS
    assert costs[relu].ms == pytest.approx(4.0)
    fast = RuntimeModel(ROUND, table=replace(table, dram_gb_per_s=None))
    costs = fast.node_costs(graph, collect(graph))
    assert costs[mm].ms == pytest.approx(4.0)
    assert costs[mm].launches == 1
    # a dtype that was not measured: 2e9 flops at the device's 1 TFLOPS
    graph, mm, relu = products(torch.float32)
    assert fast.node_costs(graph, collect(graph))[mm].ms == pytest.approx(2.0)


def test_slower_table_than_roofline_and_faster_one_both_count() -> None:
    graph, mm, _ = products(torch.bfloat16)
    roofline = compute_costs(graph, ROUND)[mm].ms
    assert roofline == pytest.approx(1.0)  # 2e9 flops at 2 TFLOPS
    for rate, expected in ((0.5, 4.0), (20.0, 0.1)):
        table = CalibrationTable("t", matmul=(MatmulRates(torch.bfloat16, (2 * 10**9,), (rate,)),))
        costs = RuntimeModel(ROUND, table=table).node_costs(graph, collect(graph))
        assert costs[mm].ms == pytest.approx(expected)


def gather_graph(group_size: int = 4) -> fx.Graph:
    b = GraphBuilder()
    gathered = b.gather_and_wait(b.placeholder(250, dtype=torch.float32), group_size, "g")
    return b.output(gathered).graph


def test_custom_before_table_before_formula(table: CalibrationTable) -> None:
    (gather,) = collect(gather_graph()).collectives
    assert gather.size_bytes == 4000
    quiet = Interference(launch_us=0.0)
    plain = RuntimeModel(interference=quiet)
    with_table = RuntimeModel(interference=quiet, table=table)
    assert with_table.collective_ms(gather) == 4.0
    assert with_table.collective_ms(gather, 2000) == 3.0
    custom = RuntimeModel(
        interference=quiet, table=table, custom=lambda node, size: 7.0 if size is None else None
    )
    assert custom.collective_ms(gather) == 7.0
    assert custom.collective_ms(gather, 2000) == 3.0
    nothing = RuntimeModel(interference=quiet, table=CalibrationTable("empty"))
    assert nothing.collective_ms(gather) == plain.collective_ms(gather) != 4.0


def test_make_model_takes_host_costs_and_slowdown_from_the_table(
    table: CalibrationTable,
) -> None:
    model = make_model("A100", 4, None, table, 1.2, 0.5)
    assert model.device is DEVICES["A100"] and model.gpus_per_node == 4
    assert model.host == HostCosts(1.0, 2.0, 3.0, 4.0)
    assert model.interference == Interference(1.5, 0.5, 60.0)
    # a user's own choice, and a table without
    assert make_model(table=table, compute_slowdown=1.1).interference.compute_slowdown == 1.1
    partly = CalibrationTable("t", wait_issue_us=9.0)
    assert make_model(table=partly).host == replace(HostCosts(), wait_us=9.0)
    assert make_model(table=partly).interference == Interference()
    assert make_model() == RuntimeModel()


def test_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(EstimationError, match="'H900' is not known; use one of A100, H100"):
        make_model("H900")


def test_description_names_the_table(table: CalibrationTable) -> None:
    text = make_model(table=table).describe()
    assert "H100 constants" in text and "test device" in text
    assert table.content_digest[:12] in text
    assert "calibration" not in make_model().describe()


def test_groups_of_one_name_and_other_ranks_are_kept_apart() -> None:
    """A model may serve several graphs; their groups share names."""
    (four,) = collect(gather_graph(4)).collectives
    model = RuntimeModel()
    inside = replace(four, ranks=(0, 1, 2, 3))
    across = replace(four, ranks=(0, 8, 16, 24))
    for _ in range(2):
        assert model.link(inside) is model.device.intra_node
        assert model.link(across) is model.device.inter_node
    (sixteen,) = collect(gather_graph(16)).collectives
    assert four.ranks is sixteen.ranks is None
    assert model.link(four) is model.device.intra_node
    assert model.link(sixteen) is model.device.inter_node


@pytest.mark.parametrize("with_table", [False, True])
def test_asking_for_a_collective_is_cheap(table: CalibrationTable, with_table: bool) -> None:
    """Planners ask thousands of times; sorting 1024 ranks each time takes over 60 us."""
    (gather,) = collect(gather_graph()).collectives
    assert gather.key is not None
    wide = replace(gather, ranks=tuple(range(1024)), key=replace(gather.key, group_size=1024))
    link = replace(table.collectives[0], link=INTER)
    model = RuntimeModel(table=CalibrationTable("t", (link,)) if with_table else None)
    best = min(_seconds(lambda: model.collective_ms(wide, 12345), 500) for _ in range(5))
    assert best < 30e-6


def _seconds(work: Callable[[], object], count: int) -> float:
    before = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - before) / count
