"""What every node of a graph costs, from stated constants, a table, or the user's function.

    model = make_model("H100", gpus_per_node=8, table=load_calibration("h100.json"))
    costs = model.node_costs(graph, skeleton)         # ms and launches of compute
    model.collective_ms(collective)                   # ms of one collective, alone on its link
    model.collective_ms(collective, size_bytes)       # of a bucket that it would be a member of

A user's function is asked first (``custom.py``), then a calibration table (``calibration.py``),
then the roofline and the ring formula with the device's constants.

Nothing is measured here and no device is asked, so equal graphs cost the same on every rank.
torch's settings that make each rank measure for itself are ignored (:func:`measured_estimators`
names them): ranks with other numbers would plan other schedules, and hang.  Measured numbers come
through a table's file, which is one for all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import (
    ComputeCost,
    FlopCounter,
    compute_costs,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.custom import (
    EstimationError,
    estimation_key,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import (
    DEVICES,
    Device,
    Link,
    LinkClass,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import CalibrationTable
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import (
    collective_ms,
    link_class_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import ResultBytes, tensors_of
from torch_patches._inductor.fx_passes.comm_overlap.options import CustomEstimation
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton, Traffic

__all__ = [
    "CustomEstimation",
    "EstimationError",
    "HostCosts",
    "Interference",
    "RuntimeModel",
    "estimation_key",
    "make_model",
    "measured_estimators",
]


@dataclass(frozen=True)
class HostCosts:
    """Microseconds that the host spends on issuing work (FACTS 40, H100 with NCCL, eager issue).

    Args:
        kernel_us: one compute kernel.
        collective_us: one collective, without its wait (32 with it).
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
        launch_us: further microseconds of a collective of parameters or gradients, whatever its
            size, since compute runs: its blocks wait until those of a kernel leave the processors, on
            the last of the ranks (H200s, where 115 launches less took 9 ms less:
            tools/results/train.md).  At most half of what a kernel that runs still takes.
    """

    compute_slowdown: float = 1.2
    link_sharing: float = 1.0
    launch_us: float = 40.0


@dataclass(frozen=True)
class _Route:
    """Where a group's collectives run."""

    ranks: tuple[int, ...] | None
    group_size: int | None
    link_class: LinkClass
    link: Link


@dataclass(frozen=True)
class RuntimeModel:
    """See the module.

    Args:
        device: constants to use.
        gpus_per_node: ranks that share a node, the same on all ranks.
        custom: the user's estimation, or None.
        host: costs of issuing; :func:`make_model` takes them from the table where it has them.
        interference: costs of overlapping; likewise.
        table: measurements that come before the device's constants, or None.
        kernel_wait_us: until enough blocks of a kernel that runs have left (:meth:`beside`); None: not
            known.
    """

    device: Device = DEVICES["H100"]
    gpus_per_node: int = 8
    custom: CustomEstimation | None = None
    host: HostCosts = field(default_factory=HostCosts)
    interference: Interference = field(default_factory=Interference)
    table: CalibrationTable | None = None
    kernel_wait_us: float | None = None
    # Planners ask for one collective thousands of times; sorting its ranks each time would cost
    # more than everything else.  By group name, checked against the ranks.
    _routes: dict[str, _Route] = field(default_factory=dict, init=False, repr=False, compare=False)

    def describe(self) -> str:
        """The constants in use, in one line for a report."""
        table = "" if self.table is None else f", after {self.table.describe()}"
        own = "" if self.custom is None else ", after the custom estimation"
        return f"{self.device.name} constants, {self.gpus_per_node} GPUs a node{table}{own}"

    def node_costs(
        self, graph: fx.Graph, skeleton: Skeleton, sizes: ResultBytes | None = None
    ) -> Mapping[fx.Node, ComputeCost]:
        """Cost of every node that computes; others cost nothing.

        Linear in nodes and edges.

        Args:
            sizes: those known already; it is added to.

        Raises:
            EstimationError: from the custom estimation.
        """
        if self.table is None:
            costs = compute_costs(graph, self.device, skeleton.idle, sizes)
        else:
            costs = _measured_costs(graph, self.device, self.table, skeleton.idle, sizes)
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

    def beside(self, costs: Mapping[fx.Node, ComputeCost]) -> RuntimeModel:
        """The model for collectives beside this compute; itself where it knows that already.

        Of kernels of ``t`` ms each, the one that runs at some time still takes sum(t * t) / sum(2 * t)
        in the mean.  Enough of its blocks leave in about half of that: 40 to 80 us where it is 118 (H200s).
        """
        if self.kernel_wait_us is not None:
            return self
        times = [cost.ms for cost in costs.values()]
        rest_ms = sum(ms * ms for ms in times) / max(2 * sum(times), sys.float_info.min)
        return replace(self, kernel_wait_us=1e3 * rest_ms / 2)

    def collective_ms(self, collective: Collective, size_bytes: int | None = None) -> float:
        """Milliseconds of a collective alone on its link, launched while compute runs.

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
        route = self._route(collective)
        alone_ms = None
        if self.table is not None:
            alone_ms = self.table.collective_ms(
                collective.kind, size, route.group_size, route.link_class, route.link
            )
        if alone_ms is None:
            alone_ms = collective_ms(collective.kind, size, route.group_size, route.link)
        if collective.traffic is Traffic.OTHER or route.group_size == 1:
            return (
                alone_ms  # the compute that it waits for has ended, and what follows waits for it
            )
        wait_us = self.interference.launch_us
        if self.kernel_wait_us is not None:
            wait_us = min(wait_us, self.kernel_wait_us)
        return alone_ms + wait_us / 1e3

    def link(self, collective: Collective) -> Link:
        """The slowest link that the collective's group uses; the device's links are two objects."""
        return self._route(collective).link

    def _route(self, collective: Collective) -> _Route:
        size = None if collective.key is None else collective.key.group_size
        route = self._routes.get(collective.group)
        # The ranks of one group are nearly always one object.
        if (
            route is not None
            and route.group_size == size
            and (route.ranks is collective.ranks or route.ranks == collective.ranks)
        ):
            return route
        link_class = link_class_of(size, collective.ranks, self.gpus_per_node)
        route = _Route(collective.ranks, size, link_class, self.device.link(link_class))
        self._routes[collective.group] = route
        return route

    def _ask(self, node: fx.Node, size_bytes: int | None) -> float | None:
        assert self.custom is not None
        try:
            given = self.custom(node, size_bytes)
        except Exception as error:  # perhaps on this rank only: the others would go on
            raise EstimationError(
                f"custom_runtime_estimation raised {type(error).__name__} for {node.target}: {error}"
            ) from error
        if given is None:
            return None
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not 0 <= given <= sys.float_info.max:
            raise EstimationError(
                f"custom_runtime_estimation returned {given!r} for {node.target}; return "
                f"milliseconds (a number >= 0) or None"
            )
        return float(given)


def _measured_costs(
    graph: fx.Graph,
    device: Device,
    table: CalibrationTable,
    idle: Set[fx.Node],
    sizes: ResultBytes | None,
) -> dict[fx.Node, ComputeCost]:
    """Roofline costs with the table's memory rate, and its arithmetic where it has the dtype."""
    costs = compute_costs(graph, table.roofline_device(device), idle, sizes)
    counter = FlopCounter()
    for node, cost in costs.items():
        amount = counter.flops(node)
        if amount:
            arithmetic_ms = table.matmul_ms(_operand_dtype(node), amount, device)
            if arithmetic_ms is not None and arithmetic_ms > cost.ms:
                costs[node] = ComputeCost(arithmetic_ms, cost.launches)
    return costs


