"""Both runs as one SVG for a page or a README: ``draw(picture, report) -> str``.

One lane shows compute, in the shade of the block that made it, red where it stands still for a
collective; one lane each process group; below are live bytes, and the cap as a dashed line.  Unlike
the HTML page (``page.py``) it needs no script, so it has no names of kernels and does not zoom.
Equal pictures give equal text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import clean_parameter_name
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.viewing.picture import Flight, Kernel, MemoryPoint, Picture, Run
from torch_patches.viewing.text import mib, run_title

#: Pixels: of the picture, around it, and for the names of lanes.
WIDTH, MARGIN, NAMES = 1000, 12, 110
LANE, GAP, TITLE, AXIS, MEMORY = 26, 6, 24, 22, 40
#: Pixels of a letter, to tell whether a text fits.
CHARACTER = 6.8

#: Shades that take turns from one block to the next.
COMPUTE = ("#9db8d9", "#c9d8ea")
KINDS = {
    "all_gather": "#8fc98f",
    "reduce_scatter": "#f0b35f",
    "all_reduce": "#c79be0",
    "all_to_all": "#d9c07c",
}
OTHER_KIND, STANDS, LIVE, INK = "#cccccc", "#e05252", "#e4e4e4", "#222222"


@dataclass(frozen=True)
class Bar:
    """A piece of a lane."""

    start_ms: float
    end_ms: float
    text: str
    colour: str


@dataclass(frozen=True)
class _Scale:
    """From ms and bytes to pixels."""

    longest_ms: float
    most_bytes: int

    @property
    def pixel_ms(self) -> float:
        return self.longest_ms / (WIDTH - 2 * MARGIN - NAMES)

    def x(self, ms: float) -> float:
        return MARGIN + NAMES + ms / self.pixel_ms

    def height(self, live_bytes: int) -> float:
        return MEMORY * live_bytes / self.most_bytes


def draw(picture: Picture, report: Report) -> str:
    """The runs below each other, on one scale of time and one of bytes.

    Args:
        report: whose buckets have names.
    """
    runs = {"before": picture.before, f"after {report.mode}": picture.after}
    scale = _Scale(
        max(*(run.total_ms for run in runs.values()), 1e-9),
        max(*(run.peak_bytes for run in runs.values()), picture.cap_bytes, 1),
    )
    blocks: list[str] = []
    body: list[str] = []
    top = float(MARGIN)
    for name, run in runs.items():
        body.append(_text(MARGIN, top + 14, run_title(name, run), " font-weight='bold'"))
        top += TITLE
        for lane, bars in lanes_of(run, report, scale.pixel_ms, blocks).items():
            body.append(_text(MARGIN, top + LANE / 2 + 4, lane))
            body.extend(piece for bar in bars for piece in _bar(bar, top, scale))
            top += LANE + GAP
        body.extend(_memory(run, picture.cap_bytes, top, scale))
        top += MEMORY + 2 * GAP
    body.extend(_axis(top, scale))
    top += AXIS
    body.extend(_legend(top, _kinds(runs.values())))
    height = top + AXIS + MARGIN
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' "
        f"font-family='sans-serif' font-size='11' fill='{INK}'>"
        f"<rect width='{WIDTH}' height='{height:.0f}' fill='white'/>"
    )
    return "\n".join([head, *body, "</svg>\n"])


def lanes_of(
    run: Run, report: Report, pixel_ms: float, blocks: list[str]
) -> dict[str, Sequence[Bar]]:
    """Lanes from top to bottom.

    Args:
        pixel_ms: gaps between kernels of one block that are narrower are not left open.
        blocks: those known, for their shades; grows by those that are new.
    """
    stops = [Bar(stop.start_ms, stop.end_ms, "", STANDS) for stop in run.stops]
    kernels = [k for k in run.kernels if k.end_ms > k.start_ms]
    both = sorted([*_compute_bars(kernels, blocks), *stops], key=lambda bar: bar.start_ms)
    lanes: dict[str, Sequence[Bar]] = {"compute": _joined(both, pixel_ms)}
    for group in run.groups():
        flights = (flight for flight in run.flights if flight.launch.group == group)
        lanes[f"group {group}"] = [_flight_bar(flight, report) for flight in flights]
    return lanes


def block_of(module: str) -> str:
    """The repeated block that a module belongs to, up to its number; else the outermost module.

    ``L['self'].layers.0.attention.wq`` -> ``layers.0``, ``norm`` -> ``norm``.
    """
    steps = clean_parameter_name(module).split(".")
    number = next((i for i, step in enumerate(steps) if step.isdecimal()), 0)
    return ".".join(steps[: number + 1])


def _compute_bars(kernels: Iterable[Kernel], blocks: list[str]) -> Iterator[Bar]:
    """A bar for each kernel; one that knows no module counts to the block before."""
    block = ""
    for kernel in kernels:
        block = block_of(kernel.module) if kernel.module else block
        if block not in blocks:
            blocks.append(block)
        yield Bar(kernel.start_ms, kernel.end_ms, block, COMPUTE[blocks.index(block) % 2])


def _joined(bars: Iterable[Bar], pixel_ms: float) -> list[Bar]:
    """Bars of one text and colour in a row as one, where no gap is to be seen between them."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        alike = last and (last.text, last.colour) == (bar.text, bar.colour)
        if last and alike and bar.start_ms - last.end_ms < pixel_ms:
            found[-1] = replace(last, end_ms=bar.end_ms)
        else:
            found.append(bar)
    return found


