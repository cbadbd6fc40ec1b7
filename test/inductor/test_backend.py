"""The Dynamo backend ``aot_eager_comm_overlap``, on torch's fake process group."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import torch_patches
from torch_patches import _compat, backend
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches.backend import aot_eager_comm_overlap, read_settings
from torch_patches.config import PREFIX, FlagError
from torch_patches.testing.parallelize import fully_shard_simple
from torch_patches.testing.processes import run_ranks

ROOT = Path(__file__).parents[2]
LAYERS = 3
PARAMETERS = 2 * LAYERS


@pytest.fixture(scope="module", autouse=True)
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh(fresh_inductor_cache):
    counters.clear()


@pytest.fixture
def reports(caplog):
    """What the pipeline reported so far, in compile order."""
    caplog.set_level(logging.INFO, logger="torch_patches")

    class Reports:
        @property
        def all(self):
            return [r.report for r in caplog.records if hasattr(r, "report")]

        @property
        def launches(self):
            return [r.collectives_after for r in self.all]

        @property
        def spans(self):
            return [r.max_topo_span for r in self.all]

    return Reports()


def sharded(mesh, reshard=True):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(LAYERS)])
    return fully_shard_simple(model, mesh, reshard=reshard)


def compiled(model, fullgraph=True, dynamic=None, **options):
    return torch.compile(
        model,
        backend=aot_eager_comm_overlap,
        fullgraph=fullgraph,
        dynamic=dynamic,
        options=options or None,
    )


def x(rows=4):
    return torch.ones(rows, 8)


ONE_GATHER = {"all_gather": 1}
ONE_SCATTER = {"reduce_scatter": 1}


# -- what is bucketed -----------------------------------------------------------------------------


def test_forward_and_backward_are_bucketed(mesh, reports):
    compiled(sharded(mesh, reshard=False))(x()).sum().backward()
    assert reports.launches == [ONE_GATHER, ONE_SCATTER]
    assert [len(b.members) for r in reports.all for b in r.buckets] == [PARAMETERS, PARAMETERS]
    assert counters["inductor"]["comm_overlap_buckets"] == 2


def test_aot_eager_itself_is_not(mesh, reports):
    torch.compile(sharded(mesh), backend="aot_eager", fullgraph=True)(x()).sum().backward()
    assert reports.all == []


def test_a_mode_of_none_is_overruled_here_and_in_options(mesh, reports):
    with inductor_config.patch({PREFIX + "bucketing_mode": "none"}):
        compiled(sharded(mesh), bucketing_mode="none")(x())
    assert reports.launches == [ONE_GATHER]


def test_auto_schedules_without_control_dependencies(mesh, reports):
    """Also where they are asked for, for Inductor: an eager graph keeps its order anyway."""
    with inductor_config.patch({PREFIX + "insert_overlap_deps": True}):
        assert not read_settings({"bucketing_mode": "auto"}).options.insert_overlap_deps
        compiled(sharded(mesh, reshard=False), bucketing_mode="auto")(x()).sum().backward()
    assert [r.mode for r in reports.all] == ["auto", "auto"]
    assert [r.control_dependencies for r in reports.all] == [0, 0]
    assert reports.launches == [ONE_GATHER, ONE_SCATTER]


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_buckets_are_copied_out_by_what_is_cheap_in_eager_mode(mesh, mode):
    """``_foreach_copy`` would clone the whole bucket for each member."""
    names = []
    run = backend.boxed_nop

    def keep(gm, inputs):
        names.append([op_name(n.target) for n in gm.graph.nodes])
        return run(gm, inputs)

    options = {"bucketing_mode": mode, "bucket_mode": "default"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "boxed_nop", keep)
        compiled(sharded(mesh, reshard=False), **options)(x()).sum().backward()
    assert [n.count("split_with_sizes_copy") for n in names] == [1, 1]
    assert [n.count("_foreach_copy") for n in names] == [0, 0]


def graphs_of(model, **options):
    """Tags of the collectives, and values handed on, of each graph that would be bucketed."""
    seen = []

    def keep(graph, *arguments, observer=None):
        tags = [tag_of(n) for n in graph.nodes if collective_kind(n) is not None]
        seen.append((tags, len(graph.output_node().all_input_nodes)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.pipeline, "run_post_grad", keep)
        compiled(model, **options)(x()).sum().backward()
    return seen


def test_parameters_have_names(mesh):
    names = {f"{i}.{name}" for i in range(LAYERS) for name in ("weight", "bias")}
    for tags, _ in graphs_of(sharded(mesh, reshard=False)):
        assert {tag.parameter for tag in tags} == names


def test_inference_is_bucketed(mesh, reports):
    with torch.no_grad():
        compiled(sharded(mesh))(x())
    assert reports.launches == [ONE_GATHER]


def test_dynamic_shapes(mesh, reports):
    step = compiled(sharded(mesh, reshard=False), dynamic=True)
    for rows in (4, 6, 10):
        step(x(rows)).sum().backward()
    assert reports.launches == [ONE_GATHER, ONE_SCATTER]


class Broken(nn.Module):
    """Two halves with a graph break between them."""

    def __init__(self, mesh):
        super().__init__()
        self.first, self.second = sharded(mesh, reshard=False), sharded(mesh, reshard=False)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks_give_buckets_on_each_side(mesh, reports):
    compiled(Broken(mesh), fullgraph=False)(x()).sum().backward()
    assert reports.launches == [ONE_GATHER, ONE_GATHER, ONE_SCATTER, ONE_SCATTER]


def test_a_second_compile_is_bucketed_too(mesh, reports):
    for _ in range(2):
        torch._dynamo.reset()
        compiled(sharded(mesh, reshard=False))(x()).sum().backward()
    assert reports.launches == [ONE_GATHER, ONE_SCATTER] * 2


def test_nested_inputs_are_not_paired_by_index():
    """torch flattens them, after which indices are others."""
    gm = torch.fx.symbolic_trace(nn.Identity())
    (placeholder,) = gm.graph.find_nodes(op="placeholder")
    placeholder._dynamo_source = SimpleNamespace(name="L['self']._parameters['w']")
    assert [r.name for r in backend._record_inputs(gm, [x()])] == ["w"]
    assert backend._record_inputs(gm, [[x(), x()]]) == ()


# -- values ---------------------------------------------------------------------------------------


def test_a_mutated_input_is_mutated():
    def step(x, counter):
        counter.add_(1)
        return x * counter

    for grad in (False, True):
        counter = torch.zeros(1)
        result = compiled(step)(x().requires_grad_(grad), counter)
        assert counter.item() == 1 and torch.equal(result, x())


def test_an_inference_graph_mutates_its_input_itself():
    """As under aot_eager; otherwise the copy follows the graph."""
    targets = []

    def keep(graph, *arguments, observer=None):
        targets.extend(n.target for n in graph.nodes)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(backend.pipeline, "run_post_grad", keep)
        compiled(lambda counter: counter.add_(1).sin())(torch.zeros(1))
    assert torch.ops.aten.copy_.default in targets


def test_a_graph_without_collectives_runs(reports):
    model = nn.Linear(8, 8)
    data = x().requires_grad_()
    compiled(model)(data).sum().backward()
    gradient, data.grad = data.grad, None
    model(data).sum().backward()
    assert torch.equal(gradient, data.grad)
    assert reports.all == []


BACKENDS = (
    ("aot_eager", None),
    (aot_eager_comm_overlap, {"partitioner": "default"}),
    (aot_eager_comm_overlap, {"partitioner": "min_cut", "bucket_mode": "default"}),
    (aot_eager_comm_overlap, {"bucketing_mode": "auto"}),
)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward, and one that is not."""

    def __init__(self, mesh):
        super().__init__()
        self.first, self.second = sharded(mesh), sharded(mesh)

    def forward(self, x):
        x = checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=False)
        return self.second(x)


