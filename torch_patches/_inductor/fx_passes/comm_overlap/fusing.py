"""Chained collectives as one, in front of all bucketing: what the flags ask for, and what is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.evenness import UNEVEN_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import report_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
    reason_of,
    warn_unfused,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.all_gather_fusion import (
    Fusion,
    apply_fusions,
    plan_fusions,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Refusal,
    RefusalReason,
)


@dataclass(frozen=True)
class FusionReport:
    """One chain that became one collective.

    Args:
        group: of the one collective.
        group_size: its ranks.
        members: the starts of the chain.
        saved_bytes: of the results in between, which are no longer made.  What travels is the same:
            every rank still receives what it does not have.
    """

    kind: str
    group: str
    group_size: int
    members: tuple[str, ...]
    saved_bytes: int

    @property
    def saved_launches(self) -> int:
        return len(self.members) - 1


@dataclass(frozen=True)
class Fused:
    """What was done to a graph's chains, and why others are left.

    Args:
        before: the graph's collectives before.
        failure: why nothing was looked at, or None.
    """

    fusions: tuple[FusionReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    before: tuple[Collective, ...] = ()
    failure: str | None = None


def fuse_or_leave(graph: fx.Graph, options: Options) -> Fused:
    """Chains as one, where a flag asks for it; a graph that cannot be handled stays, with one
    warning."""
    if not options.fuses:
        return Fused()
    try:
        return fuse_chains(graph, options)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        reason = reason_of(error)
        warn_unfused(reason)
        return Fused(failure=reason)


def fuse_chains(graph: fx.Graph, options: Options) -> Fused:
    """Fuses what the flags ask for, in place; the graph is as it was if this raises."""
    skeleton = collect(graph)
    fusions, refusals = plan_fusions(
        skeleton, options.groups or GroupTable.registered(), _kinds(options)
    )
    described = tuple(map(_describe, fusions))
    _mark_uneven(skeleton.collectives, refusals)
    apply_or_restore(graph, fusions)
    return Fused(described, tuple(refusals), skeleton.collectives)


def _mark_uneven(collectives: Sequence[Collective], refusals: Sequence[Refusal]) -> None:
    uneven = [set(r.members) for r in refusals if r.reason is RefusalReason.CHAIN_UNEVEN]
    names = set[str]().union(*uneven)
    for start in (collective.start for collective in collectives):
        if start.name in names:
            start.meta = {**start.meta, UNEVEN_MARK: True}


def apply_or_restore(graph: fx.Graph, fusions: Sequence[Fusion]) -> None:
    """Changes ``graph`` in place; it is as it was if this raises."""
    if not fusions:
        return
    snapshot = Snapshot(graph)
    try:
        apply_fusions(graph, fusions)
        graph.lint()
    except BaseException:
        snapshot.restore()
        raise


def _kinds(options: Options) -> Sequence[CollectiveKind]:
    wanted = {
        CollectiveKind.ALL_GATHER: options.fuse_chained_all_gathers,
        CollectiveKind.REDUCE_SCATTER: options.fuse_chained_reduce_scatters,
    }
    return [kind for kind, is_wanted in wanted.items() if is_wanted]


def _describe(fusion: Fusion) -> FusionReport:
    members = [link.collective for link in fusion.links]
    return FusionReport(
        kind=fusion.first.kind.value,
        group=fusion.group,
        group_size=len(fusion.ranks),
        members=tuple(member.start.name for member in members),
        saved_bytes=sum(report_bytes(member.output_bytes) for member in members[:-1]),
    )
