"""Device times of a profile, on traces small enough to count by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("_bench_profile")
        sys.modules.pop("_bench_profile", None)


def kernel(name: str, start_us: float, us: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": us}


EVENTS = [
    kernel("aten::mm", 0, 9000, "cpu_op"),  # of the host: no part of it
    {"ph": "i", "cat": "kernel", "name": "mark", "ts": 0},
    kernel("gemm", 1000, 2000),  # 1 to 3 ms
    kernel("triton_add", 2500, 1500),  # on another stream, to 4 ms
    kernel("ncclDevKernel_AllGather", 500, 1500),  # half a millisecond alone
    kernel("ncclDevKernel_ReduceScatter", 3500, 1500),  # one alone, to 5 ms
    kernel("Memcpy DtoD", 6000, 1000, "gpu_memcpy"),  # behind a millisecond of nothing
]


def test_times_are_those_of_the_unions(tool: Any) -> None:
    found = tool.device_times_of(EVENTS, 1)
    assert found == tool.DeviceTimes(
        compute_ms=4.0, communication_ms=3.0, exposed_ms=1.5, idle_ms=1.0, nccl_kernels=2.0
    )


def test_steps_share_them(tool: Any) -> None:
    found = tool.device_times_of(EVENTS, 2)
    assert (found.compute_ms, found.nccl_kernels) == (2.0, 1.0)


def test_file_is_read(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": EVENTS}))
    assert tool.device_times(path, 1) == tool.device_times_of(EVENTS, 1)


def test_trace_of_a_host_alone_is_refused(tool: Any) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        tool.device_times_of(EVENTS[:1], 1)
