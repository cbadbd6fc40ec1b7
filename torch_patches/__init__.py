"""Bucketing and overlap of collectives in compiled PyTorch programs.

Importing the package registers its flags with ``torch._inductor.config`` and hooks into the
Inductor compiler; it changes nothing while the flags are at their defaults::

    import torch_patches
    torch._inductor.config.aten_distributed_optimizations.bucketing_mode = "topo_span"
    model = torch.compile(model)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_patches import _hooks
from torch_patches import config as _config
from torch_patches._hooks import uninstall
from torch_patches.config import FlagError

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.graph.metrics import (
        max_consecutive_compute_between_reduce_scatters,
    )
    from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlanError
    from torch_patches.module_plans import plan_from_modules
    from torch_patches.optimize import optimize_graph
    from torch_patches.recording import capture

__version__ = "0.1.0"

__all__ = [
    "FlagError",
    "ModulePlanError",
    "__version__",
    "capture",
    "max_consecutive_compute_between_reduce_scatters",
    "optimize_graph",
    "plan_from_modules",
    "uninstall",
]

_config.register_flags()
_hooks.install()


#: Imported on first use: a compile does not need them.
_LAZY = {
    "ModulePlanError": "torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan",
    "capture": "torch_patches.recording",
    "max_consecutive_compute_between_reduce_scatters": (
        "torch_patches._inductor.fx_passes.comm_overlap.graph.metrics"
    ),
    "optimize_graph": "torch_patches.optimize",
    "plan_from_modules": "torch_patches.module_plans",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
