"""The flags: real entries of ``torch._inductor.config`` under ``aten_distributed_optimizations``.

One table, :data:`FLAGS`, is the source of registration, validation and documentation::

    dist = torch._inductor.config.aten_distributed_optimizations
    dist.bucketing_mode = "topo_span"
    dist.max_topo_span = 500

torch does not check what is assigned to a flag, so values are checked when a compile starts
(:func:`read_options`); a bad one raises :class:`FlagError`.  Upstream these are lines of torch's
own config file, so this module does not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import load_calibration
from torch_patches._inductor.fx_passes.comm_overlap.estimate.custom import estimation_key
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    DEFAULT_MEMORY_INCREASE,
    DEFAULT_PREFETCH,
    Options,
)

PREFIX = "aten_distributed_optimizations."
BUCKETING_MODES = ("none", "topo_span", "auto")
BUCKET_MODES = (None, "default", "coalesced")
NEUTRAL_DIGEST = "inactive"


class FlagError(ValueError):
    """A flag or argument has a wrong type or value; the text names it and what is allowed."""


class _Unacceptable(Exception):
    """Raised by a check; the text, which may be empty, is a hint for the user."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        name: without the prefix.
        default: its value where nobody set it.
        value_type: annotation handed to torch.  ``torch.compile(options=...)`` tests plain classes
            itself, with a message that does not say what is allowed; for generic annotations it
            leaves the test to us.
        check: returns the value in the form a pass reads; raises ``_Unacceptable``.
        allowed: the end of the sentence "... is not allowed: use".
        doc: effect, unit, and what None means.
        of_torch: torch's own passes read it too.  While ours are off its value is their matter.
    """

    name: str
    default: object
    value_type: Any
    check: Callable[[object], Any]
    allowed: str
    doc: str
    of_torch: bool = False

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


@dataclass(frozen=True)
class FlagDescription:
    """A flag as text, for documentation."""

    name: str
    default: str
    allowed: str
    doc: str


# -- checks: each returns the normalised value or raises ------------------------------------------


def _check_bucketing_mode(value: object) -> str:
    if isinstance(value, str) and value in BUCKETING_MODES:
        return value
    raise _Unacceptable


def _check_count(value: object) -> int | None:
    if value is None:
        return None
    # bool is an int to Python; a count of True is a mistake.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _Unacceptable


def _check_ranks(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise _Unacceptable


def _check_number(low: float, high: float = math.inf) -> Callable[[object], float]:
    """Of a finite number between ``low`` and ``high``, both included."""

    def check(value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                raise _Unacceptable from None
            if math.isfinite(number) and low <= number <= high:
                return number
        raise _Unacceptable

    return check


def _or_none(check: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else check(value)


def _check_one_cap(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            cap = float(value)
        except OverflowError:
            raise _Unacceptable from None
        if math.isfinite(cap) and cap > 0:
            return cap
    raise _Unacceptable


def _check_cap(value: object) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if callable(value):
        raise _Unacceptable("a function is for optimize_graph(bucket_cap_mb=...) only")
    if isinstance(value, (list, tuple)):
        if not value:
            raise _Unacceptable("the list is empty")
        return tuple(_check_one_cap(item) for item in value)
    return _check_one_cap(value)


def _check_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _Unacceptable


def _check_device(value: object) -> str:
    if isinstance(value, str) and value in DEVICES:
        return value
    raise _Unacceptable


def _check_path(value: object) -> str:
    if isinstance(value, str) and value and "\0" not in value:
        return value
    raise _Unacceptable


def _check_function(value: object) -> Callable[..., Any]:
    if callable(value):
        return value
    raise _Unacceptable


def _check_bucket_mode(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in BUCKET_MODES):
        return value
    raise _Unacceptable


def _quoted(values: tuple[str | None, ...]) -> str:
    return ", ".join(repr(value) for value in values)


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="bucketing_mode",
        default="none",
        value_type=Literal["none", "topo_span", "auto"],
        check=_check_bucketing_mode,
        allowed=f"one of {_quoted(BUCKETING_MODES)}",
        doc="Which collectives are merged: 'none' changes nothing; 'topo_span' merges greedily in "
        "graph order, bounded by bucket_cap_mb and max_topo_span; 'auto' tries several bucket "
        "sizes, schedules each, and takes what is estimated to be fastest.",
    ),
    Flag(
        name="max_topo_span",
        default=1500,
        value_type=int | None,
        check=_check_count,
        allowed="an int >= 0, or None for no bound",
        doc="Largest distance, in nodes that do work, between the first and the last member of a "
        "bucket. None: no bound.",
    ),
    Flag(
        name="bucket_cap_mb",
        default=None,
        value_type=float | list[float] | None,
        check=_check_cap,
        allowed="a finite number > 0, a list of such numbers by bucket index (the last repeats), "
        "or None for an estimate",
        doc="MB (2**20 bytes) that one bucket may hold. A list is by bucket index, its last value "
        "repeating. None: the size that saturates the group's network or, where that is more, the "
        "largest single collective of the bucket's key, up to 500 MB; for DDP's all-reduces 25 MB. "
        "Where it is None or one number, the first bucket of those holds at most 1 MB, to start "
        "early.",
    ),
    Flag(
        name="primary_fsdp_group_only",
        default=False,
        value_type=bool,
        check=_check_bool,
        allowed="True or False",
        doc="Of the process groups with parameter gathers or gradient scatters, merge only in the "
        "one with the most gathers. Groups without either (replicas) are served all the same.",
    ),
    Flag(
        name="bucket_mode",
        default=None,
        value_type=Literal["default", "coalesced"] | None,
        check=_check_bucket_mode,
        allowed=f"one of {_quoted(BUCKET_MODES)} (together with bucketing_mode)",
        doc="How a bucket is built: 'default' copies into one tensor and out of it, 'coalesced' "
        "launches all members at once without copies. None: chosen by the pass. torch's own flag "
        "from 2.12 on.",
        of_torch=True,
    ),
    Flag(
        name="enable_overlap_scheduling",
        default=False,
        value_type=bool,
        check=_check_bool,
        allowed="True or False",
        doc="Also decide when collectives start and when they are waited for; 'auto' does so "
        "anyway. With bucketing_mode 'none' it turns on torch's own scheduler.",
        of_torch=True,
    ),
    Flag(
        name="insert_overlap_deps",
        default=None,
        value_type=bool | None,
        check=_or_none(_check_bool),
        allowed="True, False or None",
        doc="Hold the planned order in Inductor by control dependencies. None: yes under Inductor, "
        "no elsewhere.",
        of_torch=True,
    ),
    Flag(
        name="max_memory_increase_gb",
        default=None,
        value_type=float | None,
        check=_or_none(_check_number(0)),
        allowed="a finite number >= 0, or None for no absolute cap",
        doc="GB (2**30 bytes) by which scheduling and merging may raise the peak.",
        of_torch=True,
    ),
    Flag(
        name="max_memory_increase_ratio",
        default=None,
        value_type=float | None,
        check=_or_none(_check_number(0)),
        allowed="a finite number >= 0, or None for no relative cap",
        doc="The same as a share of the input's peak. Of this and max_memory_increase_gb the "
        f"smaller counts; with both None {DEFAULT_MEMORY_INCREASE} of the peak, at least 32 MiB.",
        of_torch=True,
    ),
    Flag(
        name="max_in_flight_gb",
        default=None,
        value_type=float | None,
        check=_or_none(_check_number(0)),
        allowed="a finite number >= 0, or None for no bound of its own",
        doc="GB of collectives that have started and are not used or waited for yet: no gather "
        "starts early and no bucket is made beyond it, and reductions are waited for once it is "
        "passed. What the input has in flight at once stays allowed.",
        of_torch=True,
    ),
    Flag(
        name="max_compute_pre_fetch",
        default=None,
        value_type=int | None,
        check=_check_count,
        allowed=f"an int >= 0, or None for {DEFAULT_PREFETCH}",
        doc="Kernels between the start of a gather and its first use. None: "
        f"{DEFAULT_PREFETCH}, about three layers of a transformer.",
        of_torch=True,
    ),
    Flag(
        name="gpus_per_node",
        default=8,
        value_type=int,
        check=_check_ranks,
        allowed="an int >= 1",
        doc="Ranks that share a node; estimates ask no machine, so that all ranks agree.",
    ),
    Flag(
        name="estimate_device",
        default="H100",
        value_type=str,
        check=_check_device,
        allowed=f"one of {_quoted(tuple(DEVICES))}",
        doc="Whose rates estimates use.",
    ),
    Flag(
        name="compute_slowdown",
        default=1.2,
        value_type=float,
        check=_check_number(1),
        allowed="a finite number >= 1",
        doc="A kernel is estimated to take this many times as long under a collective.",
    ),
    Flag(
        name="link_sharing",
        default=1.0,
        value_type=float,
        check=_check_number(0, 1),
        allowed="a number from 0 to 1",
        doc="Share of a transfer that one of another group on the same link waits for: 1 is one "
        "network, 0 is two.",
    ),
    Flag(
        name="calibration_file",
        default=None,
        value_type=str | None,
        check=_or_none(_check_path),
        allowed="the path of a table made by tools/calibrate.py, or None",
        doc="Measured costs to use before those of estimate_device; the same file on all ranks.",
    ),
    Flag(
        name="custom_runtime_estimation",
        default=None,
        value_type=Callable[..., Any] | None,
        check=_or_none(_check_function),
        allowed="a function (node, override_size_bytes or None) -> ms or None, or None",
        doc="Estimation that is asked first; it must give the same on all ranks. A function that "
        "can be imported, or has a uuid(), keeps compiles cacheable.",
        of_torch=True,
    ),
)
_BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}

DIGEST_FLAG = PREFIX + "_torch_patches_digest"
"""Private: carries what a plan depends on and torch's cache key does not see; set by the hook."""


