"""Stated constants of the devices that estimates know, from vendors' data sheets and FACTS 37-40.

Estimates never ask the machine: a compile on a laptop and on every rank of a mixed cluster reads
the same numbers.  Peaks are dense; what a kernel or a ring reaches of them is stated beside.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch


class LinkClass(enum.Enum):
    """Where a group's ranks are."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


@dataclass(frozen=True)
class Link:
    """One kind of connection between ranks, for the alpha-beta model of a ring.

    Args:
        base_us: of one collective, whatever its size.
        hop_us: of one step to the next rank.
        gb_per_s: what a ring reaches, in one direction (GB = 10**9 bytes).
    """

    base_us: float
    hop_us: float
    gb_per_s: float


@dataclass(frozen=True)
class Device:
    """One device model.

    Args:
        name: as flags and reports spell it.
        tflops: peak matrix-product rate by dtype (10**12 / s); others count as float32.
        dram_gb_per_s: peak memory bandwidth.
        intra_node, inter_node: links within a node and across nodes.
        kernel_us: shortest time from one small kernel to the next on a stream.
        matmul_efficiency: share of ``tflops`` that large matrix products reach.
        dram_efficiency: share of ``dram_gb_per_s`` that streaming kernels reach.
    """

    name: str
    tflops: Mapping[torch.dtype, float]
    dram_gb_per_s: float
    intra_node: Link
    inter_node: Link
    kernel_us: float = 3.0
    matmul_efficiency: float = 0.7
    dram_efficiency: float = 0.85

    def matmul_tflops(self, dtype: torch.dtype) -> float:
        """Peak for operands of ``dtype``."""
        return self.tflops.get(dtype, self.tflops[torch.float32])

    def link(self, link_class: LinkClass) -> Link:
        """The link of that class; the same object each time."""
        return self.intra_node if link_class is LinkClass.INTRA_NODE else self.inter_node


def _rates(half: float, tf32: float, eight: float | None = None) -> dict[torch.dtype, float]:
    rates = {torch.bfloat16: half, torch.float16: half, torch.float32: tf32}
    low = half if eight is None else eight
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        rates[dtype] = low
    return rates


_NIC_400G = Link(8.0, 1.5, 45.0)

# Rates of dense products: bfloat16, TF32, 8 bit.  A ring reaches about 0.82 of NVLink's rate in one
# direction and 0.9 of a network card's (400 Gb/s a GPU; 200 on the A100).
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("A100", _rates(312, 156), 2039, Link(8.0, 1.2, 245.0), Link(8.0, 2.0, 22.5)),
        Device("H100", _rates(989, 495, 1979), 3350, Link(8.0, 1.0, 370.0), _NIC_400G),
        Device("H200", _rates(989, 495, 1979), 4800, Link(8.0, 1.0, 370.0), _NIC_400G),
        Device("B200", _rates(2250, 1125, 4500), 8000, Link(8.0, 0.9, 740.0), _NIC_400G),
        # Between the A100 and the H100: for devices that nobody described.
        Device("generic", _rates(500, 250, 1000), 2500, Link(10.0, 1.5, 200.0), Link(10.0, 2.0, 22.5)),
    )
}  # fmt: skip