def train_under_each_backend(rank, say):
    """Loss and gradients of one step under each of :data:`BACKENDS`, and buckets made; on a rank."""
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for number, (name, options) in enumerate(BACKENDS):
        say(f"backend {number}")
        torch._dynamo.reset()
        counters.clear()
        model = Checkpointed(mesh)
        step = torch.compile(model, backend=name, options=options, fullgraph=True)
        loss = step(torch.arange(32.0).view(4, 8).sin() + rank).square().sum()
        loss.backward()
        gradients = [p.grad.to_local().tolist() for p in model.parameters()]
        buckets = counters["inductor"]["comm_overlap_buckets"]
        results.append((buckets, [loss.item(), *gradients]))
    return results


def test_values_are_those_of_aot_eager():
    """On two processes, bit for bit, with activation checkpointing and resharding."""
    for results in run_ranks(train_under_each_backend, 2, timeout_s=200.0):
        buckets, values = zip(*results, strict=True)
        assert buckets[0] == 0 and all(buckets[1:])
        assert len(values) == len(BACKENDS) and all(v == values[0] for v in values[1:])


# -- partitioners ---------------------------------------------------------------------------------


class Repeats(nn.Module):
    """A chain of cheap pointwise operations whose results eager autograd saves."""

    def __init__(self, mesh):
        super().__init__()
        self.body = sharded(mesh)

    def forward(self, x):
        return (self.body(x).sin() * 2).cos().tanh()


