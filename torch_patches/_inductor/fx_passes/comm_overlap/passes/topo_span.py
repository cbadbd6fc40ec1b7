"""Topo-span-bounded greedy bucketing.

Collectives of one key (kind, group, dtype, reduce op, device) and one phase (forward or backward)
are taken in graph order and need not be adjacent.  A bucket closes when the next member would
exceed its byte cap, or when the members would stand further apart than ``max_topo_span`` working
nodes: a merged gather holds everything it gathers from its first use on, and a merged reduction
delays its first member to its last.

Without a cap of the user's, a bucket of gathers or reduce-scatters may hold what saturates the
group's network or, where that is more, as much as the largest collective of its key, up to 500 MiB:
the graph holds the bytes of that one at once anyway.

Data-parallel all-reduces (DDP) are bounded as in torch's DDP: 25 MiB without a cap of the user's,
since whole gradients live in a bucket until its last member is there; and the first bucket holds at
most 1 MiB, so that communication starts early.  A larger all-reduce goes alone.  A cap given bucket
by bucket rules over both.  All-reduces over replicas of shards (HSDP) take the members of their
reduce-scatters' buckets (``replicas.py``).

A candidate that depends on a member of the open bucket, or whose merge would close a cycle together
with buckets accepted before, is put off to the next bucket instead of being dropped.

Positions are taken once, before any change; every rank with the same skeleton gets the same plan.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import (
    MIB,
    default_cap_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import bytes_in
from torch_patches._inductor.fx_passes.comm_overlap.notices import RANK_LOCAL_ERRORS
from torch_patches._inductor.fx_passes.comm_overlap.options import BucketCap, Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import (
    Merger,
    choose_form,
    make_bucket,
    settle_form,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.caps import BucketCaps
from torch_patches._inductor.fx_passes.comm_overlap.passes.replicas import (
    follow_scatters,
    scatters_of_replicas,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    BucketKey,
    CloseReason,
    Collective,
    CollectiveKind,
    MergeForm,
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
)

#: Bytes of the first bucket of data-parallel all-reduces, and of each one where there is no cap, as
#: in torch's DDP.
FIRST_BUCKET_BYTES, ALL_REDUCE_BYTES = MIB, 25 * MIB
#: Candidates that one bucket may put off before it closes; bounds the work on dependent chains.
MAX_DEFERRALS = 64
#: Nodes that the quick look for a dependency expands, and edges of each that it follows.
_LOOK_BACK, _LOOK_WIDE = 8, 16


def plan_topo_span(
    skeleton: Skeleton, contracted: AugmentedGraph[fx.Node], options: Options
) -> Plan:
    """Plans buckets for all parameter and gradient traffic of the graph.

    Args:
        contracted: the graph's contraction; merges are made in it, so that the next pass sees them.

    Near-linear: each candidate is looked at by at most ``MAX_DEFERRALS`` + 1 buckets, and a merge
    searches only between the places it joins.
    """
    return plan_greedily(skeleton, Merger(contracted), options)


def plan_greedily(
    skeleton: Skeleton, merger: Merger, options: Options, caps: BucketCaps | None = None
) -> Plan:
    """The same with merges made, or refused, by ``merger``.

    Args:
        caps: sizes of buckets in place of those of the options.
    """
    return plan_asked(read_asked(skeleton, options), merger, options, caps)


@dataclass(frozen=True, eq=False)
class Asked:
    """What a graph has to bucket.

    Args:
        candidates: that may be merged, in graph order.
        leaders, replicas: of these; replicas follow the buckets of their reduce-scatters.
        scatter_of: see :func:`~.replicas.scatters_of_replicas`.
        refusals: of all others.
    """

    candidates: Sequence[Collective]
    leaders: Sequence[Collective]
    replicas: Sequence[Collective]
    scatter_of: Mapping[int, int]
    refusals: Sequence[Refusal]


def read_asked(skeleton: Skeleton, options: Options) -> Asked:
    """Linear in collectives; the same for all plans of one graph."""
    candidates, refusals = select_candidates(skeleton, options)
    scatter_of = scatters_of_replicas(skeleton.collectives)
    leaders = [c for c in candidates if c.index not in scatter_of]
    replicas = [c for c in candidates if c.index in scatter_of]
    return Asked(candidates, leaders, replicas, scatter_of, refusals)


def plan_asked(
    asked: Asked, merger: Merger, options: Options, caps: BucketCaps | None = None
) -> Plan:
    """See :func:`plan_greedily`."""
    led = greedy_buckets(asked.leaders, merger, options, asked.refusals, caps=caps)
    followed, apart = follow_scatters(
        led.buckets, asked.replicas, asked.scatter_of, merger, options
    )
    alone = greedy_buckets(apart, merger, options, small_first=False, caps=caps)
    parts = (led, followed, alone)
    buckets = [bucket for part in parts for bucket in part.buckets]
    return Plan(
        tuple(sorted(buckets, key=lambda b: b.members[0].index)),
        tuple(refusal for part in parts for refusal in part.refusals),
        sum(part.operations for part in parts),
    )


def greedy_buckets(
    candidates: Iterable[Collective],
    merger: Merger,
    options: Options,
    refusals: Sequence[Refusal] = (),
    small_first: bool = True,
    caps: BucketCaps | None = None,
) -> Plan:
    """Buckets the candidates key by key and phase by phase, in graph order of the first members.

    Args:
        small_first: the first bucket of all-reduces is small, unless caps are given by bucket.
        caps: see :func:`plan_greedily`.
    """
    by_key: dict[tuple[BucketKey, bool], list[Collective]] = {}
    for candidate in candidates:
        if candidate.key is not None:
            by_key.setdefault((candidate.key, candidate.backward), []).append(candidate)
    before = merger.operations
    buckets: list[Bucket] = []
    reasons = list(refusals)
    for (key, _), members in by_key.items():
        if len(members) == 1:
            reasons.append(Refusal((members[0].start.name,), RefusalReason.ALONE_IN_KEY))
            continue
        run = _KeyRun(key, members, merger, options, small_first, caps)
        run.take_all()
        buckets.extend(run.buckets)
        reasons.extend(run.refusals)
    buckets.sort(key=lambda b: b.members[0].index)
    return Plan(tuple(buckets), tuple(reasons), merger.operations - before)


class BucketCapError(ValueError):
    """A user's function for ``bucket_cap_mb`` failed, or returned what is no number."""


