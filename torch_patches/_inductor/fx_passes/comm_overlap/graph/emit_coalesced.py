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
from torch_patches._inductor.fx_passes.comm_overlap.plan import Bucket


def emit_coalesced(emitter: Emitter, bucket: Bucket, index: int) -> Merged:
    """Replaces the members by one coalesced start, and a getitem and a wait for each.

    Each wait stands where the member's own wait stood.  Works for symbolic sizes, since no size
    is written into the graph.
    """
    members = [bucket.members[i] for i in bucket.payload_order]
    starts = [member.start for member in members]
    views: list[fx.Node] = []
    payload = [_payload(emitter, start, views) for start in starts]
    merged = emitter.call(
        collective_op(starts[0], coalesced=True),
        merged_arguments(starts[0], payload),
        bucket.members[0].start,
        [start.meta["val"] for start in starts],
    )
    mark(merged, index, len(starts))
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
        start_nodes=(*views, merged, *parts),
        in_place_of={new: old for old, new in waits.items()},
        replaced={**dict.fromkeys(starts, merged), **waits},
    )


def _renew(emitter: Emitter, wait: fx.Node) -> fx.Node:
    """A wait like ``wait``, which by now reads the merged start; it takes over all uses."""
    new = emitter.call(wait.target, wait.args, wait, wait.meta.get("val"))  # type: ignore[arg-type]
    wait.replace_all_uses_with(new)
    return new


def _payload(emitter: Emitter, start: fx.Node, views: list[fx.Node]) -> fx.Node:
    """The member's input; a scalar gets a dimension, which the coalesced ops need."""
    source = start.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].dim() or start.meta["val"].dim() == 0:
        return source
    view = emitter.compute(torch.ops.aten.view.default, (source, [1]), start)
    views.append(view)
    return view
