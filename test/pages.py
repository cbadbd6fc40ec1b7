"""The pages of this repository, and the code blocks in them; what runs the blocks is in test_docs_pages.py.

```python     runs, in one namespace for each page
```console    each line that begins with "$ " is a command, the lines below it are what it prints
```text       what the Python block above prints
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NOT_OURS = frozenset({"build", "dist"})
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*(\S*)\s*$")
#: Four spaces behind an empty line are a code block too, but where they continue a list.
_INDENTED = re.compile(r"^(?: {4}|\t)\S")
_LIST = re.compile(r"^\s*(?:[-*+]|\d+\.)\s")
#: With this comment a command ends with that exit status.
_STATUS = re.compile(r"# exit status (\d)")


@dataclass(frozen=True)
class Block:
    """A code block.

    Args:
        line: of its first line of text, from 1.
        language: what stands behind the fence; "indented" without one.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a console block.

    Args:
        status: with which it ends.
        shown: lines that it prints, among others.
    """

    text: str
    status: int
    shown: tuple[str, ...]


def all_pages() -> list[str]:
    """Markdown files, by their paths in the repository."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    ours = (p for p in found if not any(x.startswith(".") or x in _NOT_OURS for x in p.parts))
    return sorted(p.as_posix() for p in ours if not p.parts[0].endswith(".egg-info"))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_in(text: str, page: str = "") -> list[Block]:
    """All code blocks of a page, in order; one that is not closed ends with the page."""
    found: list[Block] = []
    fence = language = ""
    lines: list[str] = []
    before, in_list = "", False
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if fence:
            if match and match[2].startswith(fence) and not match[3]:
                found.append(_block(page, number - len(lines), language, lines))
                fence = ""
            else:
                lines.append(line)
        elif match:
            fence, language, lines = match[2], match[3], []
        elif _INDENTED.match(line) and not before.strip() and not in_list:
            found.append(Block(page, number, "indented", line.strip()))
        if not fence and line.strip():
            in_list = bool(_LIST.match(line)) or (in_list and line.startswith((" ", "\t")))
        before = line
    if fence:
        found.append(_block(page, number - len(lines) + 1, language, lines))
    return found


def _block(page: str, line: int, language: str, lines: list[str]) -> Block:
    return Block(page, line, language, "".join(f"{each}\n" for each in lines))


def blocks_of(page: str) -> list[Block]:
    return blocks_in(text_of(page), page)


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block; "..." and empty lines stand for other lines.

    Raises:
        ValueError: it begins with something else than a command.
    """
    found: list[Command] = []
    lines = block.text.replace("\\\n", "").splitlines()
    for line in lines:
        if line.startswith("$ "):
            status = _STATUS.search(line)
            found.append(Command(line.removeprefix("$ "), int(status[1]) if status else 0, ()))
        elif not found:
            raise ValueError(f"{block}: a console block begins with a command, behind '$ '")
        elif line.strip() not in ("", "..."):
            last = found[-1]
            found[-1] = Command(last.text, last.status, (*last.shown, line))
    return found


def words(text: str) -> str:
    """A text as one line, for comparing whatever the width of a terminal."""
    return " ".join(text.split())
