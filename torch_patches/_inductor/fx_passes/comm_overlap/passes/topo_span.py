"""Topo-span-bounded greedy bucketing.

Collectives of one key (kind, group, dtype, reduce op, device) are taken in graph order and need not
be adjacent.  A bucket closes when the next member would exceed its byte cap, or when the members
would stand further apart than ``max_topo_span`` working nodes: a merged gather holds everything it
gathers from its first use on, and a merged reduction delays its first member to its last.

A candidate that depends on a member of the open bucket, or whose merge would close a cycle together
with buckets accepted before, is put off to the next bucket instead of being dropped.

Positions are taken once, before any change; every rank with the same skeleton gets the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import (
    MIB,
    saturation_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    BucketCap,
    BucketKey,
    CloseReason,
    Collective,
    CollectiveKind,
    MergeForm,
    Options,
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
    Traffic,
)

#: Candidates that one bucket may put off before it closes; bounds the work on dependent chains.
MAX_DEFERRALS = 64
#: Nodes that the quick look for a dependency expands.
_LOOK_BACK = 8


@dataclass(frozen=True)
class FsdpGroup:
    """A process group that carries parameter gathers or gradient scatters.

    Args:
        group: canonical group name.
        group_size: ranks in it, None if unknown.
        gathers, scatters: how many of each it carries in this graph.
        size_bytes: their decision sizes together.
    """

    group: str
    group_size: int | None
    gathers: int
    scatters: int
    size_bytes: int


def identify_fsdp_groups(skeleton: Skeleton, primary_only: bool = False) -> tuple[FsdpGroup, ...]:
    """Groups with parameter gathers or gradient scatters, in order of first appearance.

    Args:
        primary_only: only the group with the most parameter gathers; then the most gradient
            scatters, the most bytes, the first to appear.  None of these can differ between ranks
            with equal skeletons.

    An empty graph has no group.
    """
    members: dict[str, list[Collective]] = {}
    for collective in skeleton.collectives:
        if _is_fsdp(collective):
            members.setdefault(collective.group, []).append(collective)
    groups = [_summarize(name, collectives) for name, collectives in members.items()]
    if primary_only and groups:
        # max keeps the first of equals
        groups = [max(groups, key=lambda g: (g.gathers, g.scatters, g.size_bytes))]
    return tuple(groups)


def _is_fsdp(collective: Collective) -> bool:
    if collective.kind is CollectiveKind.ALL_GATHER:
        return collective.traffic is Traffic.PARAMETER
    return (
        collective.kind is CollectiveKind.REDUCE_SCATTER and collective.traffic is Traffic.GRADIENT
    )


def _summarize(name: str, collectives: Sequence[Collective]) -> FsdpGroup:
    kinds = [c.kind for c in collectives]
    sizes = [c.key.group_size for c in collectives if c.key is not None]
    return FsdpGroup(
        group=name,
        group_size=sizes[0] if sizes else None,
        gathers=kinds.count(CollectiveKind.ALL_GATHER),
        scatters=kinds.count(CollectiveKind.REDUCE_SCATTER),
        size_bytes=sum(c.size_bytes for c in collectives),
    )


def plan_topo_span(
    skeleton: Skeleton, contracted: AugmentedGraph[fx.Node], options: Options
) -> Plan:
    """Plans buckets for all parameter and gradient traffic of the graph.

    Args:
        contracted: the graph's contraction; merges are made in it, so that the next pass sees them.

    Near-linear: each candidate is looked at by at most ``MAX_DEFERRALS`` + 1 buckets, and a merge
    searches only between the places it joins.
    """
    candidates, refusals = select_candidates(skeleton, options)
    return greedy_buckets(candidates, contracted, options, refusals)


def select_candidates(
    skeleton: Skeleton, options: Options
) -> tuple[list[Collective], list[Refusal]]:
    """Collectives that may be merged, and the others with the reason."""
    groups = identify_fsdp_groups(skeleton)
    allowed = {g.group for g in identify_fsdp_groups(skeleton, options.primary_fsdp_group_only)}
    minority = {g.group for g in groups} - allowed
    fingerprint = options.fingerprint()
    candidates: list[Collective] = []
    refusals: list[Refusal] = []
    for collective in skeleton.collectives:
        reason = collective.refusal
        considered = collective.considered is not None and collective.considered == fingerprint
        if reason is None and considered:
            reason = RefusalReason.ALREADY_CONSIDERED
        if reason is None and collective.traffic is Traffic.OTHER:
            reason = RefusalReason.NOT_PARAMETER_TRAFFIC
        copies = collective.key is not None and collective.key.needs_copies
        if reason is None and copies and collective.has_symbolic_size:
            reason = RefusalReason.SYMBOLIC_SIZE
        if reason is None and collective.group in minority:
            reason = RefusalReason.NOT_PRIMARY_GROUP
        if reason is None:
            candidates.append(collective)
        else:
            refusals.append(Refusal((collective.start.name,), reason))
    return candidates, refusals


def greedy_buckets(
    candidates: Iterable[Collective],
    contracted: AugmentedGraph[fx.Node],
    options: Options,
    refusals: Sequence[Refusal] = (),
) -> Plan:
    """Buckets the candidates key by key, in graph order of each key's first member."""
    by_key: dict[BucketKey, list[Collective]] = {}
    for candidate in candidates:
        if candidate.key is not None:
            by_key.setdefault(candidate.key, []).append(candidate)
    before, visited = contracted.operations, 0
    buckets: list[Bucket] = []
    reasons = list(refusals)
    for key, members in by_key.items():
        if len(members) == 1:
            reasons.append(Refusal((members[0].start.name,), RefusalReason.ALONE_IN_KEY))
            continue
        run = _KeyRun(key, members, contracted, options)
        run.take_all()
        buckets.extend(run.buckets)
        reasons.extend(run.refusals)
        visited += run.visited
    buckets.sort(key=lambda b: b.members[0].index)
    return Plan(tuple(buckets), tuple(reasons), contracted.operations - before + visited)


