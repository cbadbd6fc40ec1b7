#!/usr/bin/env python
"""Show every collective of a graph or a model: what it carries, and the bucket it goes into or why not.

    python tools/show_collectives.py llama.json.gz --graph fw      # a file of capture_graph.py
    python tools/show_collectives.py llama.json.gz --only unbucketed --max-topo-span 200
    python tools/show_collectives.py --model llama --mode fsdp --mesh 8 --layers 3

Without a file a small model is compiled here, without a GPU and in one process; the options are
those of tools/capture_graph.py.  Files are only read.

Columns: ``pos`` counts working nodes before the collective (--max-topo-span is a distance in it);
``size`` is what --bucket-cap-mb counts; collectives merge if kind, group, ranks, dtype, op and device
agree and they carry parameters or gradients; ``told by`` says who knew: descriptors (AOT export),
dynamo (torch.compile), or structure (a guess from the graph's shape).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for capture_graph
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import recorded_from_names
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.captured import CaptureFormatError, load_captured, registered_groups
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.collective_rows import Row, Shown, Source, show_graph

ONLY = ("gathers", "reductions", "unbucketed")
REDUCTIONS = (CollectiveKind.REDUCE_SCATTER.value, CollectiveKind.ALL_REDUCE.value)
NAME_WIDTH = 44


# -- command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those for capture_graph.py."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] (FILE | --model ... --mode ... --mesh ...) [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--graph", default="split", help="joint, fw, bw; default: all but joint")
    add("--only", choices=ONLY, help="the summary still counts all")
    add("--json", action="store_true", help="for machines")
    add("--bucket-cap-mb", type=_cap, help="MB, or a list such as 8,25; default: the flag's")
    add("--max-topo-span", type=_span, help="nodes, or none for no bound; default: the flag's")
    add("--primary-group-only", action="store_true", help="flag primary_fsdp_group_only")
    add("--bucket-mode", choices=("default", "coalesced"), help="how a bucket is built")
    add("--as-on-gpu", action="store_true", help="plan CPU graphs as those of a GPU")
    options, rest = parser.parse_known_args(argv)
    # Not a positional argument: it would take the value of an option that is capture_graph.py's.
    is_file = bool(rest) and not rest[0].startswith("-")
    options.file = Path(rest.pop(0)) if is_file else None
    if is_file and rest:
        parser.error(f"unrecognized arguments beside a file: {' '.join(rest)}")
    if not is_file and not rest:
        parser.error("a file, or a model such as --model llama --mode fsdp --mesh 8")
    return options, rest


def _cap(text: str) -> float | list[float]:
    values = [float(value) for value in text.split(",")]
    return values if len(values) > 1 else values[0]


def _span(text: str) -> int | str:
    return text if text == "none" else int(text)


def planning_options(options: argparse.Namespace) -> Options:
    """The flags that the plan is made with.

    Raises:
        FlagError: a value is out of range.
    """
    given: dict[str, Any] = {"bucketing_mode": "topo_span"}
    if options.bucket_cap_mb is not None:
        given["bucket_cap_mb"] = options.bucket_cap_mb
    if options.max_topo_span is not None:
        given["max_topo_span"] = None if options.max_topo_span == "none" else options.max_topo_span
    if options.primary_group_only:
        given["primary_fsdp_group_only"] = True
    if options.bucket_mode is not None:
        given["bucket_mode"] = options.bucket_mode
    return config.options_from_arguments(given, "show_collectives")


# -- reading --------------------------------------------------------------------------------------


def from_file(path: Path) -> Source:
    """A file of capture_graph.py."""
    captured = load_captured(path)
    groups = {
        name: _describe_group(captured.group_descriptions.get(name, ""), ranks)
        for name, ranks in captured.groups.items()
    }
    inputs = recorded_from_names(captured.info.get("inputs", []))
    return Source(captured.graphs, inputs, groups)


def from_model(arguments: Sequence[str]) -> Source:
    """A model of capture_graph.py, compiled here."""
    import capture_graph
    import torch.distributed as dist

    options = capture_graph.parse_arguments([*arguments, "-o", os.devnull])
    logging.disable(logging.WARNING)  # torch warns of each checkpoint and each sequential gather
    try:
        with warnings.catch_warnings(action="ignore"):
            graphs, inputs = capture_graph.capture(options)
        groups = {
            name: _describe_group(group.description, group.ranks)
            for name, group in registered_groups().items()
        }
    finally:
        logging.disable(logging.NOTSET)
        if dist.is_initialized():
            dist.destroy_process_group()
    return Source(graphs, recorded_from_names(inputs), groups)


def _describe_group(description: str, ranks: Sequence[int]) -> str:
    listed = ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")
    return f"{description or 'no description'}, {len(ranks)} ranks: {listed}"


# -- output ---------------------------------------------------------------------------------------


def selected(rows: Iterable[Row], only: str | None) -> list[Row]:
    """Rows that ``--only`` leaves."""
    keep = {
        None: lambda row: True,
        "gathers": lambda row: row.kind == CollectiveKind.ALL_GATHER.value,
        "reductions": lambda row: row.kind in REDUCTIONS,
        "unbucketed": lambda row: row.bucket is None,
    }[only]
    return [row for row in rows if keep(row)]


def table(header: Sequence[str], lines: Sequence[Sequence[str]], right: Iterable[int]) -> list[str]:
    """Aligned columns, two blanks apart; ``right`` are those of numbers."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    right = set(right)

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(header), *map(line, lines)]


