"""Zero-copy merging: one coalesced launch over the members' own tensors."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import (
    Emitter,
    Merged,
    collective_op,
    mark,
    merged_arguments,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import first_argument
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import known_contiguous
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
    merged = emitter.call(
        collective_op(starts[0], coalesced=True),
        merged_arguments(starts[0], payload),
        bucket.members[0].start,
        [start.meta["val"] for start in starts],
    )
    mark(merged, index, bucket)
    parts: list[fx.Node] = []
    waits: dict[fx.Node, fx.Node] = {}
    for place, member in enumerate(members):
        start = member.start
        part = emitter.call(operator.getitem, (merged, place), start, start.meta["val"])
        start.replace_all_uses_with(part)
        parts.append(part)
        waits.update({wait: _renew(emitter, wait) for wait in member.waits})
    emitter.erase([*waits, *starts])
    return Merged(
        start=merged,
        start_nodes=(*made, merged, *parts),
        wait_nodes=tuple(waits.values()),
        replaced={**dict.fromkeys(starts, merged), **waits},
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


def _renew(emitter: Emitter, wait: fx.Node) -> fx.Node:
    """A wait like ``wait``, which by now reads the merged start; it takes over all uses."""
    new = emitter.call(wait.target, wait.args, wait, wait.meta.get("val"), dict(wait.kwargs))  # type: ignore[arg-type]
    wait.replace_all_uses_with(new)
    return new
