"""The contracted graph reaches exactly what the full graph reaches."""

import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def build(choices):
    """A random graph: (what, inputs) with what in 0 compute, 1 gather, 2 wait, 3 random, 4 print."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for what, first, second in choices:
        a, b = nodes[first % len(nodes)], nodes[second % len(nodes)]
        if what == 1:
            node = graph.call_function(c10d.all_gather_into_tensor.default, (a, 2, "g"))
        elif what == 2:
            node = graph.call_function(c10d.wait_tensor.default, (a,))
        elif what == 3:
            node = graph.call_function(aten.rand_like.default, (a,))
        elif what == 4:
            node = graph.call_function(print, (a,))
        else:
            node = graph.call_function(aten.add.Tensor, (a, b))
        nodes.append(node)
    graph.output(tuple(nodes[-2:]))
    return graph


def full_reachability(graph, skeleton):
    """node -> everything behind it, by brute force over data, order and barriers."""
    successors = {n: set(n.users) for n in graph.nodes}
    for before, after in skeleton.order_dependencies:
        successors[before].add(after)
    nodes = list(graph.nodes)
    kept = {c.start for c in skeleton.collectives} | {
        w for c in skeleton.collectives for w in c.waits
    }
    kept |= {n for pair in skeleton.order_dependencies for n in pair}
    for barrier in skeleton.barriers:
        if barrier.kind.name != "EFFECT":
            continue
        place = nodes.index(barrier.node)
        kept.add(barrier.node)
        for i, node in enumerate(nodes):
            if node in kept or node.target is print:
                if i < place:
                    successors[node].add(barrier.node)
                elif i > place:
                    successors[barrier.node].add(node)
    reach = {}
    for node in reversed(nodes):
        reach[node] = set().union(*({s} | reach.get(s, set()) for s in successors[node]), set())
    return reach, kept


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2, 2, 3, 4]), st.integers(0), st.integers(0)),
        max_size=18,
    )
)
def test_paths_equal_those_of_the_full_graph(choices):
    graph = build(choices)
    skeleton = collect(graph)
    contracted = contract(graph, skeleton)
    reach, kept = full_reachability(graph, skeleton)
    for source in kept:
        for target in kept:
            if source is not target:
                assert contracted.has_path(source, target) == (target in reach[source])


def test_compute_between_is_contracted_away():
    """A layer of many nodes leaves a start, a wait and one junction."""
    b = GraphBuilder()
    x, waits = b.placeholder(4, 4), []
    for _ in range(10):
        w = b.gather_and_wait(b.call(aten.neg, b.placeholder(2, 4)), 2, "g")
        x = b.call(aten.mm, x, w)
        for _ in range(20):
            x = b.call(aten.add.Tensor, x, b.call(aten.neg, x))
        waits.append(b.scatter_and_wait(x, "sum", 2, "g"))
    graph = b.output(*waits).graph
    assert len(contract(graph, collect(graph)).order()) <= 10 * 5
