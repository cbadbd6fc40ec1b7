"""One wait for all results of a coalesced collective: ``wait_tensors``, which torch traces from 2.15 on.

Before, the op does not exist; here it gets torch's meaning then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

import torch_patches
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import live_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import wait_source, wait_sources
from torch_patches._inductor.fx_passes.comm_overlap.notices import STRICT_VARIABLE
from torch_patches._inductor.fx_passes.comm_overlap.plan import BarrierKind, RefusalReason, Traffic
from torch_patches.testing._spmd_collectives import SpmdError
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.hiding_sketch import words
from torch_patches.testing.measured_memory import (
    Conditions,
    fake_groups,
    measure,
    real_inputs,
    with_group_names,
)
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GROUPS = {"g": [[0, 1]]}


def _wait_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [c10d.wait_tensor(tensor) for tensor in tensors]


@pytest.fixture(autouse=True, scope="module")
def the_op() -> Iterator[None]:
    if hasattr(c10d, "wait_tensors"):
        yield
        return
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
        library.impl("wait_tensors", _wait_each, "CompositeExplicitAutograd")
        yield


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails inside a pass raises, instead of leaving the graph."""
    monkeypatch.setenv(STRICT_VARIABLE, "1")


class Builder(GraphBuilder):
    def reduced(self, xs: Sequence[fx.Node]) -> list[fx.Node]:
        return self.all_reduce_coalesced(xs, "sum", "g")

    def wait_all(self, parts: Sequence[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
        """The wait, and its results."""
        wait = self.call(c10d.wait_tensors, list(parts))
        return wait, [self.getitem(wait, i) for i in range(len(parts))]


def test_it_is_the_wait_of_the_start() -> None:
    b = Builder()
    parts = b.reduced([b.placeholder(4), b.placeholder(6)])
    wait, results = b.wait_all(parts)
    skeleton = collect(b.output(*results).graph)
    (found,) = skeleton.collectives
    assert found.waits == (wait,) and wait_sources(wait) == tuple(parts)
    assert found.refusal is RefusalReason.COALESCED_IN_INPUT
    assert found.traffic is Traffic.GRADIENT
    assert not skeleton.barriers


def test_inside_control_deps_it_is_still_one() -> None:
    b = Builder()
    x = b.placeholder(4, 4)
    parts = b.reduced([x, x])
    product = b.call(aten.mm, x, x)
    wait, results = b.wait_all(parts)
    gm = b.output(product, *results)
    preserve_node_ordering(gm.graph, {wait: OrderedSet([product])})
    (found,) = collect(gm.graph).collectives
    (held,) = found.waits
    assert "control_deps" in str(held.target) and wait_sources(held) == tuple(parts)


def test_results_of_two_collectives_are_not_taken_apart() -> None:
    """Such a wait is an unknown effect: nothing crosses it."""
    b = Builder()
    starts = [b.all_gather(b.placeholder(4), 2, "g") for _ in range(2)]
    wait, results = b.wait_all(starts)
    gm = b.output(*results)
    skeleton = collect(gm.graph)
    assert wait_source(wait) is None
    assert [(barrier.node, barrier.kind) for barrier in skeleton.barriers] == [
        (wait, BarrierKind.EFFECT)
    ]
    assert {c.refusal for c in skeleton.collectives} == {RefusalReason.NO_WAIT}
    before = str(gm.graph)
    torch_patches.optimize_graph(gm, bucketing_mode="auto")
    assert str(gm.graph) == before


def test_what_it_waits_for_dies_result_by_result() -> None:
    """At exp: the inputs, exp and the second result; the first was used before."""
    b = Builder()
    x = b.placeholder(10)
    wait, (one, two) = b.wait_all(b.reduced([x, b.placeholder(30)]))
    used = b.call(aten.neg, b.call(aten.slice.Tensor, one, 0, 0, 5))
    other = b.call(aten.exp, x)
    gm = b.output(used, b.call(aten.neg, two), other)
    after = dict(zip(gm.graph.nodes, live_bytes(gm.graph).after, strict=True))
    assert after[wait] == 4 * (40 + 40)
    assert after[other] == 4 * (40 + 5 + 10 + 30)


def test_payloads_live_until_it() -> None:
    b = Builder()
    xs = [b.call(aten.neg, b.placeholder(10)) for _ in range(2)]
    parts = b.all_gather_coalesced(xs, 2, "g")
    other = b.call(aten.exp, b.placeholder(30))
    wait, results = b.wait_all(parts)
    gm = b.output(other, *results)
    after = dict(zip(gm.graph.nodes, live_bytes(gm.graph).after, strict=True))
    assert after[other] == 4 * (50 + 20 + 40 + 30)
    assert after[wait] == 4 * (50 + 40 + 30)


@pytest.mark.parametrize("eager", [False, True])
def test_a_run_holds_what_is_estimated(eager: bool) -> None:
    b = Builder()
    xs = [b.call(aten.neg, b.placeholder(size)) for size in (1000, 3000)]
    parts = b.all_gather_coalesced(xs, 2, "g")
    other = b.call(aten.exp, b.placeholder(2000))
    _, (one, two) = b.wait_all(parts)
    used = b.call(aten.neg, one)
    gm = b.output(other, used, b.call(aten.exp, two))
    with fake_groups({"g": (0, 1)}) as names:
        runnable = with_group_names(gm, names)
        measured = measure(runnable, real_inputs(gm.graph), Conditions(eager=eager))
    live = live_bytes(gm.graph, eager=eager)
    assert (live.at_node, live.after) == (measured.at_node, measured.after)


def in_flight(*, together: bool) -> fx.GraphModule:
    """A wait right behind its start, compute that neither needs, and two gathers to merge."""
    b = Builder()
    x = b.placeholder(8, 8)
    parts = b.reduced([b.call(aten.neg, x), b.call(aten.exp, x)])
    first, second = b.wait_all(parts)[1] if together else map(b.wait, parts)
    product = b.call(aten.mm, x, x)
    for _ in range(2):
        weight = b.gather_and_wait(b.placeholder(4, 8), 2, "g")
        product = b.call(aten.mm, product, weight)
    return b.output(b.call(aten.add.Tensor, product, first), second)


def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
    if node.target is aten.mm.default:
        return 10.0
    return None if collective_kind(node) is None else 4.0


def test_it_moves_as_single_waits_do() -> None:
    """Behind what hides its collective, with the values that were, and once."""
    orders = []
    for together in (True, False):
        gm = in_flight(together=together)
        before = copy.deepcopy(gm)
        for _ in range(2):
            report = torch_patches.optimize_graph(
                gm, bucketing_mode="auto", overlap=True, custom_runtime_estimation=estimate
            )
            assert report.failure is None
            orders.append(words(gm))
        inputs = random_inputs(before, 2, seed=0)
        old, new = (pytree.tree_leaves(run_spmd(g, inputs, GROUPS, 2)) for g in (before, gm))
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        assert words(before) == "s w mm s w mm s w mm"
    assert orders == ["s s mm w mm mm"] * 4


def test_the_interpreter_knows_what_has_arrived() -> None:
    b = Builder()
    parts = b.reduced([b.placeholder(4), b.placeholder(4)])
    early = b.call(aten.neg, parts[1])
    gm = b.output(early, *b.wait_all(parts)[1])
    with pytest.raises(SpmdError, match="before its wait"):
        run_spmd(gm, random_inputs(gm, 2, seed=0), GROUPS, 2)
