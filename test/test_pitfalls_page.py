"""docs/pitfalls.md: one row for each known fault, each with tests that exist or a reason."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
#: A test as the page names it: the file, two colons, the function.
TEST = re.compile(r"`(test/[\w/]+\.py)(?:::(\w+))?`")
#: Number, fault, what covers it.
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
FAULTS = 57


def test_every_fault_has_a_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, FAULTS + 1))


def test_every_row_names_tests() -> None:
    for number, _, covered_by in ROWS:
        assert any(function for _, function in TEST.findall(covered_by)), number


def test_named_tests_exist() -> None:
    named = TEST.findall(TEXT)
    assert len(named) > FAULTS
    for file, function in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not function or re.search(rf"^ *def {function}\(", text, re.MULTILINE), (
            file,
            function,
        )


def test_readme_links_the_page() -> None:
    assert "(docs/pitfalls.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
