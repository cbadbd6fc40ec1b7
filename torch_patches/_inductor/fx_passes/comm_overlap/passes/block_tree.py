"""The tree of a model's modules, and the lists of repeated blocks in it.

    stages.{0,1}.blocks.{0,1}.{attn.{qkv,proj}, mlp.{fc1,fc2}}   ->   stages.0.blocks, stages.1.blocks

A *container* is a module whose children are

- numbered ("0", "1": ModuleList, Sequential, a ModuleDict with such keys), or
- named with a number behind equal text ("block1", "block2"), of which two are alike or of one
  class, or
- of one class twice, in a module that has no forward of its own (ModuleDict).

Two modules are alike if their classes and the names of their children and of those' children are: a
wrapper of an attention is not like one of an MLP.  A module is *composite* if it has children, or is
of a user's class and holds three parameters or more.  Composite children are the blocks; containers of plain ones only
(heads, embeddings, the layers of an MLP) count if there are no others.

The outermost container wins, for its blocks are what is computed in one go: experts and heads stay
inside their layer.  But a container whose children are little more than containers (stages of
blocks, a list of whole models) gives way to those, if

- they hold alike blocks that are composite of composites (or their list is the child itself, as in
  ``layer1.0``): an attention and an MLP listed in one layer are not alike, experts not so deep; and
- what stands beside them has at most a quarter of their collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_PLAIN_CONTAINERS = frozenset(
    f"torch.nn.modules.container.{name}" for name in ("Sequential", "ModuleList", "ModuleDict")
)
_NUMBERED = re.compile(r"(.*?)(\d+)", re.ASCII | re.DOTALL)
# A leaf of a user's class with so many parameters is a block of its own, not a plain layer.
_PARAMETERS_OF_COMPOSITE = 3
# Collectives beside inner containers, at most one for so many inside, for the outer to give way.
_INSIDE_PER_OUTSIDE = 4


@dataclass(frozen=True)
class Container:
    """A list of blocks.

    Args:
        path: of the module that holds them, "" for the root.
        members: paths of the blocks; numbered ones by ascending number.
    """

    path: str
    members: tuple[str, ...]


@dataclass(eq=False)
class _Module:
    """One module; ``children`` by component, ``total`` owners in it and below."""

    path: str
    depth: int
    kind: str | None = None
    called: bool = False
    children: dict[str, _Module] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    total: int = 0

    @property
    def is_composite(self) -> bool:
        own = self.kind is not None and not self.kind.startswith("torch.nn.")
        return bool(self.children) or (own and len(self.parameters) >= _PARAMETERS_OF_COMPOSITE)

    @property
    def is_deep(self) -> bool:
        """Composite of composites."""
        return any(child.is_composite for child in self.children.values())

    @property
    def likeness(self) -> object:
        """Equal for modules that are alike."""
        return self.kind, frozenset((n, frozenset(c.children)) for n, c in self.children.items())


@dataclass(eq=False)
class _Candidate:
    """A container before it is chosen."""

    path: str
    members: list[_Module]

    @property
    def is_composite(self) -> bool:
        return any(member.is_composite for member in self.members)

    @property
    def total(self) -> int:
        return sum(member.total for member in self.members)

    def gives_blocks(self, is_the_child: bool) -> bool:
        """Its members are alike, and enough of a block to be taken out of an outer block."""
        blocks = [m for m in self.members if m.is_deep or (is_the_child and m.is_composite)]
        return _has_alike(blocks)


class ModuleTree:
    """Modules by path; grows by :meth:`add` and :meth:`count`, then :meth:`containers` once."""

    def __init__(self) -> None:
        self._root = _Module("", 0)
        self._modules = {"": self._root}

    def add(self, path: str, kind: str | None) -> None:
        """A module that is called itself (its forward runs)."""
        module = self._module(path)
        module.called = True
        module.kind = kind or module.kind

    def count(self, path: str, parameter: str | None) -> None:
        """One more collective, of a parameter that the module at ``path`` holds."""
        module = self._module(path)
        module.total += 1
        if parameter is not None:
            module.parameters.add(parameter)

    def only_children(self) -> set[str]:
        """Paths of composite modules that hold everything: "model" in front of all names."""
        found: set[str] = set()
        module = self._root
        while len(module.children) == 1 and not module.parameters:
            (module,) = module.children.values()
            if not module.children:
                break
            found.add(module.path)
        return found

    def containers(self) -> list[Container]:
        """The containers of blocks, in the order in which their modules were added."""
        chosen: dict[_Module, list[_Candidate]] = {}
        for module in sorted(self._modules.values(), key=lambda m: -m.depth):
            module.total += sum(child.total for child in module.children.values())
            chosen[module] = _choose(module, chosen)
        found = chosen[self._root]
        best = [candidate for candidate in found if candidate.is_composite] or found
        return [Container(c.path, tuple(m.path for m in c.members)) for c in best]

    def _module(self, path: str) -> _Module:
        known = self._modules.get(path)
        if known is not None:
            return known
        module = self._root
        for part in path.split("."):
            if part not in module.children:
                below = f"{module.path}.{part}" if module.path else part
                child = _Module(below, module.depth + 1)
                module.children[part] = child
                self._modules[below] = child
            module = module.children[part]
        return module


def _choose(module: _Module, below: dict[_Module, list[_Candidate]]) -> list[_Candidate]:
    """Containers in ``module``, given those in its children."""
    found: list[_Candidate] = []
    inside: set[_Module] = set()
    for outer in _candidates(module):
        inside.update(outer.members)
        found.extend(_inner_containers(outer, below) or [outer])
    for child in module.children.values():
        if child not in inside:
            found.extend(below[child])
    return found


def _inner_containers(
    outer: _Candidate, below: dict[_Module, list[_Candidate]]
) -> list[_Candidate]:
    """The containers in an outer one's members that it gives way to; empty if it does not.

    Those at one place of all members ("blocks" of every stage) are judged together, so a stage of
    one block is like the others.
    """
    by_place: dict[str, list[_Candidate]] = {}
    for member in outer.members:
        for inner in below[member]:
            if inner.is_composite:
                by_place.setdefault(inner.path[len(member.path) :], []).append(inner)
    found = [
        inner
        for place, group in by_place.items()
        if any(candidate.gives_blocks(is_the_child=not place) for candidate in group)
        for inner in group
    ]
    inside = sum(inner.total for inner in found)
    return found if (outer.total - inside) * _INSIDE_PER_OUTSIDE <= inside else []


def _candidates(module: _Module) -> list[_Candidate]:
    """Containers that ``module`` itself may be; several if it holds several numbered series."""
    children = list(module.children.values())
    composite = [child for child in children if child.is_composite]
    if (
        module.path
        and not module.called
        and all(child.called for child in children)
        and _has_same_class(composite)
    ):
        return [_Candidate(module.path, _sorted(composite))]
    return [
        _Candidate(module.path, _sorted(members))
        for text, series in _series(module).items()
        if (members := _blocks_of(text, series))
    ]


def _series(module: _Module) -> dict[str, list[_Module]]:
    """Children with a number at the end of their names, by the text before it."""
    series: dict[str, list[_Module]] = {}
    for name, child in module.children.items():
        match = _NUMBERED.fullmatch(name)
        if match:
            series.setdefault(match[1], []).append(child)
    return series


def _blocks_of(text: str, series: Sequence[_Module]) -> list[_Module]:
    composite = [child for child in series if child.is_composite]
    if composite and not text:
        return composite
    if _has_same_class(composite) or _has_alike(composite):
        return composite
    # plain layers, for models without blocks
    return list(series) if not composite and len(series) > 1 else []


def _has_alike(modules: Iterable[_Module]) -> bool:
    return max(Counter(module.likeness for module in modules).values(), default=0) > 1


def _has_same_class(modules: Iterable[_Module]) -> bool:
    unknown = (None, *_PLAIN_CONTAINERS)
    kinds = Counter(module.kind for module in modules if module.kind not in unknown)
    return max(kinds.values(), default=0) > 1


def _sorted(modules: Sequence[_Module]) -> list[_Module]:
    """By ascending number; those without one keep their order, in front."""
    return sorted(modules, key=lambda module: block_number(module.path))


def block_number(path: str) -> int:
    """The number at the end of a path, -1 if there is none."""
    match = _NUMBERED.fullmatch(path.rpartition(".")[2])
    return int(match[2]) if match else -1
