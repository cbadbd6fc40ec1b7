"""Buckets and schedules a graph: tries ways, applies the best one that holds what it promised.

    forecast -> ways, the best first -> check -> apply -> forecast again -> keep, or undo and take
                                                                            the next one

A way that exceeds the memory cap is planned once more with so much less of it.  "auto" first tries
all this with compute in an order that lets other collectives start earlier.

A way is kept if the graph that it really makes is legal, no slower than the input by the estimates,
within the memory cap, and has every overlap that was planned.  Else less is done, down to nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.check import check_fences, check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Timeline
from torch_patches._inductor.fx_passes.comm_overlap.forecast import (
    Forecast,
    combined_live,
    forecast,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    SCHEDULED_MARK,
    collect,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import Overlap
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import relink
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import (
    memory_limits,
    merge_nothing,
    try_ways,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.earlier_others import earlier_others
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import (
    ModuleLabels,
    label_collectives,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_ways import (
    ModuleTries,
    next_module_way,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track, read_track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import Way, reschedule
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    Plan,
    Skeleton,
    Traffic,
)

log = logging.getLogger(__name__)

#: Plans that are applied before the graph is left as it was; bounds the work.
MAX_APPLIED, MAX_APPLIED_MODULES = 4, 14
#: A second try has this part of the memory less, besides what the first one exceeded the cap by:
#: schedules know memory by kernels, not by nodes.
_MARGIN = 256
#: Times are sums of floats in another order: what is not slower than this is equal.
_ROUNDING_MS = 1e-6


@dataclass(frozen=True, eq=False)
class Overlapped:
    """What was decided for a graph.

    Args:
        plan: applied; empty where nothing was better than the input.
        way: name of the way that was taken.
        before, after: forecasts.
        labels: of the module buckets, where modules decide.
    """

    plan: Plan
    way: str
    before: Forecast
    after: Forecast
    labels: ModuleLabels | None = None

    def hidings(self) -> list[Overlap]:
        """Which compute of the result hides which collective, as the forecast has it."""
        return [
            Overlap(
                span.collective.start,
                tuple(hiding.node for hiding in span.hidden_by),
                span.collective.waits,
            )
            for span in self.after.timeline.spans
            if span.hidden_by and span.collective.waits
        ]


def overlap(
    graph: fx.Graph, skeleton: Skeleton, options: Options, model: RuntimeModel
) -> Overlapped:
    """Changes ``graph`` in place; the caller restores it if this raises.

    Raises:
        ModulePlanError, ModuleStackError: the user's plan, or reading of modules, is no good.
        FenceError: a bug; the graph is half changed.
    """
    labels = label_collectives(skeleton, options) if options.reads_modules else None
    return replace(_overlap(graph, skeleton, options, model, labels), labels=labels)


def _overlap(
    graph: fx.Graph,
    skeleton: Skeleton,
    options: Options,
    model: RuntimeModel,
    labels: ModuleLabels | None,
) -> Overlapped:
    eager = options.run_eagerly
    before = forecast(graph, skeleton, model, eager=eager)
    limits = memory_limits(options, before.peak_bytes)
    caps = _Caps(limits.peak_bytes, memory_limits(options, before.held_peak_bytes).peak_bytes)
    tried, operations = _Tried(), 0
    for attempt in range(MAX_APPLIED if labels is None else MAX_APPLIED_MODULES):
        track = _track_of(before, caps)
        snapshot = Snapshot(graph)
        first = attempt == 0 and options.bucketing_mode == "auto"
        ordered = _in_new_order(graph, before, track, caps, eager) if first else None
        track = ordered or track
        choice = _Choice(track, options, limits, labels)
        way, spent = choice.best(tried, before.timeline.total_ms + _ROUNDING_MS)
        operations += spent
        if way is None:
            snapshot.restore()
            if ordered is None:
                break
            continue
        way = _legal(graph, track, way, limits)
        plan = way.plan if ordered is None else _as_in_input(way.plan, track, before.skeleton)
        after = _applied(graph, before, plan, eager)
        problem = _problem(before, after, caps) or _lost(way, track, after)
        problem = problem or _too_wide(plan, options)
        if problem is None:
            return Overlapped(replace(plan, operations=operations), way.name, before, after)
        log.debug("way %r is given up: %s", way.name, problem)
        if ordered is None:
            tried.note(
                way, min(way.schedule.peak_bytes, limits.peak_bytes), caps.excess_bytes(after)
            )
        snapshot.restore()  # which makes new nodes in the place of those that were erased
        before = forecast(graph, collect(graph), model, eager=eager)
    return _nothing(before, options, operations)


@dataclass
class _Tried:
    """Ways that did not hold what they promised.

    Attributes:
        given_up: names of those that are not tried again.
        lowered_bytes: name -> memory limit for a second try: what the first one thought it needed,
            less what it exceeded the cap by.
    """

    given_up: set[str] = field(default_factory=set)
    lowered_bytes: dict[str, int] = field(default_factory=dict)

    def note(self, way: Way, planned_bytes: int, excess_bytes: int) -> None:
        if excess_bytes and way.name not in self.lowered_bytes:
            margin = planned_bytes // _MARGIN
            self.lowered_bytes[way.name] = planned_bytes - excess_bytes - margin
        else:
            self.given_up.add(way.name)


@dataclass(frozen=True, eq=False)
class _Choice:
    """Chooses a way for a graph."""

    track: Track
    options: Options
    limits: Limits
    labels: ModuleLabels | None

    def best(self, tried: _Tried, slowest_ms: float) -> tuple[Way | None, int]:
        """The best way that is not slower than that, and the work of finding it."""
        if self.labels is not None:
            return next_module_way(
                self.track,
                self.options,
                self.limits,
                self.labels,
                ModuleTries(tried.given_up, tried.lowered_bytes, slowest_ms),
            )
        limit = min([self.limits.peak_bytes, *tried.lowered_bytes.values()])
        ways = try_ways(self.track, self.options, replace(self.limits, peak_bytes=limit))
        spent = sum(way.schedule.operations + way.plan.operations for way in ways)
        ways = [way for way in ways if way.name not in tried.given_up]
        ways = [way for way in ways if way.schedule.timeline.total_ms <= slowest_ms]
        return (ways[0] if ways else None), spent


@dataclass(frozen=True)
class _Caps:
    """Most bytes with inputs freed after their last use, and with inputs held."""

    peak_bytes: int
    held_peak_bytes: int

    def excess_bytes(self, after: Forecast) -> int:
        """By how much a graph exceeds them; 0 if it does not."""
        freed = after.peak_bytes - self.peak_bytes
        return max(freed, after.held_peak_bytes - self.held_peak_bytes, 0)


def _track_of(base: Forecast, caps: _Caps) -> Track:
    live = combined_live(base, caps.peak_bytes, caps.held_peak_bytes)
    return read_track(base.order, base.skeleton, base.model, base.costs, live)


def _in_new_order(
    graph: fx.Graph, before: Forecast, track: Track, caps: _Caps, eager: bool
) -> Track | None:
    """The graph with compute in an order that hides more, changed in place; None if there is none."""
    order = earlier_others(track, before.timeline, caps.peak_bytes)
    if order is None:
        return None
    relink(graph, order)
    return _track_of(forecast(graph, collect(graph), before.model, eager=eager), caps)


def _applied(graph: fx.Graph, before: Forecast, plan: Plan, eager: bool) -> Forecast:
    """Applies the plan; what the graph then is like."""
    apply_plan(graph, before.skeleton, plan, run_eagerly=eager)
    graph.lint()
    after = forecast(graph, collect(graph), before.model, eager=eager)
    check_fences(before.skeleton, after.skeleton, plan)
    return after


def _nothing(before: Forecast, options: Options, operations: int) -> Overlapped:
    plan = replace(merge_nothing(before.skeleton, options), operations=operations)
    return Overlapped(plan, "input", before, before)


def _as_in_input(plan: Plan, track: Track, skeleton: Skeleton) -> Plan:
    """The plan for a graph in a new order, told by the input's collectives and positions."""
    known = {collective.start: collective for collective in skeleton.collectives}

    def told(bucket: Bucket) -> Bucket:
        members = tuple(known[member.start] for member in bucket.members)
        positions = [member.position for member in members]
        return replace(bucket, members=members, span=max(positions) - min(positions))

    return replace(plan, buckets=tuple(map(told, plan.buckets)), order=tuple(track.order))


