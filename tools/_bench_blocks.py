"""Which block a collective or a kernel belongs to, and what that says of a finished graph.

A block is an entry of torch's plan: ``layers.3``, or ``norm+output`` for ``["norm", "output"]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx
from _bench_measure import Simulated
from torch._inductor.fx_passes.graph_view import _clean_stack_name

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import RuntimeModel
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import CollectiveSpan
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK, collect
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    MERGEABLE_KINDS,
    Collective,
    CollectiveKind,
    Traffic,
)
from torch_patches._inductor.fx_passes.comm_overlap.report import Report

#: A collective is exposed if compute stands still for it for more than this share of its own time.
EXPOSED_SHARE = 0.05

ModulePlan = Sequence[list[str] | str]
#: What shares a start: block, kind, group, dtype, reduce op, and whether it runs in the backward.
BlockKey = tuple[str, str, str, str, str, bool]


# -- names ----------------------------------------------------------------------------------------


def module_path(node: fx.Node) -> str:
    """The innermost module that made ``node``, as torch's graph view names it; or empty."""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if stack:
            return _clean_stack_name(list(stack.values())[-1][0])
    return ""


def block_plan(graph: fx.Graph) -> list[list[str] | str]:
    """torch's plan for the models of ``capture_graph.py``: embedding, each layer, norm with head."""
    paths = [module_path(node) for node in graph.nodes]
    layers = {int(m[1]) for path in paths if (m := re.match(r"layers\.(\d+)(\.|$)", path))}
    return ["tok_embeddings", *(f"layers.{i}" for i in sorted(layers)), ["norm", "output"]]


def labeller(plan: ModulePlan) -> Callable[[fx.Node], str]:
    """Tells the block of a node; empty where no entry of ``plan`` covers it."""
    blocks: dict[str, str] = {}
    for entry in plan:
        names = [entry] if isinstance(entry, str) else entry
        blocks |= dict.fromkeys(names, "+".join(names))

    def label(node: fx.Node) -> str:
        path = module_path(node)
        while path and path not in blocks:
            path = path.rpartition(".")[0]
        return blocks.get(path, "")

    return label


@dataclass(frozen=True, eq=False)
class Blocks:
    """What the collectives of an input belong to, and what became of them.

    Args:
        label: the block of a node, see :func:`labeller`.
        keys: by name of its start, the key of each collective that carries parameters or gradients.
        report: of our run.
    """

    label: Callable[[fx.Node], str]
    keys: Mapping[str, BlockKey]
    report: Report

    @classmethod
    def of(cls, graph: fx.Graph) -> Blocks:
        """Of an input, before anything ran."""
        label = labeller(block_plan(graph))
        keys = {
            c.start.name: _key(c, label(c.start))
            for c in collect(graph).collectives
            if c.kind in MERGEABLE_KINDS and c.traffic is not Traffic.OTHER
        }
        return cls(label, keys, Report(mode="none"))

    def members(self, start: fx.Node) -> tuple[str, ...]:
        """Names of the input's collectives that ``start`` of our result stands for."""
        mark = start.meta.get(BUCKET_MARK)
        return (start.name,) if mark is None else self.report.buckets[mark["bucket"]].members

    def keys_of(self, start: fx.Node) -> list[BlockKey]:
        """Keys of what ``start`` stands for; none for activations."""
        members = self.members(start)
        return list(dict.fromkeys(self.keys[m] for m in members if m in self.keys))


def _key(collective: Collective, label: str) -> BlockKey:
    key = collective.key
    dtype, op = (str(key.dtype), key.reduce_op or "") if key else ("unknown", "")
    kind, group = collective.kind.value, collective.group
    return label, kind, group, dtype.removeprefix("torch."), op, collective.backward


