"""Live bytes along the order of a graph: ``peak_bytes(graph) -> PeakMemory``.

What counts is storages, not nodes (see ``storages.py``).  A node has three phases: its results are
allocated, it runs beside them and its inputs (``at_node``), and what was used for the last time is
freed (``after``).  Inputs of the graph live throughout (see ``free_inputs``), outputs to the end.

Limits: a storage counts as the bytes of the tensor it was made for; the allocator's rounding,
fragmentation and workspaces of kernels are left out; the order is the graph's, without what a
compiler fuses or reuses; inputs are taken to be different storages.  Symbolic sizes count by the
fallback that all ranks share.  Linear in nodes and edges.

Equal, node by node, to what torch's MemTracker sees when the graphs of
``test_memory_measured.py`` run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.storages import Storages
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import ResultBytes

_NOTHING_SHARED: Mapping[fx.Node, int] = {}


@dataclass(frozen=True, eq=False)
class PeakMemory:
    """The largest number of live bytes, and the first node at which they live (None: no node)."""

    peak_bytes: int
    node: fx.Node | None


@dataclass(frozen=True)
class LiveBytes:
    """Live bytes along an order.

    Args:
        inputs: in front of the first node.
        at_node: while each node of the order runs, its inputs and results included.
        after: behind it, when what it used for the last time is freed; for the output node, what
            lives when the graph has returned.
    """

    inputs: int
    at_node: tuple[int, ...]
    after: tuple[int, ...]


def peak_bytes(
    graph: fx.Graph,
    free_inputs: bool = False,
    kept: Set[fx.Node] = frozenset(),
    *,
    sizes: Mapping[fx.Node, int] | None = None,
    eager: bool = False,
) -> PeakMemory:
    """Peak of the live bytes of ``graph`` in its order.

    Args:
        free_inputs: an input dies after its last use, as the saved activations of a compiled
            backward do, unless it is ``kept``.  One that nobody uses lives until the graph returns.
        kept: inputs that the caller holds anyway, parameters above all.
        sizes: bytes of the storages that a node makes, in place of those of its own tensors: what
            all ranks share where their shards differ.  Where a node makes several, each gets the
            same part (the first the remainder too), so that no part depends on this rank's shapes.
            A node that makes none (a view) is not changed by it.
        eager: PyTorch runs the graph op by op on gloo.  Then the functional forms of writes
            (``copy``, ``_foreach_copy``, ``slice_scatter``, ...) clone the whole storage behind
            what they write to, for every destination; a compiler makes results of their own size.
            And the group holds all payloads of a coalesced launch until the last wait; in compiled
            code on NCCL each lives until its own.
    """
    live = live_bytes(graph, free_inputs, kept, sizes=sizes, eager=eager)
    peak, where = live.inputs, None
    for node, size in zip(graph.nodes, live.at_node, strict=True):
        if size > peak:
            peak, where = size, node
    return PeakMemory(peak, where)


def live_bytes(
    graph: fx.Graph,
    free_inputs: bool = False,
    kept: Set[fx.Node] = frozenset(),
    *,
    sizes: Mapping[fx.Node, int] | None = None,
    eager: bool = False,
    idle: Set[fx.Node] = frozenset(),
) -> LiveBytes:
    """Live bytes along the graph's order; arguments as for :func:`peak_bytes`.

    Args:
        idle: nodes that count as views of their first argument, since only some ranks have them.
    """
    held, freed = live_bytes_each(graph, kept, sizes=sizes, eager=eager, idle=idle)
    return freed if free_inputs else held


def live_bytes_each(
    graph: fx.Graph,
    kept: Set[fx.Node] = frozenset(),
    *,
    sizes: Mapping[fx.Node, int] | None = None,
    eager: bool = False,
    idle: Set[fx.Node] = frozenset(),
    own_sizes: ResultBytes | None = None,
) -> tuple[LiveBytes, LiveBytes]:
    """(Inputs held by the caller, inputs freed after their last use), from one pass; see
    :func:`live_bytes`.

    Args:
        own_sizes: of results, as far as they are known; it is added to.
    """
    order = list(graph.nodes)
    storages = Storages(_NOTHING_SHARED if sizes is None else sizes, eager, idle, own_sizes)
    for place, node in enumerate(order):
        storages.visit(node, place)
    return _live_each(order, storages, kept)


def _live_each(
    order: Sequence[fx.Node], storages: Storages, kept: Set[fx.Node]
) -> tuple[LiveBytes, LiveBytes]:
    made: list[int] = [0] * len(order)
    dying: list[int] = [0] * len(order)
    freed: list[tuple[int, int]] = []  # inputs: place of the last use, bytes
    inputs = 0
    for size, start, end in zip(storages.sizes, storages.made_at, storages.last_use, strict=True):
        owner = order[start]
        stays = order[end].op == "output"
        if owner.op not in ("placeholder", "get_attr"):
            made[start] += size
            if not stays:
                dying[end] += size
            continue
        inputs += size
        if not stays and owner.op == "placeholder" and owner not in kept:
            # The caller's list of arguments is gone, but the name of an unused one is not.
            freed.append((-1 if end == start else end, size))
    held = _phases(inputs, made, dying)
    for end, size in freed:
        dying[end] += size
    return held, _phases(inputs, made, dying)


def _phases(inputs: int, made: list[int], dying: list[int]) -> LiveBytes:
    after = list(accumulate(map(sub, made, dying), initial=inputs))
    at_node = map(add, after, made)  # what lived behind the one before, and the new
    return LiveBytes(inputs, tuple(at_node), tuple(after[1:]))
