"""Runs the tests of commits in a tree without importing torch for each of them.

    PYTHONPATH=ROOT python -P server.py ROOT

Runs with the interpreter of the tree's binaries, and imports nothing of this project.  It imports
torch, and what most tests import, once.  A line on stdin is a run, as JSON: ``modules`` to import,
``tests`` (paths from the root), ``output`` (a file), ``timeout_s`` and ``examples``: null, or the most
that a hypothesis test runs; then of each parametrized test only the first case runs too.  Each runs in a fork of its own and gets a line on stdout:

    {"ended": 1}          the exit status, as pytest has it; negative for a signal; null if killed
                          because it was not done in time
    {"stale": [...]}      nothing was run: these files, which are imported here, read differently in
                          the tree now, so a new server has to run it

What is imported here and lies in the tree itself (not behind a link to the installed torch) is known
by the digest of its text, so no commit is tested with a module of another one.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.abc
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

#: What most tests of the stack import.  Nothing of the stack itself, and few of the files that it
#: edits: each that is imported here costs a new server when a commit edits it.
PRELOADED = (
    "pytest",
    "hypothesis",
    "expecttest",
    "torch",
    "torch.distributed.tensor",
    "torch.testing._internal.common_utils",
    "torch.testing._internal.distributed.fake_pg",
    "torch._dynamo.testing",
    "torch._inductor.graph",
    "torch._inductor.comms",
)
#: Exit status of a run that imported torch from elsewhere; pytest has none as high.
ELSEWHERE = 90
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-c", os.devnull, "--tb=short")


class _Blocked(importlib.abc.MetaPathFinder):
    """Our package must not help: an import of it fails."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "torch_patches":
            raise ImportError(f"{name} is not part of the tree")


def main(root: Path) -> NoReturn:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    sys.meta_path.insert(0, _Blocked())
    sys.dont_write_bytecode = True  # a file of another commit may have the same size and second
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # no fork looks through them
    held = {path: _digest(path) for path in _of_tree(root)}
    for line in sys.stdin:
        stale = [str(path.relative_to(root)) for path in held if held[path] != _digest(path)]
        answer = {"stale": stale} if stale else {"ended": _ended(root, json.loads(line))}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # there is nothing to tidy, and taking torch apart takes seconds


def _of_tree(root: Path) -> list[Path]:
    """Files of imported modules that are the tree's own, which a commit may change."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(file).resolve() for file in files if file}
    return sorted(path for path in paths if path.is_relative_to(root))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _ended(root: Path, job: dict[str, object]) -> int | None:
    run = multiprocessing.get_context("fork").Process(target=_run, args=(root, job))
    run.start()
    try:
        run.join(float(str(job["timeout_s"])))
        return run.exitcode
    finally:
        if run.exitcode is None:
            _kill(run)


def _kill(run: multiprocessing.process.BaseProcess) -> None:
    """With what it has started; its group is there once it has run a little."""
    try:
        os.killpg(run.pid or 0, signal.SIGKILL)
    except ProcessLookupError:
        run.kill()
    run.join()


def _run(root: Path, job: dict[str, Any]) -> None:
    """In the fork."""
    os.setpgid(0, 0)
    output = os.open(str(job["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    importlib.invalidate_caches()  # folders have other files than when torch was imported
    for name in job["modules"]:
        importlib.import_module(name)
    import pytest

    plugins = []
    if job["examples"] is not None:
        _run_at_most(job["examples"])
        plugins.append(_FirstCases())
    arguments = [*_OPTIONS, "--rootdir", str(root), *job["tests"]]
    status = pytest.main(arguments, plugins) if job["tests"] else 0
    if wrong := _elsewhere(root):
        print(f"imported from elsewhere: {', '.join(wrong)}")
        status = ELSEWHERE
    sys.exit(int(status))


class _FirstCases:
    """A plugin of pytest: of each test function the first case."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        first: dict[str, Any] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = first.values()


def _run_at_most(examples: int) -> None:
    """Also where a test asks for more."""
    import hypothesis

    full = hypothesis.settings.__init__

    @functools.wraps(full)
    def short(self: hypothesis.settings, *args: Any, **given: Any) -> None:
        if "max_examples" in given:
            given["max_examples"] = min(given["max_examples"], examples)
        full(self, *args, **given)

    hypothesis.settings.__init__ = short  # type: ignore[method-assign]
    hypothesis.settings.register_profile("short", max_examples=examples)
    hypothesis.settings.load_profile("short")


def _elsewhere(root: Path) -> list[str]:
    """Modules that the tree has and that were imported from somewhere else."""
    wrong = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not name.startswith("torch."):
            continue
        place = root / name.replace(".", "/")
        for expected in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if expected.is_file() and Path(file).absolute() != expected:
                wrong.append(f"{name} ({file})")
    return wrong


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
