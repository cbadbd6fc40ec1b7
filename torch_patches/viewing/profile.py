"""A ``torch.profiler`` trace beside the estimates: ``compare(read_profile(path), runs)``.

A launch is found again by its kind, size, ranks and, where the trace and the graphs have the same
names of groups, its group; what the trace does not tell of it, by its place among those of its kind in
a step.  Of several steps the median counts (the lower of two): the first may be slow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from torch_patches.viewing.picture import Flight, Run
from torch_patches.viewing.profile_trace import (
    MeasuredLaunch,
    Profile,
    ProfileError,
    StepTimes,
    alone,
    covered,
    read_profile,
)

__all__ = [
    "ComparedRow",
    "Comparison",
    "MeasuredLaunch",
    "Profile",
    "ProfileError",
    "StepTimes",
    "compare",
    "read_profile",
]

#: An estimate that is off by more than this share is marked.
OFF_SHARE = 0.2
#: By so much of its size a launch may differ from the estimate that it belongs to.
_PADDING_SHARE = 0.01


@dataclass(frozen=True)
class ComparedRow:
    """One estimate beside its measurement.

    Args:
        count: launches measured; steps, where a row is about whole steps.
        estimated_ms, measured_ms: of one launch, or of one step.
    """

    name: str
    count: int
    estimated_ms: float
    measured_ms: float

    @property
    def off_share(self) -> float:
        """By which share of the measurement the estimate is off; above 0 it is too high."""
        if self.measured_ms <= 0:
            return math.inf if self.estimated_ms > 0 else 0.0
        return self.estimated_ms / self.measured_ms - 1

    @property
    def is_off(self) -> bool:
        return abs(self.off_share) > OFF_SHARE

    @property
    def difference(self) -> str:
        """For people."""
        share = self.off_share
        return "not measured" if math.isinf(share) else f"{share:+.0%}"


@dataclass(frozen=True)
class Comparison:
    """All rows, and a sentence on what was compared."""

    note: str
    rows: tuple[ComparedRow, ...]

    @property
    def off(self) -> tuple[ComparedRow, ...]:
        """Where the model is off by more than :data:`OFF_SHARE`."""
        return tuple(row for row in self.rows if row.is_off)


# -- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class _Key:
    """What launches have in common that are one row.

    Args:
        group: empty where names of groups are not compared.
    """

    kind: str
    size_bytes: int
    group_size: int | None
    group: str


def compare(profile: Profile, before: Sequence[Run], after: Sequence[Run]) -> Comparison:
    """The profile beside the runs whose launches it has: those before, or those after.

    Args:
        before, after: of all graphs of a step.
    """
    runs, which = _profiled(profile, before, after)
    # Of the runs the same is asked as of the profile: what overlaps, whatever stood still for it.
    busy = [[(k.start_ms, k.end_ms) for k in run.kernels] for run in runs]
    exposed = [
        alone(kernels, [(f.start_ms, f.end_ms) for f in run.flights])
        for kernels, run in zip(busy, runs, strict=True)
    ]
    measured_step = _usual_step(profile)
    whole = (
        ("compute of a step", sum(map(covered, busy)), measured_step.compute_ms),
        (
            "collectives of a step with no compute beside them",
            sum(exposed),
            measured_step.exposed_ms,
        ),
        (
            "a whole step, with what is in no graph",
            sum(r.total_ms for r in runs),
            measured_step.span_ms,
        ),
    )
    rows = [ComparedRow(name, profile.steps, told, found) for name, told, found in whole]
    measured = _measured_by_key(profile, runs)
    for key, estimates in _estimated_by_key(profile, runs).items():
        found = measured.pop(key, [])
        if found:
            rows.append(ComparedRow(_name(key), len(found), _mean(estimates), _usual_ms(found)))
    others, launched = sum(map(len, measured.values())), len(_launched(profile, runs))
    return Comparison(_note(profile, which, others, launched), tuple(rows))


def _note(profile: Profile, which: str, other: int, launched: int) -> str:
    count = len(profile.launches)
    sentences = [
        f"The profile has {count} collectives in {profile.steps} step(s), and is "
        f"compared with the graphs {which}.",
        *profile.notes,
        "Times of collectives are of one launch each, and include the wait for other ranks.",
    ]
    if profile.steps == 1 and launched and count > launched and count % launched == 0:
        times = count // launched
        sentences.append(
            f"The graphs have {launched}: with {times} steps in a profile that marks none, give "
            f"--steps {times}."
        )
    if other:
        sentences.append(f"{other} measured collectives match none in the graphs.")
    return " ".join(sentences)


def _usual_step(profile: Profile) -> StepTimes:
    if not profile.by_step:
        times = (profile.compute_ms, profile.exposed_ms, profile.span_ms)
        return StepTimes(*(value / profile.steps for value in times))
    return StepTimes(
        median_low(step.compute_ms for step in profile.by_step),
        median_low(step.exposed_ms for step in profile.by_step),
        median_low(step.span_ms for step in profile.by_step),
    )


def _usual_ms(launches: Sequence[MeasuredLaunch]) -> float:
    by_step: dict[int, list[float]] = {}
    for launch in launches:
        by_step.setdefault(launch.step, []).append(launch.ms)
    return median_low(map(_mean, by_step.values()))


def _profiled(
    profile: Profile, before: Sequence[Run], after: Sequence[Run]
) -> tuple[Sequence[Run], str]:
    """The runs that launch what was measured, as often; those after where both do."""

    def distance(runs: Sequence[Run]) -> int:
        launched = Counter(_launched(profile, runs))
        measured = {key: len(found) for key, found in _measured_by_key(profile, runs).items()}
        keys = {*measured, *launched}
        return sum(abs(measured.get(key, 0) - profile.steps * launched[key]) for key in keys)

    if distance(before) < distance(after):
        return before, "as they were given (before torch_patches)"
    return after, "as torch_patches made them (after)"


def _launched(profile: Profile, runs: Sequence[Run]) -> list[_Key]:
    """Keys of the launches in order, the groups' names in them only if the trace has all of these."""
    launches = [flight.launch for run in runs for flight in _flights(run)]
    named = {x.group for x in launches} <= {x.group for x in profile.launches}
    return [_Key(x.kind, x.size_bytes, x.group_size, x.group if named else "") for x in launches]


