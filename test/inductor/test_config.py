"""The flags as entries of ``torch._inductor.config``, and the checks of their values."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

import torch_patches
from torch_patches import _compat, config
from torch_patches._inductor.fx_passes.comm_overlap import pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
    CalibrationError,
    CalibrationTable,
    save_calibration,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options

PREFIX = "aten_distributed_optimizations."
DIST = inductor_config.aten_distributed_optimizations
DEFAULTS = {
    "bucketing_mode": "none",
    "max_topo_span": 1500,
    "bucket_cap_mb": None,
    "primary_fsdp_group_only": False,
    "bucket_mode": None,
    "enable_overlap_scheduling": False,
    "insert_overlap_deps": None,
    "max_memory_increase_gb": None,
    "max_memory_increase_ratio": None,
    "max_in_flight_gb": None,
    "max_compute_pre_fetch": None,
    "max_schedules": 13,
    "gpus_per_node": 8,
    "estimate_device": "H100",
    "compute_slowdown": 1.2,
    "link_sharing": 1.0,
    "calibration_file": None,
    "module_bucket_plans": None,
    "module_overlap_with": (),
    "module_prefetch_depth": 1,
    "module_deferral_depth": 1,
    "module_uncovered": "bucket",
    "module_plan_unmatched": "error",
    "module_stack_fn": None,
    "fuse_chained_all_gathers": False,
    "fuse_chained_reduce_scatters": False,
    "create_flattened_groups": False,
    "keep_gathered_parameters": False,
    "copy_engine_gathers": False,
    "cross_rank_check": "off",
    "custom_runtime_estimation": None,
}
#: That torch has too, with values of its own while ours are off.
OF_TORCH = [flag.name for flag in config.FLAGS if flag.of_torch]


@pytest.fixture(autouse=True)
def flags_at_defaults() -> Iterator[None]:
    with inductor_config.patch({PREFIX + name: value for name, value in DEFAULTS.items()}):
        yield


# -- entries of torch's config --------------------------------------------------------------------


def test_defaults_are_those_of_the_options() -> None:
    assert config.read_options() == Options()
    assert {flag.name: flag.default for flag in config.FLAGS} == DEFAULTS


def test_attribute_access_reads_and_writes() -> None:
    assert DIST.bucketing_mode == "none"
    DIST.bucketing_mode = "topo_span"
    DIST.bucket_cap_mb = [2, 100]
    assert inductor_config.aten_distributed_optimizations.bucketing_mode == "topo_span"
    assert config.read_options() == Options(bucketing_mode="topo_span", bucket_cap_mb=(2.0, 100.0))


def test_unknown_flag_is_refused_by_torch() -> None:
    with pytest.raises(AttributeError):
        DIST.bucketing_mod = "topo_span"


def test_patch_restores() -> None:
    with inductor_config.patch({PREFIX + "max_topo_span": 7}):
        assert config.read_options().max_topo_span == 7
    assert config.read_options().max_topo_span == 1500


def test_save_and_load() -> None:
    with inductor_config.patch({PREFIX + "bucket_cap_mb": [1.0, 2.0]}):
        saved = inductor_config.save_config()
    assert DIST.bucket_cap_mb is None
    with inductor_config.patch({PREFIX + "bucket_cap_mb": None}):
        inductor_config.load_config(saved)
        assert DIST.bucket_cap_mb == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("bucketing_mode", "topo_span"), ("max_topo_span", None), ("primary_fsdp_group_only", True)],
)
def test_value_changes_hash_and_cache_key(name: str, value: object) -> None:
    before = inductor_config.get_hash()
    with inductor_config.patch({PREFIX + name: value}):
        assert inductor_config.get_hash() != before
        # The dictionary that enters the FX-graph cache key.
        assert inductor_config.save_config_portable()[PREFIX + name] == value
    assert inductor_config.get_hash() == before


def test_private_digest_enters_the_cache_key() -> None:
    portable = inductor_config.save_config_portable()
    assert portable[config.DIGEST_FLAG] == config.NEUTRAL_DIGEST


@pytest.mark.parametrize("cap", [None, 4, 4.0, [1.0, 2.0]])
def test_compile_options_take_the_flags(cap: object) -> None:
    options = {PREFIX + "bucketing_mode": "topo_span", PREFIX + "bucket_cap_mb": cap}
    compiled = torch.compile(torch.sin, options=options)
    assert callable(compiled)


def test_compile_options_leave_the_value_check_to_us() -> None:
    """torch's own check of plain types would say less than ours, and sooner."""
    assert callable(torch.compile(torch.sin, options={PREFIX + "max_topo_span": "many"}))


