"""``AugmentedGraphHelper``: dependencies and merge sets that may contradict each other.

Sketches: ``a -> b`` is a data dependency, ``a => b`` an extra one (b waits for a), ``{a, b}`` a
merge set.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._inductor.fx_passes import overlap_preserving_bucketer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat
from torch_patches.compat_api import AugmentedGraphHelper
from torch_patches.testing.beside_torch import (
    WorldSketch,
    held,
    infos,
    launches,
    of_torch,
    words,
)

BOTH = pytest.mark.parametrize(
    "helper", [of_torch("AugmentedGraphHelper"), AugmentedGraphHelper], ids=["torch", "ours"]
)

#: torch makes a cycle before 2.13.
BOTH_NOW = [AugmentedGraphHelper]
if _compat.has_drop_in_signatures():
    BOTH_NOW.append(of_torch("AugmentedGraphHelper"))


class Chains:
    """x -> a -> b,  x -> c -> d."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.a, self.b = self._chain("a", "b")
        self.c, self.d = self._chain("c", "d")
        self.graph.output((self.b, self.d))

    def _chain(self, *names: str) -> list[fx.Node]:
        nodes = [self.x]
        for name in names:
            nodes.append(self.graph.call_function(torch.neg, (nodes[-1],), name=name))
        return nodes[1:]

    def new(self, name: str, *inputs: fx.Node) -> fx.Node:
        """A node that some rewrite makes."""
        with self.graph.inserting_before(self.graph.output_node()):
            return self.graph.call_function(torch.add, inputs, name=name)


# -- dependencies ---------------------------------------------------------------------------------


@BOTH
def test_a_dependency_is_a_path_until_it_is_removed(helper):
    """b => c."""
    g = Chains()
    h = helper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    assert h.has_path(g.a, g.d) and not h.has_path(g.d, g.a)
    assert h.get_all_extra_deps() == {g.c: OrderedSet([g.b])}
    assert h.extra_uses[g.b] == OrderedSet([g.c])
    h.remove_extra_dep(n=g.c, dep=g.b)
    assert not h.has_path(g.a, g.d)
    assert h.get_all_extra_deps() == {}


@BOTH
def test_removing_a_dependency_leaves_the_data(helper):
    """a -> b and a => b."""
    g = Chains()
    h = helper(g.graph)
    h.add_extra_dep(n=g.b, dep=g.a)
    h.remove_extra_dep(n=g.b, dep=g.a)
    h.remove_extra_dep(n=g.b, dep=g.a)  # none is left: nothing happens
    assert h.has_path(g.a, g.b)


@BOTH
def test_all_dependencies_are_a_copy(helper):
    g = Chains()
    h = helper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    h.get_all_extra_deps()[g.c].clear()
    assert h.get_all_extra_deps() == {g.c: OrderedSet([g.b])}


@BOTH
def test_merged_dependencies_are_those_of_all_members(helper):
    """{b, d}, c => b: what b and d read, and c."""
    g = Chains()
    h = helper(g.graph)
    h.add_extra_dep(n=g.b, dep=g.c)
    h.merge_to_set(g.b, g.d)
    assert h.get_merged_deps(g.d) == OrderedSet([g.a, g.c])


# -- merge sets -----------------------------------------------------------------------------------


@BOTH
def test_a_path_through_a_merge_set(helper):
    """{b, c}: a before d."""
    g = Chains()
    h = helper(g.graph)
    assert not h.has_path(g.a, g.d)
    h.merge_to_set(g.b, g.c)
    assert h.has_path(g.a, g.d)
    h.unmerge_node(g.c)
    assert not h.has_path(g.a, g.d)
    assert h.merge_sets[g.c] == OrderedSet([g.c]) and h.merge_sets[g.b] == OrderedSet([g.b])


@BOTH
def test_a_set_takes_only_nodes_that_are_in_none(helper):
    g = Chains()
    h = helper(g.graph)
    h.merge_to_set(g.a, g.c)
    with pytest.raises(AssertionError):
        h.merge_to_set(g.b, g.c)
    h.merge_to_set(g.a, g.d)  # the other side may have members
    assert h.merge_sets[g.c] is h.merge_sets[g.a] == OrderedSet([g.a, g.c, g.d])


@BOTH
def test_a_path_within_a_set_is_no_question(helper):
    g = Chains()
    h = helper(g.graph)
    h.merge_to_set(g.a, g.c)
    with pytest.raises(AssertionError):
        h.has_path(g.a, g.c)


# -- cycles ---------------------------------------------------------------------------------------


@BOTH
def test_a_cycle_of_dependencies(helper):
    """a -> b => a."""
    g = Chains()
    h = helper(g.graph)
    assert not h.has_cycle()
    h.add_extra_dep(n=g.a, dep=g.b)
    assert h.has_cycle()
    h.remove_extra_dep(n=g.a, dep=g.b)
    assert not h.has_cycle()


