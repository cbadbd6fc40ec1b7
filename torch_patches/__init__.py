"""Bucketing and overlap of collectives in compiled PyTorch programs.

Importing the package registers its flags with ``torch._inductor.config`` and hooks into the
Inductor compiler; it changes nothing while the flags are at their defaults::

    import torch_patches
    torch._inductor.config.aten_distributed_optimizations.bucketing_mode = "topo_span"
    model = torch.compile(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_patches import _hooks
from torch_patches import config as _config
from torch_patches._hooks import uninstall
from torch_patches.config import FlagError

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.report import (
        max_consecutive_compute_between_reduce_scatters,
    )
    from torch_patches.optimize import optimize_graph

__version__ = "0.1.0"

__all__ = [
    "FlagError",
    "__version__",
    "max_consecutive_compute_between_reduce_scatters",
    "optimize_graph",
    "uninstall",
]

_config.register_flags()
_hooks.install()


def __getattr__(name: str) -> Any:
    """The functions on graphs are imported on first use: a compile does not need them."""
    if name == "optimize_graph":
        from torch_patches.optimize import optimize_graph

        return optimize_graph
    if name == "max_consecutive_compute_between_reduce_scatters":
        from torch_patches._inductor.fx_passes.comm_overlap import report

        return report.max_consecutive_compute_between_reduce_scatters
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
