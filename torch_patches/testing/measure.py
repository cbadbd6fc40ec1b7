"""Measures collectives and compute of the machines at hand, for a calibration table.

    table = calibrate(torch.device("cuda", 0), Settings(gpus_per_node=8, ...))

Each number is a median over samples, then the largest over all ranks, so every rank returns the
same table.  ``torch-patches calibrate`` is the command.
"""

from __future__ import annotations

import datetime
import functools
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the ops

from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import CalibrationTable
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import LinkClass
from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import (
    CollectiveTimes,
    MatmulRates,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

_ops = torch.ops._c10d_functional
Work = Callable[[], object]

#: Cycles that a GPU sleeps so that the host is ahead when the clock starts: about 2 ms.
_HEAD_START_CYCLES = 4_000_000
_ISSUES = 50
_WAITS = 10
_PAUSE_S = 0.002
_MEMBERS = 9
_GATHER_BYTES = 64 << 20
#: Large enough for all channels, and short beside a product.
_SHORT_BYTES = 32 << 20
_SHORT_GATHERS = 20
#: Rows and columns of products that leave no processor free, for twice as long as those gathers take.
_BUSY_SIZE, _BUSY_PRODUCTS = 4096, 60
_MOST_GATHERS = 64


@dataclass(frozen=True)
class Settings:
    """What to measure; equal on all ranks.

    Args:
        gpus_per_node: ranks that share a node.
        sizes_bytes: of the collectives' full tensors, rising.
        matmul_sizes: rows and columns of square products, rising.
        dtypes: of the products.
        copy_bytes: of the copy that measures memory bandwidth.
        repeats: samples of each median.
        calls: in one sample.
    """

    gpus_per_node: int
    sizes_bytes: tuple[int, ...]
    matmul_sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    copy_bytes: int
    repeats: int = 9
    calls: int = 10


# -- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupShape:
    """Groups of ``size`` ranks, ``stride`` apart, that cover the world."""

    link: LinkClass
    size: int
    stride: int

    def groups(self, world: int) -> Iterator[list[int]]:
        """Ranks of each group; every rank of the world is in one."""
        for base in range(0, world, self.size * self.stride):
            for first in range(base, base + self.stride):
                yield [first + self.stride * i for i in range(self.size)]


def group_shapes(world: int, gpus_per_node: int) -> list[GroupShape]:
    """The shapes that can be measured: within nodes, and over whole nodes.

    Across nodes one GPU of each node where no group of neighbours has that many ranks.
    """
    inside = [
        GroupShape(LinkClass.INTRA_NODE, size, 1)
        for size in _halves(gpus_per_node)
        if world % size == 0
    ]
    if world % gpus_per_node:
        return inside
    nodes = world // gpus_per_node
    across = [
        GroupShape(LinkClass.INTER_NODE, count * gpus_per_node, 1) for count in _halves(nodes)
    ]
    sizes = {shape.size for shape in across}
    across += [
        GroupShape(LinkClass.INTER_NODE, count, gpus_per_node)
        for count in _halves(nodes)
        if count not in sizes
    ]
    return inside + sorted(across, key=lambda shape: shape.size)


def _halves(count: int) -> list[int]:
    """``count`` and its halves as far as they are whole, above 1, rising."""
    sizes = []
    while count > 1:
        sizes.append(count)
        if count % 2:
            break
        count //= 2
    return sizes[::-1]


def _own_group(shape: GroupShape) -> dist.ProcessGroup:
    own = None
    for ranks in shape.groups(dist.get_world_size()):
        group = dist.new_group(ranks)  # every rank takes part in making each
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


# -- clocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """Runs work and times it.  Counts are fixed: ranks that looped by the clock would part."""

    device: torch.device
    settings: Settings

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"calibrate: {text}", file=sys.stderr, flush=True)

    def agree(self, value: float) -> float:
        """The largest value over all ranks, the same on each."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(f"{tensor.item():.6g}")

    def ms(self, work: Work) -> float:
        """Agreed milliseconds of one call."""
        work()
        samples = [self._sample(work) for _ in range(self.settings.repeats)]
        return self.agree(statistics.median(samples))

    def _sample(self, work: Work) -> float:
        calls = self.settings.calls
        if not self.on_cuda:
            work()  # brings the ranks together
            before = time.perf_counter()
            for _ in range(calls):
                work()
            return (time.perf_counter() - before) * 1e3 / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        work()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls

    def issue_us(self, issue: Work, starts_collective: bool = True) -> float:
        """Agreed microseconds that the host takes for one call, whatever the device does.

        One collective is in flight at a time: gloo of torch 2.13 crashed with fifty.
        """
        samples = []
        for _ in range(self.settings.repeats * _ISSUES):
            before = time.perf_counter()
            result = issue()
            samples.append((time.perf_counter() - before) * 1e6)
            if starts_collective:
                _wait_all([result])
        self.finish()
        return self.agree(statistics.median(samples))

    def wait_us(self, start: Work) -> float:
        """Agreed microseconds that the host takes to wait for a collective that has ended."""
        samples = []
        for _ in range(self.settings.repeats * _WAITS):
            result = start()
            self.pause()
            before = time.perf_counter()
            _wait_all([result])
            samples.append((time.perf_counter() - before) * 1e6)
        self.finish()
        return self.agree(statistics.median(samples))

    def pause(self) -> None:
        """Until a small collective has ended."""
        if self.on_cuda:
            torch.cuda.synchronize()
        else:
            time.sleep(_PAUSE_S)

    def finish(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
        dist.barrier()


def _wait_all(results: Sequence[object]) -> None:
    for result in results:
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            _ops.wait_tensor(tensor)


# -- what is measured -----------------------------------------------------------------------------


def _collective(kind: CollectiveKind, full: torch.Tensor, ranks: int, name: str) -> Work:
    """One collective with its wait, as compiled code runs it; ``full`` is what travels."""
    if kind is CollectiveKind.ALL_GATHER:
        shard = full[: full.numel() // ranks].clone()
        start: Work = functools.partial(_ops.all_gather_into_tensor, shard, ranks, name)
    elif kind is CollectiveKind.REDUCE_SCATTER:
        start = functools.partial(_ops.reduce_scatter_tensor, full, "sum", ranks, name)
    elif kind is CollectiveKind.ALL_REDUCE:
        start = functools.partial(_ops.all_reduce_, full, "sum", name)
    elif kind is CollectiveKind.BROADCAST:
        start = functools.partial(_ops.broadcast_, full, 0, name)
    else:
        parts = [full.numel() // ranks] * ranks
        start = functools.partial(_ops.all_to_all_single, full, parts, parts, name)
    return lambda: _ops.wait_tensor(start())


def measure_collectives(bench: Bench) -> list[CollectiveTimes]:
    """Every kind on every shape of groups, at every size."""
    result = []
    for shape in group_shapes(dist.get_world_size(), bench.settings.gpus_per_node):
        name = _own_group(shape).group_name
        for kind in CollectiveKind:
            sizes, times = [], []
            for wanted in bench.settings.sizes_bytes:
                rows = -(-wanted // (4 * shape.size))  # float32
                full = torch.zeros(rows * shape.size, device=bench.device)
                sizes.append(full.numel() * 4)
                times.append(bench.ms(_collective(kind, full, shape.size, name)))
            where = f"{kind.value} {shape.link.value} x {shape.size}"
            bench.say(f"{where}: {times[0]:.4g} to {times[-1]:.4g} ms")
            result.append(CollectiveTimes(kind, shape.link, shape.size, tuple(sizes), tuple(times)))
    return result


def measure_products(bench: Bench) -> list[MatmulRates]:
    """Square products of each dtype."""
    result = []
    for dtype in bench.settings.dtypes:
        flops, rates = [], []
        for size in bench.settings.matmul_sizes:
            left, right = (torch.randn(size, size, device=bench.device).to(dtype) for _ in "ab")
            out = torch.empty_like(left)
            ms = bench.ms(functools.partial(torch.mm, left, right, out=out))
            flops.append(2 * size**3)
            rates.append(float(f"{2 * size**3 / ms / 1e9:.6g}"))
        bench.say(f"matmul {dtype}: {rates[0]:.4g} to {rates[-1]:.4g} TFLOPS")
        result.append(MatmulRates(dtype, tuple(flops), tuple(rates)))
    return result


def measure_memory(bench: Bench) -> float:
    """GB/s that a large copy reads and writes."""
    source = torch.zeros(bench.settings.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    ms = bench.ms(lambda: target.copy_(source))
    rate = float(f"{2 * source.numel() / ms / 1e6:.6g}")
    bench.say(f"memory {rate:.4g} GB/s")
    return rate


@dataclass(frozen=True)
class IssueCosts:
    """Microseconds of the host."""

    kernel_us: float
    collective_us: float
    member_us: float
    wait_us: float


def measure_issue(bench: Bench) -> IssueCosts:
    """What the host spends on a kernel, a collective, a further coalesced member and a wait."""
    ranks = dist.get_world_size()
    name = dist.distributed_c10d._get_default_group().group_name
    small = torch.zeros(256, device=bench.device)

    def gathers(members: int) -> Work:
        payload = [small] * members
        return lambda: _ops.all_gather_into_tensor_coalesced(payload, ranks, name)

    kernel = bench.issue_us(lambda: small.add_(0.0), starts_collective=False)
    start = functools.partial(_ops.all_gather_into_tensor, small, ranks, name)
    collective, wait = bench.issue_us(start), bench.wait_us(start)
    one, many = bench.issue_us(gathers(1)), bench.issue_us(gathers(_MEMBERS))
    member = float(f"{max(many - one, 0.0) / (_MEMBERS - 1):.6g}")
    costs = IssueCosts(kernel, collective, member, wait)
    bench.say(
        f"host: {kernel:.4g} us a kernel, {collective:.4g} us a collective, {member:.4g} us a "
        f"further tensor in it, {wait:.4g} us a wait"
    )
    return costs


def measure_slowdown(bench: Bench) -> float:
    """How many times as long products take under all-gathers; CUDA only."""
    ranks = dist.get_world_size()
    name = dist.distributed_c10d._get_default_group().group_name
    shard = torch.zeros(_GATHER_BYTES // 4 // ranks, device=bench.device)
    left, right = (torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(left)
    products = 10

    def sample(gathers: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        bench.finish()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        flying = [_ops.all_gather_into_tensor(shard, ranks, name) for _ in range(gathers)]
        start.record()
        for _ in range(products):
            torch.mm(left, right, out=out)
        end.record()
        _wait_all(flying)
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def median(gathers: int) -> float:
        sample(gathers)
        samples = [sample(gathers) for _ in range(bench.settings.repeats)]
        return bench.agree(statistics.median(samples))

    alone = median(0)
    gather_ms = bench.ms(lambda: _ops.wait_tensor(_ops.all_gather_into_tensor(shard, ranks, name)))
    # More of them than the products last; from agreed numbers, so alike on every rank.
    under = median(min(math.ceil(2 * alone / gather_ms) + 1, _MOST_GATHERS))
    slowdown = float(f"{max(under / alone, 1.0):.4g}")
    bench.say(f"compute under all-gathers takes {slowdown} times as long")
    return slowdown


def measure_loaded_launch(bench: Bench) -> float:
    """Microseconds by which an all-gather takes longer that starts while compute runs; CUDA only.

    They follow each other, so that each one waits for a place beside the products' blocks.
    """
    ranks = dist.get_world_size()
    name = dist.distributed_c10d._get_default_group().group_name
    shard = torch.zeros(_SHORT_BYTES // 4 // ranks, device=bench.device)
    shape = (_BUSY_SIZE, _BUSY_SIZE)
    left, right = (torch.randn(shape, device=bench.device, dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(left)
    beside = torch.cuda.Stream()

    def sample(products: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        bench.finish()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        beside.wait_stream(torch.cuda.current_stream())
        for _ in range(products):
            torch.mm(left, right, out=out)
        with torch.cuda.stream(beside):
            start.record()
            for _ in range(_SHORT_GATHERS):
                _ops.wait_tensor(_ops.all_gather_into_tensor(shard, ranks, name))
            end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / _SHORT_GATHERS

    def median(products: int) -> float:
        sample(products)
        return statistics.median([sample(products) for _ in range(bench.settings.repeats)])

    alone = median(0)
    longer_us = bench.agree(max(median(_BUSY_PRODUCTS) - alone, 0.0) * 1e3)
    bench.say(f"an all-gather takes {longer_us:.4g} us longer where compute runs")
    return longer_us


def calibrate(device: torch.device, settings: Settings) -> CalibrationTable:
    """Measure everything; each rank of the default group calls it and gets the same numbers."""
    bench = Bench(device, settings)
    collectives = measure_collectives(bench)
    if not collectives:
        bench.say("no groups to measure: fewer than two ranks, or no whole part of a node")
    issue = measure_issue(bench)
    several = dist.get_world_size() > 1
    return CalibrationTable(
        device=torch.cuda.get_device_name() if bench.on_cuda else f"cpu {platform.machine()}",
        collectives=tuple(collectives),
        matmul=tuple(measure_products(bench)),
        dram_gb_per_s=measure_memory(bench),
        kernel_issue_us=issue.kernel_us,
        collective_issue_us=issue.collective_us,
        coalesced_member_issue_us=issue.member_us,
        wait_issue_us=issue.wait_us,
        compute_slowdown=measure_slowdown(bench) if bench.on_cuda and several else None,
        loaded_launch_us=measure_loaded_launch(bench) if bench.on_cuda and several else None,
        about=(
            ("torch", torch.__version__),
            ("backend", str(dist.get_backend())),
            ("ranks", str(dist.get_world_size())),
            ("gpus_per_node", str(settings.gpus_per_node)),
            ("measured", datetime.datetime.now(datetime.UTC).date().isoformat()),
        ),
    )
