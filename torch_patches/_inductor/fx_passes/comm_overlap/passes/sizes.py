"""Sizes of the buckets of one plan, and steps from some sizes to others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import MIB

#: MB that buckets may hold; the search goes from one to the next.
SMALLEST_MB, LARGEST_MB = 25, 1600
#: Parts of the memory that is free where a bucket begins.
WHOLE_ROOM = 64


@dataclass(frozen=True)
class Sizes:
    """Sizes of the buckets of one plan.

    Args:
        caps: bytes by key, keys in order of appearance.
        dynamic: the dynamic program decides where buckets end, within these sizes.
        tapered: buckets are smaller at the ends of the graph, where no compute hides them.
        copied: places of the keys whose buckets are copied together.  The host issues each member of
            a zero-copy bucket, and one collective of a copied one.
        room: so many parts in ``WHOLE_ROOM`` of the memory that is free where a bucket begins are
            for it.  Of the whole only gathers, and the dynamic program, know.
    """

    caps: tuple[int, ...]
    tapered: bool = False
    dynamic: bool = False
    copied: frozenset[int] = frozenset()
    room: int = WHOLE_ROOM


@dataclass(frozen=True)
class Move:
    """A step from some sizes to others.

    Args:
        places: of the keys whose buckets become ``numerator / denominator`` times as large.
        tapers, copies: turns ``tapered`` over, or ``copied`` for ``places``.
        cuts: leaves it to the dynamic program where buckets end.
        widens: to the largest size.
        fits: to as much of the memory as may hold the cap; depends on the schedule.
    """

    places: tuple[int, ...] = ()
    numerator: int = 1
    denominator: int = 1
    tapers: bool = False
    copies: bool = False
    cuts: bool = False
    widens: bool = False
    fits: bool = False

    def of(self, sizes: Sizes) -> Sizes | None:
        """Where it leads to; None beyond the bounds."""
        if self.copies:
            return replace(sizes, copied=sizes.copied ^ frozenset(self.places))
        if self.cuts:
            whole = (LARGEST_MB * MIB,) * len(sizes.caps) if self.widens else sizes.caps
            return (
                None if sizes.dynamic else replace(sizes, caps=whole, dynamic=True, tapered=False)
            )
        if self.tapers and sizes.dynamic:
            return None
        caps = list(sizes.caps)
        for place in self.places:
            caps[place] = caps[place] * self.numerator // self.denominator
            if not SMALLEST_MB * MIB <= caps[place] <= LARGEST_MB * MIB:
                return None
        return replace(sizes, caps=tuple(caps), tapered=sizes.tapered != self.tapers)
