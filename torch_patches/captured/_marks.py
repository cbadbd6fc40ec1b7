"""What the passes note in a node's metadata, as JSON and back.

Tags of the joint graph, so that a forward or backward graph is planned as it was in its compile; and
the marks of buckets, so that a graph as the passes left it shows what they did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    BUCKET_MARK,
    MEMBER_MARK,
    SCHEDULED_MARK,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import PART_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.evenness import UNEVEN_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK, tag_of
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveTag, TagSource, Traffic
from torch_patches.captured._symbols import check_integer
from torch_patches.captured._targets import CaptureFormatError

_FLAGS = {"member": MEMBER_MARK, "part": PART_MARK, "uneven": UNEVEN_MARK}


def encode_marks(node: Any) -> dict[str, Any]:
    """``node``'s tag and marks by name; empty where it has none."""
    meta: Mapping[str, Any] = node.meta
    encoded: dict[str, Any] = {name: True for name, mark in _FLAGS.items() if mark in meta}
    tag = tag_of(node)
    if tag is not None:
        names = [tag.traffic.value, tag.source.value]
        encoded["tag"] = [*names, tag.parameter, tag.index, tag.place]
    if BUCKET_MARK in meta:
        mark = meta[BUCKET_MARK]
        encoded["bucket"] = [mark["bucket"], mark["members"], mark["traffic"]]
    if meta.get(SCHEDULED_MARK) is not None:
        # The options it is made of may hold a path.
        encoded["scheduled"] = hashlib.sha256(str(meta[SCHEDULED_MARK]).encode()).hexdigest()[:16]
    return encoded


def decode_marks(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of :func:`encode_marks`.

    Raises:
        CaptureFormatError: a part has a wrong type or value.
    """
    if not isinstance(encoded, Mapping):
        raise CaptureFormatError("marks of a node are no object")
    meta: dict[str, Any] = {mark: True for name, mark in _FLAGS.items() if name in encoded}
    if "tag" in encoded:
        traffic, source, parameter, index, place = encoded["tag"]
        meta[TAG_MARK] = CollectiveTag(
            Traffic(traffic), TagSource(source), _text(parameter), _number(index), _number(place)
        )
    if "bucket" in encoded:
        bucket, members, traffic = encoded["bucket"]
        meta[BUCKET_MARK] = {
            "bucket": check_integer(bucket),
            "members": check_integer(members),
            "traffic": Traffic(traffic).value,
        }
    if "scheduled" in encoded:
        meta[SCHEDULED_MARK] = _text(encoded["scheduled"])
    return meta


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise CaptureFormatError(f"expected a text, got {str(value)[:200]!r}")
    return value


def _number(value: Any) -> int | None:
    return None if value is None else check_integer(value)
