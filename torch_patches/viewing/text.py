"""Numbers for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_patches.viewing.picture import Run

_MIB = 1 << 20


def ms(value: float) -> str:
    """Milliseconds, as precise as is worth reading."""
    digits = 2 if value >= 100 else 3
    return f"{value:.{digits}f} ms"


def mib(size_bytes: float) -> str:
    """Bytes in the unit that fits."""
    if size_bytes >= 1024 * _MIB:
        return f"{size_bytes / 1024 / _MIB:.2f} GiB"
    if size_bytes >= _MIB:
        return f"{size_bytes / _MIB:.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB"


def percent(share: float) -> str:
    """A share, 0 to 1."""
    return f"{share:.1%}"


def run_title(name: str, run: Run) -> str:
    """What stands above a run's picture."""
    return (
        f"{name}: {run.total_ms:.2f} ms, compute stands still for {run.exposed_ms:.2f} ms, "
        f"{len(run.flights)} launches"
    )
