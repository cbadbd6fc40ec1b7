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
_TLPARSE_FILE = re.compile(rf"({'|'.join(GRAPHS)}|{SCHEDULE})_\d+\.(txt|json)")
MAX_LINE = 2**26  # characters
MAX_PAYLOADS = 2**29  # characters of all graphs of a log or folder
_COMPILE_KEYS = ("compiled_autograd_id", "frame_id", "frame_compile_id")


@dataclass(frozen=True)
class Entry:
    """One payload.

    Args:
        kind: as in :data:`GRAPHS`, or :data:`SCHEDULE`.
        compile_id: such as "0/0"; frame and compile of the frame.
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
    trace, kept = Trace(), _Budget(path)
    with path.open(encoding="utf-8", errors="replace") as stream:
        for metadata, payload in _raw_entries(_lines(stream), path):
            if _take(trace, metadata, payload):
                kept.take(payload)
    if not trace.entries:
        raise CaptureFormatError(f"{path.name}: a log without graphs of a compile")
    return trace


def _read_folder(path: Path, rank: int | None) -> Trace:
    found = logs = sorted(path.glob("*.log"))
    if rank is not None:
        logs = [log for log in found if re.search(rf"rank_{rank}(?!\d)", log.name)]
        if found and not logs:
            names = ", ".join(log.name for log in found[:4])
            raise CaptureFormatError(f"{path}: no log of rank {rank} among {len(found)} ({names})")
    if len(logs) == 1:
        return read_trace(logs[0])
    if logs:
        names = ", ".join(log.name for log in logs[:4])
        raise CaptureFormatError(f"{path}: {len(logs)} logs ({names}, ...); take one, or --rank")
    trace, budget = Trace(), _Budget(path)
    for file in sorted(path.rglob("*"), key=_tlparse_order):
        match = _TLPARSE_FILE.fullmatch(file.name)
        # A link may lead anywhere.
        if match is not None and file.is_file() and not file.is_symlink():
            if file.stat().st_size > MAX_LINE:
                raise CaptureFormatError(f"{file.name}: more than {MAX_LINE} bytes")
            compile_id = "/".join(re.findall(r"\d+", file.parent.name)[:2]) or "0/0"
            text = file.read_text(encoding="utf-8", errors="replace")
            trace.entries.append(Entry(match[1], compile_id, None, budget.take(text)))
    if not trace.entries:
        if captures := sorted(path.glob("*.json.gz")):
            names = ", ".join(capture.name for capture in captures[:4])
            raise CaptureFormatError(
                f"{path}: a folder of {len(captures)} captures; take one ({names})"
            )
        raise CaptureFormatError(f"{path}: a folder without logs, and without graphs of tlparse")
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


def _tlparse_order(path: Path) -> tuple[str, int]:
    number = re.search(r"_(\d+)\.\w+$", path.name)
    return str(path.parent), int(number[1]) if number else -1


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
    numbers = [metadata.get(key) for key in _COMPILE_KEYS]
    compile_id = "/".join(str(n) for n in numbers if isinstance(n, int)) or "0/0"
    trace.entries.append(Entry(kind, compile_id, rank if isinstance(rank, int) else None, payload))
    return True
