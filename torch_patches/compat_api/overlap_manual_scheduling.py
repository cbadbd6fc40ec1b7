"""torch's scheduling by a plan of modules, over ours (``bucketing_mode = "modules"``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx
from torch._dynamo.utils import counters

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    insert_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.module_names import warn_of_plan
from torch_patches._inductor.fx_passes.comm_overlap.overlap import Overlapped, overlap
from torch_patches.compat_api._arguments import (
    UNBOUNDED_GB,
    bucket_form,
    check_module,
    is_scheduled,
    make_options,
    mark_scheduled,
    model_of,
    run_or_leave,
    without_gloo,
)


class ManualOverlapScheduler:
    """One bucket for each entry of a plan; the next one's gather runs under this one's compute, and
    this one's reduction under the next one's.

    Attributes:
        gm, graph: what is changed.
        module_bucket_plans: as given.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        module_bucket_plans: list[list[str] | str],
        insert_overlap_deps: bool,
        module_stack_fn: Callable[[fx.Node], list[tuple[str, type[Any]]]] | None = None,
        bucket_mode: str | None = None,
    ) -> None:
        """
        Args:
            gm: a graph with fake values in ``meta["val"]`` and the modules of its nodes.
            module_bucket_plans: names of modules or parameters, which may be patterns
                (``layers.*``, ``layers.[0-5]``): each makes a bucket for every module it matches, a
                list of names one bucket.  Empty: nothing is done.  What no entry covers stays.
            insert_overlap_deps: hold the overlaps by control dependencies, for Inductor.
            module_stack_fn: node -> (path, class) of its modules, the outermost first.
            bucket_mode: "default" or "custom_ops" (copying), "coalesced" (zero-copy); None: the flag of
                that name, or what is estimated to be better.

        Raises:
            FlagError: an argument, or a flag that matters, has a wrong type or value.
            TypeError: not a GraphModule.
        """
        function = "ManualOverlapScheduler"
        check_module(gm, function)
        self.gm, self.graph = gm, gm.graph
        self.module_bucket_plans = module_bucket_plans
        self.insert_overlap_deps = insert_overlap_deps
        self.module_stack_fn = module_stack_fn
        self.bucket_mode = bucket_form(bucket_mode, function, otherwise=None)
        self._options = None
        if module_bucket_plans:
            self._options = make_options(
                function,
                bucketing_mode="modules",
                module_bucket_plans=module_bucket_plans,
                module_stack_fn=module_stack_fn,
                module_uncovered="leave",
                module_plan_unmatched="warn",
                bucket_cap_mb=None,
                bucket_mode=self.bucket_mode,
                enable_overlap_scheduling=False,
                insert_overlap_deps=bool(insert_overlap_deps),
                max_memory_increase_gb=UNBOUNDED_GB,
                max_memory_increase_ratio=None,
                max_in_flight_gb=None,
                max_compute_pre_fetch=None,
            )

    def run(self) -> fx.GraphModule:
        """Changes the module in place; the caller recompiles it, as with torch's.

        An entry that matches nothing is warned of: forward and backward have parts of a plan.  A
        graph that cannot be handled stays as it was, with one warning.

        Returns:
            The same module.

        Raises:
            ModulePlanError, ModuleStackError: the plan, or the reading of modules, is no good.
        """
        overlapped = run_or_leave(self.graph, self._change) if self._options is not None else None
        if overlapped is not None:
            counters["inductor"]["collective_buckets"] += len(overlapped.plan.buckets)
            for sentence in overlapped.labels.unmatched if overlapped.labels is not None else ():
                warn_of_plan(sentence)
        return self.gm

    def _change(self) -> Overlapped | None:
        """None where the same was done before."""
        assert self._options is not None
        options, skeleton = self._options, without_gloo(collect(self.graph))
        mark = options.fingerprint()
        if is_scheduled(skeleton, mark):
            return None
        overlapped = overlap(self.graph, skeleton, options, model_of(options))
        if self.insert_overlap_deps:
            insert_overlap_dependencies(self.graph, overlapped.hidings())
        mark_scheduled(self.graph, mark)
        return overlapped


def manual_overlap_bucketing(
    gm: fx.GraphModule,
    module_bucket_plans: list[list[str] | str],
    insert_overlap_deps: bool = False,
    module_stack_fn: Callable[[fx.Node], list[tuple[str, type[Any]]]] | None = None,
    bucket_mode: str | None = None,
) -> fx.GraphModule:
    """:class:`ManualOverlapScheduler`, with the module recompiled.

    Returns:
        The same module.

    Raises:
        FlagError, ModulePlanError, ModuleStackError, TypeError: an argument is no good; the graph is
            as it was.
    """
    scheduler = ManualOverlapScheduler(
        gm, module_bucket_plans, insert_overlap_deps, module_stack_fn, bucket_mode
    )
    scheduler.run()
    gm.recompile()
    return gm
