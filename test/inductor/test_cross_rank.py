"""cross_rank_check without processes: votes, plans that travel, and what is told of a difference.

``exchange`` is replaced where ranks are needed: it is the one function that talks.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx

import torch_patches
from torch_patches import _hooks
from torch_patches._inductor.fx_passes.comm_overlap import changing, cross_rank, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.cross_rank import CrossRankError, Vote
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import EstimationError
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_topo_span
from torch_patches._inductor.fx_passes.comm_overlap.portable_plan import (
    PortablePlan,
    PortablePlanError,
    decode,
    encode,
    structure_digest,
)
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import schedule_hash
from torch_patches.captured import load_captured
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.usefixtures("as_on_gpu")


def captured(which: str = "bw") -> fx.GraphModule:
    return load_captured(DATA / "llama_3l_fsdp8.json.gz").graphs[which]


def run(gm: fx.GraphModule, mode: str, **flags: Any) -> Any:
    return pipeline.run_post_grad(gm.graph, Options(mode, **flags))


class Peers:
    """Stands for ``exchange``: what other ranks answer, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.given: list[Any] = []
        self._answers = list(answers)
        monkeypatch.setattr(pipeline, "exchange", self)
        monkeypatch.setattr(cross_rank, "exchange", self)
        monkeypatch.setattr(pipeline, "groups_of", lambda skeleton: ["g"])

    def __call__(self, groups: Sequence[str], mine: Any) -> dict[int, Any]:
        self.given.append(mine)
        answer = self._answers.pop(0)
        return dict(answer(mine))


def vote_of(mode: str, gm: fx.GraphModule | None = None, **flags: Any) -> Vote:
    graph = (gm or captured()).graph
    given = collect(graph)
    options = Options(mode, cross_rank_check="agree", **flags)
    changed = changing.change_graph(graph, options, False)
    assert changed is not None
    return Vote.of(changed.after, given, changed.structure, changed.plan)


# -- plans that travel ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["topo_span", "auto", "transformer_block"])
@pytest.mark.parametrize("which", ["fw", "bw"])
def test_a_plan_that_travelled_gives_the_same_graph(mode: str, which: str) -> None:
    options = Options(mode)
    here, there = captured(which), captured(which)
    changed = changing.change_graph(here.graph, options, False)
    assert changed is not None
    assert changed.plan.buckets
    plan = pickle.loads(pickle.dumps(changed.plan))
    again = changing.change_graph(there.graph, options, False, plan)
    assert again is not None
    assert str(there.graph) == str(here.graph)
    assert schedule_hash(again.after) == schedule_hash(changed.after)


def test_a_plan_for_another_graph_is_refused() -> None:
    b = GraphBuilder()
    small = b.output(b.gather_and_wait(b.placeholder(2, 2), 2, "g"))
    before = str(small.graph)
    changed = changing.change_graph(captured().graph, Options("auto"), False)
    assert changed is not None
    with pytest.raises(PortablePlanError, match="nodes that this graph does not have"):
        changing.change_graph(small.graph, Options("auto"), False, changed.plan)
    assert str(small.graph) == before


def test_an_illegal_plan_is_refused() -> None:
    """Gathers and reduce-scatters in one bucket."""
    changed = changing.change_graph(captured().graph, Options("topo_span"), False)
    assert changed is not None
    bucket = changed.plan.buckets[0]
    members = tuple(range(len(collect(captured().graph).collectives)))
    wrong = replace(bucket, members=members, payload_order=members)
    with pytest.raises(PortablePlanError, match="not legal"):
        changing.change_graph(captured().graph, Options("topo_span"), False, PortablePlan((wrong,)))


def test_encoding_is_of_the_graph_the_plan_was_made_for() -> None:
    gm = captured()
    skeleton, order = collect(gm.graph), tuple(gm.graph.nodes)
    plan = plan_topo_span(skeleton, contract(gm.graph, skeleton), Options("topo_span"))
    back = decode(encode(plan, order), skeleton, order)
    assert [b.members for b in back.buckets] == [b.members for b in plan.buckets]
    one, other = copy.deepcopy(gm), copy.deepcopy(gm)
    for graph_module in (one, other):
        skeleton, order = collect(graph_module.graph), tuple(graph_module.graph.nodes)
        apply_plan(
            graph_module.graph,
            skeleton,
            decode(encode(plan, tuple(gm.graph.nodes)), skeleton, order),
        )
    assert str(one.graph) == str(other.graph)


