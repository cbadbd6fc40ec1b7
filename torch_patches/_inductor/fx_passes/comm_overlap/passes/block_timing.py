"""When module buckets start and are waited for: by the order of the modules, not by estimates.

    forward    wait 0 . start 1 . compute 0 . wait 1 . start 2 . compute 1 . ...
    backward   ... compute 2 . scatter 2 . compute 1 . scatter 1 . wait scatter 2 . compute 0 . ...

A gather may start where the bucket ``module_prefetch_depth`` before it is first used, so that it runs
under that one's compute; a reduction is waited for where the one ``module_deferral_depth`` behind it
has started.  ``module_overlap_with`` names another module whose compute shall do it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import read_node_stacks
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_buckets import Visit
from torch_patches._inductor.fx_passes.comm_overlap.passes.timing import Timing
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit

#: Kernels at most between the last gradient of a module and the first use of the next one's gather.
_NEAR_KERNELS = 32


def time_blocks(
    track: Track,
    units: Sequence[Unit],
    visit_of: Mapping[int, Visit],
    prefetch: int,
    deferral: int,
    hiders: Mapping[str, Sequence[int]],
) -> Timing:
    """Places of starts and waits by structure.

    Args:
        units: all launches of the graph.
        visit_of: index of a collective -> run of its module; launches without one stay in place.
        prefetch, deferral: depths, in module buckets.
        hiders: label of a bucket -> places of the compute that shall hide it, ascending.
    """
    gathers = [unit for unit in units if unit.gathers]
    reductions = [unit for unit in units if unit.index in track.reductions]
    waits = _waits(track, reductions, visit_of, deferral, hiders)
    uses = sorted(unit.use for unit in gathers)
    return Timing(
        starts=_starts(track, gathers, visit_of, prefetch, hiders),
        waits={index: _behind_starts(place, uses, track) for index, place in waits.items()},
    )


def _behind_starts(place: int, uses: Sequence[int], track: Track) -> int:
    """A wait for a reduction lets the gather go first that starts in the same gap between modules:
    the network would stand idle while compute waits and then prepares its payload."""
    following = bisect_left(uses, place)
    if following == len(uses):
        return place
    near = track.slot[uses[following]] - track.slot[place] <= _NEAR_KERNELS
    return uses[following] if near else place


def _visit(unit: Unit, visit_of: Mapping[int, Visit]) -> Visit | None:
    """Of the members, which agree in it."""
    return visit_of.get(unit.index)


def _starts(
    track: Track,
    gathers: Sequence[Unit],
    visit_of: Mapping[int, Visit],
    depth: int,
    hiders: Mapping[str, Sequence[int]],
) -> dict[int, int]:
    used: dict[Visit, int] = {}
    for unit in gathers:
        if (visit := _visit(unit, visit_of)) is not None:
            used[visit] = min(used.get(visit, unit.use), unit.use)
    order = sorted(used, key=used.__getitem__)
    earlier = [0] * min(depth, len(order)) + [used[visit] for visit in order]
    from_place = dict(zip(order, earlier, strict=False))
    previous = _previous_of_label(order, used)
    starts: dict[int, int] = {}
    for unit in gathers:
        visit = _visit(unit, visit_of)
        if visit is None:
            starts[unit.index] = min(gather.start for gather in unit.gathers)
            continue
        wanted = hiders.get(visit.label, ())
        # The run of the hiding module that comes last before this one.
        first = bisect_left(wanted, previous[visit])
        behind = first < len(wanted) and wanted[first] < used[visit]
        starts[unit.index] = wanted[first] if behind else from_place[visit]
    return starts


def _previous_of_label(order: Iterable[Visit], place: Mapping[Visit, int]) -> dict[Visit, int]:
    """Where the run of the same module before each one was used, else the graph's beginning."""
    last: dict[str, int] = {}
    result: dict[Visit, int] = {}
    for visit in order:
        result[visit] = last.get(visit.label, 0)
        last[visit.label] = place[visit]
    return result


