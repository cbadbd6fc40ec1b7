"""The mutation check: what it changes, and which tests it runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SOURCE = '''
LIMIT = 3

def f(x: int = 1) -> int:
    """Up to 3."""
    log.debug("f %s", x)
    total = 0
    for y in range(x):
        if y < LIMIT and not done(y):
            total += y
            continue
        note(y)
    return max(total, -x)
'''


def changed(tool: Any, number: int | None) -> str:
    return ast.unparse(tool.Changer("f.py", number).visit(ast.parse(SOURCE)))


def test_every_mutant_is_one_change(tool: Any) -> None:
    lister = tool.Changer("f.py")
    lister.visit(ast.parse(SOURCE))
    plain = changed(tool, None)
    assert plain == ast.unparse(ast.parse(SOURCE))
    for mutant in lister.found:
        lines = zip(plain.splitlines(), changed(tool, mutant.number).splitlines(), strict=True)
        assert sum(a != b for a, b in lines) == 1, mutant
    assert sorted(m.what for m in lister.found) == [
        "0 -> 1", "3 -> 4", "And -> Or", "Lt -> LtE", "condition turned over",
        "continue -> break", "dropped: note(y)", "dropped: total += y", "max -> min", "not dropped",
    ]  # fmt: skip
    functions = {m.what: m.function for m in lister.found}
    assert functions["3 -> 4"] == 0
    assert functions["Lt -> LtE"] == 4


def test_all_files_have_mutants_that_compile(tool: Any) -> None:
    mutants = tool.all_mutants()
    assert {m.file.split("/")[0] for m in mutants} == {"graph", "passes", "estimate"}
    assert len(mutants) > 5000
    for mutant in tool.sample(20, 0):
        loader = tool._MutantLoader("m", str(tool.SOURCES / mutant.file))
        loader.mutant = mutant
        assert loader.get_code("m") is not None


def test_fewer_mutants_are_the_first_of_more(tool: Any) -> None:
    assert tool.sample(5, 7) == tool.sample(9, 7)[:5]
    assert tool.sample(5, 7) != tool.sample(5, 8)


def test_close_and_quick_tests_come_first_and_others_are_left_out(tool: Any) -> None:
    both = ["graph/nodes.py:10", "graph/nodes.py:20"]
    calls = {
        "slow": {"seconds": 9.0, "functions": both},
        "quick": {"seconds": 0.2, "functions": both},
        "close": {"seconds": 0.5, "functions": both[:1]},
        "too slow": {"seconds": 30.0, "functions": ["graph/nodes.py:10"]},
        "elsewhere": {"seconds": 0.1, "functions": ["graph/tags.py:10"]},
    }
    runner = tool.Runner(calls)
    chosen, seconds = runner.tests(tool.Mutant("graph/nodes.py", 12, 10, "", 0))
    assert (chosen, round(seconds, 3)) == (["close", "quick", "slow"], 9.7)
    assert runner.tests(tool.Mutant("graph/nodes.py", 22, 20, "", 0))[0] == ["quick", "slow"]
    assert runner.tests(tool.Mutant("graph/nodes.py", 1, 0, "", 0))[0] == chosen
    assert runner.run(tool.Mutant("graph/sizes.py", 1, 0, "", 0)) == "not entered"


def test_files_take_turns_and_that_of_the_module_is_first(tool: Any) -> None:
    here = ["graph/nodes.py:10"]
    calls = {
        f"{file}::{number}": {"seconds": number + shift, "functions": here}
        for number in (1.0, 2.0)
        for file, shift in (("test_a.py", 0.0), ("test_b.py", 0.1), ("test_nodes.py", 5.0))
    }
    chosen, _ = tool.Runner(calls).tests(tool.Mutant("graph/nodes.py", 12, 10, "", 0))
    own = ["test_nodes.py::1.0", "test_nodes.py::2.0"]
    assert chosen == [
        *own, "test_a.py::1.0", "test_b.py::1.0", "test_a.py::2.0", "test_b.py::2.0"
    ]  # fmt: skip


def test_those_that_lived_are_taken_again(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "mutants.json"
    mutants = tool.sample(3, 7)
    outcomes = ["killed", "survived", "not entered"]
    results = [{**asdict(m), "outcome": o} for m, o in zip(mutants, outcomes, strict=True)]
    path.write_text(json.dumps(results))
    assert tool.lived(path) == mutants[1:]
