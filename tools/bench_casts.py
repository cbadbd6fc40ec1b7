"""One cast kernel for a bucket of gathers beside one for each parameter, on real devices.

    torchrun --nproc-per-node 2 tools/bench_casts.py               # NCCL
    torchrun --nproc-per-node 2 tools/bench_casts.py --cpu         # gloo; checks the script only

A forward of ``--layers`` layers whose float32 shards are cast to bfloat16 and gathered is compiled by
Inductor with zero-copy buckets three times: ``none`` (nothing merged), ``own casts`` (merged, each
parameter cast by a kernel of its own) and ``one cast``.  The three run in turn, ``--rounds`` times.
One JSON line for each: median, lowest and highest ms of a step over the rounds, kernels of a step
without collectives, and whether the result equals that of ``none`` bit by bit; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_patches  # noqa: F401  registers the flags
from torch_patches._inductor.fx_passes.comm_overlap.graph import emit_coalesced
from torch_patches.testing.backends import as_on_gpu

c10d = torch.ops._c10d_functional
VARIANTS = ("none", "own casts", "one cast")
Step = Callable[..., Tensor]


def shapes(width: int) -> list[tuple[int, ...]]:
    """A block of LLaMA's parameters: attention with grouped keys, three projections, two norms."""
    hidden = 7 * width // 2
    return [
        (width,), (width, width), (width // 4, width), (width // 4, width), (width, width),
        (width,), (hidden, width), (hidden, width), (hidden, width),
    ]  # fmt: skip


def make_step(layers: int, ranks: int) -> types.FunctionType:
    world = dist.group.WORLD
    assert world is not None
    group = world.group_name

    def step(x: Tensor, *shards: Tensor) -> Tensor:
        each = len(shards) // layers
        for layer in range(layers):
            for shard in shards[layer * each : (layer + 1) * each]:
                low = shard.to(torch.bfloat16)
                weight = c10d.wait_tensor(c10d.all_gather_into_tensor(low, ranks, group))
                x = x * weight if weight.dim() == 1 else (x @ weight.t()) @ weight
                x = x / x.shape[-1] ** 0.5
        return x

    assert isinstance(step, types.FunctionType)
    return step


@contextmanager
def flags_of(variant: str) -> Iterator[None]:
    mode = "none" if variant == "none" else "topo_span"
    values = {"bucketing_mode": mode, "bucket_mode": "coalesced", "bucket_cap_mb": 500}
    patches = {f"aten_distributed_optimizations.{name}": value for name, value in values.items()}
    own = mock.patch.object(
        emit_coalesced, "_cast_together", lambda emitter, members, payload, made: payload
    )
    with config.patch(patches), own if variant == "own casts" else nullcontext():
        yield


def compiled(step: types.FunctionType, variant: str, inputs: list[Tensor]) -> tuple[Step, Tensor]:
    """A compiled copy of ``step`` and its result.  Its code is its own: Dynamo caches by code."""
    code = step.__code__.replace(co_name=variant.replace(" ", "_"))
    own = types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)
    run = torch.compile(own, fullgraph=True)
    with flags_of(variant), config.patch(force_disable_caches=True), torch.no_grad():
        return run, run(*inputs)


def synchronize(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()
    dist.barrier()


def time_step(run: Step, inputs: list[Tensor], steps: int, cpu: bool) -> float:
    synchronize(cpu)
    begin = time.perf_counter()
    for _ in range(steps):
        run(*inputs)
    if not cpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def count_kernels(run: Step, inputs: list[Tensor], cpu: bool) -> int:
    if cpu:
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(*inputs)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum("nccl" not in e.name and not e.name.startswith("Mem") for e in events)


def case(options: argparse.Namespace, width: int) -> list[dict[str, Any]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu" if options.cpu else f"cuda:{rank}")
    torch.manual_seed(rank)
    shards = [
        (torch.randn(shape[0] // ranks, *shape[1:], device=device) / 32).requires_grad_()
        for _ in range(options.layers)
        for shape in shapes(width)
    ]
    inputs = [torch.randn(options.tokens, width, device=device).to(torch.bfloat16), *shards]
    step = make_step(options.layers, ranks)
    torch._dynamo.reset()
    runs = {}
    for variant in VARIANTS:
        runs[variant] = compiled(step, variant, inputs)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with torch.no_grad():
        for _ in range(options.rounds):
            for variant, (run, _) in runs.items():
                times[variant].append(time_step(run, inputs, options.steps, options.cpu))
        kernels = {v: count_kernels(run, inputs, options.cpu) for v, (run, _) in runs.items()}
    expected = runs["none"][1]
    return [
        {
            "width": width,
            "layers": options.layers,
            "variant": variant,
            "ms": round(statistics.median(times[variant]), 4),
            "lowest_ms": round(min(times[variant]), 4),
            "highest_ms": round(max(times[variant]), 4),
            "kernels": kernels[variant],
            "equal": bool(torch.equal(result, expected)),
        }
        for variant, (_, result) in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="gloo on CPU, judged as on GPUs")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    dist.init_process_group("gloo" if options.cpu else "nccl")
    if not options.cpu:
        torch.cuda.set_device(dist.get_rank())
    rows: list[dict[str, Any]] = []
    with as_on_gpu() if options.cpu else nullcontext():
        for width in options.widths:
            rows += case(options, width)
            if dist.get_rank() == 0:
                for row in rows[-len(VARIANTS) :]:
                    print(json.dumps(row), flush=True)
    if dist.get_rank() == 0:
        device = "CPU" if options.cpu else torch.cuda.get_device_name()
        print(f"\n{dist.get_world_size()} x {device}, torch {torch.__version__}\n")
        print(
            "| width | variant | ms a step (lowest-highest) | kernels | equal |\n|---|---|---|---|---|"
        )
        for r in rows:
            span = f"{r['ms']} ({r['lowest_ms']}-{r['highest_ms']})"
            print(f"| {r['width']} | {r['variant']} | {span} | {r['kernels']} | {r['equal']} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
