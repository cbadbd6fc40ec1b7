"""Proof that ``check_invariants`` can fail: each test breaks one thing in the passes.

Small graphs for the invariants; the letter that a breakage must raise is that of
``torch_patches.testing.invariants``.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import changing
from torch_patches._inductor.fx_passes.comm_overlap.graph import (
    emit_coalesced,
    emit_copying,
    rewrite,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes import topo_span
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton
from torch_patches.testing import effect_ops
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.invariants import CaseError, InvariantError
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import Description, build_case, random_recipe

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
COPY = Options("topo_span", None, 100.0, bucket_mode="default")
COALESCED = dataclasses.replace(COPY, bucket_mode="coalesced")


def two_gathers() -> fx.GraphModule:
    """Gathers of different sizes, apart by compute; both results and a sum are returned.

    a -> AG -> W -> out          x -> sin -> mul(W) -> out
    c -> cast -> AG -> W -> out
    """
    b = GraphBuilder()
    x, a, c = b.placeholder(4, 2), b.placeholder(2, 2), b.placeholder(3, dtype=torch.bfloat16)
    first = b.gather_and_wait(a, 2, "dp")
    work = b.call(aten.mul.Tensor, b.call(aten.sin, x), first)
    second = b.gather_and_wait(b.call(aten._to_copy, c, dtype=torch.float32), 2, "dp")
    return b.output(work, first, second)


def two_scatters() -> fx.GraphModule:
    """Two gradients of equal shape, so that swapping them is a change of values alone."""
    b = GraphBuilder()
    x, y = b.placeholder(4, 2), b.placeholder(4, 2)
    first = b.scatter_and_wait(b.call(aten.sin, x), "sum", 2, "dp")
    second = b.scatter_and_wait(b.call(aten.neg, y), "sum", 2, "dp")
    return b.output(first, second)


def gather_of_a_written_input() -> fx.GraphModule:
    """The second gather moves up to the first, and with it the write that it must follow.

    q -> AG -> W -> out;  p * 2 -> out;  p.add_(1);  p -> AG -> W -> out
    """
    b = GraphBuilder()
    p, q = b.placeholder(2, 2), b.placeholder(2, 2)
    first = b.gather_and_wait(q, 2, "dp")
    old = b.call(aten.mul.Tensor, p, 2.0)
    b.call(aten.add_.Tensor, p, 1.0)
    return b.output(old, first, b.gather_and_wait(p, 2, "dp"))


def fenced_gathers() -> fx.GraphModule:
    """An unknown effect between two gathers."""
    b = GraphBuilder()
    x, y = b.placeholder(2, 2), b.placeholder(2, 2)
    first = b.gather_and_wait(x, 2, "dp")
    b.call(effect_ops.barrier, y)
    second = b.gather_and_wait(y, 2, "dp")
    return b.output(first, second)


Patch = pytest.MonkeyPatch
Graph = Callable[[], fx.GraphModule]


def broken(graph: Graph, options: Options) -> InvariantError:
    """The error that the check raises now; without the breakage it raises none."""
    with pytest.raises(InvariantError) as caught:
        check_invariants(graph(), Description(), options)
    assert "check_invariants(gm, Description(" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("options", [COPY, COALESCED], ids=["copying", "coalesced"])
@pytest.mark.parametrize("graph", [two_gathers, two_scatters, gather_of_a_written_input])
def test_unbroken_graphs_pass_with_a_bucket(graph: Graph, options: Options) -> None:
    assert check_invariants(graph(), Description(), options).buckets == 1


def test_the_fenced_graph_passes_without_a_bucket() -> None:
    assert check_invariants(fenced_gathers(), Description(), COPY).buckets == 0


def test_an_illegal_input_is_told_from_a_failure() -> None:
    b = GraphBuilder()
    start = b.all_gather(b.placeholder(2), 2, "dp")
    gm = b.output(b.call(aten.neg, start))  # used before its wait
    with pytest.raises(CaseError, match="before its wait_tensor"):
        check_invariants(gm, Description(), COPY)


def test_attention_that_reads_beyond_its_operands_is_no_input() -> None:
    """On a CPU its values change from one run to the next."""
    b = GraphBuilder()
    q = b.placeholder((2, 8, 8, 2), dtype=torch.bfloat16, stride=(128, 1, 16, 8))
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    gm = b.output(b.getitem(b.call(attention, q, q, q, 0.0, True), 0))
    with pytest.raises(CaseError, match="beyond its operands"):
        check_invariants(gm, Description(), COPY)


def test_swapped_getitems_change_values(monkeypatch: Patch) -> None:
    """Coalesced members of equal shape, handed out the wrong way round."""
    original = emit_coalesced.emit_coalesced

    def swapped(emitter: Any, bucket: Any, index: int) -> Any:
        merged = original(emitter, bucket, index)
        for user in [u for u in merged.start.users if u.target is operator.getitem]:
            user.args = (user.args[0], 1 - user.args[1])
        return merged

    monkeypatch.setattr(rewrite, "emit_coalesced", swapped)
    assert broken(two_scatters, COALESCED).letter == "a"


def test_another_payload_order_without_permuted_outputs_changes_values(monkeypatch: Patch) -> None:
    _hand_out_in_reverse(monkeypatch)
    assert broken(two_scatters, COPY).letter == "a"


def _hand_out_in_reverse(monkeypatch: Patch) -> None:
    original = emit_copying._copy_out
    monkeypatch.setattr(emit_copying, "_copy_out", lambda *args: [*reversed(original(*args))])


def test_a_dropped_order_dependency_changes_values(monkeypatch: Patch) -> None:
    """Nothing keeps the gather of p behind the write of p but the order dependency."""
    precedence = rewrite.Precedence
    monkeypatch.setattr(rewrite, "Precedence", lambda _pairs: precedence([]))
    assert broken(gather_of_a_written_input, COPY).letter == "a"


def test_an_order_that_ignores_data_is_illegal(monkeypatch: Patch) -> None:
    """Nodes sorted by key alone: the second payload stands behind the merged start."""
    monkeypatch.setattr(
        rewrite,
        "smallest_order",
        lambda nodes, _precedence, placement: sorted(nodes, key=placement.key),
    )
    monkeypatch.setattr(rewrite.Placement, "hoist_inputs", lambda *_: None)
    monkeypatch.setattr(
        rewrite, "choose_slot", lambda bucket, numbers, _: numbers[bucket.members[0].start]
    )
    assert broken(two_gathers, COPY).letter == "b"


def test_a_use_before_the_wait_is_illegal(monkeypatch: Patch) -> None:
    """The coalesced form with a member whose readers do not wait."""
    original = rewrite.emit_coalesced

    def without_a_wait(emitter: Any, *args: Any) -> Any:
        merged = original(emitter, *args)
        wait, *others = merged.wait_nodes
        alias = emitter.call(aten.alias.default, wait.args, wait, wait.meta["val"])
        emitter.replace(wait, alias)
        emitter.erase([wait])
        return dataclasses.replace(merged, wait_nodes=(alias, *others))

    monkeypatch.setattr(rewrite, "emit_coalesced", without_a_wait)
    assert broken(two_gathers, COALESCED).letter == "b"


def test_wrong_metadata_is_noticed(monkeypatch: Patch) -> None:
    original = emit_copying._launch

    def transposed(*args: Any) -> fx.Node:
        start = original(*args)
        start.meta["val"] = start.meta["val"].new_empty([start.meta["val"].numel(), 1]).squeeze(1)
        start.meta["val"] = start.meta["val"].to(torch.float64)
        return start

    monkeypatch.setattr(emit_copying, "_launch", transposed)
    assert broken(two_gathers, COPY).letter == "b"


def test_an_exception_in_a_pass_is_noticed(monkeypatch: Patch) -> None:
    """Strict mode: a failure is no reason to leave the graph as it was."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setitem(changing.PLANNERS, "topo_span", fail)
    assert "no plan" in str(broken(two_gathers, COPY))


