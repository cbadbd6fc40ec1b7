"""Writes collective FX graphs by hand, node by node, with the metadata that a real capture has.

    b = GraphBuilder()
    x, y = b.placeholder(4, 8), b.placeholder(8)
    gathered = b.gather_and_wait(x, 2, "fsdp")
    out = b.call(aten.mul, gathered, y)
    gm = b.output(out)

Every node's ``meta["val"]`` is what its op returns in the builder's fake mode.  No process group
needs to exist: groups are names.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the ops' fake kernels
import torch.fx as fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._pytree import tree_leaves

_c10d = torch.ops._c10d_functional
Size = int | torch.SymInt


@dataclass(frozen=True)
class Group:
    """A process-group object: what a graph holds instead of a name when groups are inputs."""

    group_name: str


def evaluate(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``target(*args, **kwargs)`` on fake values, also where no process group is registered.

    The legacy ops look their group up even then; their counterparts with a group name do not.
    """
    args = [a.group_name if isinstance(a, Group) else a for a in args]
    kwargs = {k: a.group_name if isinstance(a, Group) else a for k, a in kwargs.items()}
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "c10d_functional":
        return target(*args, **kwargs)
    legacy_names = [a.name for a in target._schema.arguments]
    name = target._schema.name.split("::", 1)[1]
    modern = getattr(_c10d, name).default
    rename = {"shard": "input", "self": "input", "reduceOp": "reduce_op"}
    given = {**dict(zip(legacy_names, args, strict=False)), **kwargs}
    given = {rename.get(key, key): value for key, value in given.items()} | {"group_name": ""}
    payload = modern._schema.arguments[0].name
    given.setdefault(payload, args[0])
    return modern(*(given[a.name] for a in modern._schema.arguments))


