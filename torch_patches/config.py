"""The flags as real entries of ``torch._inductor.config`` under ``aten_distributed_optimizations``.

:data:`~torch_patches.flags.FLAGS` says which there are::

    dist = torch._inductor.config.aten_distributed_optimizations
    dist.bucketing_mode = "topo_span"
    dist.max_topo_span = 500

torch does not check what is assigned to a flag, so values are checked when a compile starts
(:func:`read_options`); a bad one raises :class:`FlagError`.  Upstream these are lines of torch's
own config file, so this module does not move.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_patches import _compat
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import load_calibration
from torch_patches._inductor.fx_passes.comm_overlap.estimate.custom import estimation_key
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.flag_checks import BUCKETING_MODES, Unacceptable
from torch_patches.flags import (
    BY_NAME,
    DIGEST_FLAG,
    FLAGS,
    NEUTRAL_DIGEST,
    PREFIX,
    Flag,
    FlagDescription,
    FlagError,
)

logger = logging.getLogger(__name__)

__all__ = [
    "BUCKETING_MODES",
    "DIGEST_FLAG",
    "FLAGS",
    "NEUTRAL_DIGEST",
    "PREFIX",
    "Flag",
    "FlagDescription",
    "FlagError",
    "check_value",
    "current_value",
    "describe_flags",
    "options_from_arguments",
    "read_options",
    "register_flags",
    "reset_flags",
]


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
    return _completed(Options(**checked))


def _completed(options: Options) -> Options:
    """Reads the calibration file once, so that a backward uses what its forward used, and adds what
    tells the user's functions apart.

    Raises:
        FlagError: bucketing_mode is "modules" and there is no plan.
        OSError: the calibration file cannot be read.
        CalibrationError: its content is not a table.
    """
    if options.bucketing_mode == "modules" and options.module_bucket_plans is None:
        raise FlagError(
            f"{_flag_label('bucketing_mode')}: 'modules' needs {PREFIX}module_bucket_plans, which is "
            f"None; use {BY_NAME['module_bucket_plans'].allowed}, or bucketing_mode "
            "'transformer_block', which finds the modules"
        )
    _warn_of_unread(options)
    if options.custom_runtime_estimation is not None:
        digest = estimation_key(options.custom_runtime_estimation)
        options = replace(options, estimation_digest=digest)
    if options.module_stack_fn is not None:
        options = replace(options, module_stack_digest=estimation_key(options.module_stack_fn))
    if options.calibration_file is None or options.bucketing_mode == "none":
        return options
    try:
        table = load_calibration(options.calibration_file)
    except OSError as error:  # of the same kind, with the flag's name
        what = f"{_flag_label('calibration_file')}: {error.strerror}"
        raise OSError(error.errno, what, options.calibration_file) from error
    return replace(options, calibration=table, calibration_digest=table.content_digest)


def _warn_of_unread(options: Options) -> None:
    """Flags that change nothing without others, or in this mode."""
    if options.create_flattened_groups and not options.fuses:
        _warn_unread(("create_flattened_groups",), "fuse_chained_all_gathers", False)
    if options.keep_gathered_parameters and not options.keeps:
        _warn_unread(("keep_gathered_parameters",), "bucketing_mode", "none")
    if options.copy_engine_gathers and options.bucketing_mode == "none":
        _warn_unread(("copy_engine_gathers",), "bucketing_mode", "none")
    if options.bucketing_mode in ("none", "modules"):
        return
    unread: dict[str, object] = {"module_bucket_plans": options.module_bucket_plans}
    if not options.reads_modules:
        unread["module_overlap_with"] = options.module_overlap_with or None
        unread["module_stack_fn"] = options.module_stack_fn
    if names := tuple(name for name, value in unread.items() if value is not None):
        _warn_unread(names, "bucketing_mode", options.bucketing_mode)


@functools.cache
def _warn_unread(names: tuple[str, ...], because: str, value: object) -> None:
    """Once for each."""
    texts = ", ".join(PREFIX + name for name in names)
    logger.warning("%s: no effect with %s = %r", texts, because, value)


def options_from_arguments(arguments: Mapping[str, object], function: str) -> Options:
    """Options from keyword arguments; those not given take the flag's value.

    Args:
        arguments: names of :data:`FLAGS` and values; ``bucket_cap_mb`` may be a function here.
        function: the caller's name, for the error text.

    Raises:
        FlagError: on a wrong type or value, naming argument or flag, whichever it came from.
        TypeError: on an unknown name.
    """
    if unknown := sorted(set(arguments) - set(BY_NAME)):
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
    return _completed(Options(**checked))


def check_value(name: str, value: object, label: str) -> Any:
    """The value in the form a pass reads.

    Raises:
        FlagError: naming ``label`` (a flag or an argument), the value and what is allowed.
    """
    flag = BY_NAME[name]
    try:
        return flag.check(value)
    except Unacceptable as problem:
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
