"""Live bytes while a schedule is made, beside a table of all slots that is filled in full."""

import itertools
import random
from types import SimpleNamespace

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.passes.occupancy import Occupancy

SLOTS = 8


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules(seed: int) -> None:
    """Few sizes, so that slots are often full to the byte."""
    r = random.Random(seed)
    live = [r.randrange(6) for _ in range(SLOTS)]
    peaks = [size + r.randrange(3) for size in live]
    behind = [max(peaks[slot:], default=0) for slot in range(SLOTS + 1)]
    track = SimpleNamespace(slots=SLOTS, fixed_bytes=live, peak_bytes=peaks, peak_behind=behind)
    memory = Occupancy(track)  # type: ignore[arg-type]
    more = [0] * SLOTS
    for now in range(SLOTS):
        memory.advance(now)
        for _ in range(r.randrange(3)):
            first, size = r.randrange(now, SLOTS), r.randrange(3)
            end = r.randrange(first, SLOTS + 1)
            memory.occupy(first, end, size)
            for slot in range(first, end):
                more[slot] += size
        memory.held_bytes = 0
        assert memory.live_bytes == live[now] + more[now]
        # Where it stands, what lives; later, what may live at most while a kernel runs.
        most = [live[now] + more[now], *(peaks[s] + more[s] for s in range(now + 1, SLOTS))]
        for end in range(now, SLOTS + 1):
            for limit in range(12):
                full = [now + i for i, size in enumerate(most[: end - now]) if size > limit]
                assert memory.full_slot(end, limit) == (full[0] if full else None)
                free = max(limit - max([most[0], *most[: end - now]]), 0)
                assert memory.free_bytes(end, limit) == free
        at_most = [peaks[slot] + more[slot] for slot in range(SLOTS)]
        for start, end in itertools.combinations(range(now, SLOTS + 1), 2):
            for limit in range(12):
                room = max(at_most[start:end]) <= limit
                assert memory.is_room_for_long(range(start, end), limit, SLOTS) == room


def test_work_is_counted_by_slots() -> None:
    track = SimpleNamespace(slots=SLOTS, fixed_bytes=[0] * SLOTS, peak_bytes=[0] * SLOTS)
    memory = Occupancy(track)  # type: ignore[arg-type]
    assert memory.operations == 0
    memory.full_slot(SLOTS, 1)
    assert memory.operations == SLOTS
    memory.free_bytes(SLOTS, 1)
    assert memory.operations == 2 * SLOTS