def _flight_bar(flight: Flight, report: Report) -> Bar:
    launch = flight.launch
    named = launch.bucket is not None and launch.bucket < len(report.buckets)
    text = report.buckets[launch.bucket].label if named and launch.bucket is not None else ""
    colour = KINDS.get(launch.kind, OTHER_KIND)
    return Bar(flight.start_ms, flight.end_ms, text, colour)


def _kinds(runs: Iterable[Run]) -> list[str]:
    return sorted({flight.launch.kind for run in runs for flight in run.flights})


# -- SVG ------------------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}'{more}>{escape(text)}</text>"


def _bar(bar: Bar, top: float, scale: _Scale) -> Iterator[str]:
    left = scale.x(bar.start_ms)
    width = max((bar.end_ms - bar.start_ms) / scale.pixel_ms, 0.3)
    edge = " stroke='white' stroke-width='0.5'" if width > 2 else ""
    yield (
        f"<rect x='{left:.1f}' y='{top:.1f}' width='{width:.1f}' height='{LANE}' "
        f"fill='{bar.colour}'{edge}/>"
    )
    if bar.text and len(bar.text) * CHARACTER < width:
        yield _text(left + width / 2, top + LANE / 2 + 4, bar.text, " text-anchor='middle'")


def _memory(run: Run, cap_bytes: int, top: float, scale: _Scale) -> Iterator[str]:
    """Live bytes as an area, with its peak in words, and the cap."""
    bottom = top + MEMORY
    yield _text(MARGIN, top + 12, "live bytes")
    yield _text(MARGIN, top + 26, f"peak {mib(run.peak_bytes)}")
    steps = [f"M{scale.x(0):.1f} {bottom:.1f}"]
    for ms, live_bytes in _most_by_pixel(run.memory, scale.pixel_ms):
        steps.append(f"H{scale.x(ms):.1f}V{bottom - scale.height(live_bytes):.1f}")
    steps.append(f"H{scale.x(run.total_ms):.1f}V{bottom:.1f}Z")
    yield f"<path d='{''.join(steps)}' fill='{LIVE}'/>"
    cap = bottom - scale.height(cap_bytes)
    yield (
        f"<path d='M{scale.x(0):.1f} {cap:.1f}H{scale.x(run.total_ms):.1f}' "
        f"stroke='{INK}' stroke-dasharray='4 3' stroke-width='0.7'/>"
    )


def _most_by_pixel(points: Sequence[MemoryPoint], pixel_ms: float) -> Iterator[tuple[float, int]]:
    """Of the points of one pixel the highest, at the first one's time."""
    for _, same in itertools.groupby(points, key=lambda point: int(point.ms / pixel_ms)):
        together = list(same)
        yield together[0].ms, max(point.live_bytes for point in together)


def _axis(top: float, scale: _Scale) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten, at most ten of them."""
    steps = (m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5))
    step = next(s for s in steps if scale.longest_ms / s <= 10)
    for number in range(int(scale.longest_ms / step) + 1):
        x = scale.x(number * step)
        yield f"<path d='M{x:.1f} {top:.1f}v4' stroke='{INK}'/>"
        yield _text(x, top + 15, f"{number * step:g} ms", " text-anchor='middle'")


def _legend(top: float, kinds: Sequence[str]) -> Iterator[str]:
    entries = {"compute, by block": COMPUTE[0], "stands still": STANDS}
    entries |= {kind.replace("_", "-"): KINDS.get(kind, OTHER_KIND) for kind in kinds}
    left = float(MARGIN + NAMES)
    for text, colour in {**entries, "live bytes, cap dashed": LIVE}.items():
        yield f"<rect x='{left:.1f}' y='{top + 6:.1f}' width='12' height='12' fill='{colour}'/>"
        yield _text(left + 17, top + 16, text)
        left += 40 + len(text) * CHARACTER
