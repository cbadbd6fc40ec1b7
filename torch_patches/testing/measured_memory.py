"""Bytes that a graph really holds while it runs, node by node in its order.

    with fake_groups(captured.groups) as names:
        runnable = with_group_names(gm, names)
        measured = measure(runnable, real_inputs(gm.graph))
        peak = allocator_peak_bytes(runnable, real_inputs(gm.graph))

Two meters, on CPU tensors.  torch's ``MemTracker`` sums the storages that are alive whenever an op
has run: that is what an estimate from a graph can know.  The allocator's own events also see what a
kernel allocates and frees inside (workspaces).  In both, values die as in the code that FX
generates, right behind their last use.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import op_name, tensors_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MeasuredMemory:
    """What one run held, by MemTracker.

    Args:
        inputs: bytes of the inputs and of the graph's constants.
        at_node: when each node of the graph has run, before anything is freed.
        after: when what died at it is freed.
        peak_bytes: MemTracker's own maximum over all ops.
    """

    inputs: int
    at_node: tuple[int, ...]
    after: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Conditions:
    """How a graph is run.

    Args:
        free_inputs: inputs die behind their last use, as under the boxed calling convention.
        eager: as PyTorch runs it, whose ``_foreach_copy`` clones all of the storage behind each
            destination, and with groups that hold what they sent as gloo does.  Otherwise as code
            that Inductor generates, on NCCL: results of their own size.
        real_groups: the groups send, and hold what they send until they are waited for; otherwise
            this is done for them, and results are zero.  A real group lets go inside the wait, so
            ``at_node`` of a wait is smaller by what was sent.
    """

    free_inputs: bool = False
    eager: bool = False
    real_groups: bool = False


@torch.no_grad()
def measure(
    gm: fx.GraphModule, inputs: Sequence[Any], conditions: Conditions = Conditions()
) -> MeasuredMemory:
    """Runs ``gm`` on copies of the placeholders' values under MemTracker."""
    run = _Run(gm, conditions)
    values = [_copied(value) for value in inputs]
    held = None if conditions.free_inputs else list(values)
    tracker = MemTracker()
    tracker.track_external(*(v for v in values if isinstance(v, torch.Tensor)), *run.constants())
    at_node: list[int] = []
    after: list[int] = []
    with tracker:
        input_bytes = _live(tracker)
        for freed in run.steps(values):
            (after if freed else at_node).append(_live(tracker))
        peak = tracker.get_tracker_snapshot("peak").get(_CPU, {}).get("Total", input_bytes)
    del held
    return MeasuredMemory(input_bytes, tuple(at_node), tuple(after), peak)


