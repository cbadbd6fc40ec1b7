"""Runs one SPMD FX graph for R ranks in one process, with real numerics and no process group.

All ranks execute a node before any of them goes on to the next, so a collective is plain tensor
arithmetic over the ranks' payloads:

    gm:   ag = all_gather_into_tensor(x, 2, "fsdp");  w = wait_tensor(ag);  return w + 1
    run:  run_spmd(gm, [[x0], [x1]], {"fsdp": [[0, 1]]})  ->  [cat(x0, x1) + 1, cat(x0, x1) + 1]

What tests can rely on
- *Bits.* Reductions add in the group's rank order, in the tensor's dtype (or `reduce_dtype`), so
  merging collectives elementwise keeps every bit. "avg" is the sum divided by the group size, as
  gloo does it; NCCL may scale before it adds, which for powers of two gives the same bits.
- *Legality.* A start's output holds poison until `wait_tensor` reveals the data. Any other use, a
  write to a payload in flight, or an unwaited graph output raises `SpmdError` with both nodes.
- *Layout.* Outputs have the strides of torch's meta kernels. Eager torch differs for `broadcast`
  and `all_reduce_coalesced` of a non-contiguous tensor: it returns contiguous ones.
- *Separate ranks.* Each has its own RNG state and its own copy of the module's tensor attributes,
  and of an input tensor that several ranks are given. A write to any other input is the caller's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from torch_patches.testing._spmd_collectives import (
    Form,
    Partition,
    SpmdError,
    bind,
    check_partition,
    compute,
    expand_group,
    mesh_groups,
)
from torch_patches.testing._spmd_flights import Flight, FlightTable, storage_of, tensors_in, written
from torch_patches.testing._spmd_inputs import random_inputs

__all__ = [
    "LaunchEvent",
    "SpmdError",
    "SpmdInterpreter",
    "expand_group",
    "mesh_groups",
    "random_inputs",
    "run_spmd",
]

aten = torch.ops.aten
COPY_ENGINES = "comm_overlap"  # whose gathers cast what they send
NAMESPACES = ("_c10d_functional", "c10d_functional", COPY_ENGINES)
# Allowed on a tensor in flight, because no data moves: checked for reshape and slice.
VIEWS = {aten.alias, aten.view, aten.detach, aten.reshape, aten.slice, operator.getitem}
METADATA = {aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset}
UNINITIALISED = {
    aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided,
    aten.new_empty, aten.new_empty_strided,
}  # fmt: skip
# Higher-order operators run as part of the graph: position of the graph; operands follow at 2.
SUBGRAPH_AT = {"control_deps": 1, "invoke_subgraph": 0}


class LaunchEvent(NamedTuple):
    """One collective launched by one rank; `numel` counts the elements the rank sends."""

    op: str
    group: str
    numel: int


def _cast_first(bound: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the functional op, of one that casts what it sends."""
    dtype, sent = bound.pop("dtype", None), bound["payload"]
    if dtype is not None:
        many = isinstance(sent, (list, tuple))
        bound["payload"] = [t.to(dtype) for t in sent] if many else sent.to(dtype)
    return bound


def _resolve(value: Any, env: Mapping[fx.Node, list[Any]], rank: int) -> Any:
    """`value` with nodes replaced by what they are on `rank`, in plain containers."""
    if isinstance(value, fx.Node):
        return env[value][rank]
    if isinstance(value, (list, tuple)):
        items = [_resolve(v, env, rank) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: _resolve(v, env, rank) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(v, env, rank) for v in (value.start, value.stop, value.step)))
    return value


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def _is_seeded(node: fx.Node) -> bool:
    """Whether the op, or an op that it is given to call, draws random numbers."""
    ops = [o for o in (node.target, *node.args) if isinstance(o, torch._ops.OpOverload)]
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that nobody reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        dying.setdefault(user, []).append(value)
    return dying


def _group_name(group: Any, node_name: str) -> str:
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise SpmdError(f"{node_name}: the group argument {group!r} has no name")
    return name


