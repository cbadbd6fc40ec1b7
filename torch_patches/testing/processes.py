"""Runs one function on several gloo processes of this machine, for tests and the demo.

    results = run_ranks(work, 2, arguments=("x",), timeout_s=60)

    def work(rank: int, say: Say, text: str) -> int: ...   # in each process, group initialised

The processes meet in a file, so no port can be taken.  A rank that fails, the deadline, and Ctrl-C
end all of them at once; a rank whose parent is gone ends itself.

    printed = run_program("import torch; print(1)", timeout_s=60)    # one process, no group

On Linux each is a fork of one process that has imported torch, which takes longer than most of what
ranks are asked for; it has the environment and the output of its parent at the time of the call.

Forks share what that process had: the hash seed, the addresses of what it had imported, and what torch
read from the environment while it was imported.  They share nothing compiled.  So two forks do not
show that a cache key is equal in all processes (``test_hooks_compile.py`` starts new ones).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

Say = Callable[[str], None]
"""What a rank tells its parent while it works."""

OnMessage = Callable[[int, str], None]

#: Imported once for all ranks; nothing of ours.
_PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor")
#: Where there is Triton, an import of it starts processes and threads, which no fork should have.
_PRELOADED_WITHOUT_TRITON = ("torch._inductor.compile_fx", "inductor_patterns")
_PRELOAD_FOLDER = os.path.join(os.path.dirname(__file__), "preload")
#: Descriptors of stdout and stderr.
_OUTPUTS = (1, 2)
_TICK_S = 0.5
#: By which a group waits longer than the parent, which tells more when it ends the ranks.
_GROUP_MARGIN_S = 60.0
_STACKS_BEFORE_DEADLINE_S = 5.0


class RankFailed(RuntimeError):
    """A rank raised (the text holds its traceback) or died."""


class RanksTimedOut(RuntimeError):
    """The ranks were ended because they took longer than allowed; the text says how far each was."""


@dataclass
class _Rank:
    """The parent's view of one process."""

    number: int
    process: Any
    connection: Connection
    last_message: str = "starting"
    finished: bool = False
    result: Any = None


@dataclass
class _Ranks:
    """All processes of a run, and what is left of their time."""

    ranks: list[_Rank]
    timeout_s: float
    on_message: OnMessage
    on_tick: Callable[[], None]
    started: float = field(default_factory=time.monotonic)

    def collect(self) -> list[Any]:
        """Serves messages until every rank has its result."""
        while pending := [rank for rank in self.ranks if not rank.finished]:
            if time.monotonic() - self.started > self.timeout_s:
                raise RanksTimedOut(self._timeout_text())
            ready = wait([rank.connection for rank in pending], timeout=_TICK_S)
            for rank in pending:
                if rank.connection in ready:
                    self._receive(rank)
            self.on_tick()
        return [rank.result for rank in self.ranks]

    def _receive(self, rank: _Rank) -> None:
        try:
            kind, value = rank.connection.recv()
        except EOFError:
            rank.process.join()
            code = rank.process.exitcode
            raise RankFailed(
                f"rank {rank.number} died with exit code {code} after: {rank.last_message}"
            ) from None
        if kind == "error":
            raise RankFailed(f"rank {rank.number} failed after: {rank.last_message}\n{value}")
        if kind == "result":
            rank.finished, rank.result = True, value
            return
        rank.last_message = value
        self.on_message(rank.number, value)

    def _timeout_text(self) -> str:
        places = "; ".join(
            f"rank {rank.number}: {'done' if rank.finished else rank.last_message}"
            for rank in self.ranks
        )
        return f"not finished after {self.timeout_s:.0f} s, ended ({places})"

    def end(self) -> None:
        """Ends what still runs."""
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.connection.close()


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    *,
    timeout_s: float,
    arguments: Sequence[Any] = (),
    environments: Sequence[Mapping[str, str]] = (),
    on_message: OnMessage = lambda rank, text: None,
    on_tick: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Calls ``target(rank, say, *arguments)`` in ``world_size`` new processes.

    Args:
        target: a function of a module that a new process can import.
        timeout_s: seconds until all are ended; shortly before, each rank prints its stacks.
        environments: variables that a rank starts with beside those of this process, by rank.
        on_message: called here with what a rank says.
        on_tick: called here at least once a second, for a sign of life.

    Returns:
        The results by rank; they travel pickled.

    Raises:
        RankFailed, RanksTimedOut
    """
    # An interpreter reads some of its environment (PYTHONHASHSEED) only when it starts.
    context = multiprocessing.get_context("spawn") if environments else _context()
    # Pickled here, so that the module of the target is imported behind the environment.
    work = pickle.dumps((target, tuple(arguments)))
    with tempfile.TemporaryDirectory(prefix="torch_patches_") as folder:
        run = _Ranks([], timeout_s, on_message, on_tick)
        try:
            for number in range(world_size):
                receiving, sending = context.Pipe(duplex=False)
                place = _Place(number, world_size, os.path.join(folder, "store"), timeout_s)
                environment = environments[number] if environments else {}
                outputs = [Connection(os.dup(file), readable=False) for file in _OUTPUTS]
                process = context.Process(
                    target=_main,
                    args=(place, sending, {**os.environ, **environment}, outputs, work),
                    daemon=True,
                )
                with _environment(environment):
                    process.start()
                for output in outputs:
                    output.close()
                # Ours must close, or the pipe never reports that the rank died.
                sending.close()
                run.ranks.append(_Rank(number, process, receiving))
            return run.collect()
        finally:
            run.end()


def run_program(
    code: str, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """What a program prints: as ``python -c code``, but torch and this package are imported already.

    Args:
        timeout_s: seconds until it is ended; shortly before, it tells its stacks.
        environment: that it runs in, ``PYTHONPATH`` included; this process's by default.  Variables
            that are read by an import of torch, or by the interpreter's start, come too late.

    Raises:
        RankFailed: it ended with an error (the text holds what it told), or took longer.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        outputs = [Connection(os.dup(file.fileno()), readable=False) for file in (out, err)]
        environ = dict(os.environ if environment is None else environment)
        arguments_of_process = (code, arguments, environ, outputs, timeout_s)
        # No daemon: those may have no children, and Inductor's compiles do.
        process = _context().Process(target=_program, args=arguments_of_process)
        process.start()
        for output in outputs:
            output.close()
        try:
            process.join(timeout_s)
            ended = process.exitcode
        finally:  # after Ctrl-C as well: this process would wait for it at its own end
            process.kill()
            process.join()
        out.seek(0)
        err.seek(0)
        if ended != 0:
            raise RankFailed(f"the program ended with {ended}\n{err.read()}")
        return out.read()