def _too_wide(plan: Plan, options: Options) -> str | None:
    """A new order of compute brought together what stands too far apart in the input."""
    bound = options.max_topo_span
    if bound is None or not plan.order:
        return None
    wide = [b.span for b in plan.buckets if b.span > bound]
    return f"spans {wide} are above {bound}" if wide else None


def _is_slower(one: Timeline, other: Timeline) -> bool:
    return one.total_ms > other.total_ms + _ROUNDING_MS


def _legal(graph: fx.Graph, track: Track, way: Way, limits: Limits) -> Way:
    """The way without buckets that fail the check, scheduled anew if there are any."""
    checked = check_plan(track.skeleton, contract(graph, track.skeleton), way.plan)
    if len(checked.buckets) == len(way.plan.buckets):
        return way
    return reschedule(track, replace(way, plan=checked), limits)


def _problem(before: Forecast, after: Forecast, caps: _Caps) -> str | None:
    """What the changed graph does not hold, or None."""
    if _is_slower(after.timeline, before.timeline):
        return f"it takes {after.timeline.total_ms} ms instead of {before.timeline.total_ms}"
    if caps.excess_bytes(after):
        peaks = (after.peak_bytes, after.held_peak_bytes)
        return f"its peaks, with inputs freed and held, are {peaks} bytes, the caps {caps}"
    return None


