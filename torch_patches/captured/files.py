"""Graphs from whatever a user has: a capture, a repro file, a log, a printed graph.

    loaded = load_any("rank0_000.json.gz")
    loaded = load_any("fx_graph_runnable_3.txt", groups={"0": range(8)})
    loaded = load_any("/tmp/trace", rank=0)
    loaded.captured.graphs["fw"], loaded.warnings

Nothing of a file is executed.  What a text does not tell (ranks of groups, sizes of symbols) is taken
from the arguments, or guessed with a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches.captured import Captured, CaptureFormatError, load_captured, load_text_document
from torch_patches.captured._document import FORMAT
from torch_patches.captured._expressions import Symbols
from torch_patches.captured._propagate import propagate
from torch_patches.captured._readable import (
    MAX_TEXT,
    GroupFact,
    ReadGraph,
    is_repro,
    read_printed,
    read_repro,
)
from torch_patches.captured._trace import GRAPHS, Entry, Trace, is_trace, read_trace

__all__ = ["Loaded", "is_capture", "load_any", "load_compile"]

_GZIP = b"\x1f\x8b"
_TAKEN_FOR_PRINTED = (
    "it was read as a graph that torch printed, since it is no capture (gzip), no repro file "
    "(fx_graph_runnable) and no log of TORCH_TRACE"
)
_AFTER = "inductor_post_grad_graph"
#: Names of a log's entries as those of a capture's graphs; of two for one name the later counts.
_NAMES = {
    "aot_joint_graph": "joint",
    "aot_forward_graph": "fw",
    "aot_inference_graph": "fw",
    "aot_backward_graph": "bw",
}


@dataclass(frozen=True, eq=False)
class Loaded:
    """Graphs of one compile.

    Args:
        captured: by name, as :func:`torch_patches.capture` has them.
        kind: "capture", "repro", "printed" or "trace".
        warnings: sentences on what was guessed.
        compile_ids: of a log, those that can be asked for.
        used_groups: of the graphs' collectives.
        unused_groups: given by the caller, and used by no graph.
    """

    captured: Captured
    kind: str
    warnings: tuple[str, ...] = ()
    compile_ids: tuple[str, ...] = ()
    used_groups: tuple[str, ...] = ()
    unused_groups: tuple[str, ...] = ()


def is_capture(path: str | Path) -> bool:
    """Whether this is a gzip file, as captures are.

    Raises:
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as stream:
        return stream.read(2) == _GZIP


