"""The launches of a graph as text and as one number, to compare between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import tensors_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton


def launch_texts(skeleton: Skeleton, given: Sequence[Collective] = ()) -> list[str]:
    """One text for each launch in order: kind, key with the group's number, payload shapes.

    A group's name is local to a rank (each rank has its own sub-group of a mesh); which of the groups
    it is, by first appearance, is not.  A symbol's name, too, may be local to a rank.

    Args:
        given: collectives of the graph before it was changed, in whose order groups are numbered: by
            that of the result, two ranks that launch over two groups in turn would look alike.
    """
    ordinals: dict[str, int] = {}
    for collective in given:
        ordinals.setdefault(collective.group, len(ordinals))
    texts = []
    for collective in skeleton.collectives:
        ordinal = ordinals.setdefault(collective.group, len(ordinals))
        key = collective.key and replace(collective.key, group=str(ordinal))
        value = collective.start.meta.get("val")
        shapes = [[n if isinstance(n, int) else "?" for n in t.shape] for t in tensors_of(value)]
        texts.append(repr((collective.kind.value, key, shapes)))
    return texts


def schedule_hash(skeleton: Skeleton, given: Sequence[Collective] = ()) -> str:
    """Hash of the launches in order; ``given`` as for :func:`launch_texts`."""
    digest = hashlib.sha256()
    for text in launch_texts(skeleton, given):
        digest.update(text.encode())
    return digest.hexdigest()[:16]
