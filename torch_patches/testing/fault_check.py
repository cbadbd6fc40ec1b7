"""What must hold wherever a pass fails, and graphs to see it on: see :func:`outcome_of_fault`.

case = CASES["auto"]
for place in case.places():
    outcome_of_fault(case, place, 1, KeyError("boom"))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import module_names, notices
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable
from torch_patches._inductor.fx_passes.comm_overlap.notices import RANK_LOCAL_ERRORS
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import run_post_grad
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.faults import FaultPlace, description, failing, places_of, wiring
from torch_patches.testing.module_graphs import ModuleGraph

LOGGER = "torch_patches"


def _costs(node: fx.Node, size_bytes: int | None) -> float | None:
    """ms; calls nothing of the package, since a fault in an estimation is its user's."""
    if "c10d" in str(node.target):
        return 4.0
    return 10.0 if node.target is torch.ops.aten.mm.default else None


_GROUPS = GroupTable(
    rank=0,
    groups=(("dp", (0, 1), "nccl"), ("ep", (0, 2), "nccl"), ("world", (0, 2, 1, 3), "nccl")),
)
_COSTS: dict[str, Any] = {
    "custom_runtime_estimation": _costs,
    "estimation_digest": "costs of fault_check",
    "max_memory_increase_gb": 1.0,
    "insert_overlap_deps": True,
}


def training_step() -> fx.GraphModule:
    """Three layers with a weight each; the last one's is gathered over two groups in a row."""
    b = ModuleGraph()
    saved = h = b.placeholder(4, 4)
    gradients = []
    for number in range(3):
        with b.inside(f"layers.{number}"):
            shard = b.shard() if number < 2 else b.placeholder(1, 4)
            gathered = b.gather_and_wait(shard, 2, "dp" if number < 2 else "ep")
            if number == 2:
                gathered = b.gather_and_wait(gathered, 2, "dp")
            h = b.call(torch.ops.aten.mm, h, gathered)
            gradients.append(b.gradient(saved, h))
    return b.output(h, *gradients)


@dataclass(frozen=True)
class FaultCase:
    """Options under which :func:`training_step` is changed, as a graph for GPUs."""

    options: Options

    def run(self, options: Options | None = None) -> fx.GraphModule:
        """What the passes make of it."""
        gm = training_step()
        with as_on_gpu():
            run_post_grad(gm.graph, options or self.options)
        return gm

    def places(self) -> list[FaultPlace]:
        """Where something may fail."""
        self.run()  # so that what is done once a process is done
        return places_of(self.run)

    @cached_property
    def results(self) -> list[list[tuple[Any, ...]]]:
        """What may come out: the graph changed, and, where fusing chains is what fails, without that."""
        without = replace(
            self.options, fuse_chained_all_gathers=False, fuse_chained_reduce_scatters=False
        )
        return [wiring(self.run(options)) for options in (self.options, without)]


CASES = {
    "topo_span": FaultCase(Options("topo_span")),
    "copied": FaultCase(
        Options("topo_span", bucket_mode="default", enable_overlap_scheduling=True, **_COSTS)
    ),
    "auto": FaultCase(Options("auto", **_COSTS)),
    "transformer_block": FaultCase(Options("transformer_block", **_COSTS)),
    "fused": FaultCase(
        Options(
            "topo_span",
            fuse_chained_all_gathers=True,
            fuse_chained_reduce_scatters=True,
            groups=_GROUPS,
        )
    ),
}


class FaultError(AssertionError):
    """A fault did harm; the text names the place and what happened."""


def outcome_of_fault(case: FaultCase, place: FaultPlace, call: int, error: Exception) -> str:
    """Lets one call fail while a graph is changed.

    Returns:
        "untouched": the graph is as it was, node for node; one warning says so.
        "complete": the graph is changed, as on the other ranks; what failed only tells people about
        it, or can be done without (tags, fusing chains).
        "raised": the error is local to this rank and came out; the graph is as it was.

    Raises:
        FaultError: none of these.
    """
    expected = case.results
    gm = training_step()
    before = description(gm)
    raised: Exception | None = None
    with warnings_of_passes() as warned, as_on_gpu(), failing(place, call, error):
        try:
            run_post_grad(gm.graph, case.options)
        except Exception as escaped:
            raised = escaped
    gm.recompile()
    is_untouched = description(gm) == before
    where = f"{place.name}, call {call} of {place.calls}, {type(error).__name__}"
    about = [text for text in warned if str(error) in text or "could not" in text]
    if raised is not None:
        if raised is error and is_untouched and isinstance(error, RANK_LOCAL_ERRORS):
            return "raised"
        state = "untouched" if is_untouched else "half changed"
        raise FaultError(f"{where}: raised {raised!r}, the graph is {state}")
    if is_untouched and len(about) == 1:
        return "untouched"
    if wiring(gm) in expected and len(about) <= 1:
        return "complete"
    state = "untouched" if is_untouched else "half changed"
    raise FaultError(f"{where}: the graph is {state}, warnings {about}")


@contextmanager
def warnings_of_passes() -> Iterator[list[str]]:
    """What users are told meanwhile, also what they were told before."""
    for module in (notices, module_names):
        for function in vars(module).values():
            getattr(function, "cache_clear", lambda: None)()
    texts: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, logger = Collector(logging.WARNING), logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
