#!/usr/bin/env python
"""Draw the estimated run of a captured graph, before and after a bucketing mode, as SVG.

    python tools/draw_timeline.py docs/data/llama8b_4l_fsdp8.json.gz --graph bw -o timeline.svg

The pictures of the README and the docs are made by it.  Files come from tools/capture_graph.py or
``torch-patches capture``.  CPU graphs are judged as those of GPUs.  Equal file, equal picture.  To look
closer: ``torch-patches report FILE``, whose page zooms.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_patches import optimize_graph
from torch_patches.captured import CaptureFormatError, load_captured
from torch_patches.testing.backends import as_on_gpu
from torch_patches.viewing.svg import draw

MODES = ("auto", "transformer_block", "topo_span")


def draw_file(path: Path, graph: str, mode: str) -> str:
    """The picture of one graph of a captured file.

    Raises:
        OSError: the file cannot be read.
        CaptureFormatError: it is none, or has no such graph, or nothing in it communicates.
    """
    graphs = load_captured(path).graphs
    if graph not in graphs:
        raise CaptureFormatError(f"no graph {graph!r}, only {', '.join(graphs)}")
    with as_on_gpu():
        report = optimize_graph(graphs[graph], bucketing_mode=mode)
    picture = getattr(report.story, "picture", None)
    if picture is None:
        raise CaptureFormatError(f"graph {graph!r} has no collectives to draw")
    return draw(picture, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with a line on what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a captured file")
    parser.add_argument("--graph", default="fw", help="fw, bw, ... (default fw)")
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write, *.svg")
    options = parser.parse_args(argv)
    try:
        drawn = draw_file(options.file, options.graph, options.mode)
        options.output.write_text(drawn, encoding="utf-8")
    except (OSError, CaptureFormatError) as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
