"""What the estimates expect of a graph: ``forecast(graph, skeleton, model) -> Forecast``.

Sizes and costs are those that all ranks share, so that what is decided by a forecast is the same on
all of them.  Memory is estimated twice: inputs that are no parameters may die after their last use,
as the saved activations of a compiled backward do, or be held by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import (
    LiveBytes,
    live_bytes_each,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.shards import (
    shared_shard_bytes,
    with_shared_costs,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import (
    Launches,
    Timeline,
    launches_of,
    simulate,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import PART_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    ResultBytes,
    is_cast,
    is_joint_copy,
    op_name,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton


@dataclass(frozen=True, eq=False)
class Forecast:
    """One order of one graph, estimated.

    Args:
        order: the graph's nodes.
        skeleton, model, costs, live: what it was made from; inputs die in ``live``.
        held: live bytes with all inputs held by the caller.
        timeline: the simulated run.
        sizes: bytes of results, for the next forecast.
        launches: of its collectives, with their times; a rewrite leaves nothing of the nodes that a
            user's estimation could be asked about again.
    """

    order: tuple[fx.Node, ...]
    skeleton: Skeleton
    model: RuntimeModel
    costs: Mapping[fx.Node, ComputeCost]
    live: LiveBytes
    held: LiveBytes
    timeline: Timeline
    sizes: ResultBytes
    launches: Launches

    @property
    def peak_bytes(self) -> int:
        """Most live bytes at a node, where inputs die."""
        return max(self.live.inputs, *self.live.at_node)

    @property
    def held_peak_bytes(self) -> int:
        """The same where the caller holds them."""
        return max(self.held.inputs, *self.held.at_node)


def forecast(
    graph: fx.Graph,
    skeleton: Skeleton,
    model: RuntimeModel,
    *,
    eager: bool = False,
    sizes: ResultBytes | None = None,
) -> Forecast:
    """Estimates the graph as it stands; near-linear.

    Args:
        model: the one of the result knows the graph's kernels too (:meth:`RuntimeModel.beside`);
            give that one for what the graph is changed to.
        eager: memory as PyTorch needs it op by op, see ``memory.peak_bytes``.
        sizes: of a forecast of the same graph, from which only plans were applied to it.
    """
    sizes = ResultBytes() if sizes is None else sizes
    # What a bucket is made of is the same on all ranks: it does work, and has the size it has.
    buckets = {n for n in graph.nodes if _is_bucket(n.meta)}
    working = replace(skeleton, idle=skeleton.idle - buckets)
    found = shared_shard_bytes(skeleton)
    shards = {node: size for node, size in found.items() if node not in buckets}
    costs = with_shared_costs(model.node_costs(graph, working, sizes), shards, working, model)
    model = model.beside(costs)
    parameters = frozenset(node for node in shards if node.op == "placeholder")
    # Pads and cuts of shards, which ranks with a short shard have and others have not; pads also of
    # what is gathered and no parameter.
    passed_on = {n for n in working.idle if n in shards or _is_pad(n)}
    passed_on |= _computed_in_buckets(buckets)
    held, live = live_bytes_each(
        graph, parameters, sizes=shards, eager=eager, idle=passed_on, own_sizes=sizes
    )
    order = tuple(graph.nodes)
    launches = launches_of(skeleton, model)
    timeline = simulate(order, skeleton, model, costs, launches)
    return Forecast(order, skeleton, model, costs, live, held, timeline, sizes, launches)


def joint_peak_bytes(graph: fx.Graph, skeleton: Skeleton, repeated: Set[fx.Node]) -> int:
    """Peak of a joint graph, run forward and backward, without what ``repeated`` nodes make: that is
    freed in between.  From sizes that all ranks share."""
    sizes = {**shared_shard_bytes(skeleton), **dict.fromkeys(repeated, 0)}
    parameters = frozenset(node for node in sizes if node.op == "placeholder")
    held, _ = live_bytes_each(graph, parameters, sizes=sizes, idle=skeleton.idle & sizes.keys())
    return max(held.inputs, *held.at_node)


def _is_bucket(meta: Mapping[str, object]) -> bool:
    return PART_MARK in meta or BUCKET_MARK in meta


def _computed_in_buckets(parts: Iterable[fx.Node]) -> set[fx.Node]:
    """Casts and pads that have no storage of their own: Inductor computes them where they are read."""
    found: set[fx.Node] = set()
    pending = [n for part in parts if is_joint_copy(part) for n in part.all_input_nodes]
    while pending:
        node = pending.pop()
        found.add(node)
        if not is_cast(node):
            pending.extend(node.all_input_nodes)
    return found


def _is_pad(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target) == "constant_pad_nd"


def combined_live(forecast: Forecast, limit_bytes: int, held_limit_bytes: int) -> LiveBytes:
    """Live bytes to be kept under ``limit_bytes``, whatever becomes of the inputs.

    Args:
        held_limit_bytes: limit where the caller holds the inputs.
    """
    shift = limit_bytes - held_limit_bytes
    live, held = forecast.live, forecast.held
    return LiveBytes(
        max(live.inputs, held.inputs + shift),
        tuple(max(a, b + shift) for a, b in zip(live.at_node, held.at_node, strict=True)),
        tuple(max(a, b + shift) for a, b in zip(live.after, held.after, strict=True)),
    )
