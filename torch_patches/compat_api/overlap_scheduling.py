"""torch's scheduler over ours: ``docs/drop_in.md`` says what each argument does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch.fx as fx
from torch._inductor.fx_passes.overlap_scheduling import (
    CollectiveInfo,
    is_compute_node,
    make_all_device_put_sync,
)
from torch.utils._ordered_set import OrderedSet

from torch_patches import _compat, config
from torch_patches._inductor.fx_passes.comm_overlap.estimate.custom import estimation_key
from torch_patches._inductor.fx_passes.comm_overlap.estimate.timeline import CollectiveSpan
from torch_patches._inductor.fx_passes.comm_overlap.forecast import forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    insert_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import PART_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import wait_source
from torch_patches._inductor.fx_passes.comm_overlap.options import CustomEstimation, Options
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped, overlap
from torch_patches._inductor.fx_passes.comm_overlap.plan import Plan, Skeleton
from torch_patches.compat_api._arguments import (
    UNBOUNDED_GB,
    bucket_form,
    check_bound,
    check_module,
    gathering_groups,
    is_scheduled,
    make_options,
    mark_scheduled,
    model_of,
    run_or_leave,
    without_gloo,
)
from torch_patches.compat_api._counters import Reachable, count_schedule
from torch_patches.compat_api.fsdp import merge_parameter_traffic, pre_bucketing_options
from torch_patches.compat_api.overlap_preserving_bucketer import OverlapPreservingBucketer

log = logging.getLogger(__name__)

#: torch's own values of ``max_memory_increase_gb`` and ``_ratio``: nobody asked for a cap.
_TORCH_CAPS = (1.0, 0.05)
#: GB that torch's scheduler lets a bucket hold.
_BUCKET_GB = 2.0


@dataclass(frozen=True)
class _Settings:
    """Arguments that are no options."""

    merges: bool
    merges_first: bool
    only_internode: bool
    holds_order: bool
    compute_scale: float
    logs: bool

    @property
    def merges_later(self) -> bool:
        """Single collectives are scheduled, and merged as far as that leaves them hidden."""
        return self.merges and not self.merges_first


@dataclass(frozen=True)
class _Done:
    """Of one run.

    Args:
        overlapped: the schedule, of single collectives where merges come later.
        later: buckets made behind it.
        spans: of the result.
    """

    overlapped: Overlapped
    reachable: Reachable
    later: int
    spans: tuple[CollectiveSpan, ...]


class OverlapScheduler:
    """Moves starts and waits of collectives so that compute hides them, and merges some.

    Attributes:
        gm, graph: what is changed.
        collective_info: after :meth:`run`: by start in the result, what it takes and what hides it.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        max_in_flight_gb: float,
        max_compute_pre_fetch: int,
        collective_bucketing: bool,
        insert_overlap_deps: bool,
        compute_overlap_multipler: float,
        max_coll_distance: int,
        custom_runtime_estimation: Callable[[fx.Node, int | None], float | None] | None = None,
        collective_estimator: str = "analytical",
        compute_estimator: str = "benchmark",
        max_memory_increase_gb: float | None = 1.0,
        max_memory_increase_ratio: float | None = 0.05,
        log_final_collectives_estimations: bool = False,
        bucket_exposed_first: bool | None = None,
        enable_fusion_regions: bool = False,
        bucket_only_internode_comms: bool = False,
        bucket_mode: str | None = None,
        max_off_bucket_gb: float | None = 0.5,
        prioritize_bucketing_during_scheduling: bool = True,
        pge_profile_path: str | None = None,
    ) -> None:
        """See ``docs/drop_in.md``.

        Raises:
            FlagError: an argument, or a flag that matters, has a wrong type or value; or asks each
                rank to measure for itself.
            OSError: the profile or the calibration file cannot be read.
            TypeError: not a GraphModule.
        """
        function = "OverlapScheduler"
        check_module(gm, function)
        check_bound(function, "max_coll_distance", max_coll_distance, whole=True)
        check_bound(function, "compute_overlap_multipler", compute_overlap_multipler)
        if max_off_bucket_gb is not None:
            check_bound(function, "max_off_bucket_gb", max_off_bucket_gb)
        self.gm, self.graph = gm, gm.graph
        self.collective_info: dict[fx.Node, CollectiveInfo] = {}
        self.bucket_mode = bucket_form(bucket_mode, function, otherwise=None)
        gigabytes, ratio = _memory_caps(max_memory_increase_gb, max_memory_increase_ratio)
        options = make_options(
            function,
            bucketing_mode="auto" if collective_bucketing else "topo_span",
            bucket_cap_mb=None,
            bucket_mode=self.bucket_mode,
            enable_overlap_scheduling=True,
            insert_overlap_deps=bool(insert_overlap_deps),
            max_in_flight_gb=max_in_flight_gb,
            max_compute_pre_fetch=max_compute_pre_fetch,
            max_memory_increase_gb=gigabytes,
            max_memory_increase_ratio=ratio,
            custom_runtime_estimation=custom_runtime_estimation,
        )
        _check_estimators(options, collective_estimator, compute_estimator)
        custom = custom_runtime_estimation or _profiled(gm, pge_profile_path)
        self._options = replace(
            options,
            custom_runtime_estimation=None if custom is None else _completed(custom),
            estimation_digest=None if custom is None else estimation_key(custom),
            max_coll_distance=max_coll_distance,
            max_reduction_mb=None if max_off_bucket_gb is None else max_off_bucket_gb * 1024,
            bucket_exposed_first=bool(bucket_exposed_first),
        )
        self.max_coll_distance = max_coll_distance
        self._settings = _Settings(
            merges=bool(collective_bucketing),
            merges_first=bool(prioritize_bucketing_during_scheduling),
            only_internode=bool(bucket_only_internode_comms),
            holds_order=bool(insert_overlap_deps),
            compute_scale=float(compute_overlap_multipler),
            logs=bool(log_final_collectives_estimations),
        )

    def run(self) -> fx.GraphModule:
        """Changes the module in place and recompiles it.

        A graph that cannot be handled stays as it was, with one warning; so does one that no
        schedule is estimated to make faster, or that was scheduled with the same arguments.

        Returns:
            The same module.
        """
        return self._run(None)

    def _run(self, merges_before: Options | None) -> fx.GraphModule:
        """All or nothing; ``merges_before``: of parameter traffic, in front of the schedule."""
        done = run_or_leave(self.graph, lambda: self._change(merges_before))
        if done is not None:
            self.collective_info = _infos(done.spans)
            count_schedule(done.overlapped, done.reachable, done.later)
            if self._settings.logs:
                _log_estimations(done.spans)
        self.gm.recompile()
        return self.gm

    def _change(self, merges_before: Options | None) -> _Done:
        options, settings = self._options, self._settings
        model = model_of(options, settings.compute_scale)
        mark = _mark(options, settings, merges_before)
        scheduled = is_scheduled(collect(self.graph), mark)
        if merges_before is not None and not scheduled:
            merge_parameter_traffic(self.graph, merges_before)
        skeleton = without_gloo(collect(self.graph))
        reachable = Reachable.read(self.graph, skeleton.collectives)
        if scheduled:
            now = forecast(self.graph, skeleton, model)
            return _Done(Overlapped(Plan(), "input", now, now), reachable, 0, now.timeline.spans)
        overlapped = overlap(self.graph, skeleton, self._options_for(skeleton), model)
        later = self._merge(_infos(overlapped.after.timeline.spans)) if settings.merges_later else 0
        if settings.holds_order and not settings.merges_later:
            insert_overlap_dependencies(self.graph, overlapped.hidings())
        mark_scheduled(self.graph, mark)
        # Merges and dependencies have put other nodes in the place of those that were planned.
        result = forecast(self.graph, collect(self.graph), overlapped.after.model)
        return _Done(overlapped, reachable, later, result.timeline.spans)

    def _options_for(self, skeleton: Skeleton) -> Options:
        """Bounded by what the graph has."""
        options, settings = self._options, self._settings
        if settings.only_internode:
            groups = gathering_groups(skeleton.collectives)
            options = replace(options, only_groups=tuple(groups))
        if settings.merges_later or not settings.merges:
            options = replace(options, bucket_cap_mb=0.0)
        if settings.merges_later:  # these merges may move compute, and reads with it
            make_all_device_put_sync(self.gm)
        return options

    def _merge(self, infos: dict[fx.Node, CollectiveInfo]) -> int:
        """The schedule of single collectives, merged; how many buckets."""
        settings, options = self._settings, self._options
        return OverlapPreservingBucketer(
            self.graph,
            infos,
            OrderedSet(self.graph.nodes),
            max_bucket_memory_gb=_BUCKET_GB,
            max_coll_distance=self.max_coll_distance,
            insert_overlap_deps=settings.holds_order,
            bucket_mode=self.bucket_mode,
            bucket_exposed_first=options.bucket_exposed_first,
            bucket_only_internode_comms=settings.only_internode,
        ).change()


