"""Runs the passes, or torch's, on a graph that was read from a file, and measures the result."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    RuntimeModel,
    make_model,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import simulate
from torch_patches._inductor.fx_passes.comm_overlap.graph.accumulated import Accumulated
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import recorded_from_names
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches._inductor.fx_passes.comm_overlap.reporting import Observer
from torch_patches.captured import Captured, CaptureFormatError
from torch_patches.testing import torch_scheduler
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.spmd_interpreter import (
    SpmdError,
    expand_group,
    random_inputs,
    run_spmd,
)

MAX_CHECKED_RANKS = 16
MAX_CHECKED_BYTES = 2**30  # of all ranks' values
#: Sums in another order differ by so much at most, relative to the largest value.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Measured:
    """What the estimates expect of a graph, whoever planned it.

    Args:
        launches: by kind.
        total_ms, exposed_ms: of the simulated run.
        peak_bytes: with all inputs held by the caller.
    """

    launches: dict[str, int]
    total_ms: float
    exposed_ms: float
    peak_bytes: int


@dataclass(frozen=True)
class Checked:
    """What came of running both graphs on all ranks in this process.

    Args:
        verdict: "equal", "close", "different" or "skipped".
        detail: a sentence.
    """

    verdict: str
    detail: str


@contextlib.contextmanager
def judged(on_gpu: bool) -> Iterator[None]:
    """CPU graphs as those of a GPU, or as they are."""
    with as_on_gpu() if on_gpu else contextlib.nullcontext():
        yield


def model_of(options: Options) -> RuntimeModel:
    """The estimates' model of the options."""
    return make_model(
        options.estimate_device,
        options.gpus_per_node,
        options.custom_runtime_estimation,
        options.calibration,
        options.compute_slowdown,
        options.link_sharing,
    )


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """Another module with the same values."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def plan(
    module: fx.GraphModule, captured: Captured, options: Options, observer: Observer | None = None
) -> Report:
    """Runs our passes, in place.  The groups must exist."""
    report = pipeline.run_post_grad(
        module.graph, options, _recorded(captured), estimated=True, observer=observer
    )
    module.recompile()
    return report if report is not None else Report(options.bucketing_mode)


def _recorded(captured: Captured) -> tuple[RecordedInput, ...]:
    """What Dynamo knew of the inputs when the file was made.

    Raises:
        CaptureFormatError: what the file tells of gradients does not fit its inputs.
    """
    inputs, accumulated = captured.info.get("inputs"), captured.info.get("accumulated", [])
    names = [str(name) for name in inputs] if isinstance(inputs, list) else []
    try:
        gradients = [
            Accumulated(
                operator.index(told["parameter"]),
                None if told["before"] is None else operator.index(told["before"]),
                tuple(map(operator.index, told["outputs"])),
            )
            for told in accumulated
        ]
        return recorded_from_names(names, gradients)
    except (TypeError, LookupError) as error:
        raise CaptureFormatError(f"info.accumulated: malformed ({error!r:.100})") from error


def plan_as_torch(module: fx.GraphModule, options: Options) -> fx.GraphModule:
    """What torch's scheduler with bucketing makes of a copy, told the constants of our device table."""
    model = model_of(options)
    # It makes tensors on the devices of the graph, which are not here.
    copied = copy_of(module) if torch.cuda.is_available() else _on_cpu(module)
    after = torch_scheduler.schedule(copied, model, pre_bucketing=True)
    after.recompile()
    return after


def measure(module: fx.GraphModule, options: Options) -> Measured:
    """The estimates of a graph as it stands, equally for ours and torch's."""
    graph, model = module.graph, model_of(options)
    skeleton = collect(graph)
    costs = dict(model.node_costs(graph, replace(skeleton, idle=frozenset())))
    costs |= torch_scheduler.copies_in(costs, model)
    run = simulate(graph.nodes, skeleton, model.beside(costs), costs)
    return Measured(
        dict(Counter(c.kind.value for c in skeleton.collectives)),
        run.total_ms,
        run.exposed_ms,
        peak_bytes(graph).peak_bytes,
    )


