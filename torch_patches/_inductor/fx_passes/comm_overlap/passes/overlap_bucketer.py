"""Merges collectives without taking away the compute that hides them.

Which compute hides which collective is given (by a schedule, or by hand).  Each relation becomes
dependencies of the contracted graph, and merged starts and waits are single nodes of it:

    start -> hiding compute -> wait         {start A, start B} -> compute of A, compute of B
                                                              -> {wait A, wait B}

So a merge that would leave compute outside of its interval closes a cycle, and is refused.  What
the graph cannot see is the stream: a group runs its collectives in the order they start.  A merge
that makes one collective jump the queue delays those it jumps over, so it may jump only over
collectives that nothing hides; and a hidden one is never put off behind others.

Several places are tried for the merged start and for the merged wait, in the order that
``berths.joint_places`` gives; those taken are the plan's moves.  They leave compute where it is.
Where no such place is left, a merge that only dependencies allow is made without places, and the
rewrite chooses them; but not under a memory cap, since nobody knows what lives there then.

A merge that copies must save what its copies cost.  Bounds (bytes, span) are those of the greedy in
``topo_span.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.berths import NEVER
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.hiding_merger import HidingMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.replicas import (
    follow_scatters,
    scatters_of_replicas,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.room import Surroundings
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import plan_schedule
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import (
    greedy_buckets,
    plan_greedily,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import make_units
from torch_patches._inductor.fx_passes.comm_overlap.plan import HidingInterval, Plan, Skeleton


def plan_preserving_overlap(
    skeleton: Skeleton,
    contracted: AugmentedGraph[fx.Node],
    options: Options,
    hiding: Sequence[HidingInterval],
    surroundings: Surroundings | None = None,
    model: RuntimeModel | None = None,
) -> Plan:
    """Plans buckets that keep every hiding interval, with what holds them.

    The plan has dependencies (compute inside of its interval, each group's start order) and moves
    (the places of merged starts and waits).

    Args:
        contracted: a contraction that keeps the hiding nodes too
            (``contract(graph, skeleton, also=...)``); used up.
        hiding: compute by collective; a relation that contradicts the graph (compute that the
            collective needs, or that needs it) is dropped.
        surroundings: with them merging keeps the memory cap, and exposed collectives are taken
            before or after hidden ones, by what simulates better, unless the options say so.
        model: costs of copies and launches; that of the track where there is one.  Without any,
            copies cost nothing.
    """
    mark = contracted.checkpoint()
    merger = HidingMerger(skeleton, contracted, hiding, surroundings, model)
    if options.bucket_exposed_first:
        return _finish(_plan_sorted(skeleton, merger, options, exposed_first=True), merger)
    candidates, _ = select_candidates(skeleton, options)
    if surroundings is None or len({merger.is_hidden(c) for c in candidates}) < 2:
        return _finish(plan_greedily(skeleton, merger, options), merger)
    contracted.rollback(mark)
    plans = plan_both_orders(skeleton, contracted, options, hiding, surroundings, model)
    best = min(plans, key=lambda plan: _badness(plan, surroundings))
    return replace(best, operations=sum(plan.operations for plan in plans))


def plan_both_orders(
    skeleton: Skeleton,
    contracted: AugmentedGraph[fx.Node],
    options: Options,
    hiding: Sequence[HidingInterval],
    surroundings: Surroundings,
    model: RuntimeModel | None = None,
) -> tuple[Plan, Plan]:
    """The plan with exposed collectives taken first, and the one with these taken last.

    Arguments as above; ``contracted`` is left as it was given.
    """
    plans: list[Plan] = []
    for exposed_first in (True, False):
        mark = contracted.checkpoint()
        merger = HidingMerger(skeleton, contracted, hiding, surroundings, model)
        plans.append(_finish(_plan_sorted(skeleton, merger, options, exposed_first), merger))
        contracted.rollback(mark)
    return plans[0], plans[1]


def _finish(plan: Plan, merger: HidingMerger) -> Plan:
    dependencies = tuple(merger.dependencies(plan.buckets))
    return replace(plan, dependencies=dependencies, moves=tuple(merger.moves(plan.buckets)))


def _plan_sorted(
    skeleton: Skeleton, merger: HidingMerger, options: Options, exposed_first: bool
) -> Plan:
    """The greedy with exposed collectives in front of hidden ones, or behind them.

    They are sorted within stretches of half a span, so that a bucket meets all that it may hold
    before it has put off too many; the merger watches the span.
    """
    candidates, refusals = select_candidates(skeleton, options)
    span = options.max_topo_span
    length = NEVER if span is None else max(span // 2, 1)
    candidates.sort(
        key=lambda c: (c.position // length, merger.is_hidden(c) == exposed_first, c.index)
    )
    scatter_of = scatters_of_replicas(skeleton.collectives)
    leaders = [c for c in candidates if c.index not in scatter_of]
    replicas = [c for c in candidates if c.index in scatter_of]
    unbounded = replace(options, max_topo_span=None)
    merger.max_span = options.max_topo_span
    led = greedy_buckets(leaders, merger, unbounded, refusals)
    merger.max_span = None  # replicas follow their reduce-scatters
    followed, apart = follow_scatters(led.buckets, replicas, scatter_of, merger, options)
    merger.max_span = options.max_topo_span
    alone = greedy_buckets(apart, merger, unbounded, small_first=False)
    parts = (led, followed, alone)
    return Plan(
        tuple(sorted((b for p in parts for b in p.buckets), key=lambda b: b.members[0].index)),
        tuple(refusal for part in parts for refusal in part.refusals),
        sum(part.operations for part in parts),
    )


def _badness(plan: Plan, surroundings: Surroundings) -> tuple[int, float, int]:
    """Less is better: bytes over the cap, simulated ms, launches."""
    track, limits = surroundings.track, surroundings.limits
    schedule = plan_schedule(track, make_units(track, plan.buckets), limits)
    over = max(schedule.peak_bytes - limits.peak_bytes, 0)
    merged = sum(len(bucket.members) - 1 for bucket in plan.buckets)
    return over, schedule.timeline.total_ms, -merged
