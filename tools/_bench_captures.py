"""The graphs of ``bench_planner.py``: what to capture, and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Llama-3-8B, and with a quarter of its layers.
_LLAMA_SIZES = "--model llama --dim 4096 --heads 32 --kv-heads 8 --vocab 128256"
_LLAMA = f"{_LLAMA_SIZES} --layers 32"
_LLAMA_8L = f"{_LLAMA_SIZES} --layers 8"
_SHORT = "--seq 2048 --batch 1"
# Enough work to hide FSDP's traffic between nodes under (16,384 tokens a rank, or 32,768 for eight);
# without recomputation the activations would not fit a GPU.
_LONG = "--seq 8192 --batch 2 --ac block"
# Half of it: gathers about as long as what hides them.
_MIDDLE = "--seq 8192 --batch 1 --ac block"
_LONG_TP = "--seq 8192 --batch 4 --ac block"
# The sizes of DeepSeek's 16B model (V2-Lite): 64 routed experts of which a token sees six, two shared
# ones, one dense layer first, latent attention.  Experts are spread over the eight ranks of a node and
# sharded across nodes; everything else is sharded over all ranks.
_MOE = (
    "--model moe --mode moe_ep --layers 27 --dim 2048 --heads 16 --kv-rank 512 --vocab 102400 "
    "--ffn 5.34375 --experts 64 --top-k 6 --expert-ffn 0.6875 --shared-experts 2 --dense-layers 1 "
    "--seq 4096 --batch 2"
)

RECIPES: dict[str, str] = {
    "moe_8x8": f"{_MOE} --mesh 8x8",
    "moe_16x8": f"{_MOE} --mesh 16x8",
    "llama_fsdp64": f"{_LLAMA} {_SHORT} --mode fsdp --mesh 64",
    "llama_fsdp64_long": f"{_LLAMA} {_LONG} --mode fsdp --mesh 64",
    "llama_fsdp64_middle": f"{_LLAMA} {_MIDDLE} --mode fsdp --mesh 64",
    "llama_fsdp256_middle": f"{_LLAMA} {_MIDDLE} --mode fsdp --mesh 256",
    "llama_fsdp8_tp8_middle": f"{_LLAMA} {_MIDDLE} --mode fsdp_tp --mesh 8x8",
    "llama_fsdp256": f"{_LLAMA} {_SHORT} --mode fsdp --mesh 256",
    "llama_fsdp256_long": f"{_LLAMA} {_LONG} --mode fsdp --mesh 256",
    "llama_fsdp8_tp8": f"{_LLAMA} {_SHORT} --mode fsdp_tp --mesh 8x8",
    "llama_fsdp8_tp8_long": f"{_LLAMA} {_LONG_TP} --mode fsdp_tp --mesh 8x8",
    "llama_fsdp32_tp8": f"{_LLAMA} {_SHORT} --mode fsdp_tp --mesh 32x8",
    "llama_fsdp32_tp8_long": f"{_LLAMA} {_LONG_TP} --mode fsdp_tp --mesh 32x8",
    "llama_hsdp8x8": f"{_LLAMA} {_SHORT} --mode hsdp --mesh 8x8",
    "llama_ddp8": f"{_LLAMA} {_SHORT} --mode ddp --mesh 8",
    # torch 2.13 spends minutes of CPU on the one above.
    "llama8l_ddp8": f"{_LLAMA_8L} {_SHORT} --mode ddp --mesh 8",
}
"""Options of ``capture_graph.py`` by name of the file."""


def make_all(directory: Path) -> int:
    """Captures what ``directory`` lacks, one process after the other; the first failure's code."""
    directory.mkdir(parents=True, exist_ok=True)
    tool = Path(__file__).resolve().parent / "capture_graph.py"
    for name, options in RECIPES.items():
        output = directory / f"{name}.json.gz"
        if output.exists():
            continue
        print(f"{name}: {options}", flush=True)
        command = [sys.executable, str(tool), *options.split(), "-o", str(output)]
        done = subprocess.run(command, check=False)
        if done.returncode:
            return done.returncode
    return 0
