"""A profile beside the estimates: traces are written here as ``torch.profiler`` writes them on NCCL.

Names of arguments are those in torch's ``torch/csrc/profiler`` (2.13): "Collective name",
"In msg nelems", "Out msg nelems", "Group size", "dtype".
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from torch_patches import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.captured import load_captured
from torch_patches.viewing.picture import Picture, Run
from torch_patches.viewing.profile import (
    ComparedRow,
    Profile,
    ProfileError,
    compare,
    read_profile,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")
LLAMA = Path(__file__).parents[1] / "data" / "llama_8l_fsdp8.json.gz"
NAMES = {
    "all_gather": ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    "reduce_scatter": ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)"),
}  # fmt: skip
DTYPES = {"float32": ("Float", 4), "bfloat16": ("BFloat16", 2)}


@pytest.fixture(scope="module")
def report(as_on_gpu: None) -> Report:
    return optimize_graph(load_captured(LLAMA).graphs["bw"], bucketing_mode="transformer_block")


def picture_of(report: Report) -> Picture:
    story: Any = report.story
    return story.picture


def kernel(name: str, start_ms: float, end_ms: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start_ms * 1e3,
            "dur": (end_ms - start_ms) * 1e3, "args": args}  # fmt: skip


def events_of(run: Run, offset_ms: float, slower: float = 1.0) -> list[dict[str, Any]]:
    """What a profiler would see of a simulated run; collectives take ``slower`` times as long."""
    events = [
        kernel("triton_poi_fused_0", offset_ms + k.start_ms, offset_ms + k.end_ms)
        for k in run.kernels
    ]
    for flight in run.flights:
        launch = flight.launch
        told, name = NAMES[launch.kind]
        dtype, width = DTYPES[launch.dtype]
        full, part = launch.size_bytes // width, launch.size_bytes // width // 8
        sent, got = (part, full) if launch.kind == "all_gather" else (full, part)
        start = offset_ms + flight.start_ms
        args = {"Collective name": told, "In msg nelems": sent, "Out msg nelems": got,
                "Group size": 8, "dtype": dtype, "Process Group Name": "0"}  # fmt: skip
        end = start + slower * (flight.end_ms - flight.start_ms)
        events.append(kernel(name, start, end, **args))
    return events


def written(path: Path, events: list[dict[str, Any]], steps: int = 1) -> Path:
    end = max((e["ts"] + e["dur"] for e in events), default=0)
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": end / steps * i,
         "dur": end / steps}
        for i in range(steps)
    ]  # fmt: skip
    text = json.dumps({"schemaVersion": 1, "traceEvents": [*events, *marks, {"ph": "M"}]})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def row(rows: tuple[ComparedRow, ...], start: str) -> ComparedRow:
    return next(row for row in rows if row.name.startswith(start))


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_profile_of_what_was_estimated_is_off_nowhere(
    report: Report, tmp_path: Path, suffix: str
) -> None:
    picture = picture_of(report)
    run = picture.after
    events = [*events_of(run, 0.0), *events_of(run, run.total_ms)]
    profile = read_profile(written(tmp_path / f"x.{suffix}", events, steps=2))
    assert profile.steps == 2 and len(profile.launches) == 2 * len(run.flights)
    found = compare(profile, [picture.before], [run])
    assert "after" in found.note and "match none" not in found.note
    assert found.off == ()
    launches = {r.name for r in found.rows[3:]}
    sizes = {(f.launch.kind, f.launch.size_bytes) for f in run.flights}
    assert len(launches) == len(sizes)
    assert all(r.off_share == pytest.approx(0, abs=1e-6) for r in found.rows[3:])
    assert row(found.rows, "compute of").estimated_ms > 0
    assert row(found.rows, "collectives of").measured_ms >= run.exposed_ms - 1e-9
    assert row(found.rows, "a whole").count == 2


def test_slower_collectives_are_off_and_compute_is_not(report: Report, tmp_path: Path) -> None:
    """They take 1.5 times as long as estimated: the estimate is a third too low."""
    picture = picture_of(report)
    profile = read_profile(written(tmp_path / "x.json", events_of(picture.after, 0.0, slower=1.5)))
    found = compare(profile, [picture.before], [picture.after])
    for each in found.rows[3:]:
        assert each.is_off and each.difference == "-33%"


def test_a_profile_of_the_input_is_compared_with_it(report: Report, tmp_path: Path) -> None:
    picture = picture_of(report)
    profile = read_profile(written(tmp_path / "x.json", events_of(picture.before, 0.0)))
    found = compare(profile, [picture.before], [picture.after])
    assert "as they were given" in found.note and "match none" not in found.note
    assert sum(row.count for row in found.rows[3:]) == len(picture.before.flights)


def test_exposed_time_is_what_no_other_kernel_covers(tmp_path: Path) -> None:
    """Compute 0-10 and 14-20, a gather 8-14 and another 12-15: 4 ms have nothing beside them."""
    events = [
        kernel("gemm", 0, 10), kernel("gemm", 14, 20), kernel("elementwise", 15, 16), kernel("elementwise", 17, 18),
        kernel("ncclDevKernel_AllGather_RING_LL", 8, 14),
        kernel("ncclKernel_AllReduce_RING", 12, 15),
    ]  # fmt: skip
    profile = read_profile(written(tmp_path / "x.json", events, steps=0))
    assert (profile.compute_ms, profile.exposed_ms, profile.span_ms) == (16.0, 4.0, 20.0)
    assert [(x.kind, x.size_bytes, x.group_size, x.ms) for x in profile.launches] == [
        ("all_gather", None, None, 6.0), ("all_reduce", None, None, 3.0),
    ]  # fmt: skip
    assert profile.steps == 1
    assert read_profile(tmp_path / "x.json", steps=4).steps == 4


def test_launches_that_no_graph_has_are_counted(report: Report, tmp_path: Path) -> None:
    picture = picture_of(report)
    stranger = kernel("ncclDevKernel_Broadcast_RING_LL", 0, 1, dtype="Float",
                      **{"In msg nelems": 3, "Out msg nelems": 3, "Collective name": "broadcast"})  # fmt: skip
    profile = read_profile(written(tmp_path / "x.json", [*events_of(picture.after, 0), stranger]))
    assert "1 measured collectives match none" in compare(profile, [], [picture.after]).note


@pytest.mark.parametrize(("share", "matches"), [(1.005, True), (1.02, False)])
def test_padding_is_looked_through(
    report: Report, tmp_path: Path, share: float, matches: bool
) -> None:
    """The ranks of these launches are not told, and each sends a little more than was estimated."""
    run = picture_of(report).after
    events = events_of(run, 0.0)
    for event in events:
        for name in ("In msg nelems", "Out msg nelems"):
            if name in event["args"]:
                event["args"][name] = int(event["args"][name] * share)
        event["args"].pop("Group size", None)
    found = compare(read_profile(written(tmp_path / "x.json", events)), [], [run])
    assert ("match none" not in found.note) == matches
    counts = sum(r.count for r in found.rows[3:])
    assert counts == (len(run.flights) if matches else 0)


def test_other_ranks_are_another_launch(report: Report, tmp_path: Path) -> None:
    run = picture_of(report).after
    events = events_of(run, 0.0)
    for event in events:
        if event["args"]:
            event["args"]["Group size"] = 2
    found = compare(read_profile(written(tmp_path / "x.json", events)), [], [run])
    assert len(found.rows) == 3 and f"{len(run.flights)} measured" in found.note


@pytest.mark.parametrize(
    ("estimated", "measured", "off", "text"),
    [(1.2, 1.0, False, "+20%"), (1.21, 1.0, True, "+21%"), (0.79, 1.0, True, "-21%"),
     (0.8, 1.0, False, "-20%"), (1.0, 0.0, True, "not measured"), (0.0, 0.0, False, "+0%")],
)  # fmt: skip
def test_the_mark_is_above_a_fifth(estimated: float, measured: float, off: bool, text: str) -> None:
    found = ComparedRow("x", 1, estimated, measured)
    assert (found.is_off, found.difference) == (off, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no trace"),
        (b"\x1f\x8bxx", "no trace"),
        (b"[1, 2", "no trace"),
        (b"[" * 100_000, "no trace"),
        (b"{}", "no traceEvents"),
        (b"[]", "no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1}]}', "no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "1", "dur": 1}, 7, null]}', "no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -1e400}]}', "no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": NaN}]}', "no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1' + b"0" * 400 + b"}]}", "no kernels"),
    ],
)  # fmt: skip
def test_damaged_files_are_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def test_odd_arguments_of_kernels_do_no_harm(tmp_path: Path) -> None:
    odd = [
        {**kernel("ncclDevKernel_AllGather", 0, 1), "args": "text"},
        kernel("ncclDevKernel_AllGather", 0, 1, dtype=7, **{"In msg nelems": "8", "Group size": None}),
        {**kernel("x", 0, 1, **{"Collective name": 5}), "name": None},
    ]  # fmt: skip
    profile: Profile = read_profile(written(tmp_path / "x.json", odd))
    assert [x.size_bytes for x in profile.launches] == [None, None, None]
    assert [x.kind for x in profile.launches] == ["all_gather", "all_gather", "5"]
