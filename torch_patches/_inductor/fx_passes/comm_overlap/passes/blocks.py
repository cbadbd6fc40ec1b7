"""Repeated blocks of a model, found from the modules that made its collectives -> a plan by name.

    tok_embeddings, layers.0 ... layers.31, norm, output
    ->  (("tok_embeddings",), "layers.*", ("norm", "output"))

``block_tree.py`` finds the lists of blocks, ``block_patterns.py`` writes them.  What is in no block
is named by the outermost module that holds none, or by its own name where only a module with blocks
owns it ("vision.pos_embed").  What is used between the same two lists forms one bucket: before the
first, between two, after the last, and in the middle of one.  A model in which nothing repeats gets
one bucket for each outermost module.

The plan is a function of the modules' and parameters' names, the modules' classes and the order of
the collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import ModuleScope
from torch_patches._inductor.fx_passes.comm_overlap.passes.block_patterns import choose_patterns
from torch_patches._inductor.fx_passes.comm_overlap.passes.block_tree import (
    Container,
    ModuleTree,
    block_number,
)

#: An entry of ``module_bucket_plans``: a text gives one bucket for each module that it matches, a
#: nested tuple is one bucket.
PlanEntry = tuple[str, ...] | str


@dataclass(frozen=True)
class Owner:
    """What a parameter's or gradient's collective belongs to.

    Args:
        stack: the modules that made it, outermost first; empty if unknown.
        parameter: the parameter's clean name, None if unknown.
    """

    stack: tuple[ModuleScope, ...]
    parameter: str | None

    @property
    def scope(self) -> str:
        """Path of the innermost module, empty if none is known."""
        return self.stack[-1].path if self.stack else ""


@dataclass(frozen=True)
class BlockStack:
    """An entry of the plan that stands for blocks, and how many modules it matches."""

    entry: str
    blocks: int


@dataclass(frozen=True)
class FoundBlocks:
    """The repeated blocks of a model.

    Args:
        plan: in forward order; can be pasted into ``module_bucket_plans``.
        stacks: the entries that are blocks.
        uncovered: indices of owners in no entry: those without a name, and those of which only a
            module with blocks inside is known.
    """

    plan: tuple[PlanEntry, ...]
    stacks: tuple[BlockStack, ...]
    uncovered: tuple[int, ...]

    def describe(self) -> str:
        """Two lines for a log: the stacks, and the buckets beside them."""
        count = sum(stack.blocks for stack in self.stacks)
        found = ", ".join(f"{stack.entry} ({stack.blocks})" for stack in self.stacks)
        entries = {stack.entry for stack in self.stacks}
        beside = ["+".join([e] if isinstance(e, str) else e) for e in self.plan if e not in entries]
        first = f"{count} repeated blocks: {found}" if found else "no repeated blocks"
        return f"{first}\nbuckets beside them: {', '.join(beside) or 'none'}"


def find_blocks(owners: Sequence[Owner], backward: bool | None = None) -> FoundBlocks:
    """The repeated blocks that ``owners`` lie in, as a plan.

    n log n in the owners, times the depth of their names.

    Args:
        owners: of the parameter and gradient collectives, in graph order.
        backward: the owners are in the order of a backward, so the plan reverses it; None judges by
            the numbers of the blocks, which a single block does not tell.
    """
    tree = ModuleTree()
    for owner in owners:
        _add(tree, owner)
    containers = tree.containers()
    naming = _Naming(owners, containers, tree.only_children())
    if backward is None:
        backward = _runs_backward([naming.block(owner) for owner in owners])
    order = range(len(owners))
    return _plan(owners, naming, tuple(reversed(order)) if backward else tuple(order))


def _add(tree: ModuleTree, owner: Owner) -> None:
    """The modules of the stack, and that of the parameter if its name goes on where they end."""
    for scope in owner.stack:
        tree.add(scope.path, scope.kind)
    holder = "" if owner.parameter is None else owner.parameter.rpartition(".")[0]
    below_scope = not owner.scope or holder.startswith(f"{owner.scope}.")
    if owner.scope or owner.parameter is not None:
        tree.count(holder if below_scope else owner.scope, owner.parameter)


def _prefixes(path: str) -> list[str]:
    """a, a.b, a.b.c for a.b.c."""
    return list(accumulate(path.split("."), lambda above, part: f"{above}.{part}")) if path else []


@dataclass(frozen=True)
class _Block:
    """A block, the path of its container and the entry that it is in."""

    path: str
    container: str
    entry: str


class _Naming:
    """What a path is called in the plan.

    A name is the shortest part of the path that holds no block.  So two names are equal or not
    parts of each other, and no owner is in two entries.
    """

    def __init__(
        self, owners: Sequence[Owner], containers: Sequence[Container], outer: set[str]
    ) -> None:
        paths = [path for o in owners for path in (o.scope, o.parameter) if path]
        self.patterns = choose_patterns(containers, paths)
        container_of = {member: c.path for c in containers for member in c.members}
        self._blocks = {
            member: _Block(member, container_of[member], pattern.entry)
            for pattern in self.patterns
            for member in pattern.members
        }
        self._holders = {above for block in self._blocks for above in _prefixes(block)[:-1]}
        if not containers:
            self._holders |= outer
        # A module that computes with blocks' parameters from outside holds them, in a way.
        for owner in owners:
            if not self._block_at(owner.scope) and self._block_at(owner.parameter or ""):
                self._holders.update(_prefixes(owner.scope))

    def block(self, owner: Owner) -> _Block | None:
        """The block that an owner is in, first by its module, then by its parameter."""
        if self._outside(owner.scope):
            return None
        return self._block_at(owner.scope) or self._block_at(owner.parameter or "")

    def rest(self, owner: Owner) -> str | None:
        """The name of an owner that is in no block; None without one."""
        return self._outside(owner.scope) or self._outside(owner.parameter or "")

    def _block_at(self, path: str) -> _Block | None:
        return next((self._blocks[p] for p in _prefixes(path) if p in self._blocks), None)

    def _outside(self, path: str) -> str | None:
        if self._block_at(path) is not None:
            return None
        return next((p for p in _prefixes(path) if p not in self._holders), None)


def _runs_backward(blocks: Iterable[_Block | None]) -> bool:
    """More stacks end with a lower number than they begin with than the other way round.

    A graph of both passes ends where it begins, and counts as forward.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for block in blocks:
        if block is not None:
            first.setdefault(block.container, block_number(block.path))
            last[block.container] = block_number(block.path)
    return sum((last[c] > first[c]) - (last[c] < first[c]) for c in first) < 0


