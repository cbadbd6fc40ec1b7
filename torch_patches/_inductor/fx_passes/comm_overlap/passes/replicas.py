"""All-reduces over replicas of shards (HSDP) take the members of their reduce-scatters' buckets.

    g0 -> RS -> AR                g0 --> RS [0, 1] -> AR [0, 1]
    g1 -> RS -> AR        =>      g1 --^
    g2 -> RS -> AR                g2 -> RS -> AR

The all-reduce may stand behind the reduce-scatter or, as DTensor has it, in front.  Buckets with
other members would wait for each other.  No cap applies: the reduce-scatters' bucket is within it,
and the all-reduces stand right beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import (
    Merger,
    choose_form,
    make_bucket,
    merge_key,
    settle_form,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    BucketKey,
    Collective,
    CollectiveKind,
    Plan,
    Refusal,
    RefusalReason,
)


def scatters_of_replicas(collectives: Iterable[Collective]) -> dict[int, int]:
    """Index of each all-reduce that is chained to a reduce-scatter -> index of that one.

    The one in front of the all-reduce comes before the one behind it.
    """
    by_index: dict[int, Collective] = {}
    found: dict[int, int] = {}
    for collective in collectives:
        by_index[collective.index] = collective
        before = None if collective.feeder is None else by_index.get(collective.feeder)
        kinds = (None if before is None else before.kind, collective.kind)
        if before is None:
            continue
        if kinds == (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE):
            found[collective.index] = before.index
        elif kinds == (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
            found.setdefault(before.index, collective.index)
    return found


def follow_scatters(
    scatters: Sequence[Bucket],
    replicas: Sequence[Collective],
    scatter_of: Mapping[int, int],
    merger: Merger,
    options: Options,
    by_registration: bool = False,
) -> tuple[Plan, list[Collective]]:
    """Buckets the replicas of each bucket's members, where legal.

    Args:
        scatters: buckets decided so far; merged by ``merger``.
        replicas: all-reduces that may be merged.
        scatter_of: see :func:`scatters_of_replicas`.
        by_registration: see :func:`~.buckets.payload_order`.

    Returns:
        The buckets and refusals; and the replicas whose reduce-scatter is in no bucket.
    """
    before = merger.operations
    of_scatter: dict[int, list[Collective]] = {}
    count: dict[tuple[BucketKey | None, bool], int] = {}
    for replica in replicas:
        of_scatter.setdefault(scatter_of[replica.index], []).append(replica)
        count[merge_key(replica)] = count.get(merge_key(replica), 0) + 1
    buckets: list[Bucket] = []
    refusals: list[Refusal] = []
    for leader in scatters:
        groups: dict[tuple[BucketKey | None, bool], list[Collective]] = {}
        for member in leader.members:
            for replica in of_scatter.pop(member.index, ()):
                groups.setdefault(merge_key(replica), []).append(replica)
        for key, group in groups.items():
            bucket, refused = _bucket_behind(leader, group, merger, options, by_registration)
            buckets.extend(bucket)
            lone = RefusalReason.ALONE_IN_KEY if count[key] == 1 else None
            refusals.extend(Refusal((c.start.name,), lone or why) for c, why in refused)
    apart = sorted((c for left in of_scatter.values() for c in left), key=lambda c: c.index)
    return Plan(tuple(buckets), tuple(refusals), merger.operations - before), apart


def _bucket_behind(
    leader: Bucket,
    group: Sequence[Collective],
    merger: Merger,
    options: Options,
    by_registration: bool,
) -> tuple[list[Bucket], list[tuple[Collective, RefusalReason]]]:
    """One bucket of ``group`` at most, and what could not join it."""
    first = group[0]
    assert first.key is not None
    form = choose_form(options, first.key)
    members = [first]
    refused: list[tuple[Collective, RefusalReason]] = []
    for other in group[1:]:
        if (other.segment, other.wait_segment) != (first.segment, first.wait_segment):
            refused.append((other, RefusalReason.BARRIER))
        elif merger.merge(first, other, form):
            members.append(other)
        else:
            refused.append((other, RefusalReason.DEPENDENCY))
    if len(members) == 1:
        return [], [(first, refused[0][1] if refused else RefusalReason.LEFT_OVER), *refused]
    form = settle_form(merger, members, form, options)
    return [make_bucket(members, form, leader.close_reason, by_registration)], refused
