"""The hook under real compiles: later backwards, cache keys, generated code, error texts.

Only matmuls are compiled: those call a library, so no C++ compiler has to run.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from torch._dynamo.utils import counters
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config

import torch_patches
from torch_patches import _cache_facts, _compat, _hooks, _once, config
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    CollectiveTag,
    InputKind,
    RecordedInput,
    TagSource,
    Traffic,
)
from torch_patches.testing.graph_builder import GraphBuilder

PREFIX = "aten_distributed_optimizations."
MODE = PREFIX + "bucketing_mode"
SPAN = PREFIX + "max_topo_span"
DIST = inductor_config.aten_distributed_optimizations


class Recorder:
    """Stands in for the pipeline and notes what ran, with which options."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Options]] = []
        self.order: list[str] = []
        self.recorded: list[tuple[RecordedInput, ...]] = []

    def run_joint(
        self, graph: fx.Graph, options: Options, recorded: tuple[RecordedInput, ...]
    ) -> None:
        self.recorded.append(recorded)
        self.calls.append(("joint", options))
        self.order.append("our joint")

    def run_post_grad(
        self,
        graph: fx.Graph,
        options: Options,
        recorded: tuple[RecordedInput, ...],
        observer: object = None,
    ) -> None:
        self.recorded.append(recorded)
        # Torch's own code and the cache key see the same values as the pass.
        assert config.read_options() == options
        assert getattr(inductor_config, config.DIGEST_FLAG) != config.NEUTRAL_DIGEST
        self.calls.append(("post_grad", options))
        self.order.append("our post_grad")

    def options_of(self, kind: str) -> list[Options]:
        return [options for name, options in self.calls if name == kind]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(pipeline, "run_joint", recorder.run_joint)
    monkeypatch.setattr(pipeline, "run_post_grad", recorder.run_post_grad)
    return recorder


@pytest.fixture(autouse=True)
def installed_with_defaults() -> Iterator[None]:
    _once._warned.clear()
    _hooks.install()
    with inductor_config.patch({flag.full_name: flag.default for flag in config.FLAGS}):
        yield
    _hooks.install()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty compile cache, and no code that Dynamo compiled before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    yield tmp_path
    torch._dynamo.reset()


# -- flags and passes ------------------------------------------------------------------------------