def test_min_cut_saves_less_than_default(mesh):
    handed_on = {}
    for partitioner in ("default", "min_cut"):
        torch._dynamo.reset()
        (_, handed_on[partitioner]), _ = graphs_of(Repeats(mesh), partitioner=partitioner)
    assert handed_on["min_cut"] < handed_on["default"]


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
def test_resharded_parameters_are_gathered_again(mesh, reports, partitioner):
    """The weights of all layers but the first, which needs no gradient of its input."""
    compiled(sharded(mesh), partitioner=partitioner)(x()).sum().backward()
    backward = reports.all[1]
    assert backward.collectives_before == {
        "all_gather": LAYERS - 1,
        "reduce_scatter": PARAMETERS,
    }
    assert backward.collectives_after == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
def test_parameters_that_are_not_resharded_are_not(mesh, reports, partitioner):
    compiled(sharded(mesh, reshard=False), partitioner=partitioner)(x()).sum().backward()
    assert "all_gather" not in reports.all[1].collectives_before


# -- options --------------------------------------------------------------------------------------


def test_options_are_flags_by_either_name():
    short = read_settings({"max_topo_span": 7}).options
    full = read_settings({PREFIX + "max_topo_span": 7}).options
    assert short == full and short.max_topo_span == 7
    assert short.bucketing_mode == "topo_span"


def test_options_go_over_flags_and_the_rest_comes_from_flags():
    flags = {PREFIX + "max_topo_span": 5, PREFIX + "bucket_mode": "default"}
    with inductor_config.patch(flags):
        options = read_settings({"max_topo_span": 9}).options
    assert (options.max_topo_span, options.bucket_mode) == (9, "default")