def test_structure_tells_ops_and_wiring_not_sizes_and_names() -> None:
    def graph(rows: int, swap: bool = False, op: Any = aten.mm) -> fx.Graph:
        b = GraphBuilder()
        x, y = b.placeholder(rows, rows), b.placeholder(rows, rows, name=f"weight_{rows}")
        return b.output(b.call(op, *((y, x) if swap else (x, y)))).graph

    assert structure_digest(graph(2)) == structure_digest(graph(3))
    assert structure_digest(graph(2)) != structure_digest(graph(2, swap=True))
    assert structure_digest(graph(2)) != structure_digest(graph(2, op=aten.add.Tensor))


# -- what is made of votes ------------------------------------------------------------------------


def test_equal_ranks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(monkeypatch, lambda mine: {0: mine, 1: mine})
    report = run(captured(), "auto", cross_rank_check="error")
    assert report.cross_rank == "2 ranks decided alike"
    assert len(peers.given) == 1


def test_off_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(monkeypatch)
    assert run(captured(), "auto").cross_rank == ""
    assert peers.given == []


def test_a_difference_is_told_or_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = vote_of("topo_span", bucket_cap_mb=0.05)
    Peers(monkeypatch, lambda mine: {0: mine, 3: mine, 5: other})
    report = run(captured(), "auto", cross_rank_check="warn")
    text = "ranks [5] would launch other collectives than rank 0, from launch number"
    assert text in report.cross_rank
    assert text in caplog.text
    assert report.buckets
    Peers(monkeypatch, lambda mine: {0: other, 3: mine})
    gm = captured()
    with pytest.raises(CrossRankError, match=r"ranks \[3\] would launch .* 'error'"):
        run(gm, "auto", cross_rank_check="error")


def test_all_take_the_plan_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = vote_of("topo_span", bucket_cap_mb=0.05)
    peers = Peers(
        monkeypatch,
        lambda mine: {0: leader, 1: mine},
        lambda mine: {0: leader, 1: mine},
    )
    gm, expected = captured(), captured()
    report = run(gm, "auto", cross_rank_check="agree")
    changing.change_graph(expected.graph, Options("auto"), False, leader.plan)
    assert structure_digest(gm.graph) == structure_digest(expected.graph)
    assert peers.given[1].launches == leader.launches
    assert "all took the plan of rank 0" in report.cross_rank
    assert report.way == "another rank's"
    gm.graph.lint()


