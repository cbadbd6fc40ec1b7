"""The bound of BASELINES, section A: what no legal order of a graph's nodes can beat.

    compute   all kernels run on one stream: the sum of their times
    chain     collectives of one group that depend on each other run one after the other.  Compute
              that every collective of a chain has among its ancestors or its descendants runs under
              none of them, so it takes its time beside theirs.

The heaviest chain is found exactly.  Compute comparable to all of c1 -> c2 -> ... -> ck lies before
c1, between two neighbours (after one *and* before the next), or after ck, so a chain's weight is a sum
over neighbours and the best chain ending at a collective follows from the best ones before it.
Dependent collectives cannot share a bucket.  ``_bench_floor.py`` has a sharper bound, which also holds
where merging does away with kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton


@dataclass(frozen=True)
class LowerBound:
    """See the module.

    Args:
        compute_ms: all compute.
        chain_ms: the heaviest chain within one process group.
    """

    compute_ms: float
    chain_ms: float

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.chain_ms)


def lower_bound(graph: fx.Graph, skeleton: Skeleton, model: RuntimeModel) -> LowerBound:
    """The bound of ``graph`` at the costs of ``model``.

    Takes (collectives^2 * compute nodes) multiplications and (collectives * nodes) bits: a second
    for 10,000 nodes and 700 collectives.
    """
    known = model.node_costs(graph, replace(skeleton, idle=frozenset()))
    model, costs = model.beside(known), {n: c.ms for n, c in known.items()}
    table = _Table.of(graph, skeleton, costs, model)
    groups = {c.group for c in skeleton.collectives}
    within = [table.heaviest([c for c in skeleton.collectives if c.group == g]) for g in groups]
    return LowerBound(sum(costs.values()), max(within, default=0.0))


@dataclass(frozen=True, eq=False)
class _Table:
    """What lies before, between and after collectives; rows and columns by ``Collective.index``.

    Args:
        ms: of each collective.
        follows: [i, j]: j depends on i.
        before_ms, after_ms: compute among a collective's ancestors, among its descendants.
        between_ms: [i, j]: compute that descends from i and that j descends from.
    """

    ms: np.ndarray
    follows: np.ndarray
    before_ms: np.ndarray
    after_ms: np.ndarray
    between_ms: np.ndarray

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        skeleton: Skeleton,
        costs: Mapping[fx.Node, float],
        model: RuntimeModel,
    ) -> _Table:
        count = len(skeleton.collectives)
        place = {c.start: c.index for c in skeleton.collectives}
        links = Links.of(graph, skeleton)
        from_starts = reached(links.order, links.before, place)
        to_starts = reached(reversed(links.order), links.after, place)
        computing = list(costs)
        descends = _bits([from_starts[n] for n in computing], count)
        precedes = _bits([to_starts[n] for n in computing], count)
        weights = np.array([costs[n] for n in computing], dtype=np.float64)
        weighted = descends * weights[:, None]
        follows = _bits([from_starts[c.start] for c in skeleton.collectives], count).T.astype(bool)
        np.fill_diagonal(follows, False)
        return cls(
            ms=np.array([model.collective_ms(c) for c in skeleton.collectives]),
            follows=follows,
            before_ms=precedes.T @ weights,
            after_ms=descends.T @ weights,
            between_ms=weighted.T @ precedes,
        )

    def heaviest(self, members: Iterable[Collective]) -> float:
        """Weight of the heaviest chain of ``members``, which come in a topological order."""
        best: dict[int, float] = {}
        for j in (c.index for c in members):
            heads = [best[i] + self.between_ms[i, j] for i in best if self.follows[i, j]]
            best[j] = float(self.ms[j] + max([self.before_ms[j], *heads]))
        return max((weight + float(self.after_ms[i]) for i, weight in best.items()), default=0.0)


@dataclass(frozen=True)
class Links:
    """Who has to come before whom: data flow and the skeleton's order dependencies."""

    order: list[fx.Node]
    before: dict[fx.Node, list[fx.Node]]
    after: dict[fx.Node, list[fx.Node]]

    @classmethod
    def of(cls, graph: fx.Graph, skeleton: Skeleton) -> Links:
        order = list(graph.nodes)
        before = {n: list(n.all_input_nodes) for n in order}
        for first, second in skeleton.order_dependencies:
            before[second].append(first)
        after: dict[fx.Node, list[fx.Node]] = {n: [] for n in order}
        for node, sources in before.items():
            for source in sources:
                after[source].append(node)
        return cls(order, before, after)


def reached(
    order: Iterable[fx.Node],
    sources: Mapping[fx.Node, list[fx.Node]],
    place: Mapping[fx.Node, int],
) -> dict[fx.Node, int]:
    """For each node the marked nodes it is reached from, itself included, as bits of an integer."""
    found: dict[fx.Node, int] = {}
    for node in order:
        marks = 1 << place[node] if node in place else 0
        for source in sources[node]:
            marks |= found[source]
        found[node] = marks
    return found


def packed(rows: Sequence[int], count: int) -> np.ndarray:
    """Rows of ``count`` bits, eight in a byte, a row for each integer."""
    size = (count + 7) // 8
    joined = b"".join(row.to_bytes(size, "little") for row in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), size)


def unpacked(rows: np.ndarray, count: int) -> np.ndarray:
    """The same, a byte for each bit."""
    return np.unpackbits(rows, axis=1, bitorder="little")[:, :count]


def _bits(rows: Sequence[int], count: int) -> np.ndarray:
    """A 0/1 matrix, a row for each integer."""
    return unpacked(packed(rows, count), count).astype(np.float64)