def _operand_dtype(node: fx.Node) -> torch.dtype:
    tensors = (t for source in node.all_input_nodes for t in tensors_of(source.meta.get("val")))
    return next((tensor.dtype for tensor in tensors), torch.float32)


def make_model(
    device: str = "H100",
    gpus_per_node: int = 8,
    custom: CustomEstimation | None = None,
    table: CalibrationTable | None = None,
    compute_slowdown: float = Interference.compute_slowdown,
    link_sharing: float = Interference.link_sharing,
) -> RuntimeModel:
    """The model that flags describe.

    Args:
        device: a key of ``DEVICES``: constants for whatever the table does not have.
        gpus_per_node: ranks that share a node.
        custom: ``fn(node, override_size_bytes)`` -> ms or None.
        table: measurements.
        compute_slowdown: see :class:`Interference`.  The table's counts where this is left at its
            default; a value that the user chose counts always.
        link_sharing: see :class:`Interference`.

    Raises:
        EstimationError: the device is unknown.
    """
    if device not in DEVICES:
        raise EstimationError(f"device {device!r} is not known; use one of {', '.join(DEVICES)}")
    host = HostCosts()
    if table is not None:
        if table.compute_slowdown is not None and compute_slowdown == Interference.compute_slowdown:
            compute_slowdown = table.compute_slowdown
        host = _host_costs(table)
    launch_us = None if table is None else table.loaded_launch_us
    if launch_us is None:
        launch_us = Interference.launch_us
    interference = Interference(compute_slowdown, link_sharing, launch_us)
    return RuntimeModel(DEVICES[device], gpus_per_node, custom, host, interference, table)


def _host_costs(table: CalibrationTable) -> HostCosts:
    measured = {
        "kernel_us": table.kernel_issue_us,
        "collective_us": table.collective_issue_us,
        "coalesced_member_us": table.coalesced_member_issue_us,
        "wait_us": table.wait_issue_us,
    }
    return HostCosts(**{name: us for name, us in measured.items() if us is not None})


_CHOICES_OF_ESTIMATOR = ("collective_estimator", "compute_estimator")
_PROFILE = "profile_guided_estimations_profile_path"


def measured_estimators(
    values: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> list[str]:
    """Flags of torch by which the user asks for measuring on each rank; the model ignores them.

    Args:
        values: flags by name, with or without the prefix.  Others may be among them.
        defaults: torch's own values, by the same names.  A value that equals its default was not
            asked for: from torch 2.12 on ``compute_estimator`` is "benchmark" where nobody set it.
            Leave it out for values that the user surely gave (``torch.compile(options=...)``).

    Returns:
        Names as given, sorted.
    """
    asked = []
    for name, value in values.items():
        flag = name.rpartition(".")[2]
        measures = flag in _CHOICES_OF_ESTIMATOR and value == "benchmark"
        measures |= flag == _PROFILE and value is not None
        if measures and not (defaults is not None and name in defaults and defaults[name] == value):
            asked.append(name)
    return sorted(asked)
