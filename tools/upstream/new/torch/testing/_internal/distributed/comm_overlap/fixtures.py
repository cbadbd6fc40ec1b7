"""What tests of comm_overlap share; importing it makes passes strict.

A pass that fails must fail the test instead of leaving the graph as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from torch._inductor.fx_passes.comm_overlap.notices import STRICT_VARIABLE
from torch.testing._internal.distributed.comm_overlap.backends import (
    as_on_gpu as judged_as_on_gpu,
)

os.environ[STRICT_VARIABLE] = "1"


@pytest.fixture(scope="module", name="as_on_gpu")
def as_on_gpu_fixture() -> Iterator[None]:
    """For tests of CPU graphs that stand for GPU ones."""
    with judged_as_on_gpu():
        yield