def test_defaults():
    settings = read_settings()
    assert settings.partitioner == "default"
    assert settings.options == torch_patches.config.Options(
        bucketing_mode="topo_span", insert_overlap_deps=False, run_eagerly=True
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_topo_spam": 3}, r"max_topo_spam.*did you mean 'max_topo_span'.*3.*'partitioner'"),
        ({"triton.cudagraphs": True}, r"triton.cudagraphs.*no such option.*True.*bucket_cap_mb"),
        ({"max_topo_span": -1}, r"options\['max_topo_span'\]: -1 is not allowed; use an int"),
        ({PREFIX + "bucket_cap_mb": "2"}, r"bucket_cap_mb'\]: '2' is not allowed; use a finite"),
        ({"bucket_cap_mb": lambda i: 1.0}, "a function is for"),
        ({"partitioner": "best"}, "'best' is not allowed; use one of 'default', 'min_cut'"),
        ({"partitioner": ["default"]}, "use one of 'default', 'min_cut'"),
        ({"max_topo_span": 1, PREFIX + "max_topo_span": 2}, "given twice"),
        ({3: 4}, r"options\[3\].*no such option"),
        ("max_topo_span", "use a dict"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(FlagError, match=message):
        read_settings(options)


def test_a_wrong_flag_raises():
    with (
        inductor_config.patch({PREFIX + "max_topo_span": "many"}),
        pytest.raises(FlagError, match=r"config\..*max_topo_span: 'many'"),
    ):
        read_settings()


def test_a_wrong_option_fails_the_compile(mesh):
    with pytest.raises(BackendCompilerFailed, match="max_topo_spam"):
        compiled(sharded(mesh), max_topo_spam=3)(x())


# -- when options are read ------------------------------------------------------------------------


def test_the_backward_keeps_options_of_an_expired_patch(mesh, reports):
    with inductor_config.patch({PREFIX + "max_topo_span": 77}):
        loss = compiled(sharded(mesh))(x()).sum()
    assert reports.spans == [77]
    loss.backward()
    assert reports.spans == [77, 77]


def test_flags_set_after_the_forward_have_no_effect_on_its_backward(mesh, reports):
    loss = compiled(sharded(mesh), max_topo_span=77)(x()).sum()
    with inductor_config.patch({PREFIX + "max_topo_span": "not a span"}):
        loss.backward()
    assert reports.spans == [77, 77]


def test_the_backward_keeps_options_in_another_thread(mesh, reports):
    with inductor_config.patch({PREFIX + "max_topo_span": 77}):
        loss = compiled(sharded(mesh))(x()).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert reports.spans == [77, 77]


def test_two_models_keep_their_own_options(mesh, reports):
    losses = [compiled(sharded(mesh), max_topo_span=span)(x()).sum() for span in (70, 80)]
    for loss in losses:
        loss.backward()
    assert reports.spans == [70, 80, 70, 80]


def test_a_forced_cache_tells_options_apart(mesh, reports):
    """From torch 2.12 on the cache takes such graphs: the second compile is a hit, which reports
    nothing."""
    hits = _compat.torch_release() >= (2, 12)
    forced = {"force_autograd_cache": True, "bundled_autograd_cache": hits}
    model = GathersTwo()
    with torch._functorch.config.patch(enable_autograd_cache=True, **forced), torch.no_grad():
        for span in (70, 70, 80):
            torch._dynamo.reset()
            assert len(compiled(model, max_topo_span=span)()) == 2
    assert reports.spans == ([70, 80] if hits else [70, 70, 80])


class GathersTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self):
        c10d, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        return [
            c10d.wait_tensor(c10d.all_gather_into_tensor(p, 2, group)) for p in (self.a, self.b)
        ]


# -- where it stands beside the hook --------------------------------------------------------------


def test_an_untested_torch_raises(mesh, monkeypatch):
    monkeypatch.setattr(_compat, "torch_release", lambda version=None: (2, 99))
    monkeypatch.delenv(_compat.ALLOW_UNTESTED_VARIABLE, raising=False)
    with pytest.raises(backend.UnsupportedTorchError, match=_compat.ALLOW_UNTESTED_VARIABLE):
        aot_eager_comm_overlap(torch.fx.symbolic_trace(nn.Identity()), [x()])
    monkeypatch.setenv(_compat.ALLOW_UNTESTED_VARIABLE, "1")
    compiled(sharded(mesh))(x())


PROGRAM = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch._dynamo.utils import counters
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
c10d = torch.ops._c10d_functional

class GathersTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(4))
        self.b = torch.nn.Parameter(torch.ones(4))

    def forward(self):
        group = dist.group.WORLD.group_name
        return [
            c10d.wait_tensor(c10d.all_gather_into_tensor(p, 2, group)) for p in (self.a, self.b)
        ]

%s
with torch.no_grad():
    torch.compile(GathersTwo(), backend=backend, fullgraph=True)()
print("buckets", counters["inductor"]["comm_overlap_buckets"])
"""


def run(code, *path):
    command = [sys.executable, "-c", "import sys; sys.path[:0] = " + repr(path) + "\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_works_after_uninstall():
    lines = (
        "import torch_patches; torch_patches.uninstall()",
        "from torch_patches.backend import aot_eager_comm_overlap as backend",
    )
    assert "buckets 1" in run(PROGRAM % "\n".join(lines), str(ROOT))


# -- the entry point ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder to put on the path, with the package's metadata as an installer writes it."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (folder / "torch_patches").symlink_to(ROOT / "torch_patches")
    return folder


def test_the_name_works_without_an_import(installed):
    assert "buckets 1" in run(PROGRAM % f"backend = {backend.NAME!r}", str(installed))


def test_listing_backends_does_not_import_the_package(installed):
    code = "import torch; print(torch._dynamo.list_backends(), 'torch_patches' in sys.modules)"
    listed = run(code, str(installed))
    assert backend.NAME in listed and listed.strip().endswith("False")