def _context() -> Any:
    """How processes start; elsewhere than on Linux libraries do not stand a fork."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    names = list(_PRELOADED)
    if importlib.util.find_spec("triton") is None:
        names += _PRELOADED_WITHOUT_TRITON
    context.set_forkserver_preload(names)  # of no effect where it runs already
    # Python 3.11 does not tell the server the path of this process.
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), _PRELOAD_FOLDER]
    with _environment({"PYTHONPATH": os.pathsep.join(filter(None, paths))}):
        forkserver.ensure_running()
    return context


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What a process that starts meanwhile gets."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# -- in the new process ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a process stands in the run."""

    rank: int
    world_size: int
    store_path: str
    timeout_s: float


def _program(
    code: str,
    arguments: Sequence[str],
    environment: dict[str, str],
    outputs: Sequence[Connection],
    timeout_s: float,
) -> None:
    _become(environment, outputs)
    _end_in_time(timeout_s)
    sys.argv = ["-c", *arguments]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def _become(environment: dict[str, str], outputs: Sequence[Connection]) -> None:
    """Takes the variables and the output of somebody else."""
    os.environ.clear()
    os.environ.update(environment)
    for output, file in zip(outputs, _OUTPUTS, strict=True):
        os.dup2(output.fileno(), file)
        output.close()
    gc.freeze()  # the imports, which would be looked through each time


def _main(
    place: _Place,
    connection: Connection,
    environment: dict[str, str],
    outputs: Sequence[Connection],
    work: bytes,
) -> None:
    _become(environment, outputs)
    # Ctrl-C reaches the whole terminal group; the parent handles it and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_in_time(place.timeout_s)
    try:
        target, arguments = pickle.loads(work)
        _join_group(place)
        result = target(place.rank, lambda text: connection.send(("message", text)), *arguments)
        connection.send(("result", result))
    except Exception:
        connection.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that is gone fails those that still connect to it, so the parent ends all together; no
    # group is torn down, which would wait for the others.
    threading.Event().wait()


def _end_in_time(timeout_s: float) -> None:
    """Ends with the parent, and tells its stacks shortly before the parent ends it."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    stacks_after_s = max(timeout_s - _STACKS_BEFORE_DEADLINE_S, timeout_s / 4)
    faulthandler.dump_traceback_later(stacks_after_s, file=2)  # the descriptor


def _follow_parent() -> None:
    """A parent that was killed outright cannot end its ranks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _join_group(place: _Place) -> None:
    # The loopback needs no name resolution, which fresh machines often lack.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(place.store_path, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.timeout_s + _GROUP_MARGIN_S),
    )
