"""How a user's estimation enters the cache key, and which measuring flags of torch are named."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate import custom
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    estimation_key,
    measured_estimators,
)

MODULES = ("own_costs", "own_rates")

PLAIN = """
def estimate(node, size):
    return 1.0 if size is None else size / 10
"""


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str | None]]:
    """Key of ``own_costs.estimate``, where the modules have these sources."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def key_of(source: str, rates: str = "", name: str = "estimate") -> str | None:
        for module, text in zip(MODULES, (source, rates), strict=True):
            (tmp_path / f"{module}.py").write_text(text)
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return estimation_key(getattr(importlib.import_module("own_costs"), name))

    yield key_of
    for module in MODULES:
        sys.modules.pop(module, None)


# -- what has a key -------------------------------------------------------------------------------


def test_no_estimation_needs_no_key() -> None:
    assert estimation_key(None) == "none"


def test_function_of_a_module_is_keyed_by_its_name_and_source(key_of) -> None:
    key = key_of(PLAIN)
    assert key is not None and key.startswith("own_costs.estimate ")
    assert key_of(PLAIN) == key
    assert key_of(PLAIN.replace("10", "11")) != key
    # something else in the file: it may be what the function calls
    assert key_of(PLAIN + "\ndef helper(): return 3\n") != key


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("import own_rates\ndef estimate(n, s): return own_rates.f()", "def f(): return 1", "def f(): return 2"),
        ("from own_rates import f\ndef estimate(n, s): return f()", "def f(): return 1", "def f(): return 2"),
        ("from own_rates import RATE\ndef estimate(n, s): return RATE", "RATE = 1", "RATE = 2"),
        ("from own_rates import R\ndef estimate(n, s): return R[1]", "R = {1: [2]}", "R = {1: [3]}"),
        ("from own_rates import R\ndef estimate(n, s): return s in R", "R = {1, 2}", "R = {1, 3}"),
        ("from own_rates import R\ndef estimate(n, s): return 1 if R else 2", "R = 1", "R = True"),
        ("from own_rates import C\ndef estimate(n, s): return C().x", "class C: x = 1", "class C: x = 2"),
        (
            "from own_rates import C\nOBJ = C()\ndef estimate(n, s): return OBJ.x",
            "class C: x = 1",
            "class C: x = 2",
        ),
        (
            "from own_rates import RATE\ndef estimate(n, s): return (lambda: RATE)()",
            "RATE = 1",
            "RATE = 2",
        ),
        (
            "from own_rates import f\ndef estimate(n, s): return [f() for _ in '1']",
            "X = 1\ndef g(): return X\ndef f(): return g()",
            "X = 2\ndef g(): return X\ndef f(): return g()",
        ),
    ],
)  # fmt: skip
def test_what_the_function_takes_from_another_module_counts(
    key_of, source: str, before: str, after: str
) -> None:
    keys = [key_of(source, rates) for rates in (before, before, after)]
    assert keys[0] == keys[1] is not None
    assert keys[2] not in (None, keys[0])


def test_global_that_changed_after_import_counts(key_of) -> None:
    source = "SCALE = 1.0\ndef estimate(node, size): return SCALE"
    key = key_of(source)
    module = sys.modules["own_costs"]
    module.SCALE = 2.0  # type: ignore[attr-defined]
    assert estimation_key(module.estimate) not in (None, key)


def test_tables_by_op_and_dtype_are_plain_values(key_of) -> None:
    source = (
        "import torch\nRATES = {torch.ops.aten.mm.default: 1.0, torch.bfloat16: 2.0}\n"
        "def estimate(node, size): return RATES.get(node.target)"
    )
    assert key_of(source) is not None


@pytest.mark.parametrize("table", ["{KEY: 1}", "{1: KEY}", "[KEY]"])
def test_tables_may_be_20_deep(key_of, table: str) -> None:
    for depth, has_key in ((19, True), (20, False)):
        key = "(" * depth + "1" + ",)" * depth
        source = f"TABLE = {table.replace('KEY', key)}\ndef estimate(n, s): return TABLE"
        assert (key_of(source) is not None) is has_key


def test_recursion_and_static_methods_have_keys(key_of) -> None:
    recursive = "def estimate(node, size): return 1.0 if not size else estimate(node, size // 2)"
    assert key_of(recursive) is not None
    nested = (
        "class Costs:\n    @staticmethod\n    def of(node, size): return 1.0\nestimate = Costs.of"
    )
    assert str(key_of(nested)).startswith("own_costs.Costs.of ")


class WithUuid:
    def __init__(self, given: object) -> None:
        self.given = given

    def __call__(self, node: object, size: int | None) -> float:
        return 1.0

    def uuid(self) -> object:
        return self.given


def test_uuid_is_the_key() -> None:
    given = ["costs-1", b"costs-1", ("costs", 1), ("costs", 2), 7]
    keys = [estimation_key(WithUuid(value)) for value in given]
    assert None not in keys and len(set(keys)) == len(given)
    assert keys == [estimation_key(WithUuid(value)) for value in given]


def scaled(factor: float, node: object, size: int | None, offset: float = 0.0) -> float:
    return factor + offset