@BOTH
def test_nothing_waits_for_the_output(helper):
    """Not even what the output does not need."""
    g = Chains()
    lonely = g.new("lonely", g.x)
    h = helper(g.graph)
    h.add_extra_dep(n=lonely, dep=g.graph.output_node())
    assert h.has_cycle()


def test_a_cycle_through_merge_sets():
    """{a, d}, {b, c}: a before b, c before d.  torch 2.13 looks at dependencies only."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.merge_to_set(g.a, g.d)
    assert not h.has_cycle()
    h.merge_to_set(g.b, g.c)
    assert h.has_cycle()
    assert h.has_path(g.a, g.b) and h.has_path(g.b, g.a)  # around it
    h.unmerge_node(g.c)
    assert not h.has_cycle()


def test_a_cycle_through_a_merge_set_and_a_dependency():
    """{b, c}, d => a."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.add_extra_dep(n=g.a, dep=g.d)
    assert not h.has_cycle()
    h.merge_to_set(g.b, g.c)
    assert h.has_cycle()


def test_cyclic_dependencies_raise_and_stay():
    """b => c is fine; d => a closes the circle."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    h.check_and_maybe_autofix_cyclic_extra_deps()
    h.add_extra_dep(n=g.a, dep=g.d)
    with pytest.raises(RuntimeError, match="a behind d"):
        h.check_and_maybe_autofix_cyclic_extra_deps()
    assert set(h.get_all_extra_deps()) == {g.c, g.a}


def test_cyclic_dependencies_are_taken_back(caplog):
    """Only the one that contradicts: torch drops both."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    h.add_extra_dep(n=g.a, dep=g.d)
    h.check_and_maybe_autofix_cyclic_extra_deps(autofix=True)
    assert h.get_all_extra_deps() == {g.c: OrderedSet([g.b])}
    assert not h.has_cycle()
    assert "a behind d" in caplog.text


# -- after a rewrite ------------------------------------------------------------------------------


@BOTH
def test_one_member_stands_for_its_set(helper):
    """{a, c} becomes n; a => d and x => c are n => d and x => n."""
    g = Chains()
    h = helper(g.graph)
    h.merge_to_set(g.a, g.c)
    h.add_extra_dep(n=g.d, dep=g.a)
    h.add_extra_dep(n=g.c, dep=g.x)
    new = g.new("n", g.x)
    h.transfer_erased_node_deps({g.a: new})
    deps = h.get_all_extra_deps()
    assert deps == {g.d: OrderedSet([new]), new: OrderedSet([g.x])}
    assert g.a not in h.merge_sets and g.c not in h.merge_sets


@pytest.mark.parametrize("helper", BOTH_NOW)
def test_dependencies_within_a_bucket_make_no_cycle(helper):
    """Starts {a, c}, waits {b, d}: b => c, from one member's wait to another's start."""
    g = Chains()
    h = helper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    h.merge_to_set(g.a, g.c)
    h.merge_to_set(g.b, g.d)
    start = g.new("start", g.x)
    wait = g.new("wait", start)
    h.transfer_erased_node_deps({g.a: start, g.b: wait})
    assert h.get_all_extra_deps() == {}
    assert not h.has_cycle()


@BOTH
def test_what_has_no_replacement_loses_its_dependencies(helper):
    """b => c, and b is gone."""
    g = Chains()
    h = helper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    h.transfer_erased_node_deps({g.b: None})
    assert h.get_all_extra_deps() == {}


def test_a_replacement_can_be_asked_about_at_once():
    """torch knows only the nodes that were there at first."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.add_extra_dep(n=g.c, dep=g.b)
    new = g.new("n", g.a)
    h.transfer_erased_node_deps({g.b: new})
    assert h.has_path(g.a, g.d)
    assert h.get_merged_deps(g.c) == OrderedSet([g.x, new])


def test_a_longer_way_round_makes_no_cycle_either():
    """d => a, and d becomes n, which needs b: n would be in front of a."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.add_extra_dep(n=g.a, dep=g.d)
    new = g.new("n", g.b)
    h.transfer_erased_node_deps({g.d: new})
    assert h.get_all_extra_deps() == {} and not h.has_cycle()


