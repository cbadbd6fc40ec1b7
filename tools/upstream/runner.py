"""Runs tests in a tree, each time in a fork of a process that has imported torch (``server.py``)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from upstream.errors import StackError, TreeError

_SERVER = Path(__file__).with_name("server.py")
_START_S = 600  # importing torch, on a machine that does much else
_MOST = 3000  # characters of a problem


@dataclass(frozen=True)
class Done:
    """A run.

    Args:
        status: as pytest has it, negative for a signal, None if it was not done in time.
        output: its last part.
    """

    status: int | None
    output: str


class Runner:
    """A context; what it has started ends with it.

    Args:
        root: of a tree that can be imported.
        python: the interpreter that its binaries are of, with pytest and hypothesis.
        examples: a short set: the first case of a parametrized test, and of a hypothesis test at most
            so many examples.  None: all.

    ``started`` counts servers: one, and one more each time that a file changed which it had imported.
    """

    def __init__(
        self, root: Path, python: str = sys.executable, examples: int | None = None
    ) -> None:
        self.started = 0
        self._root = root.resolve()
        self._python = python
        self._examples = examples
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._temporary.cleanup()

    def run(self, modules: Sequence[str], tests: Sequence[str], timeout_s: float) -> Done:
        """Imports modules, and runs tests, of the tree as it is now.

        Raises:
            TreeError: torch of this tree cannot be imported, or what the tests need is not there.
            StackError: there is no such interpreter.
        """
        output = self._folder / "output"
        output.unlink(missing_ok=True)
        job = {
            "modules": modules,
            "tests": tests,
            "output": str(output),
            "timeout_s": timeout_s,
            "examples": self._examples,
        }
        answer = self._ask(job, timeout_s)
        if "stale" in answer:
            self._stop()
            answer = self._ask(job, timeout_s)
        if "ended" not in answer:
            raise TreeError(f"{self._root}: files change while it is run: {answer['stale']}")
        return Done(answer["ended"], _tail(output))

    def _ask(self, job: dict[str, object], timeout_s: float) -> dict[str, Any]:
        server = self._server or self._start()
        assert server.stdin and server.stdout
        line = ""
        try:
            print(json.dumps(job), file=server.stdin, flush=True)
            if select.select([server.stdout], [], [], _START_S + timeout_s)[0]:
                line = server.stdout.readline()
        except BrokenPipeError:
            pass
        if line:
            return dict(json.loads(line))
        self._stop()
        raise TreeError(f"{self._python} cannot run the tree:\n{_tail(self._folder / 'errors')}")

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        environment.update(
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(self._root),
            PYTHONDONTWRITEBYTECODE="1",
            TORCH_WARM_POOL="0",  # no threads before a fork
        )
        try:
            with (self._folder / "errors").open("w") as errors:
                self._server = subprocess.Popen(
                    [self._python, "-P", str(_SERVER), str(self._root)],
                    cwd=self._root,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        except OSError as error:  # there is no such interpreter
            raise StackError(f"{self._python}: {error.strerror}") from error
        self.started += 1
        return self._server

    def _stop(self) -> None:
        """It ends when there is nothing more to read; one that hangs is killed."""
        server, self._server = self._server, None
        if server is None:
            return
        assert server.stdin and server.stdout
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def _tail(file: Path) -> str:
    return file.read_text(errors="replace").strip()[-_MOST:] if file.exists() else ""
