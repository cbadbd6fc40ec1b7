"""Module bucketing: one bucket for each module of a plan, key and phase.

    layers.0: AG(wq) AG(wk) AG(w1) ...     =>    AG{layers.0}: one start, one bucket
    layers.1: AG(wq) AG(wk) AG(w1) ...     =>    AG{layers.1}

A module may be run several times in a graph (microbatches, a layer that is shared): each *visit* has
its own bucket.  A visit ends where a parameter comes again.  Members that cannot be merged, because a
path or a side effect lies between them, go to further buckets of the visit, and the report says why.
All-reduces over replicas of shards (HSDP) follow their reduce-scatters.  What the plan does not cover
is bucketed as by topo_span, or left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import (
    Merger,
    choose_form,
    make_bucket,
    merge_key,
    settle_form,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import ModuleLabels
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import Gather
from torch_patches._inductor.fx_passes.comm_overlap.passes.replicas import (
    follow_scatters,
    scatters_of_replicas,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import (
    cap_bytes,
    greedy_buckets,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    CloseReason,
    Collective,
    CollectiveKind,
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
)

#: Buckets of one visit and key that a member is offered to; bounds the work.
_OPEN_BUCKETS = 8


@dataclass(frozen=True)
class Visit:
    """One run of a module bucket's module.

    Args:
        label: of the bucket.
        number: 0 for the first run in this phase.
        backward: phase.
    """

    label: str
    number: int
    backward: bool


@dataclass(frozen=True, eq=False)
class ModuleBuckets:
    """Args:
    plan: buckets and refusals.
    visit_of: index of a collective -> its visit, of all that the module plan covers.
    """

    plan: Plan
    visit_of: Mapping[int, Visit]


def plan_module_buckets(
    skeleton: Skeleton, merger: Merger, labels: ModuleLabels, options: Options
) -> ModuleBuckets:
    """Near-linear in collectives: each is offered to a bounded number of buckets."""
    candidates, refusals = select_candidates(skeleton, options)
    visit_of = find_visits(skeleton.collectives, labels.of)
    scatter_of = scatters_of_replicas(skeleton.collectives)
    leaders = [c for c in candidates if c.index not in scatter_of]
    replicas = [c for c in candidates if c.index in scatter_of]
    planner = _VisitPlanner(merger, options, visit_of)
    planner.take([c for c in leaders if c.index in visit_of])
    followed, apart = follow_scatters(planner.buckets, replicas, scatter_of, merger, options, True)
    planner.take([c for c in apart if c.index in visit_of])
    rest = [c for c in (*leaders, *apart) if c.index not in visit_of]
    other = _uncovered(sorted(rest, key=lambda c: c.index), merger, options)
    buckets = [*planner.buckets, *_labelled(followed.buckets, visit_of), *other.buckets]
    return ModuleBuckets(
        Plan(
            buckets=tuple(sorted(buckets, key=lambda b: b.members[0].index)),
            refusals=(*refusals, *planner.refusals, *followed.refusals, *other.refusals),
            operations=planner.operations + followed.operations + other.operations,
        ),
        visit_of,
    )


def find_visits(collectives: Sequence[Collective], labels: Mapping[int, str]) -> dict[int, Visit]:
    """Tells runs of a module apart: one ends where a parameter comes again with the same key."""
    numbers: dict[tuple[object, ...], int] = {}
    seen: dict[tuple[object, ...], set[object]] = {}
    result: dict[int, Visit] = {}
    for collective in collectives:
        label = labels.get(collective.index)
        if label is None:
            continue
        run = (label, collective.backward, collective.kind is CollectiveKind.ALL_GATHER)
        member = (collective.key, _identity(collective))
        known = seen.setdefault(run, set())
        if member in known:
            numbers[run] = numbers.get(run, 0) + 1
            known.clear()
        known.add(member)
        result[collective.index] = Visit(label, numbers.get(run, 0), collective.backward)
    return result


def _identity(collective: Collective) -> object:
    """Of the parameter, by what the graph says of it; of a parameter nobody knows its own."""
    tag = collective.tag
    named = (tag.index, tag.parameter) if tag is not None else (None, None)
    if collective.parameter_index is not None:
        return collective.parameter_index
    return named if named != (None, None) else ("alone", collective.index)


def _uncovered(collectives: Sequence[Collective], merger: Merger, options: Options) -> Plan:
    if options.module_uncovered == "bucket":
        return greedy_buckets(collectives, merger, options)
    return Plan(
        refusals=tuple(Refusal((c.start.name,), RefusalReason.NOT_IN_PLAN) for c in collectives)
    )


def _labelled(buckets: Sequence[Bucket], visit_of: Mapping[int, Visit]) -> list[Bucket]:
    visits = [visit_of.get(bucket.members[0].index) for bucket in buckets]
    return [
        replace(bucket, label=visit.label) if visit is not None else bucket
        for bucket, visit in zip(buckets, visits, strict=True)
    ]


@dataclass
class _OpenBucket:
    """A bucket that takes members."""

    members: list[Collective]
    size_bytes: int


class _VisitPlanner:
    """Merges the members of each visit that agree in their key."""

    def __init__(self, merger: Merger, options: Options, visit_of: Mapping[int, Visit]) -> None:
        self._merger, self._options, self._visit_of = merger, options, visit_of
        self._before = merger.operations
        self._made: dict[tuple[object, ...], int] = {}  # buckets, by key
        self.buckets: list[Bucket] = []
        self.refusals: list[Refusal] = []

    @property
    def operations(self) -> int:
        return self._merger.operations - self._before

    def take(self, collectives: Sequence[Collective]) -> None:
        together: dict[tuple[object, ...], list[Collective]] = {}
        for collective in collectives:
            visit = self._visit_of[collective.index]
            together.setdefault((visit, *merge_key(collective)), []).append(collective)
        for members in together.values():
            self._merge(members)

    def _merge(self, members: Sequence[Collective]) -> None:
        label = self._visit_of[members[0].index].label
        if len(members) == 1:
            self._refuse(members, RefusalReason.ALONE_IN_MODULE, label)
            return
        open_buckets: list[_OpenBucket] = []
        reasons: dict[int, RefusalReason] = {}
        for member in members:
            for place, bucket in enumerate(open_buckets[:_OPEN_BUCKETS]):
                reason = self._obstacle(bucket, member, place)
                if reason is None:
                    bucket.members.append(member)
                    bucket.size_bytes += member.size_bytes
                    break
                reasons[member.index] = reason
            else:
                open_buckets.append(_OpenBucket([member], member.size_bytes))
        made = [bucket.members for bucket in open_buckets]
        for place, bucket_members in enumerate(made):
            self._close(bucket_members, label)
            if place or len(bucket_members) == 1:
                why = reasons.get(bucket_members[0].index) or reasons.get(made[1][0].index)
                self._refuse(bucket_members, why or RefusalReason.LEFT_OVER, label)

    def _obstacle(
        self, bucket: _OpenBucket, member: Collective, place: int
    ) -> RefusalReason | None:
        """Why ``member`` cannot join; None if it has joined."""
        first = bucket.members[0]
        assert first.key is not None
        if (first.segment, first.wait_segment) != (member.segment, member.wait_segment):
            return RefusalReason.BARRIER
        if self._options.bucket_cap_mb is not None:
            size = bucket.size_bytes + member.size_bytes
            number = self._made.get(merge_key(first), 0) + place
            if size > cap_bytes(self._options.bucket_cap_mb, number, first.key, 0):
                return RefusalReason.BYTE_CAP
        if self._merger.merge(first, member, choose_form(self._options, first.key)):
            return None
        return self._merger.why.get(member.index, RefusalReason.DEPENDENCY)

    def _close(self, bucket: Sequence[Collective], label: str) -> None:
        self._made[merge_key(bucket[0])] = self._made.get(merge_key(bucket[0]), 0) + 1
        if len(bucket) == 1:
            return
        key = bucket[0].key
        assert key is not None
        form = settle_form(self._merger, bucket, choose_form(self._options, key), self._options)
        made = make_bucket(bucket, form, CloseReason.END, by_registration=True)
        self.buckets.append(replace(made, label=label))

    def _refuse(self, members: Sequence[Collective], reason: RefusalReason, label: str) -> None:
        names = tuple(member.start.name for member in members)
        self.refusals.append(Refusal(names, reason, f"module bucket {label}"))


def split_for_memory(plan: Plan, gathers: Mapping[int, Gather], free: Mapping[int, int]) -> Plan:
    """Parts of buckets of gathers that memory kept from starting in time: those of the members used
    first that find room start in time, the others where they can.

    Args:
        gathers: by index of the collective.
        free: index of a bucket's first member -> bytes that it may have.
    """
    buckets: list[Bucket] = []
    refusals = list(plan.refusals)
    for bucket in plan.buckets:
        room = free.get(bucket.members[0].index)
        early, late = list[Collective](), list(bucket.members)
        if room is not None:
            by_use = sorted(bucket.members, key=lambda m: (gathers[m.index].use, m.index))
            ends = list(accumulate(gathers[m.index].flight_bytes for m in by_use))
            early, late = by_use[: bisect_right(ends, room)], by_use[bisect_right(ends, room) :]
        if not (early and late):
            buckets.append(bucket)
            continue
        for members in (early, late):
            if len(members) > 1:
                made = make_bucket(members, bucket.form, CloseReason.BYTES, by_registration=True)
                buckets.append(replace(made, label=bucket.label))
        names = tuple(member.start.name for member in late)
        refusals.append(Refusal(names, RefusalReason.MEMORY, f"module bucket {bucket.label}"))
    buckets.sort(key=lambda b: b.members[0].index)
    return replace(plan, buckets=tuple(buckets), refusals=tuple(refusals))
