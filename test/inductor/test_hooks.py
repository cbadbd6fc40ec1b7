"""The hook on ``compile_fx``: what it hands to torch, when, and what ends up in the cache keys.

A stand-in takes the place of torch's ``compile_fx``; the tests look at what it is called with.
Real compiles are in ``test_hooks_compile.py``.
"""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import torch_patches
from torch_patches import _compat, _hooks, _once, config
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.options import Options

PREFIX = "aten_distributed_optimizations."
MODE = PREFIX + "bucketing_mode"
SPAN = PREFIX + "max_topo_span"
DIST = inductor_config.aten_distributed_optimizations
ON = Options(bucketing_mode="topo_span", insert_overlap_deps=True)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, in order, instead of the post-grad pipeline."""
    order: list[str] = []

    def run(graph: fx.Graph, options: Options, recorded: object, observer: object) -> None:
        order.append("ours")

    monkeypatch.setattr(pipeline, "run_post_grad", run)
    return order


@pytest.fixture(autouse=True)
def installed_with_defaults() -> Iterator[None]:
    _once._warned.clear()
    _hooks.install()
    with inductor_config.patch({flag.full_name: flag.default for flag in config.FLAGS}):
        yield
    _hooks.install()


# -- what torch's compile_fx is called with -------------------------------------------------------


class StandIn:
    """torch's ``compile_fx`` as far as its arguments go: applies the patches and calls itself."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any] | None] = []
        self.in_effect: list[dict[str, Any]] = []
        self.nested: Callable[[], None] | None = None

    def compile_fx(
        self,
        model_: Any,
        example_inputs_: Any,
        inner_compile: Any = None,
        config_patches: dict[str, Any] | None = None,
    ) -> str:
        self.calls.append(config_patches)
        if config_patches:
            with inductor_config.patch(config_patches):
                return compile_fx_module.compile_fx(model_, example_inputs_)
        self.in_effect.append(inductor_config.get_config_copy())
        if self.nested is not None:
            nested, self.nested = self.nested, None
            nested()
        return "compiled"

    def effective(self) -> dict[str, Any]:
        """The config during the one compile that was made."""
        (only,) = self.in_effect
        return only


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    _hooks.uninstall()
    with monkeypatch.context() as patch:
        patch.setattr(compile_fx_module, "compile_fx", stand_in.compile_fx)
        _hooks.install()
        yield stand_in
        _hooks.uninstall()


