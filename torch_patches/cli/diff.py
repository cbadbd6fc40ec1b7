"""``torch-patches diff``: are two schedules the same?"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches.cli._common import EXIT_DIFFERS, EXIT_OK, new_parser, print_json, progress

if TYPE_CHECKING:
    from torch_patches.cli._schedules import Schedule

_DESCRIPTION = """
Compares which collectives two ranks (or versions, or sets of flags) launch, and in which order.

A and B are captures (torch_patches.capture, or replay --save), logs of TORCH_TRACE, or folders of
tlparse; one of each kind is fine.  Of a compile that came from a cache, for which no pass ran, the
order comes from the graph that torch logs again.  Names of groups are local to a rank: a group counts
as the first, second, ... that the graph uses.

exit status: 0 the schedules are equal, 1 they differ, 2 a file cannot be read
"""
_EXAMPLE = """
torch-patches diff graphs/rank0_000.json.gz graphs/rank1_000.json.gz
torch-patches diff trace/dedicated_log_torch_trace_rank_0_*.log trace/*_rank_1_*.log && echo equal
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(subparsers, "diff", "compare two schedules", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--compile", metavar="ID", help="which compile of logs; default: all")
    parser.add_argument(
        "--rank", type=int, help="whose log or tlparse folder, in a folder with one for each rank"
    )


def run(arguments: argparse.Namespace) -> int:
    from torch_patches.cli._schedules import schedules_of

    found = []
    for path in (arguments.a, arguments.b):
        with progress(f"reading {path.name}", arguments.json):
            found.append(schedules_of(path, arguments))
    a, b = found
    graphs = {name: _compared(a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))}
    equal = all(graph["equal"] for graph in graphs.values())
    if arguments.json:
        print_json({"equal": equal, "graphs": graphs})
    else:
        for name, graph in graphs.items():
            print("\n".join(_lines(name, graph)))
    return EXIT_OK if equal else EXIT_DIFFERS


def _compared(a: Schedule | None, b: Schedule | None) -> dict[str, Any]:
    from torch_patches.cli._schedules import first_difference

    sides = {"a": _side(a), "b": _side(b)}
    if a is None or b is None:
        # A graph without collectives is as good as none.
        return {"equal": not (a or b).launches, **sides, "first_difference": None}  # type: ignore[union-attr]
    difference = first_difference(a, b)
    found = None if difference is None else dataclasses.asdict(difference)
    return {"equal": difference is None, **sides, "first_difference": found}


def _side(schedule: Schedule | None) -> dict[str, Any] | None:
    if schedule is None:
        return None
    return {
        "schedule_hash": schedule.schedule_hash,
        "launches": len(schedule.launches),
        "source": schedule.source,
    }


def _lines(name: str, graph: dict[str, Any]) -> list[str]:
    a, b = graph["a"], graph["b"]
    if a is None or b is None:
        there, which = (a, "A") if b is None else (b, "B")
        return [f"{name}: only in {which}, {there['launches']} launches"]
    if graph["equal"]:
        return [f"{name}: equal, {a['launches']} launches, schedule {a['schedule_hash']}"]
    first = graph["first_difference"]
    return [
        f"{name}: schedules differ from launch {first['index']} on "
        f"({a['launches']} launches, {a['schedule_hash']}; {b['launches']}, {b['schedule_hash']})",
        f"  A: {first['a'] or 'no more'}",
        f"  B: {first['b'] or 'no more'}",
    ]