# -- one start for each block ---------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Whether each block, group, dtype, phase and direction has one start.

    Args:
        keys: of them.
        single: keys with exactly one start.
        refused: the others that are explained, as "key: starts, reasons".
        violations: those with two starts or more that no refusal names.
        unlabelled: collectives of the input that no entry of the plan covers.
        merged_blocks: starts that hold more than one key, as in a bucket of two blocks.
    """

    keys: int
    single: int
    refused: tuple[str, ...]
    violations: tuple[str, ...]
    unlabelled: int
    merged_blocks: int


def check_blocks(starts: Iterable[fx.Node], blocks: Blocks) -> Check:
    """Looks at our result.  Args: ``starts``: of all its collectives."""
    by_key: dict[BlockKey, list[tuple[str, ...]]]
    by_key = {key: [] for key in blocks.keys.values() if key[0]}
    merged_blocks = 0
    for start in starts:
        found = [key for key in blocks.keys_of(start) if key[0]]
        merged_blocks += len(found) > 1
        for key in found:
            by_key[key].append(blocks.members(start))
    reasons: dict[str, set[str]] = {}
    for refusal in blocks.report.refusals:
        for member in refusal.members:
            reasons.setdefault(member, set()).add(refusal.reason.value)
    refused, violations = _split_keys(by_key, reasons)
    return Check(
        keys=len(by_key),
        single=sum(len(found) == 1 for found in by_key.values()),
        refused=tuple(refused),
        violations=tuple(violations),
        unlabelled=sum(not key[0] for key in blocks.keys.values()),
        merged_blocks=merged_blocks,
    )


def _split_keys(
    by_key: Mapping[BlockKey, list[tuple[str, ...]]], reasons: Mapping[str, set[str]]
) -> tuple[list[str], list[str]]:
    """Keys without exactly one start: of all starts but one a refusal must name a member."""
    refused, violations = [], []
    for key, starts in by_key.items():
        if len(starts) == 1:
            continue
        told = [{r for m in members for r in reasons.get(m, ())} for members in starts]
        line = f"{' '.join(map(str, key))}: {len(starts)} starts"
        if len(starts) == 0 or sum(not why for why in told) > 1:
            violations.append(line)
        else:
            refused.append(f"{line}, {'; '.join(sorted(set().union(*told)))}")
    return refused, violations


# -- what could have been hidden ------------------------------------------------------------------


@dataclass(frozen=True)
class Exposed:
    """A block's collective that compute stands still for, although the neighbour could hide it.

    Args:
        block, kind, group: which.
        ms, exposed_ms: of the collective.
        cover: the block that should hide it: the one before for a gather, after for a reduction.
        cover_ms: its compute, as long as it takes alone.
        traffic_ms: everything on the same link that the cover should hide.
    """

    block: str
    kind: str
    group: str
    ms: float
    exposed_ms: float
    cover: str
    cover_ms: float
    traffic_ms: float


def is_exposed(span: CollectiveSpan, model: RuntimeModel) -> bool:
    """By more than :data:`EXPOSED_SHARE` of its time on an idle link."""
    return span.exposed_ms > EXPOSED_SHARE * model.collective_ms(span.collective)


def exposed_blocks(run: Simulated, model: RuntimeModel, blocks: Blocks) -> list[Exposed]:
    """Exposed collectives of single blocks whose cover computes longer than its link is busy.

    The first gather and the last reduction have no cover and are left out, and so are buckets of
    several blocks.  Compute counts without the slow-down that hiding costs, so what is listed could
    be hidden for sure.

    Args:
        run: of our result.
    """
    compute, order = _blocks_in_order(run, blocks.label)
    covers = _covers(run.skeleton.collectives, blocks, order)
    traffic: dict[tuple[str, Link], float] = {}
    for c in run.skeleton.collectives:
        lane = covers[c.index].cover, model.link(c)
        traffic[lane] = traffic.get(lane, 0.0) + model.collective_ms(c)
    result = []
    for span in run.timeline.spans:
        c, found = span.collective, covers[span.collective.index]
        if not (found.block and found.cover) or not is_exposed(span, model):
            continue
        busy, free = traffic[found.cover, model.link(c)], compute[found.cover]
        if busy <= free:
            what = found.block, c.kind.value, c.group, model.collective_ms(c), span.exposed_ms
            result.append(Exposed(*what, found.cover, free, busy))
    return result


@dataclass(frozen=True)
class _Cover:
    """The block of a collective and the one whose compute should hide it; empty where none is."""

    block: str
    cover: str


def _covers(
    collectives: Iterable[Collective], blocks: Blocks, order: Sequence[str]
) -> dict[int, _Cover]:
    """By index.  Args: ``order``: of the blocks that compute."""
    place = {block: i for i, block in enumerate(order)}
    result: dict[int, _Cover] = {}
    for c in collectives:
        found = {key[0] for key in blocks.keys_of(c.start)}
        if not found:  # traffic of activations stands where its block computes
            result[c.index] = _Cover("", blocks.label(c.start))
        elif len(found) > 1 or not found <= place.keys():
            result[c.index] = _Cover("", "")
        else:
            (block,) = found
            at = place[block] + (-1 if c.kind is CollectiveKind.ALL_GATHER else 1)
            result[c.index] = _Cover(block, order[at] if 0 <= at < len(order) else "")
    return result


def _blocks_in_order(
    run: Simulated, label: Callable[[fx.Node], str]
) -> tuple[dict[str, float], list[str]]:
    """ms of compute by block, and the blocks in the order in which they compute (by the middle of
    their work, since casts of parameters stand anywhere)."""
    compute: dict[str, float] = {}
    moment: dict[str, float] = {}
    now = 0.0
    for node, cost in run.costs.items():
        block = label(node)
        if block:
            compute[block] = compute.get(block, 0.0) + cost.ms
            moment[block] = moment.get(block, 0.0) + cost.ms * (now + cost.ms / 2)
        now += cost.ms
    order = sorted((b for b in compute if compute[b] > 0), key=lambda b: moment[b] / compute[b])
    return compute, order
