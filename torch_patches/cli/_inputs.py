"""Options that name a file with graphs and what is not in it; and how they are read."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches.cli._common import CommandError, progress

if TYPE_CHECKING:
    from torch_patches.captured.files import Loaded

_MAX_RANK = 2**20
#: Kinds of files that an option is for.
_OPTIONS_OF = {"compile": ("trace",), "rank": ("trace",), "size": ("trace", "repro", "printed")}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class GroupRanks:
    """``--group NAME=0-7``."""

    name: str
    ranks: tuple[int, ...]


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """``--group``, ``--size``, ``--compile`` and ``--rank``, for files of any kind."""
    add = parser.add_argument
    add("--group", type=_group, action="append", default=[], metavar="NAME=0-7,16-23",
        help="ranks of a process group, for files that do not tell")  # fmt: skip
    add("--size", type=_size, action="append", default=[], metavar="SYMBOL=N",
        help="value of a symbolic size, for files that do not tell")  # fmt: skip
    add("--compile", metavar="ID", help="which compile of a log, such as 0/0; default: the one with "
        "most collectives")  # fmt: skip
    add("--rank", type=int, help="whose log or tlparse folder, in a folder with one for each rank")


def load(arguments: argparse.Namespace, path: Path, more_groups: bool = False) -> Loaded:
    """The graphs of ``path``; what was guessed is told on stderr.

    Args:
        more_groups: ``--group`` may name one that no graph uses, for chains to become one on it.

    Raises:
        CommandError: there is no such group.
        CaptureFormatError: it holds no graphs, or is damaged.
        OSError: it cannot be read.
    """
    from torch_patches.captured.files import load_any

    with progress(f"reading {path.name}", arguments.json):
        loaded = load_any(
            path,
            {given.name: given.ranks for given in arguments.group},
            dict(arguments.size),
            compile_id=arguments.compile,
            rank=arguments.rank,
        )
    if loaded.unused_groups and not more_groups:
        there = ", ".join(sorted(loaded.used_groups)) or "none"
        raise CommandError(
            f"--group: no group {loaded.unused_groups[0]!r} in the graphs; there are: {there}"
        )
    for name, kinds in _OPTIONS_OF.items():
        if loaded.kind not in kinds and getattr(arguments, name) not in (None, []):
            print(f"warning: --{name} has no effect on a {loaded.kind}", file=sys.stderr)
    for sentence in loaded.warnings:
        print(f"warning: {path.name}: {sentence}", file=sys.stderr)
    return loaded


def choose_graphs(loaded: Loaded, asked: str | None) -> list[str]:
    """Names of the graphs to plan.

    Raises:
        CommandError: there is no such graph, or none with a name that passes get.
    """
    graphs = loaded.captured.graphs
    if asked is not None:
        if asked not in graphs:
            raise CommandError(f"no graph {asked!r} in the file; there are: {', '.join(graphs)}")
        return [asked]
    names = [name for name in graphs if not name.endswith("_after")]
    chosen = [name for name in names if name != "joint"] or names or list(graphs)
    if not chosen:
        raise CommandError("no graph in the file")
    return chosen


def _group(text: str) -> GroupRanks:
    name, _, ranges = text.partition("=")
    ranks: list[int] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not name or match is None:
            raise argparse.ArgumentTypeError(f"{text!r}: NAME=0-7 or NAME=0,2,4 is expected")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= _MAX_RANK:
            raise argparse.ArgumentTypeError(f"{part!r}: no range of ranks")
        ranks.extend(range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        raise argparse.ArgumentTypeError(f"{text!r}: a rank is named twice")
    return GroupRanks(name, tuple(ranks))


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: SYMBOL=NUMBER is expected")
    return name, int(value)


# -- flags ----------------------------------------------------------------------------------------


def add_flag_options(parser: argparse.ArgumentParser) -> None:
    """``--mode``, ``--set``, ``--table`` and ``--as-on-gpu``: what passes run with."""
    add = parser.add_argument
    add("--mode", default=None, help="bucketing_mode; default: auto")
    add("--set", action="append", default=[], metavar="FLAG=VALUE", dest="flags",
        help="any flag by its name, such as max_topo_span=200 or bucket_cap_mb=None")  # fmt: skip
    add("--table", metavar="FILE", help="measured costs: a calibration table")
    add("--as-on-gpu", action="store_true", help="plan CPU graphs as those of a GPU")


def read_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Names of flags and values, not checked yet."""
    flags: dict[str, Any] = {}
    for text in arguments.flags:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(f"--set {text}: FLAG=VALUE is expected")
        flags[name.strip().removeprefix("aten_distributed_optimizations.")] = _value(value)
    if arguments.mode is not None:
        flags["bucketing_mode"] = arguments.mode
    if arguments.table is not None:
        flags["calibration_file"] = arguments.table
    flags.setdefault("bucketing_mode", "auto")
    flags.setdefault("insert_overlap_deps", False)
    return flags


def _value(text: str) -> Any:
    import ast

    if text in ("true", "false"):  # as in every other tool; no flag has these as texts
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def options_of(flags: dict[str, Any], command: str) -> Any:
    """Checked options.

    Raises:
        CommandError: there is no such flag.
        FlagError: a value is not allowed.
    """
    import difflib

    from torch_patches import config

    known = [flag.name for flag in config.FLAGS]
    for name in flags:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(known)}"
            raise CommandError(f"--set {name}: no such flag{hint}")
    return config.options_from_arguments(flags, command)