def load_any(
    path: str | Path,
    groups: Mapping[str, Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    compile_id: str | None = None,
    rank: int | None = None,
) -> Loaded:
    """Reads one compile of a file or folder.

    Args:
        path: a capture, a repro file, a printed graph, a log of TORCH_TRACE, a folder of such logs, or
            one of tlparse.
        groups: ranks by name of the group; they replace what the file says.  One that no graph uses
            is in ``unused_groups``: a slip, or what chained collectives shall be fused on.
        sizes: of symbols, by name in the text.
        compile_id: of a log; None for the compile with most collectives.
        rank: of a folder with a log for each rank.

    Raises:
        CaptureFormatError: it is none of these, is damaged or hostile.
        OSError: it cannot be read.
    """
    path = Path(path)
    given = {name: tuple(ranks) for name, ranks in (groups or {}).items()}
    if not path.is_dir() and is_capture(path):
        captured = load_captured(path)
        return _with_ranks(Loaded(captured, "capture"), given, {})
    if path.is_dir() or is_trace(_first_line(path)):
        return load_compile(read_trace(path, rank), given, sizes, compile_id, path.name)
    symbols = Symbols(dict(sizes or {}))
    text = _read_text(path)
    if is_repro(text):
        read, kind = read_repro(text, symbols, path.name), "repro"
    else:
        try:
            read, kind = read_printed(text, symbols, path.name), "printed"
        except CaptureFormatError as error:
            raise CaptureFormatError(f"{error}; {_TAKEN_FOR_PRINTED}") from error
    return _loaded({_name_of(kind, read): read}, symbols, given, kind, path.name)


def load_compile(
    trace: Trace,
    groups: Mapping[str, Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    compile_id: str | None = None,
    what: str = "the log",
    kinds: Sequence[str] = GRAPHS,
) -> Loaded:
    """Graphs of one compile of a log: "joint", "fw" and "bw" (as the passes got them, or as AOTAutograd
    made them where the compile came from a cache), "fw_after" and "bw_after" (what was compiled).

    Args:
        trace: what :func:`read_trace` found.
        groups, sizes, compile_id: as for :func:`load_any`.
        what: for error texts.
        kinds: of the graphs to read.

    Raises:
        CaptureFormatError: there is no such compile, or a graph cannot be read.
    """
    known = trace.compile_ids
    if compile_id is None:
        compile_id = max(known, key=lambda name: _collectives_in(trace.of(name)))
    if compile_id not in known:
        raise CaptureFormatError(f"{what}: no compile {compile_id!r}; there are {', '.join(known)}")
    symbols = Symbols({**trace.hints, **(sizes or {})})
    graphs: dict[str, ReadGraph] = {}
    for entry in trace.of(compile_id):
        if entry.kind not in kinds:
            continue
        read = read_printed(entry.payload, symbols, f"{what}, {entry.kind} of {compile_id}")
        graphs[_name_of(entry.kind, read)] = read
    loaded = _loaded(
        graphs, symbols, {k: tuple(v) for k, v in (groups or {}).items()}, "trace", what
    )
    return dataclasses.replace(loaded, compile_ids=tuple(known))


def _collectives_in(entries: Sequence[Entry]) -> int:
    return max((entry.payload.count("_c10d_functional.") for entry in entries), default=0)


def _name_of(kind: str, read: ReadGraph) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    inputs = [n["target"] for n in read.encoded["nodes"] if n["op"] == "placeholder"]
    # AOTAutograd calls what only a backward has so.
    phase = "bw" if any(name.startswith("tangents") for name in inputs) else "fw"
    return f"{phase}_after" if kind == _AFTER else phase


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline(10_000)


def _read_text(path: Path) -> str:
    data = path.read_bytes() if path.stat().st_size <= MAX_TEXT else None
    if data is None:
        raise CaptureFormatError(f"{path.name}: more than {MAX_TEXT} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CaptureFormatError(f"{path.name}: neither a capture nor a text") from error


def _loaded(
    graphs: Mapping[str, ReadGraph],
    symbols: Symbols,
    given: Mapping[str, tuple[int, ...]],
    kind: str,
    what: str,
) -> Loaded:
    document: dict[str, Any] = {
        "format": FORMAT,
        "torch": torch.__version__,
        "info": {},
        "groups": {},
        "symbols": symbols.section(),
        "module_stacks": [],
        "graphs": {name: read.encoded for name, read in graphs.items()},
    }
    captured = load_text_document(document, what)
    warnings = []
    if symbols.guessed:
        names = ", ".join(sorted(symbols.guessed))
        warnings.append(f"sizes of {names} are not told, {Symbols.DEFAULT} is taken (--size)")
    for name, module in captured.graphs.items():
        if missing := propagate(module, captured.fake_mode):
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            warnings.append(f"{name}: no sizes for {len(missing)} nodes ({shown})")
        module.recompile()
    facts = {k: v for read in graphs.values() for k, v in read.groups.items()}
    return _with_ranks(Loaded(captured, kind, tuple(warnings)), given, facts)


def _with_ranks(
    loaded: Loaded, given: Mapping[str, tuple[int, ...]], facts: Mapping[str, GroupFact]
) -> Loaded:
    """Ranks of all groups: those given, else those of the file, else guessed."""
    captured = loaded.captured
    used = _used_groups(captured)
    groups = {**captured.groups, **given}
    warnings = list(loaded.warnings)
    for name, size in used.items():
        if name in groups:
            if size is not None and len(groups[name]) != size:
                raise CaptureFormatError(
                    f"group {name!r} has {size} ranks in the graphs, {len(groups[name])} are given"
                )
            continue
        count = facts[name].size if name in facts else size
        if count is None:
            warnings.append(f"ranks of group {name!r} are unknown (--group {name}=0-7)")
            continue
        groups[name] = tuple(range(count))
        warnings.append(
            f"ranks of group {name!r} are not told, 0-{count - 1} are taken (--group {name}=...)"
        )
    return dataclasses.replace(
        loaded,
        captured=dataclasses.replace(captured, groups=groups),
        warnings=tuple(warnings),
        used_groups=tuple(used),
        unused_groups=tuple(sorted(given.keys() - used.keys() - captured.groups.keys())),
    )


def _used_groups(captured: Captured) -> dict[str, int | None]:
    """Groups of the graphs' collectives with their sizes."""
    used: dict[str, int | None] = {}
    for module in captured.graphs.values():
        for collective in collect(module.graph).collectives:
            size = collective.key.group_size if collective.key is not None else None
            used[collective.group] = used.get(collective.group) or size
    return used