def test_a_plan_that_reads_names_differs_between_ranks(monkeypatch: Patch) -> None:
    def by_name(skeleton: Skeleton, contracted: Any, options: Options) -> Any:
        plan = topo_span.plan_topo_span(skeleton, contracted, options)
        named_so = skeleton.collectives[0].start.name.startswith("all_gather")
        return plan if named_so else dataclasses.replace(plan, buckets=())

    monkeypatch.setitem(changing.PLANNERS, "topo_span", by_name)
    assert broken(two_gathers, COPY).letter == "c"


def test_a_merge_across_a_fence_is_noticed(monkeypatch: Patch) -> None:
    """A skeleton and a contraction without fences, while the check still sees them."""

    def blind(graph: fx.Graph) -> Skeleton:
        skeleton = collect(graph)
        flat = [dataclasses.replace(c, segment=0, wait_segment=0) for c in skeleton.collectives]
        return dataclasses.replace(skeleton, collectives=tuple(flat), barriers=())

    monkeypatch.setattr(changing, "collect", blind)
    assert broken(fenced_gathers, COPY).letter == "d"


def test_a_bucket_merged_again_is_noticed(monkeypatch: Patch) -> None:
    """No mark, and a cap that grows with every run."""
    caps = iter(range(1, 100))
    monkeypatch.setattr(emit_copying, "mark", lambda *_: None)
    monkeypatch.setattr(topo_span, "cap_bytes", lambda *_: 100 * next(caps))
    assert broken(_four_gathers, COPY).letter in ("e", "d")


