"""Places of buckets beside a search of all places."""

import itertools
import random

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.passes.berths import (
    NEVER,
    Berth,
    joint_bounds,
    joint_places,
    obstacle,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason

PLACES = range(8)


def random_berth(r: random.Random) -> Berth:
    """One that stands where it may: inputs, start, hiding compute, wait, use."""
    earliest, start, hiding, last, wait, latest = sorted(r.choices(PLACES, k=6))
    if r.random() < 0.3:
        hiding, last = NEVER, 0
    sizes = [r.randrange(1, 9) for _ in range(3)]
    first = r.randrange(9)
    return Berth(
        start, wait, earliest, latest, hiding, last, *sizes, first, first + r.randrange(3),
        members=r.randrange(1, 4), is_settled=r.random() < 0.8,
    )  # fmt: skip


def stands(berth: Berth, start: int, wait: int) -> bool:
    """Behind its inputs, around what hides it, in front of its use."""
    around = start <= berth.first_hiding and berth.behind_hiding <= wait
    return berth.earliest <= start <= wait <= berth.latest and around


@pytest.mark.parametrize("seed", range(100))
def test_a_bucket_stands_where_both_do(seed: int) -> None:
    r = random.Random(seed)
    one, two = random_berth(r), random_berth(r)
    joint = joint_bounds(one, two)
    places = list(itertools.product(PLACES, PLACES))
    both = {(s, w) for s, w in places if stands(one, s, w) and stands(two, s, w)}
    assert {(s, w) for s, w in places if stands(joint, s, w)} == both
    assert (joint.start, joint.wait) == (max(one.start, two.start), max(one.wait, two.wait))
    for name in ("size_bytes", "flight_bytes", "copied_bytes", "members"):
        assert getattr(joint, name) == getattr(one, name) + getattr(two, name)
    assert (joint.first, joint.last) == (min(one.first, two.first), max(one.last, two.last))
    assert joint.is_hidden == (one.is_hidden or two.is_hidden)
    assert joint.is_settled == (one.is_settled and two.is_settled)
    # Why there is no place, if there is none; and the places that are tried are places.
    reason = obstacle(one, two)
    assert (reason is None) == bool(both)
    if max(one.earliest, two.earliest) > min(one.latest, two.latest):
        assert reason is RefusalReason.PREFETCH
    elif not both:
        assert reason is RefusalReason.HIDING
    tried = [(p.start, wait) for p in joint_places(one, two) for wait in p.waits]
    assert set(tried) <= both
    assert len(set(tried)) == len(tried) <= 9
    assert bool(tried) == (joint.is_settled and bool(both))
