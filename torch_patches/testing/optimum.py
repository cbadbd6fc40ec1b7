"""The best that there is, by trying everything: a second oracle for schedules and for buckets.

    best_order(gm, options)       least simulated time over all orders of a small graph
    best_partition(gm, options)   least simulated time over all legal partitions into buckets

What "auto" makes of the same graph stands beside it: :class:`Comparison`.  Times are the simulated
ones on which the planner decides, so a gap is one of the search and not of the estimates.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import changing
from torch_patches._inductor.fx_passes.comm_overlap.check import check_plan
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel, make_model
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import simulate
from torch_patches._inductor.fx_passes.comm_overlap.forecast import (
    Forecast,
    combined_live,
    forecast,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import memory_limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import (
    choose_form,
    make_bucket,
    merge_key,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.candidates import select_candidates
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track, read_track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import schedule_way, total_ms
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Bucket,
    CloseReason,
    Collective,
    Plan,
)
from torch_patches._inductor.fx_passes.comm_overlap.portable_plan import encode
from torch_patches.testing.graph_builder import GraphBuilder

aten = torch.ops.aten

#: Nodes that a simulated run may see, orders of them that are tried at most, and partitions: as many
#: as 8 collectives have.
MAX_EVENTS, MAX_ORDERS, MAX_PARTITIONS = 10, 20_000, 4_140
#: The best partitions by the schedule's own account that are made and forecast.
_APPLIED = 5
#: Without bounds of memory and prefetch, which trying everything does not look at.
FREE = Options("auto", None, max_memory_increase_ratio=1e3, max_compute_pre_fetch=1_000_000, bucket_mode="coalesced")  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One graph.

    Args:
        input_ms, ours_ms, best_ms: of the graph as it is, as "auto" makes it, and at best.
        kept_ms: at best where compute keeps its order; only of schedules.
        tried: orders or partitions.
    """

    input_ms: float
    ours_ms: float
    best_ms: float
    tried: int
    kept_ms: float | None = None

    @property
    def gap(self) -> float:
        """Share by which ours takes longer than the best."""
        return self.ours_ms / self.best_ms - 1

    @property
    def kept_gap(self) -> float:
        """The same beside the best that keeps the order of compute."""
        return self.gap if self.kept_ms is None else self.ours_ms / self.kept_ms - 1

    @property
    def reached(self) -> float:
        """Share of what there was to gain that ours gains; 1 where there was nothing."""
        possible = self.input_ms - self.best_ms
        return 1.0 if possible <= 1e-9 else (self.input_ms - self.ours_ms) / possible


def model_of(options: Options) -> RuntimeModel:
    """The estimates that the pipeline uses with these options."""
    return make_model(
        options.estimate_device,
        options.gpus_per_node,
        options.custom_runtime_estimation,
        options.calibration,
        options.compute_slowdown,
        options.link_sharing,
    )


def ours(gm: fx.GraphModule, options: Options) -> tuple[float, float]:
    """Simulated ms of the graph as it is, and of what the pipeline makes of a copy."""
    changed = changing.change_graph(copy.deepcopy(gm).graph, options, True)
    assert changed is not None
    assert changed.report is not None
    return changed.report.total_ms_before, changed.report.total_ms_after


# ---------------------------------------------------------------- schedules


def best_order(gm: fx.GraphModule, options: Options) -> Comparison | None:
    """Against all orders that data and side effects allow; None where these are too many.

    Nothing is merged, by "auto" neither.
    """
    options = replace(options, bucket_cap_mb=0.0)
    before = forecast(gm.graph, collect(gm.graph), model_of(options))
    events = _events(before)
    if len(events) > MAX_EVENTS or not collect(gm.graph).collectives:
        return None
    best = kept = float("inf")
    tried = 0
    compute = [node for node in events if node in before.costs]
    for order in _orders(events, _precedence(before, events)):
        tried += 1
        if tried > MAX_ORDERS:
            return None
        ms = simulate(order, before.skeleton, before.model, before.costs, before.launches).total_ms
        best = min(best, ms)
        if ms < kept and [node for node in order if node in before.costs] == compute:
            kept = ms
    was, now = ours(gm, options)
    return Comparison(was, now, best, tried, kept)


def _events(before: Forecast) -> list[fx.Node]:
    """What a simulated run sees, in graph order."""
    launches = before.launches
    return [
        n for n in before.order if n in launches.starts or n in launches.waits or n in before.costs
    ]


