"""Plans by name: which parameters share a bucket, as written by a user.

    [["tok_embeddings"], "layers.*", ["norm", "output"]]

A text gives one bucket for each module that it matches, named by the module: ``layers.0``,
``layers.1``, ...  A list is one bucket, named by its items: ``norm+output``; with wildcards inside
it is still one.  :mod:`.module_pattern` tells what matches.

A plan is read once (:func:`parse_plan`), checked against the names of each graph
(:meth:`ModulePlan.check`), and asked for the bucket of a name (:meth:`ModulePlan.bucket_of`).
Every answer is a function of the plan and the names, so ranks with equal names agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch_patches._inductor.fx_passes.comm_overlap.passes.module_pattern import (
    PatternError,
    PatternIndex,
    parse_pattern,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.near_names import KnownNames, near_names

Entry = tuple[str, ...] | str

UNMATCHED_FLAG = "aten_distributed_optimizations.module_plan_unmatched"
"""The flag that makes errors about names unknown to one graph warnings."""

_EXAMPLE = '[["tok_embeddings"], "layers.*", ["norm", "output"]]'
_SHOWN = 60
"""Characters of a user's value in a message."""
_TOPS = 5
"""Top-level names in a message that has no near names."""


class ModulePlanError(ValueError):
    """A module plan, or what refers to it, is wrong; the text says where and what is allowed."""


@dataclass(frozen=True)
class _Item:
    """One text of a plan and the number of its entry, from 0."""

    text: str
    entry: int


@dataclass(frozen=True)
class ModulePlan:
    """A plan that :func:`parse_plan` found well-formed.

    Args:
        entries: texts and tuples of texts.  Equality, hash and ``repr`` are theirs.
    """

    entries: tuple[Entry, ...]
    _items: tuple[_Item, ...] = field(init=False, repr=False, compare=False)
    _index: PatternIndex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        items = tuple(
            _Item(text, number)
            for number, entry in enumerate(self.entries)
            for text in ((entry,) if isinstance(entry, str) else entry)
        )
        object.__setattr__(self, "_items", items)
        index = PatternIndex(parse_pattern(item.text) for item in items)
        object.__setattr__(self, "_index", index)

    def bucket_of(self, path: str) -> str | None:
        """Name of the bucket for a module's path or a parameter's name; None if no entry matches.

        Where several entries match, which :meth:`check` refuses, the first in the plan counts.
        """
        components = path.split(".")
        found = self._index.matches(components)
        if not found:
            return None
        return self._bucket(self._items[found[0].pattern].entry, components[: found[0].depth])

    def _bucket(self, entry_number: int, matched: list[str]) -> str:
        entry = self.entries[entry_number]
        return ".".join(matched) if isinstance(entry, str) else "+".join(entry)

    def check(
        self,
        parameters: Collection[str],
        modules: Collection[str],
        unmatched: Literal["error", "warn"],
    ) -> list[str]:
        """Compares the plan with the names of one graph.

        Names of modules count as much as those of parameters: a backward graph knows only modules.

        Args:
            parameters: names of the parameters.
            modules: paths of the modules that made nodes.
            unmatched: whether an item that matches nothing is an error or a sentence returned.

        Returns:
            A sentence for each item that matches nothing; empty unless ``unmatched`` is "warn".

        Raises:
            ModulePlanError: two entries match one name; two entries make buckets of one name; with
                "error", an item matches no name.
        """
        seen: set[int] = set()
        makers: dict[str, dict[int, None]] = {}
        for kind, names in (("parameter", parameters), ("module", modules)):
            self._check_names(kind, sorted(set(names)), seen, makers)
        for bucket, entries in makers.items():
            if len(entries) > 1:
                raise self._same_bucket(bucket, *sorted(entries)[:2])
        missing = [item for number, item in enumerate(self._items) if number not in seen]
        if not missing:
            return []
        known = KnownNames([*parameters, *modules])
        sentences = [
            f"{self._place(item)} matches no parameter and no module of this graph. "
            + _nearest(known.near(item.text), known)
            for item in missing
        ]
        return _raise_or_return(sentences, unmatched)

    def _check_names(
        self, kind: str, names: list[str], seen: set[int], makers: dict[str, dict[int, None]]
    ) -> None:
        """Adds the items that match to ``seen``, and to ``makers`` the entries of each bucket."""
        clashes: dict[tuple[int, int], list[str]] = {}
        for name in names:
            components = name.split(".")
            found = self._index.matches(components)
            for match in found:
                seen.add(match.pattern)
                entry = self._items[match.pattern].entry
                makers.setdefault(self._bucket(entry, components[: match.depth]), {})[entry] = None
                if entry != self._items[found[0].pattern].entry:
                    pair = (found[0].pattern, match.pattern)
                    clashes.setdefault(pair, []).append(name)
        if clashes:
            first, second = min(clashes)
            raise self._both_match(kind, first, second, clashes[first, second])

    def _both_match(self, kind: str, first: int, second: int, names: list[str]) -> ModulePlanError:
        places = [self._place(self._items[number]) for number in (first, second)]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return ModulePlanError(
            f"{places[0]} and {places[1]} both match the {kind} {names[0]!r}{more}. "
            "At most one entry may: take one away or make it narrower"
        )

    def _same_bucket(self, bucket: str, first: int, second: int) -> ModulePlanError:
        return ModulePlanError(
            f"entry {first} ({self.entries[first]!r}) and entry {second} "
            f"({self.entries[second]!r}) of the module plan both make a bucket {bucket!r}. "
            "Names of buckets must differ: write one of the entries in another way"
        )

    def _place(self, item: _Item) -> str:
        if isinstance(self.entries[item.entry], str):
            return f"{item.text!r} (entry {item.entry} of the module plan)"
        return f"{item.text!r} (in entry {item.entry} of the module plan)"


