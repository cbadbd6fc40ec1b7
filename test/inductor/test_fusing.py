"""The flags that fuse chained collectives: where they act, what they leave, what is told.

A world of eight with a 4 x 2 mesh: the default group has all of its ranks in row-major order.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

import torch_patches
from torch_patches import _hooks, config, mesh_groups
from torch_patches._inductor.fx_passes.comm_overlap import changing, fusing, notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable, KnownMesh
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.all_gather_fusion import plan_fusions
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind, RefusalReason
from torch_patches.backend import read_settings
from torch_patches.testing.eager_backend import post_grad_eager
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.models import Llama, ModelConfig, fully_shard_simple

aten = torch.ops.aten
PREFIX = config.PREFIX
GATHERS = Options(fuse_chained_all_gathers=True)
BOTH = Options(fuse_chained_all_gathers=True, fuse_chained_reduce_scatters=True)


def names(mesh: DeviceMesh) -> tuple[str, str]:
    outer, inner = mesh.get_all_groups()
    return str(outer.group_name), str(inner.group_name)


def chains(mesh: DeviceMesh, count: int = 2) -> fx.GraphModule:
    """Weights gathered over both dimensions, and gradients scattered over both."""
    outer, inner = names(mesh)
    b = GraphBuilder()
    x, waits = b.placeholder(16, 16), []
    for _ in range(count):
        wait = b.gather_and_wait(b.placeholder(2, 16), 2, inner)
        x = b.call(aten.mm, x, b.gather_and_wait(wait, 4, outer))
        wait = b.scatter_and_wait(x, "avg", 4, outer)
        waits.append(b.scatter_and_wait(wait, "avg", 2, inner))
    return b.output(x, *waits)


def launches(gm: fx.GraphModule) -> dict[str, int]:
    found: dict[str, int] = {}
    for c in collect(gm.graph).collectives:
        found[c.kind.value] = found.get(c.kind.value, 0) + 1
    return found


# -- where they act -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "gathers", "scatters"),
    [
        (Options(), 4, 4),
        (GATHERS, 2, 4),
        (Options(fuse_chained_reduce_scatters=True), 4, 2),
        (BOTH, 2, 2),
    ],
)
def test_each_flag_fuses_its_own_kind(
    mesh: DeviceMesh, options: Options, gathers: int, scatters: int
) -> None:
    for run in (pipeline.run_joint, pipeline.run_post_grad):
        gm = chains(mesh)
        run(gm.graph, options)
        assert launches(gm) == {"all_gather": gathers, "reduce_scatter": scatters}


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("mode", ["topo_span", "transformer_block", "auto"])
def test_what_is_fused_is_bucketed(mesh: DeviceMesh, mode: str) -> None:
    gm = chains(mesh)
    report = torch_patches.optimize_graph(
        gm, bucketing_mode=mode, fuse_chained_all_gathers=True, fuse_chained_reduce_scatters=True
    )
    assert launches(gm) in (
        {"all_gather": 1, "reduce_scatter": 1},
        {"all_gather": 1, "reduce_scatter": 2},
        {"all_gather": 2, "reduce_scatter": 1},
    )
    assert report.collectives_before == {"all_gather": 4, "reduce_scatter": 4}
    assert report.saved_launches == 4


def test_a_second_run_changes_nothing(mesh: DeviceMesh) -> None:
    gm = chains(mesh)
    pipeline.run_post_grad(gm.graph, BOTH)
    before = str(gm.graph)
    report = pipeline.run_post_grad(gm.graph, BOTH)
    assert str(gm.graph) == before
    assert report is not None
    assert report.fusions == ()


def test_in_a_compile_with_bucketing_none(mesh: DeviceMesh) -> None:
    """Forward and backward launch half; torch's own flags stay as they are."""
    model = Llama(ModelConfig(layers=1))
    fully_shard_simple(model, mesh, placements=(Shard(0), Shard(0)))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    counters.clear()
    flags = {
        PREFIX + "fuse_chained_all_gathers": True,
        PREFIX + "fuse_chained_reduce_scatters": True,
    }
    torch._dynamo.reset()
    with inductor_config.patch(flags):
        torch.compile(model, backend=post_grad_eager, fullgraph=True)(tokens, tokens).backward()
    # Nine tensors in the block, embedding, norm, head: fused in the joint graph, once.
    assert counters["inductor"]["comm_overlap_fused_chains"] == 24
    assert counters["inductor"]["comm_overlap_saved_launches"] == 24
    assert counters["inductor"]["comm_overlap_graphs"] == 0


