"""The floor: a time that no order of a graph's nodes and no merge of its collectives can beat in our simulator.

Every order keeps data flow, runs kernels one after the other, and what moves over one link one after
the other.  So each kernel and each collective has a *head*, before which it cannot begin, and a
*tail*, what must still come when it is done; they follow from paths, and from the work of all that
lies before (behind) on one lane.  Three bounds of scheduling theory then hold:

    window      h + work on a lane of all that have a head >= h and a tail >= q + q   (Carlier 1982)
    chain       head + collectives that depend on each other + compute between them + tail
    job         head + its own time + tail

Contention.  A kernel takes s times as long while anything moves.  Count *slow time*: a ms in which
something moves counts 1/s of a ms, any other a whole one.  Then every kernel takes its own time w,
whenever it runs, and a collective that takes m takes m/s.  With A ms in which something moves,

    total = slow time + (1 - 1/s) * A,    A >= traffic of the busiest link

and the slow time is at least what the same bounds say of collectives of m/s.  The larger of both
counts.

Merging.  A bucket takes no less than any of its members and than all their bytes, so collectives count
in full on paths, and by bytes alone on a lane where another one of their group and kind does not depend
on them; such a group and kind pays for one launch.  What merely prepares a payload or follows a
result, at the edge of the graph, may be merged away: it costs nothing.  Other kernels cost what they
cost in the input: what they save where a copy into a bucket fuses them, which reads a tensor once for
all, is not in it.  Fusing two gathers of one tensor along two meshes is no merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.fx as fx
from _bench_bound import Links, packed, reached, unpacked

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    TrafficFinder,
    passes_through,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton

COMPUTE = "compute"
#: Heads and tails that windows begin and end with, at most, and rounds in which they sharpen.
_THRESHOLDS, _ROUNDS = 40, 3


@dataclass(frozen=True)
class Floor:
    """A lower bound and what it is made of; the parts add up.

    Args:
        head_ms, tail_ms: before and behind the window or the chain.
        compute_ms, traffic_ms: of kernels and of collectives in it.
        contention_ms: what kernels lose while something moves.
    """

    head_ms: float = 0.0
    compute_ms: float = 0.0
    traffic_ms: float = 0.0
    contention_ms: float = 0.0
    tail_ms: float = 0.0

    @property
    def ms(self) -> float:
        inside = self.compute_ms + self.traffic_ms + self.contention_ms
        return self.head_ms + inside + self.tail_ms


def floor_of(graph: fx.Graph, skeleton: Skeleton, model: RuntimeModel) -> Floor:
    """See the module.

    Takes (jobs^2 * thresholds) multiplications for each lane: seconds for 5,000 kernels.
    """
    known = model.node_costs(graph, replace(skeleton, idle=frozenset()))
    model, costs = model.beside(known), {n: c.ms for n, c in known.items()}
    edge = edge_nodes(graph)
    jobs = _Jobs.of(graph, skeleton, {n: ms for n, ms in costs.items() if n not in edge}, model)
    slowdown = max(model.interference.compute_slowdown, 1.0)
    moving_ms = max((jobs.lane_ms(lane) for lane in jobs.lanes if lane != COMPUTE), default=0.0)
    plain = _best(jobs)
    slow = _best(jobs.with_collectives(1 / slowdown))
    slow = replace(slow, contention_ms=(1 - 1 / slowdown) * moving_ms)
    return max(plain, slow, key=lambda floor: floor.ms)


def edge_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What only rearranges or casts an input, or a result on its way out."""
    traffic = TrafficFinder(graph)
    return {n for n in graph.nodes if passes_through(n) and traffic.is_at_the_edge(n)}