def _flights(run: Run) -> list[Flight]:
    return sorted(run.flights, key=lambda flight: flight.start_ms)


def _estimated_by_key(profile: Profile, runs: Sequence[Run]) -> dict[_Key, list[float]]:
    found: dict[_Key, list[float]] = {}
    flights = [flight for run in runs for flight in _flights(run)]
    for key, flight in zip(_launched(profile, runs), flights, strict=True):
        found.setdefault(key, []).append(flight.end_ms - flight.start_ms)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1])))


def _measured_by_key(profile: Profile, runs: Sequence[Run]) -> dict[_Key, list[MeasuredLaunch]]:
    """By the key of the estimate that is meant: a trace may not tell how many ranks there are, and
    what is sent may be padded."""
    launched = _launched(profile, runs)
    known = list(dict.fromkeys(launched))
    named = any(key.group for key in known)
    found: dict[_Key, list[MeasuredLaunch]] = {}
    steps: dict[int, list[MeasuredLaunch]] = {}
    for launch in profile.launches:
        steps.setdefault(launch.step, []).append(launch if named else replace(launch, group=""))
    # What is not cut into steps has the launches of all, one step behind the other.
    expected = launched if profile.by_step else launched * profile.steps
    for launches in steps.values():
        near = [_nearest(launch, known) for launch in launches]
        keys = _by_place(near, launches, expected, profile.of_gloo)
        for key, launch in zip(keys, launches, strict=True):
            found.setdefault(key or _own_key(launch), []).append(launch)
    return found


def _nearest(launch: MeasuredLaunch, known: Sequence[_Key]) -> _Key | None:
    """The estimate that a launch belongs to; None where there is none."""
    size, ranks = launch.size_bytes or -1, launch.group_size
    distance = {
        key: abs(key.size_bytes - size)
        for key in known
        if key.kind == launch.kind
        and (ranks is None or key.group_size is None or key.group_size == ranks)
        and (not launch.group or not key.group or key.group == launch.group)
    }
    near = min(distance, key=lambda key: distance[key], default=None)
    return None if near is None or distance[near] > _PADDING_SHARE * size else near


def _by_place(
    found: Sequence[_Key | None],
    launches: Sequence[MeasuredLaunch],
    launched: Sequence[_Key],
    of_gloo: bool,
) -> list[_Key | None]:
    """Launches of unknown size by their place among those of their kind, where there are as many of
    that kind as the graphs launch, and what is known of the others fits.  Gloo makes an all-reduce of
    a reduce-scatter."""

    def kind_of(launch: MeasuredLaunch | _Key) -> str:
        reduces = of_gloo and launch.kind == "reduce_scatter"
        return "all_reduce" if reduces else launch.kind

    keys = list(found)
    for kind in sorted(set(map(kind_of, launches))):
        measured = [i for i, launch in enumerate(launches) if kind_of(launch) == kind]
        expected = [key for key in launched if kind_of(key) == kind]
        if len(measured) != len(expected):
            continue
        pairs = list(zip(measured, expected, strict=True))
        if all(keys[i] in (None, key) for i, key in pairs):
            for i, key in pairs:
                if launches[i].size_bytes is None:
                    keys[i] = key
    return keys


def _own_key(launch: MeasuredLaunch) -> _Key:
    return _Key(launch.kind, launch.size_bytes or -1, launch.group_size, launch.group)


def _name(key: _Key) -> str:
    of = f" of {key.group_size} ranks" if key.group_size is not None else ""
    on = f" on group {key.group}" if key.group else ""
    return f"{key.kind}, {key.size_bytes / 2**20:.3f} MiB{of}{on}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
