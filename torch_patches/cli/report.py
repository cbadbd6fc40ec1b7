"""``torch-patches report``: one HTML page of what the passes do to the graphs of a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches.cli._common import (
    EXIT_DIFFERS,
    EXIT_OK,
    CommandError,
    check_outputs,
    new_parser,
    print_json,
    require,
)
from torch_patches.cli._observing import add_run_options, observed_reports

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.report import Report
    from torch_patches.viewing.profile import Comparison

_DESCRIPTION = """
Writes one HTML page that needs no network: the run of each graph before and after as a picture that
zooms, what is exposed and why, buckets, refusals, traffic, options and constants.

FILE is anything that replay reads; the passes run on a CPU, and times and bytes are estimates.  With
--profile, times of a trace of torch.profiler stand beside them, and the page says where an estimate
is off by more than 20%.
"""
_EXAMPLE = """
torch-patches report graphs/rank0_000.json.gz -o report.html
torch-patches report graphs/rank0_000.json.gz --mode transformer_block --chrome trace.json
torch-patches report graphs/rank0_000.json.gz --profile torch_profile.json.gz --set estimate_device=H200
"""
_TITLES = {"fw": "forward", "bw": "backward"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(
        subparsers, "report", "an HTML page with pictures of the runs", _DESCRIPTION, _EXAMPLE
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE",
                        help="default: FILE's name with .html, in this folder")  # fmt: skip
    parser.add_argument("--chrome", type=Path, metavar="TRACE", help="also write trace events for "
                        "chrome://tracing and ui.perfetto.dev; the graph's name is added where "
                        "there are several")  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="TRACE",
                        help="of torch.profiler, to compare with")  # fmt: skip
    parser.add_argument("--steps", type=int, help="training steps in the profile; default: those "
                        "that it marks (the profiler has a schedule, and its step() is called), "
                        "or 1")  # fmt: skip
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    require("jinja2")
    from torch_patches.viewing.page import Sheet, write_page

    if arguments.steps is not None and arguments.steps < 1:
        raise CommandError("--steps: a number above 0 is expected")
    output = arguments.output or Path(_stem(arguments.file) + ".html")
    read = [arguments.file, arguments.profile, arguments.table]
    check_outputs([output, arguments.chrome], read)
    reports = observed_reports(arguments, "report")
    measured = _measured(arguments, reports)
    sheets = [Sheet.of(report, _TITLES.get(name, name)) for name, report in reports.items()]
    write_page(sheets, output, f"Collectives of {arguments.file.name}", measured)
    traces = _write_traces(reports, arguments.chrome)
    if arguments.json:
        print_json(_told(reports, output, traces, measured))
    else:
        for name, report in reports.items():
            print(f"{name}: {report.failure or report.summary()}")
        for line in _lines(measured):
            print(line)
        print(f"wrote {', '.join(str(path) for path in (output, *traces))}")
    failed = any(report.failure is not None for report in reports.values())
    return EXIT_DIFFERS if failed else EXIT_OK


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".py") or "report"


def _write_traces(reports: Mapping[str, Report], path: Path | None) -> list[Path]:
    """One file for each graph that has a picture."""
    if path is None:
        return []
    told = {name: report for name, report in reports.items() if report.story is not None}
    paths = [
        path if len(told) == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}")
        for name in told
    ]
    for report, each in zip(told.values(), paths, strict=True):
        report.to_chrome_trace(each)
    return paths


def _measured(arguments: argparse.Namespace, reports: Mapping[str, Report]) -> Comparison | None:
    if arguments.profile is None:
        return None
    from torch_patches.viewing.profile import ProfileError, compare, read_profile

    try:
        profile = read_profile(arguments.profile, arguments.steps)
    except ProfileError as error:
        raise CommandError(str(error)) from error
    pictures: list[Any] = [r.story.picture for r in reports.values() if r.story]  # type: ignore[attr-defined]
    found = compare(profile, [p.before for p in pictures], [p.after for p in pictures])
    if arguments.graph is None:
        return found
    alone = (
        f"Estimates are of the graph {arguments.graph} alone, measured steps are whole ones: "
        "without --graph all graphs are counted."
    )
    return dataclasses.replace(found, note=f"{found.note} {alone}")


def _lines(measured: Comparison | None) -> list[str]:
    if measured is None:
        return []
    if not measured.off:
        return [measured.note, "  no estimate is off by more than 20%"]
    rows = [
        f"  {row.name}: estimated {row.estimated_ms:.3f} ms, measured {row.measured_ms:.3f} ms "
        f"({row.difference})"
        for row in measured.off
    ]
    return [measured.note, "off by more than 20%:", *rows]


def _told(
    reports: Mapping[str, Report], output: Path, traces: list[Path], measured: Comparison | None
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "page": str(output),
        "traces": [str(path) for path in traces],
        "graphs": {name: json.loads(report.to_json()) for name, report in reports.items()},
    }
    if measured is not None:
        rows = [
            {**vars(row), "off": row.is_off, "difference": row.difference} for row in measured.rows
        ]
        told["profile"] = {"note": measured.note, "rows": rows}
    return told
