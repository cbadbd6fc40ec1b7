"""``torch-patches calibrate``: measures the user's machines, and shows where the model is off."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches.cli._common import (
    EXIT_OK,
    CommandError,
    console,
    new_parser,
    print_json,
    require,
)

if TYPE_CHECKING:
    import torch

    from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Device
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import CalibrationTable
    from torch_patches.testing.measure import Settings

KIB, MIB = 1 << 10, 1 << 20
#: More than this share away from the measurement, an estimate is worth a table.
WORTH_TELLING = 0.2

_DESCRIPTION = """
Measures collectives, matrix products, memory bandwidth and what the host spends on issuing, and writes
the table for the flag calibration_file.  Run it under torchrun, with NCCL or gloo.  Each number is a
median, then the largest over all ranks; rank 0 writes the file.  Give the same file to every rank of a
training job.  All groups of one shape run at the same time, as those of a mesh do.

Afterwards it shows the measurements beside the constants that estimates take without a table; --plot
draws them, --show does either for a table that exists.
"""
_EXAMPLE = """
torch-patches calibrate --show h100.json --plot h100.png
torchrun --nproc-per-node 8 -m torch_patches calibrate h100.json
torchrun --nnodes 2 --nproc-per-node 8 ... -m torch_patches calibrate h100.json
"""


@dataclass(frozen=True)
class Compared:
    """One measurement beside the model's constants.

    Args:
        what: a kind of collective with its group, or the dtype of a matrix product.
        amount: bytes of a collective, operations of a product.
        measured, modelled: ms.
    """

    what: str
    amount: int
    measured_ms: float
    modelled_ms: float

    @property
    def off(self) -> float:
        """By which share of the measurement the model is off; below 0 it is too fast."""
        return self.modelled_ms / self.measured_ms - 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_parser(
        subparsers, "calibrate", "measure this machine for the estimates", _DESCRIPTION, _EXAMPLE
    )
    add = parser.add_argument
    add("output", type=Path, metavar="TABLE", help="the file that rank 0 writes")
    add("--show", action="store_true", help="measure nothing, TABLE exists")
    add("--gpus-per-node", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "8")),
        help="ranks that share a node, as in the flag gpus_per_node (default: torchrun's)")  # fmt: skip
    add("--backend", choices=("nccl", "gloo"), help="default: nccl where there are GPUs")
    add("--quick", action="store_true", help="few sizes, some seconds")
    add("--device", default="H100", help="whose constants to compare with (flag estimate_device)")
    add("--plot", type=Path, metavar="PNG", help="draw model against measurement")


def run(arguments: argparse.Namespace) -> int:
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import load_calibration
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES

    if arguments.device not in DEVICES:
        raise CommandError(f"--device {arguments.device}: one of {', '.join(DEVICES)} is expected")
    if arguments.gpus_per_node < 1:
        raise CommandError("--gpus-per-node must be at least 1")
    for path in filter(None, (arguments.output, arguments.plot)):
        if not path.absolute().parent.is_dir():
            raise CommandError(f"the folder of {path} does not exist")
    if arguments.plot is not None:
        require("matplotlib")
    if arguments.show:
        table = load_calibration(arguments.output)
    else:
        measured = _measure(arguments)
        if measured is None:  # another rank writes and tells
            return EXIT_OK
        table = measured
    rows = compare(table, DEVICES[arguments.device])
    if arguments.plot is not None:
        plot(rows, arguments.device, table, arguments.plot)
    _tell(rows, table, arguments)
    return EXIT_OK


# -- measuring ------------------------------------------------------------------------------------


def settings_for(device: torch.device, gpus_per_node: int, quick: bool) -> Settings:
    """Sizes that take about two minutes on one node, or with ``quick`` some seconds."""
    import torch

    from torch_patches.testing.measure import Settings

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


def _measure(arguments: argparse.Namespace) -> CalibrationTable | None:
    """The table, on rank 0, which has written it; None on other ranks."""
    import torch
    import torch.distributed as dist

    from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import save_calibration
    from torch_patches.testing.measure import calibrate

    joined = not dist.is_initialized()
    if joined and "MASTER_ADDR" not in os.environ:
        raise CommandError(
            "run it under torchrun: torchrun --nproc-per-node 8 -m torch_patches ..."
        )
    backend = arguments.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if joined:
        dist.init_process_group(backend)
    table = calibrate(device, settings_for(device, arguments.gpus_per_node, arguments.quick))
    first = dist.get_rank() == 0
    if first:
        save_calibration(arguments.output, table)
    dist.barrier()  # no rank ends before the file is there
    if joined:
        dist.destroy_process_group()
    return table if first else None


# -- model against measurement --------------------------------------------------------------------


def compare(table: CalibrationTable, device: Device) -> list[Compared]:
    """Every measured collective and product beside what the device's constants give."""
    from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import collective_ms

    rows = []
    for times in table.collectives:
        what = f"{times.kind.value}, {times.group_size} ranks, {times.link.value}"
        link = device.link(times.link)
        for size, ms in zip(times.size_bytes, times.ms, strict=True):
            modelled = collective_ms(times.kind, size, times.group_size, link)
            rows.append(Compared(what, size, ms, modelled))
    for rates in table.matmul:
        what = f"matrix product, {str(rates.dtype).removeprefix('torch.')}"
        reached = device.matmul_tflops(rates.dtype) * device.matmul_efficiency
        for flops, tflops in zip(rates.flops, rates.tflops, strict=True):
            modelled = max(flops / reached / 1e9, device.kernel_us / 1e3)
            rows.append(Compared(what, flops, flops / tflops / 1e9, modelled))
    return rows


