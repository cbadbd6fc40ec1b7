"""Runs torch's own overlap scheduling on a captured graph, on a machine without a GPU or network.

torch asks the device for its memory bandwidth, its arithmetic rate and its generation; here it gets
those of our device table.  Its collectives' sizes come from process groups, which exist on torch's fake
backend, by the names and ranks of the capture.

torch 2.11 has not all of it: what a function runs is imported there.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._inductor import config
from torch._inductor import utils as inductor_utils
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Device
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    op_name,
    op_namespace,
    tensors_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import decision_bytes, tensor_bytes

_COPY_IN = "_pre_bucket_all_gather"

#: What torch's cost model calls the generation of a device of ours.
_GENERATIONS = {"A100": "AMPERE", "H100": "HOPPER", "H200": "HOPPER", "B200": "BLACKWELL"}


@contextlib.contextmanager
def process_groups(groups: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Fake process groups by the names that a capture's graphs use, seen from the first rank that
    is in all of them.

    Raises:
        ValueError: no rank is in all groups.
    """
    shared = set.intersection(*(set(ranks) for ranks in groups.values())) if groups else {0}
    if not shared:
        raise ValueError("no rank is in all process groups of the capture")
    world = 1 + max((rank for ranks in groups.values() for rank in ranks), default=0)
    hook = sys.excepthook  # replaced by init_process_group
    dist.init_process_group("fake", store=FakeStore(), rank=min(shared), world_size=world)
    try:
        _register(groups)
        yield
    finally:
        dist.destroy_process_group()  # forgets all names
        sys.excepthook = hook


def _register(groups: Mapping[str, tuple[int, ...]]) -> None:
    default = dist.group.WORLD
    assert default is not None
    made = {name: dist.new_group(list(ranks)) for name, ranks in groups.items()}
    # torch counts its names up, so all of its own go before the first of the capture's comes.
    for group in made.values():
        distributed_c10d._unregister_process_group(group.group_name)
    for name, group in made.items():
        if name != default.group_name:
            distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


@contextlib.contextmanager
def device_constants(device: Device) -> Iterator[None]:
    """torch's cost models see ``device`` wherever they ask for the one of this machine."""
    from torch._inductor import comm_analysis
    from torch.utils import _runtime_estimation

    def rate(dtype: torch.dtype, **_: object) -> float:
        return device.matmul_tflops(dtype)

    def bandwidth(*_: object) -> float:
        return device.dram_gb_per_s

    generation = comm_analysis.NVIDIA_GPU_TYPE[_GENERATIONS.get(device.name, "AMPERE")]
    with contextlib.ExitStack() as stack:
        for module in (inductor_utils, _runtime_estimation):
            asked: dict[str, Callable[..., float]] = {"get_device_tflops": rate}
            asked |= dict.fromkeys(_compat.bandwidth_names(module), bandwidth)
            for name, answer in asked.items():
                stack.enter_context(mock.patch.object(module, name, answer))
        stack.enter_context(mock.patch.object(comm_analysis, "get_gpu_type", lambda: generation))
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's INFO and WARNING lines, some of which hold a whole graph."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def schedule(
    gm: fx.GraphModule,
    model: RuntimeModel,
    *,
    pre_bucketing: bool,
    our_estimates: bool = False,
) -> fx.GraphModule:
    """torch's scheduler with bucketing, everything else as its flags' defaults give it.

    Needs :func:`process_groups`.

    Args:
        gm: changed, possibly in place.
        model: its device's constants are those that torch sees.
        pre_bucketing: torch's FSDP pre-bucketing.
        our_estimates: torch also decides by our times of collectives and products, instead of by its
            own formulas.
    """
    from torch._inductor.fx_passes import overlap_scheduling

    flags: dict[str, object] = {
        "collective_bucketing": True,
        "compute_estimator": "analytical",
        "insert_overlap_deps": False,
        "pre_bucketing_fsdp_collectives": pre_bucketing,
    }
    with device_constants(model.device), quiet(), contextlib.ExitStack() as stack:
        if our_estimates:
            if pre_bucketing:
                _pre_bucketed(gm)
            flags["pre_bucketing_fsdp_collectives"] = False
            flags["custom_runtime_estimation"] = _estimation(gm, model)
        prefix = "aten_distributed_optimizations."
        stack.enter_context(config.patch({prefix + n: value for n, value in flags.items()}))
        return overlap_scheduling.schedule_overlap_bucketing_from_inductor_configs(gm)


def manual(gm: fx.GraphModule, plan: Sequence[list[str] | str], device: Device) -> fx.GraphModule:
    """torch's module bucketing, with the defaults of its function.

    Needs :func:`process_groups`.

    Args:
        gm: changed in place.
        plan: module names; a list is one bucket.
        device: whose constants torch sees where it asks.
    """
    from torch._inductor.fx_passes import overlap_manual_scheduling

    with device_constants(device), quiet():
        return overlap_manual_scheduling.manual_overlap_bucketing(gm, list(plan))


def _pre_bucketed(gm: fx.GraphModule) -> None:
    """torch's FSDP pre-bucketing alone, so that the nodes it makes can be given our times too."""
    from torch._inductor.fx_passes.fsdp import pre_bucket_fsdp_collectives

    pre_bucket_fsdp_collectives(gm)
    stable_topological_sort(gm.graph)


def _estimation(
    gm: fx.GraphModule, model: RuntimeModel
) -> Callable[[fx.Node, int | None], float | None]:
    """Our times as torch's ``custom_runtime_estimation``; None for nodes that ``gm`` lacks now."""
    skeleton = collect(gm.graph)
    costs = model.node_costs(gm.graph, skeleton)
    model = model.beside(costs)
    starts = {c.start: c for c in skeleton.collectives}

    def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
        if node in starts:
            return model.collective_ms(starts[node], size_bytes)
        return costs[node].ms if node in costs else None

    return estimate


def copies_in(
    costs: Mapping[fx.Node, ComputeCost], model: RuntimeModel
) -> dict[fx.Node, ComputeCost]:
    """Costs of torch's ``bucketing::_pre_bucket_all_gather``, which our graphs never hold.

    It allocates the whole gathered buffer and writes only this rank's part of it
    (``torch/_inductor/fx_passes/bucketing.py``): result bytes / group size.  The model, which sees
    an unknown op, takes it to write its whole result.
    """
    device = model.device
    rate = device.dram_gb_per_s * device.dram_efficiency * 1e6  # bytes per ms
    result = {}
    for node, cost in costs.items():
        if op_namespace(node.target) == "bucketing" and op_name(node.target) == _COPY_IN:
            read = sum(_result_bytes(source) for source in node.all_input_nodes)
            group_size = node.args[1]
            assert isinstance(group_size, int)
            moved = read + _result_bytes(node) / group_size
            result[node] = cost._replace(ms=max(moved / rate, device.kernel_us / 1e3))
    return result


def _result_bytes(node: fx.Node) -> int:
    return sum(decision_bytes(tensor_bytes(t)) for t in tensors_of(node.meta.get("val")))
