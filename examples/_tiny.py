"""What the examples share, and a user has already: a model, data, a training loop, a counter.

Nothing here is about torch_patches.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, BLOCKS, TOKENS, STEPS = 64, 32, 3, 16, 3
LEARNING_RATE = 0.1
ROUNDING = 1e-5
_LAUNCH = re.compile(r"c10d::_?(allgather|reduce_scatter|allreduce)")


class Block(nn.Module):
    """A residual MLP: three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Twelve parameters; a seed makes the same ones on every rank.  Calling it gives the loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)), targets)


@dataclass
class Run:
    """Losses of this rank, one a step, and the collective calls of the last step by kind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)


def train(model: nn.Module, compiled: Callable[..., torch.Tensor]) -> Run:
    """Trains ``model``, called through ``compiled``, on this rank's own data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    run = Run()
    for step in range(STEPS):
        tokens, targets = torch.randint(VOCABULARY, (2, TOKENS), generator=generator)
        last = step == STEPS - 1  # all that compiles has compiled
        with _counted(run.forward, last):
            loss = compiled(tokens, targets)
        with _counted(run.backward, last):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())
    return run


def show(runs: Mapping[str, Run]) -> None:
    """Prints the launches of each run; exits with 1 where losses are not those of the first.

    On two ranks a sum has one order, so that no bit differs; on more, merging may round otherwise.
    """
    losses = torch.stack([torch.stack(run.losses) for run in runs.values()])
    worst = (losses - losses[0]).abs().max().nan_to_num(nan=torch.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        for name, run in runs.items():
            print(f"{name:<31} forward: {_text(run.forward):<14} backward: {_text(run.backward)}")
        verdict = "equal in every bit" if worst == 0 else f"differ by up to {worst:.1e}"
        print(f"losses {' '.join(f'{loss:.4f}' for loss in losses[0].tolist())}: {verdict}")
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group()
    sys.exit(0 if worst <= ROUNDING else 1)


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "none"


@contextmanager
def _counted(counts: Counter[str], wanted: bool) -> Iterator[None]:
    """Adds what the profiler sees of the process group while the block runs."""
    if not wanted:
        yield
        return
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # the profiler's library writes there when it starts and stops
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
    for event in profile.key_averages():
        if match := _LAUNCH.match(event.key):
            counts[match[1]] += event.count
