#!/usr/bin/env python
"""Capture the joint, forward and backward graphs of a small model, without a GPU, in one process.

The model is compiled on torch's fake process group (collectives are recorded, nothing is sent) with
fake parameters (shapes without data), so the size of Llama-3-8B or of a 256-rank mesh costs time to
trace but no memory to hold weights.

Example:
    python tools/capture_graph.py --model llama --mode fsdp --mesh 8 --layers 3 -o llama.json.gz
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import math
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_patches.captured import registered_groups, save_captured
from torch_patches.testing.models import Llama, ModelConfig, MoE, MoEConfig
from torch_patches.testing.parallelize import (
    expert_parallel,
    fully_shard_simple,
    replicate_simple,
    tensor_parallel,
)

Graphs = dict[str, fx.GraphModule]

# Names of the mesh dimensions; the number of names is the number of dimensions wanted.
MESH_DIMS = {
    "fsdp": ("fsdp",),
    "ddp": ("ddp",),
    "hsdp": ("replicate", "shard"),
    "s0s0": ("outer", "inner"),
    "fsdp_tp": ("fsdp", "tp"),
    "moe_ep": ("dp", "ep"),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("llama", "moe"), default="llama")
    add("--mode", choices=tuple(MESH_DIMS), default="fsdp", help="how it is parallelised")
    add("--mesh", default="8", help="ranks, such as 8 or 4x2 (dimensions as the mode has them)")
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=64)
    add("--ffn", type=float, default=3.5, help="hidden width of the MLP over dim")
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=None)
    add("--kv-rank", type=int, default=None, help="latent attention of this width, as DeepSeek's")
    add("--vocab", type=int, default=256)
    add("--seq", type=int, default=32)
    add("--batch", type=int, default=2, help="sequences on each rank")
    add("--tied", action="store_true", help="the head uses the embedding's weight")
    add("--experts", type=int, default=8, help="moe: routed experts in all")
    add("--top-k", type=int, default=2, help="moe: experts of a token")
    add("--expert-ffn", type=float, default=1.0, help="moe: hidden width of an expert over dim")
    add("--shared-experts", type=int, default=1, help="moe: experts that see every token")
    add("--dense-layers", type=int, default=1, help="moe: leading blocks without experts")
    add("--capacity", type=float, default=1.25, help="moe: slots of an expert over its fair share")
    add("--ac", choices=("none", "block"), default="none", help="activation checkpointing")
    add(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gather parameters again in the backward",
    )
    add("--mp", choices=("bf16", "none"), default="bf16", help="dtype of gathers and compute")
    add("--dynamic", choices=("none", "batch", "seq"), default="none", help="a symbolic dimension")
    add("--pipeline", choices=("aot", "inductor"), default="aot", help="whose graphs to capture")
    add("-o", "--output", type=Path, required=True, help="file to write, *.json.gz")
    options = parser.parse_args(argv)
    _check_arguments(parser, options)
    return options


def _check_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.mesh_shape = tuple(int(size) for size in options.mesh.split("x"))
    dims = MESH_DIMS[options.mode]
    if len(options.mesh_shape) != len(dims):
        parser.error(f"--mode {options.mode} needs --mesh with dimensions {'x'.join(dims)}")
    if options.mode == "moe_ep" and options.model != "moe":
        parser.error("--mode moe_ep needs --model moe")
    if options.mode == "fsdp_tp" and (options.model != "llama" or options.kv_rank):
        parser.error("--mode fsdp_tp needs --model llama without --kv-rank")


# ------------------------------------------------------------------------------------------ models


def build_model(options: argparse.Namespace) -> nn.Module:
    """The model of the command line, not parallelised."""
    shape: dict[str, Any] = {
        "layers": options.layers,
        "dim": options.dim,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "kv_rank": options.kv_rank,
        "vocab": options.vocab,
        "ffn_multiple": options.ffn,
        "max_seq": options.seq,
        "tied": options.tied,
        "checkpoint_blocks": options.ac == "block",
    }
    if options.model == "llama":
        return Llama(ModelConfig(**shape))
    return MoE(
        MoEConfig(
            experts=options.experts,
            top_k=options.top_k,
            expert_multiple=options.expert_ffn,
            shared_experts=options.shared_experts,
            dense_layers=options.dense_layers,
            capacity_factor=options.capacity,
            **shape,
        )
    )


def parallelise(model: nn.Module, mesh: DeviceMesh, options: argparse.Namespace) -> None:
    """Apply ``--mode``, ``--mp`` and ``--reshard``."""
    mp_dtype = torch.bfloat16 if options.mp == "bf16" else None
    if options.mode == "ddp":
        replicate_simple(model, mesh, mp_dtype=mp_dtype)
        return
    placements = None
    if options.mode == "hsdp":
        placements = (Replicate(), Shard(0))
    elif options.mode == "fsdp_tp":
        tensor_parallel(model, mesh["tp"])
        mesh = mesh["fsdp"]
    elif options.mode == "moe_ep":
        expert_parallel(model, mesh["ep"], mesh["dp"], mp_dtype=mp_dtype, reshard=options.reshard)
        mesh = mesh["everyone"]
    fully_shard_simple(
        model, mesh, mp_dtype=mp_dtype, reshard=options.reshard, placements=placements
    )


# ----------------------------------------------------------------------------------------- capture


class Recorder:
    """Keeps copies of the graphs that pass by."""

    def __init__(self) -> None:
        self.graphs: Graphs = {}
        self.inputs: list[str] = []

    def keep(self, name: str, graph: fx.Graph) -> None:
        # The compiler goes on changing the graph; deepcopy of a graph shares the metadata's values.
        assert graph.owning_module is not None
        self.graphs[name] = fx.GraphModule(graph.owning_module, copy.deepcopy(graph))

    def keep_inputs(self, module: fx.GraphModule) -> None:
        """Where the model's inputs come from, by the index that AOT descriptors use."""
        for node in module.graph.find_nodes(op="placeholder"):
            source = getattr(node, "_dynamo_source", None)
            self.inputs.append("" if source is None else _source_name(source))


