"""The file of a calibration table: JSON, one file for all ranks.

    table = load_calibration("h100.json")
    table.content_digest       # sha256 of what estimates read: cache key, reports

Measured numbers enter a plan through such a file only.  Ranks that measured for themselves would
plan differently, start their collectives in different orders, and hang; so give every rank the
same file (equal contents suffice: the path does not count).

Format, version 1 (``null`` or a missing key: not measured)::

    {"format": "torch_patches.calibration", "version": 1,
     "device": "NVIDIA H100 80GB HBM3",              printable text, at most 200 characters
     "about": {"torch": "2.13.0"},                   texts for people, not part of the digest
     "collectives": [
       {"kind": "all_gather",                        all_gather, reduce_scatter, all_reduce,
                                                     all_to_all or broadcast
        "link": "intra_node",                        or inter_node
        "group_size": 8,                             at least 2
        "size_bytes": [65536, 1048576],              of the full tensor; 2 to 256, rising
        "ms": [0.021, 0.034]}],                      one for each size
     "matmul": [
       {"dtype": "bfloat16", "flops": [17179869184], "tflops": [610.0]}],
     "dram_gb_per_s": 2870.0,
     "kernel_issue_us": 5.0, "collective_issue_us": 31.0,
     "coalesced_member_issue_us": 10.0, "wait_issue_us": 1.0,
     "compute_slowdown": 1.17,                       at least 1
     "loaded_launch_us": 40.0}

Bounds: 1 MiB, six levels, 4096 entries in a list.  Unknown and repeated keys are refused: a
misspelt one would silently leave the constants in use.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import LinkClass
from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import (
    SCALARS,
    CalibrationTable,
    CollectiveTimes,
    MatmulRates,
    content_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

__all__ = ["CalibrationError", "CalibrationTable", "load_calibration", "save_calibration"]

FORMAT = "torch_patches.calibration"
VERSION = 1
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 6
MAX_ENTRIES = 4096
MAX_POINTS = 256
MAX_TEXT = 200
_LARGEST = 1e9
_MAX_AMOUNT = 1 << 60  # bytes or flops of one op
_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class CalibrationError(ValueError):
    """The file is no calibration table; the text names file, place and what is allowed."""


def load_calibration(path: str | os.PathLike[str]) -> CalibrationTable:
    """Read a table.

    Raises:
        CalibrationError: the file is damaged, hostile, too large, or of another format.
        OSError: it cannot be read.  That is one rank's trouble; going on without the table would
            give this rank another plan than the others.
    """
    name = os.fspath(path)
    return _table(name, _read(name))


def _table(name: str, data: bytes) -> CalibrationTable:
    document = _parse(name, data)
    if isinstance(document, dict):  # first: another version may have other keys
        for key, expected in (("format", FORMAT), ("version", VERSION)):
            found = document.get(key)
            if type(found) is not type(expected) or found != expected:
                raise _Place(name, key, found).refuse(repr(expected))
    members = _Place(name, "the file", document).keys(
        "format", "version", "device", optional=("about", "collectives", "matmul", *SCALARS)
    )
    collectives = _list(members, "collectives", _collective_times)
    matmul = _list(members, "matmul", _matmul_rates)
    _no_repeats(members, "collectives", [(t.kind, t.link, t.group_size) for t in collectives])
    _no_repeats(members, "matmul", [rates.dtype for rates in matmul])
    about = members["about"].texts() if "about" in members else ()
    scalars = {key: _scalar(members, key) for key in SCALARS}
    return CalibrationTable(members["device"].text(), collectives, matmul, about=about, **scalars)


def save_calibration(path: str | os.PathLike[str], table: CalibrationTable) -> None:
    """Write a table, whole or not at all.

    Raises:
        CalibrationError: it holds what :func:`load_calibration` would refuse.
        OSError: it cannot be written.
    """
    target = Path(path)
    document = {"format": FORMAT, "version": VERSION, **content_of(table)}
    text = json.dumps(document, indent=1) + "\n"
    # Lists of numbers on one line each: a person can read the file.
    text = re.sub(r"\[\s+([-+.e\d][^\[\]{}\"]*?)\s+\]", _on_one_line, text)
    _table(str(target), text.encode())
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".calibration") as folder:
        draft = Path(folder) / "table.json"
        draft.write_text(text)
        os.replace(draft, target)


def _on_one_line(match: re.Match[str]) -> str:
    return "[" + " ".join(match[1].split()) + "]"


# -- bytes to JSON --------------------------------------------------------------------------------


def _read(name: str) -> bytes:
    # A pipe would make the compile wait for a writer.
    if not stat.S_ISREG(os.stat(name).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    with open(name, "rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CalibrationError(f"{name}: more than {MAX_FILE_BYTES} bytes")
    return data


def _parse(name: str, data: bytes) -> Any:
    # Before the decoder, which recurses: a RecursionError would depend on the caller's stack.
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(data):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            raise CalibrationError(f"{name}: nested deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except ValueError as error:  # also bad UTF-8, and numbers of thousands of digits
        raise CalibrationError(f"{name}: not JSON in UTF-8 ({error})") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        (repeated, _), *_ = counts.most_common(1)
        raise ValueError(f"key {reprlib.repr(repeated)} stands twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# -- JSON to the table ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A value of the file, and where it stands."""

    file: str
    place: str
    value: Any

    def refuse(self, allowed: str) -> CalibrationError:
        shown = reprlib.repr(self.value)
        return CalibrationError(f"{self.file}: {self.place}: {shown} is not allowed; use {allowed}")

    def keys(self, *required: str, optional: tuple[str, ...] = ()) -> dict[str, _Place]:
        """Members of an object by key; those that are null are left out."""
        allowed = (*required, *optional)
        if not isinstance(self.value, dict):
            raise self.refuse("an object with " + ", ".join(allowed))
        for key in self.value:
            if key not in allowed:
                raise _Place(self.file, f"a key of {self.place}", key).refuse(", ".join(allowed))
        for key in required:
            if key not in self.value:
                raise CalibrationError(f"{self.file}: {self.place}: {key!r} is missing")
        return {
            key: _Place(self.file, key if self.place == "the file" else f"{self.place}.{key}", item)
            for key, item in self.value.items()
            if item is not None or key in required
        }

    def items(self, low: int, high: int) -> list[_Place]:
        if not isinstance(self.value, list) or not low <= len(self.value) <= high:
            raise self.refuse(f"a list of {low} to {high} entries")
        return [
            _Place(self.file, f"{self.place}[{index}]", item)
            for index, item in enumerate(self.value)
        ]

    def number(self, low: float, high: float) -> float:
        # bool is an int to Python.
        if type(self.value) not in (int, float) or not low <= self.value <= high:
            raise self.refuse(f"a number from {low:g} to {high:g}")
        return float(self.value)

    def whole(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def text(self) -> str:
        value = self.value
        if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_TEXT:
            raise self.refuse(f"printable text of at most {MAX_TEXT} characters")
        return value

    def texts(self) -> tuple[tuple[str, str], ...]:
        if not isinstance(self.value, dict) or len(self.value) > MAX_ENTRIES:
            raise self.refuse("an object of texts")
        parts = [
            (_Place(self.file, f"a key of {self.place}", k), _Place(self.file, self.place, v))
            for k, v in self.value.items()
        ]
        return tuple((key.text(), value.text()) for key, value in parts)


def _list(table: dict[str, _Place], key: str, read: Callable[[_Place], Any]) -> tuple[Any, ...]:
    return tuple(map(read, table[key].items(0, MAX_ENTRIES))) if key in table else ()


def _no_repeats(table: dict[str, _Place], key: str, identities: list[Any]) -> None:
    seen = set()
    for index, identity in enumerate(identities):
        if identity in seen:
            raise CalibrationError(f"{table[key].file}: {key}[{index}]: measured twice")
        seen.add(identity)


def _scalar(table: dict[str, _Place], key: str) -> Any:
    if key not in table:
        return None
    low = {"compute_slowdown": 1.0, "dram_gb_per_s": 1e-3}.get(key, 0.0)
    return table[key].number(low, 100.0 if key == "compute_slowdown" else _LARGEST)


def _collective_times(entry: _Place) -> CollectiveTimes:
    parts = entry.keys("kind", "link", "group_size", "size_bytes", "ms")
    sizes = _rising(parts["size_bytes"], 2)
    return CollectiveTimes(
        _member(parts["kind"], CollectiveKind),
        _member(parts["link"], LinkClass),
        parts["group_size"].whole(2, 1 << 20),
        sizes,
        _one_for_each(parts["ms"], len(sizes)),
    )


def _matmul_rates(entry: _Place) -> MatmulRates:
    parts = entry.keys("dtype", "flops", "tflops")
    flops = _rising(parts["flops"], 1)
    name = parts["dtype"].text()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
        raise parts["dtype"].refuse("a torch dtype's name, as bfloat16")
    return MatmulRates(dtype, flops, _one_for_each(parts["tflops"], len(flops)))


def _member(place: _Place, enumeration: Any) -> Any:
    for member in enumeration:
        if place.value == member.value:
            return member
    raise place.refuse(", ".join(member.value for member in enumeration))


def _rising(place: _Place, at_least: int) -> tuple[int, ...]:
    items = place.items(at_least, MAX_POINTS)
    low = 1
    values = []
    for item in items:
        values.append(item.whole(low, _MAX_AMOUNT))
        low = values[-1] + 1
    return tuple(values)


def _one_for_each(place: _Place, count: int) -> tuple[float, ...]:
    return tuple(item.number(1e-9, _LARGEST) for item in place.items(count, count))
