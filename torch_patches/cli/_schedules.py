"""Schedules (the collectives of a graph in launch order) from captures and logs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import hash_of, launch_texts
from torch_patches.captured import Captured, CaptureFormatError
from torch_patches.captured._trace import GRAPHS, SCHEDULE, Trace, is_trace, read_trace
from torch_patches.captured.files import is_capture, load_any, load_compile

_COLLECTIVE = "c10d_functional."


@dataclass(frozen=True)
class Schedule:
    """What one rank launches in one graph.

    Args:
        launches: texts without names of the rank.
        source: where it comes from: "capture", "graph" (text of a log) or "artifact" (of a log).
    """

    launches: tuple[str, ...]
    source: str

    @property
    def schedule_hash(self) -> str:
        """As reports have it."""
        return hash_of(self.launches)


@dataclass(frozen=True)
class Difference:
    """The first launch that differs; None where one of the two has no more."""

    index: int
    a: str | None
    b: str | None


def schedules_of(path: Path, arguments: argparse.Namespace) -> dict[str, Schedule]:
    """Schedules by phase ("fw", "bw"); in a log with several compiles "0/0 fw" and so on.

    Raises:
        CaptureFormatError: there are no graphs, or one cannot be read.
        OSError: the file cannot be read.
    """
    if path.is_dir() or (not is_capture(path) and _is_trace(path)):
        return _of_trace(read_trace(path, arguments.rank), path.name, arguments.compile)
    loaded = load_any(path)
    return {name: Schedule(s, "capture") for name, s in _of_graphs(loaded.captured).items()}


def first_difference(a: Schedule, b: Schedule) -> Difference | None:
    """None for equal schedules."""
    one, other = a.launches, b.launches
    for index, (x, y) in enumerate(zip(one, other, strict=False)):
        if x != y:
            return Difference(index, x, y)
    index = min(len(one), len(other))
    if len(one) == len(other):
        return None
    return Difference(index, *(each[index] if index < len(each) else None for each in (one, other)))


def _is_trace(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return is_trace(stream.readline(10_000))


def _of_graphs(captured: Captured) -> dict[str, tuple[str, ...]]:
    """Launches by phase: of the graph after the passes where there is one.  Groups are numbered as they
    come in the graph before, which tells two streams of equal size apart."""
    found: dict[str, tuple[str, ...]] = {}
    graphs = captured.graphs
    phases = [name.removesuffix("_after") for name in graphs if name != "joint"]
    for phase in dict.fromkeys(phases) or list(graphs):
        before = graphs.get(phase) or graphs[f"{phase}_after"]
        after = graphs.get(f"{phase}_after") or before
        given = collect(before.graph).collectives
        found[phase] = tuple(launch_texts(collect(after.graph), given))
    return found


def _of_trace(trace: Trace, what: str, compile_id: str | None) -> dict[str, Schedule]:
    kinds = [kind for kind in GRAPHS if kind != "aot_joint_graph"]
    ids = [
        name
        for name in trace.compile_ids
        if compile_id in (None, name)
        and any(_COLLECTIVE in e.payload or e.kind == SCHEDULE for e in trace.of(name))
    ]
    if not ids:
        missing = f" in compile {compile_id!r}" if compile_id is not None else ""
        raise CaptureFormatError(f"{what}: no collectives{missing}")
    schedules: dict[str, Schedule] = {}
    for name in ids:
        if any(entry.kind in kinds for entry in trace.of(name)):
            loaded = load_compile(trace, compile_id=name, what=what, kinds=kinds)
            graphs = _of_graphs(loaded.captured)
            found = {phase: Schedule(launches, "graph") for phase, launches in graphs.items()}
        else:
            found = _artifacts(trace, name, what)
        prefix = f"{name} " if len(ids) > 1 else ""
        schedules |= {f"{prefix}{phase}": schedule for phase, schedule in found.items()}
    return schedules


def _artifacts(trace: Trace, compile_id: str, what: str) -> dict[str, Schedule]:
    """Of a log that holds no graphs; forward and backward are told by their order."""
    texts = [entry.payload for entry in trace.of(compile_id) if entry.kind == SCHEDULE]
    found: list[Schedule] = []
    for text in texts:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CaptureFormatError(f"{what}: {SCHEDULE} is no JSON") from error
        launches = content.get("launches") if isinstance(content, Mapping) else None
        if not isinstance(launches, list) or not all(isinstance(x, str) for x in launches):
            raise CaptureFormatError(f"{what}: {SCHEDULE} has no launches")
        if content.get("phase") != "joint":
            found.append(Schedule(tuple(launches), "artifact"))
    return dict(zip(["fw", "bw", *map(str, range(2, len(found)))], found, strict=False))