@dataclass(frozen=True, eq=False)
class _Jobs:
    """Kernels and starts of collectives, in graph order; arrays are by their numbers.

    Args:
        links: of the graph.
        number: of each node that is a job.
        ms: of each on its own.
        work_ms: what it adds to its lane at least.
        launch_ms: of the launch that it shares with others of its ``family``, or 0.
        lanes: lane -> numbers of its jobs.
        family: which collectives could be members of one bucket; -1 for kernels.
        after, before: [i, j] in packed bits: j depends on i; i depends on j.
    """

    links: Links
    number: Mapping[fx.Node, int]
    ms: np.ndarray
    work_ms: np.ndarray
    launch_ms: np.ndarray
    lanes: Mapping[object, np.ndarray]
    family: np.ndarray
    after: np.ndarray
    before: np.ndarray

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        skeleton: Skeleton,
        costs: Mapping[fx.Node, float],
        model: RuntimeModel,
    ) -> _Jobs:
        starts = {c.start: c for c in skeleton.collectives}
        nodes = [n for n in graph.nodes if n in costs or n in starts]
        number = {node: i for i, node in enumerate(nodes)}
        links = Links.of(graph, skeleton)
        up = reached(links.order, links.before, number)
        down = reached(reversed(links.order), links.after, number)
        before = packed([up[n] for n in nodes], len(nodes))
        after = packed([down[n] for n in nodes], len(nodes))
        families: dict[object, int] = {}
        lanes: dict[object, list[int]] = {}
        ms, launch, family = np.zeros(len(nodes)), np.zeros(len(nodes)), np.full(len(nodes), -1)
        shared = model.interference.link_sharing == 1.0
        for i, node in enumerate(nodes):
            lane: object = COMPUTE
            if node in starts:
                one = starts[node]
                ms[i], launch[i] = model.collective_ms(one), model.collective_ms(one, 0)
                family[i] = families.setdefault((one.kind, one.group), len(families))
                lane = model.link(one) if shared else one.group
            else:
                ms[i] = costs[node]
            lanes.setdefault(lane, []).append(i)
        for kind in range(len(families)):
            alone = _depend_on_all(np.flatnonzero(family == kind), before, after)
            launch[alone] = 0.0
        numbers = {lane: np.array(found) for lane, found in lanes.items()}
        return cls(links, number, ms, ms - launch, launch, numbers, family, after, before)

    def with_collectives(self, scale: float) -> _Jobs:
        """The same with collectives so many times as long."""
        by = np.where(self.family >= 0, scale, 1.0)
        scaled = (self.ms * by, self.work_ms * by, self.launch_ms * by)
        return replace(self, ms=scaled[0], work_ms=scaled[1], launch_ms=scaled[2])

    def lane_ms(self, lane: object, chosen: np.ndarray | None = None) -> float:
        """Work of a lane, or of some of its jobs: theirs, and a launch for each family."""
        jobs = self.lanes[lane] if chosen is None else chosen
        launches: dict[int, float] = {}
        for i in jobs[self.launch_ms[jobs] > 0]:
            least = launches.get(int(self.family[i]), np.inf)
            launches[int(self.family[i])] = min(least, float(self.launch_ms[i]))
        return float(self.work_ms[jobs].sum()) + sum(launches.values())


