"""Structured logs of torch (TORCH_TRACE), and what tlparse makes of them: the graphs in them.

    V1129 00:34:34.631000 13926 torch/...py:1797] {"aot_joint_graph": {}, "rank": 0, "frame_id": 0, ...}
    <tab>class joint_helper(torch.nn.Module):
    <tab>    ...

Nothing is parsed here but JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch_patches.captured._targets import CaptureFormatError

#: Graphs as torch emits them, by what the entry is called.
GRAPHS = ("aot_joint_graph", "aot_forward_graph", "aot_inference_graph", "aot_backward_graph",
          "before_post_grad_graph", "inductor_post_grad_graph")  # fmt: skip
SCHEDULE = "comm_overlap_schedule"

_ENTRY = re.compile(r"^[VDIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ .*?\] (\{.*)$")
#: What tlparse makes of a log: a folder for each compile (its numbers, and the attempt), in it a file for
#: each entry; of the logs of several ranks, a folder for each rank around these.
_TLPARSE_FILE = re.compile(rf"({'|'.join(GRAPHS)}|{SCHEDULE})_\d+\.(txt|json)")
_TLPARSE_FOLDER = re.compile(r"(-|\d+)_(-|\d+)_(-|\d+)(?:_(?:-|\d+))?")
_RANK_FOLDER = re.compile(r"rank_(\d{1,9})")
MAX_LINE = 2**26  # characters
MAX_PAYLOADS = 2**29  # characters of all graphs of a log or folder
_COMPILE_KEYS = ("compiled_autograd_id", "frame_id", "frame_compile_id")


@dataclass(frozen=True)
class Entry:
    """One payload.

    Args:
        kind: as in :data:`GRAPHS`, or :data:`SCHEDULE`.
        compile_id: such as "0/0": frame and compile of the frame; "!0/1/0" with compiled autograd.
        rank: None where none is told.
        payload: the text.
    """

    kind: str
    compile_id: str
    rank: int | None
    payload: str


@dataclass
class Trace:
    """What a log holds for us.

    Args:
        entries: in order.
        hints: sizes of symbols.
    """

    entries: list[Entry] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)

    @property
    def compile_ids(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(entry.compile_id for entry in self.entries))

    def of(self, compile_id: str) -> list[Entry]:
        """Entries of one compile."""
        return [entry for entry in self.entries if entry.compile_id == compile_id]


def is_trace(first_line: str) -> bool:
    """Whether a file that begins so is such a log."""
    return _ENTRY.match(first_line) is not None


def read_trace(path: Path, rank: int | None = None) -> Trace:
    """The graphs of a log, or of a folder of logs or of tlparse's output.

    Args:
        rank: which log of a folder, where there are several.

    Raises:
        CaptureFormatError: there are none, or those of several ranks.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return _read_folder(path, rank)
    trace = _read_log(path)
    if trace is None:
        raise CaptureFormatError(f"{path.name}: a log without graphs of a compile")
    return trace


def _read_log(path: Path) -> Trace | None:
    """None for a log without graphs."""
    trace, kept = Trace(), _Budget(path)
    with path.open(encoding="utf-8", errors="replace") as stream:
        for metadata, payload in _raw_entries(_lines(stream), path):
            if _take(trace, metadata, payload):
                kept.take(payload)
    return trace if trace.entries else None


def _read_folder(path: Path, rank: int | None) -> Trace:
    # A link may lead anywhere.
    children = sorted(c for c in path.iterdir() if c.is_dir() and not c.is_symlink())
    ranks = {int(m[1]): child for child in children if (m := _RANK_FOLDER.fullmatch(child.name))}
    if ranks:
        return _read_folder(_of_rank(path, ranks, rank), None)
    files = [f for folder in (path, *children) for f in sorted(folder.iterdir(), key=_number)]
    files = [f for f in files if _TLPARSE_FILE.fullmatch(f.name) and _is_plain(f)]
    # tlparse leaves out the graphs in the log that it calls so.
    logs = [log for log in sorted(path.glob("*.log")) if log.name != "shortraw.log"]
    if len(logs) == 1 and rank is None and files:
        return _read_log(logs[0]) or _read_files(path, files)
    if logs:
        return read_trace(_log_of_rank(path, logs, rank))
    if files and rank is not None:
        raise CaptureFormatError(f"{path}: graphs of tlparse that tell no rank; leave out --rank")
    if files:
        return _read_files(path, files)
    if captures := sorted(path.glob("*.json.gz")):
        raise CaptureFormatError(
            f"{path}: a folder of {len(captures)} captures; take one ({_shown(captures)})"
        )
    raise CaptureFormatError(f"{path}: a folder without logs, and without graphs of tlparse")


