"""What the blocks of a generated graph share: the mesh and its groups, and the graph so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag, TagSource, Traffic
from torch_patches.testing.graph_builder import GraphBuilder, Group
from torch_patches.testing.spmd_interpreter import mesh_groups

aten = torch.ops.aten

WORLD_SIZE = 4
#: Two groups have equal ranks ("tp", "fsdp_tp"), two the same ranks in another order.
GROUPS = mesh_groups(
    (2, 2), {"dp": (0,), "tp": (1,), "fsdp_tp": (1,), "world": (0, 1), "column_major": (1, 0)}
)
SIZE_OF = {name: len(ranks[0]) for name, ranks in GROUPS.items()}
#: A graph's FSDP collectives use one of these sets, so that there is something to merge.
FSDP_GROUPS = (("dp",), ("dp",), ("world",), ("dp", "fsdp_tp"), ("world", "column_major"))


def maybe(r: Random, chance: float) -> bool:
    return r.random() < chance


def pause(r: Random, most: int = 3) -> Iterator[None]:
    for _ in range(r.randint(0, most)):
        yield


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model that a graph pretends to come from; numbers are no order of use."""

    name: str
    index: int


@dataclass
class Context:
    """The graph so far: a chain of compute that the blocks read and extend, and the outputs.

    Args:
        fsdp_groups: groups that parameters are sharded over.
        dtypes: dtypes of parameters; gathers are cast to the last one.
        values: for inputs that random tensors do not serve: what each rank is given.
        inputs: the placeholders that are parameters.
        gradients: values of which each, if it leaves the graph, is a parameter's gradient.
        tags: what the blocks know of their collectives, by start; those left out are doubtful.
    """

    builder: GraphBuilder
    x: fx.Node
    fsdp_groups: tuple[str, ...] = ("dp",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    outputs: list[fx.Node] = field(default_factory=list)
    params: list[tuple[fx.Node, str]] = field(default_factory=list)
    group_nodes: dict[str, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, list[Any]] = field(default_factory=dict)
    inputs: dict[fx.Node, Parameter] = field(default_factory=dict)
    gradients: dict[fx.Node, Parameter] = field(default_factory=dict)
    tags: dict[fx.Node, CollectiveTag] = field(default_factory=dict)
    parameter_count: int = 0

    def new_parameter(self, placeholder: fx.Node | None = None) -> Parameter:
        """Stored in an input of the graph, or one that only its gradient shows."""
        number = self.parameter_count
        self.parameter_count += 1
        parameter = Parameter(f"p{number}", number * 7919 % 10_007)  # any permutation will do
        if placeholder is not None:
            self.inputs[placeholder] = parameter
        return parameter

    def tag(self, start: fx.Node, traffic: Traffic, parameter: Parameter | None = None) -> None:
        """Notes what a collective carries."""
        name, index = (None, None) if parameter is None else (parameter.name, parameter.index)
        self.tags[start] = CollectiveTag(traffic, TagSource.DESCRIPTORS, name, index, index)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.builder.call(op, *args, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(aten._to_copy, x, dtype=dtype)

    def use(self, value: fx.Node) -> None:
        """Makes the chain of compute depend on ``value``."""
        total = self.call(aten.sum, value)
        if total.meta["val"].dtype is not torch.float32:
            total = self.cast(total, torch.float32)
        self.x = self.call(aten.sin, self.call(aten.add.Tensor, self.x, total))

    def look_through(self, value: fx.Node, r: Random) -> fx.Node:
        """Sometimes an alias, a detach or a view that changes nothing."""
        op = r.choice([None, None, None, aten.alias, aten.detach, aten.view])
        if op is None:
            return value
        shape = () if op is not aten.view else (list(value.meta["val"].shape),)
        return self.call(op, value, *shape)

    def group(self, name: str, r: Random) -> Any:
        """The group by name, or as an input of the graph."""
        if r.random() < 0.95:
            return name
        if name not in self.group_nodes:
            node = self.builder.opaque_placeholder(f"group_{name}", Group(name))
            self.group_nodes[name] = node
            self.values[node] = [Group(name)] * WORLD_SIZE
        return self.group_nodes[name]
