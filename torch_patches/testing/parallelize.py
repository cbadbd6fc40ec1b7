"""Parallelism added to a finished model by changing how its parameters are stored.

The idea of SimpleFSDP: a parameter is *stored* as a DTensor shard, and *reading* it gives the full
tensor.  Reading is a property of the module's class, so the model's code does not change, the
gathers and the gradients' reduce-scatters are ordinary nodes of the compiled graph, and everything
else (when to gather, what to merge) is left to graph passes.

=================  ==============================  =======================================
strategy           call                            collectives, forward; backward
=================  ==============================  =======================================
FSDP               mesh (8,)                       all-gather; reduce-scatter
HSDP               mesh (2, 4), HSDP placements    all-gather; reduce-scatter + all-reduce
two shard dims     mesh (4, 2), Shard(0) twice     two gathers; two reduce-scatters
DDP                ``replicate_simple``            none; all-reduce
FSDP + TP          ``tensor_parallel`` first       the above plus the activations' traffic
FSDP + experts     ``expert_parallel`` first       the above plus all-to-all
=================  ==============================  =======================================

All ranks must start from equal parameter values (the same seed): sharding slices, it does not send.
Gradients are averaged over the data-parallel ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


@dataclass(frozen=True)
class ParameterLayout:
    """How the parameters of a module are turned from what is stored into what is computed with.

    Args:
        mp_dtype: dtype to gather and compute in, None for the stored one.  Gradients are always
            reduced in the stored dtype.
        reshard: gather again in the backward instead of keeping the gathered parameter.
        grad_divisor: extra division of the gradient, beyond the average over the mesh.
        inner_mesh: tensor-parallel mesh on which the gathered tensor is a DTensor, or None.
        inner_placements: its placements there.
    """

    mp_dtype: torch.dtype | None
    reshard: bool
    grad_divisor: int
    inner_mesh: DeviceMesh | None = None
    inner_placements: tuple[Placement, ...] = ()


class _DivideGradient(torch.autograd.Function):
    """Identity whose gradient is divided by a constant."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient / ctx.divisor, None


def _recompute_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Checkpoint policy inside a gather: its only input is the stored shard, so nothing of it is
    worth keeping.  MUST, because the partitioner otherwise prefers saving a collective's result."""
    return CheckpointPolicy.MUST_RECOMPUTE


_reshard_contexts = functools.partial(create_selective_checkpoint_contexts, _recompute_all)


def _gather(stored: DTensor, layout: ParameterLayout) -> torch.Tensor:
    """The tensor to compute with, of a stored parameter."""
    mesh_dims = stored.device_mesh.ndim
    full = stored.redistribute(
        placements=[Replicate()] * mesh_dims,
        forward_dtype=layout.mp_dtype,
        backward_dtype=stored.dtype if layout.mp_dtype is not None else None,
    ).to_local(grad_placements=[Partial("avg")] * mesh_dims)
    if layout.grad_divisor != 1:
        full = _DivideGradient.apply(full, layout.grad_divisor)
    if layout.inner_mesh is not None:
        full = DTensor.from_local(full, layout.inner_mesh, layout.inner_placements)
    return full


def _read(module: nn.Module, name: str) -> torch.Tensor:
    stored = module._parameters[name]
    layout: ParameterLayout = module._parameter_layouts[name]  # type: ignore[index,assignment]
    assert isinstance(stored, DTensor)
    if not layout.reshard:
        return _gather(stored, layout)
    return checkpoint(_gather, stored, layout, use_reentrant=False, context_fn=_reshard_contexts)


def _reading_property(name: str) -> property:
    return property(lambda module: _read(module, name))


