"""Every difference between torch releases that this package knows of, and nothing else.

Each entry says from which minimum torch on it can be dropped, or why it stays.  Where torch can be
asked whether it has a thing, it is asked, because nightly builds carry a release number of the
future.

Not here is what is right on every release and only needed on old ones, with nothing to ask: each
says so where it is.  With a minimum of 2.12 ``_with_equal_heads`` (``estimate/compute.py``) and the
cast in ``testing/gathers.py`` can go; with 2.13 the first reason for ``_result``
(``graph/control.py``) is gone.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch.utils import _config_module

config_module: Any = inductor_config
"""Inductor's config with its private parts, which the type checker does not know."""

OLDEST_TORCH = (2, 11)
"""The first release the hooks are tested with."""

FIRST_UNTESTED_TORCH = (2, 16)
"""Raise it once the test suite has run on that release."""

ALLOW_UNTESTED_VARIABLE = "TORCH_PATCHES_ALLOW_UNTESTED_TORCH"
"""Environment variable; "1" installs the hooks on any torch."""


def torch_release(version: str | None = None) -> tuple[int, int]:
    """(major, minor) of a version text such as ``2.13.0+cpu`` or ``2.16.0a0+git1234``."""
    text = str(torch.__version__) if version is None else version
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        return (0, 0)
    return int(match.group(1)), int(match.group(2))


def is_supported_torch(version: str | None = None) -> bool:
    """Whether the hooks may install: a tested release, or the user insists."""
    if os.environ.get(ALLOW_UNTESTED_VARIABLE) == "1":
        return True
    return OLDEST_TORCH <= torch_release(version) < FIRST_UNTESTED_TORCH


def supported_range() -> str:
    """For messages."""
    (low_major, low_minor), (high_major, high_minor) = OLDEST_TORCH, FIRST_UNTESTED_TORCH
    return f">= {low_major}.{low_minor}, < {high_major}.{high_minor}"


# -- config entries -------------------------------------------------------------------------------


def new_config_entry(name: str, default: object, value_type: Any) -> Any:
    """An entry for the config module's table.

    From 2.12 on an entry keeps its override in a context variable, which wants a name; in 2.11
    it is an attribute.  Drop the second form when the minimum is 2.12.
    """
    described: Any = _config_module._Config(default=default, value_type=value_type)
    entry_type: Any = _config_module._ConfigEntry
    if keeps_overrides_in_context():
        return entry_type(described, name)
    return entry_type(described)


def keeps_overrides_in_context() -> bool:
    """Whether another thread sees the defaults instead of what this one assigned (from 2.12).

    Drop it when the minimum is 2.12.
    """
    return "name" in inspect.signature(_config_module._ConfigEntry).parameters


def mark_config_changed() -> None:
    """Make the next ``get_hash`` and ``save_config`` look at every entry again.

    2.13 caches both in context variables, 2.11 and 2.12 have one flag.  Drop the second form when
    the minimum is 2.13.
    """
    if hasattr(config_module, "_hash_dirty_var"):
        config_module._hash_dirty_var.set(True)
        config_module._get_dict_dirty_keys_var.set(None)
    else:
        config_module._is_dirty = True


# -- flags that not every release has -------------------------------------------------------------


def has_config(name: str) -> bool:
    """Whether Inductor's config has the flag ``name`` in this release.

    Asked for ``bucket_mode`` (from 2.12), the flags below, and by those who use them; drop the
    questions when the minimum has them.
    """
    return name in config_module._config


MEASURING_FLAGS = (
    "collective_estimator",
    "compute_estimator",
    "profile_guided_estimations_profile_path",
)
"""torch's flags by which each rank measures for itself; the second is there from 2.12 on, the third
from 2.13 on.  Who uses them need not ask whether they are there when the minimum is 2.13."""

SIMPLE_OVERLAP_FLAG = "aten_distributed_optimizations.enable_simple_overlap"
"""torch's own moving of starts up and waits down, in the code generator; on by default from 2.14
on.  It respects control dependencies, but moves a start far in front of where a plan has it.  Nobody
need ask whether it is there when the minimum is 2.14."""


# -- custom passes --------------------------------------------------------------------------------


def passes_may_be_lists() -> bool:
    """Whether a custom-pass flag takes a list (2.13) or one callable only (2.11, 2.12).

    Drop the single form, with ``_hooks.ComposedPass``, when the minimum is 2.13.
    """
    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def takes_is_inference(graph_pass: object) -> bool:
    """Whether torch calls the pass with ``is_inference=`` (a class that 2.11 does not have).

    Needed only to compose passes: drop it with :func:`passes_may_be_lists`.
    """
    kind = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return kind is not None and isinstance(graph_pass, kind)


