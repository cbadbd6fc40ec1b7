"""The launches of a graph as text and as one number, to compare between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    COPY_ENGINES,
    op_namespace,
    tensors_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton


def launch_texts(skeleton: Skeleton, given: Sequence[Collective] = ()) -> list[str]:
    """One text for each launch in order: kind, dtype, op, shapes of results, the group's number.

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
        texts.append(_text(collective, ordinal))
    return texts


def _text(collective: Collective, group: int) -> str:
    """Such as ``reduce_scatter float32 sum [[128, 64]] group 0 (8 ranks) cuda``."""
    value = collective.start.meta.get("val")
    shapes = [[n if isinstance(n, int) else "?" for n in t.shape] for t in tensors_of(value)]
    key = collective.key
    if key is None:
        return f"{collective.kind.value} {shapes} group {group}"
    dtype = str(key.dtype).removeprefix("torch.")
    op = f" {key.reduce_op}" if key.reduce_op is not None else ""
    ranks = f"{key.group_size} ranks"
    if op_namespace(collective.start.target) == COPY_ENGINES:
        ranks += " by copy engines"
    return f"{collective.kind.value} {dtype}{op} {shapes} group {group} ({ranks}) {key.device_type}"


def schedule_hash(skeleton: Skeleton, given: Sequence[Collective] = ()) -> str:
    """Hash of the launches in order; ``given`` as for :func:`launch_texts`."""
    return hash_of(launch_texts(skeleton, given))


def hash_of(texts: Sequence[str]) -> str:
    """Hash of texts of :func:`launch_texts`."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()[:16]