class NamedLinear(torch.nn.Module):
    """x @ w, with a parameter of the given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, torch.nn.Parameter(torch.ones(2, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ getattr(self, self.name)


def matmul(**kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A new function each time, so that Dynamo has nothing compiled for it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    torch._dynamo.reset()
    return torch.compile(function, **kwargs)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_flag_error_reaches_the_user(fullgraph: bool) -> None:
    compiled = matmul(options={MODE: "topo_span", SPAN: -3}, fullgraph=fullgraph)
    with pytest.raises(Exception) as error:
        compiled(torch.randn(2, 2))
    text = str(error.value)
    assert f"torch._inductor.config.{SPAN}" in text
    assert "-3 is not allowed; use an int >= 0, or None for no bound" in text


def test_flag_error_is_logged_where_dynamo_suppresses_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        torch._logging.set_logs()  # so that torch's loggers hand records on
        logger = logging.getLogger("torch._dynamo")
        logger.addHandler(caplog.handler)
        try:
            x = torch.randn(2, 2)
            result = matmul(options={MODE: "topo_span", SPAN: -3})(x)
        finally:
            logger.removeHandler(caplog.handler)
    torch.testing.assert_close(result, x @ x)
    assert f"torch._inductor.config.{SPAN}: -3 is not allowed" in caplog.text


def test_users_passes_run_before_ours_for_real(recorder: Recorder, fresh_cache: Path) -> None:
    users = {
        "joint_custom_post_pass": lambda graph: recorder.order.append("user joint"),
        "post_grad_custom_post_pass": lambda graph: recorder.order.append("user post_grad"),
    }
    expected = ["user joint", "our joint", "user post_grad", "our post_grad"]
    with torch.no_grad():
        matmul(options={MODE: "topo_span", **users})(torch.randn(4, 4))
        assert recorder.order == expected
        if _compat.passes_may_be_lists():
            recorder.order.clear()
            with inductor_config.patch({name: [value] for name, value in users.items()}):
                matmul(options={MODE: "topo_span"})(torch.randn(4, 4))
            assert recorder.order == expected


@pytest.mark.parametrize("how", ["expired patch", "assignment", "options"])
@pytest.mark.parametrize("thread", ["same thread", "other thread"])
def test_flags_of_the_forward_reach_a_later_backward(
    recorder: Recorder, fresh_cache: Path, how: str, thread: str
) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    values = {MODE: "topo_span", SPAN: 123}
    if how == "options":
        result = matmul(options=values)(x)
    elif how == "expired patch":
        with inductor_config.patch(values):
            result = matmul()(x)
    else:
        DIST.bucketing_mode, DIST.max_topo_span = values.values()
        result = matmul()(x)
        DIST.bucketing_mode, DIST.max_topo_span = "none", 9
    expected = Options("topo_span", 123, insert_overlap_deps=True)
    assert recorder.calls == [("joint", expected), ("post_grad", expected)]

    backward = result.sum().backward
    if thread == "other thread":
        worker = threading.Thread(target=backward)
        worker.start()
        worker.join()
    else:
        backward()
    assert recorder.options_of("post_grad") == [expected, expected]
    assert recorder.recorded == [(RecordedInput(InputKind.UNKNOWN),)] * 3
    torch.testing.assert_close(x.grad, torch.autograd.grad((x @ x).sum(), x)[0])


# -- cache keys -----------------------------------------------------------------------------------


def test_digest_depends_on_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d

    class Group:
        def __init__(self, size: int) -> None:
            self.ranks = size

        def size(self) -> int:
            return self.ranks

    def digest_with(*groups: tuple[Any, str]) -> str:
        world = types.SimpleNamespace(pg_names=dict(groups))
        monkeypatch.setattr(distributed_c10d, "_world", world)
        return _cache_facts.metadata_digest(None, Options())

    two, four = Group(2), Group(4)
    assert digest_with((two, "0"), (four, "1")) == digest_with((four, "1"), (two, "0"))
    assert digest_with((two, "0")) != digest_with((four, "0"))
    assert digest_with((two, "0")) != digest_with((two, "1"))
    assert digest_with((two, "0"), (object(), "not a member")) == digest_with((two, "0"))
    monkeypatch.setattr(distributed_c10d, "_world", object())
    assert _cache_facts.metadata_digest(None, Options()) == digest_with()


def test_digest_reads_names_only_when_asked() -> None:
    def digest(model: torch.nn.Module, reads_names: bool) -> str:
        graphs: list[fx.GraphModule] = []

        def backend(gm: fx.GraphModule, inputs: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(model, backend=backend)(torch.randn(2, 2))
        mode = "transformer_block" if reads_names else "auto"
        return _cache_facts.metadata_digest(graphs[0], Options(bucketing_mode=mode))

    a, same, b = NamedLinear("a"), NamedLinear("a"), NamedLinear("b")
    assert digest(a, True) == digest(same, True)
    assert digest(a, True) != digest(b, True)
    assert digest(a, False) == digest(b, False)


def test_digest_reads_kinds_of_inputs_not_names_or_registration() -> None:
    def digest(*inputs: RecordedInput) -> str:
        return _cache_facts.metadata_digest(None, Options(), inputs)

    a, b = RecordedInput(InputKind.PARAMETER, "a", 0), RecordedInput(InputKind.PARAMETER, "b", 1)
    assert digest(a) == digest(b)
    assert digest(a) != digest(RecordedInput(InputKind.BUFFER, "a"))
    uuids = {_hooks.JointPass(Options(), (record,)).uuid() for record in (a, b)}
    assert len(uuids) == 1
    assert _hooks.JointPass(Options(), (RecordedInput(InputKind.OTHER),)).uuid() not in uuids


def gather_tagged(*tags: CollectiveTag | None) -> fx.GraphModule:
    b = GraphBuilder()
    starts = [b.all_gather(b.placeholder(4, 8), 2, "g") for _ in tags]
    for start, tag in zip(starts, tags, strict=True):
        if tag is not None:
            start.meta[TAG_MARK] = tag
    return b.output(*(b.wait(start) for start in starts))


def test_tags_are_in_the_key_of_every_graph() -> None:
    """Graphs with equal code and other tags, as two models' backwards can be."""
    keys: list[str] = []
    ours = _hooks.PostGradPass(Options("topo_span"))

    def inner(gm: fx.GraphModule, inputs: Any) -> None:
        keys.append(getattr(inductor_config, config.DIGEST_FLAG))

    def key(*tags: CollectiveTag | None) -> str:
        _hooks._keyed_by_tags(inner, ours)(gather_tagged(*tags), [])
        return keys[-1]

    def tag(traffic: Traffic, name: str | None = None, place: int | None = None) -> CollectiveTag:
        return CollectiveTag(traffic, TagSource.DYNAMO, name, place, place)

    weight, data = tag(Traffic.PARAMETER, "w", 0), tag(Traffic.OTHER)
    assert key(weight, data) == key(weight, data)
    assert key(weight, data) == key(tag(Traffic.PARAMETER, "other name", 0), data)
    distinct = [(weight, data), (data, weight), (weight, weight), (weight, None),
                (tag(Traffic.PARAMETER, "w", 1), data)]  # fmt: skip
    assert len({key(*tags) for tags in distinct}) == len(distinct)
    _hooks.uninstall()
    assert key(weight, data) == key(data, data) == config.NEUTRAL_DIGEST


