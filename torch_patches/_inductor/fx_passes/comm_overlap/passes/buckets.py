"""What every strategy needs to make a bucket: its form, its merge, its payload order."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.augmented_graph import AugmentedGraph
from torch_patches._inductor.fx_passes.comm_overlap.graph.links import are_scaled_alike
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    BucketKey,
    CloseReason,
    Collective,
    CollectiveKind,
    MergeForm,
    RefusalReason,
)


def merge_key(collective: Collective) -> tuple[BucketKey | None, bool]:
    """What members must agree in: the key and the phase, forward or backward."""
    return collective.key, collective.backward


def choose_form(options: Options, key: BucketKey) -> MergeForm:
    """The form ``bucket_mode`` asks for, zero-copy where it leaves the choice; copying where the
    backend needs it, whatever was asked for."""
    copies = key.needs_copies or options.bucket_mode == MergeForm.COPY.value
    return MergeForm.COPY if copies else MergeForm.COALESCED


class Merger:
    """Merges collectives in a contracted graph, two at a time.

    Strategies that must keep more than the graph's dependencies refine it.

    Attributes:
        tells_needs: :meth:`needs` says something.
    """

    tells_needs = True

    def __init__(self, contracted: AugmentedGraph[fx.Node]) -> None:
        self.contracted = contracted
        #: Index of a collective -> why its last merge was refused, where dependencies were not why.
        self.why: dict[int, RefusalReason] = {}

    @property
    def operations(self) -> int:
        """Counted work so far."""
        return self.contracted.operations

    def needs(self, node: fx.Node, limit: int) -> Sequence[fx.Node]:
        """Direct predecessors, for a quick look for dependencies; may leave some out."""
        return self.contracted.predecessors(node, limit)

    def can_merge(self, first: Collective, other: Collective) -> bool:
        """Whether their starts could be merged; changes nothing."""
        return self.contracted.can_merge(first.start, other.start)

    def merge(self, first: Collective, other: Collective, form: MergeForm) -> bool:
        """Merges starts with starts and, in the copying form, waits with waits; all or nothing."""
        mark = self.contracted.checkpoint()
        merged = self.contracted.merge(first.start, other.start)
        if merged and form is MergeForm.COPY:
            merged = self.contracted.merge_all([*first.waits, *other.waits])
        if not merged:
            self.contracted.rollback(mark)
        return merged

    def merge_waits(self, members: Sequence[Collective]) -> bool:
        """Merges the waits of a bucket whose starts are merged; all or nothing."""
        mark = self.contracted.checkpoint()
        merged = self.contracted.merge_all([wait for member in members for wait in member.waits])
        if not merged:
            self.contracted.rollback(mark)
        return merged


def settle_form(
    merger: Merger, members: Sequence[Collective], form: MergeForm, options: Options
) -> MergeForm:
    """The form of a bucket whose starts are merged, now that its members are known.

    All-reduces that are all scaled by one number take the copying form where the choice is left:
    the copies cost one pass over the bucket, and its members' scalings, one kernel each, become
    one.  Their waits are merged for it; where that closes a cycle, the form stays.
    """
    free = form is MergeForm.COALESCED and options.bucket_mode is None
    if not free or members[0].kind is not CollectiveKind.ALL_REDUCE or len(members) < 2:
        return form
    if not are_scaled_alike(members):
        return form
    return MergeForm.COPY if merger.merge_waits(members) else form


def make_bucket(
    members: Sequence[Collective],
    form: MergeForm,
    reason: CloseReason,
    by_registration: bool = False,
) -> Bucket:
    """A bucket of ``members``, put in graph order, with the documented payload order."""
    members = sorted(members, key=lambda member: member.index)
    if any(member.has_symbolic_size for member in members):
        form = MergeForm.COALESCED  # the only form that writes no size into the graph
    positions = [member.position for member in members]
    return Bucket(
        members=tuple(members),
        payload_order=payload_order(members, by_registration),
        form=form,
        close_reason=reason,
        size_bytes=sum(member.size_bytes for member in members),
        span=max(positions) - min(positions),
    )


def payload_order(members: Sequence[Collective], by_registration: bool = False) -> tuple[int, ...]:
    """By the place of the parameter among the graph's inputs where known for all, else graph order.

    That place follows registration order under AOT export and order of first use under Dynamo.  For
    rank safety it is taken from the graph, never from this rank's Python objects.

    Args:
        by_registration: by the order of registration where that is known for all, as FSDP2 lays out
            what it sends.  It comes from this rank's model, as the names do that module buckets are
            made of: ranks that share a bucket must have registered its parameters alike.
    """
    places = range(len(members))
    indices = [member.parameter_index for member in members]
    registered = [member.tag.index if member.tag is not None else None for member in members]
    if by_registration and None not in registered:
        indices = registered
    if None in indices:
        return tuple(places)
    return tuple(sorted(places, key=lambda place: (indices[place], place)))
