"""What is kept of a run so that it can be drawn later: tuples of texts and numbers, no nodes.

A graph holds its values' metadata, of which a model has a lot; a report may live as long as the
process.  Linear in nodes and edges, and nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import LiveBytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.forecast import Forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches._inductor.fx_passes.comm_overlap.reporting import Observed

if TYPE_CHECKING:
    from torch_patches.viewing.picture import Picture

#: Fields of the options that follow from others, or say how the run was started.
_NOT_FOR_PEOPLE = frozenset(
    {
        "calibration",
        "calibration_digest",
        "estimation_digest",
        "groups",
        "insert_overlap_deps",
        "module_names_checked",
        "module_stack_digest",
    }
)
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


@dataclass(frozen=True)
class LaunchRecord:
    """A collective as it was launched.

    Args:
        index: among the graph's collectives.
        start: name of its start.
        place: of the start in the order.
        waits: places of its waits.
        group_size: ranks, None where nobody tells.
        size_bytes: of the full tensor.
        told_by, parameter: of its tag; empty without one.
        bucket: of this run, by its place among the report's buckets; None for others.
        ms: on an idle link.
        host_ms: of issuing it.
    """

    index: int
    start: str
    place: int
    waits: tuple[int, ...]
    kind: str
    group: str
    group_size: int | None
    dtype: str
    reduce_op: str
    size_bytes: int
    traffic: str
    told_by: str
    parameter: str
    bucket: int | None
    ms: float
    host_ms: float
    link: Link


@dataclass(frozen=True)
class RunRecord:
    """One order of one graph.

    Args:
        names, ops: of all nodes.
        inputs: places of what each reads.
        costs: by place, of those that compute.
        modules: by place, the innermost module that made a node, of those of ``costs``.
        launches: in start order.
        order_dependencies: (before, after), by places, that data flow does not show.
        live: bytes where inputs that are no parameters die after their last use.
        held_peak_bytes: where the caller holds them.
    """

    names: tuple[str, ...]
    ops: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...] = field(repr=False)
    costs: Mapping[int, ComputeCost] = field(repr=False)
    modules: Mapping[int, str] = field(repr=False)
    launches: tuple[LaunchRecord, ...]
    order_dependencies: tuple[tuple[int, int], ...]
    live: LiveBytes = field(repr=False)
    held_peak_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most live bytes, where inputs die."""
        return max(self.live.inputs, *self.live.at_node)


@dataclass(frozen=True)
class StoryRecord:
    """Both runs, and what they were made with.

    Args:
        cap_bytes, held_cap_bytes: most live bytes that were allowed.
        host, interference: of the model; the simulation reads nothing else of it.
        constants: the model in words, by name.
        options: in words, by name, those that are not at their defaults first.
        schedules: starts and waits were to be moved.
        prefetch_kernels: kernels that a gather may start ahead; None for no bound.
    """

    before: RunRecord
    after: RunRecord
    cap_bytes: int
    held_cap_bytes: int
    host: HostCosts
    interference: Interference
    constants: Mapping[str, str]
    options: Mapping[str, str]
    schedules: bool
    prefetch_kernels: int | None

    @cached_property
    def picture(self) -> Picture:
        """Both runs, simulated again; made when it is first asked for."""
        from torch_patches.viewing.picture import picture_of

        return picture_of(self)

    def write_chrome_trace(self, report: Report, path: str | Path) -> None:
        """See ``Report.to_chrome_trace``."""
        from torch_patches.viewing.chrome import write_trace

        write_trace(self.picture, report, path)

    def write_html(self, report: Report, path: str | Path) -> None:
        """See ``Report.to_html``."""
        from torch_patches.viewing.page import Sheet, write_page

        write_page([Sheet.of(report)], path)


def observe(observed: Observed) -> StoryRecord:
    """The observer of ``optimize_graph``."""
    from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import memory_limits

    before, after, options = observed.before, observed.after, observed.options
    first = _record_run(before, None, observed.inputs)
    known = frozenset(launch.start for launch in first.launches)
    model = after.model
    return StoryRecord(
        before=first,
        after=first if after is before else _record_run(after, known, None),
        cap_bytes=observed.cap_bytes,
        held_cap_bytes=observed.held_cap_bytes,
        host=model.host,
        interference=model.interference,
        constants=_constants(model),
        options=_told_options(options),
        schedules=options.schedules,
        prefetch_kernels=memory_limits(options, 0).prefetch_kernels,
    )


