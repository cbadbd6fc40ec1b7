"""Tags: what the joint graph told about a collective, kept in the metadata of its chain."""

from __future__ import annotations

from dataclasses import replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag

#: ``node.meta`` key of a :class:`CollectiveTag`, on a start, its waits and what they pass on.
TAG_MARK = "comm_overlap_tag"


def tag_of(node: fx.Node) -> CollectiveTag | None:
    """The tag of a node, or None."""
    tag = node.meta.get(TAG_MARK)
    return tag if isinstance(tag, CollectiveTag) else None


def without_parameter(tag: CollectiveTag) -> CollectiveTag:
    """The tag of a bucket: its members' traffic, and none of their names."""
    return replace(tag, parameter=None, index=None, place=None)
