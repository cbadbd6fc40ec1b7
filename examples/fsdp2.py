"""From FSDP2 to a traced model: the same shards, the same groups, collectives in the graph.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Dynamo does not trace FSDP2's hooks, so a compiled FSDP2 model still gathers outside its graphs.
Here the shards that ``fully_shard`` made (their names and placements are equal) are loaded into a
model that gathers when a parameter is read, and what was a call of ``fully_shard`` becomes an entry
of the plan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from _tiny import Run, TinyModel, show, train
from simple_fsdp import shard_parameters
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_patches
from torch_patches.backend import aot_eager_comm_overlap


def groups_of(model: Any) -> list[nn.Module | list[nn.Module]]:
    """What is gathered together: one call of ``fully_shard`` each, or one entry of the plan."""
    return [model.tok_embeddings, *model.layers, [model.norm, model.output]]


def fsdp2(mesh: DeviceMesh) -> nn.Module:
    """As it was before."""
    model = TinyModel(seed=1)  # other values than those that the checkpoint is loaded over
    for group in groups_of(model):
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def traced(mesh: DeviceMesh, checkpoint: dict[str, Any], backend: Any, options: Any) -> Run:
    """Trains from the shards of an FSDP2 model."""
    torch._dynamo.reset()
    model = shard_parameters(TinyModel(), mesh)
    model.load_state_dict(checkpoint)
    return train(model, torch.compile(model, backend=backend, fullgraph=True, options=options))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fsdp2(mesh)
    checkpoint = {name: shard.detach().clone() for name, shard in model.state_dict().items()}
    plan = torch_patches.plan_from_modules(model, groups_of(model))
    modules = {"bucketing_mode": "modules", "module_bucket_plans": plan}
    show(
        {
            "FSDP2": train(model, model),
            "traced, backend aot_eager": traced(mesh, checkpoint, "aot_eager", None),
            "traced, a bucket a group": traced(mesh, checkpoint, aot_eager_comm_overlap, modules),
        }
    )


if __name__ == "__main__":
    main()
