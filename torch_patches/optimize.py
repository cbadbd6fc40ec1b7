"""``torch_patches.optimize_graph``: the pipeline on one GraphModule, without a compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch.fx as fx

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.plan import BucketCap
from torch_patches._inductor.fx_passes.comm_overlap.report import Report


class _FromFlag:
    """Default of an argument: the value of the flag with the same name."""

    def __repr__(self) -> str:
        return "<the flag's value>"


FROM_FLAG: Final[Any] = _FromFlag()

#: Calling ``optimize_graph`` is the opt-in, so "none" becomes this.
DEFAULT_MODE = "topo_span"


def optimize_graph(
    gm: fx.GraphModule,
    *,
    bucketing_mode: str = FROM_FLAG,
    bucket_cap_mb: BucketCap | list[float] = FROM_FLAG,
    max_topo_span: int | None = FROM_FLAG,
    primary_fsdp_group_only: bool = FROM_FLAG,
    bucket_mode: str | None = FROM_FLAG,
) -> Report:
    """Merges the collectives of ``gm`` in place and recompiles it.

    Args:
        gm: an ATen graph (forward, backward or inference) with fake values in ``meta["val"]``.
        bucketing_mode: "topo_span"; "none" means the same, since the call is the opt-in.
        bucket_cap_mb: MB (2**20 bytes) a bucket may hold; a list is by bucket index, the last value
            repeating; a function maps the bucket index to MB; None takes the largest single
            collective of the same kind, group and dtype (at most 500 MB), or what saturates the
            group's network, whichever is larger, and 25 MB for DDP's all-reduces.
        max_topo_span: largest distance, in working nodes, between a bucket's first and last
            member; None for no bound.
        primary_fsdp_group_only: leave out the collectives of minority FSDP groups.
        bucket_mode: "default" (copies), "coalesced" (no copies), None (chosen by the pass).

    Each argument left out takes the value of the flag
    ``torch._inductor.config.aten_distributed_optimizations.<name>``.

    Returns:
        What was done.  Where a graph cannot be handled it is left as it was, ``report.failure``
        says why, and one warning is logged.

    Raises:
        FlagError: an argument (or the flag it defaults to) has a wrong type or value.
        OSError, MemoryError, RecursionError: causes local to this rank.
    """
    given = {
        "bucketing_mode": bucketing_mode,
        "bucket_cap_mb": bucket_cap_mb,
        "max_topo_span": max_topo_span,
        "primary_fsdp_group_only": primary_fsdp_group_only,
        "bucket_mode": bucket_mode,
    }
    arguments = {name: value for name, value in given.items() if value is not FROM_FLAG}
    options = config.options_from_arguments(arguments, "optimize_graph")
    if options.bucketing_mode == "none":
        options = replace(options, bucketing_mode=DEFAULT_MODE)
    return pipeline.optimize_graph(gm, options)
