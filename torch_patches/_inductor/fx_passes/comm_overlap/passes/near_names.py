"""Which known names a user may have meant by a pattern that matches none of them.

    asked             known                              answer
    layer.*           layers.0, layers.1, norm           layers.*
    layers.[0-5]      model.layers.0, model.layers.1     model.layers.[0-5]
    model.layers.*    layers.0, layers.1                 layers.*
    layers.99         layers.0, layers.1                 layers.*

Names are compared by *shape*: with every number and every wildcard written as ``*``.  So the
names of 100 equal layers count once, and an answer has the asked pattern's own numbers where these
match something.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from torch_patches._inductor.fx_passes.comm_overlap.passes.module_pattern import (
    PatternError,
    PatternIndex,
    parse_pattern,
)

_LIMIT = 3
"""Names in an answer."""

_VARIABLE = re.compile(r"\*|\[[^\[\]]*\]|[0-9]+")


class KnownNames:
    """Names of modules and parameters, with all that contains them.

    Args:
        names: dotted; their order does not matter.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._paths = [tuple(name.split(".")) for name in sorted(set(names)) if name]
        self._example: dict[str, str] = {}
        """A known name of each shape."""
        self._known: dict[str, None] = {}
        for path in self._paths:
            for depth in range(1, len(path) + 1):
                name = ".".join(path[:depth])
                if name not in self._known:
                    self._known[name] = None
                    self._example.setdefault(_shape(name), name)

    def __iter__(self) -> Iterator[str]:
        """The names and what contains them; what stands in a name before it, else sorted."""
        return iter(self._known)

    def __contains__(self, name: str) -> bool:
        """Whether it is one of the names, or contains one."""
        return name in self._known

    def near(self, asked: str) -> list[str]:
        """At most three patterns or names that match something and resemble ``asked``."""
        answers: dict[str, None] = {}
        for shape in self._near_shapes(_shape(asked)):
            answers.setdefault(self._answer(asked, shape))
        return list(answers)

    def tops(self) -> list[str]:
        """The first components of the names, sorted."""
        return sorted({path[0] for path in self._paths})

    def _near_shapes(self, asked: str) -> list[str]:
        # A prefix too few, as where another module holds the model, or too many.
        inside = [shape for shape in self._example if shape.endswith("." + asked)]
        if inside:
            return sorted(inside, key=lambda shape: (shape.count("."), shape))[:_LIMIT]
        rest = asked
        while rest:
            if rest in self._example:
                return [rest]
            rest = rest.partition(".")[2]
        depth = asked.count(".")
        alike = [shape for shape in self._example if shape.count(".") == depth]
        return difflib.get_close_matches(asked, alike, n=_LIMIT) or difflib.get_close_matches(
            asked, self._example, n=_LIMIT
        )

    def _answer(self, asked: str, shape: str) -> str:
        """A shape with the numbers and wildcards of ``asked``, else as a pattern, else a name."""
        stars = shape.count("*")
        # From the right: what stands before the asked name, if anything, it does not tell.
        own = iter((["*"] * stars + _VARIABLE.findall(asked))[-stars:])
        for candidate in (re.sub(r"\*", lambda _: next(own), shape), shape):
            if self._matches_something(candidate):
                return candidate
        return self._example[shape]

    def _matches_something(self, text: str) -> bool:
        try:
            index = PatternIndex([parse_pattern(text)])
        except PatternError:  # two numbers in one component have no pattern
            return False
        return any(index.matches(path) for path in self._paths)


def near_names(asked: str, names: Iterable[str]) -> list[str]:
    """At most three of ``names``, as they are, that resemble ``asked``: never a pattern."""
    candidates = sorted(set(names))
    affixed = [
        name
        for name in candidates
        if name.endswith("." + asked) or (name and asked.endswith("." + name))
    ]
    return affixed[:_LIMIT] or difflib.get_close_matches(asked, candidates, n=_LIMIT)


def _shape(name: str) -> str:
    return _VARIABLE.sub("*", name)