@dataclass(frozen=True)
class _Layout:
    """All of a fake value that an operator's result can depend on; strides and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    device: torch.device

    def made(self, mode: FakeTensorMode) -> FakeTensor:
        """A new value, in memory of its own."""
        needed = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) + 1
        size = self.storage_offset + (0 if 0 in self.shape else needed)
        base = torch.empty(size, dtype=self.dtype, device="meta")
        value = base.as_strided(self.shape, self.stride, self.storage_offset)
        return FakeTensor(mode, value, self.device)


@dataclass(frozen=True)
class _Argument:
    """A list, tuple or number by its type too: 1, 1.0 and True are equal, results differ."""

    type: type
    value: Any

    def made(self, mode: FakeTensorMode) -> Any:
        if issubclass(self.type, (list, tuple)):
            return self.type(each.made(mode) for each in self.value)
        return self.value


class _Undescribed(Exception):
    """A call with this argument is evaluated each time."""


def _described(value: Any) -> _Layout | _Argument:
    if type(value) is FakeTensor:
        layout = (*value.shape, *value.stride(), value.storage_offset())
        if value.requires_grad or any(type(each) is not int for each in layout):
            raise _Undescribed
        return _Layout(tuple(value.shape), value.stride(), layout[-1], value.dtype, value.device)
    if type(value) in (list, tuple):
        return _Argument(type(value), tuple(map(_described, value)))
    if value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
        raise _Undescribed
    return _Argument(type(value), value)


@functools.lru_cache(maxsize=4096)
def _result_of(
    target: Any, args: _Layout | _Argument, kwargs: _Layout | _Argument
) -> _Layout | None:
    """What an operator returns, if that is one tensor in memory of its own, which a new value can
    stand for.

    Evaluated in a mode of its own, from descriptions: nothing of a builder is kept or matters.
    """
    mode = FakeTensorMode()
    given: Any = args.made(mode)
    named = dict(kwargs.made(mode))
    with mode:
        result = evaluate(target, given, named)
    if type(result) is not FakeTensor:
        return None
    storage = result.untyped_storage()
    tensors = [t for t in tree_leaves((given, named)) if isinstance(t, torch.Tensor)]
    if any(storage._cdata == t.untyped_storage()._cdata for t in tensors):
        return None
    try:
        layout = _described(result)
    except _Undescribed:
        return None
    assert isinstance(layout, _Layout)
    same = layout.made(mode).untyped_storage().nbytes() == storage.nbytes()
    return layout if same and not layout.storage_offset else None


def _evaluated(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    """The result in a builder's mode, as :func:`evaluate` has it.

    To evaluate an operator takes 1 ms, most of it dispatch, and generated graphs have few kinds.  A
    mode with a shape environment may give symbolic sizes, so there nothing is taken from elsewhere.
    """
    remembered = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    if remembered and mode.shape_env is None:
        try:
            described = _described(tuple(args)), _described(tuple(kwargs.items()))
        except _Undescribed:
            pass
        else:
            if layout := _result_of(target, *described):
                return layout.made(mode)
    with mode:
        return evaluate(target, args, kwargs)


class GraphBuilder:
    """One graph under construction; ``output`` ends it."""

    def __init__(self, fake_mode: FakeTensorMode | None = None) -> None:
        """A mode with a shape environment allows symbolic sizes: see ``placeholder``'s ``val``."""
        self.fake_mode = FakeTensorMode() if fake_mode is None else fake_mode
        self.graph = fx.Graph()
        self._root = torch.nn.Module()

    # ------------------------------------------------------------ nodes

    def placeholder(
        self,
        *shape: Size | Sequence[Size],
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        stride: Sequence[int] | None = None,
        val: Any = None,
        device: str = "cpu",
    ) -> fx.Node:
        """An input: ``placeholder(4, 8)``, ``placeholder((4, 8))``, a scalar ``placeholder(())``.

        Args:
            stride: another layout than the contiguous one.
            val: the fake value itself, instead of shape, stride, dtype and device.
        """
        if val is None:
            sizes = tuple(shape[0]) if shape and isinstance(shape[0], Sequence) else shape
            with self.fake_mode:
                if stride is None:
                    val = torch.empty(sizes, dtype=dtype, device=device)  # type: ignore[arg-type]
                else:
                    val = torch.empty_strided(sizes, stride, dtype=dtype, device=device)  # type: ignore[arg-type]
        count = len(self.graph.find_nodes(op="placeholder"))
        return self.opaque_placeholder(name or f"in{count}", val)

    def opaque_placeholder(self, name: str, val: Any = None) -> fx.Node:
        """An input that is no tensor (a DeviceMesh, a process group).  Inputs stand first."""
        inputs = self.graph.find_nodes(op="placeholder")
        with self.graph.inserting_after(inputs[-1] if inputs else self.graph._root):
            node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def symbol(self, hint: int, name: str | None = None) -> fx.Node:
        """A size as an input; its ``meta["val"]`` may stand in shapes.  Needs a shape environment."""
        env = self.fake_mode.shape_env
        assert env is not None, "GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))"
        source = ConstantSource(f"size{len(self.graph.nodes)}")
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        val = env.create_symintnode(symbol, hint=hint, source=source)
        return self.opaque_placeholder(name or f"size{len(self.graph.nodes)}", val)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """``op(*args)``: an overload, a packet (its ``default``), or a plain function."""
        target = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = _evaluated(self.fake_mode, target, values, named)
        return node

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        """One part of a list or tuple."""
        return self.call(operator.getitem, node, index)

    def output(self, *values: Any) -> fx.GraphModule:
        """Ends the graph: a tuple of nodes and Nones, in the order given."""
        node = self.graph.output(tuple(values))
        node.meta["val"] = fx.node.map_arg(tuple(values), lambda n: n.meta["val"])
        self.graph.lint()
        return fx.GraphModule(self._root, self.graph)

    # ------------------------------------------------------------ collectives: start nodes

    def all_gather(self, x: fx.Node, group_size: int, group: Any) -> fx.Node:
        """Concatenates the group's tensors along dim 0."""
        return self.call(_c10d.all_gather_into_tensor, x, group_size, group)

    def reduce_scatter(self, x: fx.Node, op: str, group_size: int, group: Any) -> fx.Node:
        """Reduces, then each rank keeps its part of dim 0, which the size must divide."""
        return self.call(_c10d.reduce_scatter_tensor, x, op, group_size, group)

    def all_reduce(self, x: fx.Node, op: str, group: Any) -> fx.Node:
        return self.call(_c10d.all_reduce, x, op, group)

    def all_to_all(
        self, x: fx.Node, out_splits: Sequence[int], in_splits: Sequence[int], group: Any
    ) -> fx.Node:
        """Splits are rows of dim 0, one number for each rank of the group."""
        return self.call(_c10d.all_to_all_single, x, list(out_splits), list(in_splits), group)

    def broadcast(self, x: fx.Node, src: int, group: Any) -> fx.Node:
        """``src`` is a rank within the group."""
        return self.call(_c10d.broadcast, x, src, group)

    def all_gather_coalesced(
        self, xs: Sequence[fx.Node], group_size: int, group: Any
    ) -> list[fx.Node]:
        """One launch; a getitem for each member."""
        start = self.call(_c10d.all_gather_into_tensor_coalesced, list(xs), group_size, group)
        return [self.getitem(start, i) for i in range(len(xs))]

    def reduce_scatter_coalesced(
        self, xs: Sequence[fx.Node], op: str, group_size: int, group: Any
    ) -> list[fx.Node]:
        """One launch; a getitem for each member."""
        start = self.call(_c10d.reduce_scatter_tensor_coalesced, list(xs), op, group_size, group)
        return [self.getitem(start, i) for i in range(len(xs))]

    def all_reduce_coalesced(self, xs: Sequence[fx.Node], op: str, group: Any) -> list[fx.Node]:
        """One launch; a getitem for each member."""
        start = self.call(_c10d.all_reduce_coalesced, list(xs), op, group)
        return [self.getitem(start, i) for i in range(len(xs))]

    # ------------------------------------------------------------ with their waits

    def wait(self, start: fx.Node) -> fx.Node:
        return self.call(_c10d.wait_tensor, start)

    def gather_and_wait(self, x: fx.Node, group_size: int, group: Any) -> fx.Node:
        return self.wait(self.all_gather(x, group_size, group))

    def scatter_and_wait(self, x: fx.Node, op: str, group_size: int, group: Any) -> fx.Node:
        return self.wait(self.reduce_scatter(x, op, group_size, group))

    def reduce_and_wait(self, x: fx.Node, op: str, group: Any) -> fx.Node:
        return self.wait(self.all_reduce(x, op, group))
