"""Places in torch's files, and our lines put there.

A place is a statement inside a function or class, found by its kind and a regular expression; it
must be there exactly once.  So nothing of torch is kept here, and a file that changed is noticed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from upstream.errors import StackError
from upstream.manifest import Edit


class AnchorError(StackError):
    """A place is not there, or there more than once."""


def apply_edit(source: str, edit: Edit, text: str) -> str:
    """``source`` with ``text`` at the place of ``edit``.

    Raises:
        AnchorError: the place is not found exactly once.
    """
    scope = _scope(ast.parse(source), edit)
    lines = source.splitlines(keepends=True)
    if edit.place == "end":
        last = scope.body[-1]
        return _inserted(
            lines, last.end_lineno or last.lineno, last.col_offset, "\n" + text.lstrip("\n")
        )
    found = [node for node in _statements(scope.body) if _matches(node, edit, lines)]
    if len(found) != 1:
        raise AnchorError(
            f"{edit.file}: {edit.scope or 'module'}: {len(found)} statements {edit.statement} match "
            f"{edit.match!r}; one is wanted"
        )
    (node,) = found
    first, last_line = _first_line(node), node.end_lineno or node.lineno
    if edit.place == "within":
        return _within(lines, node, edit, text)
    if edit.place == "before":
        return _inserted(lines, _above_comments(lines, first - 1), node.col_offset, text)
    if edit.place == "after":
        return _inserted(lines, last_line, node.col_offset, text)
    kept = lines[: first - 1] + lines[last_line:]
    return _inserted(kept, first - 1, node.col_offset, text)


def _scope(tree: ast.Module, edit: Edit) -> ast.Module | ast.ClassDef | ast.FunctionDef:
    scope: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for name in edit.scope.split(".") if edit.scope else ():
        found = [
            node
            for node in _statements(scope.body)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
        ]
        if len(found) != 1:
            raise AnchorError(f"{edit.file}: {len(found)} of {edit.scope} are there; one is wanted")
        scope = found[0]
    return scope


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, also inside others but not inside functions and classes."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _extent(node: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement, of a compound one of its header."""
    end = node.end_lineno or node.lineno
    body = getattr(node, "body", None)
    if body:
        end = max(node.lineno, body[0].lineno - 1)
    return _first_line(node), end


def _matches(node: ast.stmt, edit: Edit, lines: list[str]) -> bool:
    if type(node).__name__ != edit.statement:
        return False
    first, end = _extent(node)
    return re.search(edit.match, " ".join("".join(lines[first - 1 : end]).split())) is not None


def _above_comments(lines: list[str], at: int) -> int:
    """``at``, or in front of the comments that stand on it: they belong to what is behind."""
    while at > 0 and lines[at - 1].lstrip().startswith("#"):
        at -= 1
    return at


def _within(lines: list[str], node: ast.stmt, edit: Edit, text: str) -> str:
    first, end = _extent(node)
    old = "".join(lines[first - 1 : end])
    new, count = re.subn(edit.part, lambda _: text, old)
    if count != 1:
        raise AnchorError(
            f"{edit.file}: {edit.scope}: {count} parts match {edit.part!r}; one is wanted"
        )
    return "".join([*lines[: first - 1], new, *lines[end:]])


def _inserted(lines: list[str], at: int, indent: int, text: str) -> str:
    blank, text = re.match(r"\n*", text).group(), text.strip("\n")  # type: ignore[union-attr]
    block = textwrap.indent(textwrap.dedent(text), " " * indent) + "\n"
    return "".join([*lines[:at], blank, block, *lines[at:]])
