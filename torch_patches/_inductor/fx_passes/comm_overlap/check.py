"""Is a plan legal?  Every bucket is checked, then all of them together, on a fresh contraction.

A plan that fails is reduced, never asserted on: the buckets that break a rule are given up, each
with a refusal, and the rest is applied.  What was applied is checked again for side effects, since a
start or wait on the wrong side of a barrier can hang the job.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    MergeForm,
    Plan,
    Refusal,
    RefusalReason,
    Skeleton,
)


class FenceError(RuntimeError):
    """A start or wait has crossed a side effect.  Nothing may plan that, so this is a bug."""


def check_fences(before: Skeleton, after: Skeleton, plan: Plan) -> None:
    """What an applied plan has not moved over a side effect; linear in collectives.

    Args:
        before, after: of the graph that ``plan`` has changed.

    Raises:
        FenceError: a start or a first wait stands on another side of one than it did.
    """
    merged_into = {member.start: i for i, b in enumerate(plan.buckets) for member in b.members}
    expected = {merged_into.get(c.start, c.start): _between(c) for c in before.collectives}
    for collective in after.collectives:
        start = collective.start
        known = start if start in expected else start.meta.get(BUCKET_MARK, {}).get("bucket")
        if known in expected and expected[known] != _between(collective):
            raise FenceError(f"{start} or its wait has crossed a side effect")


def _between(collective: Collective) -> tuple[int, int | None]:
    return collective.segment, collective.wait_segment


def check_plan(skeleton: Skeleton, contracted: AugmentedGraph[fx.Node], plan: Plan) -> Plan:
    """Returns ``plan`` without its illegal buckets; each one given up becomes a refusal.

    Args:
        contracted: a fresh contraction of the graph; it holds the accepted merges afterwards.

    Checked: members are known to the skeleton, in graph order, mergeable and in no other bucket;
    equal kind, group, dtype, reduce op, device and phase; static sizes where copies need them; no
    barrier between starts or waits; no cycle on the graph with all buckets contracted and the
    plan's dependencies added, which are dropped one by one where they close a cycle by themselves.
    """
    kept = tuple(p for p in plan.dependencies if contracted.add_dependency(*p))
    plan = replace(plan, dependencies=kept)
    known = {id(c) for c in skeleton.collectives}
    used: set[int] = set()
    accepted: list[Bucket] = []
    refusals = list(plan.refusals)
    for bucket in plan.buckets:
        problem = _problem(bucket, known, used)
        if problem is None and not _contract(contracted, bucket):
            problem = "merging it closes a cycle with the buckets accepted before it"
        if problem is not None:
            names = tuple(member.start.name for member in bucket.members)
            refusals.append(Refusal(names, RefusalReason.CHECK_FAILED, problem))
            continue
        accepted.append(bucket)
        used.update(id(member) for member in bucket.members)
    return replace(plan, buckets=tuple(accepted), refusals=tuple(refusals))


def _problem(bucket: Bucket, known: set[int], used: set[int]) -> str | None:
    """What is wrong with one bucket by itself, or None."""
    members = bucket.members
    identities = [id(member) for member in members]
    if len(members) < 2 or len(set(identities)) != len(members):
        return "it does not have at least two different members"
    if not known.issuperset(identities):
        return "a member is not a collective of this graph"
    if not used.isdisjoint(identities):
        return "a member is in another bucket too"
    if any(a.index >= b.index for a, b in itertools.pairwise(members)):
        return "its members are not in graph order"
    if sorted(bucket.payload_order) != list(range(len(members))):
        return "its payload order is not a permutation of its members"
    if any(m.refusal is not None or m.key is None for m in members):
        return "a member can never be merged"
    if len({m.key for m in members}) != 1:
        return "its members differ in kind, group, dtype, reduce op or device"
    if len({m.backward for m in members}) != 1:
        return "some of its members run in the forward and some in the backward"
    if len({(m.segment, m.wait_segment) for m in members}) != 1:
        return "a side effect lies between its members"
    if bucket.form is MergeForm.COALESCED and bucket.key.needs_copies:
        return "the coalesced form is not safe for this kind, dtype and device"
    if bucket.form is MergeForm.COPY and any(m.has_symbolic_size for m in members):
        return "the copying form needs static sizes"
    return None


def _contract(contracted: AugmentedGraph[fx.Node], bucket: Bucket) -> bool:
    mark = contracted.checkpoint()
    merged = contracted.merge_all([member.start for member in bucket.members])
    if merged and bucket.form is MergeForm.COPY:
        merged = contracted.merge_all([w for member in bucket.members for w in member.waits])
    if not merged:
        contracted.rollback(mark)
    return merged
