"""torch's ``OverlapPreservingBucketer`` over ``passes/overlap_bucketer.py``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch.fx as fx
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.overlap_scheduling import CollectiveInfo
from torch.utils._ordered_set import OrderedSet

from torch_patches._inductor.fx_passes.comm_overlap.check import check_fences, check_plan
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    collect,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    Overlap,
    insert_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import relink
from torch_patches._inductor.fx_passes.comm_overlap.graph.rewrite import apply_plan
from torch_patches._inductor.fx_passes.comm_overlap.passes.overlap_bucketer import (
    plan_preserving_overlap,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    HidingInterval,
    Plan,
    Skeleton,
)
from torch_patches.compat_api._arguments import (
    bucket_form,
    check_bound,
    gathering_groups,
    make_options,
    only,
    run_or_leave,
    without_gloo,
)

log = logging.getLogger(__name__)

_MB_PER_GB = 1024.0


class OverlapPreservingBucketer:
    """Merges collectives without taking away the compute that hides them.

    Attributes:
        graph: the graph that is changed.
        collective_info: as given.
        bucket_mode: "default" or "coalesced".
    """

    def __init__(
        self,
        graph: fx.Graph,
        collective_info: dict[fx.Node, CollectiveInfo],
        scheduled: OrderedSet[fx.Node],
        max_bucket_memory_gb: float = 1.0,
        max_coll_distance: int = 1000,
        insert_overlap_deps: bool = False,
        collective_bucketing: bool = True,
        bucket_mode: str | None = None,
        bucket_exposed_first: bool | None = None,
        bucket_only_internode_comms: bool = False,
    ) -> None:
        """
        Args:
            graph: owned by a GraphModule, which the caller recompiles.
            collective_info: by start; ``hiding_nodes`` tell what hides it.  Other collectives stay
                as they are.  Only they and the starts are read.
            scheduled: the order to put the graph in first; what it leaves out comes behind.
            max_bucket_memory_gb: GB (2**30 bytes) that a bucket may hold.
            max_coll_distance: places that a bucket's members stand apart at most, counted in
                collectives of their key.
            insert_overlap_deps: hold the overlaps by control dependencies, for Inductor.
            collective_bucketing: merge; else only the order is made and held.
            bucket_mode: "default" or "custom_ops" (copying), "coalesced" (zero-copy); None: the flag of
                that name, or copying.
            bucket_exposed_first: take collectives without hiding compute first, of those up to half
                a ``max_topo_span`` apart; None and False: graph order.
            bucket_only_internode_comms: merge only on groups that gather parameters.

        Raises:
            FlagError: an argument has a wrong type or value.
            ValueError: ``scheduled`` has nodes of another graph.
        """
        function = "OverlapPreservingBucketer"
        self.graph = graph
        self.collective_info = collective_info
        self.scheduled = scheduled
        self.insert_overlap_deps = insert_overlap_deps
        self.collective_bucketing = collective_bucketing
        self.bucket_only_internode_comms = bucket_only_internode_comms
        self.bucket_mode = bucket_form(bucket_mode, function)
        check_bound(function, "max_bucket_memory_gb", max_bucket_memory_gb)
        check_bound(function, "max_coll_distance", max_coll_distance, whole=True)
        options = make_options(
            function,
            bucketing_mode="topo_span",
            bucket_cap_mb=[max_bucket_memory_gb * _MB_PER_GB],
            bucket_mode=self.bucket_mode,
        )
        self._options = replace(
            options,
            any_traffic=True,
            max_coll_distance=max_coll_distance,
            bucket_exposed_first=bool(bucket_exposed_first),
        )
        strangers = [node for node in scheduled if node.graph is not graph]
        if strangers:
            raise ValueError(f"scheduled: {strangers[0]} is not a node of the graph")

    def bucket_collectives(self) -> None:
        """Orders, merges, and holds the order, in place.

        Buckets count in ``counters["inductor"]["collective_buckets"]``.  A graph that cannot be
        handled stays as it was, with one warning.
        """
        merged = run_or_leave(self.graph, self.change)
        counters["inductor"]["collective_buckets"] += merged or 0

    def change(self) -> int:
        """The same without counting: buckets made; the caller restores the graph if it raises."""
        order = dict.fromkeys((*self.scheduled, *self.graph.nodes))
        relink(self.graph, list(order))
        self.graph.lint()
        skeleton = without_gloo(only(collect(self.graph), self._is_told))
        hiding = [
            self._interval(c) for c in skeleton.collectives if c.start in self.collective_info
        ]
        hiding = [interval for interval in hiding if interval.nodes and interval.collective.waits]
        also = {node for interval in hiding for node in interval.nodes}
        options = self._options
        if self.bucket_only_internode_comms:
            groups = gathering_groups(skeleton.collectives)
            options = replace(options, only_groups=tuple(groups))
        plan = Plan()
        if self.collective_bucketing:
            contracted = contract(self.graph, skeleton, also)
            plan = plan_preserving_overlap(skeleton, contracted, options, hiding)
            plan = check_plan(skeleton, contract(self.graph, skeleton, also), plan)
        overlaps = apply_keeping(self.graph, skeleton, plan, hiding)
        if self.insert_overlap_deps:
            insert_overlap_dependencies(self.graph, overlaps)
        return len(plan.buckets)

    def _is_told(self, collective: Collective) -> bool:
        return collective.start in self.collective_info

    def _interval(self, collective: Collective) -> HidingInterval:
        info = self.collective_info[collective.start]
        return HidingInterval(collective, tuple(info.hiding_nodes))


def apply_keeping(
    graph: fx.Graph, skeleton: Skeleton, plan: Plan, hiding: list[HidingInterval]
) -> list[Overlap]:
    """Applies a plan; what hides what in the result."""
    known = set(graph.nodes)
    if plan.buckets:
        apply_plan(graph, skeleton, plan)
        graph.lint()
    after = collect(graph)
    check_fences(skeleton, after, plan)
    now = {c.start: c for c in after.collectives}
    merged = {c.start.meta[BUCKET_MARK]["bucket"]: c for c in now.values() if c.start not in known}
    bucket_of = {m.index: place for place, b in enumerate(plan.buckets) for m in b.members}
    return [
        overlap
        for interval in hiding
        if (overlap := _overlap_now(interval, now, merged, bucket_of)) is not None
    ]


def _overlap_now(
    interval: HidingInterval,
    now: Mapping[fx.Node, Collective],
    merged: Mapping[int, Collective],
    bucket_of: Mapping[int, int],
) -> Overlap | None:
    """None where its compute was merged itself (a collective that hides another)."""
    bucket = bucket_of.get(interval.collective.index)
    collective = now[interval.collective.start] if bucket is None else merged[bucket]
    compute = tuple(node for node in interval.nodes if not node._erased)
    return Overlap(collective.start, compute, collective.waits) if compute else None
