"""Runtime estimations for graphs of tiny tensors, in which every node would take the same time."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.fusion import is_kernel
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import is_heavy_compute


@dataclass(frozen=True)
class Estimation:
    """ms by what a node is; a collective also takes time for each of its bytes.

    Args:
        heavy_ms: matrix products and the like.
        light_ms: other ops that the model knows to take time.
        latency_ms: a collective, however large it is.
        ms_per_kib: on top of it.
    """

    heavy_ms: float
    light_ms: float
    latency_ms: float
    ms_per_kib: float

    def __call__(self, node: fx.Node, size_bytes: int | None) -> float | None:
        if collective_kind(node) is not None:
            size = 128 if size_bytes is None else size_bytes
            return self.latency_ms + self.ms_per_kib * size / 1024
        if is_heavy_compute(node):
            return self.heavy_ms
        return self.light_ms if self.light_ms and is_kernel(node) else None

    def uuid(self) -> str:
        return repr(self)


#: Bound by compute, by latency, by bandwidth.
ESTIMATIONS = (
    Estimation(heavy_ms=10.0, light_ms=1.0, latency_ms=4.0, ms_per_kib=0.5),
    Estimation(heavy_ms=1.0, light_ms=0.0, latency_ms=20.0, ms_per_kib=0.1),
    Estimation(heavy_ms=5.0, light_ms=0.5, latency_ms=0.1, ms_per_kib=50.0),
)
