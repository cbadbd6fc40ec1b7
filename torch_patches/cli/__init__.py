"""The command ``torch-patches``, also ``python -m torch_patches``.

    torch-patches --help
    torch-patches diff --help

A subcommand is a module of this package that is listed in :data:`COMMANDS`, with

    add_parser(subparsers)  -> None    its options; see ``_common.new_parser``
    run(arguments)          -> int     its exit status

It is imported when it is asked for; ``--help`` imports all.  What is needed for the work only (torch
apart, which the package needs anyway) is imported in ``run``.

Exit status: 0, all is well; 1, two things differ, a check failed, or there was nothing to do; 2, the
command line is wrong or a file cannot be read.  Such an error is one line on stderr.  130: interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from torch_patches.cli._common import EXIT_USAGE, CommandError, logging_to_stderr

__all__ = ["COMMANDS", "main"]

#: In the order of ``--help``.
COMMANDS = (
    "capture",
    "replay",
    "report",
    "explain",
    "diff",
    "calibrate",
)

_DESCRIPTION = """\
See what torch_patches does with the collectives of compiled programs, without GPUs.

exit status: 0 all is well; 1 two things differ, a check failed or there was nothing to do;
2 the command line is wrong or a file cannot be read
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: without the program's name; None for that of the process.

    Returns:
        The exit status; see the module.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(given)
        if not given:
            parser.print_help(sys.stderr)
            print("\ntorch-patches: error: a command is expected", file=sys.stderr)
            return EXIT_USAGE
        arguments = parser.parse_args(given)
    except SystemExit as end:  # argparse has printed help, or its error
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    with logging_to_stderr(arguments.verbose):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(_module(arguments.command).run(arguments))
    except BrokenPipeError:  # as with ``torch-patches ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_of_user(error):
            raise
        logging.getLogger(__name__).debug("where it happened", exc_info=True)
        print(f"torch-patches {arguments.command}: {_one_line(error)}", file=sys.stderr)
        return EXIT_USAGE


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    from torch_patches import __version__

    parser = argparse.ArgumentParser(
        prog="torch-patches",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch_patches {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = given[0] if given and given[0] in COMMANDS else None
    for name in COMMANDS if asked is None else (asked,):
        _module(name).add_parser(subparsers)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"torch_patches.cli.{name}")


def _is_of_user(error: Exception) -> bool:
    """What the user gave is at fault, or the machine; anything else is a fault of ours."""
    from torch_patches import FlagError, ModulePlanError
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
        CalibrationError,
    )
    from torch_patches.captured import CaptureFormatError

    known = (CommandError, CaptureFormatError, CalibrationError, FlagError, ModulePlanError)
    return isinstance(error, (*known, OSError))


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
