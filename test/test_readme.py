"""The README speaks of the flags that exist, with their defaults, and shows no stale table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_patches import config

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
FLAG_ROWS = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", README, re.MULTILINE))


def test_flag_table_lists_every_flag_with_its_default() -> None:
    assert {flag.name: repr(flag.default) for flag in config.FLAGS} == FLAG_ROWS


@pytest.mark.parametrize("mode", config.BUCKETING_MODES)
def test_every_mode_is_described(mode: str) -> None:
    assert f"`{mode!r}`" in README


@pytest.mark.parametrize("path", re.findall(r"(?:test|torch_patches)/[\w/]+\.py", README))
def test_paths_exist(path: str) -> None:
    assert (Path(__file__).parent.parent / path).is_file()