def _direct_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _store(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Parameter:
    """``parameter`` (a tensor, or a tensor-parallel DTensor whose local part counts) on ``mesh``."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    # src_data_rank=None: slice what this rank has, instead of a scatter from rank 0.
    stored = distribute_tensor(local.detach(), mesh, placements, src_data_rank=None)
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


def _layout_of(
    parameter: nn.Parameter, mp_dtype: torch.dtype | None, reshard: bool, grad_divisor: int
) -> ParameterLayout:
    if not isinstance(parameter, DTensor):
        return ParameterLayout(mp_dtype, reshard, grad_divisor)
    inner = parameter.device_mesh, tuple(parameter.placements)
    return ParameterLayout(mp_dtype, reshard, grad_divisor, *inner)


def fully_shard_simple(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_dtype: torch.dtype | None = None,
    reshard: bool = True,
    placements: Sequence[Placement] | None = None,
    grad_divisor: int = 1,
) -> nn.Module:
    """Store every parameter of ``model`` as a DTensor on ``mesh``; reading one gathers it.

    Args:
        model: changed in place and returned.  Modules sharded by an earlier call are left alone,
            so parts with a mesh of their own (experts) go first.
        mesh: the data-parallel mesh.
        mp_dtype, reshard, grad_divisor: see :class:`ParameterLayout`.
        placements: one for each mesh dimension; default ``Shard(0)`` on all of them.  HSDP is
            ``(Replicate(), Shard(0))``.
    """
    if placements is None:
        placements = [Shard(0)] * mesh.ndim
    stored_of: dict[nn.Parameter, nn.Parameter] = {}  # keeps tied parameters tied
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    touched: dict[nn.Module, dict[str, ParameterLayout]] = {}
    for module, name, parameter in list(_direct_parameters(model)):
        if hasattr(module, "_parameter_layouts"):
            continue
        if parameter not in stored_of:
            stored_of[parameter] = _store(parameter, mesh, placements)
        layout = _layout_of(parameter, mp_dtype, reshard, grad_divisor)
        touched.setdefault(module, {})[name] = layout
        module._parameters[name] = stored_of[parameter]
    for module, layouts in touched.items():
        key = type(module), tuple(layouts)
        if key not in classes:
            properties = {name: _reading_property(name) for name in layouts}
            classes[key] = type(f"Sharded{key[0].__name__}", (key[0],), properties)
        module._parameter_layouts = layouts  # type: ignore[assignment]
        module.__class__ = classes[key]
    return model


def replicate_simple(
    model: nn.Module, mesh: DeviceMesh, *, mp_dtype: torch.dtype | None = None
) -> nn.Module:
    """DDP: parameters on every rank, one all-reduce for each gradient, in the graph."""
    placements = [Replicate()] * mesh.ndim
    return fully_shard_simple(model, mesh, mp_dtype=mp_dtype, reshard=False, placements=placements)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron-style tensor parallelism of a :class:`~torch_patches.testing.models.Llama`.

    Heads and hidden units are split over ``mesh``; between the blocks, the sequence is.  Call it
    before :func:`fully_shard_simple` with the data-parallel mesh.
    """
    model_plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, model_plan)
    for block in model.layers:  # type: ignore[union-attr]
        parallelize_module(block, mesh, _block_plan())
    return model


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(use_local_output=True),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    dp_mesh: DeviceMesh,
    *,
    mp_dtype: torch.dtype | None = None,
    reshard: bool = True,
) -> nn.Module:
    """Spread the routed experts of a :class:`~torch_patches.testing.models.MoE` over ``mesh`` and
    shard each rank's experts over ``dp_mesh``, the ranks with the same experts.

    Call it before :func:`fully_shard_simple`, which then takes the rest of the model on all ranks.
    """
    for module in model.modules():
        if not hasattr(module, "group_name"):
            continue
        for name, parameter in list(module._parameters.items()):
            assert parameter is not None
            if parameter.shape[0] % mesh.size():
                raise ValueError(f"{parameter.shape[0]} experts over {mesh.size()} ranks")
            own = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
            module._parameters[name] = nn.Parameter(own.clone())
        module.group_name = mesh.get_group().group_name  # type: ignore[assignment]
        module.group_size = mesh.size()  # type: ignore[assignment]
        # An expert has seen the tokens of the whole expert group: its gradient is a sum there.
        divisor = mesh.size()
        fully_shard_simple(
            module, dp_mesh, mp_dtype=mp_dtype, reshard=reshard, grad_divisor=divisor
        )
    return model
