"""The package's flags as lines of torch's config, made from their table."""

from __future__ import annotations

import textwrap
import types
from typing import Any, Union, get_args, get_origin

from torch_patches.flags import FLAGS, Flag
from upstream.errors import StackError
from upstream.ruff import formatted

_WIDTH = 84  # of a comment inside a class, with its indent of four


def flag_lines(left_out: tuple[str, ...]) -> str:
    """Comment, name, type and default of every flag that is not torch's own already.

    Raises:
        StackError: a flag that is left out does not exist.
    """
    if unknown := sorted(set(left_out) - {flag.name for flag in FLAGS}):
        raise StackError(f"flags_left_out: there is no flag {unknown[0]}")
    chosen = [flag for flag in FLAGS if not flag.of_torch and flag.name not in left_out]
    body = "\n\n".join(_lines(flag) for flag in chosen)
    shaped = formatted("class _:\n" + textwrap.indent(body, "    ") + "\n")
    return textwrap.dedent(shaped.split("\n", 1)[1])


def _lines(flag: Flag) -> str:
    comment = textwrap.wrap(flag.doc, _WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = [f"# {line}" for line in comment]
    return "\n".join([*lines, f"{flag.name}: {_type_text(flag.value_type)} = {flag.default!r}"])


def _type_text(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_type_text(part) for part in get_args(kind))
    if kind is type(None):
        return "None"
    if isinstance(kind, type) and get_origin(kind) is None:
        return kind.__name__
    return repr(kind).replace("typing.", "").replace("collections.abc.", "")
