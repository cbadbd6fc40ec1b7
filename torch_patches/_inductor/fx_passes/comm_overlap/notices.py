"""What the user is told once, where a graph cannot be handled."""

from __future__ import annotations

import functools
import logging
import os

import torch

log = logging.getLogger(__name__)

#: Causes local to one rank: swallowing them there would change one rank's schedule and hang the job.
RANK_LOCAL_ERRORS = (
    OSError,
    MemoryError,
    RecursionError,
    ImportError,
    torch.OutOfMemoryError,
)

MAX_REASON = 300  # characters of an error in a warning

#: Set to 1 to raise instead of leaving a graph untouched; the test-suite does.
STRICT_VARIABLE = "TORCH_PATCHES_STRICT"


def reason_of(error: Exception) -> str:
    """The first line of an error: torch lists a hundred lines of kernels behind some."""
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
    return f"{type(error).__name__}: {shown}"


def raise_if_strict(error: Exception) -> None:
    """For tests: raises it where STRICT_VARIABLE is set."""
    if os.environ.get(STRICT_VARIABLE) == "1":
        raise error


@functools.cache
def warn_untagged(reason: str) -> None:
    """Once per reason."""
    log.warning(
        "torch_patches could not tag the collectives of a graph (%s), and judges by structure what "
        'they carry. aten_distributed_optimizations.bucketing_mode = "none" turns bucketing off; '
        "%s=1 raises with the full trace.",
        reason,
        STRICT_VARIABLE,
    )


@functools.cache
def warn_unfused(reason: str) -> None:
    """Once per reason."""
    log.warning(
        "torch_patches left the chained collectives of a graph as they were, because fusing them "
        "failed (%s). aten_distributed_optimizations.fuse_chained_all_gathers and "
        "fuse_chained_reduce_scatters = False turn it off; %s=1 raises with the full trace.",
        reason,
        STRICT_VARIABLE,
    )


@functools.cache
def warn_untouched(reason: str) -> None:
    """Once per reason; a retried compile does not repeat it."""
    log.warning(
        "torch_patches left a graph as it was, because bucketing it failed (%s). "
        'aten_distributed_optimizations.bucketing_mode = "none" turns bucketing off; '
        "%s=1 raises with the full trace.",
        reason,
        STRICT_VARIABLE,
    )


@functools.cache
def warn_not_kept(reason: str) -> None:
    """Once per reason."""
    log.warning(
        "torch_patches kept no gathered parameter from forward to backward (%s). "
        "aten_distributed_optimizations.keep_gathered_parameters = False turns it off; "
        "%s=1 raises with the full trace.",
        reason,
        STRICT_VARIABLE,
    )
