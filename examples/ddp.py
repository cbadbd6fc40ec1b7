"""DDP with its all-reduces in the compiled graph: every rank holds every parameter.

    torchrun --nproc-per-node 2 examples/ddp.py

torch's DistributedDataParallel reduces from hooks, outside the compiled graph, where no graph pass
sees it.  Here a parameter is a replicated DTensor whose gradient is a partial average: the backward
has one all-reduce for each, and the pass merges them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from _tiny import Run, TinyModel, show, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from torch_patches.backend import aot_eager_comm_overlap


def replicate_parameters(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Stores each parameter as a replicated DTensor; reading it gives the plain tensor.

    All ranks must hold equal values already: the same seed, or the same checkpoint.
    """
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            stored = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(stored))
        if own:
            kind: Any = type(module)
            module.__class__ = _reading_class(kind, tuple(own))
    return model


@functools.cache
def _reading_class(kind: Any, names: tuple[str, ...]) -> Any:
    return type(f"Replicated{kind.__name__}", (kind,), {name: _reader(name) for name in names})


def _reader(name: str) -> property:
    return property(lambda module: _reduced_in_backward(module._parameters[name]))


def _reduced_in_backward(stored: DTensor) -> torch.Tensor:
    # Moves nothing now.  In the backward it turns the partial gradient into a replicated one, which
    # is the all-reduce; without it the gradient stays partial and the optimizer reduces it, eagerly.
    replicated = stored.redistribute(placements=[Replicate()])
    return replicated.to_local(grad_placements=[Partial("avg")])


def distributed_data_parallel() -> Run:
    """torch's own, eager: where a DDP user comes from."""
    model = DistributedDataParallel(TinyModel())
    return train(model, model)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {"DistributedDataParallel": distributed_data_parallel()}
    for backend in ("aot_eager", aot_eager_comm_overlap):
        torch._dynamo.reset()
        model = replicate_parameters(TinyModel(), mesh)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        runs[f"backend {getattr(backend, '__name__', backend)}"] = train(model, compiled)
    show(runs)


if __name__ == "__main__":
    main()
