"""Bytes of nodes that hold a shard, from what all ranks share.

A parameter that does not divide evenly has shards of other sizes on other ranks, and on some none:

    shard -> cast -> pad -> AG -> ...                    gradient -> RS -> wait -> slice -> ...
    [-- differs by rank --]                                              [- differs by rank -]

A plan that read these sizes could differ between ranks, which hangs the job.  So what a gather is
made from, and what comes out of a gradient's reduction, counts as an even share of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    MEMBER_MARK,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    inputs_of,
    is_joint_copy,
    tensors_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import decision_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    data_inputs,
    only_data,
    passes_through,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Skeleton,
    Traffic,
)


def shared_shard_bytes(skeleton: Skeleton) -> dict[fx.Node, int]:
    """Bytes to count for the nodes whose own may differ between ranks; linear in them.

    Nothing of collectives without metadata, which no rank merges or moves.
    """
    result: dict[fx.Node, int] = {}
    known = [c for c in skeleton.collectives if c.key is not None]
    for collective in known:
        if collective.kind is CollectiveKind.ALL_GATHER and collective.traffic is Traffic.PARAMETER:
            _count_sources(_payloads(collective), result)
    reductions = [c for c in known if c.traffic is Traffic.GRADIENT]
    starts = {reduction.start for reduction in reductions}
    for reduction in reductions:
        for node, count in _outcomes(reduction):
            _count_results(node, count, starts, result)
    return result


def with_shared_costs(
    costs: Mapping[fx.Node, ComputeCost],
    shard_bytes: Mapping[fx.Node, int],
    skeleton: Skeleton,
    model: RuntimeModel,
) -> dict[fx.Node, ComputeCost]:
    """Costs that all ranks share: of nodes with shards, a pass over an even share; none of nodes
    that do no work, or only on ranks with a short shard (:attr:`Skeleton.idle`).

    What a custom estimation says of shards is taken as it is: the user answers for it.
    """
    device = model.device
    rate = device.dram_gb_per_s * device.dram_efficiency * 1e6  # bytes a ms
    idle = skeleton.idle
    result = {node: cost for node, cost in costs.items() if node not in idle}
    if model.custom is None:
        for node, size in shard_bytes.items():
            if node in result:
                result[node] = ComputeCost(2 * size / rate, result[node].launches)
    return result


def _share(collective: Collective) -> int:
    """Elements of an even share of the whole."""
    assert collective.key is not None
    whole = collective.kind is CollectiveKind.ALL_REDUCE
    ranks = 1 if whole else max(collective.key.group_size or 1, 1)
    return collective.size_bytes // ranks // collective.key.dtype.itemsize


def _elements(node: fx.Node) -> int:
    return sum(decision_bytes(t.numel()) for t in tensors_of(node.meta.get("val")))


def _payloads(collective: Collective) -> list[tuple[fx.Node, int]]:
    """What a gather is given, and its elements; payloads of a bucket are even already."""
    payloads = data_inputs(collective.start)
    if len(payloads) > 1 or BUCKET_MARK in collective.start.meta:
        return [(node, _elements(node)) for node in payloads]
    return [(node, _share(collective)) for node in payloads]


def _outcomes(collective: Collective) -> list[tuple[fx.Node, int]]:
    """The results of a reduction, and the elements of each; those of a bucket are even."""
    start = collective.start
    if isinstance(start.meta.get("val"), (list, tuple)):
        return [(item, _elements(item)) for item in start.users]
    if BUCKET_MARK not in start.meta:
        return [(start, _share(collective))]
    found: list[fx.Node] = []
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        if MEMBER_MARK in node.meta:
            found.append(node)
            continue
        fresh = [user for user in node.users if user.op != "output" and user not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return [(node, _elements(node)) for node in found]


def _set(node: fx.Node, count: int, result: dict[fx.Node, int]) -> None:
    """Scalars, such as norms, are what they are."""
    tensors = list(tensors_of(node.meta.get("val")))
    if any(t.dim() for t in tensors):
        result.setdefault(node, max(count * t.dtype.itemsize for t in tensors))


def _count_sources(payloads: list[tuple[fx.Node, int]], result: dict[fx.Node, int]) -> None:
    """What payloads of one collective are made from element by element, up to the graph's inputs.

    What several payloads are made from counts as the most of them says: views that only some ranks
    have would decide whose word is the first.
    """
    most: dict[fx.Node, int] = {}
    pending = sorted(payloads, key=lambda payload: payload[1])  # largest first: few are seen twice
    while pending:
        node, count = pending.pop()
        if most.get(node, -1) >= count:
            continue
        most[node] = count
        if node.op != "call_function" or not _is_by_element(node):
            continue
        inputs = data_inputs(node)
        alone = only_data(node) is not None
        elements = 0 if alone else _elements(node)
        for source in inputs:
            # The parts that are copied into a bucket are even, and scales are no shards.
            same = alone or _elements(source) == elements
            pending.append((source, count if same else _elements(source)))
    for node, count in most.items():
        _set(node, count, result)


def _is_by_element(node: fx.Node) -> bool:
    """Rearranges, casts, communicates, or computes each element from one of each input."""
    if passes_through(node) or is_joint_copy(node):
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _count_results(
    root: fx.Node, count: int, starts: Set[fx.Node], result: dict[fx.Node, int]
) -> None:
    """What is made from a reduced gradient, up to the graph's outputs or the next reduction, and
    what it is combined with there: the optimizer's state."""
    pending, seen = [root], {root}
    _set(root, count, result)
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or user in seen or user in starts:
                continue
            seen.add(user)
            _set(user, count, result)
            pending.append(user)
            for source in inputs_of(user):
                if source not in result and _elements(source) == _elements(user):
                    _count_sources([(source, count)], result)
