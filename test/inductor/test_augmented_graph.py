"""AugmentedGraph alone: merge sets, extra dependencies, changed nodes, undo.

Sketches: ``a -> b`` is a data dependency, ``a ~> b`` an extra one, ``{a, c}`` a merge set.
Against brute force it is tested in ``test_augmented_graph_properties.py``.
"""

from __future__ import annotations

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches.testing.augmented_graph_model import observe


def graph_of(nodes: str, *edges: str) -> AugmentedGraph[str]:
    """`graph_of("abc", "ab", "bc")` is a -> b -> c."""
    return AugmentedGraph(nodes, [(edge[0], edge[1]) for edge in edges])


# Construction


@pytest.mark.parametrize("edge", ["ba", "aa", "ax", "xa"])
def test_init_rejects_bad_dependency(edge: str) -> None:
    with pytest.raises(ValueError, match="dependency"):
        graph_of("ab", edge)


def test_init_rejects_duplicate_node() -> None:
    with pytest.raises(ValueError, match="twice"):
        graph_of("aba")


def test_unknown_node_raises_and_changes_nothing() -> None:
    graph = graph_of("abc")
    before = observe(graph)
    for call in (
        lambda: graph.merge_all(["a", "b", "x"]),
        lambda: graph.add_node("d", after=["a", "x"]),
        lambda: graph.add_dependency("a", "x"),
    ):
        with pytest.raises(KeyError):
            call()
        assert observe(graph) == before


def test_empty_graph() -> None:
    graph: AugmentedGraph[str] = AugmentedGraph([], [])
    assert graph.order() == []
    assert not graph.has_cycle()
    assert graph.add_node("a")
    assert graph.order() == ["a"]


# Merging


def test_can_merge_independent_nodes() -> None:
    graph = graph_of("abcd", "ab", "cd")
    assert graph.can_merge("b", "c")
    assert graph.merge("b", "c")
    assert graph.members("c") == ("b", "c")
    assert graph.representative("c") == "b"
    assert graph.is_merged("b")
    assert graph.order() == ["a", "b", "d"]


def test_cannot_merge_connected_nodes() -> None:
    """a -> b -> c: refused from both sides, directly and through b."""
    graph = graph_of("abc", "ab", "bc")
    before = observe(graph)
    for pair in ("ab", "ba", "ac", "ca"):
        assert not graph.can_merge(*pair)
        assert not graph.merge(*pair)
    assert observe(graph) == before


def test_can_merge_with_own_set() -> None:
    graph = graph_of("ab")
    assert graph.merge("a", "a")
    assert not graph.is_merged("a")
    assert graph.merge("a", "b")
    before = observe(graph)
    assert graph.can_merge("b", "a")
    assert graph.merge("b", "a")
    assert observe(graph) == before


def test_can_merge_when_order_has_to_change() -> None:
    """a -> x, y -> b with order a x y b: merging a and b moves y in front or x behind."""
    graph = graph_of("axyb", "ax", "yb")
    assert graph.merge("a", "b")
    assert graph.order() == ["y", "a", "x"]


def test_cannot_merge_across_extra_dependency() -> None:
    """a ~> b: refused until the extra dependency is gone."""
    graph = graph_of("ab")
    assert graph.add_dependency("a", "b")
    assert not graph.merge("a", "b")
    assert graph.remove_dependency("a", "b")
    assert graph.merge("a", "b")


def test_cannot_merge_through_merge_set() -> None:
    """a -> x, y -> b and {x, y}: no edge leads from a to b, but the bucket needs a and feeds b."""
    graph = graph_of("axyb", "ax", "yb")
    assert graph.can_merge("a", "b")
    assert graph.merge("x", "y")
    assert graph.has_path("a", "b")
    assert not graph.merge("a", "b")


def test_cannot_merge_crossing_pairs() -> None:
    """a -> d, c -> b: {a, b} is legal, {c, d} is legal, both together wait for each other."""
    graph = graph_of("acbd", "ad", "cb")
    assert graph.can_merge("c", "d")
    assert graph.merge("a", "b")
    assert not graph.can_merge("c", "d")
    assert not graph.has_cycle()


def test_can_merge_all() -> None:
    graph = graph_of("abcx", "cx")
    assert graph.merge_all(["c", "a", "b"])
    assert graph.members("a") == ("a", "b", "c")
    assert graph.representative("c") == "a"
    assert graph.merge_all([])
    assert graph.merge_all(["x"])


