"""``python -m torch_patches`` is the command ``torch-patches``."""

from __future__ import annotations

import sys

from torch_patches.cli import main

if __name__ == "__main__":
    sys.exit(main())