def _source_name(source: Any) -> str:
    name = source.name  # a method up to torch 2.9, then a property
    return str(name() if callable(name) else name)


def aot_backend(recorder: Recorder) -> Callable[..., Any]:
    """A dynamo backend that records AOTAutograd's graphs and runs them as they are."""

    def compiler(name: str) -> Callable[..., Any]:
        def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            recorder.keep(name, module.graph)
            return module.forward

        return compile_graph

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        recorder.keep("joint", joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    inner = aot_autograd(
        fw_compiler=compiler("fw"), bw_compiler=compiler("bw"), partition_fn=partition
    )

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        recorder.keep_inputs(module)
        return inner(module, inputs, **kwargs)

    return backend


def inductor_backend(recorder: Recorder) -> Callable[..., Any]:
    """A dynamo backend that records the graphs that Inductor's custom passes see.

    It stops where code generation would begin: the inner compiler runs the post-grad passes, as
    Inductor's does, and then the graph as it is.
    """
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config
    from torch._inductor.virtualized import V

    def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        name = "bw" if kwargs.get("is_backward") else "fw"
        runnable = copy.deepcopy(module.graph)
        inductor.view_to_reshape(module)
        with torch.no_grad():
            fake_mode = inductor.fake_tensor_prop(module, inputs)
        # Nested graphs come first, so the last call is the one for the whole graph.
        keep = {"post_grad_custom_post_pass": lambda graph: recorder.keep(name, graph)}
        with V.set_fake_mode(fake_mode), config.patch(keep):
            inductor._recursive_post_grad_passes(module, is_inference=False)
        return _boxed(fx.GraphModule(module, runnable).forward)

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        recorder.keep_inputs(module)
        keep = {"joint_custom_post_pass": lambda graph: recorder.keep("joint", graph)}
        return inductor.compile_fx(module, inputs, inner_compile=inner_compile, config_patches=keep)

    return backend


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(arguments: list[Any]) -> Any:
        return function(*arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def parameters_mode(options: argparse.Namespace) -> Iterator[None]:
    """Parameters without data, except that dynamo marks dimensions dynamic on real inputs only."""
    if options.dynamic != "none":
        yield
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def capture(options: argparse.Namespace) -> tuple[Graphs, list[str]]:
    """Compile one training step; the graphs, and where the model's inputs come from."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=math.prod(options.mesh_shape)
    )
    mesh = init_device_mesh("cpu", options.mesh_shape, mesh_dim_names=MESH_DIMS[options.mode])
    if options.mode == "moe_ep":
        # Only here: where a flattened mesh exists, DTensor 2.13 merges two gathers by itself.  And
        # before the fake mode, in which a mesh cannot look up its own coordinates.
        mesh._flatten("everyone")
    recorder = Recorder()
    backends = {"aot": aot_backend, "inductor": inductor_backend}
    backend = backends[options.pipeline](recorder)
    with parameters_mode(options):
        with progress("building the model"):
            model = build_model(options)
            parallelise(model, mesh, options)
        tokens = torch.zeros(options.batch, options.seq, dtype=torch.int64)
        targets = torch.zeros(options.batch, options.seq, dtype=torch.int64)
        if options.dynamic != "none":
            for tensor in (tokens, targets):
                torch._dynamo.mark_dynamic(tensor, ("batch", "seq").index(options.dynamic))
        with progress("tracing and partitioning"):
            loss = torch.compile(model, backend=backend, fullgraph=True)(tokens, targets)
        with progress("backward"):
            loss.backward()
    return recorder.graphs, recorder.inputs


# ------------------------------------------------------------------------------------------ output


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say every five seconds that ``what`` still goes on."""
    done = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        while not done.wait(5.0):
            print(f"  ... {what}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def count_collectives(module: fx.GraphModule) -> Counter[str]:
    """Number of collectives by ``kind@group``."""
    groups = registered_groups()
    counts: Counter[str] = Counter()
    for node in module.graph.nodes:
        if getattr(node.target, "namespace", None) not in ("_c10d_functional", "c10d_functional"):
            continue
        # The group is the last string among the arguments; only waits have none.
        names = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, str)]
        if names:
            group = groups.get(names[-1])
            label = (group and group.description) or names[-1]
            counts[f"{node.target._opname}@{label}"] += 1
    return counts


def summarise(graphs: Graphs) -> dict[str, Any]:
    """Print and return nodes and collectives of each graph."""
    summary: dict[str, Any] = {}
    for name, module in graphs.items():
        counts = dict(sorted(count_collectives(module).items()))
        summary[name] = {"nodes": len(module.graph.nodes), "collectives": counts}
        listed = ", ".join(f"{key} {count}" for key, count in counts.items()) or "no collectives"
        print(f"{name:6}{len(module.graph.nodes):7} nodes; {listed}")
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # torch warns of each checkpoint and each sequential gather
    start = time.monotonic()
    graphs, inputs = capture(options)
    summary = summarise(graphs)
    chosen = {
        key: value for key, value in vars(options).items() if key not in ("output", "mesh_shape")
    }
    info = {
        "options": chosen,
        "world_size": math.prod(options.mesh_shape),
        "summary": summary,
        "inputs": inputs,
    }
    with progress("writing"):
        save_captured(options.output, graphs, info)
    size_kb = options.output.stat().st_size / 1024
    print(f"{options.output}: {size_kb:.0f} KiB, {time.monotonic() - start:.1f} s")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