def _precedence(before: Forecast, events: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Event -> events that come first, through nodes that do no work."""
    wanted = set(events)
    extra: dict[fx.Node, list[fx.Node]] = {}
    for first, second in before.skeleton.order_dependencies:
        extra.setdefault(second, []).append(first)
    reached: dict[fx.Node, set[fx.Node]] = {}
    for node in before.order:
        found: set[fx.Node] = set()
        for source in [*node.all_input_nodes, *extra.get(node, ())]:
            found |= {source} if source in wanted else reached[source]
        reached[node] = found
    return {node: reached[node] for node in events}


def _orders(
    events: Sequence[fx.Node], before: dict[fx.Node, set[fx.Node]]
) -> Iterator[list[fx.Node]]:
    """All topological orders, depth first."""
    placed: list[fx.Node] = []
    done: set[fx.Node] = set()

    def extend() -> Iterator[list[fx.Node]]:
        if len(placed) == len(events):
            yield placed
            return
        for node in events:
            if node not in done and before[node] <= done:
                placed.append(node)
                done.add(node)
                yield from extend()
                placed.pop()
                done.discard(node)

    return extend()


# ---------------------------------------------------------------- buckets


def best_partition(gm: fx.GraphModule, options: Options) -> Comparison | None:
    """Against all legal partitions of what may be merged, each with the schedule that ours gets; None
    where there are too many, or nothing to merge."""
    graph = gm.graph
    skeleton = collect(graph)
    before = forecast(graph, skeleton, model_of(options))
    candidates, _ = select_candidates(skeleton, options)
    partitions = list(itertools.islice(_partitions(candidates, options), MAX_PARTITIONS + 1))
    if not 1 < len(partitions) <= MAX_PARTITIONS:
        return None
    track = _track(before, options)
    limits = memory_limits(options, before.peak_bytes)
    found: list[tuple[float, int, Plan]] = []
    for number, buckets in enumerate(partitions):
        plan = check_plan(skeleton, contract(graph, skeleton), Plan(buckets))
        if len(plan.buckets) == len(buckets) and _has_places(track, buckets):
            way = schedule_way("tried", plan, track, limits)
            found.append((total_ms(way), number, way.plan))
    found.sort(key=lambda one: one[:2])
    was, now = ours(gm, options)
    made = [_applied_ms(gm, plan, before, options) for _, _, plan in found[:_APPLIED]]
    return Comparison(was, now, min([*made, now]), len(found))


def _track(before: Forecast, options: Options) -> Track:
    caps = (
        memory_limits(options, peak).peak_bytes
        for peak in (before.peak_bytes, before.held_peak_bytes)
    )
    live = combined_live(before, *caps)
    return read_track(before.order, before.skeleton, before.model, before.costs, live)


def _has_places(track: Track, buckets: Sequence[Bucket]) -> bool:
    """Gathers of a bucket have a place between the inputs of all and the first use of one; and either
    all of its members can be moved, or none."""
    for bucket in buckets:
        gathers = [track.gathers.get(m.index) for m in bucket.members]
        known = [g for g in gathers if g is not None]
        if known and len(known) < len(gathers):
            return False
        if known and max(g.earliest for g in known) > min(g.latest for g in known):
            return False
    return True


def _applied_ms(gm: fx.GraphModule, plan: Plan, before: Forecast, options: Options) -> float:
    """Of the graph that the plan really makes."""
    made = changing.change_graph(copy.deepcopy(gm).graph, options, True, encode(plan, before.order))
    assert made is not None
    assert made.report is not None
    return made.report.total_ms_after


def _partitions(candidates: Sequence[Collective], options: Options) -> Iterator[tuple[Bucket, ...]]:
    """Every way to divide each key's collectives; parts of one are no buckets."""
    by_key: dict[object, list[Collective]] = {}
    for candidate in candidates:
        by_key.setdefault(merge_key(candidate), []).append(candidate)
    for chosen in itertools.product(*(list(_divisions(c)) for c in by_key.values())):
        yield tuple(
            make_bucket(part, choose_form(options, key), CloseReason.END)
            for division in chosen
            for part in division
            if len(part) > 1 and (key := part[0].key) is not None
        )


def _divisions(items: Sequence[Collective]) -> Iterator[list[list[Collective]]]:
    """All set partitions: 1, 2, 5, 15, 52, 203, 877, 4140, ... of 1, 2, 3, ... items."""
    if not items:
        yield []
        return
    for rest in _divisions(items[1:]):
        yield [[items[0]], *rest]
        for place, part in enumerate(rest):
            yield [*rest[:place], [items[0], *part], *rest[place + 1 :]]


# ---------------------------------------------------------------- graphs


def small_model(r: Random, layers: int, gradients: int) -> fx.GraphModule:
    """Products with gathered weights, then products whose results are scattered.

    Sizes from 1 to 500 MB and products from 0.01 to 10 ms on an H100; gathers and scatters stand
    next to their use, as captures have them.  Now and then an all-reduce on the way, on a second
    group.
    """
    b = GraphBuilder()
    rows = r.choice([512, 1024, 2048, 4096, 8192])
    widths = [r.choice([1024, 2048, 4096, 8192, 16384]) for _ in range(layers + 1)]
    x = b.placeholder(rows, widths[0], dtype=torch.bfloat16)
    shards = [
        b.placeholder(widths[i] // 8, widths[i + 1], dtype=torch.bfloat16) for i in range(layers)
    ]
    inputs, outputs = [x], []
    for shard in shards:
        weight = b.gather_and_wait(shard, 8, "fsdp")
        x = b.call(aten.mm, x, weight)
        if r.random() < 0.15:
            x = b.reduce_and_wait(x, "sum", "tp")
        inputs.append(x)
    for _ in range(gradients):
        i = r.randrange(layers)
        upstream = b.placeholder(rows, widths[i + 1], dtype=torch.bfloat16)
        grad = b.call(aten.mm, b.call(aten.permute, inputs[i], [1, 0]), upstream)
        outputs.append(b.scatter_and_wait(grad, "avg", 8, "fsdp"))
    return b.output(x, *outputs)
