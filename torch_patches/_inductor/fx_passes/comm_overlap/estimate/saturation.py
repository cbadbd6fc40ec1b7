"""Bucket size that saturates a group's network, from shapes and constants alone.

A ring collective of ``n`` bytes over ``g`` ranks costs about

    t(n) = base + (g - 1) * hop + n * (g - 1) / g / bandwidth        (alpha-beta model of a ring)

so the share of ``t`` that moves data reaches ``efficiency`` e at

    n = e / (1 - e) * (base + (g - 1) * hop) * bandwidth * g / (g - 1).

The constants are rounded H100 figures (NVLink 4: 450 GB/s a direction, of which a ring reaches
about 370; one 400 Gb/s NIC a GPU, of which it reaches about 45).  They only size buckets; nothing
is measured, so every rank gets the same number.
"""

from __future__ import annotations

MIB = 1 << 20

_BASE_US = 8.0
_INTRA_HOP_US, _INTRA_GB_PER_S = 1.0, 370.0
_INTER_HOP_US, _INTER_GB_PER_S = 1.5, 45.0
_FLOOR_BYTES, _CEILING_BYTES = 10 * MIB, 500 * MIB
_GPUS_PER_NODE = 8
_UNKNOWN_GROUP_SIZE = 8


def saturation_bytes(
    group_size: int | None, efficiency: float = 0.9, gpus_per_node: int = _GPUS_PER_NODE
) -> int:
    """Bytes of a full tensor at which a ring over the group runs at ``efficiency``.

    Args:
        group_size: ranks of the group; None (unknown) counts as 8.
        efficiency: 0 to 1, share of the time in which data moves.
        gpus_per_node: ranks assumed to share a node; a larger group crosses nodes.

    Returns:
        Bytes, between 10 MiB and 500 MiB.
    """
    size = max(group_size or _UNKNOWN_GROUP_SIZE, 2)
    inside = size <= gpus_per_node
    hop = _INTRA_HOP_US if inside else _INTER_HOP_US
    bandwidth = _INTRA_GB_PER_S if inside else _INTER_GB_PER_S
    latency_s = (_BASE_US + (size - 1) * hop) * 1e-6
    ratio = efficiency / (1 - efficiency)
    wanted = ratio * latency_s * bandwidth * 1e9 * size / (size - 1)
    return int(min(max(wanted, _FLOOR_BYTES), _CEILING_BYTES))


def default_cap_bytes(group_size: int | None, largest_bytes: int) -> int:
    """Bytes that a bucket of gathers or reduce-scatters may hold where the user gave no cap.

    At least what saturates the network.  Where a single collective of the key is larger, a bucket
    may be as large as that one, whose bytes the graph holds at once anyway: otherwise each large
    weight would fill a bucket alone, and close that of the small ones around it.

    Args:
        largest_bytes: the largest single collective that the bucket's key has.

    Returns:
        Bytes, between 10 MiB and 500 MiB.
    """
    return max(saturation_bytes(group_size), min(largest_bytes, _CEILING_BYTES))