def test_bucketing_none_leaves_torchs_own_flags_alone(mesh: DeviceMesh) -> None:
    user = {PREFIX + "fuse_chained_all_gathers": True, PREFIX + "enable_overlap_scheduling": True}
    patches = _hooks.compile_patches(None, user)
    assert patches is not None
    assert patches[PREFIX + "enable_overlap_scheduling"] is True
    of_torch = {flag.full_name for flag in config.FLAGS if flag.of_torch}
    assert set(patches) & of_torch == {PREFIX + "enable_overlap_scheduling"}
    assert not any(name.startswith("bucket_") for name in patches)
    assert _hooks.compile_patches(None, {}) is None


def test_rank_lists_are_in_the_cache_key(mesh: DeviceMesh) -> None:
    """Two groups with equal names and sizes, and other ranks; only where they decide."""
    world = dist.distributed_c10d._world
    group = mesh.get_group("inner")

    def keys(options: Options) -> tuple[Any, str]:
        options = mesh_groups.with_groups(None, options)
        return _hooks.PostGradPass(options).uuid(), _hooks.metadata_digest(None, options)

    before, others = keys(GATHERS), keys(Options("auto"))
    world.pg_group_ranks[group] = {0: 0, 3: 1}
    assert all(one != other for one, other in zip(keys(GATHERS), before, strict=True))
    assert keys(Options("auto")) == others


# -- what they leave ------------------------------------------------------------------------------


def test_gathers_that_the_backward_repeats_in_part_stay_two(mesh: DeviceMesh) -> None:
    """Keeping what was gathered inside a node is what gathering in steps is for."""
    gm = chains(mesh, count=1)
    gathers = [c for c in collect(gm.graph).collectives if c.kind.value == "all_gather"]
    gathers[1].waits[0].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    report = pipeline.run_joint(gm.graph, GATHERS)
    assert report is not None
    assert [r.reason for r in report.refusals] == [RefusalReason.CHAIN_PHASE]
    for gather in gathers:
        for node in (gather.start, gather.waits[0]):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    pipeline.run_joint(gm.graph, GATHERS)
    assert launches(gm)["all_gather"] == 1


def test_a_second_wait_for_the_last_result(mesh: DeviceMesh) -> None:
    outer, inner = names(mesh)
    b = GraphBuilder()
    wait = b.gather_and_wait(b.placeholder(2, 6), 2, inner)
    last = b.all_gather(b.call(aten.view, wait, [2, 12]), 4, outer)
    gm = b.output(b.wait(last), b.wait(last))
    pipeline.run_post_grad(gm.graph, GATHERS)
    assert launches(gm) == {"all_gather": 2}


def test_a_scatter_stands_where_the_first_one_stood(mesh: DeviceMesh) -> None:
    """Else the whole gradient would live until the second one started."""
    outer, inner = names(mesh)
    b = GraphBuilder()
    x = b.placeholder(16, 16)
    wait = b.scatter_and_wait(x, "sum", 4, outer)
    y = b.call(aten.mm, x, x)
    b.output(b.scatter_and_wait(wait, "sum", 2, inner), y)
    gm = fx.GraphModule({}, b.graph)
    pipeline.run_post_grad(gm.graph, BOTH)
    order = [op_name(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert order == ["reduce_scatter_tensor", "wait_tensor", "mm"]


def test_a_view_behind_says_one_symbolic_size(mesh: DeviceMesh) -> None:
    """FX arguments stay numbers and nodes: two unknown sizes cannot be written down."""
    outer, inner = names(mesh)
    for columns, count in ((6, 1), (None, 2)):
        b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
        rows = b.symbol(2).meta["val"]
        last = columns or b.symbol(6).meta["val"]
        wait = b.gather_and_wait(b.placeholder(rows, last), 2, inner)
        wait = b.gather_and_wait(b.call(aten.unsqueeze, wait, 1), 4, outer)
        gm = b.output(wait)
        report = pipeline.run_post_grad(gm.graph, GATHERS)
        assert launches(gm) == {"all_gather": count}
        assert report is not None
        for node in gm.graph.nodes:
            flat: list[Any] = []
            fx.node.map_aggregate((node.args, node.kwargs), flat.append)
            assert not any(isinstance(value, torch.SymInt) for value in flat)


def lines_through(rank: int, mesh: torch.Tensor) -> list[tuple[int, ...]]:
    """The groups that torch makes of a mesh's dimensions, sorted."""
    where = [int(place) for place in (mesh == rank).nonzero()[0]]
    return [
        tuple(sorted(mesh.select(1 - dim, where[1 - dim]).tolist())) for dim in range(mesh.dim())
    ]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ([0, 1, 2, 3, 4, 5], None),
        ([3, 4, 5, 0, 1, 2], None),  # each line of dimension 0 backwards
        ([3, 5, 4, 2, 0, 1], RefusalReason.CHAIN_MESH),
    ],
)
def test_a_permuted_mesh_looks_alike_to_all_ranks(
    order: list[int], reason: RefusalReason | None
) -> None:
    """By their own lines alone, some ranks of the last one would fuse and some would not."""
    grid = torch.tensor(order).view(2, 3)
    alone, knowing = set(), set()
    for rank in range(6):
        lines = lines_through(rank, grid)
        groups = [
            ("a", lines[0], "nccl"),
            ("b", lines[1], "nccl"),
            ("all", tuple(range(6)), "nccl"),
        ]
        known = KnownMesh((2, 3), tuple(order), ("a", "b"))
        b = GraphBuilder()
        gm = b.output(b.gather_and_wait(b.gather_and_wait(b.placeholder(2, 2), 3, "b"), 2, "a"))
        for meshes, found in (((), alone), ((known,), knowing)):
            table = GroupTable(rank, tuple(groups), meshes)
            fusions, refusals = plan_fusions(collect(gm.graph), table, [CollectiveKind.ALL_GATHER])
            found.add((len(fusions), *(r.reason for r in refusals)))
    if reason is None:
        assert knowing == alone == {(1,)}
    else:
        assert len(alone) > 1
        assert {counts[0] for counts in knowing} == {0}


