"""What ``bench_train.py`` compares: by name, the flags it compiles under and the step it trains with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from torch_patches.testing.models import Llama, ModelConfig, MoE, MoEConfig
from torch_patches.testing.parallelize import (
    expert_parallel,
    fully_shard_simple,
    replicate_simple,
    tensor_parallel,
)

PREFIX = "aten_distributed_optimizations."
GPUS_PER_NODE = 8
LOW = torch.bfloat16
#: Names of its own for what an implementation is besides a mode of ours.
FLAGS: dict[str, dict[str, object]] = {
    "fuse": {"fuse_chained_all_gathers": True, "fuse_chained_reduce_scatters": True},
    "keep": {"keep_gathered_parameters": True, "max_memory_increase_gb": 2.0},
    "agree": {"cross_rank_check": "agree"},
    "ce": {"copy_engine_gathers": True},
}
#: torch's own, by Inductor's flags.
OF_TORCH: dict[str, dict[str, object]] = {
    "torch": {
        PREFIX + "enable_overlap_scheduling": True,
        PREFIX + "collective_bucketing": True,
    },
    "torch_bucket_reorder": {
        "bucket_all_gathers_fx": "all",
        "bucket_reduce_scatters_fx": "all",
        "bucket_all_reduces_fx": "all",
        "reorder_for_compute_comm_overlap": True,
    },
    "torch_manual": {},
}
#: Wrappers that launch their collectives themselves; no graph holds them.
EAGER = ("fsdp2", "fsdp2_compile", "ddp", "ddp_compile")


@dataclass(frozen=True)
class Workload:
    """A model and how it is spread; see :func:`parallelise`."""

    model: ModelConfig
    strategy: str
    batch: int
    seq: int


class NotApplicableError(Exception):
    """An implementation that there is not for a strategy."""


def flags_of(implementation: str) -> dict[str, object]:
    """Entries of Inductor's config."""
    mode, *extra = implementation.split("+")
    if "graphs" in extra:
        rest = "+".join([mode, *(name for name in extra if name != "graphs")])
        return {**flags_of(rest), "triton.cudagraphs": True}
    if mode in EAGER:
        return {}
    if mode in OF_TORCH:
        return {**OF_TORCH[mode], **_manual(mode)}
    flags: dict[str, object] = {"bucketing_mode": mode, "gpus_per_node": GPUS_PER_NODE}
    for name in extra:
        flag, given, value = name.partition("=")
        flags.update({flag: _value_of(value)} if given else FLAGS[name])
    return {PREFIX + name: value for name, value in flags.items()}


def _value_of(text: str) -> object:
    """A number, or what else JSON writes without quotes; any other text as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _manual(mode: str) -> Mapping[str, object]:
    """torch's bucketing by modules is a pass to be called; blocks, and what is around them."""
    if mode != "torch_manual":
        return {}
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    plans: list[list[str] | str] = ["tok_embeddings", "layers.*", ["norm", "output"]]

    def bucket(graph: fx.Graph) -> None:
        module = graph.owning_module
        assert module is not None
        manual_overlap_bucketing(module, plans, insert_overlap_deps=False)

    return {"post_grad_custom_post_pass": bucket}


# -- models ---------------------------------------------------------------------------------------


def make_model(workload: Workload, implementation: str, device: torch.device) -> Any:
    """A model with the workload's weights, spread over all ranks and ready to train.

    Raises:
        NotApplicableError: the implementation is none of the workload's strategy.
    """
    torch.manual_seed(0)
    config = workload.model
    with torch.device(device):
        model = MoE(config) if isinstance(config, MoEConfig) else Llama(config)
    kind = implementation.partition("+")[0]
    if kind not in EAGER:
        parallelise(model, workload.strategy, device.type)
        return torch.compile(model, fullgraph=True)
    compiles = kind.endswith("_compile")
    if kind.startswith("ddp"):
        return _wrapped(model, workload.strategy, compiles)
    return _sharded(model, workload.strategy, device.type, compiles)


def mesh_of(strategy: str, device: str) -> DeviceMesh:
    """All ranks, as the strategy arranges them; of two dimensions the last one has two ranks, or as
    many as there are."""
    ranks = dist.get_world_size()
    names = {
        "hsdp": ("replicate", "shard"),
        "s0s0": ("outer", "inner"),
        "tp": ("shard", "tensor"),
        "moe": ("dp", "ep"),
    }
    if strategy not in names:
        return init_device_mesh(device, (ranks,))
    inner = min(ranks, 2)
    return init_device_mesh(device, (ranks // inner, inner), mesh_dim_names=names[strategy])


def parallelise(model: nn.Module, strategy: str, device: str) -> None:
    """In the graph: one collective for each parameter."""
    mesh = mesh_of(strategy, device)
    if strategy == "ddp":
        replicate_simple(model, mesh, mp_dtype=LOW)
    elif strategy == "tp":
        tensor_parallel(model, mesh["tensor"])
        fully_shard_simple(model, mesh["shard"], mp_dtype=LOW)
    elif strategy == "moe":
        everyone = mesh._flatten("everyone")
        expert_parallel(model, mesh["ep"], mesh["dp"], mp_dtype=LOW)
        fully_shard_simple(model, everyone, mp_dtype=LOW)
    else:
        first = Replicate() if strategy == "hsdp" else Shard(0)
        placements = (first, Shard(0))[-mesh.ndim :]
        fully_shard_simple(model, mesh, mp_dtype=LOW, placements=placements)


def _sharded(model: Llama, strategy: str, device: str, compiles: bool) -> nn.Module:
    """FSDP2, each block and the rest; compiled block by block, as it is used."""
    if strategy not in ("fsdp", "hsdp", "tp"):
        raise NotApplicableError(f"FSDP2 is not set up for {strategy}")
    mesh = mesh_of(strategy, device)
    if strategy == "tp":
        tensor_parallel(model, mesh["tensor"])
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for block in model.layers:
        if compiles:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _wrapped(model: nn.Module, strategy: str, compiles: bool) -> Callable[..., torch.Tensor]:
    """DDP under autocast: its parameters are not gathered, hence cast where they are read."""
    if strategy != "ddp":
        raise NotApplicableError(f"DDP is not set up for {strategy}")
    wrapped = DistributedDataParallel(model)
    inner: Any = torch.compile(wrapped) if compiles else wrapped

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            with torch.autocast(inputs[0].device.type, LOW):
                loss: torch.Tensor = inner(*inputs)
            return loss

    return Autocast()