# -- registering ----------------------------------------------------------------------------------


def test_registering_again_keeps_entries_and_values() -> None:
    DIST.max_topo_span = 11
    entry = _compat.config_module._config[PREFIX + "max_topo_span"]
    config.register_flags()
    importlib.reload(torch_patches)
    assert _compat.config_module._config[PREFIX + "max_topo_span"] is entry
    assert DIST.max_topo_span == 11


def test_entry_of_torch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    name = PREFIX + "max_topo_span"
    native = _compat.new_config_entry(name, 42, int)
    monkeypatch.setitem(_compat.config_module._config, name, native)
    config.register_flags()
    assert _compat.config_module._config[name] is native
    DIST.max_topo_span = 43
    config.reset_flags()  # touches only what this package added
    assert DIST.max_topo_span == 43


def test_reset_forgets_values_and_keeps_entries() -> None:
    DIST.bucketing_mode = "topo_span"
    DIST.bucket_cap_mb = [3.0]
    config.reset_flags()
    assert config.read_options() == Options()
    with inductor_config.patch({PREFIX + "bucketing_mode": "topo_span"}):
        assert DIST.bucketing_mode == "topo_span"
    inductor_config.save_config()


def test_changed_config_module_breaks_only_a_tested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(_compat, "has_config", lambda name: False)
    monkeypatch.setattr(_compat, "new_config_entry", broken)
    with pytest.raises(TypeError):
        config.register_flags()
    monkeypatch.setattr(_compat, "is_supported_torch", lambda: False)
    config.register_flags()


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("bucketing_mode", "none", "none"),
        ("bucketing_mode", "topo_span", "topo_span"),
        ("max_topo_span", 0, 0),
        ("max_topo_span", None, None),
        ("bucket_cap_mb", None, None),
        ("bucket_cap_mb", 100, 100.0),
        ("bucket_cap_mb", 0.5, 0.5),
        ("bucket_cap_mb", [2, 100.0], (2.0, 100.0)),
        ("bucket_cap_mb", (2.0,), (2.0,)),
        ("primary_fsdp_group_only", True, True),
        ("bucket_mode", None, None),
        ("bucket_mode", "default", "default"),
        ("bucket_mode", "coalesced", "coalesced"),
        ("bucketing_mode", "auto", "auto"),
        ("enable_overlap_scheduling", True, True),
        ("insert_overlap_deps", False, False),
        ("max_memory_increase_gb", 0, 0.0),
        ("max_memory_increase_ratio", 0.5, 0.5),
        ("max_in_flight_gb", 5, 5.0),
        ("max_compute_pre_fetch", 0, 0),
        ("max_compute_pre_fetch", None, None),
        ("gpus_per_node", 1, 1),
        ("estimate_device", "B200", "B200"),
        ("compute_slowdown", 1, 1.0),
        ("link_sharing", 0, 0.0),
        ("calibration_file", None, None),
        ("custom_runtime_estimation", math.dist, math.dist),
    ],
)
def test_good_value(name: str, value: object, read: object) -> None:
    setattr(DIST, name, value)
    DIST.bucketing_mode = value if name == "bucketing_mode" else "topo_span"
    result = getattr(config.read_options(), name)
    assert result == read
    assert type(result) is type(read)


