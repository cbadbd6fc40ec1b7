"""``torch-patches capture``: runs a program of the user's and keeps the graphs of its compiles."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_patches.cli._common import (
    EXIT_DIFFERS,
    EXIT_OK,
    CommandError,
    new_parser,
    print_json,
)

_DESCRIPTION = """
Runs PROGRAM with TORCH_PATCHES_CAPTURE=DIR, so that each of its processes writes the graphs of its
compiles there: one file a compile and rank, with the joint, forward and backward graphs, before and
after the passes.  The program must import torch_patches, and compile with Inductor or with the
backend aot_eager_comm_overlap.  Its compile caches are not used.  In a program of your own,
"with torch_patches.capture(DIR):" does the same.

exit status: 0 there are graphs; 1 there are none, or the program failed; 2 wrong usage
"""
_EXAMPLE = """
torch-patches capture graphs -- torchrun --nproc-per-node 8 train.py --steps 1
torch-patches replay graphs/rank0_000.json.gz
"""
_NONE = (
    "no graphs: does the program import torch_patches, and compile with Inductor or "
    "aot_eager_comm_overlap?"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(
        subparsers, "capture", "keep the graphs of a program's compiles", _DESCRIPTION, _EXAMPLE
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help="behind --")


def run(arguments: argparse.Namespace) -> int:
    from torch_patches.recording import VARIABLE

    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    known = set(directory.glob("*.json.gz"))
    program = arguments.program[1:] if arguments.program[0] == "--" else arguments.program
    environment = {**os.environ, VARIABLE: str(directory)}
    # What the program prints must not get into our JSON.
    output = sys.stderr if arguments.json else None
    try:
        done = subprocess.run(program, env=environment, stdout=output, check=False)
    except FileNotFoundError as error:
        raise CommandError(f"{program[0]}: no such program") from error
    files = [_describe(path) for path in sorted(set(directory.glob("*.json.gz")) - known)]
    if arguments.json:
        print_json({"returncode": done.returncode, "files": files})
    else:
        for file in files:
            graphs = ", ".join(
                f"{name} {graph['nodes']} nodes, {graph['collectives']} collectives"
                for name, graph in file["graphs"].items()
            )
            print(f"{arguments.directory / file['file']}: {graphs}")
    if done.returncode:
        print(f"torch-patches capture: the program ended with {done.returncode}", file=sys.stderr)
    elif not files:  # of a program that failed its own error is the cause
        print(f"torch-patches capture: {_NONE}", file=sys.stderr)
    return EXIT_OK if files and not done.returncode else EXIT_DIFFERS


def _describe(path: Path) -> dict[str, Any]:
    from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
    from torch_patches.captured import load_captured

    captured = load_captured(path)
    graphs = {
        name: {
            "nodes": len(module.graph.nodes),
            "collectives": len(collect(module.graph).collectives),
        }
        for name, module in captured.graphs.items()
    }
    return {"file": path.name, "rank": captured.info.get("rank"), "graphs": graphs}
