"""Short training runs of a small sharded or replicated Llama, and how two of them compare.

One run is a model with fresh, seeded weights, compiled under given flags, trained for a few steps
on this rank's share of the data; everything a comparison needs is kept: losses and gradients of
every step, the collectives that were really launched, step times, the passes' reports.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from torch_patches.backend import aot_eager_comm_overlap
from torch_patches.testing.eager_backend import post_grad_eager
from torch_patches.testing.models import Llama, ModelConfig
from torch_patches.testing.parallelize import fully_shard_simple, replicate_simple

REPORT_ARTIFACT = "comm_overlap_report"

BACKENDS: Mapping[str, Any] = {
    "inductor": "inductor",
    "eager": post_grad_eager,
    "aot_eager": aot_eager_comm_overlap,  # buckets whatever the flag says
    "aot_eager of torch": "aot_eager",  # never does
    "uncompiled": None,
}


@dataclass(frozen=True)
class Workload:
    """What is trained: a float32 model.

    Args:
        model: its shape.
        strategy: "fsdp" (every parameter sharded over all ranks), "hsdp" (over half of the ranks,
            the other half holds the same), "s0s0" (over a 2-dimensional mesh, along one dimension of
            the parameter), "ddp" (every rank holds everything) or "fsdp2" (torch's
            eager one, to be run uncompiled, with the embedding, each block, and norm and head as
            its groups).
        batch, seq: sequences of each rank, tokens in one.
        steps: training steps whose losses and gradients are kept.
        timed_steps: further steps that are only timed.
        learning_rate: of plain SGD.
    """

    model: ModelConfig
    strategy: str = "fsdp"
    batch: int = 2
    seq: int = 32
    steps: int = 3
    timed_steps: int = 0
    learning_rate: float = 0.1


@dataclass
class TrainingRun:
    """What one run left behind.

    Args:
        losses: one tensor a step.
        gradients: by parameter name, this rank's shards, one dict a step.
        launches: "forward" and "backward" -> collective calls on the process group by kind, counted
            by the profiler in one step.
        compile_s: "forward" and "backward" -> seconds of the first step, compile included.
        step_ms: of the timed steps.
        reports: what the passes reported, as parsed JSON, in compile order.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    launches: dict[str, dict[str, int]] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """How far apart two runs are.

    Args:
        bitwise_equal: every loss and every gradient has the same bits.
        max_relative: largest difference of an element over the largest magnitude in its tensor.
        max_absolute: largest difference of an element.
        worst: the tensor with the largest relative difference.
        tensors: how many were compared.
    """

    bitwise_equal: bool
    max_relative: float
    max_absolute: float
    worst: str
    tensors: int


def train(
    workload: Workload,
    backend: str,
    flags: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
    options: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """Compiles and trains on this rank.

    Args:
        backend: a key of :data:`BACKENDS`.
        flags: Inductor config entries by full name, set for the whole run.
        say: told what happens next.
        options: for ``torch.compile``.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama(workload.model)
    _parallelise(model, workload.strategy)
    compiled: Any = model
    if BACKENDS[backend] is not None:
        given = None if options is None else dict(options)
        compiled = torch.compile(model, backend=BACKENDS[backend], fullgraph=True, options=given)
    run = TrainingRun()
    with inductor_config.patch(dict(flags)), _collected_reports(run.reports):
        for index in range(workload.steps):
            _training_step(model, compiled, _data(workload, index), workload, run, say)
        say("counting collectives in one step")
        _count_launches(model, compiled, _data(workload, 0), run)
        if workload.timed_steps:
            say(f"timing {workload.timed_steps} steps")
        for index in range(workload.timed_steps):
            _timed_step(model, compiled, _data(workload, index), run)
    return run


def _parallelise(model: Llama, strategy: str) -> None:
    ranks = torch.distributed.get_world_size()
    if strategy == "fsdp":
        fully_shard_simple(model, init_device_mesh("cpu", (ranks,)))
    elif strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard_simple(model, mesh, placements=(Replicate(), Shard(0)))
    elif strategy == "s0s0":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("outer", "inner"))
        fully_shard_simple(model, mesh, placements=(Shard(0), Shard(0)))
    elif strategy == "ddp":
        replicate_simple(model, init_device_mesh("cpu", (ranks,)))
    elif strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for group in (model.tok_embeddings, *model.layers, [model.norm, model.output], model):
            fully_shard(group, mesh=mesh)
    else:
        raise ValueError(f"strategy {strategy!r} is none of fsdp, hsdp, s0s0, ddp, fsdp2")


def _data(workload: Workload, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of this rank for a step; equal in every run."""
    generator = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + step)
    shape = (workload.batch, workload.seq)
    tokens = torch.randint(workload.model.vocab, shape, generator=generator)
    return tokens, tokens.roll(-1, dims=1)


