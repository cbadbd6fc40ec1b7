"""The only patch site: ``torch._inductor.compile_fx.compile_fx``, and its undoing.

torch looks the function up in its module each time, so the replacement serves every caller that
imports the name when it compiles.  While ``bucketing_mode`` is "none", no chained collectives are to
be fused and nobody captures graphs (``recording.py``), a call passes straight through.  Otherwise the
wrapper reads the flags once and hands everything on as ``config_patches``, which torch applies again around the lazily compiled backward: cache key, passes and code
generation see one set of values, whatever the flags are by then and whatever thread it runs in.

    compile_fx(gm, inputs, config_patches={user's})
      -> compile_fx(gm, inputs, config_patches={user's, flags, user's passes + ours, digest, ...})

After :func:`uninstall` the flags can still be set, and have no effect.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch.fx as fx
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_patches import _compat, config, recording
from torch_patches._cache_facts import inputs_digest, metadata_digest
from torch_patches._inductor.fx_passes.comm_overlap import copy_engine_op
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput
from torch_patches._once import warn_once
from torch_patches._torch_flags import torch_pass_patches
from torch_patches.viewing import observer_of_compile

logger = logging.getLogger(__name__)

JOINT_PASSES = "joint_custom_post_pass"
POST_GRAD_PASSES = "post_grad_custom_post_pass"


# -- the passes that torch runs -------------------------------------------------------------------


def _pipeline() -> ModuleType:
    """Imported when first needed: a process that never buckets does not pay for it."""
    from torch_patches._inductor.fx_passes.comm_overlap import pipeline

    return pipeline


@dataclass(frozen=True)
class _PipelinePass(CustomGraphPass):
    """A pipeline entry with the options of one compile and what Dynamo knew of its inputs.

    It holds no other state: torch deep-copies, compares and pickles config values.
    """

    options: Options
    recorded: tuple[RecordedInput, ...] = ()
    recording: recording.Recording | None = None

    def uuid(self) -> Any | None:
        """Sources, options and inputs, or None (the graph is not cached) once the hooks are gone:
        it would be stored unchanged under the key of a changed one.  None, too, while graphs are
        captured: from a cache there would be none."""
        if not is_installed() or self.recording is not None:
            return None
        options = _cacheable(self.options)
        if options is None or self.options.cross_rank_check != "off":
            return None  # a rank that comes from a cache would not talk to the others
        inputs = inputs_digest(self.recorded, self.options.reads_modules)
        return (type(self).__name__, _pipeline().source_digest(), options, inputs)


def _cacheable(options: Options) -> str | None:
    """The options as text that is equal in all processes, or None if a function among them cannot
    be told apart from others."""
    known = {
        "custom_runtime_estimation": (options.custom_runtime_estimation, options.estimation_digest),
        "module_stack_fn": (options.module_stack_fn, options.module_stack_digest),
    }
    for name, (function, digest) in known.items():
        if function is not None and digest is None:
            warn_once(
                logger,
                f"uncacheable {name}",
                "%s = %r cannot be told apart from other functions, so compiles that use it are not "
                "cached: give it a uuid(), or make it a function of a module",
                name,
                function,
            )
    return repr(options) if options.has_known_functions else None


class JointPass(_PipelinePass):
    """Runs on the joint graph."""

    def __call__(self, graph: fx.Graph) -> None:
        if not is_installed():
            return
        if self.recording is not None:
            _pipeline().tag_or_leave(graph, self.recorded)
            self.recording.add("joint", graph)
        _pipeline().run_joint(graph, self.options, self.recorded)


class PostGradPass(_PipelinePass):
    """Runs on the forward graph and on the backward graph."""

    def __call__(self, graph: fx.Graph) -> None:
        if not is_installed():
            return
        if self.recording is not None:
            self.recording.before(graph)
        _pipeline().run_post_grad(
            graph, self.options, self.recorded, observer=observer_of_compile()
        )
        if self.recording is not None and self.options.changes:
            self.recording.after(graph)


@dataclass(frozen=True)
class ComposedPass(CustomGraphPass):
    """A user's pass, then ours, for releases whose flag takes one callable."""

    first: Any
    second: _PipelinePass

    def __call__(self, graph: fx.Graph) -> None:
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any | None:
        # A plain callable, or one without an id, makes torch skip the cache; so must the pair.
        first = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        second = self.second.uuid()
        return (first, second) if first and second else None