@torch.no_grad()
def allocator_peak_bytes(
    gm: fx.GraphModule, inputs: Sequence[Any], conditions: Conditions = Conditions()
) -> int:
    """Bytes that the CPU allocator had handed out at most, and of the constants.

    Arguments as for :func:`measure`.
    """
    run = _Run(gm, conditions)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        values = [_copied(value) for value in inputs]  # in here: it sees only its own blocks die
        held = None if conditions.free_inputs else list(values)
        for _ in run.steps(values):
            pass
        del held
    assert profile.profiler is not None
    events = _allocations(profile.profiler.kineto_results.experimental_event_tree())
    live = peak = sum(v.untyped_storage().nbytes() for v in run.constants())
    for _, size in sorted(events, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak


def _live(tracker: MemTracker) -> int:
    snapshot = tracker.get_tracker_snapshot("current")
    return int(snapshot.get(_CPU, {}).get("Total", 0))


def _allocations(events: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(ns, bytes) of each block handed out; negative bytes of each that came back."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size


class _Run:
    """Executes a graph node by node."""

    def __init__(self, gm: fx.GraphModule, conditions: Conditions) -> None:
        self.gm, self.conditions = gm, conditions
        self.dying = _last_uses(gm.graph)

    def constants(self) -> list[torch.Tensor]:
        """Tensors that the graph's get_attr nodes read."""
        names = {str(n.target) for n in self.gm.graph.find_nodes(op="get_attr")}
        found = [getattr(self.gm, name) for name in sorted(names)]
        return [value for value in found if isinstance(value, torch.Tensor)]

    def steps(self, values: list[Any]) -> Iterator[bool]:
        """Yields False when a node has run and True when its dead values are freed.

        Takes the inputs out of ``values``: what shall live on, the caller holds elsewhere.
        """
        interpreter = fx.Interpreter(self.gm, garbage_collect_values=False)
        environment = interpreter.env
        for node, value in zip(self.gm.graph.find_nodes(op="placeholder"), values, strict=True):
            environment[node] = value
            del value
        values.clear()
        sent: dict[int, Any] = {}
        for node in self.gm.graph.nodes:
            if node.op != "placeholder":
                environment[node] = self._run_node(interpreter, node)
                if not self.conditions.real_groups:
                    _hold_sent(node, environment, sent, self.conditions.eager)
            yield False
            if op_name(node.target) in ("wait_tensor", "wait_tensors"):
                for address in [_address(t) for t in tensors_of(environment[node])]:
                    sent.pop(address, None)
            if node.op == "output":
                for name in [n for n in environment if n is not node]:
                    del environment[name]
            for dead in self.dying.get(node, ()):
                del environment[dead]
            yield True

    def _run_node(self, interpreter: fx.Interpreter, node: fx.Node) -> Any:
        if not self.conditions.eager and op_name(node.target) == "_foreach_copy":
            sources: Any = interpreter.map_nodes_to_values(node.args[1], node)
            return [source.clone(memory_format=torch.contiguous_format) for source in sources]
        result = interpreter.run_node(node)
        if collective_kind(node) is not None and not self.conditions.real_groups:
            for tensor in tensors_of(result):
                tensor.zero_()  # nothing was sent, and what lies in memory may be no index
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _hold_sent(
    node: fx.Node, environment: dict[fx.Node, Any], sent: dict[int, Any], eager: bool
) -> None:
    """Keeps what a real process group would, by the result whose wait ends it.

    That is what c10d hands to the group: for an all-reduce or a broadcast the result itself; and
    all results of a launch until the last of its waits, since they share one work.
    """
    if collective_kind(node) is None:
        return
    payload, result = node.args[0], environment[node]
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    many = payload if isinstance(payload, (list, tuple)) else [payload]
    payloads = [environment[one] for one in many if isinstance(one, fx.Node)]
    if (op_name(node.target) or "").startswith(("all_reduce", "broadcast")):
        payloads = results
    for one, tensor in zip(payloads, results, strict=True):
        sent[_address(tensor)] = (payloads if eager else one, results)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Values to free behind each node, as FX's generated code does; unused inputs live on."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if user.op != "output":
            dying.setdefault(user, []).append(value)
    return dying


def _copied(value: Any) -> Any:
    """With a storage of its own that holds no more than the tensor needs."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


# -- something to run -----------------------------------------------------------------------------


def real_inputs(graph: fx.Graph) -> list[Any]:
    """Small numbers in the shape of each placeholder; zeros, which are valid indices, for integers.

    Symbols get their hints; what is no tensor is None.
    """
    generator = torch.Generator().manual_seed(0)
    return [_real(n.meta.get("val"), generator) for n in graph.find_nodes(op="placeholder")]


def _real(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if not isinstance(value, torch.Tensor):
        return None
    shape = [int(n) if isinstance(n, int) else int(n.node.hint) for n in value.shape]
    strides = [int(n) if isinstance(n, int) else int(n.node.hint) for n in value.stride()]
    made = torch.empty_strided(shape, strides, dtype=value.dtype).zero_()
    if value.dtype.is_floating_point:
        made.copy_(torch.rand(shape, generator=generator) / 8)
    return made


@contextmanager
def fake_groups(groups: Mapping[str, Sequence[int]]) -> Iterator[dict[str, str]]:
    """This process as rank 0 of groups that launch and allocate as others do but send nothing.

    Yields:
        The names of ``groups`` to those of the groups made for them.
    """
    world = math.lcm(*(max(ranks) + 1 for ranks in groups.values()))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield {name: dist.new_group(list(ranks)).group_name for name, ranks in groups.items()}
    finally:
        dist.destroy_process_group()


def with_group_names(gm: fx.GraphModule, names: Mapping[str, str]) -> fx.GraphModule:
    """A copy of ``gm`` whose collectives run on other groups, and whose constants are real."""
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in copied.graph.nodes:
        if collective_kind(node) is not None:
            node.args = fx.node.map_aggregate(
                node.args, lambda a: names.get(a, a) if isinstance(a, str) else a
            )
    generator = torch.Generator().manual_seed(0)
    for node in copied.graph.find_nodes(op="get_attr"):
        constant = getattr(copied, str(node.target))
        if isinstance(constant, torch.Tensor):
            setattr(copied, str(node.target), _real(constant, generator))
    copied.recompile()
    return copied
