"""Measures this machine and writes a calibration table for `calibration_file`.

    torchrun --nproc-per-node 8 tools/calibrate.py h100.json                # one node
    torchrun --nnodes 2 --nproc-per-node 8 ... tools/calibrate.py h100.json # links across nodes too

Collectives (five kinds, several sizes, groups of 2, 4, ... ranks within a node and across nodes),
matrix products, memory bandwidth, what the host spends on issuing and, on CUDA, how much a
collective slows compute.  Each number is a median, then the largest over all ranks; rank 0 writes
the file.  Give the same file to every rank of a training job.  All groups of one shape run at the
same time, as those of a mesh do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import save_calibration
from torch_patches.testing.measure import Settings, calibrate

KIB, MIB = 1 << 10, 1 << 20


def settings_for(device: torch.device, gpus_per_node: int, quick: bool) -> Settings:
    """Sizes that take about two minutes on one node, or with ``quick`` some seconds."""
    if device.type == "cuda":
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        if quick:
            return Settings(gpus_per_node, (MIB, 64 * MIB), (1024, 4096), dtypes, 256 * MIB, 5, 5)
        sizes = tuple(MIB * n for n in (1, 4, 16, 64, 256))
        squares = (512, 1024, 2048, 4096, 8192)
        return Settings(gpus_per_node, (16 * KIB, 256 * KIB, *sizes), squares, dtypes, 1024 * MIB)
    if quick:
        return Settings(
            gpus_per_node, (16 * KIB, 256 * KIB), (64, 128), (torch.float32,), 8 * MIB, 3, 3
        )
    sizes = (16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
    both = (torch.bfloat16, torch.float32)
    return Settings(gpus_per_node, sizes, (128, 256, 512, 1024), both, 256 * MIB)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="the file that rank 0 writes")
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", "8")),
        help="ranks that share a node, as in the flag gpus_per_node (default: torchrun's)",
    )
    default = "nccl" if torch.cuda.is_available() else "gloo"
    parser.add_argument("--backend", choices=("nccl", "gloo"), default=default)
    parser.add_argument("--quick", action="store_true", help="few sizes, some seconds")
    arguments = parser.parse_args(argv)
    if arguments.gpus_per_node < 1:
        parser.error("--gpus-per-node must be at least 1")
    if not arguments.output.absolute().parent.is_dir():
        parser.error(f"the folder of {arguments.output} does not exist")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    device = torch.device("cpu")
    if arguments.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group(arguments.backend)
    settings = settings_for(device, arguments.gpus_per_node, arguments.quick)
    table = calibrate(device, settings)
    if dist.get_rank() == 0:
        save_calibration(arguments.output, table)
        print(f"{arguments.output}: {table.describe()}")
    dist.barrier()  # no rank ends before the file is there
    if joined:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
