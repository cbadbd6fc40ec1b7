"""Where Inductor meets the pipeline: the flags are read here, once for each graph.

``joint_graph.py`` calls :func:`run_joint`, ``post_grad.py`` :func:`run_post_grad`, and the key of a
compiled graph takes :func:`cache_facts`, all only where a flag asks for it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.fx as fx
from torch._inductor import config
from torch._inductor.fx_passes.comm_overlap import copy_engine_op, pipeline
from torch._inductor.fx_passes.comm_overlap.estimate.calibration import load_calibration
from torch._inductor.fx_passes.comm_overlap.estimate.custom import estimation_key
from torch._inductor.fx_passes.comm_overlap.estimate.network import stays_in_node
from torch._inductor.fx_passes.comm_overlap.flag_checks import Unacceptable
from torch._inductor.fx_passes.comm_overlap.flags import FLAGS, Flag, FlagError
from torch._inductor.fx_passes.comm_overlap.graph.groups import registered_ranks
from torch._inductor.fx_passes.comm_overlap.options import Options
from torch._inductor.fx_passes.comm_overlap.passes.tagging import is_tagged

log = logging.getLogger(__name__)

#: Flags of passes that make buckets too, and do not where ``bucketing_mode`` is set.
_OTHER_BUCKETING = ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx")


def read_options() -> Options:
    """The flags as they are now, checked.

    Raises:
        FlagError: a flag has a wrong type or value, or "modules" has no plan.
        OSError: the calibration file cannot be read.
        CalibrationError: its content is not a table.
    """
    options = Options(**{flag.name: _value(flag) for flag in FLAGS})
    if options.bucketing_mode == "modules" and options.module_bucket_plans is None:
        raise FlagError(f"{FLAGS[0].full_name}: 'modules' needs module_bucket_plans")
    if options.insert_overlap_deps is None:
        options = replace(options, insert_overlap_deps=True)
    if options.copy_engine_gathers and config.triton.cudagraphs:
        _warn_of_graphs()
        options = replace(options, copy_engine_gathers=False)
    elif options.copy_engine_gathers:
        copy_engine_op.register_lowerings()  # a graph from the cache has these ops, and no pass runs
    if options.custom_runtime_estimation is not None:
        key = estimation_key(options.custom_runtime_estimation)
        options = replace(options, estimation_digest=key)
    if options.module_stack_fn is not None:
        key = estimation_key(options.module_stack_fn)
        options = replace(options, module_stack_digest=key)
    if options.calibration_file is None or options.bucketing_mode == "none":
        return options
    table = load_calibration(options.calibration_file)
    return replace(options, calibration=table, calibration_digest=table.content_digest)


def _value(flag: Flag) -> Any:
    """A flag without a line in the config has its default."""
    dist: Any = config.aten_distributed_optimizations
    value = getattr(dist, flag.name, flag.default)
    if flag.of_torch and dist.bucketing_mode == "none":
        value = flag.default  # torch's own passes read it, with values of their own
    try:
        return flag.check(value)
    except Unacceptable as problem:
        hint = f" ({problem})" if str(problem) else ""
        raise FlagError(
            f"{flag.full_name}: {value!r} is not allowed{hint}; use {flag.allowed}"
        ) from None


def run_joint(graph: fx.Graph) -> None:
    """Tags collectives, and fuses chains, on a joint or inference graph."""
    pipeline.run_joint(graph, read_options())


def run_post_grad(graph: fx.Graph) -> None:
    """Buckets and schedules the collectives of a forward, backward or inference graph."""
    options = read_options()
    if options.bucketing_mode != "none":
        unread = [name for name in _OTHER_BUCKETING if getattr(config, name, "none") != "none"]
        dist: Any = config.aten_distributed_optimizations
        if dist.enable_overlap_scheduling:
            unread.append("aten_distributed_optimizations.enable_overlap_scheduling")
        if unread:
            _warn_unread(", ".join(unread), options.bucketing_mode)
    pipeline.run_post_grad(graph, options)


@functools.cache
def _warn_of_graphs() -> None:
    log.warning("copy_engine_gathers: no effect with triton.cudagraphs = True")


@functools.cache  # once for each sentence
def _warn_unread(names: str, mode: str) -> None:
    log.warning("without effect, because bucketing_mode = %r: %s", mode, names)


def cache_facts(gm: fx.GraphModule | None) -> str:
    """What a plan reads and neither code nor config show: tags, module names, sizes of groups.

    Text that no other graph has where a compile must not come from a cache: where ranks compare
    their decisions, and where a function of the user cannot be told apart from others."""
    options = read_options()
    if options.cross_rank_check != "off" or not options.has_known_functions:
        return uuid.uuid4().hex
    facts = [repr(options), repr(_group_sizes())]
    if options.copy_engine_gathers:
        ranks = [(name, registered_ranks(name) or ()) for name, _ in _group_sizes()]
        facts.append(repr([(n, stays_in_node(r, options.gpus_per_node)) for n, r in ranks]))
    # Before AOTAutograd has made it a joint graph there are no tags, and none may be made.
    if gm is not None and is_tagged(gm.graph):
        facts.append(pipeline.tags_digest(gm, (), options))
    elif gm is not None and options.reads_modules:
        facts += _names(gm)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _names(gm: fx.GraphModule) -> Iterator[str]:
    """What a graph of Dynamo knows of inputs and modules, in the order of its nodes."""
    for inner in gm.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            source = getattr(node, "_dynamo_source", None)
            if source is not None:
                yield f"{node.op} {source.name}"
            # The keys are ids of objects, which no other process has.
            for path, kind in (node.meta.get("nn_module_stack") or {}).values():
                module = getattr(kind, "__module__", "")
                yield f"module {path} {module}.{getattr(kind, '__qualname__', kind)}"
            custom = node.meta.get("custom")
            if isinstance(custom, Mapping) and "module_fqn" in custom:
                yield f"module_fqn {custom['module_fqn']}"


def _group_sizes() -> list[tuple[str, int]]:
    """Of the registered process groups; none without torch.distributed."""
    try:
        from torch.distributed import distributed_c10d

        names = distributed_c10d._world.pg_names
    except (ImportError, AttributeError):
        return []
    return sorted(
        (str(name), group.size()) for group, name in names.items() if hasattr(group, "size")
    )
