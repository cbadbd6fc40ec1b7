"""The collectives of a graph as plain rows: what each carries, and its bucket or why it has none.

    source = Source(captured.graphs, recorded_from_names(captured.info["inputs"]), {})
    shown = show_graph(source, "fw", Options("topo_span"))
    [row for row in shown.rows if row.bucket is None]

The planning is the pipeline's own, so a row tells what a compile with these options does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.graph_inputs import (
    DescriptorMismatch,
    read_facts,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.tagging import is_tagged, plan_tags
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, RecordedInput, Traffic
from torch_patches._inductor.fx_passes.comm_overlap.report import Report

log = logging.getLogger(__name__)

#: Of what carries neither parameter nor gradient, inputs named and nodes looked at.
ORIGINS_SHOWN = 3
NODES_SEARCHED = 2000


@dataclass(frozen=True)
class Source:
    """Where the graphs come from.

    Args:
        graphs: by name ("joint", "fw", "bw").
        inputs: the model's inputs, as Dynamo knew them.
        groups: process-group name -> what it is for and who is in it.
    """

    graphs: Mapping[str, fx.GraphModule]
    inputs: tuple[RecordedInput, ...]
    groups: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One collective as text and numbers.

    Args:
        bucket: number of its bucket, None if it stays alone.
        why_not: the reason then.
        made_from: of what carries neither a parameter nor a gradient: graph inputs it comes from.
    """

    index: int
    node: str
    kind: str
    group: str
    ranks: int | None
    dtype: str
    op: str | None
    device: str
    size_bytes: int
    position: int
    traffic: str
    told_by: str
    parameter: str | None
    parameter_index: int | None
    backward: bool
    bucket: int | None = None
    why_not: str | None = None
    made_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """One graph: its collectives, and what bucketing makes of it."""

    name: str
    rows: tuple[Row, ...]
    report: Report


def carry_tags(joint: fx.Graph, graph: fx.Graph, inputs: Sequence[RecordedInput]) -> None:
    """Give a split graph the tags that its joint graph would have handed on.

    Captured graphs were split before anything was tagged.  The partitioner keeps names.
    """
    try:
        planned = plan_tags(joint, inputs)
    except DescriptorMismatch as problem:
        log.warning("the joint graph has no tags (%s); structure decides", problem)
        return
    tags = {(node.name, str(node.target)): tag for node, tag in planned.items()}
    for node in graph.nodes:
        tag = tags.get((node.name, str(node.target)))
        if tag is not None:
            node.meta[TAG_MARK] = tag


def show_graph(source: Source, name: str, options: Options) -> Shown:
    """Read the collectives of one graph and plan its buckets.  Changes ``source.graphs[name]``."""
    graph = source.graphs[name].graph
    joint = source.graphs.get("joint")
    if joint is not None:
        carry_tags(joint.graph, graph, source.inputs)
    if not is_tagged(graph):
        pipeline.run_joint(graph, options, source.inputs)
    origins = _Origins(graph, source.inputs)
    collectives = collect(graph).collectives
    rows = [_row(c, origins) for c in collectives]
    report = pipeline.run_post_grad(graph, options, source.inputs)
    if report is None:
        report = Report(options.bucketing_mode)
    return Shown(name, tuple(_with_outcomes(rows, report)), report)


def _row(collective: Collective, origins: _Origins) -> Row:
    key, tag = collective.key, collective.tag
    is_other = collective.traffic is Traffic.OTHER
    return Row(
        index=collective.index,
        node=collective.start.name,
        kind=collective.kind.value,
        group=collective.group,
        ranks=key.group_size if key else None,
        dtype=str(key.dtype).removeprefix("torch.") if key else "?",
        op=key.reduce_op if key else None,
        device=key.device_type if key else "?",
        size_bytes=collective.size_bytes,
        position=collective.position,
        traffic=collective.traffic.value,
        told_by=tag.source.value if tag else "structure",
        parameter=tag.parameter if tag else None,
        parameter_index=collective.parameter_index if tag is None else tag.index,
        backward=collective.backward,
        made_from=tuple(origins.of(collective.start)) if is_other else (),
    )


def _with_outcomes(rows: Iterable[Row], report: Report) -> Iterator[Row]:
    bucket_of = {name: i for i, bucket in enumerate(report.buckets) for name in bucket.members}
    reason_of = {name: refusal for refusal in report.refusals for name in refusal.members}
    for row in rows:
        bucket, refusal = bucket_of.get(row.node), reason_of.get(row.node)
        why = None
        if bucket is None:
            why = report.failure or "unknown"
            if refusal is not None:
                why = refusal.reason.value + (f" ({refusal.detail})" if refusal.detail else "")
        yield replace(row, bucket=bucket, why_not=why)


class _Origins:
    """Names of the graph inputs that a value is computed from."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[RecordedInput]) -> None:
        facts = read_facts(graph, inputs)
        self._facts = {} if facts is None else facts.inputs

    def of(self, node: fx.Node) -> Iterator[str]:
        """The nearest ones; the search is bounded, since activations come from everything."""
        seen, pending, found = {node}, [node], 0
        for current in pending:
            for source in current.all_input_nodes:
                if source in seen or len(seen) > NODES_SEARCHED:
                    continue
                seen.add(source)
                pending.append(source)
                if source.op == "placeholder":
                    found += 1
                    if found <= ORIGINS_SHOWN:
                        yield self._name(source)
        if found > ORIGINS_SHOWN:
            yield f"{found - ORIGINS_SHOWN} more inputs"

    def _name(self, node: fx.Node) -> str:
        fact = self._facts.get(node)
        if fact is not None and fact.name:
            return f"{fact.kind.value} {fact.name}"
        is_saved = fact is not None and "desc" not in node.meta
        return f"{'saved' if is_saved else 'input'} {node.name}"
