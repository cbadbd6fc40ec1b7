"""Which collectives may be merged at all, and the FSDP groups of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Refusal,
    RefusalReason,
    Skeleton,
    TagSource,
    Traffic,
)


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
        if reason is None and collective.traffic is Traffic.OTHER and not options.any_traffic:
            tag = collective.tag
            unknown = tag.source is TagSource.UNTOLD if tag is not None else skeleton.tagged
            reason = RefusalReason.NOT_TAGGED if unknown else RefusalReason.NOT_PARAMETER_TRAFFIC
        copies = collective.key is not None and collective.key.needs_copies
        if reason is None and copies and collective.has_symbolic_size:
            reason = RefusalReason.SYMBOLIC_SIZE
        if reason is None and collective.group in minority:
            reason = RefusalReason.NOT_PRIMARY_GROUP
        others = options.only_groups is not None and collective.group not in options.only_groups
        if reason is None and others:
            reason = RefusalReason.NOT_ASKED_FOR
        if reason is None:
            candidates.append(collective)
        else:
            refusals.append(Refusal((collective.start.name,), reason))
    return candidates, refusals
