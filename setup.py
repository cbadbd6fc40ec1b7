"""Packaging.  torch is never imported here, so the package installs before or after it."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"', (ROOT / "torch_patches" / "__init__.py").read_text(), re.MULTILINE
)
assert VERSION is not None

setup(
    name="torch_patches",
    version=VERSION[1],
    description="Bucketing and overlap of collectives in compiled PyTorch programs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.11",
    packages=find_packages(include=["torch_patches", "torch_patches.*"]),
    package_data={"torch_patches": ["py.typed", "viewing/templates/*"]},
    install_requires=["torch>=2.11"],
    entry_points={
        "console_scripts": ["torch-patches = torch_patches.cli:main"],
        # torch.compile(backend="aot_eager_comm_overlap") finds it without an import of ours.
        "torch_dynamo_backends": [
            "aot_eager_comm_overlap = torch_patches.backend:aot_eager_comm_overlap",
        ],
    },
    extras_require={
        "test": [
            "expecttest>=0.3,<1",
            "hypothesis>=6.100,<7",
            "mypy>=1.15,<3",
            "numpy>=1.26,<3",
            "pytest>=9,<10",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.17,<0.18",
        ],
        "tools": [
            "jinja2>=3.1,<4",
            "matplotlib>=3.9,<4",
            "rich>=13.7,<16",
            "selenium>=4.20,<5",
        ],
    },
)