def _of_rank(path: Path, ranks: dict[int, Path], rank: int | None) -> Path:
    """tlparse's folder of one rank, of a job with several."""
    names = _shown([ranks[number] for number in sorted(ranks)])
    if rank is None and len(ranks) == 1:
        return next(iter(ranks.values()))
    if rank is None:
        raise CaptureFormatError(
            f"{path}: folders of {len(ranks)} ranks ({names}); take one, or --rank"
        )
    if rank not in ranks:
        raise CaptureFormatError(f"{path}: no folder of rank {rank} among {len(ranks)} ({names})")
    return ranks[rank]


def _log_of_rank(path: Path, logs: list[Path], rank: int | None) -> Path:
    found = logs
    if rank is not None:
        found = [log for log in logs if re.search(rf"rank_{rank}(?!\d)", log.name)]
    if not found:
        raise CaptureFormatError(
            f"{path}: no log of rank {rank} among {len(logs)} ({_shown(logs)})"
        )
    if len(found) > 1:
        raise CaptureFormatError(
            f"{path}: {len(found)} logs ({_shown(found)}); take one, or --rank"
        )
    return found[0]


def _shown(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])


def _read_files(path: Path, files: list[Path]) -> Trace:
    """Graphs in files of tlparse."""
    trace, budget = Trace(), _Budget(path)
    for file in files:
        match = _TLPARSE_FILE.fullmatch(file.name)
        assert match is not None
        if file.stat().st_size > MAX_LINE:
            raise CaptureFormatError(f"{file.name}: more than {MAX_LINE} bytes")
        numbers = _TLPARSE_FOLDER.fullmatch(file.parent.name)
        compile_id = _compile_id(*(numbers.groups() if numbers else (None, None, None)))
        text = file.read_text(encoding="utf-8", errors="replace")
        trace.entries.append(Entry(match[1], compile_id, None, budget.take(text)))
    return trace


def _lines(stream: TextIO) -> Iterator[str]:
    """Of a log; what is longer than :data:`MAX_LINE` is passed over, and never held."""
    while line := stream.readline(MAX_LINE):
        if line.endswith("\n") or len(line) < MAX_LINE:
            yield line
            continue
        while line and not line.endswith("\n"):
            line = stream.readline(MAX_LINE)


class _Budget:
    """Characters that the graphs of one log or folder may still have."""

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, MAX_PAYLOADS

    def take(self, payload: str) -> str:
        self._left -= len(payload)
        if self._left < 0:
            raise CaptureFormatError(
                f"{self._path.name}: entries of more than {MAX_PAYLOADS} characters"
            )
        return payload


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _number(path: Path) -> int:
    """Of a file of tlparse; in the order of the log."""
    number = re.search(r"_(\d+)\.\w+$", path.name)
    return int(number[1]) if number else -1


def _compile_id(autograd: object, frame: object, frame_compile: object) -> str:
    """As torch prints it: "0/1", "!2/0/1" or "!2" for a graph of compiled autograd."""
    numbers = [str(n) for n in (frame, frame_compile) if n not in (None, "-")]
    if autograd not in (None, "-"):
        return "/".join([f"!{autograd}", *numbers])
    return "/".join(numbers) or "0/0"


def _raw_entries(lines: Iterator[str], path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Metadata and payload of each entry; lines that are none are passed over."""
    metadata: dict[str, Any] | None = None
    payload: list[str] = []
    budget = _Budget(path)  # of one entry: a log may hold far more of what is not kept
    for line in lines:
        if line.startswith("\t"):
            if metadata is not None:
                payload.append(budget.take(line[1:]))
            continue
        if metadata is not None:
            yield metadata, "".join(payload)
        metadata, payload, budget = _metadata(line), [], _Budget(path)
    if metadata is not None:
        yield metadata, "".join(payload)


def _metadata(line: str) -> dict[str, Any] | None:
    match = _ENTRY.match(line) if len(line) <= MAX_LINE else None
    if match is None:
        return None
    try:
        found = json.loads(match[1])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _take(trace: Trace, metadata: dict[str, Any], payload: str) -> bool:
    """Whether the payload is kept."""
    symbol = metadata.get("create_symbol")
    if isinstance(symbol, dict):
        value = str(symbol.get("val"))
        if isinstance(symbol.get("symbol"), str) and value.isdigit():
            trace.hints[symbol["symbol"]] = int(value)
        return False
    artifact = metadata.get("artifact")
    named = artifact.get("name") if isinstance(artifact, dict) else None
    kind = next((k for k in (*GRAPHS, SCHEDULE) if k in metadata or k == named), None)
    if kind is None or not payload:
        return False
    rank = metadata.get("rank")
    numbers = (metadata.get(key) for key in _COMPILE_KEYS)
    compile_id = _compile_id(*(n if isinstance(n, int) else None for n in numbers))
    trace.entries.append(Entry(kind, compile_id, rank if isinstance(rank, int) else None, payload))
    return True
