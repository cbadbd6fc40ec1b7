"""Chains of gathers, and of reduce-scatters, on sub-meshes: which are one collective, which are not.

The mesh is 4 x 2 unless a test says otherwise: "outer" has ranks 0 2 4 6, "inner" 0 1 of rank 0.
"""

from __future__ import annotations

import copy
import operator
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches._inductor.fx_passes.comm_overlap.graph.chains import permutation
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.passes import all_gather_fusion
from torch_patches._inductor.fx_passes.comm_overlap.passes.all_gather_fusion import (
    Fusion,
    apply_fusions,
    plan_fusions,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveKind,
    Refusal,
    RefusalReason,
)
from torch_patches.captured import load_captured
from torch_patches.compat_api import fuse_chained_allgathers
from torch_patches.testing.chain_check import CHECKED_KINDS, ChainError, check_chain
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.meshes import Mesh, RankGroups
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MESH = Mesh((4, 2))
TABLE = {
    "outer": MESH.lists([0]),
    "inner": MESH.lists([1]),
    "rows": MESH.lists([0, 1]),
    "columns": MESH.lists([1, 0]),
}
KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
DATA = Path(__file__).parents[1] / "data"


def planned(
    gm: fx.GraphModule, table: dict[str, list[list[int]]] | None = None, ranks: int = 8
) -> tuple[list[Fusion], list[Refusal]]:
    """The same on all ranks."""
    skeleton = collect(gm.graph)
    every = [
        plan_fusions(skeleton, RankGroups(rank, table or TABLE), KINDS) for rank in range(ranks)
    ]
    texts = {
        repr([(f.group, f.shape, [k.collective.index for k in f.links]) for f in fusions])
        + repr(refusals)
        for fusions, refusals in every
    }
    assert len(texts) == 1
    return every[0]


def fused(gm: fx.GraphModule, table: dict[str, list[list[int]]] | None = None) -> fx.GraphModule:
    """A changed copy, which computes the same on all ranks."""
    after = copy.deepcopy(gm)
    fusions, _ = planned(after, table)
    apply_fusions(after.graph, fusions)
    after.graph.lint()
    after.recompile()
    inputs = random_inputs(gm, 8, seed=0)
    inputs = [[torch.randint_like(x, -8, 8) for x in rank] for rank in inputs]
    expected = run_spmd(gm, copy.deepcopy(inputs), table or TABLE, 8)
    found = run_spmd(after, inputs, table or TABLE, 8)
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
            assert a.shape == b.shape
    return after


def starts(gm: fx.GraphModule) -> list[tuple[str | None, object]]:
    return [(op_name(c.start.target), c.group) for c in collect(gm.graph).collectives]


def only_refusal(gm: fx.GraphModule) -> RefusalReason:
    fusions, refusals = planned(gm)
    assert fusions == []
    (refusal,) = refusals
    return refusal.reason


Between = Callable[[GraphBuilder, fx.Node], fx.Node]


def chain(
    between: Between = lambda b, x: x, first: str = "inner", shape: tuple[int, ...] = (2, 6)
) -> tuple[GraphBuilder, fx.Node]:
    """Two gathers, the second over the other dimension; its wait."""
    b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
    sizes = {"outer": 4, "inner": 2}
    second = "outer" if first == "inner" else "inner"
    wait = b.gather_and_wait(b.placeholder(*shape), sizes[first], first)
    return b, b.gather_and_wait(between(b, wait), sizes[second], second)


def transposed_twice(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten.t, b.call(aten.t, x))


def no_pad(b: GraphBuilder, x: fx.Node) -> fx.Node:
    rows = x.meta["val"].shape[0]
    padded = b.call(aten.constant_pad_nd, x, [0, 0, 0, 0])
    return b.call(aten.slice.Tensor, padded, 0, 0, rows)


def there_and_back(b: GraphBuilder, x: fx.Node) -> fx.Node:
    """Rows of six as rows of four, which cut across them, and back."""
    return b.call(aten.view, b.call(aten.view, x, [-1, 4]), [-1, 6])


