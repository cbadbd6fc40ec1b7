"""The manifest: which commits the stack has, in order, and what each is made of.

The TOML files under ``manifest/`` are read in the order of their names.  Everything is checked when
it is read: a misspelt key, a version that is not known or a missing text is an error that names the
commit.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream.errors import StackError

HERE = Path(__file__).parent
MANIFEST = HERE / "manifest"

PLACES = ("before", "after", "replace", "within", "end")
_TITLE = re.compile(r"\[inductor\](\[comm_overlap\])? \S")


@dataclass(frozen=True)
class Edit:
    """New lines of ours in a file of torch, and where they go.

    Args:
        file: path from the tree's root.
        scope: dotted name of the function or class, "" for the module.
        statement: class of :mod:`ast`, such as "If"; "" for ``place = "end"``.
        match: regular expression found in the statement (of a compound one: in its header).
        place: "before", "after" or "replace" the statement, "within" it, or at the "end" of the scope.
        text: the new lines, or with "within" the new text.
        part: with "within" the regular expression of what the text stands for.
        generator: instead of ``text``: "flags" makes the lines from the package's table of flags.
        versions: torch releases that need it; empty for all.
    """

    file: str
    scope: str
    place: str
    text: str = ""
    statement: str = ""
    match: str = ""
    part: str = ""
    generator: str = ""
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class TestFile:
    """A test file of the package.

    Args:
        path: from the repository's root.
        only: names of the test functions to take; empty for all.
        without: names of tests (``test_x`` or ``TestY.test_x``) to leave out, with what they need.
        name: of the file in the tree, where a file of ours is divided.
    """

    __test__ = False  # it is no test, whatever pytest thinks of its name

    path: str
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Measured:
    """Rows of a table among our results; ``rows`` are regular expressions, each must be found."""

    page: str
    rows: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class Commit:
    """One idea.

    Args:
        title: with its tag.
        summary: what it does.
        motivation: why.
        gives_up: what it costs.
        gains: what it brings.
        replaces: pairs (name in torch, name that takes its place).
        modules: of the package, paths below ``comm_overlap/``.
        moved: other files of ours, paths from the repository's root.
        support: modules of ``torch_patches.testing``, by file name.
        tests: of the package.
        new: files that exist upstream only, paths below ``tools/upstream/new``.
        edits: of torch's files, or of ours where they must read differently in the tree.
        fault: the tests fail without the edits.
        versions: torch releases that need the commit; empty for all.
        absent: why the others do not.
    """

    title: str
    summary: str
    motivation: str
    gives_up: str
    gains: str
    replaces: tuple[tuple[str, str], ...] = ()
    measured: Measured | None = None
    modules: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    support: tuple[str, ...] = ()
    tests: tuple[TestFile, ...] = ()
    new: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    fault: bool = False
    versions: tuple[str, ...] = ()
    absent: str = ""

    def serves(self, version: str) -> bool:
        """Whether a torch of this release needs it."""
        return not self.versions or version in self.versions


@dataclass(frozen=True)
class OutOfTree:
    """Files that are in no commit (a glob from the repository's root), and why."""

    files: str
    reason: str


@dataclass(frozen=True)
class Manifest:
    """The whole stack.

    Args:
        torch: releases ("2.13") whose trees are known.
        max_lines: changed lines that a commit may have.
        flags_left_out: flags of the package that have no wiring in the tree.
        out_of_tree: what stays here.
        commits: in order.
    """

    torch: tuple[str, ...]
    max_lines: int
    flags_left_out: tuple[str, ...]
    out_of_tree: tuple[OutOfTree, ...]
    commits: tuple[Commit, ...]


def load_manifest(folder: Path = MANIFEST) -> Manifest:
    """Reads and checks all files.

    Raises:
        StackError: naming the file and, where it is in one, the commit.
    """
    top: dict[str, Any] = {}
    commits: list[Commit] = []
    out: list[OutOfTree] = []
    for path in sorted(folder.glob("*.toml")):
        data = tomllib.loads(path.read_text())
        for table in data.pop("commit", []):
            commits.append(_commit(table, path.name))
        out += [_made(OutOfTree, item, path.name) for item in data.pop("out_of_tree", [])]
        if twice := sorted(set(top) & set(data)):
            raise StackError(f"{path.name}: {twice[0]} is given twice")
        top.update(data)
    top = {key: tuple(value) if isinstance(value, list) else value for key, value in top.items()}
    made = _made(
        Manifest,
        {**top, "commits": tuple(commits), "out_of_tree": tuple(out)},
        "manifest",
    )
    _check(made)
    return made


def _commit(table: Mapping[str, Any], where: str) -> Commit:
    table = dict(table)
    where = f"{where}: {table.get('title', 'a commit without a title')}"
    for name in ("modules", "moved", "support", "new", "versions"):
        table[name] = _texts(table.get(name, ()), f"{where}: {name}")
    for name in ("summary", "motivation", "gives_up", "gains", "absent"):
        if name in table:
            table[name] = " ".join(str(table[name]).split())
    table["replaces"] = tuple((str(old), str(new)) for old, new in table.get("replaces", ()))
    table["tests"] = tuple(_test(item, where) for item in table.get("tests", ()))
    table["edits"] = tuple(
        _made(Edit, {**item, "versions": _texts(item.get("versions", ()), where)}, where)
        for item in table.pop("edit", ())
    )
    if "measured" in table:
        item = table["measured"]
        rows = _texts(item.get("rows", ()), where)
        table["measured"] = _made(Measured, {**item, "rows": rows}, where)
    return _made(Commit, table, where)


def _test(item: object, where: str) -> TestFile:
    if isinstance(item, str):
        return TestFile(item)
    if not isinstance(item, Mapping):
        raise StackError(f"{where}: {item!r} is no test file")
    lists = {key: _texts(item.get(key, ()), where) for key in ("only", "without")}
    return _made(TestFile, {**item, **lists}, where)


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise StackError(f"{where}: {value!r} is no list")
    if wrong := [item for item in value if not isinstance(item, str)]:
        raise StackError(f"{where}: {wrong[0]!r} is no text")
    return tuple(value)


def _made(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - set(fields)):
        raise StackError(f"{where}: unknown key {unknown[0]!r}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        raise StackError(f"{where}: {missing[0]} is missing")
    return kind(**values)


def _check(manifest: Manifest) -> None:
    titles: set[str] = set()
    for commit in manifest.commits:
        if not _TITLE.match(commit.title):
            raise StackError(f"{commit.title!r}: a title starts with its tag")
        if commit.title in titles:
            raise StackError(f"{commit.title!r}: two commits with this title")
        titles.add(commit.title)
        if empty := [
            n for n in ("summary", "motivation", "gives_up", "gains") if not getattr(commit, n)
        ]:
            raise StackError(f"{commit.title!r}: {empty[0]} is empty")
        ours = (commit.modules, commit.moved, commit.support, commit.new, commit.tests)
        if not any((*ours, commit.edits)):
            raise StackError(f"{commit.title!r}: nothing is in it")
        if commit.fault and commit.measured is None:
            raise StackError(f"{commit.title!r}: a fix says what was measured")
        if bool(commit.versions) != bool(commit.absent):
            raise StackError(f"{commit.title!r}: versions and absent go together")
        for version in commit.versions:
            if version not in manifest.torch:
                raise StackError(f"{commit.title!r}: torch {version} is not known")
        for edit in commit.edits:
            _check_edit(edit, commit.title)


def _check_edit(edit: Edit, title: str) -> None:
    where = f"{title!r}: edit of {edit.file}"
    if edit.place not in PLACES:
        raise StackError(f"{where}: place {edit.place!r} is none of {', '.join(PLACES)}")
    if (edit.place == "end") == bool(edit.statement and edit.match):
        raise StackError(f"{where}: statement and match say where, except with 'end'")
    if (edit.place == "within") != bool(edit.part):
        raise StackError(f"{where}: part goes with 'within'")
    if edit.generator not in ("", "flags"):
        raise StackError(f"{where}: there is no generator {edit.generator!r}")
    written = bool(edit.text.strip())
    if (written and edit.generator) or not (written or edit.generator or edit.place == "within"):
        raise StackError(f"{where}: either text, or a generator")