def plot(rows: Sequence[Compared], device: str, table: CalibrationTable, path: Path) -> None:
    """Draws one panel for each kind: dots are measured, lines are the model."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[Compared]]] = {}
    for row in rows:
        panels.setdefault(row.what.split(",")[0], {}).setdefault(row.what, []).append(row)
    figure = Figure(figsize=(9, 3.2 * max(len(panels), 1)), layout="constrained")
    figure.suptitle(f"measured on {table.device} (dots), constants of {device} (lines)")
    for place, (kind, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, place)
        for number, (what, line) in enumerate(lines.items()):
            amounts = [row.amount for row in line]
            label = what.split(", ", 1)[1]
            colour = f"C{number % 10}"
            axes.plot(amounts, [row.measured_ms for row in line], "o", color=colour, label=label)
            axes.plot(amounts, [row.modelled_ms for row in line], "-", color=colour)
        axes.set(xscale="log", yscale="log", title=kind, ylabel="ms")
        axes.set_xlabel("operations" if kind == "matrix product" else "bytes of the full tensor")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _tell(rows: Sequence[Compared], table: CalibrationTable, arguments: argparse.Namespace) -> None:
    if arguments.json:
        listed = [{**asdict(row), "off": row.off} for row in rows]
        print_json({"table": arguments.output.name, "measured": table.describe(),
                    "device": arguments.device, "rows": listed})  # fmt: skip
        return
    print(f"{arguments.output}: {table.describe()}")
    _print_table(rows, arguments.device)


def _print_table(rows: Sequence[Compared], device: str) -> None:
    out = console()
    from rich.table import Table

    by_what: dict[str, list[Compared]] = {}
    for row in rows:
        by_what.setdefault(row.what, []).append(row)
    shown = Table(title=f"the constants of {device} against the measurement")
    for name in ("what", "smallest, ms", "model", "largest, ms", "model", "model off by"):
        shown.add_column(name, justify="left" if name == "what" else "right")
    for what, line in by_what.items():
        first, last = line[0], line[-1]
        worst = max(line, key=lambda row: abs(row.off))
        cells: list[Any] = [
            first.measured_ms,
            first.modelled_ms,
            last.measured_ms,
            last.modelled_ms,
        ]
        mark = " !" if abs(worst.off) > WORTH_TELLING else ""
        shown.add_row(what, *(f"{ms:.4f}" for ms in cells), f"{worst.off:+.0%}{mark}")
    out.print(shown)
