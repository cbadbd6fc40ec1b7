"""One number for the launches of a graph, to compare between ranks when a job hangs."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import tensors_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton


def schedule_hash(skeleton: Skeleton) -> str:
    """Hash of the launches in order: kind, group, dtype, reduce op and payload shapes."""
    digest = hashlib.sha256()
    # A group's name is local to a rank (each rank has its own sub-group of a mesh); which of the
    # groups it is, by first appearance, is not.
    ordinals: dict[str, int] = {}
    for collective in skeleton.collectives:
        ordinal = ordinals.setdefault(collective.group, len(ordinals))
        key = collective.key and replace(collective.key, group=str(ordinal))
        value = collective.start.meta.get("val")
        # a symbol's name, too, may be local to a rank
        shapes = [[n if isinstance(n, int) else "?" for n in t.shape] for t in tensors_of(value)]
        digest.update(repr((collective.kind.value, key, shapes)).encode())
    return digest.hexdigest()[:16]