def inference_aware_base() -> type:
    """The base class of passes called with ``is_inference=``, a plain pass where there is none.

    Drop it with :func:`passes_may_be_lists`.
    """
    plain = custom_graph_pass.CustomGraphPass
    return getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", plain)


# -- control dependencies -------------------------------------------------------------------------


def runs_control_deps() -> bool:
    """Whether a graph with ``control_deps`` can be run without Inductor (from 2.12).

    Drop it when the minimum is 2.12.
    """
    from torch._C import DispatchKey
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return DispatchKey.CompositeExplicitAutograd in control_deps.py_kernels


def sends_strided_payloads() -> bool:
    """Whether collectives take a payload that is not contiguous, run without Inductor (from 2.12).

    Asked by tests; drop it when the minimum is 2.12.
    """
    return torch_release() >= (2, 12)


# -- process groups and DTensors ------------------------------------------------------------------


def new_group_in_order(ranks: Sequence[int], backend: str, description: str) -> Any:
    """A process group made by its ``ranks`` alone, which keeps their order; None where torch sorts
    them (2.11).

    Drop the question when the minimum is 2.12.
    """
    keyword: dict[str, Any] = {"sort_ranks": False}
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        if list(ranks) != sorted(ranks):
            return None
        keyword = {}
    return dist.new_group(
        list(ranks),
        backend=backend,
        use_local_synchronization=True,
        group_desc=description,
        **keyword,
    )


def shard_orders(spec: Any) -> list[tuple[int, ...]]:
    """For each sharded dimension of a DTensor, the mesh dimensions that cut it, the first cut first.

    Mesh dimensions cut from left to right, but a strided shard behind as many others as its split
    factor has ranks: FSDP over a tensor-parallel weight has ``(_StridedShard(0, split_factor=2),
    Shard(0))``.  torch's own ``shard_order`` (2.12) is None for these, so it
    stays.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    sizes = [spec.mesh.size(dim) for dim in range(spec.mesh.ndim)]
    orders: dict[int, list[int]] = {}
    for mesh_dim, placement in reversed(list(enumerate(spec.placements))):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        order = orders.setdefault(placement.dim, [])
        in_front = placement.split_factor if isinstance(placement, _StridedShard) else 1
        place = 0
        while place < len(order) and in_front > 1:
            in_front //= sizes[order[place]]
            place += 1
        order.insert(place, mesh_dim)
    return [tuple(order) for order in orders.values()]


# -- torch's own names ----------------------------------------------------------------------------

DROPPED_ARGUMENTS = ("region_of",)
"""Arguments of torch 2.11 and 2.12 that 2.13 has no longer, and neither has ``compat_api``."""


def has_drop_in_signatures() -> bool:
    """Whether torch's scheduler and bucketers take what ``compat_api`` takes (from 2.13 on).

    Asked by tests; drop it with :data:`DROPPED_ARGUMENTS` when the minimum is 2.13.
    """
    return torch_release() >= (2, 13)


def has_prebucketing() -> bool:
    """Whether torch buckets FSDP's collectives before it schedules (from 2.13 on).

    Asked by the benchmarks and their tests; drop it when the minimum is 2.13.
    """
    from torch._inductor.fx_passes import fsdp

    return hasattr(fsdp, "pre_bucket_fsdp_collectives")


def names_given(graph: torch.fx.Graph) -> int:
    """Names that nodes of a graph ever had; torch takes none back when it erases a node.

    It stays: 2.11 to 2.15 keep them in the same place, but a private one.
    """
    return len(graph._graph_namespace._used_names)


def profile_reader() -> Any:
    """torch's class that estimates from a profile (from 2.13 on); None where there is none.

    Drop the question when the minimum is 2.13.
    """
    try:
        from torch._inductor.fx_passes import profile_guided_estimation
    except ImportError:
        return None
    return profile_guided_estimation.ProfileGuidedEstimator


def roofline_name() -> str | None:
    """What torch's scheduler calls its roofline, for tests without a GPU; None in 2.11.

    Drop the question when the minimum is 2.12.
    """
    from torch._inductor.fx_passes import overlap_scheduling

    name = "estimate_roofline_runtime_ms"
    return name if hasattr(overlap_scheduling, name) else None


def bandwidth_names(module: Any) -> tuple[str, ...]:
    """What of ``module`` gives the memory bandwidth of a device in GB/s.

    torch's roofline asks ``get_gpu_dram_gbps()`` up to 2.14, and ``get_device_dram_gbps(device)``
    from 2.15 on, whose utils have both.  Drop the question when the minimum is 2.15.
    """
    names = ("get_gpu_dram_gbps", "get_device_dram_gbps")
    return tuple(name for name in names if hasattr(module, name))
