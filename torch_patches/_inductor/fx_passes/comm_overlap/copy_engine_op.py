"""All-gathers by the GPUs' copy engines, which leave the processors to compute.

    comm_overlap::all_gather_into_tensor_coalesced(Tensor[], int, str, ScalarType?) -> Tensor[]
    comm_overlap::all_gather_into_tensor(Tensor, int, str, ScalarType?) -> Tensor

The same as the functional ops of these names, with a cast of what is sent, for CUDA ranks that reach
each other's memory (one node, NVLink or PCIe peers):

    compute stream   cast shards into the ring | compute ...                      | wait | use
    another stream                             | all there? copy each rank's part, all done? |

The ring is symmetric memory, a part of which is taken for each gather and free again once all ranks
have copied from it.  All ranks take the same parts in the same order, since they run equal graphs.
On other devices the functional op of the process group does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import COPY_ENGINES

#: Parts of the ring begin at multiples of it.
_ALIGNMENT = 256
#: Until a barrier gives up, as NCCL's collectives do.
_TIMEOUT_MS = 600_000
#: How many gathers of the largest size the ring holds.
_RING_GATHERS = 2
_SCHEMAS = (
    "all_gather_into_tensor(Tensor input, int group_size, str group_name, ScalarType? dtype=None)"
    " -> Tensor",
    "all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, str group_name, "
    "ScalarType? dtype=None) -> Tensor[]",
)

Token = TypeVar("Token")


class Ring(Generic[Token]):
    """Who holds which bytes of a buffer whose parts are taken one behind the other."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._taken: deque[tuple[int, int, Token]] = deque()  # begin, end, whose; oldest first

    def take(self, size: int) -> tuple[int, list[Token]]:
        """Offset of so many free bytes, and who held them before, oldest first: these must be done.

        Raises:
            ValueError: more than there are.
        """
        if size > self.capacity:
            raise ValueError(f"{size} bytes of {self.capacity}")
        if self._head + size > self.capacity:
            self._head = 0
        begin, end = self._head, self._head + size
        self._head = end
        over = [i for i, (b, e, _) in enumerate(self._taken) if b < end and begin < e]
        last = max(over, default=-1)
        return begin, [self._taken.popleft()[2] for _ in range(last + 1)]

    def hold(self, begin: int, size: int, token: Token) -> None:
        """The bytes are that one's until it is done."""
        self._taken.append((begin, begin + size, token))

    def holders(self) -> list[Token]:
        """All that hold something, oldest first."""
        return [token for _, _, token in self._taken]


def ring_bytes(sizes: Sequence[int]) -> int:
    """Memory of a rank for gathers that send tensors of so many bytes at most."""
    return _RING_GATHERS * sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Done(torch._C._distributed_c10d.Work):
    """What ``wait_tensor`` waits for: the stream of the device that it is on, not the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        super().__init__()
        self._event, self._device = event, device

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._event.wait(torch.cuda.current_stream(self._device))
        return True


class _Exchange:
    """The ring of one process group, on one device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.group, self.capacity = group, capacity
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.ring: Ring[torch.cuda.Event] = Ring(capacity)
        try:
            self.buffer = symmetric.empty(capacity, dtype=torch.uint8, device=device)
            self.handle = symmetric.rendezvous(self.buffer, group.group_name)
            self.rings = [
                self.handle.get_buffer(peer, (capacity,), torch.uint8)
                for peer in range(self.handle.world_size)
            ]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "aten_distributed_optimizations.copy_engine_gathers = True needs GPUs that reach each "
                f"other's memory; set it to False, or gpus_per_node to how many do: {error}"
            ) from error

    def gather(
        self, shards: Sequence[torch.Tensor], dtype: torch.dtype | None
    ) -> list[torch.Tensor]:
        """Starts it; results are to be waited for as those of a functional collective."""
        sizes = [shard.numel() * (dtype or shard.dtype).itemsize for shard in shards]
        spans = [_aligned(size) for size in sizes]
        compute, ranks = torch.cuda.current_stream(), self.handle.world_size
        results = [_result(shard, ranks, dtype) for shard in shards]
        begin, holders = self.ring.take(sum(spans))
        for done in holders:
            compute.wait_event(done)
        sent = [
            part.narrow(0, 0, size).view(dtype or shard.dtype).view(shard.shape)
            for shard, size, part in zip(
                shards, sizes, self._parts(None, begin, spans), strict=True
            )
        ]
        torch._foreach_copy_(sent, list(shards))
        # Host time counts here: few calls, and bytes instead of shapes.
        by_rank = [
            result.view(-1).view(torch.uint8).split(size or 1)
            for result, size in zip(results, sizes, strict=True)
        ]
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            self.handle.barrier(channel=0, timeout_ms=_TIMEOUT_MS)
            for step in range(ranks):
                peer = (self.handle.rank + step) % ranks  # not all from one
                parts = self._parts(peer, begin, spans)
                for into, part, size, span in zip(by_rank, parts, sizes, spans, strict=True):
                    if size:
                        into[peer].copy_(part if size == span else part.narrow(0, 0, size))
            self.handle.barrier(channel=0, timeout_ms=_TIMEOUT_MS)
            done = torch.cuda.Event()
            done.record()
            work = _Done(done, self.buffer.device)
            for result in results:
                torch._C._distributed_c10d._register_work(result, work)
        self.ring.hold(begin, sum(spans), done)
        return results

    def _parts(self, peer: int | None, begin: int, spans: list[int]) -> Sequence[torch.Tensor]:
        """Bytes of each shard in the ring of a rank, None for this one."""
        ring = self.buffer if peer is None else self.rings[peer]
        return ring.narrow(0, begin, sum(spans)).split(spans)


