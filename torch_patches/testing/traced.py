"""Joint, forward and backward graphs of a small model, without a process group.

    traced = trace(
        lambda: Mlp([Sharded(), Sharded()]),
        (4, 8),
        joint_pass=lambda graph, inputs: run_joint(graph, options, inputs),
    )
    traced.joint, traced.forward, traced.backward

Dynamo and AOTAutograd trace the model as ``torch.compile`` does; the collectives' fake kernels need
no group, so groups are names (see ``gathers.py``).  ``export_joint`` takes AutoParallel's way, whose
descriptors name parameters and buffers.  Nothing is computed: everything is a fake tensor, and
``SpmdInterpreter`` runs the graphs with real ones.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_patches._inductor.fx_passes.comm_overlap.graph.dynamo_inputs import record_inputs
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput

PARTITIONERS: dict[str, Callable[..., tuple[fx.GraphModule, fx.GraphModule]]] = {
    "default": default_partition,
    "min_cut": min_cut_rematerialization_partition,
}

JointPass = Callable[[fx.Graph, tuple[RecordedInput, ...]], Any]


@dataclass(eq=False)
class Traced:
    """The graphs of one model.

    Args:
        dynamo: what Dynamo gave the backend.
        inputs: what is known about its placeholders.
        joint: a copy from after the joint pass; None of a model without gradients.
        forward: after the partition; the only graph of a model without gradients.
        backward: after the partition, None of a model without gradients.
    """

    dynamo: fx.GraphModule | None = None
    inputs: tuple[RecordedInput, ...] = ()
    joint: fx.GraphModule | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None

    @property
    def split(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward."""
        assert self.forward is not None and self.backward is not None
        return self.forward, self.backward


def trace(
    build: Callable[[], nn.Module],
    *shapes: Sequence[int],
    partition: str = "min_cut",
    joint_pass: JointPass = lambda graph, inputs: None,
    train: bool = True,
) -> Traced:
    """Traces ``build()(*inputs)`` and its backward.

    Args:
        build: makes the model; called where tensors are fake.
        shapes: of the inputs, float32 without gradient.
        partition: a key of :data:`PARTITIONERS`.
        joint_pass: run on the joint graph (the only graph, without gradients) before the partition.
        train: False traces under ``no_grad``: no joint graph, no backward.
    """
    traced = Traced()
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(train):
        model, inputs = build(), [torch.ones(tuple(shape)) for shape in shapes]
        backend = _backend(traced, PARTITIONERS[partition], joint_pass)
        result = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        if train:
            result.sum().backward()
    torch._dynamo.reset()
    return traced


def _backend(
    traced: Traced, partitioner: Callable[..., Any], joint_pass: JointPass
) -> Callable[..., Any]:
    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joint_pass(joint.graph, traced.inputs)
        traced.joint = copy.deepcopy(joint)
        return partitioner(joint, inputs, **kwargs)

    def forward(gm: fx.GraphModule, inputs: Any) -> Any:
        traced.forward = gm
        return make_boxed_func(copy.deepcopy(gm).forward)

    def backward(gm: fx.GraphModule, inputs: Any) -> Any:
        traced.backward = gm
        return make_boxed_func(copy.deepcopy(gm).forward)

    def inference(gm: fx.GraphModule, inputs: Any) -> Any:
        joint_pass(gm.graph, traced.inputs)
        return forward(gm, inputs)

    compiled = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
    )

    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        traced.dynamo, traced.inputs = gm, record_inputs(gm)
        return compiled(gm, inputs, **kwargs)

    return backend


def trace_inductor(
    build: Callable[[], nn.Module],
    *shapes: Sequence[int],
    flags: Mapping[str, Any],
    train: bool = True,
) -> Traced:
    """The graphs that Inductor's custom passes are given, under the flags; the hooks run.

    Recorded by a user's own passes, which come before ours: joint graphs are not tagged yet,
    forward and backward graphs not bucketed.
    """
    traced = Traced()
    patches = {
        **flags,
        "joint_custom_post_pass": lambda graph: setattr(traced, "joint", _kept(graph)),
        "post_grad_custom_post_pass": lambda graph: setattr(
            traced, "backward" if traced.forward is not None else "forward", _kept(graph)
        ),
    }
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(train):
        model, inputs = build(), [torch.ones(tuple(shape)) for shape in shapes]
        with inductor_config.patch(patches):
            result = torch.compile(model, backend=_inductor_passes, fullgraph=True)(*inputs)
            if train:
                result.sum().backward()
    torch._dynamo.reset()
    return traced


def _kept(graph: fx.Graph) -> fx.GraphModule:
    assert graph.owning_module is not None
    return fx.GraphModule(graph.owning_module, copy.deepcopy(graph))


def _inductor_passes(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor up to its post-grad passes, without code generation."""

    def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        runnable = fx.GraphModule(module, copy.deepcopy(module.graph))
        compile_fx_module.view_to_reshape(module)
        with torch.no_grad():
            fake_mode = compile_fx_module.fake_tensor_prop(module, inputs)
        with V.set_fake_mode(fake_mode):
            compile_fx_module._recursive_post_grad_passes(
                module, is_inference=bool(kwargs.get("is_inference"))
            )
        return make_boxed_func(runnable.forward)

    # Looked up at call time: that is where the hook sits.
    compile_fx: Callable[..., Any] = compile_fx_module.compile_fx
    return compile_fx(gm, inputs, inner_compile=inner_compile)


def export_joint(build: Callable[[], nn.Module], *shapes: Sequence[int]) -> fx.GraphModule:
    """The joint graph as AutoParallel gets it: its descriptors name parameters and buffers."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model, inputs = build(), tuple(torch.ones(tuple(shape)) for shape in shapes)
        return aot_export_joint_with_descriptors(stack, model, inputs).graph_module
