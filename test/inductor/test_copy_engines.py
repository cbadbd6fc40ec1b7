"""The flag copy_engine_gathers on whole graphs: what goes to the copy engines, and what is told of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch._inductor import config
from torch.utils._pytree import tree_leaves

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap import changing
from torch_patches._inductor.fx_passes.comm_overlap.graph import copy_engines
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import COPY_ENGINES, op_namespace
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import schedule_hash
from torch_patches.captured import load_captured, save_captured
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

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
    return [n for n in gm.graph.nodes if op_namespace(n.target) == COPY_ENGINES]


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


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize(
    "again",
    [{"bucket_cap_mb": 500.0}, {"bucketing_mode": "auto"}, {"gpus_per_node": 16}],
    ids=["cap", "mode", "nodes"],
)
def test_a_run_with_other_options_keeps_what_they_send(again: dict[str, object]) -> None:
    gm = model(4096, 2048, 4096)
    given = {"bucketing_mode": "topo_span", "bucket_cap_mb": 1.0}
    torch_patches.optimize_graph(gm, **given)  # type: ignore[arg-type]
    starts = [(start.target, start.args, start.kwargs) for start in by_copy_engine(gm)]
    assert len(starts) == 3 and all(kwargs == {"dtype": LOW} for _, _, kwargs in starts)
    torch_patches.optimize_graph(gm, **{**given, **again})  # type: ignore[arg-type]
    assert [(s.target, s.args, s.kwargs) for s in by_copy_engine(gm)] == starts


@pytest.mark.usefixtures("flag")
def test_values_on_all_ranks_are_those_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engines, "LEAST_BYTES", 1)
    gm = model(16, 32, 16)
    groups = {"g": [list(range(8))]}
    inputs = random_inputs(gm, 8, seed=0)
    expected = tree_leaves(run_spmd(gm, inputs, groups, 8))
    torch_patches.optimize_graph(gm, bucketing_mode="topo_span")
    assert by_copy_engine(gm)
    actual = tree_leaves(run_spmd(gm, inputs, groups, 8))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.usefixtures("flag")
def test_a_failure_behind_them_puts_the_functional_ops_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that no merge has replaced, too."""
    monkeypatch.delenv("TORCH_PATCHES_STRICT", raising=False)
    monkeypatch.setattr(changing, "_report", lambda *args: 1 / 0)
    gm = model(4096, 4096)
    before = gm.code
    report = torch_patches.optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=1.0)
    assert report.failure and gm.code == before


def test_which_kind_of_gather_it_is_shows_in_the_schedules_hash() -> None:
    hashes = set()
    for flag in (False, True):
        gm = model(4096, 4096)
        with config.patch({FLAG: flag}):
            torch_patches.optimize_graph(gm, bucketing_mode="topo_span")
        hashes.add(schedule_hash(collect(gm.graph)))
    assert len(hashes) == 2


@pytest.mark.usefixtures("flag")
def test_a_captured_graph_has_them_too(tmp_path: Path) -> None:
    gm = model(4096, 4096)
    torch_patches.optimize_graph(gm, bucketing_mode="topo_span", bucket_cap_mb=500.0)
    save_captured(tmp_path / "graph.json.gz", {"fw": gm}, {}, {})
    again = load_captured(tmp_path / "graph.json.gz").graphs["fw"]
    (start,), (was,) = by_copy_engine(again), by_copy_engine(gm)
    assert start.target is was.target and start.kwargs == was.kwargs
    (one,) = collect(again.graph).collectives
    assert (one.kind, one.size_bytes) == (CollectiveKind.ALL_GATHER, 2 * 4096 * 4096 * 2)


def test_without_the_flag_all_stay() -> None:
    gm = model(4096, 4096)
    assert torch_patches.optimize_graph(gm, bucketing_mode="auto").copy_engine_gathers == ()
    assert not by_copy_engine(gm)