_exchanges: dict[tuple[str, torch.device], _Exchange] = {}


def _exchange_of(name: str, device: torch.device, capacity: int) -> _Exchange:
    """The ring of a group, made anew where it is too small; collective, as the gather is."""
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    found = _exchanges.get((name, device))
    if found is None or found.group is not group or found.capacity < capacity:
        if found is not None:
            for done in found.ring.holders():
                done.synchronize()  # all ranks have copied from what is given back now
        found = None
        _exchanges.pop((name, device), None)
        found = _exchanges[name, device] = _Exchange(group, device, capacity)
    return found


def _result(shard: torch.Tensor, ranks: int, dtype: torch.dtype | None) -> torch.Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]), dtype=dtype or shard.dtype)


def _fake_coalesced(
    inputs: list[torch.Tensor], group_size: int, group_name: str, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [_result(shard, group_size, dtype) for shard in inputs]


def _on_cuda(
    inputs: list[torch.Tensor], group_size: int, group_name: str, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "aten_distributed_optimizations.copy_engine_gathers = True does not go with CUDA graphs"
        )
    capacity = ring_bytes([shard.numel() * (dtype or shard.dtype).itemsize for shard in inputs])
    with torch.cuda.device(inputs[0].device):
        return _exchange_of(group_name, inputs[0].device, capacity).gather(inputs, dtype)


def _elsewhere(
    inputs: list[torch.Tensor], group_size: int, group_name: str, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    sent = [shard.to(dtype or shard.dtype).contiguous() for shard in inputs]
    functional: Any = torch.ops._c10d_functional
    gathered: list[torch.Tensor] = functional.all_gather_into_tensor_coalesced(
        sent, group_size, group_name
    )
    return gathered


def _single(implementation: Any) -> Any:
    def gather(
        input: torch.Tensor, group_size: int, group_name: str, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        (result,) = implementation([input], group_size, group_name, dtype)
        return result  # type: ignore[no-any-return]

    return gather


_library: torch.library.Library | None = None


def register() -> None:
    """Makes the ops known to torch; once, however often it is called."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library(COPY_ENGINES, "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    everywhere = ("CompositeExplicitAutograd", _elsewhere)
    for key, implementation in (("Meta", _fake_coalesced), ("CUDA", _on_cuda), everywhere):
        _library.impl("all_gather_into_tensor_coalesced", implementation, key)
        _library.impl("all_gather_into_tensor", _single(implementation), key)


_lowered = False


def register_lowerings() -> None:
    """Makes the ops collectives to Inductor, which then keeps their order and what they send; else it
    orders them by memory, which differs between ranks with other batches.  Once, however often it is
    called."""
    global _lowered
    if _lowered:
        return
    _lowered = True
    register()
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    ops = getattr(torch.ops, COPY_ENGINES)

    def lower(op: torch._ops.OpOverload) -> None:
        def lowered(payload: Any, group_size: int, group_name: str, dtype: Any = None) -> Any:
            made = ir._CollectiveKernel.create_out_of_place(
                op, payload, group_size, group_name, dtype=dtype
            )
            return tree_map(ir.TensorBox.create, made)

        register_lowering(op, type_promotion_kind=None)(lowered)

    lower(ops.all_gather_into_tensor.default)
    lower(ops.all_gather_into_tensor_coalesced.default)
