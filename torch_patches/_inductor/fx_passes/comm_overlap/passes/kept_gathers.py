"""Gathered parameters that stay from the forward to the backward, where memory allows.

    reshard:  AG -> use ... free ... | ... AG -> use        the backward gathers again
    kept:     AG -> use ................... -> use          one gather less, its result alive throughout

The backward begins with the parameters that the forward used last, and has no compute yet to hide their
gathers: these are kept first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import runs_in_backward
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Skeleton,
    Traffic,
)


def plan_kept_gathers(
    skeleton: Skeleton, repeated: frozenset[fx.Node], allowed_bytes: int
) -> list[Collective]:
    """Forward gathers of a joint graph whose results together stay within ``allowed_bytes``.

    Args:
        repeated: nodes that the backward would repeat.
    """
    left = allowed_bytes
    kept: list[Collective] = []
    for gather in reversed(list(_repeated_gathers(skeleton, repeated))):
        if gather.size_bytes <= left:
            left -= gather.size_bytes
            kept.append(gather)
    return kept[::-1]


def _repeated_gathers(skeleton: Skeleton, repeated: frozenset[fx.Node]) -> Iterator[Collective]:
    """In the order of the forward; of chained gathers the last, whose result is the parameter."""
    passed_on = {c.feeder for c in skeleton.collectives}
    for c in skeleton.collectives:
        is_parameter = c.kind is CollectiveKind.ALL_GATHER and c.traffic is Traffic.PARAMETER
        if not is_parameter or c.backward or c.index in passed_on or c.refusal is not None:
            continue
        is_repeated = c.start in repeated and all(wait in repeated for wait in c.waits)
        if is_repeated and _is_read_later(c):
            yield c


def _is_read_later(gather: Collective) -> bool:
    """The backward reads it, or a view or a cast of it."""
    pending = list(gather.waits)
    seen = set(pending)
    while pending:
        for user in pending.pop().users:
            if runs_in_backward(user):
                return True
            if user not in seen and len(user.all_input_nodes) == 1:
                seen.add(user)
                pending.append(user)
    return False
