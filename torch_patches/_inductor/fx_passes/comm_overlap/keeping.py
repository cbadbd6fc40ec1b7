"""Keeps gathered parameters from forward to backward: what the flag asks for, on the joint graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx
from torch._functorch.partitioners import must_recompute
from torch.utils.checkpoint import CheckpointPolicy

from torch_patches._inductor.fx_passes.comm_overlap.forecast import joint_peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
    warn_not_kept,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import memory_limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.kept_gathers import plan_kept_gathers


@dataclass(frozen=True)
class Kept:
    """Starts of the gathers whose results stay, by name, and the bytes of these."""

    gathers: tuple[str, ...] = ()
    size_bytes: int = 0


def keep_or_leave(graph: fx.Graph, options: Options) -> Kept:
    """Marks what shall stay for the partitioner, where the flag asks for it; no node changes.  A graph
    that cannot be handled stays, with one warning."""
    if not options.keeps:
        return Kept()
    try:
        return _keep(graph, options)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        warn_not_kept(f"{type(error).__name__}: {error}")
        return Kept()


def _keep(graph: fx.Graph, options: Options) -> Kept:
    repeated = frozenset(node for node in graph.nodes if must_recompute(node))
    if not repeated:
        return Kept()
    skeleton = collect(graph)
    peak = joint_peak_bytes(graph, skeleton, repeated)
    allowed = memory_limits(options, peak).peak_bytes - peak
    kept = plan_kept_gathers(skeleton, repeated, allowed)
    for gather in kept:
        # Views of it may be repeated: they cost nothing, and the partitioner would save one of them.
        for wait in gather.waits:
            wait.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return Kept(tuple(c.start.name for c in kept), sum(c.size_bytes for c in kept))
