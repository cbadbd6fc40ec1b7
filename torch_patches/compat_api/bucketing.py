"""torch's greedy by size, over ours (``passes/topo_span.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import Merger
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import (
    BucketCapError,
    greedy_buckets,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Bucket, Collective
from torch_patches.compat_api._arguments import (
    bucket_form,
    check_bound,
    check_module,
    make_options,
    only,
)
from torch_patches.config import FlagError


def greedy_bucket_collective_by_mb(
    gm: fx.GraphModule,
    bucket_cap_mb_by_bucket_idx: Callable[[int], float],
    filter_node: Callable[[fx.Node], bool],
    node_group_key: Callable[[fx.Node], Any],
    filter_wait_node: Callable[[fx.Node], bool] | None = None,
) -> list[list[fx.Node]]:
    """Groups collectives that may be merged; changes nothing.

    They need not be adjacent.  The flags ``max_topo_span`` and ``primary_fsdp_group_only`` of
    ``torch._inductor.config.aten_distributed_optimizations`` hold here too.

    Args:
        gm: a graph with fake values in ``meta["val"]``.
        bucket_cap_mb_by_bucket_idx: MB (2**20 bytes) that the bucket of this number within its key
            may hold.
        filter_node: which starts to consider.
        node_group_key: starts with equal keys may share a bucket, unless one runs in the forward
            and one in the backward.
        filter_wait_node: which waits to consider; a collective counts if all of its waits do.

    Returns:
        Starts of each bucket of two or more, in graph order.

    Raises:
        FlagError: a flag, or a cap that the function tells, has a wrong type or value.
        TypeError: not a GraphModule, or caps that are no function.
    """
    function = "greedy_bucket_collective_by_mb"
    check_module(gm, function)
    if not callable(bucket_cap_mb_by_bucket_idx):
        raise TypeError(
            f"{function}() takes a function bucket index -> MB, "
            f"not {type(bucket_cap_mb_by_bucket_idx).__name__}"
        )

    def cap_of(index: int) -> float:
        cap = bucket_cap_mb_by_bucket_idx(index)
        check_bound(function, "bucket_cap_mb_by_bucket_idx", cap)
        return cap

    options = make_options(
        function,
        bucketing_mode="topo_span",
        bucket_cap_mb=cap_of,
        bucket_mode=bucket_form(None, function),
    )
    options = replace(options, any_traffic=True)  # the filters say what is to be merged
    skeleton = collect(gm.graph)

    def wanted(c: Collective) -> bool:
        waits = filter_wait_node is None or all(map(filter_wait_node, c.waits))
        return filter_node(c.start) and waits

    candidates, _ = select_candidates(only(skeleton, wanted), options)
    merger = Merger(contract(gm.graph, skeleton))
    buckets: list[Bucket] = []
    try:
        for members in _by_key(candidates, node_group_key):
            alike = [replace(member, key=members[0].key) for member in members]
            buckets += greedy_buckets(alike, merger, options).buckets
    except BucketCapError as error:
        if isinstance(error.__cause__, FlagError):
            raise error.__cause__ from None
        raise
    buckets.sort(key=lambda bucket: bucket.members[0].index)
    return [[member.start for member in bucket.members] for bucket in buckets]


def _by_key(
    candidates: Iterable[Collective], node_group_key: Callable[[fx.Node], Any]
) -> list[list[Collective]]:
    """Those with equal keys, in graph order; as with torch a key need not be hashable."""
    hashed: dict[Any, list[Collective]] = {}
    others: list[tuple[Any, list[Collective]]] = []
    found: list[list[Collective]] = []
    for candidate in candidates:
        key = node_group_key(candidate.start)
        try:
            members = hashed.get(key)
        except TypeError:
            members = next((known for other, known in others if other == key), None)
            if members is None:
                others.append((key, members := []))
                found.append(members)
        else:
            if members is None:
                hashed[key] = members = []
                found.append(members)
        members.append(candidate)
    return found
