"""An order of compute in which other collectives start earlier: tensor parallelism's, mostly.

A schedule keeps the order of compute and the starts of what is on the critical path.  But what such a
start needs is often less than what stands in front of it:

    dW0   dX  dW1  norm  start  wait  use          what ``start`` needs: dX, norm
    dX  norm  start  dW0  dW1  wait  use           the same in the new order

Walking back from a start, what it needs (and stands in the way) moves up over compute that it does not
need, until enough of that is behind the start to hide it.  The walk ends at a wait that it needs, at a
side effect, after :data:`MOST_KERNELS`, and where memory would not hold what now lives longer.  Compute
hides one collective only; the start of another one that is crossed must not be delayed, so all that
hides must stand in front of it.  Linear in nodes, and kernels times their inputs in each walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.shards import shared_shard_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Timeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import inputs_of, tensors_of
from torch_patches._inductor.fx_passes.comm_overlap.graph.ordering import Precedence
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import decision_bytes, tensor_bytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import data_inputs
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective

#: Kernels that a start, or what it needs, moves over at most.
MOST_KERNELS = 40
#: Where other collectives stand in the way for less than this share of the run, it stays as it is.
LEAST_EXPOSED = 0.1
#: Less compute than this share of a collective is not worth a new order.
LEAST_SHARE = 0.25


def earlier_others(track: Track, run: Timeline, limit_bytes: int) -> list[fx.Node] | None:
    """A legal order of the graph's nodes, or None where its own is as good.

    Args:
        track: of the graph, and the live bytes that must stay under ``limit_bytes``.
        run: of the graph as it stands.
    """
    exposed = sum(s.exposed_ms for s in run.spans if s.collective.index in track.uses)
    if exposed < LEAST_EXPOSED * run.total_ms:
        return None
    walk = _Walk(track, limit_bytes)
    others = [c for c in track.skeleton.collectives if c.index in track.uses]
    changed = False
    for collective in others:
        changed |= walk.move_up(collective)
    return walk.order if changed else None


@dataclass
class _Window:
    """Places from ``first`` to the start, and what a start at ``first`` would be hidden by."""

    first: int
    hidden_ms: float = 0.0
    hiding: list[fx.Node] = field(default_factory=list)
    needed: set[fx.Node] = field(default_factory=set)


class _Walk:
    """The order so far; see the module."""

    def __init__(self, track: Track, limit_bytes: int) -> None:
        self.track, self.limit = track, limit_bytes
        self.order = list(track.order)
        self.place = dict(track.place)
        # By node, which moves with its bytes: places are shifted on a rank with another view.
        self.live = dict(zip(track.order, track.live_bytes, strict=True))
        self.shard_bytes = shared_shard_bytes(track.skeleton)
        self.precedence = Precedence(track.skeleton.order_dependencies)
        self.taken: set[fx.Node] = set()  # compute that hides something
        moving = [c for c in track.skeleton.collectives if c.index not in track.gathers]
        critical = [c for c in moving if c.index not in track.reductions]
        self.starts = {c.start for c in critical}
        self.waits = {wait for c in critical for wait in c.waits}

    def move_up(self, collective: Collective) -> bool:
        """Whether something was moved for it."""
        track = self.track
        ms = track.model.collective_ms(collective)
        missing = ms - self._take(self._behind(collective), ms)
        if missing <= 0:
            return False
        window = self._best_window(collective.start, missing)
        if window is None or window.hidden_ms < LEAST_SHARE * ms:
            return False
        if not self._fits(window, collective):
            return False
        self._take(window.hiding, missing)
        self._partition(window, collective.start)
        return True

    def _behind(self, collective: Collective) -> Sequence[fx.Node]:
        first = self.place[collective.start] + 1
        use = self.place[self.track.order[self.track.uses[collective.index]]]
        return self.order[first:use]

    def _take(self, nodes: Sequence[fx.Node], most_ms: float) -> float:
        """Compute among ``nodes`` that hides nothing yet, up to so much; it is taken now."""
        found = 0.0
        for node in nodes:
            if found >= most_ms:
                break
            if node in self.track.costs and node not in self.taken:
                self.taken.add(node)
                found += self.track.costs[node].ms
        return found

    def _best_window(self, start: fx.Node, missing: float) -> _Window | None:
        track, best = self.track, None
        needed, inputs = {start}, set(self.precedence.predecessors(start))
        hiding: list[fx.Node] = []
        hidden, kernels = 0.0, 0
        for place in range(self.place[start] - 1, -1, -1):
            node = self.order[place]
            if node.op != "call_function" or node in track.fences:
                break
            cost = track.costs.get(node)
            kernels += cost.launches if cost else 0
            if kernels > MOST_KERNELS:
                break
            if node in inputs:
                if node in self.waits:
                    break
                needed.add(node)
                inputs.update(self.precedence.predecessors(node))
            elif node in self.starts or node in self.waits:
                hidden, hiding = 0.0, []
            elif cost is not None and node not in self.taken:
                hidden += cost.ms
                hiding.append(node)
                if best is None or hidden > best.hidden_ms:
                    best = _Window(place, hidden, list(hiding), set(needed))
                if hidden >= missing:
                    break
        return best

    def _fits(self, window: _Window, collective: Collective) -> bool:
        """Results that come earlier, and inputs of what comes later, may all live at once."""
        nodes = self.order[window.first : self.place[collective.start] + 1]
        made, kept = set(window.needed), set[fx.Node]()
        for node in nodes:
            if node not in window.needed and node in self.track.costs:
                kept.update(self._source(n) for n in inputs_of(node))
        made = {node for node in made if node in self.track.costs}
        extra = collective.size_bytes + sum(map(self._bytes, made | kept))
        working = [node for node in nodes if node not in self.track.skeleton.idle]
        if max(self.live[node] for node in working) + extra > self.limit:
            return False
        for node in working:
            self.live[node] += extra
        return True

    def _source(self, node: fx.Node) -> fx.Node:
        """What a node is made from without work: ranks differ in what does none."""
        while node.op == "call_function" and node in self.track.skeleton.idle:
            inputs = data_inputs(node)
            if not inputs:
                break
            node = inputs[0]
        return node

    def _bytes(self, node: fx.Node) -> int:
        own = sum(decision_bytes(tensor_bytes(t)) for t in tensors_of(node.meta.get("val")))
        return self.shard_bytes.get(node, own)

    def _partition(self, window: _Window, start: fx.Node) -> None:
        """What is needed first, the rest behind the start."""
        last = self.place[start]
        nodes = self.order[window.first : last + 1]
        first = [node for node in nodes if node in window.needed]
        rest = [node for node in nodes if node not in window.needed]
        self.order[window.first : last + 1] = first + rest
        for place in range(window.first, last + 1):
            self.place[self.order[place]] = place
