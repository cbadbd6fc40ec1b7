"""Simulated runs of small graphs, worked out by hand.

Costs are given by a custom estimation; the host issues in no time unless a test is about it.
"""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Timeline, simulate
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten

#: ms of a matrix product, an all-gather and a reduce-scatter.
MM, GATHER, SCATTER = 10.0, 4.0, 6.0


def custom(node: fx.Node, size_bytes: int | None) -> float:
    if node.target is aten.mm.default:
        return MM
    kind = collective_kind(node)
    if kind is not None:
        return GATHER if kind is CollectiveKind.ALL_GATHER else SCATTER
    return 0.0


FREE_HOST = HostCosts(0.0, 0.0, 0.0, 0.0)
APART = Interference(compute_slowdown=1.0, link_sharing=0.0)
MODEL = RuntimeModel(custom=custom, host=FREE_HOST, interference=APART)


def run(gm: fx.GraphModule, model: RuntimeModel = MODEL) -> Timeline:
    skeleton = collect(gm.graph)
    return simulate(gm.graph.nodes, skeleton, model, model.node_costs(gm.graph, skeleton))


def test_wait_right_behind_its_start_is_all_exposed() -> None:
    """mm, start, wait, mm: 10 + 4 + 10."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    first = b.call(aten.mm, x, x)
    gathered = b.wait(b.all_gather(x, 2, "g"))
    line = run(b.output(first, gathered, b.call(aten.mm, x, x)))
    assert (line.total_ms, line.compute_ms, line.exposed_ms) == (24.0, 20.0, 4.0)
    assert line.spans[0].hidden_by == ()


def test_compute_between_start_and_wait_hides() -> None:
    """start, mm, wait: 4 of the 10 ms run beside the gather."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    start = b.all_gather(x, 2, "g")
    mm = b.call(aten.mm, x, x)
    line = run(b.output(mm, b.wait(start)))
    assert (line.total_ms, line.exposed_ms) == (10.0, 0.0)
    (span,) = line.spans
    assert (span.start_ms, span.end_ms, span.hidden_ms) == (0.0, 4.0, 4.0)
    assert [hiding.node for hiding in span.hidden_by] == [mm]


def test_collective_waits_for_compute_issued_before_it() -> None:
    """mm, start, mm, wait: the gather runs under the second mm."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    first = b.call(aten.mm, x, x)
    start = b.all_gather(x, 2, "g")
    second = b.call(aten.mm, x, x)
    line = run(b.output(first, second, b.wait(start)))
    assert (line.spans[0].start_ms, line.spans[0].end_ms) == (10.0, 14.0)
    assert [hiding.node for hiding in line.spans[0].hidden_by] == [second]


def two_gathers(first: str, second: str) -> fx.GraphModule:
    """Both start at once; then an mm; then both waits."""
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    starts = [b.all_gather(x, 2, group) for group in (first, second)]
    mm = b.call(aten.mm, x, x)
    return b.output(mm, *(b.wait(start) for start in starts))


def test_one_group_is_one_stream_and_two_groups_are_two() -> None:
    ends = [[s.end_ms for s in run(two_gathers("g", other)).spans] for other in ("g", "h")]
    assert ends == [[4.0, 8.0], [4.0, 4.0]]


def test_groups_on_one_link_share_it() -> None:
    model = replace(MODEL, interference=Interference(1.0, link_sharing=1.0))
    assert [s.end_ms for s in run(two_gathers("g", "h"), model).spans] == [4.0, 8.0]
    half = replace(MODEL, interference=Interference(1.0, link_sharing=0.5))
    assert [s.end_ms for s in run(two_gathers("g", "h"), half).spans] == [4.0, 6.0]


def test_compute_is_slower_while_a_collective_runs() -> None:
    """4 ms of gather slow the mm by 1.25: 3.2 ms of it are done in 4, then 6.8 remain."""
    model = replace(MODEL, interference=Interference(1.25, 0.0))
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    start = b.all_gather(x, 2, "g")
    line = run(b.output(b.call(aten.mm, x, x), b.wait(start)), model)
    assert line.total_ms == pytest.approx(10.8)
    assert line.compute_ms == 10.0


def test_two_collectives_slow_compute_once() -> None:
    """Gathers of two groups run from 0 to 4: the same 10.8 as one."""
    model = replace(MODEL, interference=Interference(1.25, 0.0))
    assert run(two_gathers("g", "h"), model).total_ms == pytest.approx(10.8)
    # one group: 8 ms of gathers, in which 6.4 are done
    assert run(two_gathers("g", "g"), model).total_ms == pytest.approx(11.6)


def test_host_holds_back_what_it_has_not_issued() -> None:
    """A launch takes 1 ms, a collective 3, each further member 2, a wait 0.5."""
    model = replace(MODEL, host=HostCosts(1000.0, 3000.0, 2000.0, 500.0))
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    line = run(b.output(b.wait(b.all_gather(x, 2, "g"))), model)
    assert (line.spans[0].start_ms, line.host_ms, line.exposed_ms) == (3.0, 3.5, 3.5)
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    parts = b.all_gather_coalesced([x, x, x], 2, "g")
    line = run(b.output(*(b.wait(part) for part in parts)), model)
    assert (line.spans[0].start_ms, line.host_ms) == (7.0, 8.5)


def test_every_wait_of_a_coalesced_collective_sees_one_end() -> None:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    first, second = b.all_gather_coalesced([x, x], 2, "g")
    early = b.wait(first)
    mm = b.call(aten.mm, x, x)
    line = run(b.output(early, mm, b.wait(second)))
    assert (line.total_ms, line.exposed_ms) == (14.0, 4.0)


def test_collective_never_waited_for_delays_the_end_only() -> None:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    b.reduce_scatter(b.call(aten.mm, x, x), "sum", 2, "g")
    line = run(b.output(x))
    assert (line.total_ms, line.exposed_ms) == (16.0, 6.0)


def test_exposed_by_group() -> None:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    waits = [b.wait(b.all_gather(x, 2, g)) for g in ("g", "h", "g")]
    assert run(b.output(*waits)).exposed_by_group() == {"g": 8.0, "h": 4.0}


@pytest.mark.parametrize("seed", range(20))
def test_time_is_compute_plus_what_is_exposed(seed: int) -> None:
    """With a free host and no interference, on random orders; and no lane runs backwards."""
    line = run(random_graph(random.Random(seed)))
    assert line.total_ms == pytest.approx(line.compute_ms + line.exposed_ms)
    for span in line.spans:
        assert 0 <= span.hidden_ms <= span.end_ms - span.start_ms + 1e-9
        assert span.exposed_ms >= 0
    by_group: dict[str, list[Any]] = {}
    for span in line.spans:
        by_group.setdefault(span.collective.group, []).append(span)
    for spans in by_group.values():
        assert all(a.end_ms <= b.start_ms for a, b in itertools.pairwise(spans))


def random_graph(r: random.Random) -> fx.GraphModule:
    b = GraphBuilder()
    x = b.placeholder(8, 8)
    flying: list[fx.Node] = []
    results = []
    for _ in range(30):
        choice = r.random()
        if choice < 0.3:
            results.append(b.call(aten.mm, x, x))
        elif choice < 0.6:
            flying.append(b.all_gather(x, 2, r.choice("gh")))
        elif choice < 0.7:
            flying.append(b.reduce_scatter(x, "sum", 2, r.choice("gh")))
        elif flying:
            results.append(b.wait(flying.pop(r.randrange(len(flying)))))
    results.extend(b.wait(start) for start in flying)
    return b.output(*results)
