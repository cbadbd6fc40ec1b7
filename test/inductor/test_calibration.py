"""The calibration table: its file format, its numbers, and what a model takes from it."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
    MAX_FILE_BYTES,
    CalibrationError,
    CalibrationTable,
    load_calibration,
    save_calibration,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import (
    LinkClass,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

aten = torch.ops.aten
GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
INTRA, INTER = LinkClass.INTRA_NODE, LinkClass.INTER_NODE
EXAMPLE = Path(__file__).parents[2] / "tools/results/calibration_gloo_example.json"

DOCUMENT: dict[str, Any] = {
    "format": "torch_patches.calibration",
    "version": 1,
    "device": "test device",
    "about": {"torch": "2.13.0"},
    "collectives": [
        {
            "kind": "all_gather",
            "link": "intra_node",
            "group_size": 4,
            "size_bytes": [1000, 2000, 4000],
            "ms": [1.0, 3.0, 4.0],
        }
    ],
    "matmul": [{"dtype": "bfloat16", "flops": [10**9, 10**12], "tflops": [1.0, 100.0]}],
    "dram_gb_per_s": 500.0,
    "kernel_issue_us": 1.0,
    "collective_issue_us": 2.0,
    "coalesced_member_issue_us": 3.0,
    "wait_issue_us": 4.0,
    "compute_slowdown": 1.5,
    "loaded_launch_us": 60.0,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[object], Path]:
    """A file with the document, or with bytes as they are."""

    def write(document: object) -> Path:
        path = tmp_path / "table.json"
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def table(write: Callable[[object], Path]) -> CalibrationTable:
    return load_calibration(write(DOCUMENT))


def changed(path: str, value: object) -> dict[str, Any]:
    """The document with the value at ``collectives.0.kind``."""
    document = copy.deepcopy(DOCUMENT)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = document
    for part in way:
        place = place[part]
    place[last] = value
    return document


# -- the file -------------------------------------------------------------------------------------


def test_saved_table_loads_as_the_same(table: CalibrationTable, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    save_calibration(path, table)
    assert load_calibration(path) == table
    assert load_calibration(path).content_digest == table.content_digest
    assert "[1000, 2000, 4000]" in path.read_text()


def test_nothing_but_the_device_is_needed(write: Callable[[object], Path]) -> None:
    keys = ("format", "version", "device")
    bare = {key: DOCUMENT[key] for key in keys}
    table = load_calibration(write(bare))
    assert table == CalibrationTable("test device")
    nulls = {key: bare.get(key) for key in DOCUMENT}
    assert load_calibration(write(nulls)).content_digest == table.content_digest


def test_digest_is_of_the_content_not_of_its_spelling(write: Callable[[object], Path]) -> None:
    second = {**DOCUMENT["collectives"][0], "group_size": 2}
    document = changed("collectives", [*DOCUMENT["collectives"], second])
    digest = load_calibration(write(document)).content_digest
    spelled = dict(reversed(document.items()))
    spelled["collectives"] = spelled["collectives"][::-1]
    spelled["dram_gb_per_s"] = 500
    spelled["about"] = {"date": "today"}
    assert load_calibration(write(spelled)).content_digest == digest
    for path, value in [
        ("device", "another"),
        ("collectives.0.ms.0", 1.5),
        ("matmul.0.tflops.1", 99.0),
        ("wait_issue_us", None),
    ]:
        assert load_calibration(write(changed(path, value))).content_digest != digest


BAD_VALUES: list[tuple[str, object, str]] = [
    ("format", "other", "format: 'other' is not allowed; use 'torch_patches.calibration'"),
    ("version", 2, "version: 2 is not allowed; use 1"),
    ("version", True, "version: True"),
    ("device", "two\nlines", "device: .* printable text"),
    ("device", "x" * 201, "device: .* at most 200"),
    ("device", None, "device: None"),
    ("about", {"date": 3}, "about: 3 is not allowed"),
    ("about", ["date"], "about: .* an object of texts"),
    ("computeslowdown", 1.1, "a key of the file: 'computeslowdown'.*compute_slowdown"),
    ("collectives.0.rank", 0, "a key of collectives\\[0\\]: 'rank'"),
    ("collectives", {}, "collectives: .* a list of 0 to 4096"),
    ("collectives", [[]], "collectives\\[0\\]: \\[\\] is not allowed; use an object with kind"),
    ("collectives.0.kind", "gather", "kind: 'gather' is not allowed; use all_gather, reduce_sc"),
    ("collectives.0.kind", [1], "collectives\\[0\\].kind"),
    ("collectives.0.link", "nvlink", "intra_node, inter_node"),
    ("collectives.0.group_size", 1, "a whole number from 2 to"),
    ("collectives.0.group_size", 2.0, "a whole number from 2 to"),
    ("collectives.0.size_bytes", [1000], "size_bytes: .* 2 to 256 entries"),
    ("collectives.0.size_bytes", [1000, 1000, 2000], "size_bytes\\[1\\]: 1000 .* from 1001 to"),
    ("collectives.0.size_bytes", [0, 1, 2], "size_bytes\\[0\\]: 0"),
    ("collectives.0.size_bytes", list(range(1, 300)), "2 to 256 entries"),
    ("collectives.0.ms", [1.0, 2.0], "ms: .* 3 to 3 entries"),
    ("collectives.0.ms", [1.0, -2.0, 3.0], "ms\\[1\\]: -2.0"),
    ("collectives.0.ms", [1.0, "2", 3.0], "ms\\[1\\]: '2'"),
    ("collectives.0.ms", [1.0, True, 3.0], "ms\\[1\\]: True"),
    ("collectives.0.ms", [1.0, 10**400, 3.0], "ms\\[1\\]: 1000"),
    ("matmul.0.dtype", "bf16", "dtype: 'bf16' is not allowed; use a torch dtype's name"),
    ("matmul.0.dtype", "float", "dtype: 'float'"),
    ("matmul.0.tflops", [0, 1], "tflops\\[0\\]: 0"),
    ("dram_gb_per_s", 0, "dram_gb_per_s: 0"),
    ("compute_slowdown", 0.9, "compute_slowdown: 0.9 is not allowed; use a number from 1 to 100"),
    ("wait_issue_us", -1, "wait_issue_us: -1"),
    ("loaded_launch_us", -0.5, "loaded_launch_us: -0.5 is not allowed; use a number from 0 to"),
]


@pytest.mark.parametrize(("path", "value", "text"), BAD_VALUES)
def test_wrong_value_is_refused_by_place(
    write: Callable[[object], Path], path: str, value: object, text: str
) -> None:
    file = write(changed(path, value))
    with pytest.raises(CalibrationError, match=text) as caught:
        load_calibration(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value)) < 500


def test_longest_text_is_accepted(write: Callable[[object], Path]) -> None:
    assert load_calibration(write(changed("device", "x" * 200))).device == "x" * 200


@pytest.mark.parametrize(
    ("path", "largest"),
    [
        ("collectives.0.size_bytes.2", 2**60),  # more than any tensor has
        ("matmul.0.flops.1", 2**60),
        ("collectives.0.ms.2", 1e9),
        ("dram_gb_per_s", 1e9),
        ("compute_slowdown", 100.0),
    ],
)
def test_largest_number_is_accepted_and_no_larger_one(
    write: Callable[[object], Path], path: str, largest: float
) -> None:
    load_calibration(write(changed(path, largest)))
    with pytest.raises(CalibrationError, match="is not allowed"):
        load_calibration(write(changed(path, largest + 1)))


@pytest.mark.parametrize("key", ["size_bytes", "ms"])
def test_as_many_points_as_are_allowed_are_accepted(
    write: Callable[[object], Path], key: str
) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["collectives"][0].update(size_bytes=list(range(1, 257)), ms=[1.0] * 256)
    load_calibration(write(document))
    document["collectives"][0][key].append(300)
    with pytest.raises(CalibrationError, match="256 entries"):
        load_calibration(write(document))


def test_missing_and_repeated_entries(write: Callable[[object], Path]) -> None:
    document = copy.deepcopy(DOCUMENT)
    del document["collectives"][0]["ms"]
    with pytest.raises(CalibrationError, match=r"collectives\[0\]: 'ms' is missing"):
        load_calibration(write(document))
    for key in ("collectives", "matmul"):
        with pytest.raises(CalibrationError, match=rf"{key}\[1\]: measured twice"):
            load_calibration(write(changed(key, DOCUMENT[key] * 2)))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"\x80\x04K\x01.", "not JSON in UTF-8"),  # a pickle
        (b'{"device": "a", "device": "b"}', "key 'device' stands twice"),
        (b'{"ms": NaN}', "NaN is no JSON number"),
        (b'{"ms": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "nested deeper than 6 levels"),
        (b'{"a":' * 7, "nested deeper than 6 levels"),
        (b'["[[[[[[[[[", "\\"[[[[[[["]', "use an object with format, version, device"),
        (b"3", "the file: 3 is not allowed"),
        (b" " * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_damaged_or_hostile_file(write: Callable[[object], Path], data: bytes, text: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        load_calibration(write(data))
    assert text in str(caught.value)


def test_infinity_that_json_writes_as_a_number(write: Callable[[object], Path]) -> None:
    data = json.dumps(DOCUMENT).replace("500.0", "1e999").encode()
    with pytest.raises(CalibrationError, match="dram_gb_per_s: inf"):
        load_calibration(write(data))


def test_many_equal_keys_are_refused_quickly(write: Callable[[object], Path]) -> None:
    data = b"{" + b",".join(b'"%d":0' % i for i in range(60_000)) + b',"1":0}'
    before = time.process_time()
    with pytest.raises(CalibrationError, match="'1' stands twice"):
        load_calibration(write(data))
    assert time.process_time() - before < 5  # quadratic work takes minutes


@pytest.mark.parametrize("cut", range(0, len(json.dumps(DOCUMENT)) - 1, 37))
def test_truncated_file_is_refused(write: Callable[[object], Path], cut: int) -> None:
    with pytest.raises(CalibrationError):
        load_calibration(write(json.dumps(DOCUMENT).encode()[:cut]))


def test_file_with_a_flipped_byte_loads_or_is_refused(write: Callable[[object], Path]) -> None:
    rng = random.Random(0)
    data = json.dumps(DOCUMENT).encode()
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            load_calibration(write(bytes(damaged)))
        except CalibrationError:
            refused += 1
    assert refused > 150


def test_unreadable_file_is_an_os_error(tmp_path: Path) -> None:
    """Rank-local trouble: it must not look like a table that all ranks refuse."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # reading it would wait forever
    for path in (tmp_path / "missing.json", tmp_path, pipe):
        with pytest.raises(OSError):
            load_calibration(path)


def test_table_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_calibration(path, CalibrationTable("good"))
    with pytest.raises(CalibrationError, match="dram_gb_per_s"):
        save_calibration(path, CalibrationTable("bad", dram_gb_per_s=-1.0))
    assert load_calibration(path).device == "good"
    assert os.listdir(tmp_path) == ["table.json"]


def test_example_in_the_repository_loads() -> None:
    table = load_calibration(EXAMPLE)
    assert {times.kind for times in table.collectives} == set(CollectiveKind)
    assert table.matmul and table.dram_gb_per_s