@pytest.mark.parametrize(("first", "fused"), [("nccl", 1), ("gloo", 0)])
def test_target_has_the_backend_of_the_chains_first_group(first: str, fused: int) -> None:
    b = GraphBuilder()
    gm = b.output(b.gather_and_wait(b.gather_and_wait(b.placeholder(2, 2), 2, "b"), 2, "a"))
    groups = (("a", (0, 2), "nccl"), ("b", (0, 1), first), ("all", (0, 1, 2, 3), "nccl"))
    skeleton = collect(gm.graph)
    fusions, refusals = plan_fusions(skeleton, GroupTable(0, groups), [CollectiveKind.ALL_GATHER])
    assert len(fusions) == fused
    assert [r.reason for r in refusals] == [RefusalReason.CHAIN_NO_GROUP] * (1 - fused)


def test_unevenness_of_the_joint_graph_is_remembered(mesh: DeviceMesh) -> None:
    """The split may leave the whole in the forward, and what cuts it in the backward."""
    outer, inner = names(mesh)

    def graph(is_cut: bool) -> fx.GraphModule:
        b = GraphBuilder()
        wait = b.gather_and_wait(b.placeholder(2, 6), 2, inner)
        wait = b.gather_and_wait(wait, 4, outer)
        return b.output(b.call(aten.slice.Tensor, wait, 0, 0, 15) if is_cut else wait)

    joint, forward = graph(True), graph(False)
    pipeline.run_joint(joint.graph, GATHERS)
    for one, other in zip(joint.graph.nodes, forward.graph.nodes, strict=False):
        if one.target == other.target:
            other.meta.update(one.meta)
    pipeline.run_post_grad(forward.graph, GATHERS)
    assert launches(forward) == {"all_gather": 2}


def test_groups_are_those_of_the_start_of_the_compile(mesh: DeviceMesh) -> None:
    """A backward that compiles later must not see what its cache key does not."""
    options = mesh_groups.with_groups(None, GATHERS)
    world = dist.distributed_c10d._world
    world.pg_names[object()] = "later"  # type: ignore[index]
    assert "later" not in repr(options)
    dist.new_group([0, 1, 2, 3])
    assert options.groups is not None
    assert len(mesh_groups.known_groups(None).groups) == len(options.groups.groups) + 1
    del world.pg_names[next(group for group, name in world.pg_names.items() if name == "later")]


def test_only_groups_with_the_backend_of_the_chain_the_default_one_last(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, _ = names(mesh)
    twin = dist.new_group(list(range(8)))
    assert [name for name, _ in GroupTable.registered().like(outer, 8)] == [
        str(twin.group_name),
        "0",
    ]
    monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, twin, "cpu:mpi")
    assert [name for name, _ in GroupTable.registered().like(outer, 8)] == ["0"]


def test_none_that_is_asked_for_fuses_only(mesh: DeviceMesh) -> None:
    gm = chains(mesh)
    report = torch_patches.optimize_graph(gm, bucketing_mode="none", fuse_chained_all_gathers=True)
    assert (report.mode, len(report.buckets), len(report.fusions)) == ("none", 0, 2)
    settings = read_settings({"bucketing_mode": "none", "fuse_chained_all_gathers": True})
    assert settings.options.bucketing_mode == "none"
    assert read_settings({"fuse_chained_all_gathers": True}).options.bucketing_mode == "topo_span"


