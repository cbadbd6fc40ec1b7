"""A compiler of one's own, as AutoParallel has it: ``optimize_graph`` on each graph it gets.

    torchrun --nproc-per-node 2 examples/own_compiler.py

AutoParallel traces the joint graph, inserts the collectives, splits it, and calls a compiler with the
forward graph and with the backward graph.  Here AOTAutograd does the tracing and splitting, and
SimpleFSDP's parameters bring the collectives.  The change for torch_patches is one line in the
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from _tiny import TinyModel, show, train
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from simple_fsdp import shard_parameters
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

import torch_patches


def compile_before(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The compiler as it was; AutoParallel's calls Inductor here, this one runs the graph."""
    return make_boxed_func(gm.forward)


def compile_after(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The compiler with the pass.  The graph is changed in place, its inputs and outputs stay.

    Code generation needs to be told the order: ``optimize_graph(gm, insert_overlap_deps=True)``.
    """
    report = torch_patches.optimize_graph(gm)
    if dist.get_rank() == 0:
        before, after = dict(report.collectives_before), dict(report.collectives_after)
        print(f"optimize_graph: {before} -> {after}")
    return compile_before(gm, example_inputs)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {}
    for compiler in (compile_before, compile_after):
        torch._dynamo.reset()
        model = shard_parameters(TinyModel(), mesh)
        backend = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            # torch's default partition would save views of full parameters for the backward.
            partition_fn=min_cut_rematerialization_partition,
        )
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        runs[compiler.__name__] = train(model, compiled)
    show(runs)


if __name__ == "__main__":
    main()
