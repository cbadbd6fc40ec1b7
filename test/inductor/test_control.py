"""Which control dependencies keep an overlap, on graphs written by hand."""

import itertools
import operator
import random

import pytest
import torch

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.graph import control
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    collect,
    collective_kind,
    find_starts_and_waits,
    number_nodes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    Overlap,
    insert_overlap_dependencies,
    plan_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import is_heavy_compute
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import is_control_deps
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten


class Graph(GraphBuilder):
    """Square matmuls, two ranks."""

    def __init__(self):
        super().__init__()
        self.x, self.w = self.placeholder(8, 8), self.placeholder(8, 8)

    def mm(self, a, b=None):
        return self.call(aten.mm, a, self.w if b is None else b)

    def gather(self, x=None):
        return self.all_gather(self.w if x is None else x, 2, "dp")

    def part(self, wait):
        """The first half of a gathered tensor."""
        return self.call(aten.slice.Tensor, wait, 0, 0, 8)


def edges_of(gm, *overlaps):
    plan = plan_overlap_dependencies(gm.graph, overlaps)
    return [(e.before.name, e.after.name) for e in plan.edges]


def test_one_matmul_is_held_between_start_and_wait():
    """start -> mm -> wait"""
    b = Graph()
    start = b.gather()
    mm = b.mm(b.x)
    wait = b.wait(start)
    gm = b.output(mm, wait)
    assert edges_of(gm, Overlap(start, (mm,), (wait,))) == [
        (start.name, mm.name),
        (mm.name, wait.name),
    ]


def test_matmuls_in_a_row_need_the_first_and_the_last_only():
    b = Graph()
    start = b.gather()
    first = b.mm(b.x)
    middle = b.mm(b.call(aten.relu, first))
    last = b.mm(middle)
    wait = b.wait(start)
    gm = b.output(last, wait)
    assert edges_of(gm, Overlap(start, (first, middle, last), (wait,))) == [
        (start.name, first.name),
        (last.name, wait.name),
    ]


def test_independent_matmuls_are_each_held():
    b = Graph()
    start = b.gather()
    one, two = b.mm(b.x), b.mm(b.w)
    wait = b.wait(start)
    gm = b.output(one, two, wait)
    assert edges_of(gm, Overlap(start, (one, two), (wait,))) == [
        (start.name, one.name),
        (start.name, two.name),
        (one.name, wait.name),
        (two.name, wait.name),
    ]


def test_matmul_that_feeds_the_start_or_needs_the_wait_is_no_anchor():
    b = Graph()
    before = b.mm(b.x)
    start = b.gather(before)
    wait = b.wait(start)
    after = b.mm(b.part(wait))
    gm = b.output(after)
    overlap = Overlap(start, (before, after), (wait,))
    plan = plan_overlap_dependencies(gm.graph, [overlap])
    assert not plan.edges
    assert plan.without_anchor == (overlap,)


def test_wait_that_the_matmul_needs_carries_the_edge():
    """gather_1, gather_2, wait_1, mm(wait_1), wait_2: no matmul is wrapped.

    Inductor keeps gather_1 in front of gather_2, which says nothing of wait_1.
    """
    b = Graph()
    starts = [b.gather(), b.gather(b.x)]
    first = b.wait(starts[0])
    mm = b.mm(b.x, b.call(aten.t, b.part(first)))
    second = b.wait(starts[1])
    gm = b.output(mm, second)
    assert edges_of(gm, Overlap(starts[1], (mm,), (second,))) == [
        (starts[1].name, first.name),
        (mm.name, second.name),
    ]


def test_last_wait_that_the_matmul_needs_carries_the_edge():
    """The earlier one would do as well, but says more than is needed."""
    b = Graph()
    starts = [b.gather(), b.gather(b.x), b.gather()]
    needed = [b.wait(s) for s in starts[:2]]
    mm = b.mm(b.part(needed[0]), b.part(needed[1]))
    late = b.wait(starts[2])
    gm = b.output(mm, late)
    assert edges_of(gm, Overlap(starts[2], (mm,), (late,))) == [
        (starts[2].name, needed[1].name),
        (mm.name, late.name),
    ]


