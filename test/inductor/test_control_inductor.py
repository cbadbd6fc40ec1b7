"""Control dependencies in the code that Inductor generates, which is read, mostly not compiled."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import comms, config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.graph import control
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    find_starts_and_waits,
    number_nodes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    Overlap,
    insert_overlap_dependencies,
)

pytestmark = pytest.mark.usefixtures("fresh_inductor_cache")
c10d = torch.ops._c10d_functional


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path):
    """Real collectives, of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def overlaps_of(graph):
    """Everything that stands between a start and its first wait."""
    numbers = number_nodes(graph)
    result = []
    for start, waits in find_starts_and_waits(graph)[1].items():
        first = min(numbers[w] for w in waits)
        compute = tuple(n for n in graph.nodes if numbers[start] < numbers[n] < first)
        result.append(Overlap(start, compute, tuple(waits)))
    return result


def insert(graph):
    """The custom pass: the order of the traced function is the planned one."""
    insert_overlap_dependencies(graph, overlaps_of(graph))


def flags(*, dependencies, peak):
    """Inductor's flags: nothing but ``reorder_for_peak_memory`` may move something."""
    result = {
        "reorder_for_locality": False,
        "reorder_for_peak_memory": peak,
        "allow_buffer_reuse": True,
        "force_disable_caches": True,
        "post_grad_custom_post_pass": insert if dependencies else None,
    }
    if _compat.has_config(_compat.SIMPLE_OVERLAP_FLAG):
        result[_compat.SIMPLE_OVERLAP_FLAG] = False
    return result


class _Generated(Exception):
    """Ends a compile once there is code, before C++ compilers run."""


def code_of(function, *inputs, dependencies, peak=False):
    codes = []

    def stop(code):
        codes.append(code)
        raise _Generated

    torch._dynamo.reset()
    with (
        config.patch(flags(dependencies=dependencies, peak=peak)),
        mock.patch.object(GraphLowering, "save_output_code", stop),
        torch.no_grad(),
    ):
        try:
            torch.compile(function, fullgraph=True)(*inputs)
        except Exception:
            if not codes:
                raise
    (code,) = codes
    return code


_OP = re.compile(r"(?:extern_kernels|torch\.ops\._c10d_functional)\.(\w+)")


def order_of(code):
    """The matmuls and collectives of the generated code, in its order."""
    body = code[code.index("def call") :]
    lines = [line for line in body.splitlines() if "assert_" not in line and "# " not in line]
    return [match.group(1) for line in lines if (match := _OP.search(line))]


def kernels(code):
    """How many fused kernels are defined, and how many other calls are made."""
    return code.count("async_compile.cpp_pybinding("), len(order_of(code))


def arguments():
    return [torch.randn(shape) for shape in ((64, 64), (64, 64), (64, 4), (64, 64))]


def group():
    return dist.group.WORLD.group_name


# In all of these the first matmul makes a large tensor and the second, which is to hide the
# collective, frees it for a small one: least memory is used if it runs before the start.


def plain(x, w, v, p):
    large = x @ w
    start = c10d.all_gather_into_tensor(p, dist.get_world_size(), group())
    small = large @ v
    return small, c10d.wait_tensor(start) @ v


def coalesced(x, w, v, p):
    large = x @ w
    starts = c10d.all_gather_into_tensor_coalesced([p, x], dist.get_world_size(), group())
    small = large @ v
    waits = [c10d.wait_tensor(s) for s in starts]
    return small, waits[0] @ v, waits[1] @ v


def awaited_together(x, w, v, p):
    large = x @ w
    starts = c10d.all_gather_into_tensor_coalesced([p, x], dist.get_world_size(), group())
    small = large @ v
    waits = c10d.wait_tensors(starts)
    return small, waits[0] @ v, waits[1] @ v


def scattered(x, w, v, p):
    large = x @ w
    payload = p @ w
    start = c10d.reduce_scatter_tensor(payload, "sum", dist.get_world_size(), group())
    small = large @ v
    return small, c10d.wait_tensor(start)


PLANNED = {
    plain: ["mm", "all_gather_into_tensor", "mm", "wait_tensor", "mm"],
    coalesced: [
        "mm",
        "all_gather_into_tensor_coalesced",
        "mm",
        "wait_tensor",
        "wait_tensor",
        "mm",
        "mm",
    ],
    scattered: ["mm", "mm", "reduce_scatter_tensor", "mm", "wait_tensor"],
}
if hasattr(c10d, "wait_tensors"):  # from torch 2.15 on
    PLANNED[awaited_together] = [
        "mm",
        "all_gather_into_tensor_coalesced",
        "mm",
        "wait_tensors",
        "mm",
        "mm",
    ]


@pytest.mark.parametrize("peak", [False, True])
@pytest.mark.parametrize("function", PLANNED, ids=lambda f: f.__name__)
def test_planned_order_is_in_the_code(two_ranks, function, peak):
    code = code_of(function, *arguments(), dependencies=True, peak=peak)
    assert order_of(code) == PLANNED[function]


@pytest.mark.parametrize("function", [plain, coalesced], ids=lambda f: f.__name__)
def test_without_dependencies_the_order_is_lost(two_ranks, function):
    """So that the test above shows something: nothing runs between start and wait any more."""
    order = order_of(code_of(function, *arguments(), dependencies=False, peak=True))
    assert sorted(order) == sorted(PLANNED[function])
    start = next(i for i, op in enumerate(order) if op.startswith("all_gather"))
    assert order[start + 1] == "wait_tensor"


