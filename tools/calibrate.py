#!/usr/bin/env python
"""Measures this machine and writes a calibration table: ``torch-patches calibrate``, uninstalled.

torchrun --nproc-per-node 8 tools/calibrate.py h100.json                # one node
torchrun --nnodes 2 --nproc-per-node 8 ... tools/calibrate.py h100.json # links across nodes too
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_patches import cli


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(["calibrate", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