def _four_gathers() -> fx.GraphModule:
    b = GraphBuilder()
    return b.output(*(b.gather_and_wait(b.placeholder(2, 2), 2, "dp") for _ in range(4)))


def test_a_plan_that_changes_from_run_to_run_is_noticed(monkeypatch: Patch) -> None:
    runs = iter(range(100))

    def moody(skeleton: Skeleton, contracted: Any, options: Options) -> Any:
        plan = topo_span.plan_topo_span(skeleton, contracted, options)
        return dataclasses.replace(plan, buckets=()) if next(runs) % 3 == 1 else plan

    monkeypatch.setitem(changing.PLANNERS, "topo_span", moody)
    assert broken(two_gathers, COPY).letter == "e"


def test_outputs_that_share_a_buffer_are_noticed(monkeypatch: Patch) -> None:
    """Copies out replaced by views: both outputs live in the merged buffer."""

    def views(made: Any, wait: fx.Node, members: Any, _bucket: Any) -> list[fx.Node]:
        shapes = [list(m.start.meta["val"].shape) for m in members]
        sizes = [m.start.meta["val"].numel() for m in members]
        ends = list(itertools.accumulate(sizes))
        parts = [
            made.compute(aten.slice.Tensor, (wait, 0, end - size, end), wait)
            for size, end in zip(sizes, ends, strict=True)
        ]
        return [made.view(p, shape, wait) for p, shape in zip(parts, shapes, strict=True)]

    monkeypatch.setattr(emit_copying, "_copy_out", views)
    assert broken(two_scatters, COPY).letter == "f"


@pytest.mark.parametrize(
    "options",
    [dataclasses.replace(COPY, bucket_cap_mb=1e-5), dataclasses.replace(COPY, max_topo_span=0)],
    ids=["bytes", "span"],
)
def test_a_bucket_above_a_bound_is_noticed(options: Options, monkeypatch: Patch) -> None:
    monkeypatch.setattr(topo_span._KeyRun, "_beyond_span", lambda *_: None)
    monkeypatch.setattr(topo_span, "cap_bytes", lambda *_: 1 << 40)
    assert broken(two_gathers, options).letter == "g"


def test_a_failure_is_cut_down_to_few_nodes(monkeypatch: Patch) -> None:
    """A generated graph of dozens of nodes, of which two collectives are to blame."""
    _hand_out_in_reverse(monkeypatch)
    for seed in range(30):
        r = random.Random(seed)
        case = build_case(random_recipe(r, ["fsdp_grad", "compute"]))
        try:
            check_invariants(case.gm, case.description, COPY, trusted=True)
        except InvariantError as error:
            program = str(error).split("\n\n", 1)[1]
            assert program.count("b.call") <= 12, program
            return
    pytest.fail("no generated graph noticed the breakage")