def cap_bytes(cap: BucketCap, bucket_index: int, key: BucketKey) -> int:
    """Bytes that the bucket with this index within its key may hold."""
    if cap is None:
        return saturation_bytes(key.group_size)
    if callable(cap):
        return int(cap(bucket_index) * MIB)
    if isinstance(cap, tuple):
        return int(cap[min(bucket_index, len(cap) - 1)] * MIB)
    return int(cap * MIB)


_REFUSAL_OF = {
    CloseReason.BYTES: RefusalReason.BYTE_CAP,
    CloseReason.SPAN: RefusalReason.SPAN_CAP,
    CloseReason.DEPENDENCY: RefusalReason.DEPENDENCY,
    CloseReason.END: RefusalReason.LEFT_OVER,
}


@dataclass
class _KeyRun:
    """The greedy over the candidates of one key."""

    key: BucketKey
    candidates: Sequence[Collective]
    contracted: AugmentedGraph[fx.Node]
    options: Options
    buckets: list[Bucket] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    visited: int = 0

    @property
    def form(self) -> MergeForm:
        return choose_form(self.options, self.key)

    def take_all(self) -> None:
        remaining = list(self.candidates)
        index = 0
        while remaining:
            cap = cap_bytes(self.options.bucket_cap_mb, index, self.key)
            members, remaining, reason = self._fill(remaining, cap)
            self._close(members, reason)
            index += 1

    def _fill(
        self, candidates: list[Collective], cap: int
    ) -> tuple[list[Collective], list[Collective], CloseReason]:
        """Fills one bucket; returns its members, what is left, and why it closed."""
        first = candidates[0]
        members = [first]
        size = first.size_bytes
        deferred: list[Collective] = []
        blockers = {first.start}
        for place, candidate in enumerate(candidates[1:], start=1):
            reason = self._beyond_span(first, candidate)
            if reason is None and len(deferred) >= MAX_DEFERRALS:
                reason = CloseReason.DEPENDENCY
            joins = reason is None and self._can_join(first, candidate, blockers)
            if joins and size + candidate.size_bytes > cap:
                joins = self.contracted.can_merge(first.start, candidate.start)
                reason = CloseReason.BYTES if joins else None
            if reason is not None:
                return members, deferred + candidates[place:], reason
            if joins and merge_members(self.contracted, first, candidate, self.form):
                members.append(candidate)
                size += candidate.size_bytes
            else:
                deferred.append(candidate)
            blockers.add(candidate.start)
        return members, deferred, CloseReason.DEPENDENCY if deferred else CloseReason.END

    def _beyond_span(self, first: Collective, candidate: Collective) -> CloseReason | None:
        span = self.options.max_topo_span
        beyond = span is not None and candidate.position - first.position > span
        return CloseReason.SPAN if beyond else None

    def _can_join(self, first: Collective, candidate: Collective, blockers: set[fx.Node]) -> bool:
        """Quick and exact in one direction: False means that it does not join this bucket.

        A candidate that depends on one that was put off is put off as well, whatever that one's
        reason was: it goes to the next bucket, where it may meet it.
        """
        if (first.segment, first.wait_segment) != (candidate.segment, candidate.wait_segment):
            return False
        return not self._depends_on(candidate, blockers)

    def _depends_on(self, candidate: Collective, blockers: set[fx.Node]) -> bool:
        """A short look upwards that finds most dependencies without a search of the whole range.

        No hit proves nothing; the merge itself is exact.
        """
        pending = [candidate.start]
        for _ in range(_LOOK_BACK):
            if not pending:
                break
            for before in self.contracted.predecessors(pending.pop()):
                self.visited += 1
                if before in blockers:
                    return True
                pending.append(before)
        return False

    def _close(self, members: list[Collective], reason: CloseReason) -> None:
        if len(members) == 1:
            why = _REFUSAL_OF[reason]
            if reason is CloseReason.DEPENDENCY and self._is_fenced_off(members[0]):
                why = RefusalReason.BARRIER
            self.refusals.append(Refusal((members[0].start.name,), why))
            return
        self.buckets.append(make_bucket(members, self.form, reason))

    def _is_fenced_off(self, single: Collective) -> bool:
        """No other candidate of the key stands between the same side effects."""
        fences = (single.segment, single.wait_segment)
        return [(c.segment, c.wait_segment) for c in self.candidates].count(fences) == 1