_INFERENCE_AWARE: Any = _compat.inference_aware_base()


@dataclass(frozen=True)
class InferenceAwareComposedPass(ComposedPass, _INFERENCE_AWARE):
    """:class:`ComposedPass` for a user's pass that asks whether the graph is for inference."""

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:  # type: ignore[override]
        self.first(graph, is_inference=is_inference)
        self.second(graph)


def _as_list(passes: Any) -> list[Any]:
    """A custom-pass flag's value as a list, without passes that an outer compile added."""
    if passes is None:
        return []
    items = list(passes) if isinstance(passes, (list, tuple)) else [passes]
    items = [item.first if isinstance(item, ComposedPass) else item for item in items]
    return [item for item in items if not isinstance(item, _PipelinePass)]


def _last_pass(passes: Any) -> _PipelinePass:
    """Ours, out of a flag's value that :func:`append_pass` made."""
    last = passes[-1] if isinstance(passes, list) else passes
    last = last.second if isinstance(last, ComposedPass) else last
    assert isinstance(last, _PipelinePass)
    return last


def append_pass(passes: Any, ours: _PipelinePass) -> Any:
    """The flag's new value: the user's passes, then ours."""
    users = _as_list(passes)
    if _compat.passes_may_be_lists():
        return [*users, ours]
    if not users:
        return ours
    (user,) = users
    if _compat.takes_is_inference(user):
        return InferenceAwareComposedPass(user, ours)
    return ComposedPass(user, ours)


# -- the wrapper ----------------------------------------------------------------------------------


