"""SimpleFSDP, as in torchtitan: parameters are stored as shards and gathered when they are read.

    torchrun --nproc-per-node 2 examples/simple_fsdp.py

Reading is a property of the module's class, so gathers and reduce-scatters are nodes of the compiled
graph, one for each parameter.  The change for torch_patches is the backend, or under Inductor a flag.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from _tiny import TinyModel, show, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_patches.backend import aot_eager_comm_overlap


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Stores each parameter as a shard; names and placements are those that FSDP2 gives them."""
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(shard))
        if own:
            kind: Any = type(module)
            module.__class__ = _gathering_class(kind, tuple(own))
    return model


@functools.cache
def _gathering_class(kind: Any, names: tuple[str, ...]) -> Any:
    return type(f"Gathering{kind.__name__}", (kind,), {name: _reader(name) for name in names})


def _reader(name: str) -> property:
    def read(module: nn.Module) -> torch.Tensor:
        shard = module._parameters[name]
        return checkpoint(_gather, shard, use_reentrant=False, context_fn=_gather_again)

    return property(read)


def _gather(shard: DTensor) -> torch.Tensor:
    full = shard.redistribute(placements=[Replicate()])
    return full.to_local(grad_placements=[Partial("avg")])


def _must_recompute(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


#: Reshard after the forward: the backward gathers again instead of keeping full parameters.
_gather_again = functools.partial(create_selective_checkpoint_contexts, _must_recompute)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {}
    for backend in ("aot_eager", aot_eager_comm_overlap):
        torch._dynamo.reset()
        model = shard_parameters(TinyModel(), mesh)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        runs[f"backend {getattr(backend, '__name__', backend)}"] = train(model, compiled)
    show(runs)


if __name__ == "__main__":
    main()
