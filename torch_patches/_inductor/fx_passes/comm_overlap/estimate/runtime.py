"""What every node of a graph costs, from stated constants, a table, or the user's function.

    model = RuntimeModel(Device "H100", gpus_per_node=8)
    costs = model.node_costs(graph, skeleton)         # ms and launches of compute
    model.collective_ms(collective)                   # ms of one collective, alone on its link
    model.collective_ms(collective, size_bytes)       # of a bucket that it would be a member of

Nothing is measured and no device is asked, so equal graphs cost the same on every rank.  A user's
function is asked first, then a calibration table, then the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import (
    ComputeCost,
    compute_costs,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import (
    DEVICES,
    Device,
    Link,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import (
    collective_ms,
    link_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton

#: ``fn(node, override_size_bytes)`` -> ms, or None to leave it to the model.
CustomEstimation = Callable[[fx.Node, int | None], float | None]


@dataclass(frozen=True)
class HostCosts:
    """Microseconds that the host spends on issuing work (FACTS 40, H100 with NCCL, eager issue).

    Args:
        kernel_us: one compute kernel.
        collective_us: one collective with its wait.
        coalesced_member_us: each further member of a coalesced collective.
        wait_us: a wait on finished work.
    """

    kernel_us: float = 5.0
    collective_us: float = 31.0
    coalesced_member_us: float = 10.0
    wait_us: float = 1.0


@dataclass(frozen=True)
class Interference:
    """What overlapping costs.

    Args:
        compute_slowdown: a compute kernel takes this many times as long while any collective moves
            data (47 ms of compute became 56 to 60 on H100s: BASELINES, section B).
        link_sharing: of two groups on the same link at once, the share of the earlier one's
            transfer that the later one waits for: 1 is one network, 0 is two.
    """

    compute_slowdown: float = 1.2
    link_sharing: float = 1.0


class EstimationError(ValueError):
    """A user's estimation returned something that is no time."""


def _group_size(collective: Collective) -> int | None:
    return None if collective.key is None else collective.key.group_size


@dataclass(frozen=True)
class RuntimeModel:
    """See the module.

    Args:
        device: constants to use.
        gpus_per_node: ranks that share a node, the same on all ranks.
        custom: the user's estimation, or None.
        host: costs of issuing.
        interference: costs of overlapping.
    """

    device: Device = DEVICES["H100"]
    gpus_per_node: int = 8
    custom: CustomEstimation | None = None
    host: HostCosts = field(default_factory=HostCosts)
    interference: Interference = field(default_factory=Interference)

    def describe(self) -> str:
        """The constants in use, in one line for a report."""
        own = "" if self.custom is None else ", after the custom estimation"
        return f"{self.device.name} constants, {self.gpus_per_node} GPUs a node{own}"

    def node_costs(self, graph: fx.Graph, skeleton: Skeleton) -> Mapping[fx.Node, ComputeCost]:
        """Cost of every node that computes; others cost nothing.

        Linear in nodes and edges.

        Raises:
            EstimationError: from the custom estimation.
        """
        costs = compute_costs(graph, self.device)
        if self.custom is None:
            return costs
        starts = {collective.start for collective in skeleton.collectives}
        for node in graph.nodes:
            if node.op == "call_function" and node not in starts:
                given = self._ask(node, None)
                if given is not None:
                    launches = costs[node].launches if node in costs else int(given > 0)
                    costs[node] = ComputeCost(given, launches)
        return costs

    def collective_ms(self, collective: Collective, size_bytes: int | None = None) -> float:
        """Milliseconds of a collective alone on its link.

        Args:
            size_bytes: of the full tensor, where it is not the collective's own (a bucket).

        Raises:
            EstimationError: from the custom estimation.
        """
        if self.custom is not None:
            given = self._ask(collective.start, size_bytes)
            if given is not None:
                return given
        size = collective.size_bytes if size_bytes is None else size_bytes
        return collective_ms(collective.kind, size, _group_size(collective), self.link(collective))

    def link(self, collective: Collective) -> Link:
        """The slowest link that the collective's group uses; the device's links are two objects."""
        size = _group_size(collective)
        return link_of(self.device, size, collective.ranks, self.gpus_per_node)

    def _ask(self, node: fx.Node, size_bytes: int | None) -> float | None:
        assert self.custom is not None
        given = self.custom(node, size_bytes)
        if given is None:
            return None
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not math.isfinite(given) or given < 0:
            raise EstimationError(
                f"custom_runtime_estimation returned {given!r} for {node.target}; return "
                f"milliseconds (a number >= 0) or None"
            )
        return float(given)