@pytest.mark.parametrize("function", PLANNED, ids=lambda f: f.__name__)
def test_kernels_are_those_of_the_plain_compile(two_ranks, function):
    codes = [code_of(function, *arguments(), dependencies=d) for d in (False, True)]
    assert kernels(codes[0]) == kernels(codes[1])


def normed(x, w, v, p):
    """mm -> {payload's scale, norm} fused -> scatter started -> mm of the norm -> wait"""
    large = x @ w
    start = c10d.reduce_scatter_tensor(large * 0.5, "sum", dist.get_world_size(), group())
    mean = torch.nn.functional.layer_norm(large, [64])
    small = mean @ v
    return small, c10d.wait_tensor(start)


def scaled(x, w, v, p):
    """mm -> {payload's scale, the matmul's input} fused -> scatter started -> mm -> wait"""
    large = x @ w
    start = c10d.reduce_scatter_tensor(large * 0.5, "sum", dist.get_world_size(), group())
    small = (large * 2.0) @ v
    return small, c10d.wait_tensor(start)


@pytest.mark.parametrize("function", [normed, scaled], ids=lambda f: f.__name__)
def test_fusible_compute_between_start_and_wait_is_not_split(two_ranks, function):
    """The input of the matmul is fused with the payload as without dependencies."""
    codes = [code_of(function, *arguments(), dependencies=d) for d in (False, True)]
    assert kernels(codes[0])[0] == 1
    assert kernels(codes[0]) == kernels(codes[1])
    assert order_of(codes[1]) == ["mm", "reduce_scatter_tensor", "mm", "wait_tensor"]


def test_without_its_inputs_as_dependencies_a_matmul_splits_a_fusion(two_ranks, monkeypatch):
    """Why ``_fusible_inputs`` exists: the test above fails without it."""
    monkeypatch.setattr(control, "_fusible_inputs", lambda node: [])
    assert kernels(code_of(scaled, *arguments(), dependencies=True))[0] == 2


# The order of starts


def gather_then_scatter(x, w, v, p):
    """Least memory is used if the scatter is started, and done, before the gather."""
    large = x @ w
    gather = c10d.all_gather_into_tensor(p, dist.get_world_size(), group())
    scatter = c10d.reduce_scatter_tensor(large @ v, "sum", dist.get_world_size(), group())
    return c10d.wait_tensor(scatter), c10d.wait_tensor(gather) @ v


def starts_of(code):
    return [op for op in order_of(code) if op.startswith(("all_gather", "reduce_scatter"))]


@pytest.mark.parametrize("dependencies", [False, True])
def test_inductor_keeps_the_order_of_starts(two_ranks, dependencies):
    """It chains all collectives, in the order of the graph: no edges of ours are needed."""
    code = code_of(gather_then_scatter, *arguments(), dependencies=dependencies, peak=True)
    assert starts_of(code) == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_without_inductors_chain_starts_change_places(two_ranks, monkeypatch):
    """If a torch drops the chain, the test above fails there, and edges between starts are due."""
    monkeypatch.setattr(comms, "decide_global_ordering_of_comms", lambda nodes, *rest: nodes)
    code = code_of(gather_then_scatter, *arguments(), dependencies=False, peak=True)
    assert starts_of(code) == ["reduce_scatter_tensor", "all_gather_into_tensor"]


@pytest.mark.parametrize("dependencies", [False, True])
def test_all_reduce_whose_payload_is_held_is_started_before_the_matmul(two_ranks, dependencies):
    """Inductor lowers it in place; once its payload is made, starting it late saves nothing."""

    def reduced(x, w, v, p):
        large = x @ w
        start = c10d.all_reduce(p @ w, "sum", group())
        small = large @ v
        return small, c10d.wait_tensor(start)

    order = order_of(code_of(reduced, *arguments(), dependencies=dependencies, peak=True))
    assert sorted(order) == ["all_reduce_", "mm", "mm", "mm", "wait_tensor"]
    assert (order[-3:] == ["all_reduce_", "mm", "wait_tensor"]) is dependencies


# Values and buffers


@pytest.mark.parametrize("function", PLANNED, ids=lambda f: f.__name__)
def test_values_with_buffer_reuse(one_rank, function):
    """Matmuls only, so the code runs without C++ kernels."""
    inputs = arguments()
    results = []
    for dependencies, peak in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        with config.patch(flags(dependencies=dependencies, peak=peak)), torch.no_grad():
            result, _ = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
        results.append(result)
    for values in results:
        for value, expected in zip(values, function(*inputs), strict=True):
            assert torch.equal(value, expected)


def test_payload_in_flight_is_not_reused(two_ranks):
    """Two matmuls as large as the payload run between start and wait."""

    def reused(x, w, v, p):
        start = c10d.reduce_scatter_tensor(x @ w, "sum", dist.get_world_size(), group())
        under = (p @ w) @ p
        return c10d.wait_tensor(start), under @ v

    lines = code_of(reused, *arguments(), dependencies=True, peak=True).splitlines()
    start = next(i for i, x in enumerate(lines) if "reduce_scatter_tensor.default(" in x)
    wait = next(i for i, x in enumerate(lines) if "wait_tensor.default(" in x)
    payload = lines[start].split("(", 1)[1].split(",")[0]
    freed = [i for i, x in enumerate(lines) if i > start and re.search(rf"del .*{payload}\b", x)]
    assert order_of("\n".join(lines)).index("wait_tensor") > 2
    assert freed and min(freed) > wait
    assert not any(f"{payload};" in x or f"{payload}  # reuse" in x for x in lines[start:wait])