def compile_patches(model: Any, user: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The ``config_patches`` for one compile: the user's and ours; None where ours are off.

    Args:
        model: what is compiled.
        user: the caller's ``config_patches``; its values count when flags are read.

    Raises:
        FlagError: on a flag with a wrong type or value.
    """
    user = user or {}
    options = config.read_options(user)
    written = recording.begin("inductor", model, options)
    if not options.changes and written is None:
        return None
    options = _with_copy_engines(options, user)
    if options.insert_overlap_deps is None:
        options = replace(options, insert_overlap_deps=True)
    if options.fuses:
        from torch_patches.mesh_groups import with_groups

        options = with_groups(model, options)
    recorded = _pipeline().record_inputs_of(model)
    options = _pipeline().check_module_names(model, recorded, options)
    ours = JointPass(options, recorded, written), PostGradPass(options, recorded, written)
    joint = append_pass(config.current_value(JOINT_PASSES, user), ours[0])
    post_grad = append_pass(config.current_value(POST_GRAD_PASSES, user), ours[1])
    metadata = metadata_digest(model, options, recorded)
    return {
        **user,
        **_flag_patches(user, options),
        JOINT_PASSES: joint,
        POST_GRAD_PASSES: post_grad,
        config.DIGEST_FLAG: f"{_pipeline().source_digest()}:{metadata}",
    }


def _with_copy_engines(options: Options, user: Mapping[str, Any]) -> Options:
    """Their ops known to torch, since a graph from the cache has them and no pass runs; and not in CUDA
    graphs, which cannot hold what the ranks tell each other."""
    if not options.copy_engine_gathers:
        return options
    if config.current_value("triton.cudagraphs", user):
        flag = config.PREFIX + "copy_engine_gathers"
        warn_once(logger, flag, "%s: no effect with triton.cudagraphs = True", flag)
        return replace(options, copy_engine_gathers=False)
    copy_engine_op.register_lowerings()
    return options


def _flag_patches(user: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The flags as they were read, and torch's own passes off where ours do their job."""
    buckets = options.bucketing_mode != "none"
    flags = [flag for flag in config.FLAGS if buckets or not flag.of_torch]
    patches = {flag.full_name: getattr(options, flag.name) for flag in flags}
    patches[config.PREFIX + "module_stack_fn"] = None  # torch cannot key it
    if not buckets:
        return patches
    return {
        **patches,
        # Ours schedules, so torch's must not; and what torch's would call torch cannot key.
        config.PREFIX + "enable_overlap_scheduling": False,
        config.PREFIX + "custom_runtime_estimation": None,
        **torch_pass_patches(user, options),
    }


_forwarding: ContextVar[Any] = ContextVar("torch_patches_forwarding", default=None)
"""The model whose compile was handed on: torch calls itself with it once more, by its name."""


@dataclass
class _Hook:
    """The undo record of one patch.  An inactive hook only calls ``original``."""

    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    active: bool = True


_INNER_POSITION, _PATCHES_POSITION = 2, 3
"""Of ``inner_compile`` and ``config_patches`` among the parameters of ``compile_fx``; the model is
the first."""


def _keyed_by_tags(inner: Callable[..., Any], ours: _PipelinePass) -> Callable[..., Any]:
    """``inner`` with the tags of the graph it compiles in its cache key."""

    def inner_compile(gm: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_installed() or not isinstance(gm, fx.GraphModule):
            return inner(gm, *args, **kwargs)
        if ours.recording is not None:
            ours.recording.phase = "bw" if kwargs.get("is_backward") else "fw"
        tags = _pipeline().tags_digest(gm, ours.recorded, ours.options)
        digest = f"{config.current_value(config.DIGEST_FLAG)}:{tags}"
        with inductor_config.patch({config.DIGEST_FLAG: digest}):
            return inner(gm, *args, **kwargs)

    return inner_compile


def _make_hook(original: Callable[..., Any]) -> _Hook:
    """``original`` may be someone else's wrapper with any signature, so nothing is bound to it."""

    @functools.wraps(original)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model_")
        if not hook.active or _forwarding.get() is model:
            return original(*args, **kwargs)
        positional = len(args) > _PATCHES_POSITION
        users = args[_PATCHES_POSITION] if positional else kwargs.get("config_patches")
        patches = compile_patches(model, users)
        if patches is None:
            return original(*args, **kwargs)
        if positional:
            args = (*args[:_PATCHES_POSITION], patches, *args[_PATCHES_POSITION + 1 :])
        else:
            kwargs = {**kwargs, "config_patches": patches}
        ours = _last_pass(patches[POST_GRAD_PASSES])
        if len(args) > _INNER_POSITION:
            inner = _keyed_by_tags(args[_INNER_POSITION], ours)
            args = (*args[:_INNER_POSITION], inner, *args[_INNER_POSITION + 1 :])
        else:
            inner = kwargs.get("inner_compile", compile_fx_module.compile_fx_inner)
            inner = _keyed_by_tags(inner, ours)
            kwargs = {**kwargs, "inner_compile": inner}
        token = _forwarding.set(model)
        try:
            return original(*args, **kwargs)
        finally:
            _forwarding.reset(token)

    hook = _Hook(original, compile_fx)
    return hook


_hook: _Hook | None = None


def is_installed() -> bool:
    """Whether compiles go through the wrapper."""
    return _hook is not None and _hook.active


def install() -> None:
    """Patch ``compile_fx``; once, however often it is called."""
    global _hook
    if is_installed():
        return
    if not _compat.is_supported_torch():
        warn_once(
            logger,
            "untested torch",
            "torch_patches is tested with torch %s; on this torch (%s) it changes nothing. "
            "Set %s=1 to install it all the same.",
            _compat.supported_range(),
            ".".join(map(str, _compat.torch_release())),
            _compat.ALLOW_UNTESTED_VARIABLE,
        )
        return
    _hook = _make_hook(compile_fx_module.compile_fx)
    compile_fx_module.compile_fx = _hook.wrapper


def uninstall() -> None:
    """Restore ``compile_fx``, disable the passes and reset the flags to their defaults.

    The flags stay known to torch and have no effect any more, also on a backward whose forward was
    compiled before.  Flags set in other threads keep their values there, without effect.
    """
    global _hook
    if _hook is None or not _hook.active:
        return
    _hook.active = False
    if compile_fx_module.compile_fx is _hook.wrapper:
        compile_fx_module.compile_fx = _hook.original
    else:
        logger.warning(
            "torch._inductor.compile_fx.compile_fx was replaced after torch_patches installed its "
            "hook; the hook stays in the chain and does nothing"
        )
    _hook = None
    config.reset_flags()