def _plan(owners: Sequence[Owner], naming: _Naming, forward: Sequence[int]) -> FoundBlocks:
    """Entries by first use.  ``places`` of what is outside blocks: the containers on both sides."""
    blocks = [naming.block(owners[index]) for index in forward]
    before = _finished_before(blocks)
    after = _finished_before(blocks[::-1])[::-1]
    entries: dict[object, dict[str, None]] = {}
    named: set[str] = set()
    uncovered = []
    for index, block, *sides in zip(forward, blocks, before, after, strict=True):
        name = block.entry if block else naming.rest(owners[index])
        if name is None:
            uncovered.append(index)
        elif name not in named:
            named.add(name)
            entries.setdefault(block.entry if block else tuple(sides), {})[name] = None
    stacks = tuple(
        BlockStack(pattern.entry, len(pattern.members))
        for pattern in naming.patterns
        if pattern.entry in entries
    )
    if not stacks:  # nothing repeats: one bucket for each module, not one for all
        return FoundBlocks(tuple(n for e in entries.values() for n in e), (), tuple(uncovered))
    plan = tuple(key if isinstance(key, str) else tuple(entry) for key, entry in entries.items())
    return FoundBlocks(plan, stacks, tuple(sorted(uncovered)))


def _finished_before(blocks: Sequence[_Block | None]) -> list[str | None]:
    """For each place, the container of the last block of which nothing comes at or behind it.

    So what a scheduler or a recomputation mixes into the first or last block lies outside of it.
    """
    ends = {block.path: place for place, block in enumerate(blocks) if block is not None}
    finished: str | None = None
    found = []
    for place, block in enumerate(blocks):
        found.append(finished)
        if block is not None and ends[block.path] == place:
            finished = block.container
    return found
