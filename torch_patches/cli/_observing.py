"""Runs the passes on graphs of a file with an observer, for the subcommands that show runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torch_patches.cli._common import CommandError, progress
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
    from torch_patches._inductor.fx_passes.comm_overlap.report import Report


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of files and flags, as ``replay`` has them."""
    parser.add_argument("--graph", help="fw, bw, ...; default: all that passes get")
    add_flag_options(parser)
    add_input_options(parser)


def observed_reports(arguments: argparse.Namespace, command: str) -> dict[str, Report]:
    """What the passes do to each graph of the file, by its name.

    Raises:
        CommandError: a flag or the graph is unknown, or no graph communicates.
        CaptureFormatError, FlagError: the file, or a flag's value, is no good.
    """
    from torch_patches.cli import _replaying as replaying
    from torch_patches.viewing.record import observe

    options = options_of(read_flags(arguments), command)
    loaded = load(arguments, arguments.file, more_groups=options.fuses)
    reports: dict[str, Report] = {}
    with (
        as_compiled(loaded.captured, options) as (captured, options),
        replaying.judged(arguments.as_on_gpu),
    ):
        for name in choose_graphs(loaded, arguments.graph):
            with progress(f"planning {name}", arguments.json):
                module = replaying.copy_of(captured.graphs[name])
                report = replaying.plan(module, captured, options, observe)
            if report.story is not None or report.failure is not None:
                reports[name] = report
    if not reports:
        raise CommandError(f"{arguments.file.name}: no graph that communicates")
    return reports
