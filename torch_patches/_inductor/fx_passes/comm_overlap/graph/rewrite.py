"""Applies a plan: ``apply_plan(graph, skeleton, plan)`` merges its buckets in one rewrite.

Coalesced form, one launch and no copies; each member keeps a wait, all at the first one's place:

    AG(a) -> W -> ...                AGs([a, b]) -> getitem 0 -> W -> ...
    AG(b) -> W -> ...        =>                  -> getitem 1 -> W -> ...

Copying form, one copy node in each direction:

    AG(a) -> W -> ...        =>      cat(a, b) -> AG -> W -> one copy -> view -> ...

Invariants: every member's value, dtype, shape and strides stay; outputs get no new aliasing (the
copying form copies out); ``meta["val"]`` of each new node is what its op would produce; a new node
takes over the other metadata of the member it stands for.  Nodes are created directly; nothing is
traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import number_nodes
from torch_patches._inductor.fx_passes.comm_overlap.graph.emit_coalesced import emit_coalesced
from torch_patches._inductor.fx_passes.comm_overlap.graph.emit_copying import emit_copying
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import Emitter, Merged
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import (
    Placement,
    Precedence,
    choose_slot,
    relink,
    smallest_order,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    MergeForm,
    Plan,
    Skeleton,
)


class CycleError(RuntimeError):
    """The plan cannot be ordered.  The legality check comes first, so this is a bug."""


def apply_plan(
    graph: fx.Graph, skeleton: Skeleton, plan: Plan, *, run_eagerly: bool = False
) -> None:
    """Merges the buckets of ``plan`` and restores a topological order; the graph changes in place.

    Near-linear in the graph.  The caller checks the order and recompiles once.

    Args:
        run_eagerly: emit what PyTorch runs well op by op, not what Inductor compiles well.

    Raises:
        CycleError: the buckets close a cycle (the graph is then half rewritten).
    """
    if plan.order:
        relink(graph, list(plan.order))
    numbers = number_nodes(graph)
    pairs = (*skeleton.order_dependencies, *plan.dependencies)
    precedence = Precedence(pairs)
    slots = _choose_slots(plan.buckets, skeleton, numbers, precedence)
    placement = Placement(numbers)
    emitter = Emitter(graph, {node for pair in pairs for node in pair}, run_eagerly)
    merged: list[Merged] = []
    renamed: dict[fx.Node, fx.Node] = {}
    for index, (bucket, slot) in enumerate(zip(plan.buckets, slots, strict=True)):
        wait_slot = min(numbers[w] for m in bucket.members for w in m.waits)
        result = _emit(emitter, bucket, index)
        placement.place_new(result.start_nodes, slot)
        placement.place_new(result.wait_nodes, max(wait_slot, slot))
        renamed.update(result.replaced)
        merged.append(result)
    emitter.finish()
    _place_moved(placement, plan, renamed, merged)
    precedence = Precedence(_carried_over(pairs, renamed, merged))
    for result in merged:
        for node in (*result.start_nodes, *result.wait_nodes):  # waits may read views of starts
            placement.hoist_inputs(node, precedence, skeleton.idle)
    order = smallest_order(graph.nodes, precedence, placement)
    if order is None:
        raise CycleError("the planned buckets close a cycle")
    relink(graph, order)


def _choose_slots(
    buckets: Sequence[Bucket],
    skeleton: Skeleton,
    numbers: Mapping[fx.Node, int],
    precedence: Precedence,
) -> list[int]:
    """A bucket goes behind those that feed its members; else compute would be hoisted with them."""
    bucket_of = {m.index: place for place, bucket in enumerate(buckets) for m in bucket.members}
    found: dict[int, int] = {}

    def slot_of(place: int) -> int:
        if place not in found:
            found[place] = choose_slot(buckets[place], numbers, precedence, skeleton.idle)
            feeding = {bucket_of[f] for m in buckets[place].members for f in feeders(m)}
            found[place] = max(found[place], *map(slot_of, feeding | {place}))
        return found[place]

    def feeders(member: Collective) -> Iterator[int]:
        feeder = member.feeder
        while feeder is not None:
            if feeder in bucket_of:
                yield feeder
            feeder = skeleton.collectives[feeder].feeder

    return [slot_of(place) for place in range(len(buckets))]


def _emit(emitter: Emitter, bucket: Bucket, index: int) -> Merged:
    if bucket.form is MergeForm.COALESCED:
        return emit_coalesced(emitter, bucket, index)
    return emit_copying(emitter, bucket, index)


def _place_moved(
    placement: Placement,
    plan: Plan,
    renamed: dict[fx.Node, fx.Node],
    merged: Sequence[Merged],
) -> None:
    """Puts moved nodes, or what took their place, where the plan wants them.

    A merged start goes with its copies where its first member goes, a merged wait likewise.
    """
    together: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for result in merged:
        together.update(dict.fromkeys(result.start_nodes, result.start_nodes))
        together.update(dict.fromkeys(result.wait_nodes, result.wait_nodes))
    placed: set[fx.Node] = set()
    for move in plan.moves:
        node = _current(move.node, renamed)
        if node in placed or (node is move.node and node._erased):
            continue  # a later member, or a cast that its bucket's copy makes
        nodes = together.get(node, (node,))
        placement.place_new(nodes, move.place)
        placed.update(nodes)


def _current(node: fx.Node, renamed: dict[fx.Node, fx.Node]) -> fx.Node:
    """What took the place of a node that was merged."""
    while node in renamed:
        node = renamed[node]
    return node


def _carried_over(
    pairs: Sequence[tuple[fx.Node, fx.Node]],
    renamed: dict[fx.Node, fx.Node],
    merged: Sequence[Merged],
) -> list[tuple[fx.Node, fx.Node]]:
    """Order dependencies with erased nodes replaced by what took their place.

    What a member's start had to follow, a write of its payload above all, the copies into the
    bucket must follow too: they read the payload now.
    """
    reads = {result.start: result.start_nodes for result in merged}
    result: list[tuple[fx.Node, fx.Node]] = []
    for before, after in pairs:
        before, after = _current(before, renamed), _current(after, renamed)
        if before is after:
            continue
        readers = reads.get(after, (after,))
        result.extend((before, reader) for reader in readers if before not in readers)
    return result