def _depend_on_all(members: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Those that each of the others depends on, or is depended on by: none can be merged."""
    related = unpacked(before[members] | after[members], len(before))[:, members]
    return members[related.all(axis=1)]


# -- heads and tails ------------------------------------------------------------------------------


def _heads(jobs: _Jobs) -> np.ndarray:
    """No job begins earlier than this."""
    return _earliest(jobs, jobs.links.order, jobs.links.before, jobs.before)


def _tails(jobs: _Jobs) -> np.ndarray:
    """So much comes after each job has ended: heads of the graph read backwards."""
    return _earliest(jobs, jobs.links.order[::-1], jobs.links.after, jobs.after)


def _earliest(
    jobs: _Jobs,
    order: Sequence[fx.Node],
    sources: Mapping[fx.Node, list[fx.Node]],
    earlier: np.ndarray,
) -> np.ndarray:
    heads = np.zeros(len(jobs.ms))
    for _ in range(_ROUNDS):
        heads = _along_paths(jobs, order, sources, heads)
        for lane, members in jobs.lanes.items():
            heads = np.maximum(heads, _behind_lane(jobs, lane, members, heads, earlier))
    return _along_paths(jobs, order, sources, heads)


def _along_paths(
    jobs: _Jobs,
    order: Iterable[fx.Node],
    sources: Mapping[fx.Node, list[fx.Node]],
    heads: np.ndarray,
) -> np.ndarray:
    """Heads that are at least where what a job needs ends."""
    result = heads.copy()
    ends: dict[fx.Node, float] = {}
    for node in order:
        head = max([ends[source] for source in sources[node]], default=0.0)
        i = jobs.number.get(node)
        if i is not None:
            result[i] = max(result[i], head)
            head = float(result[i] + jobs.ms[i])
        ends[node] = head
    return result


def _behind_lane(
    jobs: _Jobs, lane: object, members: np.ndarray, heads: np.ndarray, earlier: np.ndarray
) -> np.ndarray:
    """Ends of one lane's work that comes before each job and has a head of at least h, for each h."""
    levels = _levels(heads[members])
    weights = jobs.work_ms[members][:, None] * (heads[members][:, None] >= levels)
    found = np.zeros(len(jobs.ms))
    for rows in _chunks(len(jobs.ms)):
        mask = unpacked(earlier[rows], len(jobs.ms))[:, members].astype(np.float64)
        # a job's own bit is set: it counts itself, which comes after its head
        mask[rows[:, None] == members] = 0.0
        work = mask @ weights
        found[rows] = np.where(work > 0, work + levels, 0.0).max(axis=1, initial=0.0)
    return found


def _levels(values: np.ndarray) -> np.ndarray:
    """Thresholds: some of the values that occur, the least among them."""
    found = np.unique(values)
    if len(found) <= _THRESHOLDS:
        return found
    return found[np.linspace(0, len(found) - 1, _THRESHOLDS).astype(int)]


def _chunks(count: int, size: int = 512) -> Iterator[np.ndarray]:
    for first in range(0, count, size):
        yield np.arange(first, min(first + size, count))


# -- bounds ---------------------------------------------------------------------------------------


def _best(jobs: _Jobs) -> Floor:
    if not len(jobs.ms):
        return Floor()
    heads, tails = _heads(jobs), _tails(jobs)
    found = [_window(jobs, lane, heads, tails) for lane in jobs.lanes]
    found += [_job(jobs, heads, tails), _chain(jobs, heads, tails)]
    return max(found, key=lambda floor: floor.ms)


def _job(jobs: _Jobs, heads: np.ndarray, tails: np.ndarray) -> Floor:
    i = int((heads + jobs.ms + tails).argmax())
    kind = "compute_ms" if jobs.family[i] < 0 else "traffic_ms"
    return Floor(head_ms=float(heads[i]), tail_ms=float(tails[i]), **{kind: float(jobs.ms[i])})


def _window(jobs: _Jobs, lane: object, heads: np.ndarray, tails: np.ndarray) -> Floor:
    members = jobs.lanes[lane]
    kind = "compute_ms" if lane == COMPUTE else "traffic_ms"
    best = Floor()
    for head in _levels(heads[members]):
        late = members[heads[members] >= head]
        for tail in _levels(tails[late]):
            chosen = late[tails[late] >= tail]
            work = jobs.lane_ms(lane, chosen)
            if head + work + tail > best.ms:
                best = Floor(head_ms=float(head), tail_ms=float(tail), **{kind: work})
    return best


def _chain(jobs: _Jobs, heads: np.ndarray, tails: np.ndarray) -> Floor:
    """The best chain that ends at a collective follows from the best ones in front of it."""
    moving = np.flatnonzero(jobs.family >= 0)
    if not len(moving):
        return Floor()
    computing = jobs.lanes.get(COMPUTE, np.array([], dtype=int))
    count = len(jobs.ms)
    follows = unpacked(jobs.after[moving], count)  # [i, j]: j depends on moving[i]
    behind = follows[:, computing].astype(np.float64)
    precedes = unpacked(jobs.before[moving], count)[:, computing].astype(np.float64)
    between = (behind * jobs.ms[computing]) @ precedes.T
    linked = follows[:, moving].astype(bool)
    best: list[Floor] = []
    for j, job in enumerate(moving):
        own = float(jobs.ms[job])
        found = Floor(head_ms=float(heads[job]), traffic_ms=own)
        for i in np.flatnonzero(linked[:j, j]):
            link = float(between[i, j])
            if best[i].ms + link + own > found.ms:
                found = replace(
                    best[i],
                    compute_ms=best[i].compute_ms + link,
                    traffic_ms=best[i].traffic_ms + own,
                )
        best.append(found)
    ended = [replace(f, tail_ms=float(tails[job])) for f, job in zip(best, moving, strict=True)]
    return max(ended, key=lambda floor: floor.ms)
