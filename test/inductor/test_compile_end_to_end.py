"""Real Inductor compiles of small graphs with collectives, on the fake process group.

Only matmuls and collectives, so that no C++ kernel has to be built.
"""

import logging

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_patches  # noqa: F401  registers the flags
from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap import changing, notices

pytestmark = pytest.mark.usefixtures("as_on_gpu")
c10d = torch.ops._c10d_functional
MODE = "aten_distributed_optimizations.bucketing_mode"
FORM = "aten_distributed_optimizations.bucket_mode"


@pytest.fixture(scope="module", autouse=True)
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh(fresh_inductor_cache):
    counters.clear()


def step(x, first, second):
    """x @ gather(first) @ gather(second), and the scattered products."""
    group = dist.group.WORLD.group_name
    gathered = [c10d.wait_tensor(c10d.all_gather_into_tensor(p, 2, group)) for p in (first, second)]
    y = x @ gathered[0]
    z = y @ gathered[1]
    return [c10d.wait_tensor(c10d.reduce_scatter_tensor(t, "sum", 2, group)) for t in (y, z)]


def trained(*shapes):
    """Plain tensors that a user trains: structure tells which are parameters."""
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def inputs():
    return trained((4, 4), (2, 4), (2, 4))


def code_of(**flags):
    torch._dynamo.reset()
    with config.patch(flags), torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), *inputs())
    return code


def test_coalesced_buckets_reach_the_generated_code():
    # torch's own moving of waits, from 2.14 on, would show instead of our order
    torchs = {_compat.SIMPLE_OVERLAP_FLAG: False}
    own_order = torchs if _compat.has_config(_compat.SIMPLE_OVERLAP_FLAG) else {}
    code = code_of(**{MODE: "topo_span"}, **own_order)
    FileCheck().check_count(
        "all_gather_into_tensor_coalesced.default(", 1, exactly=True
    ).check_count("reduce_scatter_tensor_coalesced.default(", 1, exactly=True).run(code)
    # one wait for each member, all before the first matmul
    FileCheck().check("all_gather_into_tensor_coalesced.default(").check(
        "wait_tensor.default"
    ).check("wait_tensor.default").check("extern_kernels.mm").check("extern_kernels.mm").run(code)
    assert counters["inductor"]["comm_overlap_buckets"] == 2


def test_without_the_flag_nothing_is_merged():
    code = code_of(**{MODE: "none"})
    assert "coalesced" not in code
    assert code.count("all_gather_into_tensor.default(") == 2
    assert counters["inductor"]["comm_overlap_buckets"] == 0


def step_with_late_waits(x, first, second):
    """Two scatters in flight under a matmul, which needs a buffer as large as their payloads."""
    group = dist.group.WORLD.group_name
    y, z = x @ first, x @ second
    starts = [c10d.reduce_scatter_tensor(t, "sum", 2, group) for t in (y, z)]
    under = x @ x
    waited = [c10d.wait_tensor(s) for s in starts]
    return waited, under @ under


def test_buffer_of_a_payload_in_flight_is_not_reused():
    """Between a coalesced start and its waits nothing may be written into its payloads."""
    torch._dynamo.reset()
    with config.patch({MODE: "topo_span", "allow_buffer_reuse": True}), torch.no_grad():
        arguments = trained(*[(4, 4)] * 3)
        _, (code,) = run_and_get_code(
            torch.compile(step_with_late_waits, fullgraph=True), *arguments
        )
    lines = [line.strip() for line in code.splitlines()]
    start = next(i for i, x in enumerate(lines) if "reduce_scatter_tensor_coalesced.default(" in x)
    payload = lines[start].split("[", 1)[1].split("]")[0].split(", ")
    assert len(payload) == 2
    first_wait = next(i for i, x in enumerate(lines) if i > start and "wait_tensor.default" in x)
    freed = [i for i, x in enumerate(lines) if i > start and any(f"del {p}" in x for p in payload)]
    assert freed  # the buffers end, or are reused, before the function does
    assert min(freed) > first_wait


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_ours_schedules_and_torchs_scheduler_does_not_run(monkeypatch, mode):
    from torch._inductor.fx_passes import overlap_scheduling

    def fail(gm):
        raise AssertionError("torch's scheduler ran")

    monkeypatch.setattr(
        overlap_scheduling, "schedule_overlap_bucketing_from_inductor_configs", fail
    )
    flags = {MODE: mode, "aten_distributed_optimizations.enable_overlap_scheduling": True}
    code = code_of(**flags)
    assert code.count("all_gather_into_tensor") >= 1
    assert counters["inductor"]["comm_overlap_graphs"] == 1


def test_graph_that_cannot_be_handled_compiles_unchanged_with_one_warning(monkeypatch, caplog):
    plain = code_of(**{MODE: "none"})

    def fail(*args, **kwargs):
        raise KeyError("a graph nobody thought of")

    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    notices.warn_untouched.cache_clear()
    monkeypatch.setattr(changing, "apply_plan", fail)
    with caplog.at_level(logging.WARNING, logger="torch_patches"):
        codes = [code_of(**{MODE: "topo_span", "force_disable_caches": True}) for _ in range(2)]
    body = plain[plain.index("def call") : plain.index("def benchmark")]
    assert all(body in code for code in codes)
    warnings = [r for r in caplog.records if r.name.startswith("torch_patches")]
    assert len(warnings) == 1
    assert "a graph nobody thought of" in warnings[0].getMessage()


def test_report_is_an_artifact_of_the_trace(tmp_path):
    """What TORCH_TRACE collects; read by tlparse."""
    seen = []

    class Handler(logging.Handler):
        def emit(self, record):
            metadata = getattr(record, "metadata", None) or {}
            if metadata.get("artifact", {}).get("name") == "comm_overlap_report":
                seen.append(record.payload)

    handler = Handler()
    logger = logging.getLogger("torch.__trace")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        code_of(**{MODE: "topo_span"})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (payload,) = seen
    assert '"schedule_hash"' in payload