# -- the same values? -----------------------------------------------------------------------------


def check_values(
    before: fx.GraphModule, after: fx.GraphModule, groups: Mapping[str, Sequence[int]]
) -> Checked:
    """Runs both on random inputs for all ranks in this process, and compares what each rank gets."""
    ranks = {rank for members in groups.values() for rank in members} or {0}
    world_size = max(ranks) + 1
    if reason := _too_large(before, world_size):
        return Checked("skipped", reason)
    try:
        partitions = {name: expand_group(r, world_size) for name, r in groups.items()}
        one, other = _on_cpu(before), _on_cpu(after)
        inputs = random_inputs(one, world_size, high=2, scale=0.1)
        expected = run_spmd(one, inputs, partitions, world_size, allow_mixed_dtypes=True)
    except Exception as error:  # the graph as it was given cannot be run here
        return Checked("skipped", f"the graph cannot be run here ({_short(error)})")
    try:
        actual = run_spmd(other, inputs, partitions, world_size, allow_mixed_dtypes=True)
    except SpmdError as error:
        return Checked("different", _short(error))
    except Exception as error:
        return Checked("different", f"the changed graph cannot be run ({_short(error)})")
    return _compare(pytree.tree_leaves(expected), pytree.tree_leaves(actual), world_size)


def _too_large(module: fx.GraphModule, world_size: int) -> str:
    if world_size > MAX_CHECKED_RANKS:
        return f"{world_size} ranks, at most {MAX_CHECKED_RANKS} are run"
    size = 0
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                shape = [int(n) if isinstance(n, int) else n.node.hint or 0 for n in value.shape]
                size += torch.Size(shape).numel() * value.element_size()
    if size * world_size > MAX_CHECKED_BYTES:
        return (
            f"{size * world_size / 2**30:.1f} GiB of values on {world_size} ranks, at most 1 is run"
        )
    return ""


def _on_cpu(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose tensors are, and are made, on the CPU."""
    made = copy_of(module)
    cpu = torch.device("cpu")

    def move(value: Any) -> Any:
        if isinstance(value, FakeTensor) and value.device != cpu:
            shape, strides, start = value.shape, value.stride(), value.storage_offset()
            with in_kernel_invocation_manager(value.fake_mode):
                plain = torch.as_strided(value, shape, strides, start)  # of the same storage
            return FakeTensor(value.fake_mode, plain, cpu)
        return cpu if isinstance(value, torch.device) else value

    for node in made.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(move, node.meta["val"])
        if node.op == "get_attr" and isinstance(getattr(made, node.target, None), FakeTensor):
            setattr(made, node.target, move(getattr(made, node.target)))
        node.args = fx.node.map_aggregate(node.args, move)
        node.kwargs = fx.node.map_aggregate(node.kwargs, move)
    made.recompile()
    return made


def _compare(expected: Sequence[Any], actual: Sequence[Any], world_size: int) -> Checked:
    if len(expected) != len(actual):
        return Checked("different", f"{len(expected)} outputs, then {len(actual)}")
    equal = 0
    worst = 0.0
    for place, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(one, torch.Tensor):
            equal += 1
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return Checked("different", f"output {place} has another shape or dtype")
        if torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
            equal += 1
            continue
        scale = float(one.abs().max()) or 1.0
        error = float((one.double() - other.double()).abs().max()) / scale
        if not error <= TOLERANCES.get(one.dtype, 0.0):
            return Checked(
                "different", f"output {place} is off by {error:.3g} of its largest value"
            )
        worst = max(worst, error)
    outputs = f"{len(expected)} outputs of {world_size} ranks"
    if equal == len(expected):
        return Checked("equal", f"{outputs}, bit by bit")
    return Checked("close", f"{outputs}, off by {worst:.2g} of the largest value at most")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
