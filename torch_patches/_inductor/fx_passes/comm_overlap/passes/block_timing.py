"""When module buckets start and are waited for: by the order of the modules, not by estimates.

    forward    wait 0 . start 1 . compute 0 . wait 1 . start 2 . compute 1 . ...
    backward   ... compute 2 . scatter 2 . compute 1 . scatter 1 . wait scatter 2 . compute 0 . ...

A gather may start where the bucket ``module_prefetch_depth`` before it is first used, so that it runs
under that one's compute; a reduction is waited for where the one ``module_deferral_depth`` behind it
has started.  ``module_overlap_with`` names another module whose compute shall do it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import read_node_stacks
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_buckets import Visit
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Timing
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.passes.units import Unit
from torch_patches._inductor.fx_passes.comm_overlap.plan import Options


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
    return Timing(
        starts=_starts(track, gathers, visit_of, prefetch, hiders),
        waits=_waits(track, reductions, visit_of, deferral, hiders),
    )


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
    earlier = [0] * depth + [used[visit] for visit in order]
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
    """A launch of no module is waited for as if it were a module of its own."""
    ready: dict[object, int] = {}
    chain: dict[int, int] = {}  # reductions in front of it that feed it
    for unit in reductions:
        owner = _visit(unit, visit_of) or unit.index
        place = max(track.place[member.start] for member in unit.members)
        ready[owner] = max(ready.get(owner, place), place)
        feeders = [m.feeder for m in unit.members if m.feeder is not None]
        links = 1 + max((chain.get(feeder, -1) for feeder in feeders), default=-1)
        chain.update((member.index, links) for member in unit.members)
    order = sorted(ready, key=ready.__getitem__)
    number = {owner: position for position, owner in enumerate(order)}
    end = len(track.order) - 1
    waits: dict[int, int] = {}
    for unit in reductions:
        visit = _visit(unit, visit_of)
        owner = visit or unit.index
        later = number[owner] + depth * (1 + chain[unit.index])
        waits[unit.index] = ready[order[later]] if later < len(order) else end
        wanted = hiders.get(visit.label, ()) if visit is not None else ()
        behind = wanted[bisect_left(wanted, ready[owner]) :]
        # As far as the hiding module runs before the next run of this one.
        following = [ready[o] for o in order[number[owner] + 1 :] if _is_label(o, visit)]
        behind = behind[: bisect_left(behind, following[0])] if following else behind
        if behind:
            waits[unit.index] = behind[-1] + 1
    return waits


def _is_label(owner: object, visit: Visit | None) -> bool:
    return isinstance(owner, Visit) and visit is not None and owner.label == visit.label


def find_hiders(track: Track, options: Options) -> dict[str, list[int]]:
    """Places of the compute that ``module_overlap_with`` names, by bucket; linear in nodes."""
    if not options.module_overlap_with:
        return {}
    stacks = read_node_stacks(track.skeleton, track.order, options.module_stack_fn)
    paths = dict(options.module_overlap_with)
    found: dict[str, list[int]] = {bucket: [] for bucket in paths}
    for node, stack in stacks.items():
        cost = track.costs.get(node)
        if cost is None or not cost.launches:
            continue
        for bucket, path in paths.items():
            names = (name for scope in stack for name in scope.names)
            if any(name == path or name.startswith(f"{path}.") for name in names):
                found[bucket].append(track.place[node])
    return {bucket: sorted(places) for bucket, places in found.items()}
