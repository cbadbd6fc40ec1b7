"""Buckets and schedules a graph: tries ways, applies the best one that holds what it promised.

    forecast -> ways, the best first -> check -> apply -> forecast again -> keep, or undo and take
                                                                            the next one

Which one is next is told by ``passes/choice.py``.  A way that exceeds the memory cap is scheduled
once more with so much less of it.  "auto" first tries one with compute in an order that lets other
collectives start earlier.

A way is kept if the graph that it really makes is legal, no slower than the input by the estimates,
within the memory cap, and has every overlap that was planned.  Else less is done, down to nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

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
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import (
    check_order,
    relink,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import (
    memory_limits,
    merge_nothing,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.choice import (
    Choice,
    EstimatedChoice,
    ModuleChoice,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.earlier_others import earlier_others
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import (
    ModuleLabels,
    label_collectives,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track, read_track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import Way, is_small, reschedule
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    Plan,
    Skeleton,
    Traffic,
)

log = logging.getLogger(__name__)

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
    before = forecast(graph, skeleton, model, eager=options.run_eagerly)
    limits = memory_limits(options, before.peak_bytes)
    caps = _Caps(limits.peak_bytes, memory_limits(options, before.held_peak_bytes).peak_bytes)
    attempts = _Attempts(graph, options, before.model, caps, limits, before)
    kept = attempts.best_of_both_orders() if labels is None else attempts.run(labels)
    if kept is None:
        return _nothing(attempts.before, options, attempts.operations)
    plan = replace(kept.plan, operations=attempts.operations)
    return Overlapped(plan, kept.way.name, attempts.before, kept.after)


@dataclass(frozen=True, eq=False)
class _Applied:
    """A way that holds what it promised.

    Args:
        plan: of the way, told by the collectives of the graph as it was given.
    """

    way: Way
    plan: Plan
    after: Forecast


class _Attempts:
    """Applies ways to a graph until none is left that promises more.

    Attributes:
        before: forecast of the graph as it was given, with the nodes that it had when it last stood
            like that.
        operations: counted work.
    """

    def __init__(
        self,
        graph: fx.Graph,
        options: Options,
        model: RuntimeModel,
        caps: _Caps,
        limits: Limits,
        before: Forecast,
    ) -> None:
        self._graph, self._options, self._model = graph, options, model
        self._caps, self._limits = caps, limits
        self.before = before
        self.operations = 0
        self._track: Track | None = None  # of the graph as it was given
        self._given: Snapshot | None = None  # the graph as it was given, while it is changed

    def best_of_both_orders(self) -> _Applied | None:
        """The first way that holds with compute in an order that lets other collectives start
        earlier; without one, or in a small graph if it is faster, the best with compute as it is."""
        found = self._in_new_order() if self._options.bucketing_mode == "auto" else None
        if found is not None and not is_small(found.way.track):
            return found
        kept = self.run(None)
        if found is None or (kept is not None and not _is_faster(found, kept)):
            return kept
        self._read()
        return self._in_new_order()

    def _in_new_order(self) -> _Applied | None:
        slowest = self.before.timeline.total_ms + _ROUNDING_MS
        order = earlier_others(self._read(), self.before.timeline, self._caps.peak_bytes)
        if order is None:
            return None
        self._given = Snapshot(self._graph)
        relink(self._graph, order)
        track = self._track_of(self._forecast(collect(self._graph)))
        choice = EstimatedChoice(self._options, self._limits)
        way = choice.next(lambda: track, slowest)
        self.operations += choice.operations
        if way is not None:
            way = _legal(self._graph, track, way)
            plan = _as_in_input(way.plan, track, self.before.skeleton)
            after = self._changed_by(plan)
            problem = self._problem(way, track, after) or _too_wide(plan, self._options)
            if problem is None:
                return _Applied(way, plan, after)
            log.debug("way %r in a new order is given up: %s", way.name, problem)
        self._read()
        return None

    def run(self, labels: ModuleLabels | None) -> _Applied | None:
        """The best way that holds, which the graph then has; None: the graph is as it was."""
        choice: Choice = (
            EstimatedChoice(self._options, self._limits)
            if labels is None
            else ModuleChoice(self._options, self._limits, labels)
        )
        kept: _Applied | None = None
        stands = False  # the graph is that of the way that is kept
        slowest: float | None = self.before.timeline.total_ms + _ROUNDING_MS
        applied = 0
        while slowest is not None and (not applied or applied < choice.most_applied):
            way = choice.next(self._read, slowest)
            if way is None:
                break
            applied += 1
            found = self._apply(way, choice)
            stands = found is not None and (kept is None or _is_faster(found, kept))
            if stands and found is not None:
                kept = found
                slowest = choice.faster_than(kept.after.timeline.total_ms)
        if kept is not None and not stands:
            kept = self._apply(choice.again(self._read(), kept.way), choice)
        if kept is None:
            self._read()
        self.operations += choice.operations
        return kept

    def _read(self) -> Track:
        """The graph as it was given."""
        if self._given is not None:
            self._given.restore()  # which makes new nodes in the place of those that were erased
            self._given = self._track = None
            self.before = self._forecast(collect(self._graph))
        if self._track is None:
            self._track = self._track_of(self.before)
        return self._track

    def _forecast(self, skeleton: Skeleton) -> Forecast:
        eager, sizes = self._options.run_eagerly, self.before.sizes
        return forecast(self._graph, skeleton, self._model, eager=eager, sizes=sizes)

    def _track_of(self, base: Forecast) -> Track:
        live = combined_live(base, self._caps.peak_bytes, self._caps.held_peak_bytes)
        return read_track(base.order, base.skeleton, self._model, base.costs, live)

    def _apply(self, way: Way, choice: Choice) -> _Applied | None:
        """Changes the graph; None, and the choice is told, where the way does not hold."""
        track = self._read()
        way = _legal(self._graph, track, way)
        self._given = Snapshot(self._graph)
        after = self._changed_by(way.plan)
        problem = self._problem(way, track, after)
        if problem is None:
            return _Applied(way, way.plan, after)
        log.debug("way %r is given up: %s", way.name, problem)
        choice.fail(way, self._caps.excess_bytes(after))
        self._read()
        return None

    def _changed_by(self, plan: Plan) -> Forecast:
        """Applies the plan; what the graph then is like."""
        skeleton, eager = self.before.skeleton, self._options.run_eagerly
        apply_plan(self._graph, skeleton, plan, run_eagerly=eager)
        check_order(self._graph)
        after = self._forecast(collect(self._graph))
        check_fences(skeleton, after.skeleton, plan)
        return after

    def _problem(self, way: Way, track: Track, after: Forecast) -> str | None:
        return _problem(self.before, after, self._caps) or _lost(way, track, after)


@dataclass(frozen=True)
class _Caps:
    """Most bytes with inputs freed after their last use, and with inputs held."""

    peak_bytes: int
    held_peak_bytes: int

    def excess_bytes(self, after: Forecast) -> int:
        """By how much a graph exceeds them; 0 if it does not."""
        freed = after.peak_bytes - self.peak_bytes
        return max(freed, after.held_peak_bytes - self.held_peak_bytes, 0)


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
    if bound is None:
        return None
    wide = [b.span for b in plan.buckets if b.span > bound]
    return f"spans {wide} are above {bound}" if wide else None


def _is_slower(one: Timeline, other: Timeline) -> bool:
    return one.total_ms > other.total_ms + _ROUNDING_MS


def _is_faster(one: _Applied, other: _Applied) -> bool:
    return one.after.timeline.total_ms < other.after.timeline.total_ms


def _legal(graph: fx.Graph, track: Track, way: Way) -> Way:
    """The way without buckets that fail the check, scheduled anew if there are any."""
    checked = check_plan(track.skeleton, contract(graph, track.skeleton), way.plan)
    if len(checked.buckets) == len(way.plan.buckets):
        return way
    return reschedule(track, replace(way, plan=checked), way.limits)


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
