"""The story of one collective, found by any of its names."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from torch_patches import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches._inductor.fx_passes.comm_overlap.report import FusionReport, Report
from torch_patches.captured import load_captured
from torch_patches.viewing.node_story import NodeStory, NoSuchCollectiveError, tell

pytestmark = pytest.mark.usefixtures("as_on_gpu")
LLAMA = Path(__file__).parents[1] / "data" / "llama_8l_fsdp8.json.gz"


@pytest.fixture(scope="module")
def report(as_on_gpu: None) -> Report:
    return optimize_graph(load_captured(LLAMA).graphs["bw"], bucketing_mode="transformer_block")


def story(report: Report, name: str) -> NodeStory:
    (found,) = stories(report, name)
    return found


def stories(report: Report, name: str) -> tuple[NodeStory, ...]:
    record: Any = report.story
    return tell(report, record, name)


def test_a_member_is_followed_into_its_bucket(report: Report) -> None:
    bucket = report.buckets[2]
    found = story(report, bucket.members[1])
    assert found.bucket == bucket and found.refusals == ()
    assert found.before is not None and found.after is not None
    assert found.before.launch.start == bucket.members[1]
    assert found.after.launch.bucket == 2
    text = "\n".join(found.lines())
    assert bucket.label in text and f"{len(bucket.members)} collectives" in text
    assert found.after.launch.start in text and bucket.close_reason in text
    for name, _ in found.after.hidden_by[:4]:
        assert name in text


def test_a_bucket_and_a_wait_are_names_too(report: Report) -> None:
    record: Any = report.story
    made = next(x for x in record.after.launches if x.bucket == 1)
    found = story(report, made.start)
    assert found.before is None and found.bucket == report.buckets[1]
    assert "is bucket" in "\n".join(found.lines())
    wait = record.before.names[record.before.launches[4].waits[0]]
    assert story(report, wait).name == record.before.launches[4].start


def test_a_refusal_is_told_with_what_would_have_to_change(report: Report) -> None:
    refusal = report.refusals[0]
    found = story(report, refusal.members[0])
    assert found.bucket is None and refusal in found.refusals
    text = "\n".join(found.lines())
    assert refusal.reason.value in text
    capped = replace(report, refusals=(replace(refusal, reason=RefusalReason.BYTE_CAP),))
    assert "a larger bucket_cap_mb" in "\n".join(story(capped, refusal.members[0]).lines())


def test_an_exposed_one_says_why_and_what_would_change_it(report: Report) -> None:
    record: Any = report.story
    exposed = next(f for f in record.picture.after.flights if f.exposure is not None)
    found = story(report, exposed.launch.start)
    text = "\n".join(found.lines())
    assert exposed.exposure is not None
    assert exposed.exposure.reason.value in text
    assert exposed.exposure.reason.advice in found.what_would_have_to_change


def with_parameters(report: Report, names: list[str]) -> Report:
    record: Any = report.story
    launches = tuple(
        replace(launch, parameter=name, traffic="parameter", told_by="dynamo")
        for launch, name in zip(record.before.launches, names, strict=False)
    )
    return replace(report, story=replace(record, before=replace(record.before, launches=launches)))


def test_a_parameter_is_a_name_too(report: Report) -> None:
    named = with_parameters(report, ["layers.0.wq.weight", "tied", "tied"])
    record: Any = named.story
    first = record.before.launches[0].start
    found = story(named, "layers.0.wq.weight")
    assert found.name == first
    assert "carries a parameter (layers.0.wq.weight): Dynamo's names" in "\n".join(found.lines())


def test_a_parameter_has_a_story_for_each_collective(report: Report) -> None:
    """In the order of the graph: gathered in the forward, gathered again, reduced."""
    named = with_parameters(report, ["tied", "layers.0.wq.weight", "tied", "tied"])
    record: Any = named.story
    launches = record.before.launches
    assert [x.name for x in stories(named, "tied")] == [launches[i].start for i in (0, 2, 3)]
    assert [x.name for x in stories(named, launches[2].start)] == [launches[2].start]


def test_a_chain_is_followed_into_its_one_collective(report: Report) -> None:
    """Fused chains keep the name of their last one; that is what goes into a bucket."""
    bucket = report.buckets[2]
    record: Any = report.story
    first = record.before.launches[0].start
    chain = FusionReport("all_gather", "0", 8, (first, bucket.members[1]), 64)
    fused = replace(report, fusions=(chain,))
    found = story(fused, first)
    assert found.fusion == chain and found.bucket == bucket
    assert found.after is not None and found.after.launch.bucket == 2
    text = "\n".join(found.lines())
    assert f"all_gather of 8 ranks on group 0 instead of {first}, {bucket.members[1]}" in text
    merged = f"{len(bucket.members)} collectives, "
    assert bucket.label and f"is merged into bucket {bucket.label}: {merged}" in text
    unnamed = replace(fused, buckets=tuple(replace(each, label="") for each in fused.buckets))
    assert f"is merged into a bucket: {merged}" in "\n".join(story(unnamed, first).lines())


def test_unknown_names_get_near_ones(report: Report) -> None:
    with pytest.raises(NoSuchCollectiveError, match="reduce_scatter_tensor_1"):
        story(report, "reduce_scater_tensor_1")
    with pytest.raises(NoSuchCollectiveError, match=r"layers\.0\.wq\.weight"):
        stories(with_parameters(report, ["layers.0.wq.weight"]), "layers.0.wq.wieght")
    record: Any = report.story
    mm = next(n for n, op in zip(record.before.names, record.before.ops, strict=True) if op == "mm")
    with pytest.raises(NoSuchCollectiveError, match="is no collective"):
        story(report, mm)


def test_every_collective_has_a_story_that_is_json(report: Report) -> None:
    import json

    record: Any = report.story
    for launch in (*record.before.launches, *record.after.launches):
        found = story(report, launch.start)
        assert found.lines()[0].startswith(launch.start)
        json.dumps(asdict(found), default=lambda value: value.value)