def _lost(way: Way, track: Track, after: Forecast) -> str | None:
    """Compute that was to hide a collective and does not stand under it in the changed graph."""
    place = {node: number for number, node in enumerate(after.order)}
    made = {c.start.meta[BUCKET_MARK]["bucket"]: c for c in _made_now(after)}
    now = {c.start: c for c in after.skeleton.collectives}
    bucket_of = {m.index: i for i, b in enumerate(way.plan.buckets) for m in b.members}
    preparation = {n for gather in track.gathers.values() for n in gather.preparation}
    # These move with starts and waits; and ranks with a short shard keep others of them.
    moving = _behind_reductions(after) | preparation
    for span in way.schedule.timeline.spans:
        bucket = bucket_of.get(span.collective.index)
        collective = now.get(span.collective.start) if bucket is None else made.get(bucket)
        if collective is None or not collective.waits:
            continue
        first = min(place[wait] for wait in collective.waits)
        for hiding in span.hidden_by:
            where = place.get(hiding.node)  # None of a copy, which has other nodes now
            if where is None or hiding.node in moving:
                continue
            if not place[collective.start] < where < first:
                return f"{hiding.node} no longer hides {collective.start}"
    return None


def _behind_reductions(after: Forecast) -> set[fx.Node]:
    """What is made of reduced gradients: it moves down with the waits, and hides what it may."""
    reductions = [c for c in after.skeleton.collectives if c.traffic is Traffic.GRADIENT]
    pending = [wait for reduction in reductions for wait in reduction.waits]
    found = set(pending)
    while pending:
        fresh = [user for user in pending.pop().users if user not in found]
        found.update(fresh)
        pending.extend(fresh)
    return found


def _made_now(after: Forecast) -> list[Collective]:
    """The buckets that this plan has made; others come from an earlier run."""
    return [
        c
        for c in after.skeleton.collectives
        if BUCKET_MARK in c.start.meta and SCHEDULED_MARK not in c.start.meta
    ]
