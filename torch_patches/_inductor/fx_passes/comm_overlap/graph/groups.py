"""One name for a process group, however the graph refers to it.

The argument may be a string, a node that yields a group, or a group object.  The stream of a
collective belongs to the group object, so two groups with equal ranks keep different names.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
import torch.fx as fx


def canonical_group(arguments: dict[str, object], node_numbers: dict[fx.Node, int]) -> str:
    """Name of the group in a collective's ``arguments``; equal for equal groups.

    The legacy namespace names a group by tag and rank list; a node that computes a group is named
    by what it computes, down to numbered placeholders, never by its node name.
    """
    group = arguments.get("group_name")
    if group is not None:
        return _name_of(group, node_numbers)
    return f"ranks:{arguments.get('tag', '')}:{arguments.get('ranks', arguments.get('group'))}"


def _name_of(group: object, node_numbers: dict[fx.Node, int]) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, fx.Node):
        known = getattr(group.meta.get("val"), "group_name", None)
        return known if isinstance(known, str) else _describe(group, node_numbers, {})
    name = getattr(group, "group_name", None)
    return name if isinstance(name, str) else repr(group)


def _describe(value: object, node_numbers: dict[fx.Node, int], known: dict[fx.Node, str]) -> str:
    """Text of the computation that yields a group: equal text means the same group.

    A node met before is named by the order of its first visit, so that the text stays linear.
    """
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_describe(v, node_numbers, known) for v in value) + "]"
    if not isinstance(value, fx.Node):
        return repr(value)
    if value in known:
        return known[value]
    known[value] = f"${len(known)}"
    if value.op == "get_attr":
        return f"attribute {value.target}"
    if value.op != "call_function":
        return f"%{node_numbers[value]}"
    parts = [_describe(a, node_numbers, known) for a in (*value.args, *value.kwargs.values())]
    return f"{value.target}({', '.join(parts)})"


def registered_ranks(group: str) -> tuple[int, ...] | None:
    """Global ranks of a registered group in group order, None where it is not registered."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(cast(Any, group))))
    except (RuntimeError, ValueError, KeyError):
        return None
