"""cross_rank_check on four gloo processes, a 2 x 2 mesh, where one rank believes in slower links."""

from __future__ import annotations

from typing import Any

import pytest

from torch_patches.testing.processes import Say, run_ranks

FLAGS = ("off", "warn", "error", "agree")


def work(rank: int, say: Say) -> dict[str, Any]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import torch_patches
    from torch_patches._inductor.fx_passes.comm_overlap.cross_rank import CrossRankError
    from torch_patches.testing.graph_builder import GraphBuilder

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = (str(group.group_name) for group in mesh.get_all_groups())

    def graph() -> Any:
        b = GraphBuilder()
        x, waits = b.placeholder(64, 64), []
        for layer in range(6):
            wait = b.gather_and_wait(b.placeholder(32, 64), 2, (outer, inner)[layer % 2])
            x = b.call(torch.ops.aten.mm, x, wait)
            waits.append(b.scatter_and_wait(x, "avg", 2, (outer, inner)[layer % 2]))
        return b.output(x, *waits)

    results: dict[str, Any] = {}
    for check in FLAGS:
        for other in (False, True):
            # What differs here is a cap; in a job it is the size of a rank's own compute.
            cap = 1e-3 if other and rank == 3 else 100.0
            gm = graph()
            say(f"{check}, one rank {'differs' if other else 'is like the others'}")
            try:
                report = torch_patches.optimize_graph(
                    gm, bucketing_mode="topo_span", bucket_cap_mb=cap, cross_rank_check=check
                )
                told = (report.cross_rank, report.schedule_hash, len(report.buckets))
            except CrossRankError as error:
                told = (str(error), "raised", 0)
            results[f"{check} {other}"] = told
    dist.barrier()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(work, 4, timeout_s=120.0)


def test_ranks_that_decide_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["off False"][0] == ""
        for check in FLAGS[1:]:
            assert rank[f"{check} False"][0] == "4 ranks decided alike"
            assert rank[f"{check} False"][1:] == rank["off False"][1:]


def test_every_rank_hears_of_one_that_differs(ranks: list[dict[str, Any]]) -> None:
    """Also rank 0, which shares no group with rank 3."""
    for rank in ranks:
        for check in FLAGS[1:]:
            assert (
                "ranks [3] would launch other collectives than rank 0" in rank[f"{check} True"][0]
            )
        assert rank["error True"][1] == "raised"
    assert ranks[3]["warn True"][1] != ranks[0]["warn True"][1]


def test_all_take_one_plan(ranks: list[dict[str, Any]]) -> None:
    hashes = {rank["agree True"][1:] for rank in ranks}
    assert hashes == {ranks[0]["off False"][1:]}
    assert ranks[3]["off True"][1:] not in hashes