def cap_bytes(cap: BucketCap, bucket_index: int, key: BucketKey, largest_bytes: int) -> int:
    """Bytes that the bucket with this index within its key may hold.

    Args:
        largest_bytes: size of the key's largest candidate, which counts where there is no cap and
            the key is not one of all-reduces.

    Raises:
        BucketCapError: the cap is a function that raises, or returns no number.
    """
    if cap is None and key.kind is CollectiveKind.ALL_REDUCE:
        return ALL_REDUCE_BYTES
    if cap is None:
        return default_cap_bytes(key.group_size, largest_bytes)
    if callable(cap):
        return bytes_in(_answer(cap, bucket_index), MIB)
    if isinstance(cap, tuple):
        return bytes_in(cap[min(bucket_index, len(cap) - 1)], MIB)
    return bytes_in(cap, MIB)


def _answer(cap: Callable[[int], float], bucket_index: int) -> float:
    """What the user's function says."""
    try:
        mb: object = cap(bucket_index)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        what = f"raised {type(error).__name__}: {error}"
        raise BucketCapError(
            f"bucket_cap_mb, a function, {what}, for bucket {bucket_index}"
        ) from error
    if isinstance(mb, numbers.Real) and not math.isnan(mb):
        return float(mb)
    raise BucketCapError(
        f"bucket_cap_mb, a function, returned {mb!r} for bucket {bucket_index}; it must be MB, a number"
    )


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
    merger: Merger
    options: Options
    small_first: bool = False
    caps: BucketCaps | None = None
    buckets: list[Bucket] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @cached_property
    def _fences(self) -> Counter[tuple[int, int | None]]:
        """How many candidates stand between the same side effects."""
        return Counter((c.segment, c.wait_segment) for c in self.candidates)

    @cached_property
    def form(self) -> MergeForm:
        copied = self.caps is not None and self.key in self.caps.copied
        return MergeForm.COPY if copied else choose_form(self.options, self.key)

    def take_all(self) -> None:
        remaining = list(self.candidates)
        largest = max(candidate.size_bytes for candidate in remaining)
        index = 0
        while remaining:
            cap = self._cap(index, remaining[0], largest)
            small = index == 0 and cap > FIRST_BUCKET_BYTES and self._starts_small()
            members, remaining, reason = self._fill(remaining, FIRST_BUCKET_BYTES if small else cap)
            self._close(members, reason, small)
            index += 1

    def _cap(self, index: int, first: Collective, largest_bytes: int) -> int:
        if self.caps is not None:
            cap = self.caps.of(self.key, first)
        else:
            cap = cap_bytes(self.options.bucket_cap_mb, index, self.key, largest_bytes)
        most = self.options.max_reduction_mb
        if most is None or self.key.kind is CollectiveKind.ALL_GATHER:
            return cap
        return min(cap, bytes_in(most, MIB))

    def _starts_small(self) -> bool:
        by_bucket = isinstance(self.options.bucket_cap_mb, tuple) or callable(
            self.options.bucket_cap_mb
        )
        return self.small_first and not by_bucket and self.key.kind is CollectiveKind.ALL_REDUCE

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
                joins = self.merger.can_merge(first, candidate)
                reason = CloseReason.BYTES if joins else None
            if reason is not None:
                return members, deferred + candidates[place:], reason
            if joins and self.merger.merge(first, candidate, self.form):
                members.append(candidate)
                size += candidate.size_bytes
            else:
                deferred.append(candidate)
            blockers.add(candidate.start)
        return members, deferred, CloseReason.DEPENDENCY if deferred else CloseReason.END

    def _beyond_span(self, first: Collective, candidate: Collective) -> CloseReason | None:
        span, distance = self.options.max_topo_span, self.options.max_coll_distance
        beyond = span is not None and candidate.position - first.position > span
        if distance is not None:
            beyond |= self._rank[candidate.index] - self._rank[first.index] > distance
        return CloseReason.SPAN if beyond else None

    @cached_property
    def _rank(self) -> dict[int, int]:
        """Place of each candidate in its key."""
        return {c.index: place for place, c in enumerate(self.candidates)}

    def _can_join(self, first: Collective, candidate: Collective, blockers: set[fx.Node]) -> bool:
        """Quick and exact in one direction: False means that it does not join this bucket.

        A candidate that depends on one that was put off is put off as well, whatever that one's
        reason was: it goes to the next bucket, where it may meet it.
        """
        if first.segment != candidate.segment or first.wait_segment != candidate.wait_segment:
            return False
        return not (self.merger.tells_needs and self._depends_on(candidate, blockers))

    def _depends_on(self, candidate: Collective, blockers: set[fx.Node]) -> bool:
        """A short look upwards that finds most dependencies without a search of the whole range.

        No hit proves nothing; the merge itself is exact.  Of a large bucket, or a node with many
        inputs, it sees a few edges only: many candidates may hang on one of these.
        """
        pending = [candidate.start]
        for _ in range(_LOOK_BACK):
            if not pending:
                break
            for before in self.merger.needs(pending.pop(), _LOOK_WIDE):
                if before in blockers:
                    return True
                pending.append(before)
        return False

    def _close(self, members: list[Collective], reason: CloseReason, small: bool) -> None:
        if len(members) == 1:
            why = _REFUSAL_OF[reason]
            if small and reason is CloseReason.BYTES:
                why = RefusalReason.FIRST_BUCKET
            if reason in (CloseReason.DEPENDENCY, CloseReason.END):
                why = self.merger.why.get(members[0].index, why)
            if reason is CloseReason.DEPENDENCY and self._is_fenced_off(members[0]):
                why = RefusalReason.BARRIER
            self.refusals.append(Refusal((members[0].start.name,), why))
            return
        form = settle_form(self.merger, members, self.form, self.options)
        self.buckets.append(make_bucket(members, form, reason))

    def _is_fenced_off(self, single: Collective) -> bool:
        """No other candidate of the key stands between the same side effects."""
        return self._fences[single.segment, single.wait_segment] == 1