def compile_fx(patches: dict[str, Any] | None = None, model: object = "model") -> Any:
    """As torch's callers do: looks the name up when it compiles."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(model, [], config_patches=patches)


@pytest.mark.parametrize("patches", [None, {}, {"cpp_wrapper": True}, {MODE: "none"}])
def test_passes_straight_through_by_default(stand_in: StandIn, patches: Any) -> None:
    assert compile_fx(patches) == "compiled"
    assert stand_in.calls[0] is patches


def test_bad_flag_raises_also_while_the_mode_is_none(stand_in: StandIn) -> None:
    DIST.max_topo_span = "many"
    with pytest.raises(config.FlagError, match="max_topo_span"):
        compile_fx()


@pytest.mark.parametrize("how", ["assignment", "patch", "config_patches"])
def test_flags_reach_the_compile_however_they_are_set(stand_in: StandIn, how: str) -> None:
    values = {MODE: "topo_span", SPAN: 77}
    if how == "assignment":
        DIST.bucketing_mode, DIST.max_topo_span = values.values()
        compile_fx()
    elif how == "patch":
        with inductor_config.patch(values):
            compile_fx()
    else:
        compile_fx(values)
    effective = stand_in.effective()
    assert (effective[MODE], effective[SPAN]) == ("topo_span", 77)
    assert ours(effective, "post_grad").options == replace(ON, max_topo_span=77)
    assert ours(effective, "joint").options == replace(ON, max_topo_span=77)


def ours(effective: dict[str, Any], kind: str) -> Any:
    """The last pass of a flag, which must be ours."""
    passes = effective[f"{kind}_custom_post_pass"]
    last = passes[-1] if isinstance(passes, list) else passes
    last = last.second if isinstance(last, _hooks.ComposedPass) else last
    assert isinstance(last, _hooks.JointPass if kind == "joint" else _hooks.PostGradPass)
    return last


def test_config_patches_of_the_caller_win_and_survive(stand_in: StandIn) -> None:
    DIST.max_topo_span = 5
    compile_fx({MODE: "topo_span", SPAN: 6, "cpp_wrapper": True})
    effective = stand_in.effective()
    assert effective["cpp_wrapper"] is True
    assert ours(effective, "post_grad").options.max_topo_span == 6


def test_config_patches_may_be_positional(stand_in: StandIn) -> None:
    compile_fx_module.compile_fx("model", [], None, {MODE: "topo_span", SPAN: 8})
    assert ours(stand_in.effective(), "post_grad").options.max_topo_span == 8
    compile_fx_module.compile_fx(
        model_="model", example_inputs_=[], config_patches={MODE: "topo_span", SPAN: 9}
    )
    assert ours(stand_in.in_effect[-1], "post_grad").options.max_topo_span == 9


def test_list_cap_is_frozen(stand_in: StandIn) -> None:
    caps = [2.0, 100.0]
    compile_fx({MODE: "topo_span", PREFIX + "bucket_cap_mb": caps})
    caps.append(3.0)
    assert stand_in.effective()[PREFIX + "bucket_cap_mb"] == (2.0, 100.0)


def test_torch_calling_itself_is_not_patched_twice(stand_in: StandIn) -> None:
    compile_fx({MODE: "topo_span"})
    first, second = stand_in.calls
    assert first is not None and second is None
    compile_fx({MODE: "topo_span"})
    assert len(stand_in.calls) == 4


def test_compile_inside_a_compile_is_patched_once_more(stand_in: StandIn) -> None:
    stand_in.nested = lambda: compile_fx(model="another")
    compile_fx({MODE: "topo_span"})
    outer, inner = stand_in.in_effect
    # The inner one inherits our pass from the outer; it must not run twice.
    assert outer["post_grad_custom_post_pass"] == inner["post_grad_custom_post_pass"]
    assert len(stand_in.calls) == 4


def test_bad_flag_raises_before_torch_compiles(stand_in: StandIn) -> None:
    with pytest.raises(config.FlagError, match=r"max_topo_span: -1 is not allowed; use an int"):
        compile_fx({MODE: "topo_span", SPAN: -1})
    with pytest.raises(
        config.FlagError, match=r"'none', 'topo_span', 'transformer_block', 'modules', 'auto'"
    ):
        compile_fx({MODE: "fast"})
    assert not stand_in.calls


def test_torchs_own_bucketing_is_off(stand_in: StandIn) -> None:
    compile_fx({MODE: "topo_span"})
    for name in ("all_gathers", "reduce_scatters", "all_reduces"):
        assert stand_in.effective()[f"bucket_{name}_fx"] == "none"


@pytest.mark.parametrize("mode", ["topo_span", "auto"])
def test_ours_schedules_instead_of_torchs(stand_in: StandIn, mode: str) -> None:
    compile_fx({MODE: mode, PREFIX + "enable_overlap_scheduling": True})
    effective = stand_in.effective()
    assert ours(effective, "post_grad").options.schedules
    assert effective[PREFIX + "enable_overlap_scheduling"] is False
    assert effective["reorder_for_compute_comm_overlap"] is False
    if _compat.has_config(_compat.SIMPLE_OVERLAP_FLAG):
        assert effective[_compat.SIMPLE_OVERLAP_FLAG] is False


def test_torchs_scheduler_stays_its_own_while_ours_is_off(stand_in: StandIn) -> None:
    compile_fx({PREFIX + "enable_overlap_scheduling": True})
    assert stand_in.effective()[PREFIX + "enable_overlap_scheduling"] is True


@pytest.mark.parametrize(("asked", "used"), [(None, True), (True, True), (False, False)])
def test_control_dependencies_are_on_under_inductor(
    stand_in: StandIn, asked: bool | None, used: bool
) -> None:
    compile_fx({MODE: "auto", PREFIX + "insert_overlap_deps": asked})
    assert ours(stand_in.effective(), "post_grad").options.insert_overlap_deps is used


def test_estimation_is_hidden_from_torchs_key_and_part_of_ours(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """torch would key a function by its name only, and cannot pickle a lambda."""
    name = PREFIX + "custom_runtime_estimation"
    uuids = []
    for custom in (None, estimation, other_estimation, estimation):
        compile_fx({MODE: "auto", name: custom})
        assert stand_in.in_effect[-1][name] is None
        uuids.append(ours(stand_in.in_effect[-1], "post_grad").uuid())
    assert len(set(uuids)) == 3 and uuids[1] == uuids[3] and None not in uuids
    for _ in range(2):
        compile_fx({MODE: "auto", name: lambda node, size_bytes: 1.0})
        assert ours(stand_in.in_effect[-1], "post_grad").uuid() is None
    assert caplog.text.count("are not cached") == 1


def estimation(node: Any, size_bytes: int | None) -> float | None:
    return 1.0


def other_estimation(node: Any, size_bytes: int | None) -> float | None:
    return 2.0


def test_asking_each_rank_to_measure_is_warned_of_once(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    compile_fx({MODE: "auto"})
    assert "ignores it" not in caplog.text
    for _ in range(2):
        compile_fx({MODE: "auto", PREFIX + "collective_estimator": "benchmark"})
    assert caplog.text.count("ignores it") == 1
    assert "collective_estimator" in caplog.text


def test_copy_engines_are_left_out_of_cuda_graphs(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    name = PREFIX + "copy_engine_gathers"
    compile_fx({MODE: "auto", name: True})
    assert stand_in.in_effect[-1][name] is True and name not in caplog.text
    for _ in range(2):
        compile_fx({MODE: "auto", name: True, "triton.cudagraphs": True})
        assert stand_in.in_effect[-1][name] is False
    assert caplog.text.count(f"{name}: no effect with triton.cudagraphs = True") == 1


# -- torch's legacy flags -------------------------------------------------------------------------


def test_legacy_flags_together_with_ours_warn_once(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    legacy = {"bucket_all_gathers_fx": "all", "reorder_for_compute_comm_overlap": True}
    with caplog.at_level(logging.WARNING, logger="torch_patches"):
        compile_fx({MODE: "topo_span", **legacy})
        compile_fx({MODE: "topo_span", **legacy})
    (record,) = caplog.records
    text = record.getMessage()
    assert "aten_distributed_optimizations.bucketing_mode = 'topo_span'" in text
    assert "bucket_all_gathers_fx = 'all' (switched off" in text
    assert "reorder_for_compute_comm_overlap = True (left on" in text
    assert stand_in.in_effect[0]["bucket_all_gathers_fx"] == "none"
    assert stand_in.in_effect[0]["reorder_for_compute_comm_overlap"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_all_gathers_fx", "all"),
        ("bucket_reduce_scatters_fx", "all"),
        ("bucket_all_reduces_fx", "all"),
        ("_fuse_ddp_communication", True),
        ("reorder_for_compute_comm_overlap", True),
    ],
)
def test_every_legacy_flag_is_warned_of(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    """One that a torch renames would be passed over without a word, and two passes would bucket."""
    compile_fx({MODE: "auto", name: value})
    (record,) = caplog.records
    assert f"{name} = {value!r} (" in record.getMessage()


def test_legacy_flags_alone_do_not_warn(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    compile_fx({"bucket_all_gathers_fx": "all"})
    compile_fx({MODE: "topo_span"})
    assert not caplog.records
    assert stand_in.in_effect[0]["bucket_all_gathers_fx"] == "all"


# -- the user's own passes ------------------------------------------------------------------------


class UserPass(CustomGraphPass):
    def __init__(self, uuid: str | None = "user") -> None:
        self.id = uuid

    def __call__(self, graph: fx.Graph) -> None: ...

    def uuid(self) -> str | None:
        return self.id


def plain_callable(graph: fx.Graph) -> None: ...


def test_passes_have_ids_and_survive_copies() -> None:
    for kind in (_hooks.JointPass, _hooks.PostGradPass):
        one = kind(ON)
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), kind(ON)):
            assert other == one
            assert other.uuid() == one.uuid()
        assert one.uuid() != kind(Options("topo_span", 3)).uuid()
        pickle.dumps(one.uuid())
    assert _hooks.JointPass(ON).uuid() != _hooks.PostGradPass(ON).uuid()


def test_ours_comes_behind_the_users_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "passes_may_be_lists", lambda: True)
    ours, user = _hooks.PostGradPass(ON), UserPass()
    assert _hooks.append_pass(None, ours) == [ours]
    assert _hooks.append_pass(user, ours) == [user, ours]
    assert _hooks.append_pass((user, plain_callable), ours) == [user, plain_callable, ours]
    assert _hooks.append_pass([user, _hooks.PostGradPass(Options())], ours) == [user, ours]


def test_ours_comes_behind_the_users_as_one_pass(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    """What torch 2.11 and 2.12 take, on any release."""
    monkeypatch.setattr(_compat, "passes_may_be_lists", lambda: False)
    ours = _hooks.PostGradPass(ON)
    assert _hooks.append_pass(None, ours) == ours
    composed = _hooks.append_pass(lambda graph: ran.append("user"), ours)
    composed(fx.Graph())
    assert ran == ["user", "ours"]
    assert composed.uuid() is None  # a plain callable keeps torch from caching

    composed = _hooks.append_pass(UserPass("a"), ours)
    assert composed.uuid() == ("a", ours.uuid())
    assert composed.uuid() != _hooks.append_pass(UserPass("b"), ours).uuid()
    assert _hooks.append_pass(UserPass(None), ours).uuid() is None
    assert _hooks.append_pass(composed, ours) == _hooks.append_pass(composed.first, ours)


@pytest.mark.skipif(
    _compat.inference_aware_base() is CustomGraphPass, reason="torch 2.11 has no such pass"
)
def test_composed_pass_hands_on_is_inference(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    class Aware(_compat.inference_aware_base()):  # type: ignore[misc]
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            ran.append(f"user {is_inference}")

        def uuid(self) -> str:
            return "aware"

    monkeypatch.setattr(_compat, "passes_may_be_lists", lambda: False)
    composed = _hooks.append_pass(Aware(), _hooks.PostGradPass(ON))
    assert _compat.takes_is_inference(composed)
    composed(fx.Graph(), is_inference=True)
    assert ran == ["user True", "ours"]


# -- installing and uninstalling ------------------------------------------------------------------


def test_importing_and_installing_twice_is_harmless(stand_in: StandIn) -> None:
    wrapper = compile_fx_module.compile_fx
    importlib.reload(torch_patches)
    _hooks.install()
    assert compile_fx_module.compile_fx is wrapper


def test_uninstall_restores_and_flags_have_no_effect(stand_in: StandIn) -> None:
    DIST.bucketing_mode = "topo_span"
    torch_patches.uninstall()
    torch_patches.uninstall()
    assert compile_fx_module.compile_fx == stand_in.compile_fx
    assert config.read_options() == Options()
    DIST.bucketing_mode = "topo_span"
    compile_fx()
    assert stand_in.calls == [None]
    assert not stand_in.effective()["post_grad_custom_post_pass"]


def test_passes_do_nothing_after_uninstall(ran: list[str]) -> None:
    """A backward may compile later than that; its graph must not be cached under our key."""
    post_grad = _hooks.PostGradPass(ON)
    assert post_grad.uuid() is not None
    torch_patches.uninstall()
    post_grad(fx.Graph())
    assert not ran
    assert post_grad.uuid() is None


def test_uninstall_keeps_a_later_wrapper(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = compile_fx_module.compile_fx
    seen = []

    def foreign(*args: Any, **kwargs: Any) -> Any:
        seen.append("foreign")
        return below(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(compile_fx_module, "compile_fx", foreign)
        torch_patches.uninstall()
        assert compile_fx_module.compile_fx is foreign
        assert "stays in the chain and does nothing" in caplog.text
        compile_fx({MODE: "topo_span"})
        assert stand_in.calls[0] == {MODE: "topo_span"}

        _hooks.install()  # wraps the other wrapper
        compile_fx({MODE: "topo_span"})
        assert ours(stand_in.in_effect[-1], "post_grad").options == ON
        assert "foreign" in seen


def test_untested_torch_is_left_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _hooks.uninstall()
    original = compile_fx_module.compile_fx
    monkeypatch.setattr(torch, "__version__", "2.16.0a0+git123")
    monkeypatch.delenv(_compat.ALLOW_UNTESTED_VARIABLE, raising=False)
    _hooks.install()
    _hooks.install()
    assert compile_fx_module.compile_fx is original
    (record,) = caplog.records
    assert _compat.ALLOW_UNTESTED_VARIABLE in record.getMessage()
    assert "2.16" in record.getMessage()
    monkeypatch.setenv(_compat.ALLOW_UNTESTED_VARIABLE, "1")
    _hooks.install()
    assert compile_fx_module.compile_fx is not original


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.10.0", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0", True),
        ("2.16.0.dev20270101", False),
        ("3.0.0", False),
    ],
)
def test_supported_releases(version: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_compat.ALLOW_UNTESTED_VARIABLE, raising=False)
    assert _compat.is_supported_torch(version) is supported


# -- the digest -----------------------------------------------------------------------------------


def test_digest_is_neutral_unless_ours_is_on(stand_in: StandIn) -> None:
    compile_fx()
    compile_fx({MODE: "topo_span"})
    off, on = (effective[config.DIGEST_FLAG] for effective in stand_in.in_effect)
    assert off == config.NEUTRAL_DIGEST
    assert on not in (off, "")


def test_public_names() -> None:
    assert torch_patches.__version__ == "0.1.0"
    assert torch_patches.FlagError is config.FlagError
    assert torch_patches.uninstall is _hooks.uninstall
    with pytest.raises(AttributeError, match="no attribute 'optimise_graph'"):
        _ = torch_patches.optimise_graph
