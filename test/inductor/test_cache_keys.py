"""What is in the key of a compile and what is not, seen by hits and misses; threads and processes.

Only products are compiled: those call a library, so no C++ compiler has to run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_patches  # noqa: F401  registers the flags
from torch_patches.testing.processes import Say, run_ranks

PREFIX = "aten_distributed_optimizations."
MODE = PREFIX + "bucketing_mode"
TABLE = Path(__file__).parents[2] / "tools" / "results" / "calibration_gloo_example.json"


@pytest.fixture
def world(fresh_inductor_cache: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
    for shard in shards:
        x = x @ funcol.all_gather_tensor(shard, 0, dist.group.WORLD)
    return x


def parameters() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.ones(4, 8)) for _ in range(3)]


def compiled_once(flags: dict[str, Any]) -> tuple[bool, int]:
    """Whether it came from a cache, and the buckets of the graph."""
    torch._dynamo.reset()
    counters.clear()
    with config.patch(flags), torch.no_grad():
        torch.compile(step)(torch.ones(4, 8), *parameters())
    hits = (
        counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    )
    return hits > 0, counters["inductor"]["comm_overlap_buckets"]


def test_a_calibration_file_is_known_by_its_content(
    world: dist.ProcessGroup, tmp_path: Path
) -> None:
    path, copy = tmp_path / "table.json", tmp_path / "copy.json"
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    path.write_text(json.dumps(table), encoding="utf-8")
    flags = {MODE: "auto", PREFIX + "calibration_file": str(path)}
    assert not compiled_once(flags)[0]
    assert compiled_once(flags)[0]
    table["device"] = "another machine"
    path.write_text(json.dumps(table), encoding="utf-8")
    assert not compiled_once(flags)[0]
    copy.write_text(json.dumps(table, indent=1), encoding="utf-8")
    assert compiled_once(flags)[0]
    assert not compiled_once({MODE: "auto"})[0]


def test_nested_patches_each_have_their_own_plan(world: dist.ProcessGroup) -> None:
    plain = {"force_disable_caches": True}
    with config.patch({MODE: "topo_span"}):
        assert compiled_once(plain)[1] == 1
        with config.patch({MODE: "none"}):
            assert compiled_once(plain)[1] == 0
            with config.patch({MODE: "topo_span", PREFIX + "max_topo_span": 0}):
                assert compiled_once(plain)[1] == 0
        assert compiled_once(plain)[1] == 1
    assert compiled_once(plain)[1] == 0


def test_threads_that_compile_at_once_keep_their_own_flags(world: dist.ProcessGroup) -> None:
    modes = ("topo_span", "none") * 2
    found: list[Any] = [None] * len(modes)
    ready = threading.Barrier(len(modes))
    expected = step(torch.ones(4, 8), *parameters())

    def compile_here(place: int) -> None:
        seen: list[int] = []

        def look(graph: torch.fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def function(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
            return step(x, *shards)

        flags = {MODE: modes[place], "post_grad_custom_pre_pass": look}
        ready.wait(60)
        try:
            with torch.no_grad():
                result = torch.compile(function, options=flags)(torch.ones(4, 8), *parameters())
            found[place] = torch.equal(result, expected), len(seen)
        except Exception as error:
            found[place] = error

    counters.clear()
    threads = [
        threading.Thread(target=compile_here, args=(i,), daemon=True) for i in range(len(modes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert found == [(True, 1)] * len(modes)
    assert counters["inductor"]["comm_overlap_buckets"] == modes.count("topo_span")


# -- processes -------------------------------------------------------------------------------------


def parent(rank: int, say: Say, folder: str) -> Any:
    """Compiles, then forks a process that does the same; in a process of its own, since a fork must
    not copy the threads of a test run."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    here = compiled_once({MODE: "topo_span"})
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        there = [compiled_once({MODE: mode}) for mode in ("topo_span", "none")]
        os.write(writing, json.dumps(there).encode())
        os._exit(0)
    ready, _, _ = select.select([reading], [], [], 100)
    there = json.loads(os.read(reading, 4096)) if ready else "no answer"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return here, there


def test_a_forked_process_has_the_flags_and_the_cache(tmp_path: Path) -> None:
    """``parent`` is a fork of a server that has compiled nothing.  Spawned processes compile, and hit,
    in ``distributed/test_rank_divergence.py``."""
    ((here, there),) = run_ranks(parent, 1, timeout_s=200.0, arguments=(str(tmp_path),))
    assert here == (False, 1)
    assert there != "no answer"
    again, other = there
    assert again[0]
    assert other == [False, 0]
