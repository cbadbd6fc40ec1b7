"""What the subcommands share: exit statuses, errors, options, output."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

EXIT_OK, EXIT_DIFFERS, EXIT_USAGE = 0, 1, 2


class CommandError(Exception):
    """A mistake of the user, or a file that is no good: one line, and exit status 2."""


def new_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    """A subcommand's parser with the options that all have (``--json``, ``--verbose``).

    Args:
        subparsers: of the main parser.
        name: the subcommand.
        summary: a few words for the list of commands.
        description: what it does.
        example: command lines.
    """
    indented = "\n".join(f"  {line}" for line in example.strip().splitlines())
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=description.strip(),
        epilog=f"example:\n{indented}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="for machines: one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show what the passes log")
    return parser


def require(*modules: str) -> None:
    """Import what only the extra ``tools`` installs.

    Raises:
        CommandError: one is missing; says how to install it.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise CommandError(
                f"this needs {error.name}: pip install 'torch_patches[tools]'"
            ) from error


def check_outputs(outputs: Sequence[Path | None], inputs: Sequence[Path | str | None]) -> None:
    """Before long work: the files can be written, and none is another one or one that is read.

    Raises:
        CommandError: one would be overwritten.
        OSError: one is a folder, or its folder is missing.
    """
    written = [path for path in outputs if path is not None]
    taken = {Path(path).resolve() for path in inputs if path is not None}
    for path in written:
        if path.resolve() in taken:
            raise CommandError(
                f"{path}: a file that is read, or written already, would be overwritten"
            )
        taken.add(path.resolve())
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def console(stderr: bool = False) -> Console:
    """A terminal of rich's; plain text where it is no terminal.

    Raises:
        CommandError: rich is not installed.
    """
    require("rich.console")
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width: what reads it wants whole lines.
    width = None if stream.isatty() else 200
    return Console(file=stream, width=width, highlight=False, markup=False)


def print_json(content: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(content, indent=1, default=_plain))


def _plain(value: Any) -> Any:
    """Enums as their values; anything else that JSON does not know is a mistake of ours."""
    if hasattr(value, "value"):
        return value.value
    raise TypeError(f"{type(value).__name__} in JSON output")


@contextmanager
def progress(what: str, quiet: bool = False) -> Iterator[None]:
    """Shows on a terminal's stderr that ``what`` goes on."""
    if quiet or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield
        return
    with console(stderr=True).status(what):
        yield


@contextmanager
def logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Warnings of the passes on stderr, all with ``verbose``; a caller's own settings come back."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("torch_patches")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
