"""Are chains fused exactly where one collective gives all ranks the same?  By running both."""

from __future__ import annotations

import copy
import random

import torch

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.passes.all_gather_fusion import (
    Fusion,
    apply_fusions,
    plan_fusions,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.meshes import ChainCase, random_case
from torch_patches.testing.spmd_interpreter import run_spmd

CHECKED_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)

_Inputs = list[list[torch.Tensor]]


class ChainError(AssertionError):
    """A chain was fused wrongly, not fused, or fused on some ranks only."""


def check_chain(r: random.Random, kind: CollectiveKind, name: str = "") -> str:
    """Makes a chain, plans it on every rank, and runs it, one collective over each group, and what
    the plan makes of it.

    Returns:
        "fused", "in parts" or "left".

    Raises:
        ChainError: with ``name``.
    """
    case = random_case(r, kind.value, torch.int64)
    inputs = _inputs(case, kind, r)
    expected = _run(case, case.gm, inputs)
    equal = {
        group
        for group in case.table
        if (single := _single(case, kind, group)) is not None
        and all(map(_same_elements, expected, _run(case, single, inputs)))
    }
    fusions = _planned(case, kind, name)
    whole = [fusion for fusion in fusions if len(fusion.links) == len(case.members)]
    if bool(whole) != bool(equal) or any(fusion.group not in equal for fusion in whole):
        raise ChainError(f"{name}: fused over {[f.group for f in whole]}, equal over {equal}")
    apply_fusions(case.gm.graph, fusions)
    case.gm.graph.lint()
    case.gm.recompile()
    if not all(map(torch.equal, expected, _run(case, case.gm, inputs))):
        raise ChainError(f"{name}: the fused chain gives something else")
    return "fused" if whole else "in parts" if fusions else "left"


def _planned(case: ChainCase, kind: CollectiveKind, name: str) -> list[Fusion]:
    skeleton = collect(case.gm.graph)
    every = [plan_fusions(skeleton, groups, [kind])[0] for groups in case.views()]
    if len({repr([(f.group, f.shape, len(f.links)) for f in fusions]) for fusions in every}) != 1:
        raise ChainError(f"{name}: ranks differ")
    return every[0]


def _inputs(case: ChainCase, kind: CollectiveKind, r: random.Random) -> _Inputs:
    """Of gathers every element of every rank another number; of reductions large random ones."""
    x = next(iter(case.gm.graph.nodes)).meta["val"]
    ranks = range(case.mesh.ranks)
    if kind is CollectiveKind.ALL_GATHER:
        return [[torch.arange(x.numel()).view(x.shape) + rank * x.numel()] for rank in ranks]
    generator = torch.Generator().manual_seed(r.getrandbits(30))
    return [[torch.randint(-(1 << 40), 1 << 40, x.shape, generator=generator)] for _ in ranks]


def _run(case: ChainCase, gm: torch.fx.GraphModule, inputs: _Inputs) -> list[torch.Tensor]:
    results = run_spmd(gm, copy.deepcopy(inputs), case.table, case.mesh.ranks)
    return [result[0] for result in results]


def _single(case: ChainCase, kind: CollectiveKind, group: str) -> torch.fx.GraphModule | None:
    """One collective over ``group``; None where the rows cannot be cut into so many pieces."""
    x = next(iter(case.gm.graph.nodes)).meta["val"]
    ranks = len(case.table[group][0])
    b = GraphBuilder()
    payload = b.placeholder(*x.shape, dtype=torch.int64)
    if kind is CollectiveKind.ALL_GATHER:
        return b.output(b.gather_and_wait(payload, ranks, group))
    if x.shape[0] % ranks:
        return None
    return b.output(b.scatter_and_wait(payload, "sum", ranks, group))


def _same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.flatten(), other.flatten())
