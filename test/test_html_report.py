"""The page and the trace: complete, the same each time, and safe whatever the graph's texts are."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from torch_patches import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import Refusal, RefusalReason
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.captured import load_captured
from torch_patches.viewing.chrome import trace_of
from torch_patches.viewing.page import Sheet, render, script_json, write_page
from torch_patches.viewing.picture import Picture
from torch_patches.viewing.timeline_data import timeline_data

pytestmark = pytest.mark.usefixtures("as_on_gpu")
LLAMA = Path(__file__).parent / "data" / "llama_8l_fsdp8.json.gz"
HOSTILE = "</script><script>alert(1)</script><!--\"'&<img src=x onerror=alert(2)>\u2028"


class Page(HTMLParser):
    """What a browser would see: elements, what they hold, and addresses that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.addresses: list[str] = []
        self.text = ""
        self._script: str | None = None
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        given = dict(attrs)
        self.addresses += [str(given[name]) for name in ("src", "href", "action") if name in given]
        assert not any(name.startswith("on") for name in given)
        self._inside = tag
        if tag == "script":
            self.scripts.append((given.get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self._inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def report(as_on_gpu: None) -> Report:
    return optimize_graph(load_captured(LLAMA).graphs["bw"], bucketing_mode="transformer_block")


def picture_of(report: Report) -> Picture:
    return Sheet.of(report).picture  # type: ignore[return-value]


def hostile(report: Report) -> Report:
    """The report with a name that is markup wherever a graph or a user may put one."""
    story: Any = report.story
    names = dict.fromkeys(story.after.names, HOSTILE)

    def renamed(run: Any) -> Any:
        launches = tuple(
            replace(x, start=HOSTILE, parameter=HOSTILE, group=HOSTILE, dtype=HOSTILE)
            for x in run.launches
        )
        return replace(
            run,
            names=tuple(names.get(n, n) for n in run.names),
            ops=tuple(HOSTILE for _ in run.ops),
            modules=dict.fromkeys(run.modules, HOSTILE),
            launches=launches,
        )

    buckets = tuple(
        replace(b, label=HOSTILE, group=HOSTILE, members=(HOSTILE,)) for b in report.buckets
    )
    return replace(
        report,
        buckets=buckets,
        refusals=(Refusal((HOSTILE,), RefusalReason.BYTE_CAP, HOSTILE),),
        groups_after=tuple(replace(g, group=HOSTILE) for g in report.groups_after),
        unmatched=(HOSTILE,),
        failure=HOSTILE,
        way=HOSTILE,
        schedule_hash=HOSTILE,
        story=replace(
            story,
            before=renamed(story.before),
            after=renamed(story.after),
            options={"bucketing_mode": HOSTILE},
            constants={HOSTILE: HOSTILE},
        ),
    )


def test_page_needs_no_network_and_runs_one_script(report: Report) -> None:
    page = Page(render([Sheet.of(report)]))
    assert [address for address in page.addresses if not address.startswith("data:")] == []
    kinds = [kind for kind, _ in page.scripts]
    assert kinds == ["application/json", None]
    text = render([Sheet.of(report)])
    assert not re.search(r"https?://|url\(|@import", text)
    digest = b64encode(hashlib.sha256(page.scripts[-1][1].encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in text or f"'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_page_tells_what_the_report_has(report: Report) -> None:
    page = Page(render([Sheet.of(report, "backward")]))
    for bucket in report.buckets:
        assert bucket.label in page.text
    for refusal in report.refusals:
        assert refusal.reason.value in page.text
    assert f"{report.total_ms_after:.3f} ms" in page.text
    assert report.schedule_hash in page.text
    picture = picture_of(report)
    for flight in picture.after.flights:
        if flight.exposure is not None:
            assert flight.exposure.reason.value in page.text
            assert flight.launch.start in page.text
    for name in (*picture.displaced, *picture.options, *picture.constants):
        assert name in page.text
    assert "float32" in page.text


def test_data_of_the_page_are_the_picture(report: Report) -> None:
    picture = picture_of(report)
    data = json.loads(Page(render([Sheet.of(report)])).scripts[0][1])
    assert data == json.loads(json.dumps(timeline_data(picture, report)))
    before, after = data["runs"]
    assert len(before["flights"]) == sum(report.collectives_before.values())
    assert len(after["flights"]) == sum(report.collectives_after.values())
    red = sum(end - start for start, end, _ in after["stops"])
    assert red == pytest.approx(report.exposed_ms_after, abs=1e-4)
    for run in (before, after):
        stood = [0.0] * len(run["flights"])
        for start, end, flight in run["stops"]:
            stood[flight] += end - start
        exposed = [flight["exposed"] for flight in run["flights"]]
        assert any(exposed) and stood == pytest.approx(exposed, abs=1e-5)
    merged = {f["name"]: f["bucket"] for f in before["flights"] if f["bucket"] is not None}
    assert merged == {m: i for i, b in enumerate(report.buckets) for m in b.members}
    assert {f["bucket"] for f in after["flights"]} - {None} == set(range(len(report.buckets)))


def test_hostile_texts_stay_texts(report: Report) -> None:
    """The elements are those of the same page with harmless names, and the name is read as text."""
    bad = hostile(report)
    page, plain = Page(render([Sheet.of(bad, HOSTILE)], HOSTILE)), Page(render([Sheet.of(report)]))
    assert set(page.elements) == set(plain.elements) | {"p"}
    assert page.elements.count("script") == 2 and "img" not in page.elements
    assert HOSTILE in page.text
    data = json.loads(page.scripts[0][1])
    assert HOSTILE in data["names"] and data["runs"][1]["flights"][0]["name"] == HOSTILE
    assert page.scripts[1] == plain.scripts[1]


def test_json_in_a_script_cannot_end_it() -> None:
    text = script_json([HOSTILE, "<!--", "]]>"])
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == [HOSTILE, "<!--", "]]>"]


def test_equal_reports_give_equal_files(report: Report, tmp_path: Path) -> None:
    again = optimize_graph(load_captured(LLAMA).graphs["bw"], bucketing_mode="transformer_block")
    for number, each in enumerate((report, again)):
        each.to_html(tmp_path / f"{number}.html")
        each.to_chrome_trace(tmp_path / f"{number}.json")
    for kind in ("html", "json"):
        first, second = ((tmp_path / f"{n}.{kind}").read_bytes() for n in (0, 1))
        assert first == second and len(first) > 10_000


def test_two_graphs_are_two_sheets(report: Report, tmp_path: Path) -> None:
    forward = optimize_graph(load_captured(LLAMA).graphs["fw"])
    write_page([Sheet.of(forward, "forward"), Sheet.of(report, "backward")], tmp_path / "x.html")
    page = Page((tmp_path / "x.html").read_text())
    assert page.elements.count("section") == 2 and page.elements.count("nav") == 1
    assert "forward" in page.text and "backward" in page.text


def test_a_report_without_a_picture_has_tables_only() -> None:
    page = Page(render([Sheet.of(Report("auto", failure="it broke"))]))
    assert "it broke" in page.text
    assert [kind for kind, _ in page.scripts] == [None] and "canvas" not in page.elements


def test_trace_events(report: Report) -> None:
    trace = trace_of(picture_of(report), report)
    assert json.loads(json.dumps(trace)) == trace
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(spans, key=lambda e: e["ts"]):
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(lane, 0.0) - 1e-6  # lanes hold one thing at a time
        ends[lane] = event["ts"] + event["dur"]
        assert lane in lanes
    for process, exposed in ((1, report.exposed_ms_before), (2, report.exposed_ms_after)):
        stood = [
            e["dur"]
            for e in spans
            if lanes[e["pid"], e["tid"]] == "stands still" and e["pid"] == process
        ]
        assert sum(stood) == pytest.approx(exposed * 1e3)
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(e["args"]["live MiB"] for e in counters) * 2**20 == report.peak_bytes_after