@pytest.mark.parametrize("between", [lambda b, x: x, transposed_twice, no_pad, there_and_back])
@pytest.mark.parametrize(("first", "target"), [("inner", "rows"), ("outer", "columns")])
def test_the_target_lists_ranks_in_the_order_of_the_chain(
    between: Between, first: str, target: str
) -> None:
    b, wait = chain(between, first)
    after = fused(b.output(wait))
    assert starts(after) == [("all_gather_into_tensor", target)]
    assert [op_name(n.target) for n in after.graph.nodes if n.op == "call_function"] == [
        "all_gather_into_tensor",
        "wait_tensor",
    ]


def test_a_square_transpose_has_the_shape_and_strides_of_none() -> None:
    """[8, 8] -> t -> contiguous: equal shape and strides, other elements."""
    b, wait = chain(lambda b, x: b.call(aten.clone, b.call(aten.t, x)), shape=(4, 8))
    assert only_refusal(b.output(wait)) is RefusalReason.CHAIN_ORDER


def test_another_shape_becomes_a_view_behind() -> None:
    b, wait = chain(lambda b, x: b.call(aten.view, x, [2, 12]))
    after = fused(b.output(wait))
    names = [op_name(n.target) for n in after.graph.nodes if n.op == "call_function"]
    assert names == ["all_gather_into_tensor", "wait_tensor", "view"]


def test_three_dimensions_and_pairs_of_them() -> None:
    mesh = Mesh((2, 2, 2))
    table = {f"d{i}": mesh.lists([i]) for i in range(3)}
    b = GraphBuilder()
    wait = b.placeholder(2, 3)
    for dim in (2, 1, 0):
        wait = b.gather_and_wait(wait, 2, f"d{dim}")
    gm = b.output(wait)
    everything = table | {"all": mesh.lists([0, 1, 2])}
    assert starts(fused(gm, everything)) == [("all_gather_into_tensor", "all")]
    pair = table | {"pair": mesh.lists([1, 2])}
    assert [group for _, group in starts(fused(gm, pair))] == ["pair", "d0"]
    last = table | {"last": mesh.lists([0, 1])}
    assert [group for _, group in starts(fused(gm, last))] == ["d2", "last"]


def columns_there_and_back(b: GraphBuilder, x: fx.Node) -> fx.Node:
    """Columns of four as rows of three, which no digits of an index show, and back."""
    columns = b.call(aten.clone, b.call(aten.t, x), memory_format=torch.contiguous_format)
    columns = b.call(aten.view, b.call(aten.view, columns, [8, 3]), [6, 4])
    return b.call(aten.t, columns)


@pytest.mark.parametrize("between", [transposed_twice, there_and_back, columns_there_and_back])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce_scatters(op: str, between: Between) -> None:
    """The outer dimension is scattered first; the inner one keeps a piece of that."""
    b = GraphBuilder()
    wait = b.scatter_and_wait(b.placeholder(16, 6), op, 4, "outer")
    wait = b.scatter_and_wait(between(b, wait), op, 2, "inner")
    assert starts(fused(b.output(wait))) == [("reduce_scatter_tensor", "rows")]


def test_tags_and_metadata_of_the_last_gather_stay() -> None:
    captured = load_captured(DATA / "llama_2l_s0s0_4x2.json.gz")
    gm = captured.graphs["fw"]
    before = {c.start.name: tag_of(c.start) for c in collect(gm.graph).collectives}
    groups = {"3": MESH.lists([1]), "1": MESH.lists([0]), "0": MESH.lists([0, 1])}
    fusions, _ = planned(gm, groups)
    apply_fusions(gm.graph, fusions)
    assert all(tag_of(c.start) == before[c.start.name] for c in collect(gm.graph).collectives)