def test_cannot_merge_all_if_last_one_closes_cycle() -> None:
    """All or nothing: a and b could merge, c needs a."""
    graph = graph_of("abc", "ac")
    before = observe(graph)
    assert not graph.merge_all(["a", "b", "c"])
    assert observe(graph) == before


def test_merge_set_has_the_dependencies_and_uses_of_all_members() -> None:
    """a -> b -> c, d -> e -> f with {b, e}: the set needs a and d and feeds c and f."""
    graph = graph_of("abcdef", "ab", "bc", "de", "ef")
    assert graph.merge("e", "b")
    for member in "be":
        assert graph.predecessors(member) == ["a", "d"]
        assert graph.successors(member) == ["c", "f"]
    assert graph.predecessors("f") == ["b"]
    assert graph.has_path("d", "c")
    assert graph.has_path("a", "f")
    assert not graph.has_path("b", "e")


def test_parallel_dependencies_of_a_set_are_listed_once() -> None:
    graph = graph_of("abc", "ac", "bc")
    assert graph.merge("a", "b")
    assert graph.predecessors("c") == ["a"]


def test_neighbours_may_be_limited_and_all_members_walked_are_counted() -> None:
    """a -> b, c -> d, ... with {b, d, ...}: 50 members of one edge each."""
    count = 50
    graph = AugmentedGraph(range(2 * count), [(i, i + 1) for i in range(0, 2 * count, 2)])
    assert graph.merge_all(range(1, 2 * count, 2))
    every = list(range(0, 2 * count, 2))
    for limit, most in ((None, 2 * count), (8, 8), (0, 0)):
        before = graph.operations
        found = graph.predecessors(1, limit)
        assert graph.operations - before == most
        assert found == every if limit is None else set(found) <= set(every)
        assert len(found) == (count if limit is None else limit // 2)
    assert graph.successors(0, 8) == [1]


# Extra dependencies


def test_can_add_dependency_against_the_order() -> None:
    graph = graph_of("abcd", "ab", "cd")
    assert graph.add_dependency("d", "a")
    assert graph.order() == ["c", "d", "a", "b"]
    assert graph.has_path("c", "b")


def test_cannot_add_dependency_that_closes_cycle() -> None:
    graph = graph_of("abc", "ab")
    assert graph.add_dependency("b", "c")
    before = observe(graph)
    assert not graph.add_dependency("c", "a")
    assert not graph.add_dependency("a", "a")
    assert observe(graph) == before


def test_cannot_add_dependency_within_or_through_merge_set() -> None:
    """{a, c} with a -> b: c waits for b as little as a does."""
    graph = graph_of("abc", "ab")
    assert graph.merge("a", "c")
    assert not graph.add_dependency("a", "c")
    assert not graph.add_dependency("b", "c")
    assert graph.extra_dependencies() == []


def test_removing_extra_dependency_keeps_equal_data_dependency() -> None:
    graph = graph_of("ab", "ab")
    assert not graph.has_dependency("a", "b")
    assert not graph.remove_dependency("a", "b")
    assert graph.add_dependency("a", "b")
    assert graph.has_dependency("a", "b")
    assert graph.remove_dependency("a", "b")
    assert not graph.has_dependency("a", "b")
    assert graph.successors("a") == ["b"]
    assert not graph.can_merge("a", "b")


def test_data_dependency_arriving_later_keeps_extra_one() -> None:
    """x ~> b and a -> b; x takes over for a: x -> b and x ~> b, and only ~> can be removed."""
    graph = graph_of("axb", "ab")
    assert graph.add_dependency("x", "b")
    assert graph.replace_node("a", "x")
    assert graph.extra_dependencies() == [("x", "b")]
    assert graph.remove_dependency("x", "b")
    assert graph.has_path("x", "b")


def test_extra_dependencies_have_set_semantics() -> None:
    graph = graph_of("ab")
    assert graph.add_dependency("a", "b")
    assert graph.add_dependency("a", "b")
    assert graph.extra_dependencies() == [("a", "b")]
    assert graph.remove_dependency("a", "b")
    assert not graph.remove_dependency("a", "b")
    assert graph.extra_dependencies() == []


def test_extra_dependencies_belong_to_nodes_not_to_sets() -> None:
    """{a, b}, a ~> c and b ~> c: removing one leaves the other."""
    graph = graph_of("abc")
    assert graph.merge("a", "b")
    assert graph.add_dependency("a", "c")
    assert graph.add_dependency("b", "c")
    assert graph.remove_dependency("a", "c")
    assert graph.has_path("a", "c")
    assert graph.remove_dependency("b", "c")
    assert not graph.has_path("a", "c")


# Replacing and adding nodes


def test_replace_node_by_new_one_takes_over_everything() -> None:
    """{b, d}, a -> b -> c, a ~> b; B stands for b afterwards, b is unknown."""
    graph = graph_of("abcd", "ab", "bc")
    assert graph.add_dependency("a", "b")
    assert graph.merge("b", "d")
    assert graph.replace_node("b", "B")
    assert graph.members("d") == ("B", "d")
    assert graph.predecessors("B") == ["a"]
    assert graph.successors("B") == ["c"]
    assert graph.extra_dependencies() == [("a", "B")]
    with pytest.raises(KeyError):
        graph.members("b")


def test_replace_node_by_existing_one_unites() -> None:
    """{b, d}, a -> b -> c, x: x takes b's place in the set and gets its dependencies."""
    graph = graph_of("abcdx", "ab", "bc")
    assert graph.merge("b", "d")
    assert graph.replace_node("b", "x")
    assert graph.members("x") == ("d", "x")
    assert graph.representative("x") == "d"
    assert graph.predecessors("x") == ["a"]
    assert graph.successors("d") == ["c"]
    assert graph.order() == ["a", "d", "c"]
    with pytest.raises(KeyError):
        graph.members("b")


def test_cannot_replace_node_by_one_that_depends_on_it() -> None:
    graph = graph_of("abc", "ab", "bc")
    before = observe(graph)
    assert not graph.replace_node("a", "c")
    assert not graph.replace_node("c", "b")
    assert graph.replace_node("a", "a")
    assert observe(graph) == before


def test_can_add_node_between() -> None:
    graph = graph_of("abc", "ac")
    assert graph.add_node("n", after=["c"], before=["b"])
    assert graph.order() == ["a", "c", "n", "b"]
    assert not graph.can_merge("a", "b")
    assert graph.extra_dependencies() == []


def test_cannot_add_node_that_closes_cycle() -> None:
    graph = graph_of("ab", "ab")
    before = observe(graph)
    assert not graph.add_node("n", after=["b"], before=["a"])
    assert observe(graph) == before
    assert graph.add_node("n", after=["a"], before=["b"])
    with pytest.raises(ValueError, match="already"):
        graph.add_node("n")


# Undo


def test_rollback_restores_everything() -> None:
    graph = graph_of("abcdef", "ab", "cd")
    graph.add_dependency("b", "c")
    before = observe(graph)
    mark = graph.checkpoint()
    assert graph.merge("e", "f")
    assert graph.add_dependency("f", "a")
    assert graph.remove_dependency("b", "c")
    assert graph.replace_node("d", "D")
    assert graph.replace_node("D", "b")
    assert graph.add_node("n", after=["b"])
    assert observe(graph) != before
    graph.rollback(mark)
    assert observe(graph) == before
    assert graph.members("d") == ("d",)
    with pytest.raises(KeyError):
        graph.members("n")


def test_nested_checkpoints() -> None:
    graph = graph_of("abcd")
    outer = graph.checkpoint()
    graph.merge("a", "b")
    inner = graph.checkpoint()
    graph.merge("c", "d")
    graph.rollback(inner)
    assert graph.members("a") == ("a", "b")
    assert not graph.is_merged("c")
    graph.merge("a", "c")
    graph.rollback(inner)  # a mark stays good for the next try
    assert graph.members("a") == ("a", "b")
    graph.rollback(outer)
    assert not graph.is_merged("a")


def test_rollback_to_stale_mark_raises() -> None:
    graph = graph_of("abcd")
    outer = graph.checkpoint()
    graph.merge("a", "b")
    inner = graph.checkpoint()
    graph.rollback(outer)
    graph.merge("a", "c")  # the trail is as long again as it was at `inner`, with other entries
    graph.merge("a", "d")
    for stale in (inner, inner + 1):
        with pytest.raises(ValueError, match="stale"):
            graph.rollback(stale)
    assert graph.members("a") == ("a", "c", "d")


def test_has_cycle_does_not_trust_the_order() -> None:
    """Bypasses the refusals: adds the closing edge behind the graph's back."""
    graph = graph_of("abc", "ab", "bc")
    assert not graph.has_cycle()
    graph._set_edge(2, 0, 1)
    assert graph.has_cycle()
