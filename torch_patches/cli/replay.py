"""``torch-patches replay``: runs the passes on graphs from a file, on a CPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches.cli._common import (
    EXIT_DIFFERS,
    EXIT_OK,
    check_outputs,
    console,
    new_parser,
    print_json,
    progress,
)
from torch_patches.cli._inputs import (
    add_flag_options,
    add_input_options,
    choose_graphs,
    load,
    options_of,
    read_flags,
)
from torch_patches.cli._process_groups import as_compiled

if TYPE_CHECKING:
    from rich.console import Console

    from torch_patches._inductor.fx_passes.comm_overlap.options import Options
    from torch_patches.captured.files import Loaded

_DESCRIPTION = """
Runs any mode with any flags on graphs of a file, without a GPU, and shows what would become of them.

FILE is a capture (torch_patches.capture), a repro file (fx_graph_runnable), a graph as torch prints
it, a log of TORCH_TRACE, a folder of such logs, or a folder that tlparse made.  It is parsed, and
never executed.  Times and bytes are estimates.
"""
_EXAMPLE = """
torch-patches replay graphs/rank0_000.json.gz --mode auto
torch-patches replay fx_graph_runnable.py --group 0=0-63 --set estimate_device=H200 --compare torch
TORCH_TRACE=/tmp/trace python train.py; torch-patches replay /tmp/trace --graph bw --check
"""
_MIB = 2**20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(
        subparsers, "replay", "run the passes on graphs of a file", _DESCRIPTION, _EXAMPLE
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--graph", help="fw, bw, ...; default: all that passes get")
    add_flag_options(parser)
    add_input_options(parser)
    parser.add_argument("--compare", choices=("torch",), help="beside torch's own passes")
    parser.add_argument(
        "--check", action="store_true", help="run both graphs on all ranks in this process"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the changed graphs as a capture"
    )


def run(arguments: argparse.Namespace) -> int:
    check_outputs([arguments.save], [arguments.file, arguments.table])
    options = options_of(read_flags(arguments), "replay")
    loaded = load(arguments, arguments.file, more_groups=options.fuses)
    names = choose_graphs(loaded, arguments.graph)
    shown: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    with as_compiled(loaded.captured, options) as (captured, options):
        loaded = dataclasses.replace(loaded, captured=captured)
        out = None if arguments.json else console()  # what is missing is told before the work
        for name in names:
            with progress(f"planning {name}", arguments.json):
                shown[name], changed[name] = _replay(loaded, name, options, arguments)
    if arguments.save is not None:
        _save(loaded, changed, arguments)
    if out is None:
        print_json({"file": arguments.file.name, "kind": loaded.kind,
                    "warnings": loaded.warnings, "graphs": shown})  # fmt: skip
    else:
        _print(out, shown)
    return EXIT_DIFFERS if any(_failed(graph) for graph in shown.values()) else EXIT_OK


def _failed(graph: dict[str, Any]) -> bool:
    report, checked = graph["report"], graph.get("check")
    return report["failure"] is not None or (
        checked is not None and checked["verdict"] == "different"
    )


def _replay(
    loaded: Loaded, name: str, options: Options, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """What to show of one graph, and the changed graph."""
    from torch_patches.cli import _replaying as replaying

    before = loaded.captured.graphs[name]
    with replaying.judged(arguments.as_on_gpu):
        shown: dict[str, Any] = {"before": replaying.measure(before, options)}
        after = replaying.copy_of(before)
        report = replaying.plan(after, loaded.captured, options)
        shown |= {
            "after": replaying.measure(after, options),
            "report": json.loads(report.to_json()),
        }
        if arguments.compare is not None:
            shown["torch"] = _as_torch(before, options)
        if arguments.check:
            shown["check"] = replaying.check_values(before, after, loaded.captured.groups)
    plain = {
        key: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        for key, value in shown.items()
    }
    return plain, after


def _as_torch(before: Any, options: Options) -> Any:
    """Estimates of what torch makes of the graph; its exception in a line where it fails."""
    from torch_patches.cli import _replaying as replaying

    try:
        after = replaying.plan_as_torch(before, options)
        return replaying.measure(after, options)
    except Exception as error:  # torch's, on a graph that it cannot handle
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def _save(loaded: Loaded, changed: dict[str, Any], arguments: argparse.Namespace) -> None:
    graphs = {name: loaded.captured.graphs[name] for name in changed}
    graphs |= {f"{name}_after": module for name, module in changed.items()}
    info = {**loaded.captured.info, "replayed": {k: str(v) for k, v in read_flags(arguments).items()
                                                 if k != "calibration_file"}}  # fmt: skip
    dataclasses.replace(loaded.captured, graphs=graphs, info=info).save(arguments.save)


# -- output ---------------------------------------------------------------------------------------


def _print(out: Console, shown: dict[str, Any]) -> None:
    from rich.table import Table

    for name, graph in shown.items():
        columns = [key for key in ("before", "after", "torch") if key in graph]
        table = Table(title=name, title_justify="left")
        table.add_column("estimate")
        for column in columns:
            table.add_column("torch's passes" if column == "torch" else column, justify="right")
        for label, key in _ROWS:
            table.add_row(label, *(_cell(graph[column], key) for column in columns))
        out.print(table)
        for line in _facts(graph):
            out.print(line)


_ROWS = (
    ("launches", "launches"),
    ("time, ms", "total_ms"),
    ("exposed, ms", "exposed_ms"),
    ("peak, MiB", "peak_bytes"),
)


def _cell(column: dict[str, Any], key: str) -> str:
    if "error" in column:
        return "failed"
    value = column[key]
    if key == "launches":
        return ", ".join(f"{kind} {count}" for kind, count in value.items()) or "none"
    return f"{value / _MIB:.1f}" if key == "peak_bytes" else f"{value:.3f}"


def _facts(graph: dict[str, Any]) -> list[str]:
    """Lines below the table."""
    report = graph["report"]
    if report["failure"] is not None:
        lines = [f"left as it was: {report['failure']}"]
    else:
        members = sum(len(bucket["members"]) for bucket in report["buckets"])
        way = f", way: {report['way']}" if report["way"] else ""
        lines = [
            f"{report['mode']}: {len(report['buckets'])} buckets of {members} collectives, "
            f"{report['moved']} nodes moved{way}, schedule {report['schedule_hash'] or 'unchanged'}"
        ]
    if report["fusions"]:
        saved = report["saved_launches"]
        lines.append(f"  chains as one: {len(report['fusions'])}, {saved} launches fewer")
    reasons: dict[str, int] = {}
    for refusal in report["refusals"]:
        reasons[refusal["reason"]] = reasons.get(refusal["reason"], 0) + 1
    lines += [f"  not merged, {reason}: {count}" for reason, count in reasons.items()]
    if "error" in graph.get("torch", {}):
        lines.append(f"torch's passes failed: {graph['torch']['error']}")
    if "check" in graph:
        lines.append(f"values: {graph['check']['verdict']} ({graph['check']['detail']})")
    return lines
