"""The Dynamo backend ``aot_eager_comm_overlap``: bucketed collectives without code generation.

    torch.compile(model, backend="aot_eager_comm_overlap")
    torch.compile(model, backend="aot_eager_comm_overlap", options={"bucket_cap_mb": 50.0})

It is torch's ``aot_eager`` with our pipeline around the partitioner::

    joint graph -> tag -> partitioner -> forward  -> bucket -> run as it is
                                      -> backward -> bucket -> run as it is
    inference graph -> tag -> bucket -> run as it is

An installed package registers it through the entry point ``torch_dynamo_backends``, so nothing of
ours needs to be imported; without installation, pass the function itself as ``backend=``.

**Choosing the backend is the opt-in**: ``bucketing_mode`` "none" means "topo_span" here, unless it is
given as an option and chains are to be fused.  All other flags keep their meaning and are read once, when a forward (or inference) graph compiles.  Its lazily
compiled backward uses the same values, whatever the flags are by then and in whatever thread.
``insert_overlap_deps`` has nothing to do here: a graph that is run as it is keeps its order, and torch
2.11 cannot run control dependencies.

**Options** are the flags, by name alone or with the prefix ``aten_distributed_optimizations.``, and

``partitioner``
    "default" (the default) saves for the backward what eager autograd would save, and repeats what
    activation checkpointing asks for.  A parameter that is gathered again in the backward is so
    with its casts and views, else one of those would be saved, and with it the gathered parameter.
    "min_cut" saves less and repeats more, on the assumption that what it repeats is fused into
    other kernels.  Code generation makes that true, eager execution does not: there each repeated
    operation is a kernel and a trip through memory.  Take it where memory matters more than time,
    or for the partition that Inductor and ``aot_eager`` make.

A wrong option or flag raises :class:`~torch_patches.FlagError`.  A torch that this package is
not tested with raises :class:`UnsupportedTorchError`: who names a backend must not get another.

``torch_patches.uninstall()`` removes the hook in Inductor and does not touch the backend, which
patches nothing and runs only where it is named.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import must_recompute
from torch._inductor import config as inductor_config

from torch_patches import _cache_facts, _compat, config, recording
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.tags import tag_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput, Traffic
from torch_patches.mesh_groups import with_groups
from torch_patches.viewing import observer_of_compile

__all__ = ["UnsupportedTorchError", "aot_eager_comm_overlap"]

NAME = "aot_eager_comm_overlap"

#: What "none" means where naming the backend is the opt-in.
OPT_IN_MODE = "topo_span"

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

PARTITIONERS: Mapping[str, Partitioner] = {
    "default": default_partition,
    "min_cut": min_cut_rematerialization_partition,
}
DEFAULT_PARTITIONER = "default"


class UnsupportedTorchError(RuntimeError):
    """The backend was named on a torch that it is not tested with."""


@dataclass(frozen=True)
class Settings:
    """What one compile runs with; the backward keeps them from its forward.

    Args:
        options: for the pipeline.
        partitioner: a key of :data:`PARTITIONERS`.
    """

    options: Options
    partitioner: str


def aot_eager_comm_overlap(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The backend; see the module.  Dynamo calls it with the ``options`` of ``torch.compile``.

    Raises:
        FlagError: an option or a flag is unknown or has a wrong type or value.
        ModulePlanError: the plan of module buckets does not fit the model.
        UnsupportedTorchError: this torch is not one of those tested.
    """
    _require_supported_torch()
    settings, inputs = read_settings(options), _record_inputs(gm, example_inputs)
    flags = with_groups(gm, settings.options)
    checked = pipeline.check_module_names(gm, inputs, flags)
    written = recording.begin(NAME, gm, checked)
    compilers = _Compilers(replace(settings, options=checked), inputs, written)
    backend = aot_autograd(
        fw_compiler=compilers.forward_graph,
        bw_compiler=compilers.backward_graph,
        inference_compiler=compilers.inference_graph,
        partition_fn=compilers.partition,
        keep_inference_input_mutations=True,
    )
    # torch warns of further keywords, such as mode=, as it does for aot_eager.
    with inductor_config.patch(_cache_key(gm, compilers)):
        compiled: Callable[..., Any] = backend(gm, example_inputs, **kwargs)
    return compiled


