"""Other features of torch together with ours, on two gloo processes: results are those of eager mode.

All of Inductor runs but code generation, which would take a C++ compiler many times; only AOTInductor
is run to its end.  Generated code of torch.compile is run by ``test_overlap_gloo.py``, with donated buffers, and, with
buffers reused and memory reordered, by ``inductor/test_control_inductor.py``.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torch_patches import _compat
from torch_patches.testing.processes import Say, run_ranks

PREFIX = "aten_distributed_optimizations."
SPAN = {PREFIX + "bucketing_mode": "topo_span"}
LAYERS = 4
WIDTH = 8

#: What a case tells: whether results and gradients are those of eager mode, launches in each graph,
#: and what else it saw.
Told = tuple[bool, list[dict[str, int]], Any]


def costs(node: Any, size_bytes: int | None) -> float | None:
    """ms: a product hides a gather."""
    if "c10d" in str(node.target):
        return 1.0
    return 2.0 if "mm" in str(node.target) else None


AUTO = {
    PREFIX + "bucketing_mode": "auto",
    PREFIX + "custom_runtime_estimation": costs,
    PREFIX + "max_memory_increase_gb": 1.0,
}


def work(rank: int, say: Say) -> dict[str, Told | str]:
    """In each process; a module-level function, so that a new process can import it."""
    import torch

    import torch_patches  # noqa: F401  registers the flags

    torch.set_num_threads(1)
    logging.getLogger("torch_patches").setLevel(logging.INFO)
    found: dict[str, Told | str] = {}
    for name, case in CASES.items():
        say(name)
        torch._dynamo.reset()
        try:
            found[name] = case()
        except Exception as error:  # the other cases, and the other rank, go on
            found[name] = f"{type(error).__name__}: {error}"
    return found


@contextlib.contextmanager
def launches() -> Iterator[list[dict[str, int]]]:
    """Of each graph that is compiled meanwhile."""
    seen: list[dict[str, int]] = []

    class Reports(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "report"):
                seen.append(dict(record.report.collectives_after))

    handler, logger = Reports(), logging.getLogger("torch_patches")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)


def model(wrap: Callable[..., Any] | None = None) -> Any:
    """Parameters stored in parts, gathered where they are used.

    Args:
        wrap: calls two layers at a time, as ``wrap(layers, x, number of the first)``.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            whole = torch.randn(LAYERS, WIDTH, WIDTH) / WIDTH**0.5
            half = slice(dist.get_rank() * WIDTH // 2, (dist.get_rank() + 1) * WIDTH // 2)
            self.shards = torch.nn.ParameterList(
                torch.nn.Parameter(whole[i, half].clone()) for i in range(LAYERS)
            )

        def pair(self, x: Any, first: int) -> Any:
            for shard in (self.shards[first], self.shards[first + 1]):
                x = x @ funcol.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)
            return x

        def forward(self, x: Any) -> Any:
            for first in range(0, LAYERS, 2):
                x = wrap(self.pair, x, first) if wrap else self.pair(x, first)
            return x

    return Layers()


def step(function: Any, module: Any) -> list[Any]:
    """Result and gradients."""
    import torch
    import torch.distributed as dist

    x = torch.full((3, WIDTH), 0.5 + dist.get_rank())
    result = function(x)
    result.backward(torch.ones_like(result))
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return [result.detach(), *gradients]


def close(ours: list[Any], theirs: list[Any]) -> bool:
    import torch

    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def compiled(function: Any, **keywords: Any) -> Any:
    import torch

    from torch_patches.testing.eager_backend import post_grad_eager

    return torch.compile(function, backend=post_grad_eager, **keywords)


def compared(flags: dict[str, Any], wrap: Callable[..., Any] | None = None) -> Told:
    """A compiled step beside an eager one."""
    from torch._inductor import config

    module = model(wrap)
    expected = step(module, module)
    with config.patch(flags), launches() as seen:
        ours = step(compiled(module, fullgraph=True), module)
    return close(ours, expected), seen, None


# -- the cases -------------------------------------------------------------------------------------


def checkpointing() -> Told:
    from torch.utils.checkpoint import checkpoint

    return compared(AUTO, lambda f, x, first: checkpoint(f, x, first, use_reentrant=False))


def selective_checkpointing() -> Told:
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, products_stay)

    def wrap(f: Any, x: Any, first: int) -> Any:
        return checkpoint(f, x, first, use_reentrant=False, context_fn=contexts)

    return compared(SPAN, wrap)