def schedule_overlap_bucketing(
    gm: fx.GraphModule,
    max_in_flight_gb: float = 5,
    max_compute_pre_fetch: int = 200,
    collective_bucketing: bool = False,
    insert_overlap_deps: bool = False,
    compute_overlap_multipler: float = 1.0,
    max_coll_distance: int = 200,
    custom_runtime_estimation: Callable[[fx.Node, int | None], float | None] | None = None,
    collective_estimator: str = "analytical",
    compute_estimator: str = "benchmark",
    max_memory_increase_gb: float | None = 1.0,
    max_memory_increase_ratio: float | None = 0.05,
    log_final_collectives_estimations: bool = False,
    bucket_exposed_first: bool | None = None,
    enable_fusion_regions: bool = False,
    bucket_only_internode_comms: bool = False,
    prioritize_bucketing_during_scheduling: bool = True,
    max_off_bucket_gb: float | None = 0.5,
    bucket_mode: str | None = None,
    pge_profile_path: str | None = None,
    pre_bucketing_fsdp_collectives: bool = True,
    pre_bucketing_fsdp_collectives_bucket_cap_mb: float | None = None,
) -> fx.GraphModule:
    """:func:`pre_bucket_fsdp_collectives`, then :class:`OverlapScheduler`; see ``docs/drop_in.md``.

    Returns:
        The same module, changed in place.

    Raises:
        FlagError, OSError, TypeError: see :class:`OverlapScheduler`.
        EstimationError: a time of the custom estimation is no number >= 0.

        The graph is as it was then.
    """
    scheduler = OverlapScheduler(
        gm,
        max_in_flight_gb,
        max_compute_pre_fetch,
        collective_bucketing,
        insert_overlap_deps,
        compute_overlap_multipler,
        max_coll_distance,
        custom_runtime_estimation,
        collective_estimator,
        compute_estimator,
        max_memory_increase_gb,
        max_memory_increase_ratio,
        log_final_collectives_estimations,
        bucket_exposed_first,
        enable_fusion_regions,
        bucket_only_internode_comms,
        bucket_mode,
        max_off_bucket_gb,
        prioritize_bucketing_during_scheduling,
        pge_profile_path,
    )
    merges_before = None
    if pre_bucketing_fsdp_collectives:
        cap = pre_bucketing_fsdp_collectives_bucket_cap_mb
        merges_before = pre_bucketing_options(scheduler.bucket_mode, cap)
    if not any(wait_source(node) is not None for node in gm.graph.nodes):
        return gm
    return scheduler._run(merges_before)