BAD_VALUES = [
    ("bucketing_mode", "fast", "'none', 'topo_span', 'transformer_block', 'modules', 'auto'"),
    ("bucketing_mode", None, "'none', 'topo_span'"),
    ("bucketing_mode", True, "'none', 'topo_span'"),
    ("bucketing_mode", ["none"], "'none', 'topo_span'"),
    ("max_topo_span", True, "int >= 0"),
    ("max_topo_span", -1, "int >= 0"),
    ("max_topo_span", 10.0, "int >= 0"),
    ("max_topo_span", "10", "int >= 0"),
    ("bucket_cap_mb", True, "number > 0"),
    ("bucket_cap_mb", 0, "number > 0"),
    ("bucket_cap_mb", -2.0, "number > 0"),
    ("bucket_cap_mb", math.nan, "number > 0"),
    ("bucket_cap_mb", math.inf, "number > 0"),
    ("bucket_cap_mb", 10**400, "number > 0"),
    ("bucket_cap_mb", "25", "number > 0"),
    ("bucket_cap_mb", [], "the list is empty"),
    ("bucket_cap_mb", [1.0, False], "number > 0"),
    ("bucket_cap_mb", [1.0, None], "number > 0"),
    ("bucket_cap_mb", {0: 1.0}, "number > 0"),
    ("bucket_cap_mb", abs, "optimize_graph(bucket_cap_mb=...)"),
    ("primary_fsdp_group_only", 1, "True or False"),
    ("primary_fsdp_group_only", None, "True or False"),
    ("bucket_mode", "custom_ops", "None, 'default', 'coalesced'"),
    ("bucket_mode", "custom_ops_multidtype", "None, 'default', 'coalesced'"),
    ("bucket_mode", False, "None, 'default', 'coalesced'"),
    ("enable_overlap_scheduling", 1, "True or False"),
    ("insert_overlap_deps", "yes", "True, False or None"),
    ("max_memory_increase_gb", -0.1, "number >= 0, or None"),
    ("max_memory_increase_gb", math.inf, "number >= 0, or None"),
    ("max_memory_increase_ratio", True, "number >= 0, or None"),
    ("max_in_flight_gb", "5", "number >= 0, or None"),
    ("max_compute_pre_fetch", 1.5, "int >= 0, or None for 200"),
    ("gpus_per_node", 0, "an int >= 1"),
    ("gpus_per_node", None, "an int >= 1"),
    ("estimate_device", "h100", "'A100', 'H100', 'H200', 'B200', 'generic'"),
    ("compute_slowdown", 0.9, "number >= 1"),
    ("link_sharing", 1.1, "number from 0 to 1"),
    ("link_sharing", 10**400, "number from 0 to 1"),
    ("calibration_file", "", "torch-patches calibrate"),
    ("calibration_file", 3, "torch-patches calibrate"),
    ("custom_runtime_estimation", 3.0, "a function (node, override_size_bytes or None)"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_bad_value_names_flag_value_and_allowed(name: str, value: object, allowed: str) -> None:
    DIST.bucketing_mode = "topo_span"
    setattr(DIST, name, value)
    with pytest.raises(config.FlagError) as error:
        config.read_options()
    assert f"torch._inductor.config.{PREFIX}{name}" in str(error.value)
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)
    assert isinstance(error.value, ValueError)


def test_value_for_torch_is_fine_while_ours_is_off() -> None:
    DIST.bucket_mode = "custom_ops"
    DIST.custom_runtime_estimation = "whatever torch makes of it"
    assert config.read_options() == Options()


def test_flags_of_torch_are_named_as_such() -> None:
    """Those that 2.13 has, which older releases may lack."""
    ours = [name for name in DEFAULTS if name not in OF_TORCH]
    entries = {name: inductor_config._config.get(PREFIX + name) for name in DEFAULTS}
    added = [n for n, e in entries.items() if getattr(e, "added_by", None) == config.__name__]
    assert set(ours) <= set(added) <= {*ours, "bucket_mode"}


def test_calibration_file_is_read_when_a_compile_starts(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    DIST.bucketing_mode, DIST.calibration_file = "auto", str(path)
    with pytest.raises(FileNotFoundError):
        config.read_options()
    path.write_text("{}")
    with pytest.raises(CalibrationError, match=r"table\.json"):
        config.read_options()
    save_calibration(path, CalibrationTable(device="mine", dram_gb_per_s=1000.0))
    options = config.read_options()
    assert options.calibration is not None and options.calibration.dram_gb_per_s == 1000.0
    assert options.calibration_digest == options.calibration.content_digest
    path.unlink()
    DIST.bucketing_mode = "none"
    assert config.read_options().calibration is None


def test_overrides_count_before_the_config() -> None:
    DIST.max_topo_span = 5
    overrides = {PREFIX + "bucketing_mode": "topo_span", "cpp_wrapper": True}
    options = config.read_options(overrides)
    assert options == Options(bucketing_mode="topo_span", max_topo_span=5)
    with pytest.raises(config.FlagError, match="bucketing_mode: 3 is not allowed"):
        config.read_options({PREFIX + "bucketing_mode": 3})


# -- arguments of functions -----------------------------------------------------------------------


def test_arguments_default_to_the_flags() -> None:
    DIST.max_topo_span = 9
    options = config.options_from_arguments({"bucketing_mode": "topo_span"}, "optimize_graph")
    assert options == Options(bucketing_mode="topo_span", max_topo_span=9)


def test_argument_may_be_a_function() -> None:
    options = config.options_from_arguments({"bucket_cap_mb": float}, "optimize_graph")
    assert options.bucket_cap_mb is float


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [bad for bad in BAD_VALUES if not callable(bad[1])]
)
def test_bad_argument_is_named_as_such(name: str, value: object, allowed: str) -> None:
    with pytest.raises(config.FlagError) as error:
        config.options_from_arguments(
            {"bucketing_mode": "topo_span", name: value}, "optimize_graph"
        )
    assert f"optimize_graph({name}=...): {value!r} is not allowed" in str(error.value)
    assert allowed in str(error.value)


def test_bad_flag_behind_an_argument_is_named_as_flag() -> None:
    DIST.max_topo_span = -4
    with pytest.raises(config.FlagError, match=r"aten_distributed_optimizations\.max_topo_span"):
        config.options_from_arguments({"bucketing_mode": "topo_span"}, "optimize_graph")


def test_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"optimize_graph.*max_span"):
        config.options_from_arguments({"max_span": 3}, "optimize_graph")


