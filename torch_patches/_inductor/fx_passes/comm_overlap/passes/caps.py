"""How large buckets may become: by key, less where memory is short and at the end of the graph; and
which are copied together.

gathers      |small|  large   |   large    |  large  |     the first one has to fit beside what
memory       ######.............................              fills memory while it is in flight
scatters          |   large    |   large    | large  |small|  nothing hides what comes last
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.plan import BucketKey, Collective

#: Kernels in front of its use in which a gather has to fit: it should be in flight there.
_AHEAD_KERNELS = 16
#: Of the compute at an end of the graph so much counts for one bucket: others are in flight too.
_HIDDEN_SHARE = 0.25
#: A bucket at an end of the graph may hold at least this share of what others may.
_LEAST_SHARE = 0.125


@dataclass(frozen=True, eq=False)
class BucketCaps:
    """See the module.

    Args:
        by_key: bytes of a bucket of each key.
        by_first: index of a collective -> bytes of a bucket that begins with it, if these are less.
        copied: keys whose buckets are copied together, whatever the options leave to the pass.
    """

    by_key: Mapping[BucketKey, int]
    by_first: Mapping[int, int] = field(default_factory=dict)
    copied: Set[BucketKey] = frozenset()

    def of(self, key: BucketKey, first: Collective) -> int:
        """Bytes of the bucket of ``key`` that begins with ``first``."""
        return min(self.by_key[key], self.by_first.get(first.index, sys.maxsize))


def fitting_bytes(track: Track, limits: Limits) -> dict[int, int]:
    """Index of a gather -> bytes that are free under the memory cap in front of its use; linear in
    gathers."""
    found: dict[int, int] = {}
    for index, gather in track.gathers.items():
        use = track.slot[gather.use]
        near = track.fixed_bytes[max(use - _AHEAD_KERNELS, 0) : use + 1]
        found[index] = max(limits.peak_bytes - max(near), 0)
    return found


def room_of_reductions(track: Track, limits: Limits) -> dict[int, int]:
    """Index of a reduction -> bytes that are free under the memory cap where it starts; linear in
    reductions."""
    return {
        index: max(limits.peak_bytes - track.fixed_bytes[track.slot[track.place[c.start]]], 0)
        for index, c in track.reductions.items()
    }


def tapering_bytes(track: Track, by_key: Mapping[BucketKey, int]) -> dict[int, int]:
    """Index of a gather, or of a reduction -> bytes that the compute in front of its use, or behind
    where it is ready, can hide; linear in them."""
    whole_ms = track.compute_before[-1]
    hidden_ms = {i: track.compute_before[g.use] for i, g in track.gathers.items()}
    for index, reduction in track.reductions.items():
        hidden_ms[index] = whole_ms - track.compute_before[track.place[reduction.start]]
    found: dict[int, int] = {}
    for collective in track.skeleton.collectives:
        size = by_key.get(collective.key) if collective.key is not None else None
        ms = hidden_ms.get(collective.index)
        if size is not None and ms is not None:
            whole = track.model.collective_ms(collective, size)  # 0 if the user says so
            share = _HIDDEN_SHARE * ms / whole if whole > 0 else 1.0
            found[collective.index] = int(size * min(max(share, _LEAST_SHARE), 1.0))
    return found