def parse_plan(value: object) -> ModulePlan:
    """Reads a plan as a user writes it: a list of texts and of lists of texts; tuples work too.

    Raises:
        ModulePlanError: it is no such list, or empty; an entry is empty, of another type or no
            pattern; one text stands twice.  Entries are counted from 0.
    """
    if not isinstance(value, (list, tuple)):
        raise ModulePlanError(
            f"a module plan is a list of names and of lists of names, like {_EXAMPLE}; "
            f"{_described(value)} is none"
        )
    if not value:
        raise ModulePlanError(
            f"the module plan is empty; it needs at least one entry, as in {_EXAMPLE}"
        )
    first_place: dict[str, int] = {}
    entries: list[Entry] = []
    for number, entry in enumerate(value):
        if isinstance(entry, (list, tuple)):
            if not entry:
                raise ModulePlanError(
                    f"entry {number} of the module plan is an empty list; it needs at least one name"
                )
            entries.append(tuple(_parse_text(item, number, first_place) for item in entry))
        else:
            entries.append(_parse_text(entry, number, first_place))
    return ModulePlan(tuple(entries))


def check_overlap_names(
    overlap: Mapping[str, str],
    buckets: Collection[str],
    modules: Collection[str],
    unmatched: Literal["error", "warn"] = "error",
) -> list[str]:
    """Compares ``module_overlap_with`` with the names of one graph.

    Args:
        overlap: name of a bucket -> path of the module whose compute shall hide it.
        buckets: names of the buckets.
        modules: paths of modules; one that contains a known module is known too.
        unmatched: as for :meth:`ModulePlan.check`.

    Returns:
        A sentence for each unknown name; empty unless ``unmatched`` is "warn".

    Raises:
        ModulePlanError: with "error", a bucket or module is not known.
    """
    known_buckets, known_modules = set(buckets), KnownNames(modules)
    sentences = []
    for bucket, module in overlap.items():
        where = f"module_overlap_with[{bucket!r}] = {module!r}"
        if bucket not in known_buckets:
            known = KnownNames(known_buckets)
            near = _nearest(near_names(bucket, known_buckets), known)
            sentences.append(f"{where}: no bucket of this graph is named {bucket!r}. {near}")
        if module not in known_modules:
            near = _nearest(near_names(module, known_modules), known_modules)
            sentences.append(f"{where}: no module of this graph is named {module!r}. {near}")
    return _raise_or_return(sentences, unmatched)


def _parse_text(value: object, entry: int, first_place: dict[str, int]) -> str:
    if not isinstance(value, str):
        raise ModulePlanError(
            f"entry {entry} of the module plan has {_described(value)}; allowed are names and lists "
            f"of names, as in {_EXAMPLE}. plan_from_modules(model, plan) makes names from modules"
        )
    text = str.__str__(value)  # of a subclass too, so that its repr is that of a str
    try:
        parse_pattern(text)
    except PatternError as error:
        raise ModulePlanError(
            f"entry {entry} of the module plan: the name {_cut(repr(text))} {error}. Names are like "
            "'layers.3', 'layers.*', 'layers.[0-5]', 'layers.[0,2,5-7]', 'block_[0-3].attention'"
        ) from None
    if text in first_place:
        raise ModulePlanError(
            f"entry {entry} of the module plan repeats {_cut(repr(text))} of entry {first_place[text]}"
            "; a name may stand once"
        )
    first_place[text] = entry
    return text


def _raise_or_return(sentences: list[str], unmatched: Literal["error", "warn"]) -> list[str]:
    """Graph breaks split a model, so a name that one graph lacks may be another's."""
    if not sentences or unmatched == "warn":
        return sentences
    raise ModulePlanError(
        "\n".join(sentences)
        + "\nGraph breaks split a model into several graphs, so that a name may "
        f'belong to another one: then set {UNMATCHED_FLAG} = "warn"'
    )


def _nearest(near: list[str], known: KnownNames) -> str:
    if near:
        return f"Nearest: {', '.join(map(repr, near))}."
    tops = known.tops()
    if not tops:
        return "No name is known here."
    more = " and others" if len(tops) > _TOPS else ""
    return f"No name is near; names here begin with {', '.join(map(repr, tops[:_TOPS]))}{more}."


def _described(value: object) -> str:
    if isinstance(value, (str, int, float, bool, type(None))):
        return f"the {type(value).__name__} {_cut(repr(value))}"
    return f"an object of type {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
