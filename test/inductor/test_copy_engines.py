"""The flag copy_engine_gathers on whole graphs: what goes to the copy engines, and what is told of it."""

from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from torch._inductor import config

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import copy_engine_op
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_namespace
from torch_patches.testing.graph_builder import GraphBuilder

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
FLAG = "aten_distributed_optimizations.copy_engine_gathers"
LOW = torch.bfloat16


@pytest.fixture
def flag() -> Iterator[None]:
    with config.patch({FLAG: True}):
        yield


def model(*dims: int, group_size: int = 8, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """Products with square weights of these sizes, which are gathered in bfloat16."""
    b = GraphBuilder()
    results = []
    for dim in dims:
        x = b.placeholder(16, dim, dtype=LOW)
        shard = b.placeholder(dim // group_size, dim, dtype=dtype)
        if dtype is not LOW:
            shard = b.call(aten._to_copy.default, shard, dtype=LOW)
        results.append(b.call(aten.mm, x, b.gather_and_wait(shard, group_size, "g")))
    return b.output(*results)


def by_copy_engine(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if op_namespace(n.target) == copy_engine_op.NAMESPACE]


# -- on whole graphs ------------------------------------------------------------------------------


@pytest.mark.usefixtures("flag")
def test_a_bucket_sends_its_parameters_and_casts_them_on_the_way() -> None:
    gm = model(4096, 4096)
    report = torch_patches.optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=500.0)
    (start,) = by_copy_engine(gm)
    gm.graph.lint()
    shards, ranks, group = start.args
    assert [shard.op for shard in shards] == ["placeholder"] * 2
    assert (ranks, group, start.kwargs) == (8, "g", {"dtype": LOW})
    assert [value.dtype for value in start.meta["val"]] == [LOW, LOW]
    assert report.copy_engine_gathers == (start.name,)
    assert report.copy_engine_bytes == 2 * 2 * (4096 // 8 * 4096 * 2)
    assert "1 gathers by the copy engines (16.0 MiB kept for them)" in report.summary()
    assert report.collectives_after == {"all_gather": 1}


@pytest.mark.usefixtures("flag")
def test_the_results_are_those_that_the_ops_fakes_have() -> None:
    gm = model(4096, 4096)
    torch_patches.optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=500.0)
    (start,) = by_copy_engine(gm)
    values = [shard.meta["val"] for shard in start.args[0]]
    with values[0].fake_mode:
        made = start.target(values, *start.args[1:], **start.kwargs)
    for one, other in zip(made, start.meta["val"], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.usefixtures("flag")
def test_a_gather_of_its_own_goes_too() -> None:
    gm = model(4096, 4096)
    report = torch_patches.optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=1.0)
    starts = by_copy_engine(gm)
    assert len(starts) == 2 and len(report.copy_engine_gathers) == 2
    assert all(start.args[0].op == "placeholder" for start in starts)


@pytest.mark.usefixtures("flag")
def test_a_bucket_that_is_copied_together_goes_as_one_tensor() -> None:
    gm = model(4096, 4096)
    arguments = {"bucketing_mode": "topo_span", "bucket_cap_mb": 500.0, "bucket_mode": "default"}
    torch_patches.optimize_graph(gm, **arguments)  # type: ignore[arg-type]
    (start,) = by_copy_engine(gm)
    assert start.args[0].meta["val"].shape == (2 * 512 * 4096,)
    assert start.args[0].meta["val"].dtype == torch.float32 and start.kwargs == {"dtype": LOW}


@pytest.mark.usefixtures("flag")
def test_a_group_that_spans_nodes_stays() -> None:
    gm = model(4096, 4096)
    report = torch_patches.optimize_graph(gm, bucketing_mode="topo_span", gpus_per_node=4)
    assert not by_copy_engine(gm) and report.copy_engine_gathers == ()


@pytest.mark.usefixtures("flag")
def test_a_second_run_changes_nothing() -> None:
    gm = model(4096, 2048, 4096)
    for _ in range(2):
        torch_patches.optimize_graph(gm, bucketing_mode="auto")
        code = gm.code
    assert by_copy_engine(gm)
    torch_patches.optimize_graph(gm, bucketing_mode="auto")
    assert gm.code == code


def test_without_the_flag_all_stay() -> None:
    gm = model(4096, 4096)
    assert torch_patches.optimize_graph(gm, bucketing_mode="auto").copy_engine_gathers == ()
    assert not by_copy_engine(gm)
