"""torch's own flags that do what ours do: off for a compile of ours, or warned of."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_patches import _compat, config
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import measured_estimators
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._once import warn_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _LegacyFlag:
    """A flag of torch that buckets or reorders collectives on its own.

    Args:
        name: its name.
        off: the value that leaves collectives alone.
        switch_off: whether we set it to ``off`` for a compile of ours.
    """

    name: str
    off: object
    switch_off: bool


_LEGACY_FLAGS = (
    _LegacyFlag("bucket_all_gathers_fx", "none", True),
    _LegacyFlag("bucket_reduce_scatters_fx", "none", True),
    _LegacyFlag("bucket_all_reduces_fx", "none", True),
    _LegacyFlag("_fuse_ddp_communication", False, False),
)

_REORDERING = "reorder_for_compute_comm_overlap"
"""torch's own reordering.  It is all the overlap there is where ours does not schedule."""


def torch_pass_patches(user: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Settings that keep torch's own passes from doing our job again; warns where they were on."""
    patches: dict[str, Any] = {}
    conflicts = []
    for flag in (*_LEGACY_FLAGS, _LegacyFlag(_REORDERING, False, options.schedules)):
        if not _compat.has_config(flag.name):
            continue
        value = config.current_value(flag.name, user)
        if value != flag.off:
            effect = "switched off for this compile" if flag.switch_off else "left on"
            conflicts.append(f"{flag.name} = {value!r} ({effect})")
        if flag.switch_off:
            patches[flag.name] = flag.off
    if conflicts:
        warn_once(
            logger,
            "legacy flags",
            "%sbucketing_mode = %r is set together with torch's %s",
            config.PREFIX,
            options.bucketing_mode,
            ", ".join(conflicts),
        )
    if options.schedules and _compat.has_config(_compat.SIMPLE_OVERLAP_FLAG):
        patches[_compat.SIMPLE_OVERLAP_FLAG] = False
    _warn_of_measuring(user)
    return patches


def _warn_of_measuring(user: Mapping[str, Any]) -> None:
    """torch's flags that make each rank measure for itself have no effect on our estimates."""
    names = [config.PREFIX + name for name in _compat.MEASURING_FLAGS]
    names = [name for name in names if _compat.has_config(name)]
    values = {name: config.current_value(name, user) for name in names}
    defaults = {name: _compat.config_module._config[name].default for name in names}
    if asked := measured_estimators(values, defaults):
        warn_once(
            logger,
            "measured estimates",
            "%s: ranks would measure different times and schedule differently, so torch_patches "
            "ignores it; measured times come from %scalibration_file, one file for all ranks",
            ", ".join(asked),
            config.PREFIX,
        )