def _memory_caps(gigabytes: float | None, ratio: float | None) -> tuple[float | None, float | None]:
    """In the terms of our options, where two Nones are a default and not the lack of a bound."""
    if gigabytes is None and ratio is None:
        return UNBOUNDED_GB, None
    return (None, None) if (gigabytes, ratio) == _TORCH_CAPS else (gigabytes, ratio)


def _check_estimators(options: Options, collectives: str, compute: str) -> None:
    for name, value in (("collective_estimator", collectives), ("compute_estimator", compute)):
        if value not in ("analytical", "benchmark"):
            raise config.FlagError(
                f"OverlapScheduler({name}=...): {value!r} is not allowed; use 'analytical'"
            )
    if collectives == "benchmark" and options.calibration is None:
        raise config.FlagError(
            "OverlapScheduler(collective_estimator=...): 'benchmark' would let each rank decide by "
            "its own clock, and ranks that decide differently hang; measure once "
            f"(torch-patches calibrate) and set {config.PREFIX}calibration_file, or use 'analytical'"
        )


def _completed(asked: CustomEstimation) -> CustomEstimation:
    """What a user's estimation leaves out takes no time, unless it is a matmul or a collective.

    A copy into or out of a bucket, which the user has never seen, is left to the model.
    """

    def estimate(node: fx.Node, size_bytes: int | None) -> float | None:
        given = asked(node, size_bytes)
        ours = is_compute_node(node) or collective_kind(node) is not None or PART_MARK in node.meta
        return 0.0 if given is None and not ours else given

    return estimate


def _profiled(gm: fx.GraphModule, path: str | None) -> CustomEstimation | None:
    """The estimation that torch reads from a profile; None without one."""
    if not path:
        return None
    reader = _compat.profile_reader()
    if reader is None or not isinstance(path, str):
        allowed = "a path" if reader is not None else "custom_runtime_estimation with this torch"
        raise config.FlagError(
            f"OverlapScheduler(pge_profile_path=...): {path!r} is not allowed; use {allowed}"
        )
    made: CustomEstimation = reader(path, diagnostics_gm=gm)
    return made


def _mark(options: Options, settings: _Settings, merges_before: Options | None) -> str | None:
    """What tells a schedule's arguments from others; None where a function cannot be told."""
    told = options.fingerprint()
    before = None if merges_before is None else merges_before.fingerprint()
    return None if told is None else repr((told, settings, before))


def _infos(spans: Iterable[CollectiveSpan]) -> dict[fx.Node, CollectiveInfo]:
    found: dict[fx.Node, CollectiveInfo] = {}
    for span in spans:
        collective = span.collective
        if collective.waits:
            takes = span.end_ms - span.start_ms
            found[collective.start] = CollectiveInfo(
                start_node=collective.start,
                wait_node=collective.waits[0],
                size_bytes=collective.size_bytes,
                estimated_time_ms=takes,
                exposed_time_ms=max(takes - span.hidden_ms, 0.0),
                hiding_nodes=OrderedSet(hiding.node for hiding in span.hidden_by),
            )
    return found


def _log_estimations(spans: Iterable[CollectiveSpan]) -> None:
    for span in spans:
        log.info(
            "%s: %.3f ms, of which %.3f hidden, %d bytes on %s",
            span.collective.start,
            span.end_ms - span.start_ms,
            span.hidden_ms,
            span.collective.size_bytes,
            span.collective.group,
        )
