"""Milliseconds of collectives: latency plus bytes over bandwidth, for a ring (alpha-beta model).

    all-gather, reduce-scatter   base + (g - 1) * hop + n * (g - 1) / g / bandwidth
    all-reduce                   a reduce-scatter and an all-gather with one base
    all-to-all                   base + hop + n * (g - 1) / g / bandwidth, all pairs at once
    broadcast                    base + (g - 1) * hop + n / bandwidth, pipelined along the ring

``n`` is the bytes of the full tensor (gather output, scatter input), ``g`` the ranks of the group.
A group is on the links within a node only if every group of its shape is (see
:func:`stays_in_node`), so that all ranks of a mesh get one number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import (
    Device,
    Link,
    LinkClass,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

UNKNOWN_GROUP_SIZE = 8


def collective_ms(
    kind: CollectiveKind, size_bytes: float, group_size: int | None, link: Link
) -> float:
    """Milliseconds of one collective that has the link for itself.

    Args:
        size_bytes: of the full tensor, members of a bucket together.
        group_size: ranks, None (unknown) counts as 8; 1 costs the base.
    """
    ranks = group_size or UNKNOWN_GROUP_SIZE
    if ranks == 1:
        return link.base_us / 1e3
    share = (ranks - 1) / ranks
    transfer_us = size_bytes / (link.gb_per_s * 1e3)
    ring_us = (ranks - 1) * link.hop_us
    if kind is CollectiveKind.ALL_REDUCE:
        total_us = 2 * (ring_us + transfer_us * share)
    elif kind is CollectiveKind.ALL_TO_ALL:
        total_us = link.hop_us + transfer_us * share
    elif kind is CollectiveKind.BROADCAST:
        total_us = ring_us + transfer_us
    else:
        total_us = ring_us + transfer_us * share
    return (link.base_us + total_us) / 1e3


def link_of(
    device: Device, group_size: int | None, ranks: Sequence[int] | None, gpus_per_node: int
) -> Link:
    """The slowest link that a group uses.

    Args:
        ranks: global ranks of the group, None where it is not registered: then it counts as
            neighbouring ranks.
    """
    return device.link(link_class_of(group_size, ranks, gpus_per_node))


def link_class_of(
    group_size: int | None, ranks: Sequence[int] | None, gpus_per_node: int
) -> LinkClass:
    """Whether a group stays within nodes; arguments as in :func:`link_of`."""
    size = group_size or UNKNOWN_GROUP_SIZE
    inside = stays_in_node(range(size) if ranks is None else ranks, gpus_per_node)
    return LinkClass.INTRA_NODE if inside else LinkClass.INTER_NODE


def stays_in_node(ranks: Sequence[int], gpus_per_node: int) -> bool:
    """Whether this group and all groups of its shape lie within nodes.

    Groups of a mesh are copies of one pattern: evenly spaced ranks.  All copies stay within nodes
    if a node is a whole number of patterns.  Judging by the ranks of the own group alone would give
    two ranks two answers where groups of six meet nodes of eight.
    """
    if len(ranks) < 2:
        return True
    ordered = sorted(ranks)
    stride = ordered[1] - ordered[0]
    even = all(b - a == stride for a, b in itertools.pairwise(ordered))
    return even and gpus_per_node % (stride * len(ordered)) == 0