def test_wait_of_which_only_the_shape_is_needed_carries_nothing():
    b = Graph()
    starts = [b.gather(), b.gather(b.x)]
    first = b.wait(starts[0])
    mm = b.mm(b.x, b.call(aten.zeros_like, b.part(first)))
    second = b.wait(starts[1])
    gm = b.output(mm, second)
    assert edges_of(gm, Overlap(starts[1], (mm,), (second,))) == [
        (starts[1].name, mm.name),
        (mm.name, second.name),
    ]


def test_order_of_starts_implies_an_edge():
    """gather_1, gather_2, mm(wait_2): gather_1 is in front of gather_2, so of wait_2, so of mm."""
    b = Graph()
    starts = [b.gather(), b.gather(b.x)]
    needed = b.wait(starts[1])
    mm = b.mm(b.x, b.part(needed))
    late = b.wait(starts[0])
    gm = b.output(mm, late)
    assert edges_of(gm, Overlap(starts[0], (mm,), (late,))) == [(mm.name, late.name)]


def test_shorter_edge_makes_a_longer_one_redundant():
    """Both gathers are hidden by one matmul: the second one's edge will do for the first."""
    b = Graph()
    starts = [b.gather(), b.gather(b.x)]
    mm = b.mm(b.x)
    waits = [b.wait(s) for s in starts]
    gm = b.output(mm, *waits)
    overlaps = [Overlap(s, (mm,), (w,)) for s, w in zip(starts, waits, strict=True)]
    assert edges_of(gm, *overlaps) == [
        (starts[1].name, mm.name),
        (mm.name, waits[0].name),
        (mm.name, waits[1].name),
    ]


def test_a_shape_implies_no_order():
    """zeros_like(mm) does not run mm: the path over it keeps nothing."""
    b = Graph()
    start = b.gather()
    mm = b.mm(b.x)
    payload = b.call(aten.zeros_like, mm)
    other = b.gather(payload)
    second = b.mm(b.x, b.part(b.wait(other)))
    wait = b.wait(start)
    gm = b.output(second, wait)
    edges = edges_of(gm, Overlap(start, (mm, second), (wait,)))
    assert (mm.name, wait.name) in edges


