"""The architecture's invariants, checked on one graph by running the pipeline on copies of it.

    check_invariants(gm, description, options)

raises ``InvariantError`` with the invariant's letter and a program that shows the failure, cut down
to the nodes it takes.  A graph that is itself illegal raises ``CaseError``: the test is wrong.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensor

from torch_patches._inductor.fx_passes.comm_overlap import notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK, collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.auto import CAPS_MB, memory_limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.replicas import scatters_of_replicas
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import cap_bytes
from torch_patches._inductor.fx_passes.comm_overlap.plan import BarrierKind, Collective, Skeleton
from torch_patches._inductor.fx_passes.comm_overlap.report import BucketReport, Report
from torch_patches.testing.graph_builder import Group, evaluate
from torch_patches.testing.graph_variants import vary
from torch_patches.testing.invariant_values import (
    CaseError,
    Execution,
    InvariantError,
    check_values,
    execute,
    geometry,
)
from torch_patches.testing.strategies import Description


@dataclass(frozen=True)
class Outcome:
    """Figures of a run that kept all invariants."""

    buckets: int
    members: int
    displaced_share: float


def find_violation(
    gm: fx.GraphModule, description: Description, options: Options, *, trusted: bool = False
) -> Outcome:
    """Checks every invariant on copies of ``gm``; raises the first ``InvariantError`` as it is.

    Args:
        trusted: the metadata of ``gm`` is known to be right.
    """
    expected = execute_input(gm, description, trusted)
    before = collect(gm.graph)
    after = copy.deepcopy(gm)
    originals = {c.start.name: c for c in before.collectives}
    report = run_strictly(after, options)
    _check_legal(after, trusted=gm)
    check_values(gm, after, expected, description)
    buckets = report.buckets if report is not None else ()
    members = [[originals[name] for name in bucket.members] for bucket in buckets]
    _check_fences(gm, after, before, members)
    _check_bounds(buckets, members, before.collectives, options)
    if report is not None and options.schedules:
        _check_promises(report, options)
    _check_repeatable(gm, after, options)
    _check_variant(gm, options, report, [[m.index for m in ms] for ms in members])
    share = report.displaced_share if report is not None else 0.0
    if not 0.0 <= share <= 1.0:
        raise InvariantError("h", f"displaced share {share}")
    return Outcome(len(buckets), sum(map(len, members)), share)


def execute_input(gm: fx.GraphModule, description: Description, trusted: bool) -> Execution:
    """What the input graph gives; ``CaseError`` where it is illegal by itself."""
    try:
        _check_attention(gm)
        _check_legal(gm, trusted=gm if trusted else None)
        return execute(gm, description)
    except Exception as error:
        raise CaseError(f"the input graph is illegal: {error}") from error


def _check_attention(gm: fx.GraphModule) -> None:
    """torch's fused attention on a CPU takes the last dimension of its operands for dense, whatever
    the stride: its result is then what happens to lie in memory."""
    for node in gm.graph.nodes:
        if "flash_attention_for_cpu" in str(node.target):
            vals = [n.meta["val"] for n in node.all_input_nodes]
            tensors = [v for v in vals if isinstance(v, torch.Tensor) and v.dim() == 4]
            if any(v.stride()[-1] != 1 < v.shape[-1] for v in tensors):
                raise ValueError(f"{node.name} reads beyond its operands")


@contextmanager
def _strict() -> Iterator[None]:
    """Failures inside the pipeline raise instead of leaving the graph as it was."""
    old = os.environ.get(notices.STRICT_VARIABLE)
    os.environ[notices.STRICT_VARIABLE] = "1"
    try:
        yield
    finally:
        if old is None:
            del os.environ[notices.STRICT_VARIABLE]
        else:
            os.environ[notices.STRICT_VARIABLE] = old


def run_strictly(gm: fx.GraphModule, options: Options) -> Report | None:
    """The pipeline, in place; ``InvariantError`` where it fails instead of leaving the graph."""
    with _strict():
        try:
            report = pipeline.run_post_grad(gm.graph, options)
        except Exception as error:
            raise InvariantError("b", f"the pipeline raised {error!r}") from error
    return report


# ---------------------------------------------------------------- (b) legal


def _check_legal(gm: fx.GraphModule, trusted: fx.GraphModule | None) -> None:
    """Lint, topological order, plain arguments, and the metadata that each op would produce.

    Args:
        trusted: a graph with right metadata; what is the same in it is not computed again.
    """
    try:
        gm.graph.lint()
    except Exception as error:
        raise InvariantError("b", f"lint: {error}") from error
    seen: set[fx.Node] = set()
    for node in gm.graph.nodes:
        late = [n.name for n in node.all_input_nodes if n not in seen]
        if late:
            raise InvariantError("b", f"{node.name} stands before its inputs {late}")
        for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))):
            if not isinstance(leaf, _PLAIN):
                raise InvariantError("b", f"{node.name} has an argument of type {type(leaf)}")
        seen.add(node)
    _check_metadata(gm, _known_values(trusted))


_PLAIN = (fx.Node, int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format, Group)  # fmt: skip


def _known_values(gm: fx.GraphModule | None) -> dict[str, Any]:
    """Node as text -> its metadata value."""
    return {} if gm is None else {str(n.format_node()): n.meta.get("val") for n in gm.graph.nodes}


def _check_metadata(gm: fx.GraphModule, known: Mapping[str, Any]) -> None:
    """Runs each node on fake values, but for those that are known with all their inputs."""
    env: dict[fx.Node, Any] = {}
    mode = _fake_mode(gm)
    unchanged: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if "val" not in node.meta:
            raise InvariantError("b", f"{node.name} has no meta['val']")
        env[node] = kept = node.meta["val"]
        same = known.get(str(node.format_node()), env) is kept
        if node.op == "placeholder" or (same and unchanged.issuperset(node.all_input_nodes)):
            unchanged.add(node)
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        with mode:
            env[node] = evaluate(node.target, args, kwargs)
        if _described(kept) != _described(env[node]):
            found = f"{_described(kept)}, but it is {_described(env[node])}"
            raise InvariantError("b", f"{node.name}: meta['val'] {found}")


def _described(value: Any) -> list[Any]:
    leaves = pytree.tree_leaves(value)
    return [geometry(v) if isinstance(v, torch.Tensor) else str(v) for v in leaves]


def _fake_mode(gm: fx.GraphModule) -> Any:
    values = (n.meta["val"] for n in gm.graph.find_nodes(op="placeholder"))
    return next(v.fake_mode for v in values if isinstance(v, FakeTensor))


# ---------------------------------------------------------------- (d) fences


def _check_fences(
    gm: fx.GraphModule,
    after: fx.GraphModule,
    before: Skeleton,
    members: Sequence[Sequence[Collective]],
) -> None:
    """Every fence has the same collectives, starts and first waits, before it as in the input."""
    fences = [b.node.name for b in before.barriers if b.kind is BarrierKind.EFFECT]
    rewritten = collect(after.graph)
    kept = [b.node.name for b in rewritten.barriers if b.kind is BarrierKind.EFFECT]
    if kept != fences:
        raise InvariantError("d", f"fences {fences}, then {kept}")
    places = _segments_by_original(rewritten, members)
    for collective in before.collectives:
        name = collective.start.name
        if name not in places:
            raise InvariantError("d", f"{name} is neither in the result nor in a bucket")
        now = places[name]
        if now.segment != collective.segment:
            raise InvariantError("d", f"the start {name} crossed one of the fences {fences}")
        if now.wait_segment != collective.wait_segment and len(now.waits) == 1:
            raise InvariantError("d", f"the wait of {name} crossed one of the fences {fences}")


def _segments_by_original(
    rewritten: Skeleton, members: Sequence[Sequence[Collective]]
) -> dict[str, Collective]:
    places: dict[str, Collective] = {}
    for collective in rewritten.collectives:
        mark = collective.start.meta.get(BUCKET_MARK)
        if mark is None:
            places[collective.start.name] = collective
        else:
            places.update({m.start.name: collective for m in members[mark["bucket"]]})
    return places


# ---------------------------------------------------------------- (g) caps


def _check_bounds(
    buckets: Sequence[BucketReport],
    members: Sequence[Sequence[Collective]],
    collectives: Sequence[Collective],
    options: Options,
) -> None:
    """The members' bytes and span, added up anew.

    A member that found no partner uses up a bucket index too, so the n-th bucket of a key has
    index n or higher.  All-reduces chained to the members of a bucket of reduce-scatters have no
    bound of their own, and buckets of modules none but a cap that was asked for.
    """
    count_of_key: dict[Any, int] = {}
    scatter_of = scatters_of_replicas(collectives)
    bucket_of = {m.index: number for number, group in enumerate(members) for m in group}
    for bucket, group in zip(buckets, members, strict=True):
        size = sum(m.size_bytes for m in group)
        span = max(m.position for m in group) - min(m.position for m in group)
        if (size, span) != (bucket.size_bytes, bucket.span):
            raise InvariantError("g", f"{bucket} reported, but it is {size} bytes, span {span}")
        if len({(m.key, m.backward) for m in group}) != 1:
            raise InvariantError("g", f"keys or phases differ: {bucket}")
        leaders = {bucket_of.get(scatter_of.get(m.index, -1)) for m in group}
        if len(leaders) == 1 and None not in leaders:
            continue
        if bucket.label and options.bucket_cap_mb is None:
            continue
        bound = options.max_topo_span if not bucket.label else None
        if bound is not None and span > bound:
            raise InvariantError("g", f"span {span} above {bound}: {bucket}")
        key = group[0].key
        assert key is not None
        phase = (key, group[0].backward)
        index = count_of_key[phase] = count_of_key.get(phase, -1) + 1
        most = max(c.size_bytes for c in collectives if c.key == key)
        caps = [cap_bytes(options.bucket_cap_mb, i, key, most) for i in range(index, index + 8)]
        if options.bucketing_mode == "auto" and options.bucket_cap_mb is None:
            caps.append(int(max(CAPS_MB) * 2**20))
        if size > max(caps):
            raise InvariantError("g", f"{size} bytes above {caps}: {bucket}")


# ---------------------------------------------------------------- (d) time and memory


def _check_promises(report: Report, options: Options) -> None:
    """No slower than the input, and no more memory than the cap allows, by the estimates."""
    if report.total_ms_after > report.total_ms_before + 1e-6:
        raise InvariantError("d", f"{report.total_ms_before} -> {report.total_ms_after} ms")
    for before, after in (
        (report.peak_bytes_before, report.peak_bytes_after),
        (report.held_peak_bytes_before, report.held_peak_bytes_after),
    ):
        limit = memory_limits(options, before).peak_bytes
        if after > limit:
            raise InvariantError("d", f"peak {after}, the limit is {limit}")


# ---------------------------------------------------------------- (c), (e) the same again


def _text(gm: fx.GraphModule) -> str:
    return str(gm.graph)


def _check_repeatable(gm: fx.GraphModule, after: fx.GraphModule, options: Options) -> None:
    again = copy.deepcopy(gm)
    run_strictly(again, options)
    text = _text(after)
    if _text(again) != text:
        raise InvariantError("e", f"two runs differ:\n{text}\n{_text(again)}")
    report = run_strictly(after, options)
    if report is not None and report.buckets:
        raise InvariantError("e", f"a second run made {report.buckets}")
    if _text(after) != text:
        raise InvariantError("e", f"a second run changed the graph:\n{text}\n{_text(after)}")


def _check_variant(
    gm: fx.GraphModule, options: Options, report: Report | None, members: list[list[int]]
) -> None:
    """Names, views and dict orders decide nothing."""
    variant = vary(gm, Random(len(gm.graph.nodes)))
    numbers = {c.start.name: c.index for c in collect(variant.graph).collectives}
    other = run_strictly(variant, options)
    if report is None or other is None:
        if report is not other:
            raise InvariantError("c", "one variant has a report and the other has none")
        return
    found = [[numbers[name] for name in bucket.members] for bucket in other.buckets]
    if found != members:
        raise InvariantError("c", f"buckets {members}, but {found} in a variant\n{_text(variant)}")
    if other.schedule_hash != report.schedule_hash:
        launches: Mapping[str, int] = report.collectives_after
        raise InvariantError("c", f"another launch order ({launches}) in\n{_text(variant)}")
