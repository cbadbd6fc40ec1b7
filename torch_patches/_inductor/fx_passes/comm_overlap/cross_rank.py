"""``cross_rank_check``: ranks tell each other what they decided, before anything runs.

    decide -> each rank's launches to the others -> equal: go on
                                                 -> "warn", "error", or all take one rank's plan

Ranks with equal graphs decide alike by construction.  Those whose own compute differs (a
tensor-parallel dimension that does not divide) may not, and then a job hangs at its first step, hours
into the queue.

One object goes over each process group of the graph, in an order that does not depend on the graph, and
carries on what came over the groups before: on a mesh every rank then knows all of them.  Ranks that
do not run this graph (other pipeline stages) are in none of its groups and need not come.  A rank that
comes from a cache would not come either, so such compiles are not cached.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import registered_ranks
from torch_patches._inductor.fx_passes.comm_overlap.plan import Skeleton
from torch_patches._inductor.fx_passes.comm_overlap.portable_plan import PortablePlan
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import launch_texts

log = logging.getLogger(__name__)

T = TypeVar("T")


class CrossRankError(RuntimeError):
    """Ranks would launch different collectives, and cross_rank_check is "error"."""


@dataclass(frozen=True)
class Vote:
    """What one rank decided.

    Args:
        launches: a short hash of each launch, in order.
        structure: of the graph that the plan is for.
        plan: to be taken over by others.
    """

    launches: tuple[str, ...]
    structure: str
    plan: PortablePlan

    @staticmethod
    def of(after: Skeleton, given: Skeleton, structure: str, plan: PortablePlan) -> Vote:
        """Args: ``given``: the graph before it was changed."""
        texts = launch_texts(after, given.collectives)
        return Vote(tuple(map(_short, texts)), structure, plan)

    @staticmethod
    def of_failure() -> Vote:
        """Of a rank that raises: the others wait for its answer."""
        return Vote(("failed",), "failed", PortablePlan())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def groups_of(given: Skeleton) -> list[str]:
    """Groups to talk over, in the same order on all ranks of a mesh: by how their ranks lie, then by
    where they first appear in the graph that was given.  What was made of it is what may differ."""
    found: dict[str, tuple[int, ...]] = {}
    for collective in given.collectives:
        ranks = registered_ranks(collective.group)
        if ranks is not None and len(ranks) > 1 and _talks(collective.group):
            found[collective.group] = ranks

    def layout(group: str) -> tuple[int, ...]:
        return tuple(rank - found[group][0] for rank in found[group])

    return sorted(found, key=layout)


def _talks(group: str) -> bool:
    """Not torch's fake backend, which gives back what was there."""
    return bool(dist.get_backend(_resolved(group)) != "fake")


def _resolved(group: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


def exchange(groups: Sequence[str], mine: T) -> dict[int, T]:
    """What every rank that is reached over ``groups`` has given, by its global rank."""
    known = {dist.get_rank() if groups else 0: mine}
    with unset_fake_temporarily(), _disable_current_modes():
        for group in groups:
            process_group = _resolved(group)
            told: list[Any] = [None] * process_group.size()
            dist.all_gather_object(told, known, group=process_group)
            for theirs in told:
                known.update(theirs)
    return known


def agree(votes: Mapping[int, Vote]) -> bool:
    """All would launch the same."""
    return len({vote.launches for vote in votes.values()}) == 1


def describe_difference(votes: Mapping[int, Vote], after: Skeleton, given: Skeleton) -> str:
    """Which ranks differ from the first one, and from which launch on; a sentence."""
    first = min(votes)
    launches = votes[first].launches
    others = sorted(rank for rank, vote in votes.items() if vote.launches != launches)
    theirs = votes[others[0]].launches
    place = next(
        (i for i, (a, b) in enumerate(zip(launches, theirs, strict=False)) if a != b),
        min(len(launches), len(theirs)),
    )
    here = launch_texts(after, given.collectives)
    text = here[place] if place < len(here) else "none"
    return (
        f"ranks {others} would launch other collectives than rank {first}, from launch number {place} "
        f"on ({len(launches)} launches on rank {first}, {len(theirs)} on rank {others[0]}; here it "
        f"is {text})"
    )


def take_leaders_plan(
    votes: Mapping[int, Vote], groups: Sequence[str], apply: Callable[[PortablePlan], Vote | None]
) -> bool:
    """Whether the first rank's plan stands on all ranks now; if not, the caller undoes it.

    Args:
        apply: takes a plan over, and tells what it makes; None where it does not fit.
    """
    leader = votes[min(votes)]
    if any(vote.structure != leader.structure for vote in votes.values()):
        return False
    made = exchange(groups, apply(leader.plan))
    return len({vote.launches if vote is not None else None for vote in made.values()}) == 1 and (
        None not in made.values()
    )