def test_the_view_behind_has_metadata_of_its_own(mesh: DeviceMesh) -> None:
    outer, inner = names(mesh)
    b = GraphBuilder()
    wait = b.gather_and_wait(b.placeholder(2, 6), 2, inner)
    wait = b.gather_and_wait(b.call(aten.view, wait, [2, 12]), 4, outer)
    wait.meta["stack_trace"] = "here"
    gm = b.output(wait)
    pipeline.run_post_grad(gm.graph, GATHERS)
    shapes = {
        op_name(n.target): tuple(n.meta["val"].shape)
        for n in gm.graph.nodes
        if n.op == "call_function"
    }
    assert shapes == {
        "all_gather_into_tensor": (16, 6),
        "wait_tensor": (16, 6),
        "view": (8, 12),
    }
    assert all(
        n.meta["stack_trace"] == "here"
        for n in gm.graph.nodes
        if op_name(n.target) in ("wait_tensor", "view")
    )


def test_forward_and_backward_links_stay_two(mesh: DeviceMesh) -> None:
    gm = chains(mesh, count=1)
    last = [c for c in collect(gm.graph).collectives if c.kind.value == "all_gather"][1]
    for node in gm.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward"
    for node in (last.start, *last.waits):
        node.meta["partitioner_tag"] = "is_backward"
        node.meta["autograd_backward"] = True
    report = pipeline.run_joint(gm.graph, GATHERS)
    assert report is not None
    assert [r.reason for r in report.refusals] == [RefusalReason.CHAIN_PHASE]


def test_a_failing_report_does_not_undo_what_other_ranks_have_done(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    monkeypatch.setattr(changing, "fusion_report", lambda *args: 1 / 0)
    for run in (pipeline.run_joint, pipeline.run_post_grad):
        gm = chains(mesh)
        assert run(gm.graph, BOTH) is None
        assert launches(gm) == {"all_gather": 2, "reduce_scatter": 2}


def test_a_graph_without_chains_says_nothing(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    b = GraphBuilder()
    gm = b.output(b.call(aten.neg, b.placeholder(2)))
    with caplog.at_level(logging.INFO, logger="torch_patches"):
        assert pipeline.run_joint(gm.graph, BOTH) is None
    assert caplog.messages == []


# -- what is told ---------------------------------------------------------------------------------


def test_the_report_and_the_log_line(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torch_patches"):
        report = pipeline.run_post_grad(chains(mesh).graph, GATHERS)
    assert report is not None
    # Results in between: 4 x 16 floats each.
    assert (report.saved_launches, report.saved_bytes) == (2, 2 * 4 * 16 * 4)
    assert [(f.kind, f.group, f.group_size, len(f.members)) for f in report.fusions] == [
        ("all_gather", "0", 8, 2),
    ] * 2
    (line,) = caplog.messages
    assert line == (
        "comm_overlap post-grad graph: 2 chains of 4 collectives fused (2 launches, 0.0 MiB between "
        "them saved), launches all_gather=4 reduce_scatter=4 -> all_gather=2 reduce_scatter=4"
    )
    assert (
        "all_gather of 8 ranks on 0 instead of all_gather_into_tensor_default, " in report.explain()
    )


@pytest.mark.usefixtures("as_on_gpu")
def test_expected_times_are_those_of_the_graph_given(mesh: DeviceMesh) -> None:
    plain = torch_patches.optimize_graph(chains(mesh), bucketing_mode="auto")
    fused = torch_patches.optimize_graph(
        chains(mesh),
        bucketing_mode="auto",
        fuse_chained_all_gathers=True,
        fuse_chained_reduce_scatters=True,
    )
    assert fused.total_ms_before == plain.total_ms_before
    assert fused.total_ms_after < plain.total_ms_after
    assert fused.summary().endswith("(4 launches, 0.0 MiB between them saved)")


@pytest.mark.parametrize("where", ["apply_fusions", "plan_fusions"])
def test_a_failure_leaves_the_chains_and_says_so_once(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """Half way through; bucketing goes on."""
    real = getattr(fusing, where)

    def fail(*args: Any) -> None:
        real(*args)
        raise ValueError("for a test")

    monkeypatch.setattr(fusing, where, fail)
    with pytest.raises(ValueError, match="for a test"):
        pipeline.run_post_grad(chains(mesh).graph, BOTH)
    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    notices.warn_unfused.cache_clear()
    gm = chains(mesh)
    before = str(gm.graph)
    for run in (pipeline.run_joint, pipeline.run_post_grad):
        run(gm.graph, BOTH)
    assert str(gm.graph) == before
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "fuse_chained_all_gathers" in warning.getMessage()
    report = pipeline.run_post_grad(gm.graph, Options("topo_span", fuse_chained_all_gathers=True))
    assert report is not None
    assert report.buckets


def test_causes_of_one_rank_raise(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    monkeypatch.setattr(fusing, "apply_fusions", fail)
    for run in (pipeline.run_joint, pipeline.run_post_grad):
        with pytest.raises(MemoryError):
            run(chains(mesh).graph, BOTH)
