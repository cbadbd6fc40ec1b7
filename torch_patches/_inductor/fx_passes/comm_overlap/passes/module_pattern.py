"""Patterns of module names, and an index that finds which of many match a name.

A pattern is a dotted name whose components may hold one wildcard each:

    ``layers.3``         itself, and everything below it: ``layers.3.attention.wq.weight``
    ``layers.*``         any one component: ``layers.0``, ``layers.1``, ...
    ``layers.[0-15]``    integers from 0 to 15, both included
    ``layers.[0,2,5-7]`` a list of integers and ranges
    ``block_[0-3]``      text around a wildcard; ``h*`` is any component that begins with ``h``

Only whole components match: ``layers.1`` does not match ``layers.10``.  Integers match by value, so
``block_[0-3]`` matches ``block_03``.  No FX and no torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_MAX_DIGITS = 9
"""Of an integer in a pattern or a name.  No model has more children; Python's int() has a limit."""

_WILD = re.compile(r"\*|\[(?P<numbers>[^\[\]]*)\]")
_ONE_ITEM = re.compile(r"(?P<low>[0-9]+)(?:-(?P<high>[0-9]+))?")


class PatternError(ValueError):
    """A text is no pattern; the message is the end of a sentence that names the text."""


@dataclass(frozen=True)
class Wildcard:
    """One component with one ``*`` (``numbers`` is None) or one ``[...]``."""

    before: str
    numbers: tuple[range, ...] | None
    after: str

    def has(self, number: int | None) -> bool:
        """Whether it stands for ``number`` between ``before`` and ``after``; None: no integer."""
        if self.numbers is None:
            return True
        return number is not None and any(number in numbers for numbers in self.numbers)


def _between(component: str, before: str, after: str) -> str | None:
    end = len(component) - len(after)
    if end < len(before) or not (component.startswith(before) and component.endswith(after)):
        return None
    return component[len(before) : end]


def _integer(text: str) -> int | None:
    # isdigit alone accepts superscripts and the like.
    if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS:
        return int(text)
    return None


Pattern = tuple[str | Wildcard, ...]


def parse_pattern(text: str) -> Pattern:
    """The components of a pattern.

    Raises:
        PatternError: an empty text or component, an unbalanced bracket, two wildcards in one
            component, or brackets that hold no integers.
    """
    if not text:
        raise PatternError("is empty")
    if text.startswith(".") or text.endswith("."):
        raise PatternError("begins or ends with a dot")
    components = text.split(".")
    if not all(components):
        raise PatternError("has two dots in a row")
    return tuple(_parse_component(component) for component in components)


def _parse_component(component: str) -> str | Wildcard:
    found = list(_WILD.finditer(component))
    rest = _WILD.sub("", component)
    if "[" in rest or "]" in rest:
        raise PatternError(f"has a bracket without its partner in {component!r}")
    if not found:
        return component
    if len(found) > 1:
        raise PatternError(f"has two wildcards in {component!r}: one for each component")
    wild = found[0]
    numbers = wild["numbers"]
    parsed = None if numbers is None else _parse_numbers(numbers)
    return Wildcard(component[: wild.start()], parsed, component[wild.end() :])


def _parse_numbers(text: str) -> tuple[range, ...]:
    ranges = []
    for part in text.split(","):
        found = _ONE_ITEM.fullmatch(part)
        if found is None:
            allowed = "integers and ranges, without spaces, like [0,2,5-7]"
            raise PatternError(f"has [{text}], which is not made of {allowed}")
        low, high = found["low"], found["high"] or found["low"]
        if max(len(low), len(high)) > _MAX_DIGITS:
            raise PatternError(f"has [{text}], with an integer of more than {_MAX_DIGITS} digits")
        if int(low) > int(high):
            raise PatternError(f"has [{text}], where {low} is above {high}")
        ranges.append(range(int(low), int(high) + 1))
    return tuple(ranges)


@dataclass(frozen=True)
class Match:
    """Pattern number ``pattern`` matches the first ``depth`` components of a name."""

    pattern: int
    depth: int


@dataclass(frozen=True)
class _Affixes:
    """The text around a wildcard."""

    before: str
    after: str


@dataclass
class _Node:
    """What may follow one beginning of patterns."""

    literal: dict[str, _Node] = field(default_factory=dict)
    wild: dict[_Affixes, dict[Wildcard, _Node]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def child(self, part: str | Wildcard) -> _Node:
        """The node behind a part of a pattern, made if there is none."""
        if isinstance(part, str):
            return self.literal.setdefault(part, _Node())
        alike = self.wild.setdefault(_Affixes(part.before, part.after), {})
        return alike.setdefault(part, _Node())

    def following(self, component: str) -> Iterator[_Node]:
        """The nodes behind all parts that match a component of a name."""
        if (exact := self.literal.get(component)) is not None:
            yield exact
        for affixes, alike in self.wild.items():
            middle = _between(component, affixes.before, affixes.after)
            if middle is None:
                continue
            number = _integer(middle)  # once for all ranges
            for wildcard, child in alike.items():
                if wildcard.has(number):
                    yield child


class PatternIndex:
    """Many patterns as one tree over components.

    A look-up costs the name's components times the wildcards that are still possible: literal
    components cost one dictionary look-up, however many patterns there are.
    """

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._root = _Node()
        for number, pattern in enumerate(patterns):
            node = self._root
            for part in pattern:
                node = node.child(part)
            node.ends.append(number)

    def matches(self, components: Sequence[str]) -> list[Match]:
        """All patterns that match a beginning of a name, by ascending number."""
        found: list[Match] = []
        active = [self._root]
        for depth, component in enumerate(components, start=1):
            active = [following for node in active for following in node.following(component)]
            if not active:
                break
            found.extend(Match(number, depth) for node in active for number in node.ends)
        return sorted(found, key=lambda match: match.pattern)
