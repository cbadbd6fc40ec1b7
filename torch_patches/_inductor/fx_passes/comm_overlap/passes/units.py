"""Units: what a schedule places as one: a collective, or a bucket of several.

gathers a, b      start in one slot, where the inputs of both exist, before the first use of one
scatters a, b     start once both gradients exist
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Device
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Launch, launch_of
from torch_patches._inductor.fx_passes.comm_overlap.passes.movable import Gather
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    Collective,
    CollectiveKind,
    MergeForm,
)


@dataclass(frozen=True, eq=False)
class Unit:
    """A launch of the schedule.

    Args:
        members: in graph order.
        launch: for the lanes.
        size_bytes: of the members together.
        index, group: of the first member.
        copy_in, copy_out: kernels of a copying bucket, None of others.
        gathers: of the members, if they are movable gathers, else empty.
        earliest, latest, use: of gathers, else 0: first place where the inputs of all exist, last
            place in front of which all can start, place of the first wait.
    """

    members: tuple[Collective, ...]
    launch: Launch
    size_bytes: int
    index: int
    group: str
    copy_in: ComputeCost | None = None
    copy_out: ComputeCost | None = None
    gathers: tuple[Gather, ...] = ()
    earliest: int = 0
    latest: int = 0
    use: int = 0

    @property
    def waits(self) -> int:
        """Results that are waited for: one of a copying bucket."""
        return 1 if self.copy_in is not None else sum([len(m.waits) for m in self.members])


def make_units(track: Track, buckets: Iterable[Bucket]) -> list[Unit]:
    """Units of a plan, by their first member; linear in collectives."""
    taken: set[int] = set()
    units: list[Unit] = []
    for bucket in buckets:
        units.append(_unit(track, bucket.members, bucket.form))
        taken.update(member.index for member in bucket.members)
    alone = (c for c in track.skeleton.collectives if c.index not in taken)
    units.extend(_unit(track, (c,), None) for c in alone)
    return sorted(units, key=lambda unit: unit.index)


def _unit(track: Track, members: Sequence[Collective], form: MergeForm | None) -> Unit:
    copying = form is MergeForm.COPY
    copy_in, copy_out = copy_costs(members, track.model.device) if copying else (None, None)
    gathers = tuple([track.gathers[m.index] for m in members if m.index in track.gathers])
    return Unit(
        members=tuple(members),
        launch=launch_of(members, track.model, coalesced=not copying),
        size_bytes=sum([member.size_bytes for member in members]),
        index=members[0].index,
        group=members[0].group,
        copy_in=copy_in,
        copy_out=copy_out,
        gathers=gathers,
        earliest=max([gather.earliest for gather in gathers], default=0),
        latest=min([gather.latest for gather in gathers], default=0),
        use=min([gather.use for gather in gathers], default=0),
    )


def copy_costs(members: Sequence[Collective], device: Device) -> tuple[ComputeCost, ComputeCost]:
    """Kernels that copy into a bucket and out of it: everything is read and written once."""
    size = sum(member.size_bytes for member in members)
    key = members[0].key
    ranks = max((key.group_size if key is not None else None) or 1, 1)
    inside, outside = size, size
    if members[0].kind is CollectiveKind.ALL_GATHER:
        inside //= ranks
    elif members[0].kind is CollectiveKind.REDUCE_SCATTER:
        outside //= ranks
    rate = device.dram_gb_per_s * device.dram_efficiency * 1e6  # bytes a ms
    return tuple(  # type: ignore[return-value]
        ComputeCost(max(2 * moved / rate, device.kernel_us / 1e3), 1) for moved in (inside, outside)
    )
