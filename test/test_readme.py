"""The README's table of flags is that of the code, and the README stays one that is read."""

from __future__ import annotations

import re

from pages import text_of

from torch_patches import config

README = text_of("README.md")
FLAG_ROWS = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", README, re.MULTILINE))


def test_flag_table_lists_every_flag_with_its_default() -> None:
    assert {flag.name: repr(flag.default) for flag in config.FLAGS} == FLAG_ROWS


def test_order_is_result_commands_use_flags_guarantees_limits() -> None:
    titles = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert titles == [
        "Two commands",
        "Three lines",
        "Which mode",
        "Flags",
        "What holds",
        "Limits",
        "How to turn it off",
        "Compared with",
        "Docs",
    ]
    assert README.index("docs/timeline.svg") < README.index("```text") < README.index("## Two")
    assert len(README.splitlines()) < 200


def test_commands_of_the_guarantees_select_tests() -> None:
    """Files exist (test_docs_pages.py); here the words behind ``-k`` stand in a test of theirs."""
    chosen = re.findall(r'PYTEST_ARGS="-k (\w+) ([\w/.]+)"', README)
    assert len(chosen) >= 3
    for word, file in chosen:
        assert re.search(rf"def test_\w*{word}", text_of(file)), (word, file)
