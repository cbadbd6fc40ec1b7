"""Ranks that differ in everything but their work plan alike; one whose work differs is told.

Three gloo processes, each with a hash seed of its own, rank 0 held up at every decision.  Ranks 0 and
1 share a group and its graphs; rank 2 is another pipeline stage, which compiles nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from torch_patches.testing.processes import Say, run_ranks

PREFIX = "aten_distributed_optimizations."
MODES = ("topo_span", "transformer_block", "auto")
CHECKS = ("warn", "error", "agree")


def work(rank: int, say: Say, folder: str) -> dict[str, Any]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch
    import torch.distributed as dist

    import torch_patches  # noqa: F401  registers the flags

    torch.set_num_threads(1)
    stage = dist.new_group([0, 1])
    found: dict[str, Any] = {"hash of a text": hash("text")}
    if rank < 2:
        group = str(stage.group_name)
        found["plans"] = {mode: plans(rank, group, mode) for mode in MODES}
        say("checks")
        found["checks"] = {check: checked(rank, group, check) for check in CHECKS}
        say("caches")
        found["caches"] = caches(rank, group, folder)
    dist.barrier()
    return found


def graph(rank: int, group: str, wider: bool = False) -> Any:
    """Four layers; ranks differ in names, hints, constants, views and metadata of no weight.

    Args:
        wider: this rank's activations have a feature more, as where tensor parallelism does not
            divide evenly.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from torch_patches.testing.graph_builder import GraphBuilder

    aten = torch.ops.aten
    b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
    rows = b.symbol(7 if rank else 4096).meta["val"]
    h, waits = b.placeholder(rows, 64), []
    for _ in range(4):
        weight = b.gather_and_wait(b.placeholder(32, 64), 2, group)
        h = b.call(aten.mm, h, weight)
        if rank:
            h = b.call(aten.alias, h)
        h = b.call(aten.mul.Tensor, h, 2.0 + rank)
        gradient = b.call(aten.mm, b.call(aten.t, h), h)
        waits.append(b.scatter_and_wait(gradient, "sum", 2, group))
    if wider:  # one more activation to reduce, which the other rank does not have
        h = b.reduce_and_wait(h, "sum", group)
    gm = b.output(h, *waits)
    for place, node in enumerate(reversed(gm.graph.nodes)):
        node.meta["of this rank"] = object()
        if rank:
            node.name = f"n{place}"
    return gm


def plans(rank: int, group: str, mode: str) -> Any:
    """What is launched, with rank 0 slower at every look at the graph."""
    from unittest import mock

    import torch_patches
    from torch_patches._inductor.fx_passes.comm_overlap import changing

    original = changing.collect

    def slow(*arguments: Any) -> Any:
        time.sleep(0.0 if rank else 0.3)
        return original(*arguments)

    with mock.patch.object(changing, "collect", slow):
        report = torch_patches.optimize_graph(graph(rank, group), bucketing_mode=mode)
    return report.schedule_hash, [(b.kind, len(b.members)) for b in report.buckets]


def checked(rank: int, group: str, check: str) -> Any:
    """Rank 1 has another collective."""
    import torch_patches
    from torch_patches._inductor.fx_passes.comm_overlap.cross_rank import CrossRankError

    gm = graph(rank, group, wider=rank == 1)
    try:
        report = torch_patches.optimize_graph(
            gm, bucketing_mode="topo_span", cross_rank_check=check
        )
        return report.cross_rank, report.schedule_hash, len(report.buckets)
    except CrossRankError as error:
        return str(error), "raised", 0


def caches(rank: int, group: str, folder: str) -> Any:
    """Rank 0 has compiled the same before, rank 1 starts with an empty cache.  Both train."""
    import torch
    import torch.distributed._functional_collectives as funcol
    from torch._dynamo.utils import counters
    from torch._inductor import config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, str(rank))

    def step(x: Any, *shards: Any) -> Any:
        for shard in shards:
            x = x @ funcol.all_gather_tensor(shard, 0, group)
        return x

    def run() -> tuple[Any, bool]:
        torch._dynamo.reset()
        counters.clear()
        shards = [torch.full((2, 4), 1.0 + i + rank) for i in range(3)]
        with config.patch({PREFIX + "bucketing_mode": "auto"}), torch.no_grad():
            result = torch.compile(step)(torch.ones(4, 4), *shards)
        hit = counters["aot_autograd"]["autograd_cache_hit"]
        return result, hit + counters["inductor"]["fxgraph_cache_hit"] > 0

    first, _ = run()
    if rank == 1:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "empty")
    second, hit = run()
    return hit, torch.equal(first, second), second.tolist()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("caches")
    environments = [{"PYTHONHASHSEED": str(rank)} for rank in range(3)]
    return run_ranks(work, 3, timeout_s=200.0, arguments=(str(folder),), environments=environments)


def test_ranks_differ_in_what_must_not_count(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["hash of a text"] for rank in ranks}) == 3


@pytest.mark.parametrize("mode", MODES)
def test_schedules_are_equal(ranks: list[dict[str, Any]], mode: str) -> None:
    first, second = ranks[0]["plans"][mode], ranks[1]["plans"][mode]
    assert first == second
    assert sorted(first[1]) == [("all_gather", 4), ("reduce_scatter", 4)]


def test_a_rank_with_other_compute_is_told(ranks: list[dict[str, Any]]) -> None:
    for check in CHECKS:
        for rank in ranks[:2]:
            text = rank["checks"][check][0]
            assert "ranks [1] would launch other collectives than rank 0" in text
    assert [rank["checks"]["error"][1] for rank in ranks[:2]] == ["raised"] * 2
    hashes = {rank["checks"]["warn"][1] for rank in ranks[:2]}
    assert len(hashes) == 2
    # no plan fits both
    assert [rank["checks"]["agree"][2] for rank in ranks[:2]] == [0, 0]


def test_cache_states_do_not_matter(ranks: list[dict[str, Any]]) -> None:
    (first_hit, *first), (second_hit, *second) = (rank["caches"] for rank in ranks[:2])
    assert (first_hit, second_hit) == (True, False)
    assert first == second
    assert first[0]


def test_a_stage_that_compiles_nothing_is_not_waited_for(ranks: list[dict[str, Any]]) -> None:
    """It is in none of the groups of the graphs that the others compared."""
    assert set(ranks[2]) == {"hash of a text"}
