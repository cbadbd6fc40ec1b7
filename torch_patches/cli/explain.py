"""``torch-patches explain``: the story of one collective, or of all of one parameter."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches.cli._common import EXIT_OK, CommandError, new_parser, print_json
from torch_patches.cli._observing import add_run_options, observed_reports

if TYPE_CHECKING:
    from torch_patches.viewing.node_story import NodeStory

_DESCRIPTION = """
Tells of one collective what it carries and who says so, which bucket it is in or why in none, when
it runs, what hides it, and what would have to change.

NODE is the name of its start or of its wait, in the graph as it was given or in the result (a
bucket), or the name of a parameter: then all that gather or reduce it are told of, in the order of the
graph, of each graph that has some (--graph takes one).
"""
_EXAMPLE = """
torch-patches explain graphs/rank0_000.json.gz all_gather_into_tensor_3
torch-patches explain graphs/rank0_000.json.gz layers.0.attention.wq.weight --graph fw --mode auto
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(
        subparsers, "explain", "the story of one collective", _DESCRIPTION, _EXAMPLE
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("node", metavar="NODE")
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from torch_patches.viewing.node_story import NoSuchCollectiveError, tell

    stories: dict[str, tuple[NodeStory, ...]] = {}
    problems: list[str] = []
    for name, report in observed_reports(arguments, "explain").items():
        if report.failure is not None:
            problems.append(f"{name} was left as it was: {report.failure}")
            continue
        story: Any = report.story
        try:
            stories[name] = tell(report, story, arguments.node)
        except NoSuchCollectiveError as error:
            problems.append(f"{name}: {error}")
    if not stories:
        raise CommandError("; ".join(problems))
    if arguments.json:
        print_json({name: [*map(dataclasses.asdict, told)] for name, told in stories.items()})
        return EXIT_OK
    for name, told in stories.items():
        for one in told:
            print(f"{name}: " + "\n".join(one.lines()))
    return EXIT_OK