def _training_step(
    model: nn.Module,
    compiled: Any,
    data: tuple[torch.Tensor, torch.Tensor],
    workload: Workload,
    run: TrainingRun,
    say: Callable[[str], None],
) -> None:
    first = not run.losses
    started = time.monotonic()
    say("compiling the forward" if first else f"training step {len(run.losses) + 1}")
    loss = compiled(*data)
    if first:
        run.compile_s["forward"] = time.monotonic() - started
        say(f"forward took {run.compile_s['forward']:.1f} s, compiling the backward")
        started = time.monotonic()
    loss.backward()
    if first:
        run.compile_s["backward"] = time.monotonic() - started
        say(f"backward took {run.compile_s['backward']:.1f} s")
    run.losses.append(loss.detach().clone())
    run.gradients.append({})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            run.gradients[-1][name] = _local(parameter.grad).clone()
            parameter.sub_(parameter.grad, alpha=workload.learning_rate)
            parameter.grad = None


def _local(tensor: Any) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _timed_step(
    model: nn.Module, compiled: Any, data: tuple[torch.Tensor, torch.Tensor], run: TrainingRun
) -> None:
    torch.distributed.barrier()
    started = time.perf_counter()
    compiled(*data).backward()
    run.step_ms.append((time.perf_counter() - started) * 1e3)
    model.zero_grad()


# -- estimates ------------------------------------------------------------------------------------


def balanced_estimate(node: fx.Node, override_size_bytes: int | None) -> float | None:
    """A ``custom_runtime_estimation`` by which a small model has something to plan.

    By a GPU's constants its kernels are too short to hide anything.  Here a matmul takes 1 ms; a
    collective 1 ms, and 1 ms for each 100 kB of its full tensor: 1.2 ms for a 64 x 64 weight, 1.6 ms
    for a 64 x 224 one, so that merging pays as well as hiding.
    """
    if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return 1.0
    name = str(node.target)
    if not name.startswith("_c10d_functional.") or "wait_tensor" in name:
        return None
    return 1.0 + (override_size_bytes or _full_bytes(node)) / 100e3


def _full_bytes(start: fx.Node) -> int:
    """Of what goes in or what comes out of a single collective, the larger."""
    values = [start.all_input_nodes[0].meta["val"], start.meta["val"]]
    return max(value.nbytes for value in values if isinstance(value, torch.Tensor))


# -- what was really launched ---------------------------------------------------------------------

_LAUNCH = re.compile(r"c10d::_?(allgather|reduce_scatter|allreduce|alltoall|broadcast)")
_KIND_OF = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


def _count_launches(
    model: nn.Module, compiled: Any, data: tuple[torch.Tensor, torch.Tensor], run: TrainingRun
) -> None:
    with _counted_launches() as forward:
        loss = compiled(*data)
    with _counted_launches() as backward:
        loss.backward()
    model.zero_grad()
    run.launches = {"forward": dict(forward), "backward": dict(backward)}


@contextmanager
def _counted_launches() -> Iterator[Counter[str]]:
    """Calls on the process group while the block runs, by kind; filled when it ends.

    The profiler sees what the dispatcher sees, so generated code cannot hide a launch from it.
    """
    counts: Counter[str] = Counter()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with _silent_stderr():
        profile.start()
    yield counts
    with _silent_stderr():
        profile.stop()
    for event in profile.key_averages():
        if match := _LAUNCH.match(event.key):
            counts[_KIND_OF[match[1]]] += event.count


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler's library writes a line to the file descriptor at each start and stop."""
    sys.stderr.flush()
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


# -- what the passes reported ---------------------------------------------------------------------


class _ReportCollector(logging.Handler):
    """Takes the reports out of torch's structured trace, where every compile puts them."""

    def __init__(self, reports: list[dict[str, Any]]) -> None:
        super().__init__()
        self.reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact", {})
        if artifact.get("name") == REPORT_ARTIFACT:
            self.reports.append(json.loads(record.payload))  # type: ignore[attr-defined]


@contextmanager
def _collected_reports(reports: list[dict[str, Any]]) -> Iterator[None]:
    trace = logging.getLogger("torch.__trace")
    collector = _ReportCollector(reports)
    trace.addHandler(collector)
    try:
        yield
    finally:
        trace.removeHandler(collector)


# -- comparison -----------------------------------------------------------------------------------


def compare(run: TrainingRun, reference: TrainingRun) -> Comparison:
    """Losses and gradients of all steps, element by element."""
    equal, worst, max_relative, max_absolute, tensors = True, "", 0.0, 0.0, 0
    for (name, ours), (_, theirs) in zip(_tensors(run), _tensors(reference), strict=True):
        tensors += 1
        if torch.equal(ours, theirs):
            continue
        equal = False
        difference = (ours.double() - theirs.double()).abs().max().item()
        relative = difference / max(theirs.double().abs().max().item(), 1e-30)
        max_absolute = max(max_absolute, difference)
        if math.isnan(relative):  # compares false with everything; it is the worst
            relative = math.inf
        if relative > max_relative:
            worst, max_relative = name, relative
    return Comparison(equal, max_relative, max_absolute, worst, tensors)


def _tensors(run: TrainingRun) -> Iterator[tuple[str, torch.Tensor]]:
    for step, (loss, gradients) in enumerate(zip(run.losses, run.gradients, strict=True)):
        yield f"loss of step {step}", loss
        for name, gradient in gradients.items():
            yield f"gradient of {name}, step {step}", gradient