@pytest.mark.parametrize("which", ["joint", "fw", "bw"])
def test_captured_s0s0_llama(which: str) -> None:
    """21 parameters; the embedding is not gathered again in the backward."""
    gm = load_captured(DATA / "llama_2l_s0s0_4x2.json.gz").graphs[which]
    groups = {"3": MESH.lists([1]), "1": MESH.lists([0]), "0": MESH.lists([0, 1])}
    count = {"joint": (21, 21), "fw": (21, 0), "bw": (20, 21)}[which]
    fusions, refusals = planned(gm, groups)
    kinds = [f.first.kind for f in fusions]
    assert tuple(map(kinds.count, KINDS)) == count
    assert refusals == []
    assert {f.group for f in fusions} == {"0"}
    apply_fusions(gm.graph, fusions)
    gm.graph.lint()
    assert {c.group for c in collect(gm.graph).collectives} == {"0"}


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_reduction_rounds_within_its_bound(op: str, dtype: torch.dtype) -> None:
    """docs/chained_fusion.md: n - 1 additions in any order are within (n - 1) u of the exact sum of
    the magnitudes, and each average divides once more."""
    b = GraphBuilder()
    wait = b.scatter_and_wait(b.placeholder(16, 64, dtype=dtype), op, 4, "outer")
    gm = b.output(b.scatter_and_wait(wait, op, 2, "inner"))
    after = copy.deepcopy(gm)
    apply_fusions(after.graph, planned(after)[0])
    after.recompile()
    inputs = random_inputs(gm, 8, seed=3)
    two, one = (run_spmd(g, copy.deepcopy(inputs), TABLE, 8) for g in (gm, after))
    sizes = [[rank[0].abs().double()] for rank in inputs]
    magnitudes = sum(rank[0] for rank in sizes) / (8 if op == "avg" else 1)
    unit = torch.finfo(dtype).eps / 2
    operations = 7 * 2 + (3 if op == "avg" else 0)
    for rank in range(8):
        bound = operations * unit * magnitudes[2 * rank : 2 * rank + 2] * 1.01
        difference = (two[rank][0].double() - one[rank][0].double()).abs()
        assert (difference <= bound).all()
    assert any(not torch.equal(two[rank][0], one[rank][0]) for rank in range(8))


# -- refused --------------------------------------------------------------------------------------


def cast(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten._to_copy, x, dtype=torch.bfloat16)


def cut(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten.slice.Tensor, x, 0, 0, 3)


def padded(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten.constant_pad_nd, x, [0, 0, 0, 1])


def with_barrier(b: GraphBuilder, x: fx.Node) -> fx.Node:
    b.call(barrier, b.placeholder(2))
    return x


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (cast, RefusalReason.CHAIN_DTYPE),
        (cut, RefusalReason.CHAIN_UNEVEN),
        (padded, RefusalReason.CHAIN_UNEVEN),
        (with_barrier, RefusalReason.CHAIN_MUTATION),
        (lambda b, x: b.call(aten.t, x), RefusalReason.CHAIN_ORDER),
        (lambda b, x: b.call(aten.permute, x, [1, 0]), RefusalReason.CHAIN_ORDER),
    ],
)
def test_refused(between: Between, reason: RefusalReason) -> None:
    b, wait = chain(between)
    assert only_refusal(b.output(wait)) is reason


def test_another_reader() -> None:
    b, wait = chain()
    middle = wait.args[0].args[0]  # type: ignore[union-attr]
    assert isinstance(middle, fx.Node)
    assert only_refusal(b.output(wait, b.call(aten.neg, middle))) is RefusalReason.CHAIN_USERS


def test_rows_that_are_cut_behind_are_padding() -> None:
    """A rank with all of its rows sees nothing else of uneven shards."""
    b, wait = chain()
    assert only_refusal(b.output(cut(b, wait))) is RefusalReason.CHAIN_UNEVEN


def test_parts_of_a_weight_are_no_padding() -> None:
    b, wait = chain()
    parts = [b.call(aten.slice.Tensor, wait, 0, 8 * i, 8 * i + 8) for i in range(2)]
    assert len(planned(b.output(*parts))[0]) == 1