@pytest.mark.parametrize("why", ["another structure", "fails there", "fails here"])
def test_all_leave_the_graph_where_no_plan_fits(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    leader = vote_of("topo_span", bucket_cap_mb=0.05)
    if why == "another structure":
        leader = replace(leader, structure="other")
    if why == "fails here":
        monkeypatch.setenv("TORCH_PATCHES_STRICT", "0")
        monkeypatch.setattr(changing, "decode", lambda *args: 1 / 0)
    peers = Peers(
        monkeypatch,
        lambda mine: {0: leader, 1: mine},
        lambda mine: {0: leader, 1: None if why == "fails there" else mine},
    )
    gm = captured()
    before = [(n.name, str(n.target), str(n.args)) for n in gm.graph.nodes]
    report = run(gm, "auto", cross_rank_check="agree")
    assert [(n.name, str(n.target), str(n.args)) for n in gm.graph.nodes] == before
    assert "no plan fits all of them" in report.failure
    # A rank that cannot take it over says so: the others wait for its answer.
    assert len(peers.given) == (1 if why == "another structure" else 2)
    assert (peers.given[-1] is None) == (why == "fails here")


def test_a_failing_pass_votes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for it."""
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "0")
    monkeypatch.setattr(changing, "check_plan", lambda *args: 1 / 0)
    peers = Peers(monkeypatch, lambda mine: {0: mine, 1: mine})
    report = run(captured(), "topo_span", cross_rank_check="warn")
    assert "ZeroDivisionError" in report.failure
    assert len(peers.given[0].launches) == len(collect(captured().graph).collectives)


@pytest.mark.parametrize("error", [EstimationError("user"), MemoryError()])
def test_who_raises_answers_first(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Of the user's mistakes, and of causes local to one rank, the others hear all the same."""

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(changing, "check_plan", fail)
    peers = Peers(monkeypatch, lambda mine: {0: mine, 1: mine})
    with pytest.raises(type(error)):
        run(captured(), "topo_span", cross_rank_check="warn")
    assert peers.given == [Vote.of_failure()]


def test_who_raises_while_it_takes_a_plan_over_answers_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = vote_of("topo_span", bucket_cap_mb=0.05)

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(changing, "decode", fail)
    peers = Peers(monkeypatch, lambda mine: {0: leader, 1: mine}, lambda mine: {0: leader, 1: mine})
    with pytest.raises(MemoryError):
        run(captured(), "topo_span", cross_rank_check="agree")
    assert peers.given[1] is None


def test_a_plan_is_taken_where_none_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an undone run has marked must not look like a second run."""
    leader = vote_of("auto")
    real = changing.change_graph

    def unwilling(graph: Any, options: Options, *args: Any) -> Any:
        own = len(args) < 2 or args[1] is None
        return real(graph, replace(options, bucket_cap_mb=1e-6) if own else options, *args)

    monkeypatch.setattr(pipeline, "change_graph", unwilling)
    Peers(monkeypatch, lambda mine: {0: leader, 1: mine}, lambda mine: {0: leader, 1: mine})
    gm = captured()
    report = run(gm, "auto", cross_rank_check="agree")
    assert "all took the plan of rank 0" in report.cross_rank
    assert report.buckets


def two_streams(first: str, second: str) -> fx.GraphModule:
    b = GraphBuilder()
    x, y = b.placeholder(4, 4), b.placeholder(4, 4)
    starts = [b.all_gather(x, 2, first), b.all_gather(y, 2, second)]
    return b.output(*map(b.wait, starts))


def test_the_order_of_groups_is_seen() -> None:
    """Two groups over the same ranks are two streams: launched in another order, ranks hang."""
    given = collect(two_streams("a", "b").graph).collectives
    one, other = (collect(two_streams(*names).graph) for names in ("ab", "ba"))
    assert schedule_hash(one) == schedule_hash(other)
    assert schedule_hash(one, given) != schedule_hash(other, given)
    votes = [
        Vote.of(s, collect(two_streams("a", "b").graph), "", PortablePlan()) for s in (one, other)
    ]
    assert votes[0].launches != votes[1].launches


def test_groups_to_talk_over_do_not_depend_on_what_was_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_rank, "_talks", lambda group: True)
    ranks = {"a": (0, 1), "b": (0, 1), "c": (0, 2)}
    monkeypatch.setattr(cross_rank, "registered_ranks", ranks.get)
    assert cross_rank.groups_of(collect(two_streams("b", "a").graph)) == ["b", "a"]
    assert cross_rank.groups_of(collect(two_streams("c", "a").graph)) == ["a", "c"]
    asked: list[Any] = []
    monkeypatch.setattr(pipeline, "exchange", lambda groups, mine: {0: mine})
    monkeypatch.setattr(pipeline, "groups_of", lambda given: asked.append(given) or [])
    gm = captured()
    count = len(collect(gm.graph).collectives)
    run(gm, "auto", cross_rank_check="warn")
    assert [len(given.collectives) for given in asked] == [count]


def test_alone_nothing_is_sent() -> None:
    """No group of this graph is one of this process."""
    report = torch_patches.optimize_graph(captured(), cross_rank_check="error")
    assert report.cross_rank == "1 ranks decided alike"


def test_compiles_are_not_cached() -> None:
    for check, cached in (("off", True), ("warn", False), ("agree", False)):
        ours = _hooks.PostGradPass(Options("auto", cross_rank_check=check))
        assert (ours.uuid() is not None) == cached