def odd_compute(b):
    """By name: compute that must never be wrapped, though it may take long."""
    q = b.placeholder(1, 1, 8, 8)
    image, kernel = b.placeholder(1, 2, 8, 8), b.placeholder(2, 2, 3, 3)
    sdpa = aten._scaled_dot_product_flash_attention_for_cpu
    return {
        "fusible": lambda: b.call(aten.relu, b.x),
        "random": lambda: b.call(aten.bernoulli, b.x),
        "generator": lambda: b.call(aten.rand_like, b.x),
        "attention": lambda: b.getitem(b.call(sdpa, q, q, q), 0),
        "tuple": lambda: b.getitem(b.call(aten.max.dim, b.x, 0), 0),
        "mutable": lambda: b.call(aten.addmm_, b.x, b.w, b.w),
        "convolution": lambda: b.call(
            aten.convolution, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
        "collective": lambda: b.gather(),
        "function": lambda: b.call(operator.mul, b.x, 2),
    }


@pytest.mark.parametrize("name", list(odd_compute(Graph())))
def test_compute_that_cannot_be_wrapped_is_no_anchor(name):
    b = Graph()
    make = odd_compute(b)[name]
    start = b.gather()
    compute = make()
    wait = b.wait(start)
    gm = b.output(compute, wait)
    everything = tuple(
        n for n in gm.graph.nodes if n.op == "call_function" and n not in (start, wait)
    )
    overlap = Overlap(start, everything, (wait,))
    anything = {"fusible": is_heavy_compute}.get(
        name, lambda node: node.target is not operator.getitem
    )
    plan = plan_overlap_dependencies(gm.graph, [overlap], anything)
    assert plan.without_anchor == (overlap,)
    before = str(gm.graph)
    assert insert_overlap_dependencies(gm.graph, [overlap], anything) == 0
    assert str(gm.graph) == before


def test_higher_order_ops_are_no_anchors():
    b = Graph()
    start = b.gather()
    mm = b.mm(b.x)
    wait = b.wait(start)
    b.output(mm, wait)
    mm.target = torch.ops.higher_order.auto_functionalized
    assert not control.can_wrap(mm)


def test_no_op_that_takes_a_generator_is_an_anchor():
    """Pitfall 25; whatever aten ops this torch has."""
    b = Graph()
    node = b.mm(b.x)
    packets = (getattr(aten, name) for name in dir(aten))
    packets = [p for p in packets if isinstance(p, torch._ops.OpOverloadPacket)]
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    random_ops = [op for op in ops if any("Generator" in str(a.type) for a in op._schema.arguments)]
    assert len(random_ops) > 50  # counted: 65 in 2.13, 67 in 2.11
    for op in random_ops:
        node.target = op
        assert not control.can_wrap(node), op


def test_another_anchor_is_taken_where_one_is_not_legal():
    b = Graph()
    start = b.gather()
    noise = b.call(aten.bernoulli, b.x)
    mm = b.mm(noise)
    wait = b.wait(start)
    gm = b.output(mm, wait)
    assert edges_of(gm, Overlap(start, (noise, mm), (wait,))) == [
        (start.name, mm.name),
        (mm.name, wait.name),
    ]


def test_of_a_reduction_that_is_lowered_in_place_the_payload_is_held():
    b = Graph()
    start = b.all_reduce(b.w, "sum", "dp")
    mm = b.mm(b.x)
    wait = b.wait(start)
    gm = b.output(mm, wait)
    overlap = Overlap(start, (mm,), (wait,))
    assert edges_of(gm, overlap) == [(start.name, mm.name), (mm.name, wait.name)]
    assert plan_overlap_dependencies(gm.graph, [overlap]).payload_held == (overlap,)


def test_held_payload_implies_nothing():
    """gather, all_reduce, mm: that the payload is made before mm says nothing of the gather."""
    b = Graph()
    starts = [b.gather(), b.all_reduce(b.w, "sum", "dp")]
    mm = b.mm(b.x)
    waits = [b.wait(s) for s in starts]
    gm = b.output(mm, *waits)
    overlaps = [Overlap(s, (mm,), (w,)) for s, w in zip(starts, waits, strict=True)]
    assert edges_of(gm, *overlaps)[:2] == [(s.name, mm.name) for s in starts]


def coalesced():
    b = Graph()
    parts = b.all_gather_coalesced([b.w, b.x], 2, "dp")
    mm = b.mm(b.x)
    waits = [b.wait(p) for p in parts]
    gm = b.output(mm, *waits)
    return gm, Overlap(parts[0].args[0], (mm,), tuple(waits)), parts


def dependencies(gm):
    return {n.name: [d.name for d in n.args[0]] for n in gm.graph.nodes if is_control_deps(n)}


def test_coalesced_start_is_depended_on_by_a_part_and_all_its_waits_are_held():
    gm, overlap, parts = coalesced()
    assert insert_overlap_dependencies(gm.graph, [overlap]) == 3
    assert dependencies(gm) == {
        "mm_default": [parts[0].name],
        "wait_tensor_default": ["mm_default"],
        "wait_tensor_default_1": ["mm_default"],
    }


def test_part_that_nobody_uses_stands_for_nothing():
    """Inductor drops it, and dependencies on it."""
    b = Graph()
    unused, used = b.all_gather_coalesced([b.w, b.x], 2, "dp")
    mm = b.mm(b.x)
    wait = b.wait(used)
    gm = b.output(mm, wait)
    insert_overlap_dependencies(gm.graph, [Overlap(unused.args[0], (mm,), (wait,))])
    assert dependencies(gm)["mm_default"] == [used.name]


def test_part_that_stands_too_late_moves_to_its_start():
    gm, overlap, parts = coalesced()
    for part in parts:
        overlap.compute[0].append(part)
    assert insert_overlap_dependencies(gm.graph, [overlap]) == 3
    assert parts[1].prev is overlap.start or parts[0].prev is overlap.start
    gm.graph.lint()


def layers(count):
    """A forward with a gather per layer, each started a layer before it is needed."""
    b = Graph()
    x, pending = b.x, b.gather()
    for layer in range(count):
        following = b.gather() if layer + 1 < count else None
        weight = b.part(b.wait(pending))
        x = b.call(aten.relu, b.mm(x, weight))
        x = b.call(aten.add.Tensor, x, b.mm(x))
        pending = following
    return b.output(x)


def overlaps_of(graph):
    """Everything that stands between a start and its first wait."""
    numbers = number_nodes(graph)
    result = []
    for start, waits in find_starts_and_waits(graph)[1].items():
        first = min(numbers[w] for w in waits)
        compute = tuple(n for n in graph.nodes if numbers[start] < numbers[n] < first)
        result.append(Overlap(start, compute, tuple(waits)))
    return result


def test_second_call_adds_nothing():
    gm = layers(4)
    assert insert_overlap_dependencies(gm.graph, overlaps_of(gm.graph)) > 0
    text = str(gm.graph)
    assert insert_overlap_dependencies(gm.graph, overlaps_of(gm.graph)) == 0
    assert str(gm.graph) == text


def test_wrapped_node_gets_further_dependencies():
    """Waits that one call has wrapped are not wrapped again by the next."""
    b = Graph()
    start = b.gather()
    mms = [b.mm(b.x), b.mm(b.w)]
    wait = b.wait(start)
    gm = b.output(*mms, wait)
    for number, mm in enumerate(["mm_default", "mm_default_1"]):
        names = {n.name: n for n in gm.graph.nodes}
        overlap = Overlap(start, (names[mm],), (names["wait_tensor_default"],))
        assert insert_overlap_dependencies(gm.graph, [overlap]) == 2, number
    assert dependencies(gm) == {
        "mm_default": [start.name],
        "mm_default_1": [start.name],
        "wait_tensor_default": ["mm_default", "mm_default_1"],
    }


def test_same_graph_same_text():
    texts = set()
    for _ in range(2):
        gm = layers(4)
        insert_overlap_dependencies(gm.graph, overlaps_of(gm.graph))
        texts.add(str(gm.graph))
    assert len(texts) == 1


def test_names_metadata_and_collectives_stay():
    gm = layers(3)
    for number, node in enumerate(gm.graph.nodes):
        node.meta[BUCKET_MARK] = {"bucket": number, "members": 1, "traffic": "other"}
    before = [(n.name, n.meta[BUCKET_MARK], str(n.meta["val"])) for n in gm.graph.nodes]
    known = collect(gm.graph).collectives
    assert insert_overlap_dependencies(gm.graph, overlaps_of(gm.graph)) > 0
    gm.graph.lint()
    kept = [n for n in gm.graph.nodes if n.op != "get_attr"]
    assert [(n.name, n.meta[BUCKET_MARK], str(n.meta["val"])) for n in kept] == before
    seen = collect(gm.graph).collectives
    assert [(c.kind, c.group, len(c.waits)) for c in seen] == [
        (c.kind, c.group, len(c.waits)) for c in known
    ]


@pytest.mark.skipif(not _compat.runs_control_deps(), reason="torch < 2.12: Inductor only")
def test_values_stay():
    b = Graph()
    start = b.call(aten.clone, b.w)  # in place of a collective: nothing to communicate with
    mm = b.mm(b.x)
    last = b.mm(mm, start)
    gm = b.output(last)
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    expected = gm(*inputs)
    control._insert(gm.graph, [control.Edge(start, mm)])
    gm.recompile()
    assert dependencies(gm) == {mm.name: [start.name]}
    assert torch.equal(gm(*inputs)[0], expected[0])


def test_graph_without_a_module_is_refused():
    b = Graph()
    mm = b.mm(b.x)
    b.output(mm)
    b.graph.owning_module = None
    with pytest.raises(ValueError, match="GraphModule"):
        insert_overlap_dependencies(b.graph, [])


def random_graph(seed):
    """Gathers, scatters, matmuls and pointwise ops that read any earlier square tensor."""
    choose = random.Random(seed)
    b = Graph()
    squares, pending = [b.x, b.w], []
    for _ in range(24):
        kind = choose.choice(["mm", "mm", "relu", "start", "wait"])
        if kind == "mm":
            squares.append(b.mm(choose.choice(squares), choose.choice(squares)))
        elif kind == "relu":
            squares.append(b.call(aten.relu, choose.choice(squares)))
        elif kind == "start":
            pending.append(b.gather(choose.choice(squares)))
        elif pending:
            start = pending.pop(choose.randrange(len(pending)))
            squares.append(b.part(b.wait(start)))
    squares.extend(b.part(b.wait(start)) for start in pending)
    return b.output(*squares[2:])


def reachable(graph, edges):
    """node -> all that must run before it: data, edges and the order of starts."""
    before = {n: set(n.all_input_nodes) for n in graph.nodes}
    starts = [n for n in graph.nodes if collective_kind(n) is not None]
    for one, two in [*itertools.pairwise(starts), *edges]:
        before[two].add(one)
    closure = {}
    for node in graph.nodes:
        closure[node] = set().union(*({n} | closure[n] for n in before[node]))
    return closure


@pytest.mark.parametrize("seed", range(40))
def test_edges_keep_every_overlap_and_none_is_redundant(seed):
    """Against brute force."""
    graph = random_graph(seed).graph
    overlaps = overlaps_of(graph)
    edges = [(e.before, e.after) for e in plan_overlap_dependencies(graph, overlaps).edges]
    closure = reachable(graph, edges)
    for overlap in overlaps:
        for anchor in filter(is_heavy_compute, overlap.compute):
            assert overlap.start in closure[anchor]
            assert all(anchor in closure[wait] for wait in overlap.waits)
    for edge in edges:
        rest = reachable(graph, [e for e in edges if e is not edge])
        assert edge[0] not in rest[edge[1]], edge


def test_random_graphs_need_edges():
    """So that the test above compares something: most graphs get several."""
    counts = []
    for seed in range(40):
        graph = random_graph(seed).graph
        counts.append(len(plan_overlap_dependencies(graph, overlaps_of(graph)).edges))
    assert sum(counts) / len(counts) > 5


def test_work_grows_linearly():
    """Issue 4's bound: twice the graph, at most 2.2 times the operations."""
    small, large = (
        plan_overlap_dependencies(gm.graph, overlaps_of(gm.graph)).operations
        for gm in (layers(40), layers(80))
    )
    assert 0 < large <= 2.2 * small


def test_search_that_gives_up_keeps_the_edge(monkeypatch):
    """Redundant at worst; without the limit this one is found to be implied."""
    b = Graph()
    starts = [b.gather(), b.gather(b.x)]
    needed = b.wait(starts[1])
    mm = b.mm(b.x, b.part(needed))
    late = b.wait(starts[0])
    gm = b.output(mm, late)
    monkeypatch.setattr(control, "SEARCH_LIMIT", 0)
    assert edges_of(gm, Overlap(starts[0], (mm,), (late,))) == [
        (starts[0].name, mm.name),
        (mm.name, late.name),
    ]
