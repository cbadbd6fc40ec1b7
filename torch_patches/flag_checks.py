"""What flags may be: each check returns the value in the form a pass reads, or raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlanError,
    parse_plan,
)

BUCKETING_MODES = ("none", "topo_span", "transformer_block", "modules", "auto")
CROSS_RANK_CHECKS = ("off", "warn", "error", "agree")
BUCKET_MODES = (None, "default", "coalesced")


class Unacceptable(Exception):
    """Raised by a check; the text, which may be empty, is a hint for the user."""


def check_bucketing_mode(value: object) -> str:
    if isinstance(value, str) and value in BUCKETING_MODES:
        return value
    raise Unacceptable


def check_count(value: object) -> int | None:
    if value is None:
        return None
    # bool is an int to Python; a count of True is a mistake.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Unacceptable


def check_ranks(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise Unacceptable


def check_number(low: float, high: float = math.inf) -> Callable[[object], float]:
    """Of a finite number between ``low`` and ``high``, both included."""

    def check(value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                raise Unacceptable from None
            if math.isfinite(number) and low <= number <= high:
                return number
        raise Unacceptable

    return check


def check_depth(value: object) -> int:
    if value is None or (count := check_count(value)) is None:
        raise Unacceptable
    return count


def or_none(check: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else check(value)


def check_one_cap(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            cap = float(value)
        except OverflowError:
            raise Unacceptable from None
        if math.isfinite(cap) and cap > 0:
            return cap
    raise Unacceptable


def check_cap(value: object) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if callable(value):
        raise Unacceptable("a function is for optimize_graph(bucket_cap_mb=...) only")
    if isinstance(value, (list, tuple)):
        if not value:
            raise Unacceptable("the list is empty")
        return tuple(check_one_cap(item) for item in value)
    return check_one_cap(value)


def check_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise Unacceptable


def check_device(value: object) -> str:
    if isinstance(value, str) and value in DEVICES:
        return value
    raise Unacceptable


def check_path(value: object) -> str:
    if isinstance(value, str) and value and "\0" not in value:
        return value
    raise Unacceptable


def check_function(value: object) -> Callable[..., Any]:
    if callable(value):
        return value
    raise Unacceptable


def check_plans(value: object) -> tuple[tuple[str, ...] | str, ...]:
    try:
        return parse_plan(value).entries
    except ModulePlanError as problem:
        raise Unacceptable(str(problem)) from None


def check_overlap_with(value: object) -> tuple[tuple[str, str], ...]:
    """In the order of names, since that of a dict may differ between ranks."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)):
        raise Unacceptable
    for pair in pairs:
        texts = isinstance(pair, tuple) and all(isinstance(text, str) and text for text in pair)
        if not texts or len(pair) != 2:
            raise Unacceptable
    return tuple(sorted(pairs))


def one_of(values: tuple[str, ...]) -> Callable[[object], str]:
    def check(value: object) -> str:
        if isinstance(value, str) and value in values:
            return value
        raise Unacceptable

    return check


def check_bucket_mode(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in BUCKET_MODES):
        return value
    raise Unacceptable


def quoted(values: tuple[str | None, ...]) -> str:
    return ", ".join(repr(value) for value in values)