def _apart(inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The inputs, with a copy of each tensor that an earlier rank has too."""
    owner: dict[int, int] = {}
    return [
        [
            v.clone() if isinstance(v, Tensor) and owner.setdefault(storage_of(v), r) != r else v
            for v in values
        ]
        for r, values in enumerate(inputs)
    ]


class SpmdInterpreter:
    """Runs `gm` on `world_size` ranks in lock step.

    `groups[name]` lists the rank lists that use the group's name, each in group rank order.
    `events[rank]` is the launch order of the last run, `unwaited` the starts nobody waited for.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        groups: Mapping[str, Partition],
        world_size: int,
        *,
        reduce_dtype: torch.dtype | None = None,
        seed: int = 0,
        allow_unwaited_outputs: bool = False,
        allow_mixed_dtypes: bool = False,
    ) -> None:
        """`allow_mixed_dtypes` in coalesced gathers and scatters: NCCL can, gloo garbles them."""
        for name, partition in groups.items():
            check_partition(name, partition, world_size)
        self.gm, self.groups, self.world_size = gm, dict(groups), world_size
        self.reduce_dtype, self.seed = reduce_dtype, seed
        self.allow_unwaited_outputs = allow_unwaited_outputs
        self.allow_mixed_dtypes = allow_mixed_dtypes
        self._reset()

    def _reset(self) -> None:
        self.events: list[list[LaunchEvent]] = [[] for _ in range(self.world_size)]
        self.unwaited: list[str] = []
        self._table = FlightTable()
        self._attrs: dict[tuple[int, str], list[Any]] = {}
        seeds = range(self.seed, self.seed + self.world_size)
        self._rng = [torch.Generator().manual_seed(s).get_state() for s in seeds]

    @torch.no_grad()
    def run(self, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """`inputs[r]` are rank r's placeholder values; returns each rank's output structure."""
        if len(inputs) != self.world_size:
            raise ValueError(f"inputs for {len(inputs)} ranks, world size {self.world_size}")
        self._reset()
        results = self._run_graph(self.gm, _apart(inputs), [{}] * len(inputs))
        if not self.allow_unwaited_outputs:
            self._check_arrived(tensors_in(results), "output")
        self.unwaited = list(dict.fromkeys(f.node_name for f in self._table.all()))
        self._table.land(self._table.all())
        return results

    def _run_graph(
        self,
        gm: fx.GraphModule,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]],
        prefix: str = "",
    ) -> list[Any]:
        """Node by node; in messages the nodes of a nested graph are named "outer/inner"."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        for rank, (values, named) in enumerate(zip(args, kwargs, strict=True)):
            if len(values) + len(named) != len(placeholders):
                given = len(values) + len(named)
                raise ValueError(f"rank {rank}: {given} values, {len(placeholders)} placeholders")
        env: dict[fx.Node, list[Any]] = {}
        for i, node in enumerate(placeholders):
            pairs = zip(args, kwargs, strict=True)
            env[node] = [v[i] if i < len(v) else named[str(node.target)] for v, named in pairs]
        dying = _last_uses(gm.graph)
        for node in gm.graph.nodes:
            if node.op == "output":
                return [_resolve(node.args[0], env, rank) for rank in range(self.world_size)]
            if node.op == "get_attr":
                env[node] = self._get_attr(gm, str(node.target))
            elif node.op != "placeholder":
                env[node] = self._call(gm, node, env, prefix + node.name)
            for dead in dying.get(node, ()):
                del env[dead]
        raise ValueError("the graph has no output node")

    def _get_attr(self, gm: fx.GraphModule, path: str) -> list[Any]:
        """Tensors are copied once per rank and run, so that a rank's writes stay its own."""
        if (id(gm), path) not in self._attrs:
            value = operator.attrgetter(path)(gm)
            copies = [
                value.detach().clone() if isinstance(value, Tensor) else value
                for _ in range(self.world_size)
            ]
            self._attrs[id(gm), path] = copies
        return list(self._attrs[id(gm), path])

    def _call(
        self, gm: fx.GraphModule, node: fx.Node, env: Mapping[fx.Node, list[Any]], name: str
    ) -> list[Any]:
        """Runs a node on all ranks: as a nested graph, a wait, a start, or op by op."""
        ranks = range(self.world_size)
        args = [_resolve(node.args, env, r) for r in ranks]
        kwargs = [_resolve(node.kwargs, env, r) for r in ranks]
        target: Any = node.target
        if node.op == "call_module":
            target = gm.get_submodule(target)
            if isinstance(target, fx.GraphModule):
                return self._run_graph(target, args, kwargs, name + "/")
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in SUBGRAPH_AT:
            subgraph = args[0][SUBGRAPH_AT[target.name()]]
            return self._run_graph(subgraph, [a[2:] for a in args], kwargs, name + "/")
        if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES:
            op = target._schema.name.split("::")[1]
            bound = [bind(target, a, k) for a, k in zip(args, kwargs, strict=True)]
            if target.namespace == COPY_ENGINES:
                target = getattr(torch.ops._c10d_functional, op).default
                bound = [_cast_first(b) for b in bound]
            if op in ("wait_tensor", "wait_tensors"):
                return [self._wait(b["payload"]) for b in bound]
            return self._start(target, op, bound, name)
        results = []
        for rank in ranks:
            with self._rank_context(node, name, rank):
                results.append(self._call_on_rank(node, target, args[rank], kwargs[rank], name))
        return results

    @contextmanager
    def _rank_context(self, node: fx.Node, name: str, rank: int) -> Iterator[None]:
        """The rank's own RNG state around ops that draw; node and rank on whatever is raised."""
        seeded = _is_seeded(node)
        if seeded:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._rng[rank])
        try:
            yield
        except Exception as error:
            error.add_note(f"while node {name} ran on rank {rank}")
            raise
        finally:
            if seeded:
                self._rng[rank] = torch.get_rng_state()
                torch.set_rng_state(outside)

    def _call_on_rank(self, node: fx.Node, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        operands = tensors_in((args, kwargs))
        function = target
        if node.op == "call_method":
            function, args = getattr(args[0], target), args[1:]
        if _packet(target) not in VIEWS | METADATA:
            self._check_arrived(operands, name)
        self._check_writes(written(target, args, kwargs), name)
        sent = [(t, t._version) for t in operands if self._table.sending(t)]
        result = function(*args, **kwargs)
        if _packet(target) in UNINITIALISED:  # or two runs of one graph would differ
            result.zero_()
        if not isinstance(target, torch._ops.OpOverload):  # no schema told what it writes
            self._check_writes([t for t, version in sent if t._version != version], name)
        if _packet(target) in VIEWS:
            self._check_views(operands, args[0], result, name)
        return result

    def _check_arrived(self, tensors: Sequence[Tensor], name: str) -> None:
        for flight in (f for t in tensors for f in self._table.arriving(t)):
            raise SpmdError(f"{name} uses {flight.node_name} before its wait_tensor")

    def _check_writes(self, tensors: Sequence[Tensor], name: str) -> None:
        for flight in (f for t in tensors for f in self._table.sending(t)):
            raise SpmdError(f"{name} writes the payload of {flight.node_name}, still in flight")

    def _check_views(self, operands: Sequence[Tensor], source: Any, result: Any, name: str) -> None:
        """reshape may copy, and a slice that drops rows counts as a use."""
        copied = not any(self._table.arriving(t) for t in tensors_in(result))
        sliced = isinstance(source, Tensor) and result.nbytes != source.nbytes
        if copied or sliced:
            self._check_arrived(operands, name)

    def _wait(self, value: Any) -> Any:
        """Of a tensor, or of a list of them."""
        for tensor in tensors_in(value):
            self._table.land(self._table.arriving(tensor))
        return value

    def _start(
        self, target: torch._ops.OpOverload, op: str, bound: Sequence[dict[str, Any]], name: str
    ) -> list[Any]:
        """Computes the collective for every group, then puts its outputs in flight."""
        form = Form.of(op)
        if form is None:
            raise SpmdError(f"{name}: the interpreter does not know {target}")
        group, partition = self._partition(bound, name)
        results: list[Any] = [None] * self.world_size
        for b in bound:
            self._check_arrived(tensors_in((b["payload"], b.get("out"))), name)
            self._check_writes(tensors_in(b["payload"] if form.inplace else b.get("out")), name)
        for ranks in partition:
            members = [bound[r] for r in ranks]
            outputs = self._launch(form, members, name)
            for rank, output in zip(ranks, outputs, strict=True):
                numel = sum(t.numel() for t in tensors_in(bound[rank]["payload"]))
                self.events[rank].append(LaunchEvent(op, group, numel))
                results[rank] = output if form.coalesced else output[0]
        return results

    def _partition(self, bound: Sequence[dict[str, Any]], name: str) -> tuple[str, Partition]:
        """The group's name and its rank lists; checks that all ranks are in one."""
        if "ranks" in bound[0]:  # legacy ops give the rank list of the rank that traced
            ranks = list(bound[0]["ranks"])
            known = [n for n, lists in self.groups.items() if ranks in [list(x) for x in lists]]
            group = known[0] if known else str(ranks)
            partition = self.groups.get(group) or expand_group(ranks, self.world_size)
        else:
            names = {_group_name(b["group_name"], name) for b in bound}
            if len(names) > 1 or not names <= self.groups.keys():
                raise SpmdError(f"{name}: group {sorted(names)} not among {sorted(self.groups)}")
            group = names.pop()
            partition = self.groups[group]
        if sum(map(len, partition)) != self.world_size:
            raise SpmdError(f"{name}: group {group!r} has no rank list for every rank: {partition}")
        sizes = {b.get("group_size", len(partition[0])) for b in bound}
        if sizes != {len(partition[0])}:
            raise SpmdError(f"{name}: group_size {sizes}, but {group!r} is {partition[0]}")
        return group, partition

    def _launch(
        self, form: Form, members: Sequence[dict[str, Any]], name: str
    ) -> list[list[Tensor]]:
        """One group's outputs by member and payload slot, all of them in flight."""
        payloads = [tensors_in(b["payload"]) for b in members]
        dtypes = [[t.dtype for t in tensors] for tensors in payloads]
        mixed_ok = self.allow_mixed_dtypes and form.kind != "all_reduce"
        if any(d != dtypes[0] for d in dtypes) or (len(set(dtypes[0])) > 1 and not mixed_ok):
            raise SpmdError(f"{name}: dtypes differ between ranks or members: {dtypes}")
        flights: list[Flight] = []
        outputs: list[list[Tensor]] = [[] for _ in members]
        for slot in range(len(payloads[0])):
            sent = [tensors[slot] for tensors in payloads]
            try:
                received = compute(form, sent, members, self.reduce_dtype)
            except SpmdError as error:
                raise SpmdError(f"{name}: {error}") from None
            for i, (payload, data) in enumerate(zip(sent, received, strict=True)):
                output = self._output(form, members[i].get("out"), payload, data, name)
                flights.append(Flight(name, payload, output, data))
                outputs[i].append(output)
        for flight in flights:  # only now: an output may share memory with another slot's payload
            self._table.add(flight)
        return outputs

    def _output(
        self, form: Form, out: Tensor | None, payload: Tensor, data: Tensor, name: str
    ) -> Tensor:
        """The tensor that will hold `data`, with the strides that the meta kernel gives it."""
        if form.inplace:
            return payload
        if out is not None:
            if out.shape != data.shape or out.dtype != data.dtype:
                raise SpmdError(f"{name}: out is {tuple(out.shape)}, result {tuple(data.shape)}")
            return out
        keeps_strides = form.kind == "broadcast" or (form.kind == "all_reduce" and form.coalesced)
        return torch.empty_like(payload) if keeps_strides else torch.empty_like(data)


def run_spmd(
    gm: fx.GraphModule,
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Partition],
    world_size: int | None = None,
    **options: Any,
) -> list[Any]:
    """`SpmdInterpreter(gm, groups, world_size, **options).run(inputs)`."""
    size = len(inputs) if world_size is None else world_size
    return SpmdInterpreter(gm, groups, size, **options).run(inputs)
