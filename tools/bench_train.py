"""Training steps on real devices, the implementations beside each other.

    torchrun --nproc-per-node 4 tools/bench_train.py                          # NCCL
    torchrun --nproc-per-node 4 tools/bench_train.py --cpu --tiny             # gloo; checks the script only

A Llama in float32 shards, gathered and computed in bfloat16, gradients averaged in float32, AdamW; each
implementation compiles its own copy with equal weights and trains it on equal data.  ``--impls``:

    none            torch.compile, no pass
    torch           torch's own overlap scheduling and bucketing (its default flags)
    torch_bucket_reorder    one bucket of all, and its older pass that moves starts and waits
    torch_manual    its bucketing by modules, called as a pass
    fsdp2, fsdp2_compile    FSDP2's wrapper, eager or each block compiled
    ddp, ddp_compile        DDP's wrapper under autocast, eager or compiled
    MODE            ours with that bucketing_mode
    MODE+FLAG...    the same with flags of ours on: fuse (both chained fusions), keep
                    (keep_gathered_parameters, 2 GB), agree (cross_rank_check), graphs (torch's
                    triton.cudagraphs), or one by name:
                    auto+max_memory_increase_gb=0.5+calibration_file=h200.json

``--keep DIR`` keeps a profile of the last steps and the captured graphs of rank 0 there, for
``torch-patches report --profile``, and adds the device's compute, communication and exposed milliseconds.

One JSON line for each workload and implementation (median and spread of whole steps without a host
synchronisation between them, peak memory, seconds of the first step, losses); the table comes last.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from _bench_implementations import NotApplicableError, Workload, flags_of, make_model
from _bench_profile import device_times
from torch._dynamo.utils import counters
from torch._inductor import config

import torch_patches
from torch_patches.testing.models import ModelConfig, MoEConfig

PROFILED_STEPS = 2


def _llama(layers: int, dim: int, seq: int, vocab: int = 32000) -> ModelConfig:
    """No grouped keys: torch 2.11's overlap scheduling cannot count their operations."""
    return ModelConfig(layers=layers, dim=dim, heads=dim // 128, vocab=vocab, max_seq=seq)


_MOE = MoEConfig(
    layers=6, dim=2048, heads=16, vocab=32000, max_seq=2048, experts=16, capacity_factor=1.25
)
WORKLOADS: dict[str, Workload] = {
    "2b_fsdp": Workload(_llama(8, 4096, 2048), "fsdp", 1, 2048),
    "small_fsdp": Workload(_llama(16, 1024, 1024), "fsdp", 2, 1024),
    "small_s0s0": Workload(_llama(16, 1024, 1024), "s0s0", 2, 1024),
    "ddp": Workload(_llama(8, 2048, 1024), "ddp", 1, 1024),
    "hsdp": Workload(_llama(8, 2048, 2048), "hsdp", 1, 2048),
    "2b_fsdp_tp": Workload(_llama(8, 4096, 4096), "tp", 1, 4096),
    "moe": Workload(_MOE, "moe", 2, 2048),
}


def make_step(
    workload: Workload, implementation: str, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A whole training step; returns its loss, not waited for."""
    model = make_model(workload, implementation, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    # The ranks of a tensor-parallel group see the same tokens.
    part = dist.get_rank() // (2 if workload.strategy == "tp" else 1)
    generator = torch.Generator(device).manual_seed(1000 + part)
    shape = (workload.batch, workload.seq)
    tokens = torch.randint(workload.model.vocab, shape, generator=generator, device=device)
    targets = tokens.roll(-1, dims=1)

    def step() -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()  # a CUDA graph writes the next one there

    return step


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(
    name: str, implementation: str, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    workload = options.workloads_by_name[name]
    torch._dynamo.reset()
    counters.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kept = _folder_of(options, name, implementation)
    flags = {**flags_of(implementation), "force_disable_caches": True}
    with config.patch(flags), _captured(kept):
        step = make_step(workload, implementation, device)
        started = time.perf_counter()
        losses = [step()]
        synchronize(device)
        first_s = time.perf_counter() - started
        losses += [step() for _ in range(options.warm_up)]
        times = []
        for _ in range(options.rounds):
            synchronize(device)
            started = time.perf_counter()
            losses += [step() for _ in range(options.steps)]
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / options.steps * 1e3)
        measured = {} if options.keep is None else _profiled(step, kept, device)
    is_cuda = device.type == "cuda"
    return {
        "workload": name,
        "implementation": implementation,
        "ms": round(statistics.median(times), 3),
        "lowest_ms": round(min(times), 3),
        "highest_ms": round(max(times), 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if is_cuda else 0.0,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3) if is_cuda else 0.0,
        "first_step_s": round(first_s, 1),
        **measured,
        "losses": [round(float(loss), 6) for loss in losses],
        "counters": {
            k: v for k, v in counters["inductor"].items() if "comm_overlap" in k or "cudagraph" in k
        },
    }


def _folder_of(options: argparse.Namespace, name: str, implementation: str) -> Path | None:
    """Where profile and graphs go; None where nobody wants them, or on another rank."""
    if options.keep is None or dist.get_rank():
        return None
    folder: Path = options.keep / re.sub(r"[^\w.=-]", "_", f"{name}_{implementation}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _captured(folder: Path | None) -> AbstractContextManager[Any]:
    return nullcontext() if folder is None else torch_patches.capture(folder)


def _profiled(
    step: Callable[[], torch.Tensor], folder: Path | None, device: torch.device
) -> dict[str, float]:
    """Runs some steps on all ranks, one of which looks; milliseconds of its device, if it has one."""
    synchronize(device)
    looking = nullcontext() if folder is None else torch.profiler.profile()
    with looking as profile:
        for number in range(PROFILED_STEPS):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if folder is None or profile is None:
        return {}
    trace = folder / "profile.json.gz"
    profile.export_chrome_trace(str(trace))
    if device.type != "cuda":
        return {}
    return {
        name: round(value, 3) for name, value in asdict(device_times(trace, PROFILED_STEPS)).items()
    }


def measured(
    name: str, implementation: str, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The same, or what kept an implementation from compiling, which is the same on all ranks."""
    try:
        return measure(name, implementation, options, device)
    except (torch._dynamo.exc.TorchDynamoException, NotApplicableError) as error:
        return {"workload": name, "implementation": implementation, "error": str(error)[:300]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--impls", nargs="+", default=["none", "torch", "topo_span", "auto"])
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="steps behind the first one")
    parser.add_argument("--keep", type=Path, help="a folder for profiles and graphs")
    parser.add_argument("--cpu", action="store_true", help="gloo on CPU, judged as on GPUs")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers of each")
    options = parser.parse_args()
    options.workloads_by_name = dict(WORKLOADS)
    if options.tiny:
        small: dict[type, ModelConfig] = {
            ModelConfig: ModelConfig(layers=2),
            MoEConfig: MoEConfig(layers=2),
        }
        options.workloads_by_name = {
            name: replace(w, model=small[type(w.model)], batch=2, seq=32)
            for name, w in WORKLOADS.items()
        }
    return options


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("gloo" if options.cpu else "nccl")
    device = torch.device("cpu")
    if not options.cpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    with nullcontext():
        for name in options.workloads:
            for implementation in options.impls:
                rows.append(measured(name, implementation, options, device))
                if dist.get_rank() == 0:
                    print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        kind = "CPU" if options.cpu else torch.cuda.get_device_name()
        print(f"\n{dist.get_world_size()} x {kind}, torch {torch.__version__}\n")
        print(
            "| workload | implementation | ms a step (lowest-highest) | peak GiB | first step s |"
            " last loss |\n|---|---|---|---|---|---|"
        )
        for r in rows:
            if "error" in r:
                print(f"| {r['workload']} | {r['implementation']} | {r['error'][:80]} | | | |")
                continue
            span = f"{r['ms']} ({r['lowest_ms']}-{r['highest_ms']})"
            print(
                f"| {r['workload']} | {r['implementation']} | {span} | {r['peak_gib']} | "
                f"{r['first_step_s']} | {r['losses'][-1]} |"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
