"""Random values for every flag, most of them bounds that bind in graphs of tiny tensors.

    flags = random_flags(Random(0), description)
    options = read_flags(flags, description)      # as optimize_graph reads its arguments

:func:`bad_flag` gives a value that must be refused, with the flag's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.fx as fx

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap.estimate.fusion import is_kernel
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collective_kind
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.estimations import ESTIMATIONS
from torch_patches.testing.strategies import CAPS_MB, PLANS, Description

#: A table of measured costs, if there is one beside the package.
_CALIBRATION = Path(__file__).parents[2] / "tools/results/calibration_gloo_example.json"
_CAPTURED_PLANS: tuple[Any, ...] = (["layers.*"], ["tok_embeddings", "layers.*", ["norm", "output"]], [["layers.0", "layers.1"]])  # fmt: skip


@dataclass(frozen=True)
class RandomEstimation:
    """ms of a node by what it computes, so that any compute may hide any collective.

    Nodes of one target, shape and dtype take the same, whatever they are called: ranks agree.
    """

    seed: int

    def __call__(self, node: fx.Node, size_bytes: int | None) -> float | None:
        if collective_kind(node) is not None:
            per_kib = self._drawn(f"{collective_kind(node)} bandwidth", 20.0)
            size = 128 if size_bytes is None else size_bytes
            return self._drawn(f"{collective_kind(node)} latency", 5.0) + per_kib * size / 1024
        if not is_kernel(node):
            return None
        val = node.meta.get("val")
        shape = tuple(val.shape) if isinstance(val, torch.Tensor) else ()
        return self._drawn(f"{node.target} {shape}", 10.0)

    def _drawn(self, what: str, most: float) -> float:
        """Half of them next to nothing."""
        digest = hashlib.sha256(f"{self.seed} {what}".encode()).digest()
        return most * digest[0] / 255 if digest[1] & 1 else 0.01

    def uuid(self) -> str:
        return repr(self)


def stack_of_kinds(node: fx.Node) -> Sequence[tuple[str, type]]:
    """A ``module_stack_fn`` that puts products into one module and knows nothing of other nodes."""
    return [("layers.0", torch.nn.Linear)] if "mm" in str(node.target) else []


def random_flags(r: Random, description: Description) -> dict[str, Any]:
    """Arguments as ``optimize_graph`` takes them; flags that are left out keep their defaults."""
    mode = r.choice(["none", "topo_span", "auto", "auto", "transformer_block", "modules"])
    flags: dict[str, Any] = {"bucketing_mode": mode}
    for name, (share, values) in _DRAWS.items():
        if r.random() < share:
            flags[name] = r.choice(values)
    if mode == "modules":
        own = description.world_size == 4
        flags["module_bucket_plans"] = _as_lists(r.choice(PLANS if own else _CAPTURED_PLANS))
    # Which modules a graph has is drawn too.
    flags["module_plan_unmatched"] = "error" if r.random() < 0.15 else "warn"
    if r.random() < 0.7:
        flags["custom_runtime_estimation"] = r.choice(
            [None, *ESTIMATIONS, RandomEstimation(r.randrange(10_000))]
        )
    if mode == "none" or r.random() < 0.2:
        flags["fuse_chained_all_gathers"] = True
        flags["fuse_chained_reduce_scatters"] = r.random() < 0.5
    if _CALIBRATION.exists() and r.random() < 0.1:
        flags["calibration_file"] = str(_CALIBRATION)
    return flags


def _as_lists(plan: Sequence[Any]) -> list[Any]:
    return [entry if isinstance(entry, str) else list(entry) for entry in plan]


#: Flag -> how often it is given, and values.
_DRAWS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "max_topo_span": (0.6, (None, None, 0, 3, 8, 20, 40, 1500)),
    "bucket_cap_mb": (0.7, tuple(list(c) if isinstance(c, tuple) else c for c in CAPS_MB)),
    "primary_fsdp_group_only": (0.2, (True,)),
    "bucket_mode": (0.7, (None, "default", "coalesced")),
    "enable_overlap_scheduling": (0.5, (True, False)),
    "insert_overlap_deps": (0.3, (True, None, False)),
    "max_memory_increase_gb": (0.5, (None, 0.0, 1e-6)),
    "max_memory_increase_ratio": (0.5, (None, 0.0, 0.1, 10.0)),
    "max_in_flight_gb": (0.3, (None, 0.0, 3e-7)),
    "max_compute_pre_fetch": (0.4, (None, 0, 2, 10)),
    "max_schedules": (0.3, (1, 2, 5)),
    "gpus_per_node": (0.5, (1, 2, 8)),
    "estimate_device": (0.3, ("A100", "H200", "B200", "generic")),
    "compute_slowdown": (0.5, (1.0, 1.2, 2.0)),
    "link_sharing": (0.5, (0.0, 0.5, 1.0)),
    "module_overlap_with": (0.1, ({"layers.1": "layers.0"}, {"layers.2": "layers.1", "norm": "layers.0"}, {"nowhere": "layers.0"})),
    "module_prefetch_depth": (0.4, (0, 1, 2)),
    "module_deferral_depth": (0.4, (0, 1, 2)),
    "module_uncovered": (0.4, ("bucket", "leave")),
    "module_stack_fn": (0.1, (stack_of_kinds,)),
    "create_flattened_groups": (0.1, (True,)),
    "keep_gathered_parameters": (0.2, (True,)),
    "copy_engine_gathers": (0.1, (True,)),
    "cross_rank_check": (0.2, ("off", "warn", "error", "agree")),
}  # fmt: skip

#: Options that are no flags, as torch's own names set them.
_INNER: dict[str, tuple[Any, ...]] = {
    "run_eagerly": (True,),
    "any_traffic": (True,),
    "max_coll_distance": (0, 1, 3),
    "max_reduction_mb": (1e-4, 1.0),
    "bucket_exposed_first": (True,),
}


def read_flags(flags: dict[str, Any], description: Description, r: Random | None = None) -> Options:
    """The options of an ``optimize_graph`` with these arguments, on rank 0 of the graph's groups.

    Args:
        r: also draws options that have no flag.

    Raises:
        FlagError: as ``optimize_graph`` does.
    """
    options = config.options_from_arguments(flags, "optimize_graph")
    if options.fuses:
        options = replace(options, groups=group_table(description))
    if r is not None and r.random() < 0.15:
        # torch's own names merge any traffic only where nothing is scheduled
        names = [n for n in _INNER if n != "any_traffic" or not options.schedules]
        name = r.choice(names)
        options = replace(options, **{name: r.choice(_INNER[name])})
    return options


def group_table(description: Description) -> GroupTable:
    """What rank 0 has joined."""
    lists = {
        name: ranks for name, lists in description.groups.items() for ranks in lists if 0 in ranks
    }
    found = [(name, tuple(ranks), "gloo") for name, ranks in lists.items()]
    found.sort(key=lambda item: len(item[1]))  # the default group last
    return GroupTable(0, tuple(found))


# ---------------------------------------------------------------- what must be refused


def _fails(node: fx.Node, size: int | None) -> float:
    raise ValueError("no such node")


_BAD: dict[str, tuple[Any, ...]] = {
    "bucketing_mode": ("topo", None, 1, True),
    "max_topo_span": (-1, 1.5, True, "1"),
    "bucket_cap_mb": (0, -1.0, math.nan, math.inf, [], [1.0, 0], "25", True),
    "primary_fsdp_group_only": (1, None, "True"),
    "bucket_mode": ("copy", 1),
    "enable_overlap_scheduling": (None, 1),
    "insert_overlap_deps": ("yes", 1),
    "max_memory_increase_gb": (-1.0, math.nan, "1", True),
    "max_memory_increase_ratio": (-0.1, math.inf, True),
    "max_in_flight_gb": (-1.0, math.nan, True),
    "max_compute_pre_fetch": (-1, 2.5, True),
    "max_schedules": (0, None, 1.0, True),
    "gpus_per_node": (0, None, True),
    "estimate_device": ("TPU", None, 1),
    "compute_slowdown": (0.5, math.nan, None),
    "link_sharing": (-0.1, 1.1, None),
    "calibration_file": ("", 1, "a\0b"),
    "module_bucket_plans": ("layers.*", [1], [[]], ["layers.["], {"layers.*"}),
    "module_overlap_with": ({1: "a"}, {"a": ""}, "layers.0"),
    "module_prefetch_depth": (-1, None, True),
    "module_deferral_depth": (-1, None, 0.5),
    "module_uncovered": ("keep", None),
    "module_plan_unmatched": ("ignore", None),
    "module_stack_fn": ("layers", 1),
    "fuse_chained_all_gathers": (None, 1),
    "fuse_chained_reduce_scatters": (None, "sum"),
    "create_flattened_groups": (None, 1),
    "keep_gathered_parameters": (None, 1),
    "copy_engine_gathers": (None, "nvlink"),
    "cross_rank_check": ("on", None, True),
    "custom_runtime_estimation": (1.0, "fast"),
}


def bad_flag(r: Random) -> tuple[str, Any]:
    """A flag and a value that no compile accepts."""
    name = r.choice(list(_BAD))
    return name, r.choice(_BAD[name])


#: Functions that are called, and whose answer cannot be used: each must end in an EstimationError.
BAD_ESTIMATIONS: tuple[Any, ...] = (
    lambda node, size: -1.0,
    lambda node, size: math.nan,
    lambda node, size: "1 ms",
    _fails,
)
