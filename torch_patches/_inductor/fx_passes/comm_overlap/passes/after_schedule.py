"""Schedules first and merges then: buckets that leave hidden what a schedule has hidden.

    singles -> schedule -> which compute hides which collective -> merge_after_schedule -> buckets

The buckets are scheduled anew by who asked for them, so the plan holds no places and no
dependencies.

A collective that is hidden for less than :data:`MIN_HIDDEN_SHARE` of its time counts as exposed: in
graphs bound by communication, where everything is hidden a little, nothing would merge.

Of the compute that hides a collective only the heaviest few nodes count, up to
:data:`MAX_HIDING_NODES` and until they make up :data:`HIDING_SHARE` of the time hidden: each one
costs dependencies and a node of the contracted graph, and the long tail of small kernels hides next
to nothing.  As compute keeps its order, what runs between two nodes that are kept stays too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import CollectiveSpan
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.overlap_bucketer import (
    plan_preserving_overlap,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.room import Surroundings
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits, Schedule
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.plan import HidingInterval, Plan

#: A collective that is hidden for less than this share of its time counts as exposed.
MIN_HIDDEN_SHARE = 0.75
#: Compute nodes that count for one collective, and the share of the hidden time that is enough.
MAX_HIDING_NODES, HIDING_SHARE = 4, 0.9


def merge_after_schedule(
    graph: fx.Graph, track: Track, schedule: Schedule, options: Options, limits: Limits
) -> Plan:
    """Buckets of a graph under a schedule of its collectives by themselves.

    Args:
        graph: that of the track, unchanged.
        schedule: of ``make_units(track, ())``.
        limits: caps that merging keeps.

    Returns:
        Buckets and refusals.  Buckets of gathers have a place between the inputs of all and the
        first wait of one, so ``plan_schedule`` can place them.
    """
    hiding = hiding_intervals(schedule.timeline.spans)
    also = {node for interval in hiding for node in interval.nodes}
    contracted = contract(graph, track.skeleton, also)
    places = {move.node: move.place for move in schedule.moves}
    surroundings = Surroundings(track, limits, places, waits_stay=True)
    plan = plan_preserving_overlap(track.skeleton, contracted, options, hiding, surroundings)
    return Plan(plan.buckets, plan.refusals, plan.operations)


def hiding_intervals(spans: Iterable[CollectiveSpan]) -> list[HidingInterval]:
    """What hides each collective of a simulated run: the heaviest compute, in order."""
    return [
        HidingInterval(span.collective, nodes)
        for span in spans
        if span.collective.waits and (nodes := _heaviest(span))
    ]


def _heaviest(span: CollectiveSpan) -> tuple[fx.Node, ...]:
    """Of equals the earlier one; none of a collective that counts as exposed."""
    if span.hidden_ms < MIN_HIDDEN_SHARE * (span.end_ms - span.start_ms):
        return ()
    ranked = sorted(range(len(span.hidden_by)), key=lambda place: -span.hidden_by[place].ms)
    enough = HIDING_SHARE * span.hidden_ms
    kept: list[int] = []
    covered = 0.0
    for place in ranked[:MAX_HIDING_NODES]:
        if covered >= enough:
            break
        kept.append(place)
        covered += span.hidden_by[place].ms
    return tuple(span.hidden_by[place].node for place in sorted(kept))
