"""Decision sizes that agree on all ranks, also along chains over sub-meshes.

A collective's tensors have one size on all ranks of its group.  Along a chain that is not enough:

    parameter -> AG inner -> AG outer                gradient -> RS outer -> RS inner
                                                     gradient -> RS shard -> AR replicas

With uneven shards two inner groups move different sizes, and a bucket of them would close
elsewhere on one rank of an outer group than on another, which changes the order of the outer
group's own collectives.  So each link takes the size of the end that all ranks share (the whole
parameter or gradient), divided by the groups between.  With even shards that is its own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, CollectiveKind, Traffic


def with_shared_sizes(
    collectives: Sequence[Collective], feeders: Mapping[fx.Node, Collective]
) -> list[Collective]:
    """The collectives with the sizes of chained ones replaced; linear.

    Args:
        feeders: by start, see ``links.find_feeders``.
    """
    if not feeders:
        return list(collectives)
    sizes = {c.start: c.size_bytes for c in collectives}
    inner_done: set[fx.Node] = set()
    for link in collectives:  # reductions: what comes first is shared by all ranks
        before = feeders.get(link.start)
        if before is not None and link.traffic is Traffic.GRADIENT:
            sizes[link.start] = _scaled(sizes[before.start], before, link)
    for link in reversed(collectives):  # gathers: what comes last is
        before = feeders.get(link.start)
        if before is not None and link.traffic is Traffic.PARAMETER:
            size = _scaled(sizes[link.start], link, before)
            known = sizes[before.start] if before.start in inner_done else 0
            sizes[before.start] = max(size, known)
            inner_done.add(before.start)
    return [
        c if c.size_bytes == sizes[c.start] else replace(c, size_bytes=sizes[c.start])
        for c in collectives
    ]


def _scaled(size: int, whole: Collective, part: Collective) -> int:
    """Size of ``part``, which handles what ``whole`` leaves of (or makes into) ``size`` bytes."""
    if whole.key is None or part.key is None:
        return size  # without metadata, which all ranks lack
    if whole.kind is not CollectiveKind.ALL_REDUCE:
        size //= max(whole.key.group_size or 1, 1)
    return size * part.key.dtype.itemsize // whole.key.dtype.itemsize
