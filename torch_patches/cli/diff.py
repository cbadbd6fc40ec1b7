"""``torch-patches diff``: are two schedules the same?"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_patches.cli._common import EXIT_DIFFERS, EXIT_OK, new_parser, print_json

_DESCRIPTION = """
Compares the collectives of two captures, launch by launch: two ranks, two versions, two sets of flags.
"""
_EXAMPLE = """
torch-patches diff rank0.json.gz rank1.json.gz && echo equal
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(subparsers, "diff", "compare two schedules", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")


def run(arguments: argparse.Namespace) -> int:
    first, second = _launches(arguments.a), _launches(arguments.b)
    equal = first == second
    if arguments.json:
        print_json({"equal": equal, "a": first, "b": second})
        return EXIT_OK if equal else EXIT_DIFFERS
    for name in sorted({*first, *second}):
        ours, theirs = first.get(name, []), second.get(name, [])
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None
        )
        if ours == theirs:
            print(f"{name}: {len(ours)} launches, equal")
        elif place is None:
            print(f"{name}: {len(ours)} launches against {len(theirs)}, as far as both go equal")
        else:
            print(f"{name}: launch {place} differs: {ours[place]} against {theirs[place]}")
    return EXIT_OK if equal else EXIT_DIFFERS


def _launches(path: Path) -> dict[str, list[str]]:
    from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
    from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import launch_texts
    from torch_patches.captured import load_captured

    graphs = load_captured(path).graphs
    return {name: launch_texts(collect(module.graph)) for name, module in graphs.items()}
