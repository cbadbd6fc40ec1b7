"""Live bytes along the slots of a track while a schedule is made.

slot        0    1    2    3    4
fixed       what no schedule moves (track)
gathers     |----from their start to their use----|
reductions       |--payload, until it is waited for
"""

from __future__ import annotations

from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track


class Occupancy:
    """See the module.

    Attributes:
        slot: that the pass has come to.
        extra_bytes: of gathers that have started, in this slot.
        held_bytes: payloads of reductions that are not waited for yet.
        peak_bytes: the most that was noted.
        operations: counted work.
    """

    def __init__(self, track: Track) -> None:
        self._track, self._fixed = track, track.fixed_bytes
        self._change = [0] * (track.slots + 1)  # of extra_bytes, by a later slot than this one
        self._coming = [0] * (track.slots + 1)  # bytes that will be occupied, by their first slot
        self._coming_bytes = 0  # the sum of those of later slots
        self.slot = 0
        self.extra_bytes = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self.operations = 0

    def advance(self, slot: int) -> None:
        """To a slot behind this one."""
        while self.slot < slot:
            self.slot += 1
            self.extra_bytes += self._change[self.slot]
            self._coming_bytes -= self._coming[self.slot]

    @property
    def live_bytes(self) -> int:
        """In this slot."""
        return self._fixed[self.slot] + self.extra_bytes + self.held_bytes

    def note_live(self) -> None:
        """What lives in this slot."""
        live = self._fixed[self.slot] + self.extra_bytes + self.held_bytes
        if live > self.peak_bytes:
            self.peak_bytes = live

    def note_peak(self, live_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, live_bytes)

    def occupy(self, first: int, behind: int, size_bytes: int) -> None:
        """Bytes in the slots from this one, or a later one, on."""
        if first >= behind:
            return
        if first == self.slot:
            self.extra_bytes += size_bytes
        else:
            self._change[first] += size_bytes
            self._coming[first] += size_bytes
            self._coming_bytes += size_bytes
        self._change[behind] -= size_bytes

    def full_slot(self, behind: int, limit_bytes: int) -> int | None:
        """The first slot from this one to ``behind`` with more than that, or None.

        Later slots only fill up while a schedule is made: one that is full stays so.
        """
        self.operations += 1
        if self.slot < behind and self.live_bytes > limit_bytes:
            return self.slot
        return self._full_slot(self.slot + 1, behind, limit_bytes)

    def _full_slot(self, first: int, behind: int, limit_bytes: int) -> int | None:
        """The same for this slot, as it may fill up, or later ones; gathers that have started included."""
        extra = self.extra_bytes + sum(self._change[self.slot + 1 : first])
        for slot in range(first, behind):
            self.operations += 1
            if slot > self.slot:
                extra += self._change[slot]
            if self._track.peak_bytes[slot] + extra > limit_bytes:
                return slot
        return None

    def is_room_for_long(self, over: range, limit_bytes: int, near: int) -> bool:
        """The same, looked at slot by slot only where no more than ``near`` of them are asked for;
        else by the highest slot behind."""
        self.operations += 1
        most = self._track.peak_behind[over.start] + self.extra_bytes + self._coming_bytes
        if most <= limit_bytes:
            return True
        if len(over) > near:
            return False
        return self._full_slot(over.start, over.stop, limit_bytes) is None

    def free_bytes(self, behind: int, limit_bytes: int) -> int:
        """Up to the limit in every slot from this one to ``behind``."""
        extra, most = self.extra_bytes, self.live_bytes
        for slot in range(self.slot + 1, behind):
            extra += self._change[slot]
            most = max(most, self._track.peak_bytes[slot] + extra)
        self.operations += behind - self.slot
        return max(limit_bytes - most, 0)
