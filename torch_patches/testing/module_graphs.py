"""Graphs by hand whose nodes know which modules made them, and sketches of what became of them.

b = ModuleGraph()
with b.inside("layers.0"):
    h = b.layer(h, 2)          # two weights, each gathered for its matrix product
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import BUCKET_MARK, collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag, TagSource, Traffic
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.testing.estimations import ESTIMATIONS
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.spmd_interpreter import random_inputs, run_spmd

aten = torch.ops.aten
#: Four ranks: two shards, two replicas of each; "ep" and "dp" have the same ranks.
GROUPS = {name: [[0, 1], [2, 3]] for name in ("dp", "ep", "cp")} | {"replicas": [[0, 2], [1, 3]]}
SIZE = 4
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}


class Block(torch.nn.Module):
    """Stands for the class of repeated blocks."""


class Other(torch.nn.Module):
    """Stands for the class of all other modules."""


class ModuleGraph(GraphBuilder):
    """A builder that notes the module of each node.

    Args:
        mark: key of the notes: that of a forward, or "fwd_nn_module_stack" of a backward.
    """

    def __init__(self, mark: str = "nn_module_stack") -> None:
        super().__init__()
        self.mark = mark
        self.module: tuple[str, str] | None = None

    @contextmanager
    def inside(self, path: str, root: str = "self") -> Iterator[None]:
        """What is made meanwhile, is made in this module."""
        outer, self.module = self.module, (f"L['{root}']", path)
        yield
        self.module = outer

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """See :class:`GraphBuilder`."""
        node = super().call(op, *args, **kwargs)
        if self.module is not None:
            root, path = self.module
            steps = path.split(".")
            stack: dict[str, tuple[str, type]] = {"root": (root, Other)}
            for depth in range(1, len(steps) + 1):
                kind = Block if steps[depth - 1].isdigit() else Other
                stack[str(depth)] = (".".join([root, *steps[:depth]]), kind)
            node.meta[self.mark] = stack
        return node

    # ------------------------------------------------------------ pieces of a model

    def shard(self, dtype: torch.dtype = torch.float32) -> fx.Node:
        """Half of a weight, as a rank of a pair has it."""
        return self.placeholder(SIZE // 2, SIZE, dtype=dtype)

    def use(self, h: fx.Node, shard: fx.Node, group: str = "dp") -> fx.Node:
        """Gathers a weight and multiplies by it."""
        return self.call(aten.mm, h, self.gather_and_wait(shard, 2, group))

    def layer(self, h: fx.Node, count: int = 2) -> fx.Node:
        """That with new weights."""
        for _ in range(count):
            h = self.use(h, self.shard())
        return h

    def gradient(self, saved: fx.Node, g: fx.Node, group: str = "dp") -> fx.Node:
        """The gradient of a weight, reduced; its wait."""
        return self.scatter_and_wait(self.call(aten.mm, saved, g), "sum", 2, group)


def forward(layers: int, count: int = 2) -> fx.GraphModule:
    """``layers`` modules of ``count`` products."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for number in range(layers):
        with b.inside(f"layers.{number}"):
            h = b.layer(h, count)
    return b.output(h)


def backward(layers: int, count: int = 2, regather: bool = False) -> fx.GraphModule:
    """Gradients of ``layers`` modules, the last one first; with ``regather`` each needs its weights
    again."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    gradients = []
    for number in reversed(range(layers)):
        with b.inside(f"layers.{number}"):
            for _ in range(count):
                gradients.append(b.gradient(saved, g))
                weight = b.gather_and_wait(b.shard(), 2, "dp") if regather else saved
                g = b.call(aten.mm, g, weight)
    return b.output(g, *gradients)


def tag(wait: fx.Node, parameter: str, index: int | None = None, place: int | None = None) -> None:
    """What a joint pass would have noted on a collective, by its wait."""
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    gathers = "all_gather" in str(start.target)
    traffic = Traffic.PARAMETER if gathers else Traffic.GRADIENT
    told = CollectiveTag(traffic, TagSource.DESCRIPTORS, parameter, index, place)
    start.meta[TAG_MARK] = wait.meta[TAG_MARK] = told


# ---------------------------------------------------------------- running


def optimized(
    gm: fx.GraphModule, plan: Any = ("layers.*",), **options: Any
) -> tuple[fx.GraphModule, Report]:
    """A changed copy, which computes the same on four ranks; plan None finds the blocks.

    A matrix product takes 10 ms, a collective 4 ms.
    """
    after = copy.deepcopy(gm)
    estimation = ESTIMATIONS[0]
    options = {
        "custom_runtime_estimation": estimation,
        "estimation_digest": estimation.uuid(),
        "insert_overlap_deps": False,
        **options,
    }
    mode = "modules" if plan is not None else "transformer_block"
    report = pipeline.optimize_graph(after, Options(mode, module_bucket_plans=plan, **options))
    inputs = random_inputs(gm, 4, 0)
    expected = run_spmd(gm, copy.deepcopy(inputs), GROUPS, 4)
    found = run_spmd(after, inputs, GROUPS, 4)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return after, report


def merged(report: Report) -> Counter[str]:
    """ "AG layers.0 dp x2": how many buckets there are of each kind, label, group and size."""
    return Counter(
        f"{SHORT[b.kind]} {b.label or '-'} {b.group} x{len(b.members)}" for b in report.buckets
    )


def refused(report: Report) -> Counter[str]:
    """Names of the reasons, by members."""
    return Counter(r.reason.name for r in report.refusals for _ in r.members)


def sketch(gm: fx.GraphModule, report: Report, skip: Sequence[str] = ()) -> list[str]:
    """The graph's starts, first waits and matrix products in their order.

    "AG layers.0" starts, "W AG layers.0" waits; "mm layers.0" computes, "mm layers.0 x3" thrice.
    A collective that is in no bucket is called by its module.
    """
    names: dict[fx.Node, str] = {}
    for collective in collect(gm.graph).collectives:
        mark = collective.start.meta.get(BUCKET_MARK)
        label = report.buckets[mark["bucket"]].label if mark is not None else ""
        name = f"{SHORT[collective.kind.value]} {label or module_of(collective.start)}"
        names[collective.start] = name
        if collective.waits:
            names[collective.waits[0]] = f"W {name}"
    lines: list[str] = []
    for node in gm.graph.nodes:
        if node.target is aten.mm.default:
            names[node] = f"mm {module_of(node)}"
        if node in names and not names[node].startswith(tuple(skip) or ("\0",)):
            lines.append(names[node])
    counted: list[list[Any]] = []
    for line in lines:
        if counted and counted[-1][0] == line:
            counted[-1][1] += 1
        else:
            counted.append([line, 1])
    return [line if count == 1 else f"{line} x{count}" for line, count in counted]


def module_of(node: fx.Node) -> str:
    """Path of the innermost module without its root, "-" without one."""
    for mark in ("nn_module_stack", "fwd_nn_module_stack"):
        if mark in node.meta:
            return str(list(node.meta[mark].values())[-1][0]).partition(".")[2]
    return "-"
