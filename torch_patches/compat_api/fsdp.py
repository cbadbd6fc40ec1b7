"""torch's bucketing of FSDP's collectives in front of a schedule, over our greedy."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch.fx as fx
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat, config
from torch_patches._inductor.fx_passes.comm_overlap.check import check_fences, check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import (
    MIB,
    saturation_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_topo_span
from torch_patches.compat_api._arguments import (
    bucket_form,
    check_module,
    gathering_groups,
    make_options,
    run_or_leave,
    without_gloo,
)

log = logging.getLogger(__name__)

_FUNCTION = "pre_bucket_fsdp_collectives"
_FLAG = config.PREFIX + "pre_bucketing_fsdp_collectives_"


def identify_fsdp_groups(gm: fx.GraphModule) -> tuple[OrderedSet[str], int | None]:
    """Process groups that gather parameters.

    Tags of the joint graph tell which gathers those are; without tags, structure: a gather of one
    input through casts, views, pads and slices.

    Returns:
        Their names in the order of their first gathers, and the size of the first; None if there is
        no such group, or its size is not known.
    """
    check_module(gm, "identify_fsdp_groups")
    groups = gathering_groups(collect(gm.graph).collectives)
    return OrderedSet(groups), next(iter(groups.values()), None)


def pre_bucket_fsdp_collectives(
    gm: fx.GraphModule, mode: str | None = None, bucket_cap_mb: float | None = None
) -> None:
    """Merges parameter gathers, and reductions of gradients, on the groups that gather parameters.

    In place; the module is recompiled.  A graph that cannot be handled stays as it is, with one
    warning.

    Args:
        mode: "default" or "custom_ops" (copying), "coalesced" (zero-copy); None: the flag
            ``bucket_mode``, or copying.
        bucket_cap_mb: MB (2**20 bytes) a bucket may hold.  None: what saturates the group's network,
            times torch's flag ``pre_bucketing_fsdp_collectives_saturation_calibration_multiplier``,
            between its flags ``..._min_bucket_cap_mb`` and ``..._max_bucket_cap_mb``.

    Raises:
        FlagError: an argument or a flag has a wrong type or value.
        TypeError: not a GraphModule.
    """
    check_module(gm, _FUNCTION)
    options = pre_bucketing_options(bucket_form(mode, _FUNCTION), bucket_cap_mb)
    run_or_leave(gm.graph, lambda: merge_parameter_traffic(gm.graph, options))
    gm.recompile()


def pre_bucketing_options(form: str | None, bucket_cap_mb: float | None) -> Options:
    """Options of :func:`merge_parameter_traffic`.

    Args:
        form: of the buckets; None for the one that is estimated to be better.

    Raises:
        FlagError: the cap or a flag has a wrong type or value.
    """
    if isinstance(bucket_cap_mb, (list, tuple)) or callable(bucket_cap_mb):
        raise config.FlagError(
            f"{_FUNCTION}(bucket_cap_mb=...): {bucket_cap_mb!r} is not allowed; use a finite number "
            "> 0, or None"
        )
    return make_options(
        _FUNCTION, bucketing_mode="topo_span", bucket_cap_mb=bucket_cap_mb, bucket_mode=form
    )


def merge_parameter_traffic(graph: fx.Graph, options: Options) -> None:
    """The merges of :func:`pre_bucket_fsdp_collectives`; the caller restores the graph if it raises."""
    skeleton = without_gloo(collect(graph))
    groups = gathering_groups(skeleton.collectives)
    if not groups:
        return
    cap = options.bucket_cap_mb
    if not isinstance(cap, float):
        cap = _default_cap_mb(next(iter(groups.values())))
    # A cap by bucket: no small first bucket of all-reduces.
    options = replace(options, only_groups=tuple(groups), bucket_cap_mb=(cap,))
    plan = plan_topo_span(skeleton, contract(graph, skeleton), options)
    plan = check_plan(skeleton, contract(graph, skeleton), plan)
    if plan.buckets:
        apply_plan(graph, skeleton, plan)
        graph.lint()
        check_fences(skeleton, collect(graph), plan)
    merged = sum(len(bucket.members) for bucket in plan.buckets)
    log.info("pre-bucketing: %d buckets of %d collectives", len(plan.buckets), merged)


def _default_cap_mb(group_size: int | None) -> float:
    factor, least, most = (
        config.current_value(_FLAG + name) if _compat.has_config(_FLAG + name) else default
        for name, default in (
            ("saturation_calibration_multiplier", 1.0),
            ("min_bucket_cap_mb", 10.0),
            ("max_bucket_cap_mb", 500.0),
        )
    )
    wanted = factor * saturation_bytes(group_size) / MIB
    return float(max(least, min(most, wanted)))
