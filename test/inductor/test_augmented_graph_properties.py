"""AugmentedGraph against brute force; its determinism, its work, and its order list."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.graph import order_list
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.order_list import OrderList
from torch_patches._inductor.fx_passes.comm_overlap.graph.trail import Trail
from torch_patches.testing.augmented_graph_model import (
    Mismatch,
    Scenario,
    check_scenario,
    fails,
    minimise,
    random_scenario,
)

REPOSITORY = Path(__file__).resolve().parents[2]

# hypothesis's generator stands in for random.Random, so its shrinking works on our scenarios.
scenarios = st.randoms(use_true_random=False).map(random_scenario)
property_test = settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Against brute force


@property_test
@given(scenarios)
def test_random_operations_match_brute_force(scenario: Scenario) -> None:
    check_scenario(scenario)


@settings(property_test, max_examples=100)
@given(scenarios)
def test_random_operations_match_brute_force_when_labels_are_crowded(scenario: Scenario) -> None:
    """Neighbours one label apart, so that nearly every move has to spread labels out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_list, "_SPACING", 1)
        check_scenario(scenario)


def test_a_broken_graph_is_found_and_printed_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: a can_merge that ignores paths fails, with a program of ten lines or so."""
    monkeypatch.setattr(AugmentedGraph, "can_merge", lambda self, a, b: True)
    drawn = (random_scenario(random.Random(seed)) for seed in range(100))
    failing = next(scenario for scenario in drawn if fails(scenario))
    with pytest.raises(Mismatch) as caught:
        check_scenario(minimise(failing))
    program = str(caught.value).strip().splitlines()
    assert len(program) <= 10
    namespace: dict[str, object] = {}
    exec("\n".join(program), namespace)
    assert isinstance(namespace["graph"], AugmentedGraph)


# Determinism and work

_SEED_PROGRAM = """
import random
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches.testing.augmented_graph_model import observe
rng = random.Random(0)
names = [f"node{i}" for i in range(60)]
edges = [(names[i], names[j]) for j in range(60) for i in range(j) if rng.random() < 0.03]
graph = AugmentedGraph(names, edges)
for _ in range(200):
    rng.choice([graph.merge, graph.add_dependency, graph.has_path])(*rng.sample(names, 2))
print(observe(graph), graph.operations)
"""


def test_results_do_not_depend_on_hash_seed() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SEED_PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert "node59" in outputs[0]


def test_deep_graph_needs_no_recursion() -> None:
    depth = 20_000
    graph = AugmentedGraph(range(depth), [(i, i + 1) for i in range(depth - 1)])
    assert graph.has_path(0, depth - 1)
    assert not graph.add_dependency(depth - 1, 0)
    assert not graph.has_cycle()


def _gathers(count: int) -> AugmentedGraph[tuple[str, int]]:
    """gather_i -> compute_i and compute_{i-1} -> compute_i, each gather just before its use."""
    nodes = [(kind, i) for i in range(count) for kind in ("gather", "compute")]
    edges = [(("gather", i), ("compute", i)) for i in range(count)]
    edges += [(("compute", i - 1), ("compute", i)) for i in range(1, count)]
    return AugmentedGraph(nodes, edges)


def _scatters(count: int) -> AugmentedGraph[tuple[str, int]]:
    """compute_{i-1} -> compute_i -> scatter_i, nothing behind a scatter."""
    nodes = [(kind, i) for i in range(count) for kind in ("compute", "scatter")]
    edges = [(("compute", i), ("scatter", i)) for i in range(count)]
    edges += [(("compute", i - 1), ("compute", i)) for i in range(1, count)]
    return AugmentedGraph(nodes, edges)


def _work(graph: AugmentedGraph[tuple[str, int]], kind: str, count: int, bucket: int) -> int:
    for start in range(0, count, bucket):
        assert graph.merge_all((kind, i) for i in range(start, min(start + bucket, count)))
    assert not graph.has_cycle()
    return graph.operations


@pytest.mark.parametrize("bucket", [10, 10_000], ids=["buckets_of_10", "one_bucket"])
@pytest.mark.parametrize(("make", "kind"), [(_gathers, "gather"), (_scatters, "scatter")])
def test_work_of_merging_is_linear(make, kind: str, bucket: int) -> None:  # type: ignore[no-untyped-def]
    """Doubling the graph at most doubles the work, times 1.1 (invariant 8 of the architecture)."""
    work = [_work(make(count), kind, count, bucket) for count in (300, 600, 1200)]
    assert work[0] > 0
    assert work[1] <= 2 * 1.1 * work[0]
    assert work[2] <= 2 * 1.1 * work[1]


def test_path_query_ends_with_the_smaller_side() -> None:
    """A source with 1000 uses and a target with one need, no path: three edges or so are enough."""
    nodes = ["source", *range(1000), "need", "target"]
    edges = [("source", i) for i in range(1000)] + [("need", "target")]
    graph = AugmentedGraph(nodes, edges)
    assert not graph.has_path("source", "target")
    assert graph.operations < 5


# The order by itself


def test_order_list_matches_a_list() -> None:
    """Moves concentrated on few anchors, against list surgery; undone at the end."""
    rng = random.Random(0)
    trail = Trail()
    order, expected = OrderList(range(30), trail), list(range(30))
    labels = dict(order.label)
    for _ in range(3000):
        anchor, *items = rng.sample(range(30), 4)
        move = rng.choice((order.move_behind, order.move_in_front))
        move(anchor, items)
        expected = [item for item in expected if item not in items]
        at = expected.index(anchor) + (move == order.move_behind)
        expected[at:at] = items
        assert list(order) == expected
        assert [order.label[i] for i in expected] == sorted({order.label[i] for i in range(30)})
    trail.undo_to(0)
    assert list(order) == list(range(30))
    assert order.label == labels


def test_order_list_insertion_at_one_place_is_logarithmic() -> None:
    """4000 insertions directly behind item 0 respread about log2(4000) = 12 labels each."""
    count = 4000
    order = OrderList([0, 1], Trail())
    for item in range(2, count):
        order.append(item)
        order.move_behind(0, [item])
    assert list(order) == [0, *range(count - 1, 1, -1), 1]
    assert order.moves <= 3 * count + 2 * count * math.log2(count)