def choose_form(options: Options, key: BucketKey) -> MergeForm:
    """The form ``bucket_mode`` asks for, zero-copy where it leaves the choice; copying where the
    backend needs it, whatever was asked for."""
    copies = key.needs_copies or options.bucket_mode == MergeForm.COPY.value
    return MergeForm.COPY if copies else MergeForm.COALESCED


def merge_members(
    contracted: AugmentedGraph[fx.Node], first: Collective, other: Collective, form: MergeForm
) -> bool:
    """Merges starts with starts and, in the copying form, waits with waits; all or nothing."""
    mark = contracted.checkpoint()
    merged = contracted.merge(first.start, other.start)
    if merged and form is MergeForm.COPY:
        merged = contracted.merge_all([*first.waits, *other.waits])
    if not merged:
        contracted.rollback(mark)
    return merged


def make_bucket(members: Sequence[Collective], form: MergeForm, reason: CloseReason) -> Bucket:
    """A bucket of ``members``, put in graph order, with the documented payload order."""
    members = sorted(members, key=lambda member: member.index)
    if any(member.has_symbolic_size for member in members):
        form = MergeForm.COALESCED  # the only form that writes no size into the graph
    positions = [member.position for member in members]
    return Bucket(
        members=tuple(members),
        payload_order=payload_order(members),
        form=form,
        close_reason=reason,
        size_bytes=sum(member.size_bytes for member in members),
        span=max(positions) - min(positions),
    )


def payload_order(members: Sequence[Collective]) -> tuple[int, ...]:
    """Order of the parameters among the graph's inputs where known for all, else graph order."""
    indices = [member.parameter_index for member in members]
    places = range(len(members))
    if any(index is None for index in indices):
        return tuple(places)
    return tuple(sorted(places, key=lambda place: (indices[place], place)))