def register_flags() -> None:
    """Add the flags to Inductor's config.  An entry that exists, ours or torch's, is kept."""
    try:
        for flag in FLAGS:
            _register(flag.full_name, flag.default, flag.value_type)
        _register(DIGEST_FLAG, NEUTRAL_DIGEST, str)
    except (AttributeError, TypeError):
        # The config's inside changed.  On an untested torch that is no reason to break the
        # user's import: nothing would read the flags, and the hooks give the one warning.
        if _compat.is_supported_torch():
            raise


def _register(full_name: str, default: object, value_type: Any) -> None:
    if _compat.has_config(full_name):
        return
    entry = _compat.new_config_entry(full_name, default, value_type)
    # Torch's entries have no such attribute: it tells ours apart when they are reset.
    entry.added_by = __name__
    _compat.config_module._config[full_name] = entry
    _compat.mark_config_changed()


def reset_flags() -> None:
    """Put the flags that this package added back to their defaults, in the current context.

    The entries stay: torch has no way to take one out that survives a later ``load_config``.
    """
    for full_name in [flag.full_name for flag in FLAGS] + [DIGEST_FLAG]:
        entry = _compat.config_module._config.get(full_name)
        if getattr(entry, "added_by", None) == __name__:
            delattr(_compat.config_module, full_name)  # forgets the override, and hides the entry
            entry.hide = False