@dataclass(frozen=True)
class _Compilers:
    """What AOTAutograd calls, with the settings of one compile.

    Args:
        settings: read when the forward compiled.
        inputs: the model's inputs, as Dynamo knows them.
        recording: where the graphs are written, if anybody captures them.
    """

    settings: Settings
    inputs: tuple[RecordedInput, ...]
    recording: recording.Recording | None = None

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Tags the joint graph and splits it."""
        self._run_joint(joint.graph)
        if self.settings.partitioner == "default":
            _repeat_whole_chains(joint.graph)
        return PARTITIONERS[self.settings.partitioner](joint, joint_inputs, **kwargs)

    def _run_joint(self, graph: fx.Graph) -> None:
        if self.recording is not None:
            pipeline.tag_or_leave(graph, self.inputs)
            self.recording.add("joint", graph)
        pipeline.run_joint(graph, self.settings.options, self.inputs)

    def forward_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Buckets a forward graph."""
        return self._split_graph("fw", gm, example_inputs)

    def backward_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Buckets a backward graph."""
        return self._split_graph("bw", gm, example_inputs)

    def inference_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Tags and buckets a graph that has no backward."""
        self._run_joint(gm.graph)
        return self._split_graph("fw", gm, example_inputs)

    def _split_graph(self, phase: str, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if self.recording is not None:
            self.recording.phase = phase
            self.recording.before(gm.graph)
        pipeline.run_post_grad(
            gm.graph, self.settings.options, self.inputs, observer=observer_of_compile()
        )
        if self.recording is not None:
            self.recording.after(gm.graph)
        return boxed_nop(gm, list(example_inputs))  # which recompiles it


def _repeat_whole_chains(joint: fx.Graph) -> None:
    """A gather that is repeated in the backward takes along what only prepares its parameter.

        shard -> gather (repeat) -> wait (repeat) -> permute -> mm

    The default partitioner would save the result of ``permute``, which is a view: the gathered
    parameter would stay in memory, and the repeated gather be dropped.
    """
    for node in joint.nodes:
        tag = tag_of(node)
        is_parameter = tag is not None and tag.traffic is Traffic.PARAMETER
        if not is_parameter or node.meta.get("partitioner_tag") == "is_backward":
            continue
        for source in node.all_input_nodes:
            if "recompute" not in node.meta and tag_of(source) == tag and must_recompute(source):
                node.meta["recompute"] = source.meta["recompute"]


def _record_inputs(model: Any, example_inputs: Sequence[Any]) -> tuple[RecordedInput, ...]:
    """Empty where records are not of the inputs as AOTAutograd counts them, which is flat."""
    recorded = pipeline.record_inputs_of(model)
    return recorded if len(recorded) == len(pytree.tree_leaves(list(example_inputs))) else ()


def _require_supported_torch() -> None:
    if not _compat.is_supported_torch():
        raise UnsupportedTorchError(
            f"backend {NAME!r} is tested with torch {_compat.supported_range()}, this is "
            f"{torch.__version__}; {_compat.ALLOW_UNTESTED_VARIABLE}=1 lets it run all the same"
        )


def _cache_key(gm: fx.GraphModule, compilers: _Compilers) -> dict[str, object]:
    """A setting that makes the key of AOTAutograd's cache see what this compile depends on.

    The cache serves such a backend only where ``torch._functorch.config`` forces it
    (``force_autograd_cache`` and ``bundled_autograd_cache``).  Its key holds Inductor's flags, and
    knows neither our options nor the partitioner.
    """
    metadata = _cache_facts.metadata_digest(gm, compilers.settings.options, compilers.inputs)
    parts = [NAME, pipeline.source_digest(), metadata, repr(compilers.settings)]
    options = compilers.settings.options
    # A rank that comes from a cache would not talk to the others, and have no graphs to capture.
    if options.cross_rank_check != "off" or compilers.recording is not None:
        parts.append(uuid.uuid4().hex)
    return {config.DIGEST_FLAG: ":".join(parts)}


# -- options --------------------------------------------------------------------------------------


def read_settings(options: Mapping[str, Any] | None = None) -> Settings:
    """The flags as they are now, with ``options`` on top.

    Raises:
        FlagError: naming the option or flag, its value and what is allowed.
    """
    if options is not None and not isinstance(options, Mapping):
        raise config.FlagError(f"{NAME}(options={options!r}) is not allowed; use a dict")
    given: dict[str, Any] = {}
    partitioner = DEFAULT_PARTITIONER
    for key, value in (options or {}).items():
        if key == "partitioner":
            partitioner = _check_partitioner(value)
            continue
        name = _flag_name(key, value)
        if name in given:
            raise config.FlagError(f"{_label(key)}: {name!r} is given twice; use one of its names")
        given[name] = config.check_value(name, value, _label(key))
    flags = config.options_from_arguments(given, NAME)
    if flags.bucketing_mode == "none" and not ("bucketing_mode" in given and flags.fuses):
        given["bucketing_mode"] = OPT_IN_MODE
        flags = config.options_from_arguments(given, NAME)
    return Settings(replace(flags, run_eagerly=True, insert_overlap_deps=False), partitioner)


def _label(key: object) -> str:
    return f"{NAME} options[{key!r}]"


def _check_partitioner(value: object) -> str:
    if isinstance(value, str) and value in PARTITIONERS:
        return value
    allowed = ", ".join(map(repr, PARTITIONERS))
    raise config.FlagError(
        f"{_label('partitioner')}: {value!r} is not allowed; use one of {allowed}"
    )


def _flag_name(key: object, value: object) -> str:
    """The flag an option means, without the prefix."""
    known = [flag.name for flag in config.FLAGS]
    name = key.removeprefix(config.PREFIX) if isinstance(key, str) else ""
    if name in known:
        return name
    allowed = ["partitioner", *known]
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise config.FlagError(
        f"{_label(key)}: there is no such option{hint}, so its value {value!r} would have no "
        f"effect; use {', '.join(map(repr, allowed))}, flags with or without {config.PREFIX!r}"
    )
