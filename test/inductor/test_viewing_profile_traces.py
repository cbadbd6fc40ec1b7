"""Traces of ``torch.profiler`` as NCCL and gloo make them, beside what the graphs launch.

NCCL's are written by hand, with the names of torch's ``torch/csrc/profiler/util.h`` and Kineto: a kernel
has the ``correlation`` of the call that launched it and the ``External id`` of the CPU event around
that; for a collective this is ``record_param_comms``, whose arguments Kineto copies into the kernel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from torch_patches import optimize_graph
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.viewing.picture import Run
from torch_patches.viewing.profile import Profile, compare, read_profile

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def told(name: str, sent: int, got: int, group: str = "0", ranks: int = 4) -> dict[str, Any]:
    """Arguments of a collective in float32."""
    return {"Collective name": name, "In msg nelems": sent, "Out msg nelems": got, "dtype": "Float",
            "Group size": ranks, "Process Group Name": group, "Process Group Description": "mesh_dp",
            "Process Group Ranks": str(list(range(ranks))), "Rank": 0}  # fmt: skip


class Trace:
    """Events with running numbers; times are in us."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._count = 0

    def event(self, cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        tid = 7 if cat == "kernel" else 1
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts,
                            "dur": dur, "args": args})  # fmt: skip

    def launch(
        self, name: str, ts: float, *spans: tuple[float, float], cpu: Any = None, **args: Any
    ) -> None:
        """A call on the CPU at ``ts``, and its kernels (start, duration).

        Args:
            cpu: arguments of a ``record_param_comms`` around it.
            args: of the kernels.
        """
        self._count += 1
        around = {"External id": 1000 + self._count}
        if cpu is not None:
            self.event("cpu_op", "record_param_comms", ts, 2, **around, **cpu)
        for start, duration in spans:
            self._count += 1
            number = {"correlation": self._count}
            self.event("cuda_runtime", "cudaLaunchKernelExC", ts + 1, 1, **number, **around)
            self.event(
                "kernel", name, start, duration, device=0, stream=20, **number, **around, **args
            )

    def step(self, number: int, ts: float, dur: float) -> None:
        self.event("user_annotation", f"ProfilerStep#{number}", ts, dur)
        # The device's own has another span.
        self.event("gpu_user_annotation", f"ProfilerStep#{number}", ts + 500, dur)

    def read(self, folder: Path, steps: int | None = None) -> Profile:
        path = folder / "trace.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return read_profile(path, steps)


def run_of(groups: dict[str, str]) -> Run:
    """Gathers of 4 ranks, 4 KiB each, with a product behind each; or all-reduces ("reduce") or
    reduce-scatters ("scatter") of it."""
    b = GraphBuilder()
    shards = {name: b.placeholder(8, 32) for name in groups}
    whole = {name: b.placeholder(32, 32) for name in groups}
    made = []
    for name, shard in shards.items():
        if groups[name] == "gather":
            made.append(b.call(torch.ops.aten.mm, whole[name], b.gather_and_wait(shard, 4, name)))
        elif groups[name] == "scatter":
            made.append(b.scatter_and_wait(whole[name], "sum", 4, name))
        else:
            product = b.call(torch.ops.aten.mm, whole[name], whole[name])
            made.append(b.reduce_and_wait(product, "sum", name))
    story: Any = optimize_graph(b.output(*made), bucketing_mode="auto").story
    run: Run = story.picture.before
    return run


# -- NCCL -----------------------------------------------------------------------------------------