@pytest.fixture
def optimized_with(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options of each graph that ``optimize_graph`` hands to the pipeline."""
    seen: list[Options] = []
    monkeypatch.setattr(
        pipeline, "optimize_graph", lambda gm, options, observer: seen.append(options)
    )
    return seen


def test_calling_optimize_graph_is_the_opt_in(optimized_with: list[Options]) -> None:
    DIST.max_topo_span = 9
    torch_patches.optimize_graph(None)
    torch_patches.optimize_graph(None, bucketing_mode="none")
    torch_patches.optimize_graph(None, max_topo_span=None, bucket_cap_mb=[1, 2])
    assert optimized_with == [
        Options("auto", 9, insert_overlap_deps=False),
        Options("auto", 9, insert_overlap_deps=False),
        Options("auto", None, (1.0, 2.0), insert_overlap_deps=False),
    ]


def test_optimize_graph_names_the_bad_argument(optimized_with: list[Options]) -> None:
    with pytest.raises(config.FlagError, match=r"optimize_graph\(max_topo_span=...\): True is not"):
        torch_patches.optimize_graph(None, max_topo_span=True)
    assert not optimized_with


def test_descriptions_cover_the_table() -> None:
    described = config.describe_flags()
    assert [item.name for item in described] == [PREFIX + name for name in DEFAULTS]
    assert all(item.doc and item.allowed for item in described)
