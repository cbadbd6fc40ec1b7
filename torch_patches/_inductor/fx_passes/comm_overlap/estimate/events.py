"""An order as the lanes see it: kernels, starts and waits, one event each.

A planner that changes orders works on events, since a bucket has some before it has nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Launch, launches_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton


@dataclass(frozen=True, eq=False)
class Kernel:
    """Compute is issued."""

    node: fx.Node
    cost: ComputeCost


@dataclass(frozen=True, eq=False)
class Start:
    """A collective, or a bucket, is issued."""

    launch: Launch


@dataclass(frozen=True, eq=False)
class Wait:
    """A wait is issued.  Args: ``waits``: for so many results of the launch."""

    launch: Launch
    waits: int = 1


Event = Kernel | Start | Wait


def events_of(
    order: Iterable[fx.Node],
    skeleton: Skeleton,
    model: RuntimeModel,
    costs: Mapping[fx.Node, ComputeCost],
) -> list[Event]:
    """What :func:`~.timeline.simulate` issues for these arguments; other nodes have no event."""
    launches = launches_of(skeleton, model)
    events: list[Event] = []
    for node in order:
        if node in launches.starts:
            events.append(Start(launches.starts[node]))
        elif node in launches.waits:
            events.append(Wait(launches.waits[node]))
        elif node in costs:
            events.append(Kernel(node, costs[node]))
    return events


@dataclass(frozen=True)
class Tally:
    """How many events a launch has."""

    starts: int = 0
    waits: int = 0


def tally_of(events: Iterable[Event]) -> dict[int, Tally]:
    """Starts and waits by launch.  Raises ValueError where one starts twice."""
    result: dict[int, Tally] = {}
    for event in events:
        if isinstance(event, Kernel):
            continue
        index = event.launch.collective.index
        tally = result.get(index, Tally())
        if isinstance(event, Wait):
            result[index] = Tally(tally.starts, tally.waits + 1)
        elif tally.starts:
            raise ValueError(f"collective {index} starts twice")
        else:
            result[index] = Tally(1, tally.waits)
    return result
