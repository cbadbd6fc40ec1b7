"""The stories of collectives: ``tell(report, record, name) -> (NodeStory, ...)``.

A node's name has one; a parameter's has one for each collective that gathers or reduces it.  What it is, what it carries and who says so; the bucket it went into, or why it went into none; when
it runs and what hides it; what would have to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_patches._inductor.fx_passes.comm_overlap.plan import Refusal, RefusalReason, TagSource
from torch_patches._inductor.fx_passes.comm_overlap.report import (
    BucketReport,
    FusionReport,
    Report,
)
from torch_patches.viewing.picture import Flight
from torch_patches.viewing.record import LaunchRecord, StoryRecord
from torch_patches.viewing.text import mib, ms

_TOLD_BY = {
    TagSource.DESCRIPTORS.value: "descriptors of AOT export say so",
    TagSource.DYNAMO.value: "Dynamo's names of the inputs say so",
    TagSource.STRUCTURE.value: "the structure around it says so",
    TagSource.UNTOLD.value: "nobody says so: the graph is inside another one",
}

#: What would have to change for a merge; a reason that is not here cannot be changed by a flag.
_MERGE_ADVICE: Mapping[RefusalReason, str] = {
    RefusalReason.NOT_PARAMETER_TRAFFIC: (
        "nothing, if it carries activations; if it carries a parameter, the input it comes from "
        "must be one for AOT autograd"
    ),
    RefusalReason.NOT_PRIMARY_GROUP: "primary_fsdp_group_only = False",
    RefusalReason.ALONE_IN_KEY: "another collective of the same group, dtype and op",
    RefusalReason.ALONE_IN_MODULE: "a module bucket with more than one module (module_bucket_plans)",
    RefusalReason.LEFT_OVER: "a larger bucket_cap_mb or max_topo_span",
    RefusalReason.NOT_IN_PLAN: "an entry of module_bucket_plans, or module_uncovered = 'bucket'",
    RefusalReason.SYMBOLIC_SIZE: "static shapes, or a backend that has the coalesced form (NCCL)",
    RefusalReason.BYTE_CAP: "a larger bucket_cap_mb",
    RefusalReason.FIRST_BUCKET: "bucket_cap_mb as a list, whose first value is the first bucket's",
    RefusalReason.SPAN_CAP: "a larger max_topo_span",
    RefusalReason.MEMORY: "a larger max_memory_increase_gb / max_memory_increase_ratio",
    RefusalReason.COPIES: "bucket_mode = 'coalesced', which copies nothing",
    RefusalReason.PREFETCH: "a larger max_compute_pre_fetch",
    RefusalReason.NOT_BETTER: "nothing: merged, the run would not be faster by the estimates",
    RefusalReason.CHAIN_NO_GROUP: "create_flattened_groups = True",
    RefusalReason.MUTATES_ARGUMENT: "the functional form of the collective",
    RefusalReason.ALREADY_CONSIDERED: "other options than those of the earlier run",
}


class NoSuchCollectiveError(ValueError):
    """The graph has no collective of this name; the text has names that are near."""


@dataclass(frozen=True)
class NodeStory:
    """One collective of the graph as it was given, or of the result.

    Args:
        name: of its start.
        launch: what it is.
        bucket: what it is merged into, or is; None where it is no part of one.
        fusion: the chain that became one collective with it, before anything was merged.
        refusals: why it is in none.
        before, after: its flight in each run; None where it is not launched there.
        what_would_have_to_change: sentences; empty where all is well.
    """

    name: str
    launch: LaunchRecord
    bucket: BucketReport | None
    refusals: tuple[Refusal, ...]
    before: Flight | None
    after: Flight | None
    what_would_have_to_change: tuple[str, ...]
    fusion: FusionReport | None = None

    def lines(self) -> list[str]:
        """For people."""
        return [*_what(self), *_merged(self), *_when(self), *_changes(self)]


def tell(report: Report, record: StoryRecord, name: str) -> tuple[NodeStory, ...]:
    """The stories of what ``name`` starts or waits for, or of all that gathers or reduces the
    parameter of this name, in the order of the graph.

    Raises:
        NoSuchCollectiveError: there is none.
    """
    picture = record.picture
    before = {flight.launch.start: flight for flight in picture.before.flights}
    after = {flight.launch.start: flight for flight in picture.after.flights}
    starts = _starts_of(record, name, [*before, *after])
    return tuple(_story(report, start, before, after) for start in starts)


def _story(
    report: Report, start: str, before: Mapping[str, Flight], after: Mapping[str, Flight]
) -> NodeStory:
    fusion = next((fusion for fusion in report.fusions if start in fusion.members), None)
    stays = start if fusion is None else fusion.members[-1]  # a chain's last one is what is left
    was, launched = before.get(start), after.get(stays)
    number, bucket = _bucket_of(report, stays, launched)
    if launched is None and number is not None:
        launched = next(f for f in after.values() if f.launch.bucket == number)
    refusals = tuple(r for r in report.refusals if {start, stays} & set(r.members))
    found = was or launched
    assert found is not None
    changes = [
        advice
        for refusal in (refusals if bucket is None else ())
        if (advice := _MERGE_ADVICE.get(refusal.reason))
    ]
    if launched is not None and launched.exposure is not None:
        changes.append(launched.exposure.reason.advice)
    return NodeStory(
        start, found.launch, bucket, refusals, was, launched, tuple(dict.fromkeys(changes)), fusion
    )


def _bucket_of(
    report: Report, start: str, launched: Flight | None
) -> tuple[int | None, BucketReport | None]:
    number = next((i for i, b in enumerate(report.buckets) if start in b.members), None)
    if number is None and launched is not None:
        number = launched.launch.bucket
    return number, None if number is None else report.buckets[number]


def _starts_of(record: StoryRecord, name: str, starts: Sequence[str]) -> list[str]:
    if name in starts:
        return [name]
    for run in (record.before, record.after):
        for launch in run.launches:
            if name in (run.names[wait] for wait in launch.waits):
                return [launch.start]
    parameters = {launch.start: launch.parameter for launch in record.before.launches}
    if name and name in parameters.values():
        return [start for start, parameter in parameters.items() if parameter == name]
    if name in record.before.names:
        raise NoSuchCollectiveError(f"{name} is no collective and waits for none")
    known = list(dict.fromkeys([*starts, *filter(None, parameters.values())]))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known[:3]
    raise NoSuchCollectiveError(
        f"no collective or parameter {name}; there are {', '.join(near)}, ..."
    )


# -- text -----------------------------------------------------------------------------------------


def _what(story: NodeStory) -> Iterator[str]:
    launch = story.launch
    ranks = f" ({launch.group_size} ranks)" if launch.group_size else ""
    op = f", {launch.reduce_op}" if launch.reduce_op else ""
    yield (
        f"{story.name}: {launch.kind} of {mib(launch.size_bytes)} {launch.dtype}{op} on group "
        f"{launch.group}{ranks}"
    )
    carries = {"parameter": "a parameter", "gradient": "a gradient"}.get(
        launch.traffic, "neither a parameter nor a gradient"
    )
    name = f" ({launch.parameter})" if launch.parameter else ""
    told = _TOLD_BY.get(launch.told_by, "there are no tags, so the structure around it says so")
    yield f"  carries {carries}{name}: {told}"


def _merged(story: NodeStory) -> Iterator[str]:
    bucket, fusion = story.bucket, story.fusion
    if fusion is not None:
        yield (
            f"  is one with {len(fusion.members) - 1} chained to it: {fusion.kind} of "
            f"{fusion.group_size} ranks on group {fusion.group} instead of {', '.join(fusion.members)}"
        )
    if bucket is not None:
        bucket_name = f"bucket {bucket.label}" if bucket.label else "a bucket"
        is_it = "is" if story.before is None else "is merged into"
        yield (
            f"  {is_it} {bucket_name}: {len(bucket.members)} collectives, "
            f"{mib(bucket.size_bytes)}, form {bucket.form}, span {bucket.span}, closed by "
            f"{bucket.close_reason}"
        )
        yield f"    {', '.join(bucket.members[:6])}{', ...' if len(bucket.members) > 6 else ''}"
        return
    for refusal in story.refusals:
        detail = f" ({refusal.detail})" if refusal.detail else ""
        yield f"  is not merged, because {refusal.reason.value}{detail}"
    if not story.refusals:
        yield "  is not merged"


def _when(story: NodeStory) -> Iterator[str]:
    for title, flight in (("before", story.before), ("after", story.after)):
        if flight is None:
            continue
        launched = f" as {flight.launch.start}" if flight.launch.start != story.name else ""
        yield (
            f"  {title}: runs{launched} from {ms(flight.start_ms)} to {ms(flight.end_ms)}, "
            f"{ms(flight.hidden_ms)} of it hidden, {ms(flight.exposed_ms)} exposed"
        )
        if flight.hidden_by:
            hiding = ", ".join(f"{name} {ms(time)}" for name, time in flight.hidden_by[:4])
            yield f"    hidden by {hiding}"
        if flight.exposure is not None:
            detail = f" ({flight.exposure.detail})" if flight.exposure.detail else ""
            yield f"    exposed, because {flight.exposure.reason.value}{detail}"


def _changes(story: NodeStory) -> Iterator[str]:
    for sentence in story.what_would_have_to_change:
        yield f"  what would have to change: {sentence}"
