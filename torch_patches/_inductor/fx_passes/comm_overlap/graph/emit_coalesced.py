"""Zero-copy merging: one coalesced launch over the members' own tensors.

Casts of parameters in front of gathers become one kernel:

    p -> cast -> AG                 p -> cast -> _foreach_copy -> getitem 0 -> AGs
    q -> cast -> AG         =>      q -> cast ->               -> getitem 1 ->

Inductor computes a cast where it is read.  It makes one kernel of what ``_foreach_copy`` reads, and
no copy, where it launched a kernel for each cast.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.casts import cast_in_front, passed_on
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import (
    PART_MARK,
    Emitter,
    Merged,
    collective_op,
    fake_copy,
    mark,
    merged_arguments,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    first_argument,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import has_symbols, known_contiguous
from torch_patches._inductor.fx_passes.comm_overlap.plan import Bucket, Collective, CollectiveKind

aten = torch.ops.aten


def emit_coalesced(emitter: Emitter, bucket: Bucket, index: int) -> Merged:
    """Replaces the members by one coalesced start, and a getitem and a wait for each.

    All waits stand together at the first one: the launch is done as a whole, and until the last of
    them it holds what it sent and all of its results.  Works for symbolic sizes, since no size is
    written into the graph.
    """
    members = [bucket.members[i] for i in bucket.payload_order]
    starts = [member.start for member in members]
    made: list[fx.Node] = []
    payload = [_payload(emitter, member, made) for member in members]
    if not emitter.run_eagerly:
        payload = _cast_together(emitter, members, payload, made)
    merged = emitter.call(
        collective_op(starts[0], coalesced=True),
        merged_arguments(starts[0], payload),
        bucket.members[0].start,
        [start.meta["val"] for start in starts],
    )
    mark(merged, index, bucket)
    parts: list[fx.Node] = []
    waits: list[fx.Node] = []
    for place, member in enumerate(members):
        start = member.start
        part = emitter.call(operator.getitem, (merged, place), start, start.meta["val"])
        emitter.replace(start, part)
        parts.append(part)
        waits.extend(member.waits)
    emitter.erase(starts)
    return Merged(
        start=merged,
        start_nodes=(*made, merged, *parts),
        wait_nodes=tuple(waits),
        replaced=dict.fromkeys(starts, merged),
    )


def _payload(emitter: Emitter, member: Collective, made: list[fx.Node]) -> fx.Node:
    """The member's input, in the form for which the coalesced op returns what the plain one does.

    A gathered scalar gets a dimension.  The input of an all-reduce is made contiguous: the plain
    op always returns a contiguous tensor, the coalesced one keeps the input's strides.
    """
    source = first_argument(member.start)
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    if member.kind is CollectiveKind.ALL_REDUCE and not known_contiguous(value):
        kwargs = {"memory_format": torch.contiguous_format}
        made.append(emitter.compute(aten.clone.default, (source,), member.start, kwargs))
        return made[-1]
    if member.kind is CollectiveKind.ALL_GATHER and value.dim() == 0:
        made.append(emitter.compute(aten.view.default, (source, [1]), member.start))
        return made[-1]
    return source


def _cast_together(
    emitter: Emitter, members: Sequence[Collective], payload: list[fx.Node], made: list[fx.Node]
) -> list[fx.Node]:
    """The payloads, those that are casts of graph inputs as results of one node.

    Which ones depends on nothing that ranks do not share: a payload has one size on all of them,
    and pads of short shards are looked through.
    """
    places = [i for i, node in enumerate(payload) if _is_cast_of_input(node, emitter.ordered)]
    if len(places) < 2 or members[0].kind is not CollectiveKind.ALL_GATHER:
        return payload
    casts = [payload[place] for place in places]
    donor = members[places[0]].start
    # What is copied *into* only gives the layout; Inductor never computes it.
    target, pair = aten._foreach_copy.default, (casts, casts)
    if all(cast.meta["val"].is_contiguous() for cast in casts):
        copies = [fake_copy(cast.meta["val"]) for cast in casts]
        together = emitter.call(target, pair, donor, copies)
    else:
        together = emitter.compute(target, pair, donor)
        copies = list(together.meta["val"])
    parts = [together]
    result = list(payload)
    for number, (place, value) in enumerate(zip(places, copies, strict=True)):
        arguments = (together, number)
        result[place] = emitter.call(operator.getitem, arguments, members[place].start, value)
        parts.append(result[place])
    for node in parts:
        node.meta[PART_MARK] = True
    made += parts
    return result


def _is_cast_of_input(payload: fx.Node, ordered: Set[fx.Node]) -> bool:
    value = payload.meta["val"]
    if has_symbols(value) or value.numel() == 0:
        return False
    found = cast_in_front(payload, ordered)
    node = None if found is None else first_argument(found.cast)
    while isinstance(node, fx.Node) and node.op == "call_function":
        node = passed_on(node)
    return isinstance(node, fx.Node) and node.op == "placeholder"