COLUMNS = (
    "#", "kind", "group", "ranks", "dtype", "op", "device", "size", "pos",
    "carries", "told by", "index", "parameter", "outcome",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    carries = row.traffic + (" (bw)" if row.backward else "")
    return [
        str(row.index), row.kind, row.group, _text(row.ranks), row.dtype, _text(row.op), row.device,
        size(row.size_bytes), str(row.position), carries, row.told_by, _text(row.parameter_index),
        _shortened(_text(row.parameter)), outcome(row),
    ]  # fmt: skip


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else "..." + name[3 - NAME_WIDTH :]


def outcome(row: Row) -> str:
    """The bucket, or the reason why there is none."""
    if row.bucket is not None:
        return f"bucket {row.bucket}"
    comes_from = f" [made from {', '.join(row.made_from)}]" if row.made_from else ""
    return f"{row.why_not}{comes_from}"


def size(count: int) -> str:
    """Bytes for people."""
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        count_in_unit = count / (1024 if unit == "KiB" else 1024**2)
        if count_in_unit < 1024:
            return f"{count_in_unit:.1f} {unit}"
    return f"{count / 1024**3:.1f} GiB"


def print_graph(shown: Shown, only: str | None) -> None:
    """The table, the buckets and the summary of one graph."""
    rows = selected(shown.rows, only)
    hidden = f", {len(rows)} of them shown (--only {only})" if only else ""
    print(f"{shown.name}: {len(shown.rows)} collectives{hidden}")
    if shown.report.failure:
        print(f"  left as it is: {shown.report.failure}")
    if rows:
        print(*table(COLUMNS, [_cells(row) for row in rows], (0, 3, 7, 8, 11)), sep="\n")
    numbers = {row.bucket for row in rows}
    buckets = [(i, b) for i, b in enumerate(shown.report.buckets) if i in numbers]
    if buckets:
        header = (
            "bucket",
            "kind",
            "group",
            "dtype",
            "form",
            "members",
            "size",
            "span",
            "closed by",
        )
        lines = [
            [str(i), b.kind, b.group, b.dtype, b.form, str(len(b.members)), size(b.size_bytes),
             str(b.span), b.close_reason]
            for i, b in buckets
        ]  # fmt: skip
        print("", *table(header, lines, (0, 5, 6, 7)), sep="\n")
    if shown.rows:
        print("", *_summary(shown.rows), sep="\n")


def _summary(rows: Sequence[Row]) -> list[str]:
    """One line for each kind and traffic: what goes in, what is launched."""
    header = ("kind", "carries", "collectives", "size", "launches after", "left alone because")
    lines = []
    for kind, traffic in dict.fromkeys((row.kind, row.traffic) for row in rows):
        members = [row for row in rows if (row.kind, row.traffic) == (kind, traffic)]
        alone = [row for row in members if row.bucket is None]
        launches = len({row.bucket for row in members} - {None}) + len(alone)
        reasons = [str(row.why_not) for row in alone]
        why = "; ".join(f"{reasons.count(r)}: {r}" for r in dict.fromkeys(reasons))
        total = size(sum(row.size_bytes for row in members))
        lines.append([kind, traffic, str(len(members)), total, str(launches), why or "-"])
    return table(header, lines, (2, 3, 4))


def as_json(source: Source, graphs: Sequence[Shown], options: Options, only: str | None) -> str:
    """Everything, for machines."""
    document = {
        "options": asdict(options),
        "groups": dict(source.groups),
        "graphs": {
            shown.name: {
                "collectives": [asdict(row) for row in selected(shown.rows, only)],
                "report": json.loads(shown.report.to_json()),
            }
            for shown in graphs
        },
    }
    return json.dumps(document, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parse_arguments(argv)
    try:
        planning = planning_options(options)
        source = from_file(options.file) if options.file is not None else from_model(rest)
    except (config.FlagError, CaptureFormatError, OSError) as problem:
        print(f"show_collectives: {problem}", file=sys.stderr)
        return 2
    names = [n for n in source.graphs if n != "joint"] if options.graph == "split" else []
    names = names or [options.graph]
    if unknown := [name for name in names if name not in source.graphs]:
        print(
            f"show_collectives: no graph {unknown[0]!r}, only {', '.join(source.graphs)}",
            file=sys.stderr,
        )
        return 2
    from capture_graph import progress

    graphs = []
    for name in names:
        with progress(f"planning {name}"), as_on_gpu() if options.as_on_gpu else nullcontext():
            graphs.append(show_graph(source, name, planning))
    if options.json:
        print(as_json(source, graphs, planning, options.only))
        return 0
    chosen = (f"{key}={value!r}" for key, value in asdict(planning).items())
    print(f"flags {', '.join(chosen)}")
    for name, description in source.groups.items():
        print(f"group {name}: {description}")
    for shown in graphs:
        print()
        print_graph(shown, options.only)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under "| head"
    sys.exit(main())