def test_a_member_that_takes_the_place_of_its_set():
    """{a, c} becomes c."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    h.merge_to_set(g.a, g.c)
    h.add_extra_dep(n=g.a, dep=g.x)
    h.transfer_erased_node_deps({g.a: g.c})
    assert h.get_all_extra_deps() == {g.c: OrderedSet([g.x])}
    assert h.merge_sets[g.c] == OrderedSet([g.c])


def test_dependencies_of_erased_nodes_are_forgotten():
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    lonely = g.new("lonely", g.x)
    h.add_extra_dep(n=g.c, dep=lonely)
    h.add_extra_dep(n=lonely, dep=g.a)
    h.add_extra_dep(n=g.d, dep=g.b)
    g.graph.erase_node(lonely)
    h.remove_erased_extra_deps()
    assert h.get_all_extra_deps() == {g.d: OrderedSet([g.b])}


def test_a_graph_that_is_not_sorted_yet():
    """A rewrite has put a node behind its user."""
    g = Chains()
    late = g.new("late", g.c)
    g.b.args = (late,)
    h = AugmentedGraphHelper(g.graph)
    assert h.has_path(g.c, g.b) and not h.has_path(g.a, g.b)
    assert not h.has_cycle()


@BOTH
def test_a_node_in_the_place_of_another_is_seen(helper):
    """b becomes n, which reads d; as many nodes as before, and nobody has told."""
    g = Chains()
    user = g.new("user", g.b)
    h = helper(g.graph)
    assert h.has_path(g.a, user) and not h.has_path(g.c, user)
    with g.graph.inserting_before(user):
        new = g.graph.call_function(torch.neg, (g.d,), name="n")
    g.b.replace_all_uses_with(new)
    g.graph.erase_node(g.b)
    if helper is not AugmentedGraphHelper:
        h.merge_sets[new] = OrderedSet([new])  # torch knows only the nodes that were there at first
    assert h.has_path(g.c, user) and not h.has_path(g.a, user)


def test_what_nodes_read_is_read_anew_when_asked_for():
    """torch's searches walk the graph itself."""
    g = Chains()
    h = AugmentedGraphHelper(g.graph)
    assert not h.has_path(g.a, g.d)
    g.d.args = (g.b,)
    h.transfer_erased_node_deps({})
    assert h.has_path(g.a, g.d)


# -- beside torch's -------------------------------------------------------------------------------


def random_graph(r: random.Random) -> list[fx.Node]:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(12):
        nodes.append(graph.call_function(torch.add, (r.choice(nodes), r.choice(nodes))))
    graph.output(nodes[-1])
    return nodes


@pytest.mark.parametrize("seed", range(100))
def test_random_changes_leave_both_alike(seed):
    """Sets, dependencies and paths, also around cycles; a cycle that torch sees we see."""
    r = random.Random(seed)
    nodes = random_graph(r)
    theirs, ours = (
        of_torch("AugmentedGraphHelper")(nodes[0].graph),
        AugmentedGraphHelper(nodes[0].graph),
    )
    for _ in range(12):
        change(r, nodes, (theirs, ours))
        assert ours.merge_sets == theirs.merge_sets
        assert ours.get_all_extra_deps() == theirs.get_all_extra_deps()
        assert ours.has_cycle() or not theirs.has_cycle()
        a, b = r.sample(nodes, 2)
        if theirs.merge_sets[a] is not theirs.merge_sets[b]:
            assert ours.has_path(a, b) == theirs.has_path(a, b)


def change(r: random.Random, nodes: list[fx.Node], helpers) -> None:
    kind = r.random()
    a, b = r.sample(nodes, 2)
    for h in helpers:
        if kind < 0.5:
            h.add_extra_dep(n=a, dep=b)
        elif kind < 0.65:
            h.remove_extra_dep(n=a, dep=b)
        elif kind < 0.85:
            if len(h.merge_sets[b]) == 1:
                h.merge_to_set(a, b)
        else:
            h.unmerge_node(a)


# -- inside torch's bucketer ------------------------------------------------------------------------


@pytest.mark.skipif(not _compat.has_drop_in_signatures(), reason="torch's bucketer asks for less")
@pytest.mark.parametrize("seed", range(20))
def test_torchs_bucketer_decides_alike_with_it(monkeypatch, seed):
    """Random graphs with hidden gathers and scatters; the order and buckets are the same."""
    found = []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for helper in (of_torch("AugmentedGraphHelper"), AugmentedGraphHelper):
            monkeypatch.setattr(overlap_preserving_bucketer, "AugmentedGraphHelper", helper)
            s = hidden_collectives(random.Random(seed))
            gm = s.done()
            bucketer = of_torch("OverlapPreservingBucketer")(
                gm.graph, infos(gm, s.hiding), OrderedSet(gm.graph.nodes), insert_overlap_deps=True
            )
            bucketer.bucket_collectives()
            found.append((launches(gm), words(gm), held(gm)))
    finally:
        dist.destroy_process_group()
    assert found[0] == found[1]


def hidden_collectives(r: random.Random) -> WorldSketch:
    """Eight collectives one behind the other; each may be hidden by a product of its own, which may
    need what has arrived."""
    s = WorldSketch(dist.group.WORLD.group_name)
    arrived = [s.x]
    for _ in range(8):
        gathers = r.random() < 0.6
        start = s.start() if gathers else s.scatter(s.mm(r.choice(arrived)))
        wait = s.end(start, *([s.mm(r.choice(arrived))] if r.random() < 0.5 else []))
        if gathers:
            arrived.append(wait)
    return s