@pytest.mark.parametrize("how", ["keyword", "positional"])
def test_compiles_of_both_passes_see_the_key_with_tags(how: str) -> None:
    keys: list[str] = []

    def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        keys.append(getattr(inductor_config, config.DIGEST_FLAG))
        return make_boxed_func(gm.forward)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        if how == "positional":
            return compile_fx_module.compile_fx(gm, inputs, inner)
        return compile_fx_module.compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with inductor_config.patch({MODE: "topo_span"}):
        result = torch.compile(lambda x: x @ x, backend=backend)(
            torch.ones(2, 2, requires_grad=True)
        )
    result.sum().backward()
    assert len(keys) == 2
    assert all(key.count(":") == 2 for key in keys)


def cache_events() -> dict[str, int]:
    """Hits and misses since the last call, of both caches."""
    events = {
        name: counters[kind][name]
        for kind, name in [
            ("aot_autograd", "autograd_cache_hit"),
            ("aot_autograd", "autograd_cache_miss"),
            ("inductor", "fxgraph_cache_hit"),
            ("inductor", "fxgraph_cache_miss"),
        ]
    }
    counters.clear()
    return {name: count for name, count in events.items() if count}


def run_matmul(**flags: Any) -> dict[str, int]:
    with torch.no_grad():
        matmul(options={PREFIX + name: value for name, value in flags.items()})(torch.ones(8, 8))
    return cache_events()


