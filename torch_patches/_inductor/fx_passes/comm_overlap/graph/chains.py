"""Chains of gathers, or of reduce-scatters, on sub-meshes of one mesh.

    shard -> AG over inner -> wait -> t -> t -> AG over outer -> wait -> use

Only what rearranges may stand between: a wait with one reader, views, copies.  Everything else that
carries the data on is an *obstacle*, told with a reason, for instance a cast, or rows that are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.evenness import pads_by_nothing
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    first_argument,
    is_cast,
    is_full_slice,
    is_view,
    op_name,
    op_namespace,
    same_sizes,
    schema_arguments,
    wait_source,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    RefusalReason,
    Skeleton,
)

_CHAINED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"})
_PERMUTES = frozenset({"permute", "t", "transpose"})
_SAME = frozenset({"alias", "detach", "clone", "contiguous", "lift_fresh"})
_CUTS = frozenset({"slice", "narrow", "constant_pad_nd"})


@dataclass(frozen=True, eq=False)
class Link:
    """A collective and what stands in front of it, behind the wait of the one before.

    Args:
        collective: a gather or reduce-scatter.
        between: from that wait's first reader to the payload; empty for the first link of a chain.
        obstacle: why the two are not one chain, or None.
    """

    collective: Collective
    between: tuple[fx.Node, ...] = ()
    obstacle: RefusalReason | None = None


def find_chains(skeleton: Skeleton) -> list[list[Link]]:
    """Maximal chains of two links and more, by the place of their last start; linear in the graph."""
    by_start = {c.start: c for c in skeleton.collectives if c.kind in _CHAINED}
    links: dict[Collective, tuple[Collective, Link]] = {}
    for collective in by_start.values():
        found = _previous(collective, by_start)
        if found is not None:
            links[collective] = found
    inner = {previous for previous, _ in links.values()}
    chains: list[list[Link]] = []
    for last in (c for c in links if c not in inner):
        chain: list[Link] = []
        current = last
        while current in links:
            previous, link = links[current]
            chain.append(link)
            current = previous
        chains.append([Link(current), *reversed(chain)])
    return chains


def _previous(
    collective: Collective, by_start: Mapping[fx.Node, Collective]
) -> tuple[Collective, Link] | None:
    """The collective of the same kind that ``collective`` passes on, and the link between."""
    between: list[fx.Node] = []
    obstacle: RefusalReason | None = None
    node = first_argument(collective.start)
    while isinstance(node, fx.Node) and node.op == "call_function":
        source = wait_source(node)
        if source is not None:
            before = by_start.get(source)
            if before is None or before.kind is not collective.kind:
                return None
            if len(node.users) != 1 or len(before.waits) != 1:
                obstacle = obstacle or RefusalReason.CHAIN_USERS
            return before, Link(collective, tuple(reversed(between)), obstacle)
        if not _carries(node):
            return None
        obstacle = obstacle or _obstacle(node)
        between.append(node)
        node = first_argument(node)
    return None


def _carries(node: fx.Node) -> bool:
    if op_namespace(node.target) != "aten":
        return False
    return is_view(node) or is_cast(node) or op_name(node.target) in (_SAME | _CUTS)


def _obstacle(node: fx.Node) -> RefusalReason | None:
    if len(node.users) != 1:
        return RefusalReason.CHAIN_USERS
    source = first_argument(node)
    assert isinstance(source, fx.Node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return RefusalReason.NO_METADATA
    if before.dtype != after.dtype:
        return RefusalReason.CHAIN_DTYPE
    if kind_of_view(node) is None:
        cut = op_name(node.target) in _CUTS
        return RefusalReason.CHAIN_UNEVEN if cut else RefusalReason.CHAIN_ORDER
    return None


def kind_of_view(node: fx.Node) -> str | None:
    """ "reshape", "permute", "same" (the elements and the shape stay), or None for anything else."""
    if op_namespace(node.target) != "aten":
        return None
    name = op_name(node.target)
    if name in _RESHAPES:
        return "reshape"
    if name in _PERMUTES:
        return "permute"
    if name in _SAME or is_full_slice(node) or _is_same_size(node, name):
        return "same"
    return None


def _is_same_size(node: fx.Node, name: str | None) -> bool:
    """A pad by nothing, an expansion to the size it has, a cast that changes nothing."""
    source = first_argument(node)
    if not isinstance(source, fx.Node):
        return False
    if name == "constant_pad_nd":
        return pads_by_nothing(node)
    if name != "expand" and not is_cast(node):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and same_sizes(before.shape, after.shape)


def permutation(node: fx.Node) -> list[int]:
    """Which dimension of its input each dimension of a permuting view is."""
    source = first_argument(node)
    assert isinstance(source, fx.Node)
    dims = source.meta["val"].dim()
    order = list(range(dims))
    name = op_name(node.target)
    if dims == 0:
        return []
    if name == "permute":
        given = schema_arguments(node)["dims"]
        return [int(d) % dims for d in given]  # type: ignore[attr-defined]
    if name == "t":
        return order[::-1]
    one, other = _two_dims(node)
    order[one % dims], order[other % dims] = order[other % dims], order[one % dims]
    return order


def _two_dims(node: fx.Node) -> tuple[int, int]:
    _, one, other = schema_arguments(node).values()
    return int(one), int(other)  # type: ignore[call-overload]
