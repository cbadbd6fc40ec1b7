"""``torch_patches.capture``: the graphs of a user's own model, written while they are compiled.

    with torch_patches.capture("graphs"):            # or TORCH_PATCHES_CAPTURE=graphs in the environment
        torch.compile(model)(x).sum().backward()     # graphs/rank0_000.json.gz

One file holds one compile: "joint" (before the split), "fw" and "bw" (as our passes get them),
"fw_after" and "bw_after" (as they leave them; only where a flag asks for anything), and for graphs
inside of these "fw_inner0" and so on.  It is written anew with each graph that comes, a lazily compiled
backward included, whenever and in whatever thread that compiles.  docs/capture_format.md says what is
in it; there are no tensor data and no paths.

Within a capture no compile is served from Inductor's caches, since on a hit no pass runs.  What Dynamo
has compiled in this process before is not compiled again: call ``torch.compiler.reset()`` first.

Capturing never fails a compile: a file that cannot be written, or a graph that the format cannot hold,
is one warning.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.notices import raise_if_strict
from torch_patches._inductor.fx_passes.comm_overlap.options import Options

if TYPE_CHECKING:
    from torch_patches.captured import Document

log = logging.getLogger(__name__)

#: Names a folder; compiles of the process are then captured there.
VARIABLE = "TORCH_PATCHES_CAPTURE"

#: Options that a file holds in another form, or not at all.
_NOT_WRITTEN = ("calibration_file", "calibration", "groups")


@dataclass(eq=False)
class Session:
    """Where the graphs of some compiles go.

    Args:
        directory: is made where it does not exist.
        paths: files written so far, in the order in which their first graphs came.
    """

    directory: Path
    paths: list[Path] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def new_file(self) -> Path:
        """A file of this rank that did not exist."""
        rank, _ = _rank_and_world()
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            number = 0
            while True:
                path = self.directory / f"rank{rank}_{number:03d}.json.gz"
                try:
                    path.open("xb").close()
                except FileExistsError:
                    number += 1
                    continue
                self.paths.append(path)
                return path


_sessions: list[Session] = []
"""Of ``capture`` contexts, the innermost last.  Of the process and not of a thread: autograd compiles a
backward in a thread of its own."""

_of_variable: dict[str, Session] = {}


@contextmanager
def capture(directory: str | os.PathLike[str]) -> Iterator[Session]:
    """Writes the graphs of every compile that starts meanwhile, in any thread, into ``directory``.

    Our hooks must be installed (they are after the import) and Inductor, the backend
    ``aot_eager_comm_overlap`` or :func:`torch_patches.optimize_graph` must get the graphs.  A backward
    whose forward was captured is captured too, also after the context's end.

    Args:
        directory: made where it does not exist; files that are there are kept.

    Yields:
        The session; ``session.paths`` are the files.

    Raises:
        OSError: the folder cannot be made.
    """
    session = Session(Path(directory))
    session.directory.mkdir(parents=True, exist_ok=True)
    _sessions.append(session)
    try:
        yield session
    finally:
        _sessions.remove(session)
    if not session.paths:
        log.warning(
            "torch_patches.capture: no graph was compiled by Inductor or aot_eager_comm_overlap. What "
            "this process compiled before is not compiled again; torch.compiler.reset() forgets it"
        )


def begin(pipeline: str, model: object, options: Options) -> Recording | None:
    """A recording of one compile, or None while nobody captures.

    Args:
        pipeline: who compiles.
        model: what Dynamo made, or another module.
        options: of the passes.
    """
    session = _sessions[-1] if _sessions else _session_of_variable()
    if session is None:
        return None
    return Recording(session, _info(pipeline, model, options))


def _session_of_variable() -> Session | None:
    directory = os.environ.get(VARIABLE)
    if not directory:
        return None
    return _of_variable.setdefault(directory, Session(Path(directory)))


class Recording:
    """One compile, and its file.

    Passes hold it while torch copies, compares and pickles them: a copy of it is the same one, and in
    another process there is none.

    Args:
        session: where the file goes.
        info: about the compile.
    """

    def __init__(self, session: Session, info: Mapping[str, Any]) -> None:
        self._session = session
        self._info = info
        self._document: Document | None = None
        self._path: Path | None = None
        self._failed = False
        #: "fw" or "bw": what is compiled now.
        self.phase = "fw"

    def __deepcopy__(self, memo: object) -> Recording:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_recording, ()

    def add(self, name: str, graph: fx.Graph) -> None:
        """Encodes the graph as it is now and writes the file."""
        if self._failed:
            return
        try:
            self._add(name, graph)
        except Exception as error:
            self._failed = True
            self._drop_empty_file()
            raise_if_strict(error)
            log.warning(
                "torch_patches.capture: a graph could not be written: %s: %s",
                type(error).__name__,
                error,
            )

    def before(self, graph: fx.Graph) -> None:
        """A forward or backward graph that the passes get.  The last of a phase is the whole one;
        those before are inside of it."""
        self._set_inner_aside(self.phase)
        self.add(self.phase, graph)

    def after(self, graph: fx.Graph) -> None:
        """The same graph as they leave it."""
        self.add(f"{self.phase}_after", graph)

    def _add(self, name: str, graph: fx.Graph) -> None:
        from torch_patches.captured import Document, registered_groups

        if self._document is None:
            self._document = Document(self._info, registered_groups())
        self._document.groups.update(registered_groups())
        owner = graph.owning_module
        module = owner if isinstance(owner, fx.GraphModule) and owner.graph is graph else None
        self._document.add(name, module or fx.GraphModule(owner or {}, graph))
        if self._path is None:
            self._path = self._session.new_file()
        self._document.write(self._path)

    def _set_inner_aside(self, phase: str) -> None:
        graphs = {} if self._document is None else self._document.graphs
        if phase not in graphs:
            return
        inner = [name for name in graphs if name.startswith(f"{phase}_inner")]
        number = sum(not name.endswith("_after") for name in inner)
        for suffix in ("", "_after"):
            if f"{phase}{suffix}" in graphs:
                graphs[f"{phase}_inner{number}{suffix}"] = graphs.pop(f"{phase}{suffix}")

    def _drop_empty_file(self) -> None:
        try:
            if self._path is not None and not self._path.stat().st_size:
                self._path.unlink()
                self._session.paths.remove(self._path)
        except OSError:
            log.debug("an empty capture stays", exc_info=True)


def _no_recording() -> None:
    return None


# -- about the compile ----------------------------------------------------------------------------


def _info(pipeline: str, model: object, options: Options) -> dict[str, Any]:
    from torch_patches import __version__

    rank, world_size = _rank_and_world()
    return {
        "made_by": f"torch_patches {__version__}",
        "pipeline": pipeline,
        "rank": rank,
        "world_size": world_size,
        "options": _plain_options(options),
        **_inputs(model),
    }


def _rank_and_world() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = os.environ.get("RANK", "0")
    return (int(rank) if rank.isdigit() else 0), 1


def _plain_options(options: Options) -> dict[str, Any]:
    """What is not at its default, as JSON; functions by name."""
    defaults = Options()
    plain: dict[str, Any] = {}
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if option.name in _NOT_WRITTEN or value == getattr(defaults, option.name):
            continue
        named = getattr(value, "__qualname__", type(value).__qualname__)
        plain[option.name] = named if callable(value) else value
    return plain


def _inputs(model: object) -> dict[str, Any]:
    """Where the inputs of the graph that Dynamo made come from, by the index of AOT descriptors; and
    the gradients that compiled autograd's graph accumulates."""
    if not isinstance(model, fx.GraphModule):
        return {"inputs": []}
    from torch_patches._inductor.fx_passes.comm_overlap.graph import accumulated

    names = [given.name for given in accumulated.flat_inputs(model.graph)]
    gradients = accumulated.find_accumulated(model.graph) if names else []
    told = {"accumulated": [dataclasses.asdict(gradient) for gradient in gradients]}
    return {"inputs": names, **(told if gradients else {})}
