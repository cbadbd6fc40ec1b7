"""Tag, split, bucket, run on four ranks: every value has the bits of the joint graph's.

::

    joint graph ---------------------------------------> results, gradients
        |  run_joint, partition                               ==
    forward, backward --run_post_grad--> on 4 ranks ---> results, gradients

Float32, and the interpreter adds in the order of ranks, so that merging changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import nn

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import run_joint, run_post_grad
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput
from torch_patches.testing import traced_models as models
from torch_patches.testing.gathers import Chained, Quantised, Replicated, Sharded
from torch_patches.testing.spmd_interpreter import mesh_groups, random_inputs, run_spmd
from torch_patches.testing.traced import Traced, trace

pytestmark = pytest.mark.usefixtures("as_on_gpu")

RANKS = 4
#: All ranks, and a 2 x 2 mesh.
GROUPS = mesh_groups((2, 2), {"dp": (0, 1), "outer": (0,), "inner": (1,)})
DENSE, EXPERTS = Sharded("dp", 4), Sharded("inner", 2)


@dataclass(frozen=True)
class Strategy:
    """A model, and what is launched before and after bucketing, by kind and group."""

    build: Callable[[], nn.Module]
    forward: tuple[Mapping[str, int], Mapping[str, int]]
    backward: tuple[Mapping[str, int], Mapping[str, int]]
    width: int = models.WIDTH


def launches(count: int, *kinds: str) -> dict[str, int]:
    return dict.fromkeys(kinds, count)


GATHER, SCATTER = "all_gather@dp", "reduce_scatter@dp"
STRATEGIES = {
    "fsdp": Strategy(
        lambda: models.Mlp([DENSE] * 3, bias=True),
        (launches(6, GATHER), launches(1, GATHER)),
        (launches(6, SCATTER), launches(1, SCATTER)),
    ),
    "fsdp, gathered again": Strategy(
        lambda: models.Mlp([DENSE] * 3, recompute=True),
        (launches(3, GATHER), launches(1, GATHER)),
        # The first weight is not needed in the backward.
        ({GATHER: 2, SCATTER: 3}, launches(1, GATHER, SCATTER)),
    ),
    "uneven shards": Strategy(
        lambda: models.Mlp([Sharded("dp", 4, missing_rows=1)] * 3, width=7),
        (launches(3, GATHER), launches(1, GATHER)),
        (launches(3, SCATTER), launches(1, SCATTER)),
        width=7,
    ),
    "tied": Strategy(
        lambda: models.TiedMlp([DENSE] * 3),
        (launches(2, GATHER), launches(1, GATHER)),
        (launches(3, SCATTER), launches(1, SCATTER)),
    ),
    "quantised": Strategy(
        lambda: models.Mlp([Quantised("dp", 4)] * 3),
        # Data and scales have two dtypes.
        (launches(6, GATHER), launches(2, GATHER)),
        (launches(3, SCATTER), launches(1, SCATTER)),
    ),
    "accumulated": Strategy(
        lambda: models.AccumulatingMlp([DENSE] * 3),
        (launches(3, GATHER), launches(1, GATHER)),
        (launches(3, SCATTER), launches(1, SCATTER)),
    ),
    "hsdp": Strategy(
        lambda: models.Mlp([Sharded("inner", 2, replicas="outer")] * 3),
        (launches(3, "all_gather@inner"), launches(1, "all_gather@inner")),
        (
            launches(3, "reduce_scatter@inner", "all_reduce@outer"),
            launches(1, "reduce_scatter@inner", "all_reduce@outer"),
        ),
    ),
    "ddp": Strategy(
        lambda: models.Mlp([Replicated("dp")] * 3, bias=True),
        ({}, {}),
        (launches(6, "all_reduce@dp"), launches(1, "all_reduce@dp")),
    ),
    "ddp with a divide": Strategy(
        lambda: models.Mlp([Replicated("dp", divisor=3.0)] * 3),
        ({}, {}),
        (launches(3, "all_reduce@dp"), launches(1, "all_reduce@dp")),
    ),
    "dense and experts": Strategy(
        lambda: models.Mlp([DENSE, EXPERTS, DENSE, EXPERTS]),
        (launches(2, GATHER, "all_gather@inner"), launches(1, GATHER, "all_gather@inner")),
        (
            launches(2, SCATTER, "reduce_scatter@inner"),
            launches(1, SCATTER, "reduce_scatter@inner"),
        ),
    ),
    "two shard dimensions": Strategy(
        lambda: models.Mlp([Chained("inner", 2, "outer", 2)] * 3),
        (
            launches(3, "all_gather@inner", "all_gather@outer"),
            launches(1, "all_gather@inner", "all_gather@outer"),
        ),
        (
            launches(3, "reduce_scatter@outer", "reduce_scatter@inner"),
            launches(1, "reduce_scatter@outer", "reduce_scatter@inner"),
        ),
    ),
}


def _tag(graph: fx.Graph, inputs: tuple[RecordedInput, ...]) -> None:
    run_joint(graph, Options("topo_span"), inputs)


def _launched(gm: fx.GraphModule) -> dict[str, int]:
    counts: dict[str, int] = {}
    for c in collect(gm.graph).collectives:
        name = f"{c.kind.value}@{c.group}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _names(gm: fx.GraphModule) -> list[str | None]:
    """Of the values that leave the graph."""
    leaves = pytree.tree_leaves(gm.graph.output_node().args)
    return [leaf.name if isinstance(leaf, fx.Node) else None for leaf in leaves]


Values = Sequence[Sequence[Any]]


def _run(gm: fx.GraphModule, inputs: Values) -> list[list[Any]]:
    gm.graph.lint()
    gm.recompile()
    return [pytree.tree_leaves(out) for out in run_spmd(gm, inputs, GROUPS, RANKS)]


def _run_split(
    traced: Traced, inputs: Values, saved: Sequence[str | None]
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Forward, then backward on what the forward saved.

    Args:
        inputs: of the joint graph, by rank.
        saved: names of the forward's outputs before it was bucketed.
    """
    assert traced.joint is not None
    forward, backward = traced.split
    names = [n.name for n in traced.joint.graph.find_nodes(op="placeholder")]
    known: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in inputs]
    wanted = [n.name for n in forward.graph.find_nodes(op="placeholder")]
    results = _run(forward, [[values[name] for name in wanted] for values in known])
    for values, result in zip(known, results, strict=True):
        values.update({n: v for n, v in zip(saved, result, strict=True) if n is not None})
    wanted = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    return results, _run(backward, [[values[name] for name in wanted] for values in known])