def test_parts_of_a_weight_behind_views_that_one_rank_has() -> None:
    b, wait = chain()
    parts = [
        b.call(aten.slice.Tensor, b.call(aten.alias, wait), 0, 0, 8),
        b.call(aten.slice.Tensor, b.call(aten.view, wait, [16, 6]), -2, -8),
    ]
    assert len(planned(b.output(*parts))[0]) == 1


@pytest.mark.parametrize("rank", range(4))
def test_the_part_of_a_weight_that_a_rank_works_on(rank: int) -> None:
    """It is the first one on one rank only, where it looks as if padding were cut off."""
    b, wait = chain()
    part = b.call(aten.slice.Tensor, wait, 0, 4 * rank, 4 * rank + 4)
    assert only_refusal(b.output(part)) is RefusalReason.CHAIN_UNEVEN


def test_a_part_that_begins_at_a_symbol_may_be_any() -> None:
    b, wait = chain()
    begin = b.symbol(4)
    part = b.call(aten.slice.Tensor, wait, 0, begin, b.call(operator.add, begin, 4))
    assert part.meta["val"].shape == (4, 6)
    assert only_refusal(b.output(part)) is RefusalReason.CHAIN_UNEVEN


def test_padding_that_is_cut_off_twice() -> None:
    b, wait = chain()
    parts = [b.call(aten.slice.Tensor, x, 0, 0, 15) for x in (wait, b.call(aten.alias, wait))]
    assert only_refusal(b.output(*parts)) is RefusalReason.CHAIN_UNEVEN


def test_a_gradient_that_is_padded_in_front() -> None:
    b = GraphBuilder()
    wait = b.scatter_and_wait(padded(b, b.placeholder(15, 3)), "sum", 4, "outer")
    wait = b.scatter_and_wait(wait, "sum", 2, "inner")
    assert only_refusal(b.output(wait)) is RefusalReason.CHAIN_UNEVEN


def test_reductions_of_two_ops() -> None:
    b = GraphBuilder()
    wait = b.scatter_and_wait(b.placeholder(16, 3), "sum", 4, "outer")
    wait = b.scatter_and_wait(wait, "avg", 2, "inner")
    assert only_refusal(b.output(wait)) is RefusalReason.CHAIN_OP


def test_a_write_to_the_shard_between() -> None:
    b = GraphBuilder()
    shard = b.placeholder(2, 6)
    wait = b.gather_and_wait(shard, 2, "inner")
    b.call(aten.mul_.Tensor, shard, 2.0)
    wait = b.gather_and_wait(wait, 4, "outer")
    assert only_refusal(b.output(wait)) is RefusalReason.CHAIN_MUTATION


def test_the_same_group_twice() -> None:
    b = GraphBuilder()
    wait = b.gather_and_wait(b.placeholder(2, 6), 2, "inner")
    assert only_refusal(b.output(b.gather_and_wait(wait, 2, "inner"))) is RefusalReason.CHAIN_GROUPS


def test_no_group_in_that_order() -> None:
    b, wait = chain(first="outer")
    table = {name: rows for name, rows in TABLE.items() if name != "columns"}
    fusions, (refusal,) = planned(b.output(wait), table)
    assert fusions == []
    assert refusal.reason is RefusalReason.CHAIN_NO_GROUP


def test_symbolic_sizes() -> None:
    """Followed where every symbol gives whole parts, and refused where some would be cut across."""
    for between, fuses in (
        (transposed_twice, True),
        (lambda b, x: b.call(aten.view, b.call(aten.view, x, [-1, 3]), [-1, 6]), True),
        (there_and_back, False),
    ):
        b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
        rows = b.symbol(2).meta["val"]
        wait = b.gather_and_wait(b.placeholder(rows, 6), 2, "inner")
        wait = b.gather_and_wait(between(b, wait), 4, "outer")
        fusions, refusals = planned(b.output(wait))
        assert len(fusions) == fuses
        assert [r.reason for r in refusals] == ([] if fuses else [RefusalReason.CHAIN_SYMBOLIC])