def _record_run(
    found: Forecast,
    known: frozenset[str] | None,
    inputs: Mapping[str, tuple[str, ...]] | None,
) -> RunRecord:
    """Args:
    known: names of the starts before; buckets among them are not of this run.
    inputs: what each node read, by names; None: what it reads now.
    """
    order = found.order
    place = {node: number for number, node in enumerate(order)}
    costs = {place[node]: cost for node, cost in found.costs.items() if node in place}
    launches = tuple(
        _record_launch(launch.collective, place, known, launch.ms, launch.host_ms, launch.link)
        for launch in found.launches.all
    )
    return RunRecord(
        names=tuple(node.name for node in order),
        ops=tuple(_op(node) for node in order),
        inputs=_places_read(place) if inputs is None else _named_places_read(place, inputs),
        costs=costs,
        modules={number: _module(order[number]) for number in costs},
        launches=launches,
        order_dependencies=tuple(
            (place[first], place[second]) for first, second in found.skeleton.order_dependencies
        ),
        live=found.live,
        held_peak_bytes=found.held_peak_bytes,
    )


def _places_read(place: Mapping[fx.Node, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(place[n] for n in node.all_input_nodes) for node in place)


def _named_places_read(
    place: Mapping[fx.Node, int], inputs: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[int, ...], ...]:
    known = {node.name: number for node, number in place.items()}
    return tuple(tuple(known[n] for n in inputs[node.name] if n in known) for node in place)


def _record_launch(
    collective: Collective,
    place: Mapping[fx.Node, int],
    known: frozenset[str] | None,
    ms: float,
    host_ms: float,
    link: Link,
) -> LaunchRecord:
    key, tag, start = collective.key, collective.tag, collective.start
    mark = start.meta.get(BUCKET_MARK)
    made_now = mark is not None and known is not None and start.name not in known
    return LaunchRecord(
        index=collective.index,
        start=start.name,
        place=place[start],
        waits=tuple(place[wait] for wait in collective.waits),
        kind=collective.kind.value,
        group=collective.group,
        group_size=key.group_size if key else None,
        dtype=str(key.dtype).removeprefix("torch.") if key else "",
        reduce_op=(key.reduce_op or "") if key else "",
        size_bytes=collective.size_bytes,
        traffic=collective.traffic.value,
        told_by=tag.source.value if tag else "",
        parameter=(tag.parameter or "") if tag else "",
        bucket=mark["bucket"] if made_now and mark is not None else None,
        ms=ms,
        host_ms=host_ms,
        link=link,
    )


def _op(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return op_name(node.target) or str(getattr(node.target, "__name__", node.target))


def _module(node: fx.Node) -> str:
    """The innermost module that made a node, as the graph spells it."""
    for key in _STACKS:
        stack = node.meta.get(key)
        if isinstance(stack, dict) and stack:
            last = next(reversed(stack.values()))
            return str(last[0]) if isinstance(last, tuple) and last else ""
    return ""


def _constants(model: RuntimeModel) -> dict[str, str]:
    device = model.device
    told = {"estimates": model.describe(), "gpus_per_node": str(model.gpus_per_node)}
    for title, part in (("host", model.host), ("", model.interference), ("device", device)):
        prefix = f"{title}." if title else ""  # host and device have names in common
        told |= {prefix + name: _plain(getattr(part, name)) for name in _names(part)}
    return told


def _names(part: object) -> Iterable[str]:
    return (f.name for f in fields(part) if not f.name.startswith("_"))  # type: ignore[arg-type]


def _told_options(options: Options) -> dict[str, str]:
    """Texts, so that no function of the user's stays alive."""
    default = Options()
    names = [f.name for f in fields(options) if f.name not in _NOT_FOR_PEOPLE]
    changed = [n for n in names if getattr(options, n) != getattr(default, n)]
    ordered = [*changed, *(name for name in names if name not in changed)]
    return {name: _plain(getattr(options, name)) for name in ordered}


def _plain(value: object) -> str:
    """A function by its name: its address says nothing."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each}".removeprefix("torch.") for key, each in value.items())
    if isinstance(value, Link):
        return f"{value.base_us} us + {value.hop_us} us a hop, {value.gb_per_s} GB/s"
    return str(value)
