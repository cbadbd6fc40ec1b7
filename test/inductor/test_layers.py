"""The layers of the architecture: who may import whom."""

import ast
import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import torch_patches

ROOT = Path(torch_patches.__file__).parent
PACKAGE = "torch_patches._inductor.fx_passes.comm_overlap"
FORBIDDEN = {
    "graph": ["estimate", "passes", "check", "report", "pipeline"],
    "estimate": ["passes", "check", "report", "pipeline"],
    "passes": ["check", "report", "pipeline"],
}

WORKING_STATE = {"Placement", "Gather", "Entry"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_what_lies_below_it(layer):
    files = list((ROOT / "_inductor/fx_passes/comm_overlap" / layer).glob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            for above in FORBIDDEN[layer]:
                assert not name.startswith(f"{PACKAGE}.{above}"), f"{path} imports {name}"


def data_classes():
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        for value in vars(importlib.import_module(module.name)).values():
            if dataclasses.is_dataclass(value) and value.__module__ == module.name:
                yield value


def test_what_one_pass_hands_to_another_cannot_be_changed():
    """Data classes are frozen, but for the working state of one file."""
    changeable = {c.__name__ for c in data_classes() if not c.__dataclass_params__.frozen}
    assert {name for name in changeable if not name.startswith("_")} == WORKING_STATE


def test_passes_do_not_depend_on_the_product_around_them():
    """What moves upstream must not import flags, hooks or testing code."""
    for path in (ROOT / "_inductor").rglob("*.py"):
        for name in imports_of(path):
            inside = not name.startswith("torch_patches") or name.startswith(PACKAGE)
            assert inside, f"{path} imports {name}"


def test_only_the_hook_replaces_something_of_torch():
    """Assignments to attributes of torch's modules stand in one file."""
    for path in ROOT.rglob("*.py"):
        if path.name == "_hooks.py":
            continue
        assert "compile_fx_module.compile_fx =" not in path.read_text(), path


ABOUT_RELEASES = ["torch_release", "is_supported_torch", "supported_range"]


def test_what_differs_between_releases_says_when_it_can_be_dropped():
    """Or why it stays: the functions of _compat.py."""
    tree = ast.parse((ROOT / "_compat.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    told = {f.name: " ".join((ast.get_docstring(f) or "").split()) for f in functions}
    minimum = r"\b[Dd]rop .*(when the minimum (is 2\.\d+|has them)|with :\w+:`\w+`)|\bit stays\b"
    silent = [n for n, text in told.items() if not re.search(minimum, text, re.IGNORECASE)]
    assert silent == ABOUT_RELEASES