def test_what_a_kernel_does_not_tell_its_call_on_the_cpu_does(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch(GATHER, 0, (10, 30), cpu=told("_allgather_base", 256, 1024))
    trace.launch("triton_poi_fused_0", 5, (50, 20))
    (launch,) = trace.read(tmp_path).launches
    assert (launch.kind, launch.size_bytes, launch.group_size) == ("all_gather", 4096, 4)
    assert (launch.group, launch.ms) == ("0", pytest.approx(0.03))


def test_kernels_of_one_coalesced_collective_are_one(tmp_path: Path) -> None:
    """Numbers of elements are those of all its tensors."""
    trace = Trace()
    args = told("allgather_into_tensor_coalesced", 512, 2048)
    trace.launch(GATHER, 0, (10, 30), (41, 9), cpu=args, **args)
    trace.launch(GATHER, 3, (60, 5), cpu=args, **args)
    first, second = trace.read(tmp_path).launches
    assert (first.size_bytes, first.ms, second.ms) == (
        8192,
        pytest.approx(0.04),
        pytest.approx(0.005),
    )


def test_kernels_of_a_cuda_graph_are_many(tmp_path: Path) -> None:
    """One call launches all, and nothing tells what the collectives are but names."""
    trace = Trace()
    trace.launch(GATHER, 0, (10, 30), (41, 9))
    assert [x.kind for x in trace.read(tmp_path).launches] == ["all_gather", "all_gather"]


def test_a_barrier_is_no_all_reduce(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch(REDUCE, 0, (10, 30), cpu=told("barrier", 1, 1), **told("barrier", 1, 1))
    trace.launch("ncclDevKernel_Generic_4(...)", 50, (60, 5), **told("coalesced", 1, 1))
    assert [x.kind for x in trace.read(tmp_path).launches] == ["barrier", "coalesced"]


@pytest.mark.parametrize(
    ("text", "ranks"), [("[0, 2, 4]", 3), ("[0, 1, ..., 63]", None), ("[]", None), (7, None)]
)
def test_ranks_are_counted_where_nothing_tells_how_many(
    text: Any, ranks: int | None, tmp_path: Path
) -> None:
    trace = Trace()
    args = told("_allgather_base", 256, 1024) | {"Process Group Ranks": text}
    del args["Group size"]
    trace.launch(GATHER, 0, (10, 30), **args)
    assert trace.read(tmp_path).launches[0].group_size == ranks


def test_one_device_is_read(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch(GATHER, 0, (10, 30), **told("_allgather_base", 256, 1024))
    trace.event("kernel", "gemm", 0, 1000, device=1)
    profile = trace.read(tmp_path)
    assert (profile.compute_ms, profile.exposed_ms) == (0, pytest.approx(0.03))
    assert profile.notes == ("Of 2 devices in it, device 0 is read.",)


# -- steps ----------------------------------------------------------------------------------------


def stepped(durations: list[float], extra: int | None = None) -> Trace:
    """A gather in each step of 1 ms, launched in it and running behind its end; in step ``extra`` there
    is another one."""
    trace = Trace()
    for number, duration in enumerate(durations):
        ts = 1000 * number
        trace.step(number, ts, 1000)
        args = told("_allgather_base", 256, 1024)
        trace.launch(GATHER, ts + 900, (ts + 1100, duration), **args)
        trace.launch("gemm", ts + 950, (ts + 1100, 50))
        if number == extra:
            trace.launch(GATHER, ts + 10, (ts + 300, 40), **args)
    return trace


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    profile = stepped([100, 100, 100]).read(tmp_path)
    assert profile.steps == 3
    assert [launch.step for launch in profile.launches] == [0, 1, 2]
    assert [step.exposed_ms for step in profile.by_step] == pytest.approx([0.05] * 3)


def test_launches_outside_of_all_steps_do_not_count(tmp_path: Path) -> None:
    trace = stepped([100, 100])
    trace.launch("gemm", 5000, (5100, 700))
    assert trace.read(tmp_path).compute_ms == pytest.approx(0.1)


def test_a_slow_first_step_does_not_count(tmp_path: Path) -> None:
    run = run_of({"0": "gather"})
    found = compare(stepped([900, 100, 110]).read(tmp_path), [run], [run])
    assert found.rows[-1].measured_ms == pytest.approx(0.11) and found.rows[-1].count == 3
    found = compare(stepped([900, 100]).read(tmp_path), [run], [run])
    assert found.rows[-1].measured_ms == pytest.approx(0.1)


@pytest.mark.parametrize("extra", [0, 2])
def test_a_step_with_other_collectives_is_left_out(extra: int, tmp_path: Path) -> None:
    profile = stepped([100, 100, 100], extra).read(tmp_path)
    assert (profile.steps, len(profile.launches)) == (2, 2)
    run = run_of({"0": "gather"})
    note = compare(profile, [run], [run]).note
    assert "1 step(s) with other collectives than most are left out" in note
    assert "match none" not in note


def test_steps_that_are_given_are_not_cut(tmp_path: Path) -> None:
    profile = stepped([100, 300]).read(tmp_path, steps=4)
    assert (profile.steps, profile.by_step, len(profile.launches)) == (4, (), 2)


def test_a_profile_of_several_steps_without_marks_is_told(tmp_path: Path) -> None:
    run = run_of({"0": "gather"})
    twice = gathers([("0", 100), ("0", 100)])
    assert "The graphs have 1: with 2 steps" in compare(twice.read(tmp_path), [run], [run]).note
    assert "give --steps" not in compare(twice.read(tmp_path, steps=2), [run], [run]).note


# -- matching -------------------------------------------------------------------------------------


def gathers(groups: list[tuple[str, float]], **missing: Any) -> Trace:
    trace = Trace()
    for number, (group, duration) in enumerate(groups):
        ts = 100 * number
        args = told("_allgather_base", 256, 1024, group) | missing
        trace.launch(GATHER, ts, (ts, duration), **args)
    return trace


def test_equal_launches_on_two_groups_are_two_rows(tmp_path: Path) -> None:
    run = run_of({"1": "gather", "2": "gather"})
    found = compare(gathers([("2", 40), ("1", 10)]).read(tmp_path), [run], [run])
    rows = {row.name: row.measured_ms for row in found.rows[3:]}
    assert rows == {
        "all_gather, 0.004 MiB of 4 ranks on group 1": pytest.approx(0.01),
        "all_gather, 0.004 MiB of 4 ranks on group 2": pytest.approx(0.04),
    }


def test_other_names_of_groups_are_not_compared(tmp_path: Path) -> None:
    run = run_of({"1": "gather", "2": "gather"})
    found = compare(gathers([("dp", 40), ("tp", 10)]).read(tmp_path), [run], [run])
    (row,) = found.rows[3:]
    assert (row.name, row.count) == ("all_gather, 0.004 MiB of 4 ranks", 2)


def test_launches_of_unknown_size_are_found_by_their_place(tmp_path: Path) -> None:
    run = run_of({"1": "gather", "2": "gather"})
    unknown: dict[str, Any] = {"In msg nelems": None, "Out msg nelems": None}
    found = compare(gathers([("1", 10), ("2", 40)], **unknown).read(tmp_path), [run], [run])
    assert [row.count for row in found.rows[3:]] == [1, 1]
    one_more = gathers([("1", 10), ("2", 40), ("2", 40)], **unknown)
    found = compare(one_more.read(tmp_path), [run], [run])
    assert len(found.rows) == 3 and "3 measured collectives match none" in found.note


# -- gloo -----------------------------------------------------------------------------------------


def test_a_real_trace_of_gloo(tmp_path: Path) -> None:
    """One rank is enough for its events; the reduce-scatter is an all-reduce in them."""
    path = tmp_path / "gloo.json"
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(64, 64)

        def step() -> None:
            wait = funcol.wait_tensor
            y = wait(funcol.all_gather_tensor(x, 0, dist.group.WORLD)) @ x
            wait(funcol.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD))

        cpu = [torch.profiler.ProfilerActivity.CPU]
        plan = torch.profiler.schedule(wait=0, warmup=1, active=2)
        save: Any = lambda profiler: profiler.export_chrome_trace(str(path))  # noqa: E731
        with torch.profiler.profile(activities=cpu, schedule=plan, on_trace_ready=save) as profiler:
            for _ in range(3):
                step()
                profiler.step()
    finally:
        dist.destroy_process_group()
    profile = read_profile(path)
    assert profile.of_gloo and profile.steps == 2
    assert [(x.kind, x.step) for x in profile.launches] == [
        ("all_gather", 0), ("all_reduce", 0), ("all_gather", 1), ("all_reduce", 1)
    ]  # fmt: skip
    assert all(launch.ms > 0 for launch in profile.launches)
    assert all(0 < step.compute_ms < step.span_ms for step in profile.by_step)
    run = run_of({"0": "gather", "1": "reduce"})
    note = compare(profile, [run], [run]).note
    assert "It is of a CPU" in note and "match none" not in note


def compiled_step(trace: Trace, ts: float) -> None:
    """A compiled graph of 100 us: a launch for 10, a wait for 50.  Communication ends with the wait."""
    trace.event("cpu_op", "Torch-Compiled Region: 0/0", ts, 100)
    trace.event("cpu_op", "_c10d_functional::all_gather_into_tensor", ts + 5, 10)
    trace.event("cpu_op", "aten::empty", ts + 6, 3)
    trace.event("cpu_op", "_c10d_functional::wait_tensor", ts + 30, 50)
    for name, start, duration in (("gloo:all_gather", 10, 40), ("gloo:all_reduce", 50, 30)):
        trace.event("cpu_op", name, ts + start, duration)
        trace.events[-1]["tid"] = 99


def test_waits_inside_a_compiled_region_are_no_compute(tmp_path: Path) -> None:
    trace = Trace()
    compiled_step(trace, 0)
    profile = trace.read(tmp_path)
    assert profile.compute_ms == pytest.approx(0.040)
    assert profile.exposed_ms == pytest.approx(0.055)  # of 10 to 80; 15 to 30 runs beside
    assert profile.span_ms == pytest.approx(0.100)


def test_collectives_of_gloo_are_found_in_steps_that_are_only_counted(tmp_path: Path) -> None:
    """They have no sizes, and a reduce-scatter is an all-reduce in them."""
    trace = Trace()
    for step in range(3):
        compiled_step(trace, 1000 * step)
    run = run_of({"1": "gather", "2": "scatter"})
    found = compare(trace.read(tmp_path, steps=3), [run], [run])
    rows = {row.name.split(",")[0]: (row.count, row.measured_ms) for row in found.rows[3:]}
    assert rows == {
        "all_gather": (3, pytest.approx(0.040)),
        "reduce_scatter": (3, pytest.approx(0.030)),
    }
    assert "match none" not in found.note