def _waits(
    track: Track,
    reductions: Sequence[Unit],
    visit_of: Mapping[int, Visit],
    depth: int,
    hiders: Mapping[str, Sequence[int]],
) -> dict[int, int]:
    """A launch of no module is waited for as if it were a module of its own.

    A bucket that others feed with all they have is waited for so much later.  What feeds only some
    members of a bucket (tensor-parallel norms) is waited for where the others are ready.
    """
    ready = {u.index: max(track.place[member.start] for member in u.members) for u in reductions}
    owners = {unit.index: _visit(unit, visit_of) or unit.index for unit in reductions}
    done: dict[Visit | int, int] = {}
    for unit in reductions:
        owner = owners[unit.index]
        done[owner] = max(done.get(owner, 0), ready[unit.index])
    order = sorted(done, key=done.__getitem__)
    number = {owner: position for position, owner in enumerate(order)}
    chains = _Chains(reductions)
    waits: dict[int, int] = {}
    for unit in reductions:
        owner = owners[unit.index]
        later = number[owner] + depth * (1 + chains.length(unit.index))
        waits[unit.index] = done[order[later]] if later < len(order) else len(track.order) - 1
        if isinstance(owner, Visit) and (wanted := hiders.get(owner.label)):
            runs = [done[o] for o in order[number[owner] + 1 :] if _is_label(o, owner.label)]
            behind = wanted[bisect_left(wanted, done[owner]) :]
            behind = behind[: bisect_left(behind, runs[0])] if runs else behind
            waits[unit.index] = behind[-1] + 1 if behind else waits[unit.index]
    for feeder, fed in chains.mixed():
        waits[feeder] = ready[fed]
    return waits


class _Chains:
    """Which reductions pass on the results of which."""

    def __init__(self, reductions: Sequence[Unit]) -> None:
        unit_of = {member.index: unit.index for unit in reductions for member in unit.members}
        self._feeders: dict[int, set[int]] = {}  # unit -> units
        self._mixed: set[int] = set()  # units with members that nobody feeds
        self._lengths: dict[int, int] = {}
        for unit in reductions:
            found = [unit_of.get(m.feeder) if m.feeder is not None else None for m in unit.members]
            self._feeders[unit.index] = {f for f in found if f is not None} - {unit.index}
            if None in found:
                self._mixed.add(unit.index)

    def length(self, index: int) -> int:
        """Units in front of this one that feed all of it."""
        if index not in self._lengths:
            self._lengths[index] = 0
            if self._feeders[index] and index not in self._mixed:
                self._lengths[index] = 1 + max(map(self.length, self._feeders[index]))
        return self._lengths[index]

    def mixed(self) -> list[tuple[int, int]]:
        """(feeder, the unit that it feeds a part of)."""
        return [
            (f, unit) for unit in self._feeders for f in self._feeders[unit] if unit in self._mixed
        ]


def _is_label(owner: Visit | int, label: str) -> bool:
    return isinstance(owner, Visit) and owner.label == label


def find_hiders(track: Track, options: Options) -> dict[str, list[int]]:
    """Places of the compute that ``module_overlap_with`` names, by bucket; linear in nodes."""
    if not options.module_overlap_with:
        return {}
    stacks = read_node_stacks(track.skeleton, track.order, options.module_stack_fn)
    of_path: dict[str, list[str]] = {}
    for bucket, path in options.module_overlap_with:
        of_path.setdefault(path, []).append(bucket)
    found: dict[str, list[int]] = {bucket: [] for bucket, _ in options.module_overlap_with}
    for node, stack in stacks.items():
        cost = track.costs.get(node)
        if cost is None or not cost.launches:
            continue
        paths = {above for scope in stack for name in scope.names for above in _prefixes(name)}
        for bucket in {bucket for path in paths for bucket in of_path.get(path, ())}:
            found[bucket].append(track.place[node])
    return {bucket: sorted(places) for bucket, places in found.items()}


def _prefixes(name: str) -> Iterator[str]:
    """a, a.b, a.b.c for a.b.c."""
    return accumulate(name.split("."), lambda above, part: f"{above}.{part}")