def current_value(full_name: str, overrides: Mapping[str, object] | None = None) -> Any:
    """What a compile with these ``config_patches`` sees for the flag."""
    if overrides and full_name in overrides:
        return overrides[full_name]
    return getattr(_compat.config_module, full_name)


def read_options(overrides: Mapping[str, object] | None = None) -> Options:
    """Read and check all flags.

    Args:
        overrides: full flag names and values that apply on top (``config_patches`` of a compile).

    Raises:
        FlagError: on the first flag with a wrong type or value.
    """
    values = {flag.name: current_value(flag.full_name, overrides) for flag in FLAGS}
    if values["bucketing_mode"] == "none":
        values.update((flag.name, flag.default) for flag in FLAGS if flag.of_torch)
    checked = {name: check_value(name, value, _flag_label(name)) for name, value in values.items()}
    return _with_digests(Options(**checked))


def _with_digests(options: Options) -> Options:
    """Reads the calibration file once, so that a backward uses what its forward used, and adds what
    tells estimates apart.

    Raises:
        OSError: it cannot be read.
        CalibrationError: its content is not a table.
    """
    custom = options.custom_runtime_estimation
    if custom is not None:
        options = replace(options, estimation_digest=estimation_key(custom))
    if options.calibration_file is None or options.bucketing_mode == "none":
        return options
    table = load_calibration(options.calibration_file)
    return replace(options, calibration=table, calibration_digest=table.content_digest)


def options_from_arguments(arguments: Mapping[str, object], function: str) -> Options:
    """Options from keyword arguments; those not given take the flag's value.

    Args:
        arguments: names of :data:`FLAGS` and values; ``bucket_cap_mb`` may be a function here.
        function: the caller's name, for the error text.

    Raises:
        FlagError: on a wrong type or value, naming argument or flag, whichever it came from.
        TypeError: on an unknown name.
    """
    if unknown := sorted(set(arguments) - set(_BY_NAME)):
        raise TypeError(f"{function}() got an unexpected argument {unknown[0]!r}")
    checked: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.name not in arguments:
            value = current_value(flag.full_name)
            checked[flag.name] = check_value(flag.name, value, _flag_label(flag.name))
            continue
        value = arguments[flag.name]
        if flag.name == "bucket_cap_mb" and callable(value):
            checked[flag.name] = value
        else:
            checked[flag.name] = check_value(flag.name, value, f"{function}({flag.name}=...)")
    return _with_digests(Options(**checked))


def check_value(name: str, value: object, label: str) -> Any:
    """The value in the form a pass reads.

    Raises:
        FlagError: naming ``label`` (a flag or an argument), the value and what is allowed.
    """
    flag = _BY_NAME[name]
    try:
        return flag.check(value)
    except _Unacceptable as problem:
        hint = f" ({problem})" if str(problem) else ""
        raise FlagError(f"{label}: {value!r} is not allowed{hint}; use {flag.allowed}") from None


def _flag_label(name: str) -> str:
    return f"torch._inductor.config.{PREFIX}{name}"


def describe_flags() -> list[FlagDescription]:
    """All public flags as text, in the order of the table."""
    return [
        FlagDescription(flag.full_name, repr(flag.default), flag.allowed, flag.doc)
        for flag in FLAGS
    ]