@pytest.mark.parametrize("form", ["default", "coalesced"])
@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_results_and_gradients_keep_their_bits(
    strategy: Strategy, partition: str, form: str
) -> None:
    shape = (models.BATCH, strategy.width)
    traced = trace(strategy.build, shape, partition=partition, joint_pass=_tag)
    assert traced.joint is not None
    forward, backward = traced.split
    inputs = random_inputs(traced.joint, RANKS, seed=1)
    expected = _run(traced.joint, inputs)
    saved = _names(forward)
    before = _launched(forward), _launched(backward)
    options = Options("topo_span", bucket_mode=form)
    for gm in traced.split:
        run_post_grad(gm.graph, options)
    if partition == "min_cut":  # the other one leaves the same work undone twice
        assert before == (strategy.forward[0], strategy.backward[0])
    assert (_launched(forward), _launched(backward)) == (strategy.forward[1], strategy.backward[1])
    results, gradients = _run_split(traced, inputs, saved)
    for rank in range(RANKS):
        # The joint graph returns the results, then the gradients.
        count = len(expected[rank]) - len(gradients[rank])
        found = [*results[rank][:count], *gradients[rank]]
        _check_bits(found, expected[rank])


def _check_bits(found: Sequence[Any], expected: Sequence[Any]) -> None:
    tensors = 0
    for one, other in zip(found, expected, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one is other
            continue
        tensors += 1
        assert other.abs().max() > 0
        assert torch.equal(one, other)
    assert tensors >= 3
