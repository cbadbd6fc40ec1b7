"""Turns torch_patches into a stack of commits against a torch tree.

    python tools/make_upstream_stack.py --torch 2.13 --out DIR            # commits and patches
    python tools/make_upstream_stack.py --torch VENV_OR_CHECKOUT --out DIR
    python tools/make_upstream_stack.py --torch 2.13 --out DIR --check    # and runs each commit
    python tools/make_upstream_stack.py --drift                           # package against manifest

``DIR/tree`` is a git repository whose first commit is torch and whose others are the stack;
``DIR/patches`` holds the same for ``git am``.  What is in which commit: ``tools/upstream/manifest``.
How to submit: ``docs/upstream.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package upstream
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upstream.build import Stack, build_stack
from upstream.check import check_stack
from upstream.drift import find_drift, find_large
from upstream.errors import StackError
from upstream.manifest import load_manifest
from upstream.tree import AUTHOR, find_tree


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the stack was built (and runs); 1 with the reason on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (StackError, OSError) as error:
        print(f"make_upstream_stack: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", help="an installed torch, a virtual environment, a checkout, or 2.13"
    )
    parser.add_argument("--out", type=Path, help="a folder that is empty or does not exist")
    parser.add_argument("--check", action="store_true", help="run each commit's tests in the tree")
    parser.add_argument(
        "--commits",
        default="",
        help="with --check, which: '3', '1-6' or '1-6,40'; all if not given",
    )
    parser.add_argument("--python", help="with --check: the interpreter of that torch")
    parser.add_argument(
        "--author", default=AUTHOR, help="of the commits: 'Name <name@example.org>'"
    )
    parser.add_argument("--drift", action="store_true", help="only compare package and manifest")
    return parser


def _run(options: argparse.Namespace) -> int:
    manifest = load_manifest()
    problems = find_drift(manifest)
    if options.drift:
        return _end(problems or find_large(manifest))
    if options.torch is None or options.out is None:
        raise StackError("give --torch and --out, or --drift")
    if not options.check and (options.commits or options.python):
        raise StackError("--commits and --python go with --check")
    numbers = _numbers(options.commits)
    tree = find_tree(options.torch, manifest.torch, options.out / "download")
    last = sum(commit.serves(tree.release) for commit in manifest.commits)
    if beyond := [number for number in numbers if not 1 <= number <= last]:
        raise StackError(f"--commits: there is no {beyond[0]}; they are 1 to {last}")
    stack = build_stack(tree, manifest, options.out, author=options.author)
    _tell(stack, options.out)
    if options.check:
        problems += check_stack(stack, numbers, python=options.python or sys.executable)
    return _end(problems)


def _tell(stack: Stack, out: Path) -> None:
    print(f"torch {stack.tree.version}: {len(stack.commits)} commits in {out / 'tree'}")
    for number, built in enumerate(stack.commits, 1):
        print(f"{number:3} {built.lines:4} lines  {built.commit.title}")
    for commit in stack.left_out:
        print(f"    left out: {commit.title}: {commit.absent}")


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise StackError(f"--commits {text!r}: numbers and ranges such as 1-6,40")
        if int(last or first) < int(first):
            raise StackError(f"--commits {text!r}: {part} has nothing in it")
        numbers += range(int(first), int(last or first) + 1)
    if text and not numbers:
        raise StackError(f"--commits {text!r}: numbers and ranges such as 1-6,40")
    return numbers


def _end(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
