"""No cyclic garbage collection while a pass runs.

A pass allocates some objects for each node and drops them at its end.  That many allocations set the
collector off a few times, and each time it walks all that the process holds, torch's modules included:
a fifth of the pass' CPU time.  Nothing is kept longer than the pass.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def without_gc(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the collector paused, if it was running; on again also if it raises."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run
