"""Large graphs: work that is counted, and budgets that end it in the same place everywhere.

``tools/bench_compile.py`` goes to 200,000 nodes and, with ``--dense``, to a million edges, and measures
seconds.
"""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches.testing.synthetic import dense_graph, training_graph

pytestmark = pytest.mark.usefixtures("as_on_gpu")


def edges(gm: fx.GraphModule) -> int:
    return sum(len(node.all_input_nodes) for node in gm.graph.nodes)


def test_work_of_a_large_graph_is_linear() -> None:
    """From 1,000 to 4,000 nodes."""
    options = Options("topo_span", max_topo_span=500)
    small, large = (training_graph(layers) for layers in (12, 48))
    nodes = [len(gm.graph.nodes) for gm in (small, large)]
    assert nodes[1] > 3_800
    work = [optimize_graph(gm, options).operations for gm in (small, large)]
    assert work[1] <= work[0] * nodes[1] / nodes[0] * 1.1


def test_work_of_auto_is_linear_too() -> None:
    """From 1,500 to 2,400 nodes, which few schedules settle; smaller graphs are searched for longer."""
    small, large = (training_graph(layers, compute=1, width=1024) for layers in (23, 37))
    nodes = [len(gm.graph.nodes) for gm in (small, large)]
    work = [optimize_graph(gm, Options("auto")).operations for gm in (small, large)]
    # Single gathers start far ahead, and each is looked at in all slots up to its use.
    assert 20 * nodes[0] > work[0] > 0
    assert work[1] <= work[0] * nodes[1] / nodes[0] * 1.1


def test_work_grows_with_edges_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3,600 to 14,400 edges, in ever fewer nodes for each."""
    replace, touched = fx.Node.replace_input_with, [0]

    def counted_replace(node: fx.Node, *arguments: fx.Node) -> None:
        touched[-1] += len(node.all_input_nodes)
        replace(node, *arguments)

    monkeypatch.setattr(fx.Node, "replace_input_with", counted_replace)
    options = Options("topo_span", max_topo_span=None, bucket_cap_mb=100.0)
    small, large = dense_graph(60), dense_graph(120)
    counted = [edges(gm) for gm in (small, large)]
    assert counted[1] > 14_000
    reports = []
    for gm in (small, large):
        touched.append(0)
        reports.append(optimize_graph(gm, options))
    assert [len(bucket.members) for bucket in reports[1].buckets] == [120, 120]
    allowed = counted[1] / counted[0] * 1.1
    assert reports[1].operations <= reports[0].operations * allowed
    assert 0 < touched[2] <= touched[1] * allowed


@pytest.mark.parametrize("budget", [1, 3])
def test_budget_ends_the_search_in_the_same_place_on_a_slow_machine(budget: int) -> None:
    """Schedules are counted, not seconds: a rank whose clock runs wild plans the same."""

    def plan(clock: float) -> tuple[str, tuple[tuple[str, ...], ...]]:
        gm = training_graph(3, width=256)
        options = Options("auto", max_schedules=budget, max_memory_increase_gb=1.0)
        now = [0.0]

        def tick() -> float:
            now[0] += clock
            return now[0]

        with (
            mock.patch.object(time, "perf_counter", tick),
            mock.patch.object(time, "monotonic", tick),
            mock.patch.object(time, "time", tick),
        ):
            report = optimize_graph(gm, options)
        return report.schedule_hash, tuple(bucket.members for bucket in report.buckets)

    assert plan(1e-6) == plan(1e6)


def test_a_larger_budget_makes_more_schedules() -> None:
    """So the budget above is what ends the search."""
    operations = []
    for budget in (1, 13):
        options = Options("auto", max_schedules=budget, max_memory_increase_gb=1.0)
        operations.append(optimize_graph(training_graph(3, width=256), options).operations)
    assert operations[0] < operations[1]