def products_stay(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """A policy of selective checkpointing: gathers are repeated."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    saves = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def deterministic_mode() -> Told:
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        return compared({**AUTO, "deterministic": True})
    finally:
        torch.use_deterministic_algorithms(False)


def compiled_optimizer() -> Told:
    """A graph without collectives, under the same flags."""
    import torch
    from torch._inductor import config

    module, other = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, other)]
    with config.patch(SPAN), launches() as seen:
        updates = [optimizers[0].step, compiled(optimizers[1].step)]
        functions = [module, compiled(other, fullgraph=True)]
        for function, update, optimizer in zip(functions, updates, optimizers, strict=True):
            for _ in range(2):
                result = function(torch.ones(3, WIDTH))
                result.backward(torch.ones_like(result))
                update()
                optimizer.zero_grad()
    return close([*other.parameters()], [*module.parameters()]), seen, None


def compiled_autograd() -> Told:
    """The backward is traced again, as a graph of its own that has no forward in it."""
    import torch

    with torch._dynamo.config.patch(compiled_autograd=True):
        return compared(SPAN)


def exported() -> Told:
    """A graph of torch.export: changed in place, and compiled."""
    import torch
    from torch._inductor import config

    import torch_patches

    module = model().requires_grad_(False)
    x = torch.full((3, WIDTH), 0.5)
    expected = module(x)
    program = torch.export.export(module, (x,)).run_decompositions()
    with config.patch(SPAN), launches() as seen:
        found = compiled(program.module())(x)
    changed = program.module()
    report = torch_patches.optimize_graph(changed, bucketing_mode="topo_span")
    return close([found, changed(x)], [expected] * 2), seen, report.collectives_after


def aot_inductor() -> Told:
    """A library that one rank compiles, and all load, each with its own shards."""
    import torch
    import torch.distributed as dist
    from torch._inductor import config

    module = model().requires_grad_(False)
    x = torch.full((3, WIDTH), 0.5)
    with config.patch(SPAN), launches() as seen, tempfile.TemporaryDirectory() as folder:
        package = [f"{folder}/model.pt2"]
        program = torch.export.export(module, (x,))
        if dist.get_rank() == 0:
            torch._inductor.aoti_compile_and_package(program, package_path=package[0])
        dist.broadcast_object_list(package)
        loaded = torch._inductor.aoti_load_package(package[0])
        loaded.load_constants(dict(module.named_parameters()), check_full_update=True)
        found = loaded(x)
        dist.barrier()  # the folder goes
    return close([found], [module(x)]), seen, None


def subclass_outputs() -> Told:
    """DTensors come in, are gathered, and go out."""
    import torch
    import torch.distributed as dist
    from torch._inductor import config
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    weights = [
        torch.nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]))
        for _ in range(2)
    ]

    def function(x: Any, *weights: Any) -> Any:
        for weight in weights:
            x = x @ weight.redistribute(placements=[Replicate()])
        return x.redistribute(placements=[Shard(1)])

    def run(f: Any) -> list[Any]:
        x = distribute_tensor(torch.ones(4, WIDTH), mesh, [Replicate()])
        result = f(x, *weights)
        assert isinstance(result, DTensor) and result.placements == (Shard(1),)
        result.to_local().backward(torch.ones_like(result.to_local()))
        gradients = [w.grad.to_local().clone() for w in weights]
        for weight in weights:
            weight.grad = None
        return [result.to_local().detach(), *gradients]

    expected = run(function)
    with config.patch(SPAN), launches() as seen:
        ours = run(compiled(function, fullgraph=True))
    return close(ours, expected), seen, None


def models_with_different_flags() -> Told:
    """Their backwards compile after all forwards, the last one first."""
    import torch
    import torch.distributed as dist
    from torch._inductor import config

    modules = [model() for _ in range(3)]
    expected = step(modules[0], modules[0])
    x = torch.full((3, WIDTH), 0.5 + dist.get_rank())
    results = []
    with launches() as seen:
        for module, mode in zip(modules, ("topo_span", "none", "auto"), strict=True):
            with config.patch({PREFIX + "bucketing_mode": mode}):
                results.append(compiled(module)(x))
        for result in reversed(results):
            result.backward(torch.ones_like(result))
    found = [
        close([result.detach(), *(p.grad for p in module.parameters())], expected)
        for result, module in zip(results, modules, strict=True)
    ]
    return all(found), seen, None


CASES: dict[str, Callable[[], Told]] = {
    function.__name__: function
    for function in (
        checkpointing,
        selective_checkpointing,
        deterministic_mode,
        compiled_optimizer,
        compiled_autograd,
        exported,
        aot_inductor,
        subclass_outputs,
        models_with_different_flags,
    )
}


GATHERED = {"all_gather": 1}
SCATTERED = {"reduce_scatter": 1}
#: torch 2.11 repeats no gather under plain checkpointing, with or without us.
REPEATED = SCATTERED if _compat.torch_release() < (2, 12) else {**GATHERED, **SCATTERED}
#: Launches of each graph: four gathers are one, and so are four reductions.
LAUNCHES = {
    "checkpointing": [GATHERED, REPEATED],
    "selective_checkpointing": [GATHERED, {**GATHERED, **SCATTERED}],
    "exported": [GATHERED],
    "subclass_outputs": [GATHERED, GATHERED],
    "models_with_different_flags": [GATHERED, GATHERED, SCATTERED, SCATTERED],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told | str]]:
    """In a cache of their own: AOTInductor packages files that another process may be writing anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        return run_ranks(work, 2, timeout_s=280.0)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_eager_mode(ranks: list[dict[str, Told | str]], name: str) -> None:
    for rank in ranks:
        told = rank[name]
        assert not isinstance(told, str), told
        is_equal, launched, _ = told
        assert is_equal
        if name == "aot_inductor":
            assert launched == ([GATHERED] if rank is ranks[0] else [])
        else:
            assert launched == LAUNCHES.get(name, [GATHERED, SCATTERED])


def test_an_exported_module_is_changed_in_place_too(ranks: list[dict[str, Told | str]]) -> None:
    """Its parameters are its own, not inputs of its graph."""
    assert [rank["exported"][2] for rank in ranks] == [GATHERED] * 2
