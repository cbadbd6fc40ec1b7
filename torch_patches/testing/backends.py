"""Judging CPU graphs as if they ran on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch_patches._inductor.fx_passes.comm_overlap.plan import BucketKey


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """No key needs the copying form, as on NCCL; for graphs that no gloo process will run."""
    with mock.patch.object(BucketKey, "needs_copies", False):
        yield