def test_flags_and_digest_are_in_both_cache_keys(
    recorder: Recorder, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miss = {"autograd_cache_miss": 1, "fxgraph_cache_miss": 1}
    assert run_matmul(bucketing_mode="topo_span") == miss
    assert run_matmul(bucketing_mode="topo_span")["autograd_cache_hit"] == 1
    assert run_matmul(bucketing_mode="none") == miss
    assert run_matmul(bucketing_mode="topo_span", max_topo_span=3) == miss
    with monkeypatch.context() as patch:
        patch.setattr(_cache_facts, "_process_group_sizes", lambda: [("0", 16)])
        assert run_matmul(bucketing_mode="topo_span") == miss
    assert run_matmul(bucketing_mode="topo_span")["autograd_cache_hit"] == 1
    monkeypatch.setattr(pipeline, "source_digest", lambda: "other sources")
    assert run_matmul(bucketing_mode="topo_span") == miss


@pytest.mark.parametrize(
    ("mode", "reads_names"), [("transformer_block", True), ("topo_span", False)]
)
def test_parameter_names_are_in_the_key_when_plans_read_them(
    recorder: Recorder, fresh_cache: Path, mode: str, reads_names: bool
) -> None:
    def run(name: str) -> dict[str, int]:
        torch._dynamo.reset()
        with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
            torch.compile(NamedLinear(name), options={MODE: mode})(torch.ones(2, 2))
        return cache_events()

    assert run("a") == {"fxgraph_cache_miss": 1}
    assert run("a") == {"fxgraph_cache_hit": 1}
    assert run("b") == {"fxgraph_cache_miss" if reads_names else "fxgraph_cache_hit": 1}


# -- in other processes ---------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the package: its hash must not change while a developer saves a file."""
    package = Path(torch_patches.__file__).parent
    shutil.copytree(package, tmp_path / "sources" / package.name)
    return tmp_path / "sources"


def start(
    script: str, sources: Path, cache: Path, *arguments: str, hash_seed: str = "random"
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": str(sources),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=sources,  # Python looks there before PYTHONPATH
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


SECOND_PROCESS = """
import torch
from torch._inductor import config
before = config.get_hash()
import torch_patches
assert config.get_hash() != before  # torch knows of the new entries, although it caches the hash
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.ones(4, 8)) for _ in range(2))

    def forward(self, x):
        for p in self.first, self.second:
            x = x @ funcol.all_gather_tensor_autograd(p, 0, dist.group.WORLD)
        return x

compiled = torch.compile(  # names are in the key of this mode
    torch.nn.Sequential(Block(), Block()),
    options={"aten_distributed_optimizations.bucketing_mode": "transformer_block",
             "aten_distributed_optimizations.max_memory_increase_ratio": 4.0},
)
compiled(torch.ones(8, 8)).sum().backward()
print(
    counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"] > 0,
    counters["inductor"]["fxgraph_cache_miss"],
    counters["inductor"]["comm_overlap_buckets"],
    hash("text"),
)
"""


def test_second_process_hits(sources: Path, tmp_path: Path) -> None:
    """Graphs with buckets in them; 2.12's AOTAutograd cache leaves graphs with collectives out, its
    FX-graph cache does not.  New processes, not forks of one as in other tests of the cache: those
    have one hash seed, and one address for what had been imported."""
    first, second = (
        output_of(start(SECOND_PROCESS, sources, tmp_path, hash_seed=seed)).split()
        for seed in ("1", "2")
    )
    assert first[:3] == ["False", "2", "4"]
    assert second[:2] == ["True", "0"]
    assert first[3] != second[3]


GENERATED_CODE = """
import sys
if sys.argv[1] == "import":
    import torch_patches
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config.cpp.simdlen = 1  # asking the compiler what the processor can do takes seconds
first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

def pointwise(x):
    return torch.nn.functional.gelu(first(x)).softmax(-1) + second(x).sin()

def collectives(x):
    gathered = [funcol.all_gather_tensor(w, 0, dist.group.WORLD) for w in (x, x + 1, x + 2)]
    scattered = funcol.reduce_scatter_tensor(sum(gathered) @ first.weight, "sum", 0, [0, 1])
    return scattered.sin()

codes = []

def record_and_stop(code):
    codes.append(code)
    raise RuntimeError("no need to run a C++ compiler")

GraphLowering.save_output_code = staticmethod(record_and_stop)
for model in (pointwise, collectives):
    try:
        with torch.no_grad():
            torch.compile(model)(torch.ones(4, 8))
    except Exception as error:
        assert "no need to run" in str(error), error
assert len(codes) == 2
assert "cpp_fused" in codes[0] and "all_gather_into_tensor" in codes[1]
print(*codes)
"""


def test_import_changes_no_generated_code(sources: Path, tmp_path: Path) -> None:
    """The whole text of the generated module, with and without the import."""
    processes = [
        start(GENERATED_CODE, sources, tmp_path / which, which) for which in ("import", "plain")
    ]
    with_import, without_import = (
        output.replace(str(tmp_path / which), "CACHE")
        for which, output in zip(("import", "plain"), map(output_of, processes), strict=True)
    )
    assert with_import == without_import