def dtensor_pad(b: GraphBuilder, x: fx.Node) -> fx.Node:
    """As DTensor pads what does not divide: the last piece, and all pieces together again."""
    pieces = b.call(aten.split.Tensor, x, 8)
    first, last = b.getitem(pieces, 0), b.getitem(pieces, 1)
    return b.call(aten.cat, [first, b.call(aten.constant_pad_nd, last, [0, 0, 0, 1])])


def test_a_gradient_that_dtensor_pads() -> None:
    """Rank 0 of 15 rows over 2 x 2: even from there on, and its neighbour pads once more."""
    b = GraphBuilder()
    wait = b.scatter_and_wait(dtensor_pad(b, b.placeholder(15, 3)), "sum", 4, "outer")
    wait = b.scatter_and_wait(wait, "sum", 2, "inner")
    assert only_refusal(b.output(wait)) is RefusalReason.CHAIN_UNEVEN


def test_a_gradient_that_is_padded_in_front_of_another_chain() -> None:
    """The padding of a third dimension of the mesh, behind which this part is even here."""
    mesh = Mesh((2, 2, 2))
    table = {f"d{i}": mesh.lists([i]) for i in range(3)} | {"pair": mesh.lists([1, 2])}
    b = GraphBuilder()
    wait = padded(b, b.placeholder(15, 3))
    for dim in range(3):
        wait = b.scatter_and_wait(wait, "sum", 2, f"d{dim}")
    fusions, (refusal,) = planned(b.output(wait), table)
    assert fusions == []
    assert refusal.reason is RefusalReason.CHAIN_UNEVEN


def test_a_result_that_is_cut_behind_a_view() -> None:
    """S(1) of one row: its columns are gathered as rows.  A forward that also returns the whole, for
    its backward, cuts it all the same."""
    for and_the_whole in (False, True):
        b, wait = chain()
        view = b.call(aten.view, wait, [1, -1])
        part = b.call(aten.slice.Tensor, view, 1, 0, 95)
        gm = b.output(part, *([view] if and_the_whole else []))
        assert only_refusal(gm) is RefusalReason.CHAIN_UNEVEN


def test_a_pad_that_shifts_keeps_the_size_only() -> None:
    def shifted(b: GraphBuilder, x: fx.Node) -> fx.Node:
        return b.call(aten.constant_pad_nd, x, [0, 0, 1, -1])

    b, wait = chain(shifted)
    assert only_refusal(b.output(wait)) is RefusalReason.CHAIN_UNEVEN


def test_a_write_to_the_shard_before_the_last_wait() -> None:
    """The first gather has landed by then; one gather in their place has not."""
    b = GraphBuilder()
    shard = b.placeholder(2, 6)
    wait = b.gather_and_wait(shard, 2, "inner")
    start = b.all_gather(wait, 4, "outer")
    b.call(aten.mul_.Tensor, shard, 2.0)
    assert only_refusal(b.output(b.wait(start))) is RefusalReason.CHAIN_MUTATION


