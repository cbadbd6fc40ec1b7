"""Short patterns for containers of blocks, that match these blocks and nothing else of the model.

    stages.0.blocks, stages.1.blocks   ->   stages.*.blocks.*
    net, whose child 0 is no block     ->   net.[1-4]

Three ways to write a container, from short to long; the first that matches no other owner's name is
taken: with a star for every number, with a star for the block, with the blocks' numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_patches._inductor.fx_passes.comm_overlap.passes.block_tree import Container

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class BlockPattern:
    """One entry of a plan, and the blocks that it matches."""

    entry: str
    members: tuple[str, ...]


def choose_patterns(containers: Sequence[Container], paths: Iterable[str]) -> list[BlockPattern]:
    """Patterns for all blocks of ``containers``.

    Args:
        containers: no block lies in another one.
        paths: what patterns will be matched with: owners' modules and parameters.

    Linear in the paths' components, as long as stars stand at few depths.
    """
    containers = _merged(containers)
    starred = [_starred(container) for container in containers]
    shared = _shared(containers)
    refused = _overmatching([*starred, *shared], paths)
    good = [pattern for pattern in shared if pattern.entry not in refused]
    taken = {member for pattern in good for member in pattern.members}
    for container, pattern in zip(containers, starred, strict=True):
        if container.members[0] in taken:
            continue
        good.extend([pattern] if pattern.entry not in refused else _listed(container))
    return good


def _merged(containers: Iterable[Container]) -> list[Container]:
    """One container for each path: a module may hold several series."""
    members: dict[str, list[str]] = {}
    for container in containers:
        members.setdefault(container.path, []).extend(container.members)
    return [Container(path, tuple(blocks)) for path, blocks in members.items()]


def _starred(container: Container) -> BlockPattern:
    return BlockPattern(_below(container.path, "*"), container.members)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shared(containers: Sequence[Container]) -> list[BlockPattern]:
    """One pattern for all containers whose paths differ in numbers only."""
    groups: dict[str, list[Container]] = {}
    for container in containers:
        parts = ["*" if part.isdecimal() else part for part in container.path.split(".")]
        groups.setdefault(_below(".".join(parts), "*"), []).append(container)
    return [
        BlockPattern(entry, tuple(member for c in group for member in c.members))
        for entry, group in groups.items()
        if len(group) > 1
    ]


# -- does a pattern match too much? ---------------------------------------------------------------


class _Step:
    """Node of a trie of patterns: the next component, or "*" for any."""

    def __init__(self) -> None:
        self.next: dict[str, _Step] = {}
        self.pattern: BlockPattern | None = None


def _overmatching(patterns: Sequence[BlockPattern], paths: Iterable[str]) -> set[str]:
    """Entries that match a path which is in none of their blocks."""
    trie = _Step()
    members: dict[str, set[str]] = {}
    for pattern in patterns:
        step = trie
        for part in pattern.entry.split("."):
            step = step.next.setdefault(part, _Step())
        step.pattern = pattern
        members[pattern.entry] = set(pattern.members)
    return {
        entry
        for path in dict.fromkeys(paths)
        for entry, block in _matches(trie, path.split("."))
        if block not in members[entry]
    }


def _matches(trie: _Step, parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Entry and matched module of every pattern that matches a path or a part of its beginning."""
    reached = [trie]
    for depth, part in enumerate(parts, 1):
        reached = [s.next[p] for s in reached for p in {part: 0, "*": 0} if p in s.next]
        for step in reached:
            if step.pattern is not None:
                yield step.pattern.entry, ".".join(parts[:depth])


# -- lists ----------------------------------------------------------------------------------------


def _listed(container: Container) -> list[BlockPattern]:
    """The blocks by their numbers ("net.[1-4]"), those without one by their names."""
    series: dict[str, list[tuple[int, str]]] = {}
    found = []
    for member in container.members:
        match = _NUMBERED.fullmatch(member.rpartition(".")[2])
        if match:
            series.setdefault(match[1], []).append((int(match[2]), member))
        else:
            found.append(BlockPattern(member, (member,)))
    for text, numbered in series.items():
        name = f"{text}{_ranges([number for number, _ in numbered])}"
        members = tuple(member for _, member in numbered)
        found.append(BlockPattern(_below(container.path, name), members))
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """[0-2,5] for ascending 0, 1, 2, 5; a single number stands alone."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"[{','.join(texts)}]"
