"""What torch's arguments mean here, and what all adapters do around a change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch.distributed as dist
import torch.fx as fx

from torch_patches import _compat, config
from torch_patches._inductor.fx_passes.comm_overlap.estimate.compute import ComputeCost
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    RuntimeModel,
    make_model,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    SCHEDULED_MARK,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import ResultBytes
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
    warn_untouched,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import USER_ERRORS
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    RefusalReason,
    Skeleton,
    Traffic,
)

log = logging.getLogger(__name__)

BucketMode = Literal["default", "custom_ops", "custom_ops_multidtype", "coalesced"]
Estimator = Literal["analytical", "benchmark"]
Result = TypeVar("Result")

_FORMS = {"default": "default", "custom_ops": "default", "coalesced": "coalesced"}
#: A bound that no graph reaches, in GB.
UNBOUNDED_GB = 1e6


def bucket_form(mode: str | None, function: str, otherwise: str | None = "default") -> str | None:
    """How a bucket is built: "default" (copying), "coalesced", None (chosen by the planner).

    Args:
        mode: torch's; None takes the flag ``bucket_mode``.
        otherwise: the result where that is None too.

    Raises:
        FlagError: unknown, or one that mixes dtypes in a bucket.
    """
    given = mode
    if mode is None and _compat.has_config(config.PREFIX + "bucket_mode"):
        given = config.current_value(config.PREFIX + "bucket_mode")
    if given is None:
        return otherwise
    if not isinstance(given, str) or given not in _FORMS:
        hint = " (a bucket has one dtype)" if given == "custom_ops_multidtype" else ""
        raise config.FlagError(
            f"{function}(bucket_mode=...): {given!r} is not allowed{hint}; use one of "
            f"{', '.join(map(repr, _FORMS))} or None"
        )
    return _FORMS[given]


def check_module(gm: object, function: str) -> None:
    """
    Raises:
        TypeError: not a GraphModule; passes of Inductor's get its graph.
    """
    if not isinstance(gm, fx.GraphModule):
        hint = "; a graph's module is graph.owning_module" if isinstance(gm, fx.Graph) else ""
        raise TypeError(f"{function}() takes an fx.GraphModule, not {type(gm).__name__}{hint}")


def check_bound(function: str, name: str, value: object, *, whole: bool = False) -> None:
    """Of a bound that is no flag.

    Raises:
        FlagError: no finite number >= 0 (``whole``: no such int).
    """
    kinds = (int,) if whole else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf:
        return
    allowed = "an int >= 0" if whole else "a finite number >= 0"
    raise config.FlagError(f"{function}({name}=...): {value!r} is not allowed; use {allowed}")


def make_options(function: str, **arguments: object) -> Options:
    """Options with these flags; others that matter take their value in Inductor's config.

    Raises:
        FlagError: one of them has a wrong type or value.
    """
    return config.options_from_arguments(arguments, function)


@dataclass(frozen=True)
class ScaledModel(RuntimeModel):
    """A model in which compute takes ``compute_scale`` times as long, so that it hides as much
    more."""

    compute_scale: float = 1.0

    def node_costs(
        self, graph: fx.Graph, skeleton: Skeleton, sizes: ResultBytes | None = None
    ) -> dict[fx.Node, ComputeCost]:
        costs = super().node_costs(graph, skeleton, sizes)
        return {node: c._replace(ms=c.ms * self.compute_scale) for node, c in costs.items()}


def model_of(options: Options, compute_scale: float = 1.0) -> RuntimeModel:
    """The model that options describe."""
    made = make_model(
        options.estimate_device,
        options.gpus_per_node,
        options.custom_runtime_estimation,
        options.calibration,
        options.compute_slowdown,
        options.link_sharing,
    )
    return ScaledModel(
        made.device,
        made.gpus_per_node,
        made.custom,
        made.host,
        made.interference,
        made.table,
        compute_scale=compute_scale,
    )


def only(skeleton: Skeleton, wanted: Callable[[Collective], bool]) -> Skeleton:
    """The skeleton with all other collectives refused."""
    refused = RefusalReason.NOT_ASKED_FOR
    return replace(
        skeleton,
        collectives=tuple(
            c if c.refusal is not None or wanted(c) else replace(c, refusal=refused)
            for c in skeleton.collectives
        ),
    )


def gathering_groups(collectives: Iterable[Collective]) -> dict[str, int | None]:
    """Groups that gather parameters -> their sizes, in order of the first gather."""
    found: dict[str, int | None] = {}
    for c in collectives:
        if c.kind is CollectiveKind.ALL_GATHER and c.traffic is Traffic.PARAMETER:
            found.setdefault(c.group, c.key.group_size if c.key is not None else None)
    return found


def run_or_leave(graph: fx.Graph, change: Callable[[], Result]) -> Result | None:
    """What ``change`` returns; a graph that cannot be handled is as it was, with one warning.

    Raises:
        what the user can mend (bad estimations, plans), and causes local to one rank.
    """
    snapshot = Snapshot(graph)
    try:
        return change()
    except BaseException as error:
        snapshot.restore()
        if isinstance(error, (*RANK_LOCAL_ERRORS, *USER_ERRORS)) or not isinstance(
            error, Exception
        ):
            raise
        raise_if_strict(error)
        warn_untouched(f"{type(error).__name__}: {error}")
        return None


def is_scheduled(skeleton: Skeleton, mark: str | None) -> bool:
    """An earlier run that left this mark has placed all collectives; False without a mark."""
    found = {c.start.meta.get(SCHEDULED_MARK) for c in skeleton.collectives}
    return mark is not None and found == {mark}


def mark_scheduled(graph: fx.Graph, mark: str | None) -> None:
    """So that a second run with the same arguments changes nothing."""
    for node in graph.nodes:
        if collective_kind(node) is not None:  # a snapshot holds the old metadata
            node.meta = {**node.meta, SCHEDULED_MARK: mark}


def without_gloo(skeleton: Skeleton) -> Skeleton:
    """CPU collectives whose group is known not to run on gloo need no copies (``needs_copies``)."""

    def freed(c: Collective) -> Collective:
        if c.key is None or c.key.device_type != "cpu" or _may_be_gloo(c.group):
            return c
        return replace(c, key=replace(c.key, device_type="cpu, not gloo"))

    return replace(skeleton, collectives=tuple(map(freed, skeleton.collectives)))


def _may_be_gloo(group: str) -> bool:
    """Whether a group's CPU tensors may travel by gloo; the same on all its ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return True
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        backend = dist.get_backend_config(_resolve_process_group(group))  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return True
    return "cpu:fake" not in backend
