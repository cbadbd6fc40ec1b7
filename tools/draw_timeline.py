#!/usr/bin/env python
"""Draw the estimated run of a captured graph, before and after a bucketing mode, as SVG.

    python tools/draw_timeline.py llama.json.gz --graph fw --mode transformer_block -o fw.svg

Files come from tools/capture_graph.py.  One lane shows compute, one each process group.  Compute has
the shade of its module bucket; where it stands still for a collective the lane is red.  CPU graphs
are judged as those of GPUs.  Equal file, equal picture.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch.fx as fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_patches import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    RuntimeModel,
    make_model,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import Lanes, launches_of
from torch_patches._inductor.fx_passes.comm_overlap.forecast import Forecast, forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK, collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import read_node_stacks
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_labels import label_collectives
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlan, parse_plan
from torch_patches.captured import CaptureFormatError, load_captured
from torch_patches.testing.backends import as_on_gpu

MODES = ("transformer_block", "topo_span", "auto")

WIDTH, MARGIN, NAMES = 1000, 12, 110
"""Pixels: of the picture, around it, and for the names of lanes."""
LANE, GAP, TITLE, AXIS = 26, 6, 24, 22
CHARACTER = 6.2
"""Pixels of a letter, to tell whether a text fits."""

COMPUTE = ("#9db8d9", "#c9d8ea")
"""Shades that take turns from one module to the next."""
KINDS = {"all_gather": "#8fc98f", "reduce_scatter": "#f0b35f", "all_reduce": "#c79be0"}
OTHER_KIND, STANDS, INK = "#cccccc", "#e05252", "#222222"


@dataclass(frozen=True)
class Bar:
    """A piece of a lane, in ms."""

    start_ms: float
    end_ms: float
    text: str
    colour: str


@dataclass(frozen=True)
class Picture:
    """One run: lanes from top to bottom."""

    title: str
    total_ms: float
    lanes: Mapping[str, Sequence[Bar]]


# -- reading --------------------------------------------------------------------------------------


class RecordingLanes(Lanes):
    """Keeps when each kernel ran, and when compute stood still for a collective."""

    def __init__(self, model: RuntimeModel) -> None:
        super().__init__(model)
        self.kernels: list[tuple[fx.Node, float, float]] = []
        self.stops: list[tuple[float, float]] = []

    def compute(self, node: fx.Node, cost: ComputeCost) -> None:
        free = self.compute_free
        super().compute(node, cost)
        self.kernels.append((node, max(free, self.host), self.compute_free))


def run_again(found: Forecast) -> RecordingLanes:
    """The simulated run of a forecast, kernel by kernel."""
    lanes = RecordingLanes(found.model)
    launches = launches_of(found.skeleton, found.model)
    for node in found.order:
        if node in launches.starts:
            lanes.start(launches.starts[node])
        elif node in launches.waits:
            before = lanes.exposed_ms
            lanes.wait(launches.waits[node])
            if (stood := lanes.exposed_ms - before) > 0:
                lanes.stops.append((lanes.compute_free - stood, lanes.compute_free))
        elif node in found.costs:
            lanes.compute(node, found.costs[node])
    return lanes


def module_of_nodes(found: Forecast, plan: ModulePlan | None) -> dict[fx.Node, str]:
    """Module bucket of each node that knows its modules; of others that of the node before."""
    stacks = read_node_stacks(found.skeleton, found.order)
    labels: dict[fx.Node, str] = {}
    label = ""
    for node in found.order:
        names = [name for scope in reversed(stacks.get(node, ())) for name in scope.names]
        known = [plan.bucket_of(name) for name in names] if plan is not None else []
        label = next((name for name in known if name is not None), label)
        labels[node] = label
    return labels


def compute_bars(
    lanes: RecordingLanes, label_of: Mapping[fx.Node, str], order: list[str]
) -> list[Bar]:
    """Kernels of one module in a row are one bar.

    Args:
        order: of the modules, for their shades; grows by those that are new.
    """
    bars: list[Bar] = []
    for node, start, end in lanes.kernels:
        label = label_of[node]
        gap = bool(bars) and any(bars[-1].end_ms <= a < start + 1e-9 for a, _ in lanes.stops)
        if bars and bars[-1].text == label and not gap:
            bars[-1] = Bar(bars[-1].start_ms, end, label, bars[-1].colour)
            continue
        if label not in order:
            order.append(label)
        bars.append(Bar(start, end, label, COMPUTE[order.index(label) % 2]))
    stops = [Bar(start, end, "", STANDS) for start, end in lanes.stops]
    return sorted([*bars, *stops], key=lambda bar: bar.start_ms)


def picture(
    title: str,
    found: Forecast,
    names: Mapping[fx.Node, str],
    plan: ModulePlan | None,
    order: list[str],
) -> Picture:
    """Args:
    names: of the starts of collectives, for people.
    order: of the modules, see :func:`compute_bars`.
    """
    lanes = run_again(found)
    labels = module_of_nodes(found, plan)
    bars: dict[str, list[Bar]] = {"compute": compute_bars(lanes, labels, order)}
    for span in found.timeline.spans:
        kind = span.collective.kind.value
        bar = Bar(span.start_ms, span.end_ms, names.get(span.collective.start, ""),
                  KINDS.get(kind, OTHER_KIND))  # fmt: skip
        bars.setdefault(f"group {span.collective.group}", []).append(bar)
    timeline = found.timeline
    text = (
        f"{title}: {timeline.total_ms:.2f} ms, compute stands still for {timeline.exposed_ms:.2f} ms, "
        f"{len(timeline.spans)} launches"
    )
    return Picture(text, timeline.total_ms, bars)


def draw_graph(graph: fx.GraphModule, mode: str) -> str:
    """Changes ``graph``, and gives the picture of both runs."""
    model = make_model()
    with as_on_gpu():
        skeleton = collect(graph.graph)
        before = forecast(graph.graph, skeleton, model)
        labels = label_collectives(skeleton, Options("transformer_block"))
        plan = parse_plan(labels.entries) if labels.entries else None
        names = {c.start: labels.of.get(c.index, "") for c in skeleton.collectives}
        order: list[str] = []
        first = picture("before", before, names, plan, order)
        report = optimize_graph(graph, bucketing_mode=mode)
        after = forecast(graph.graph, collect(graph.graph), model)
        for collective in after.skeleton.collectives:
            if (mark := collective.start.meta.get(BUCKET_MARK)) is not None:
                names[collective.start] = report.buckets[mark["bucket"]].label
        return draw([first, picture(mode, after, names, plan, order)])


# -- drawing --------------------------------------------------------------------------------------


def draw(pictures: Sequence[Picture]) -> str:
    """The runs below each other, on one scale of time."""
    longest = max(max(p.total_ms for p in pictures), 1e-9)
    scale = (WIDTH - 2 * MARGIN - NAMES) / longest
    body: list[str] = []
    top = float(MARGIN)
    for each in pictures:
        body.append(_text(MARGIN, top + 14, each.title, "font-weight='bold'"))
        top += TITLE
        for lane, bars in each.lanes.items():
            body.append(_text(MARGIN, top + LANE / 2 + 4, lane))
            body.extend(piece for bar in bars for piece in _bar(bar, top, scale))
            top += LANE + GAP
        top += GAP
    body.extend(_axis(top, longest, scale))
    top += AXIS
    body.extend(_legend(top))
    height = top + AXIS + MARGIN
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' "
        f"font-family='sans-serif' font-size='11' fill='{INK}'>"
        f"<rect width='{WIDTH}' height='{height:.0f}' fill='white'/>"
    )
    return "\n".join([head, *body, "</svg>\n"])


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escape(text)}</text>".replace(" >", ">")


def _bar(bar: Bar, top: float, scale: float) -> Iterator[str]:
    left = MARGIN + NAMES + bar.start_ms * scale
    width = max((bar.end_ms - bar.start_ms) * scale, 0.3)
    edge = "stroke='white' stroke-width='0.5'" if width > 2 else ""
    yield (
        f"<rect x='{left:.1f}' y='{top:.1f}' width='{width:.1f}' height='{LANE}' "
        f"fill='{bar.colour}' {edge}/>"
    ).replace(" /", "/")
    if bar.text and len(bar.text) * CHARACTER < width:
        yield _text(left + width / 2, top + LANE / 2 + 4, bar.text, "text-anchor='middle'")


def _axis(top: float, longest: float, scale: float) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten, at most ten of them."""
    steps = (m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5))
    step = next(s for s in steps if longest / s <= 10)
    for number in range(int(longest / step) + 1):
        x = MARGIN + NAMES + number * step * scale
        yield f"<path d='M{x:.1f} {top:.1f}v4' stroke='{INK}'/>"
        yield _text(x, top + 15, f"{number * step:g} ms", "text-anchor='middle'")


def _legend(top: float) -> Iterator[str]:
    entries = {"compute, by module": COMPUTE[0], "stands still": STANDS}
    entries |= {kind.replace("_", "-"): colour for kind, colour in KINDS.items()}
    left = float(MARGIN + NAMES)
    for text, colour in entries.items():
        yield f"<rect x='{left:.1f}' y='{top + 6:.1f}' width='12' height='12' fill='{colour}'/>"
        yield _text(left + 17, top + 16, text)
        left += 40 + len(text) * CHARACTER


# -- command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with a line on what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="of capture_graph.py")
    parser.add_argument("--graph", choices=("fw", "bw"), default="fw")
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write, *.svg")
    options = parser.parse_args(argv)
    try:
        graphs = load_captured(options.file).graphs
        if options.graph not in graphs:
            raise CaptureFormatError(f"no graph {options.graph!r}, only {', '.join(graphs)}")
        drawn = draw_graph(graphs[options.graph], options.mode)
        options.output.write_text(drawn, encoding="utf-8")
    except (OSError, CaptureFormatError) as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