def test_partial_is_keyed_by_its_arguments() -> None:
    variants = [
        functools.partial(scaled, 1.0),
        functools.partial(scaled, 2.0),
        functools.partial(scaled, 1.0, offset=1.0),
        functools.partial(scaled, 1),
    ]
    keys = [estimation_key(variant) for variant in variants]
    assert None not in keys and len(set(keys)) == 4
    assert estimation_key(functools.partial(scaled, 1.0)) == keys[0]
    assert estimation_key(functools.partial(scaled, object())) is None


# -- what has none --------------------------------------------------------------------------------

module_lambda = lambda node, size: 1.0  # noqa: E731


class Costs:
    def method(self, node: object, size: int | None) -> float:
        return 1.0

    @classmethod
    def of_class(cls, node: object, size: int | None) -> float:
        return 1.0

    def __call__(self, node: object, size: int | None) -> float:
        return 1.0


def local_function() -> Callable[..., float]:
    def estimate(node: object, size: int | None) -> float:
        return 1.0

    return estimate


def as_wrapper(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> float:
        return 2 * function(*args)

    return wrapper


@as_wrapper
def wrapped(node: object, size: int | None) -> float:
    return 1.0


def replaced(node: object, size: int | None) -> float:
    return 1.0


first_replaced = replaced


def replaced(node: object, size: int | None) -> float:  # type: ignore[no-redef]
    return 2.0


def loop_of_lists(node: object, size: int | None) -> float:
    return float(len(ENDLESS))


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "estimation",
    [
        lambda node, size: 1.0,
        module_lambda,
        local_function(),
        Costs().method,
        Costs.of_class,
        Costs(),
        Costs,
        wrapped,
        first_replaced,
        loop_of_lists,
        functools.partial(lambda node, size: 1.0),
        functools.partial(Costs().method),
        WithUuid(None),
        WithUuid(object()),
        print,
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_without_a_stable_description_there_is_no_key(estimation: Callable[..., object]) -> None:
    assert estimation_key(estimation) is None


@pytest.mark.parametrize(
    "source",
    [
        "helper = lambda: 1\ndef estimate(n, s): return helper()",
        "def outer():\n    return lambda: 1\nhelper = outer()\ndef estimate(n, s): return helper()",
    ],
)
def test_function_that_uses_one_without_a_key_has_none(key_of, source: str) -> None:
    assert key_of(source) is None


# -- over processes -------------------------------------------------------------------------------

# By path: importing the package takes three times as long.
PROGRAM = """
import runpy, sys
estimation_key = runpy.run_path(sys.argv[1])["estimation_key"]

def estimate(node, size):
    return 1.0 if size in {"a", "b", "c", "d"} else 2.0
print(estimation_key(estimate))

def estimate(node, size):
    return 1.0 if size in {"a", "b", "c", "d"} else 3.0
print(estimation_key(estimate))

import argparse
HIDDEN = argparse.Namespace(x=1.0)
def estimate(node, size):
    return HIDDEN.x
print(estimation_key(estimate))
"""


def keys_in_new_process(hash_seed: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", PROGRAM, custom.__file__]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return output.stdout.split("\n")


def test_key_without_a_source_file_is_of_the_code_and_equal_in_every_process() -> None:
    """The set in the test of membership is a frozenset constant; its order follows the seed."""
    two, three, hidden = keys_in_new_process("1")[:3]
    assert two.startswith("__main__.estimate ") and two != three
    assert hidden == "None"
    assert keys_in_new_process("2")[:3] == [two, three, hidden]


# -- torch's flags that measure on each rank ------------------------------------------------------


def test_names_of_what_is_read_count_without_a_source_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two functions of equal instructions and constants, of a module that has no file."""
    keys = []
    for attribute in ("args", "meta"):
        module = types.ModuleType("typed_in")
        exec(f"def estimate(node, size):\n    return len(node.{attribute})", module.__dict__)
        monkeypatch.setitem(sys.modules, "typed_in", module)
        keys.append(estimation_key(module.estimate))
    assert None not in keys
    assert keys[0] != keys[1]


def test_only_what_the_user_set_counts() -> None:
    from torch._inductor import config

    names = [n for n in config._config if n.startswith("aten_distributed_optimizations.")]
    defaults = {name: config._config[name].default for name in names}
    assert measured_estimators(defaults, defaults) == []
    collective = "aten_distributed_optimizations.collective_estimator"
    assert measured_estimators({**defaults, collective: "benchmark"}, defaults) == [collective]


def test_without_defaults_every_value_was_given() -> None:
    values = {
        "compute_estimator": "benchmark",
        "a.collective_estimator": "analytical",
        "a.profile_guided_estimations_profile_path": "trace.json",
        "b.profile_guided_estimations_profile_path": None,
        "other": "benchmark",
    }
    expected = ["a.profile_guided_estimations_profile_path", "compute_estimator"]
    assert measured_estimators(values) == expected
    defaults = {"compute_estimator": "analytical"}
    assert "compute_estimator" in measured_estimators(values, defaults)


def test_torch_still_has_the_flags() -> None:
    """Renamed ones would be ignored without a word."""
    dist = torch._inductor.config.aten_distributed_optimizations  # type: ignore[attr-defined]
    assert dist.collective_estimator == "analytical"
