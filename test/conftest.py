"""What all tests share: strict passes, few threads, a watchdog, a fresh compile cache on request,
and an order in which two workers end together."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, which reads them once.  Several workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A pass that fails must fail the test instead of leaving the graph as it was.
os.environ["TORCH_PATCHES_STRICT"] = "1"
# With an empty cache, each process would compile and load a program to see whether its compiler knows
# the processor's vectors; here it does.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches.testing.backends import as_on_gpu as judged_as_on_gpu
from torch_patches.testing.captures import StoredCaptures

torch.set_num_threads(1)

STORED = StoredCaptures(Path(__file__).parent / "data")
#: Files that take longest, the longest first: workers take them in this order (``make unit`` says
#: --no-loadscope-reorder), so that what is left at the end is short.
LONG_FILES = (
    "test_overlap_gloo.py",
    "test_upstream_commits.py",
    "test_fuzz.py",
    "test_cli_replay.py",
    "test_examples.py",
    "test_strategies_gloo.py",
    "test_module_bucketing.py",
    "test_hooks_compile.py",
    "test_docs_pages.py",
    "test_tag_survival.py",
    "test_module_cache.py",
    "test_uneven_shards.py",
    "test_captured_bucketing.py",
    "test_chained_fusion.py",
    "test_backend.py",
    "test_demo.py",
    "test_properties.py",
    "test_work.py",
    "test_captured_overlap.py",
    "test_memory_measured.py",
    "test_bench_planner.py",
    "test_gloo_backend.py",
    "test_cli.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file, and of the others, stays."""
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """What torch has made by now stays; looking through it again and again is a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def warnings_reach_caplog() -> None:
    """Where torch sets up its logs anew, as TORCH_LOGS and TORCH_TRACE do, ours end at its handlers."""
    logger = logging.getLogger("torch_patches")
    logger.propagate, logger.disabled = True, False
    if logger.level > logging.WARNING:
        logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def stored_captures() -> Iterator[None]:
    """Files of ``test/data`` are decoded once in a process; tests of the format override this."""
    with STORED.reused():
        yield


@pytest.fixture(scope="module")
def as_on_gpu() -> Iterator[None]:
    """For tests of CPU graphs that stand for GPU ones: no kind is forced into the copying form."""
    with judged_as_on_gpu():
        yield


@pytest.fixture
def fresh_inductor_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty compile cache, also for processes that the test starts, and no code compiled before."""
    folder = tmp_path / "inductor_cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch._dynamo.reset()
    yield folder
    torch._dynamo.reset()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A world of eight, as a 4 x 2 mesh; the default group has all of its ranks in row-major order."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("outer", "inner"))
    finally:
        dist.destroy_process_group()