def test_an_op_of_another_namespace_is_what_it_is() -> None:
    """``clone`` of somebody else may double what it is given."""
    with torch.library._scoped_library("chain_test", "DEF") as library:
        library.define("clone(Tensor x) -> Tensor")
        library.impl("clone", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("clone", torch.empty_like, "Meta")
        op = torch.ops.chain_test.clone.default
        b, wait = chain(lambda b, x: b.call(op, x))
        assert planned(b.output(wait)) == ([], [])


def test_two_chains_that_share_their_first_links() -> None:
    """The middle result is gathered twice: what leads to it is planned once."""
    mesh = Mesh((2, 2, 2))
    table = {f"d{i}": mesh.lists([i]) for i in range(3)} | {"pair": mesh.lists([1, 2])}
    b = GraphBuilder()
    wait = b.gather_and_wait(b.gather_and_wait(b.placeholder(2, 3), 2, "d2"), 2, "d1")
    gm = b.output(*(b.gather_and_wait(wait, 2, "d0") for _ in range(2)))
    assert [group for _, group in starts(fused(gm, table))] == ["pair", "d0", "d0"]


def test_a_start_that_something_else_reads() -> None:
    """A dead alias of the first start would keep it, launched and never waited for."""
    b = GraphBuilder()
    start = b.all_gather(b.placeholder(2, 6), 2, "inner")
    b.call(aten.alias, start)
    gm = b.output(b.gather_and_wait(b.wait(start), 4, "outer"))
    assert planned(gm)[0] == []
    b = GraphBuilder()
    wait = b.gather_and_wait(b.placeholder(2, 6), 2, "inner")
    last = b.call(aten.view, b.all_gather(wait, 4, "outer"), [-1])
    assert planned(b.output(b.wait(last)))[0] == []


def test_views_of_scalars() -> None:
    b = GraphBuilder()
    scalar = b.call(aten.transpose.int, b.placeholder(()), 0, 0)
    assert permutation(scalar) == []


# -- random chains --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHECKED_KINDS)
def test_fused_exactly_where_all_ranks_get_the_same(kind: CollectiveKind) -> None:
    """By brute force on 100 chains each; tools/fuzz.py --lanes chains runs more."""
    counts = Counter(check_chain(random.Random(seed), kind) for seed in range(100))
    assert counts["fused"] > 15
    assert counts["left"] + counts["in parts"] > 15
    assert counts["in parts"]


def test_the_brute_force_check_sees_a_wrong_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any group of the right size, whatever the order of its ranks."""
    monkeypatch.setattr(all_gather_fusion, "_is_grid", lambda ranks, *others: True)
    with pytest.raises(ChainError, match="seed"):
        for seed in range(60):
            check_chain(random.Random(seed), CollectiveKind.ALL_GATHER, f"seed {seed}")


# -- the drop-in form -----------------------------------------------------------------------------


def test_drop_in_with_names_of_groups() -> None:
    b, wait = chain()
    gm = b.output(wait)
    assert fuse_chained_allgathers(gm.graph, 8, "full", ["outer", "inner"]) == 1
    assert starts(gm) == [("all_gather_into_tensor", "full")]
    b, wait = chain(first="outer")
    gm = b.output(wait)
    assert fuse_chained_allgathers(gm.graph, 8, "full", ["outer", "inner"]) == 0
    assert fuse_chained_allgathers(gm.graph, 8, "full", ["outer", "inner"], "reversed") == 1
    assert starts(gm) == [("all_gather_into_tensor", "reversed")]


def test_drop_in_refuses_sizes_that_do_not_multiply() -> None:
    b, wait = chain()
    with pytest.raises(ValueError, match="has 8 ranks in this graph, not full_group_size = 16"):
        fuse_chained_allgathers(b.output(wait).graph, 16, "full", ["outer", "inner"])
    with pytest.raises(TypeError, match=r"takes an fx\.Graph, not GraphModule"):
        fuse_chained_allgathers(b.output(wait), 8, "full")  # type: ignore[arg-type]


def test_drop_in_with_groups_that_this_process_has_joined() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        names = [dist.new_group(ranks).group_name for ranks in ([0, 2, 4, 6], [0, 1])]
        world = dist.group.WORLD
        assert world is not None
        b = GraphBuilder()
        wait = b.gather_and_wait(b.placeholder(2, 6), 2, names[1])
        gm = b.output(b.gather_and_wait(wait, 4, names[0]))
        assert fuse_chained_allgathers(gm.graph, 8, names[0]) == 0  # not a group of eight
        assert fuse_chained_allgathers(gm.graph, 8, world.group_name) == 1
        assert starts(gm) == [("all_gather_into_tensor", world.group_name)]
    finally:
        dist.destroy_process_group()
