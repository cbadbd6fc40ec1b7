"""The command that measures: which groups it makes, and a run of it on two gloo processes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_patches import cli
from torch_patches._inductor.fx_passes.comm_overlap.estimate.calibration import (
    CalibrationTable,
    load_calibration,
    save_calibration,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES, LinkClass
from torch_patches._inductor.fx_passes.comm_overlap.estimate.measured import (
    CollectiveTimes,
    MatmulRates,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import (
    collective_ms,
    link_class_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind
from torch_patches.testing import measure
from torch_patches.testing.measure import GroupShape, Settings, group_shapes
from torch_patches.testing.processes import Say, run_ranks

TOOL = Path(__file__).parents[1] / "tools" / "calibrate.py"
INTRA, INTER = LinkClass.INTRA_NODE, LinkClass.INTER_NODE


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibrate_under_test", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "gpus_per_node", "expected"),
    [
        (1, 8, []),
        (2, 8, [(INTRA, 2, 1)]),
        (8, 8, [(INTRA, 2, 1), (INTRA, 4, 1), (INTRA, 8, 1)]),
        (6, 8, [(INTRA, 2, 1)]),  # six ranks are no whole part of a node of eight
        (6, 6, [(INTRA, 3, 1), (INTRA, 6, 1)]),
        (4, 1, [(INTER, 2, 1), (INTER, 4, 1)]),
        (
            32,
            8,
            [
                *[(INTRA, 2, 1), (INTRA, 4, 1), (INTRA, 8, 1)],
                *[(INTER, 2, 8), (INTER, 4, 8), (INTER, 16, 1), (INTER, 32, 1)],
            ],
        ),
        (12, 8, [(INTRA, 2, 1), (INTRA, 4, 1)]),
    ],
)
def test_shapes(world: int, gpus_per_node: int, expected: list[tuple[LinkClass, int, int]]) -> None:
    assert group_shapes(world, gpus_per_node) == [GroupShape(*shape) for shape in expected]


@pytest.mark.parametrize("gpus_per_node", [1, 2, 3, 4, 6, 8, 16])
def test_groups_cover_the_world_on_the_link_that_estimates_see(gpus_per_node: int) -> None:
    for world in range(1, 49):
        shapes = group_shapes(world, gpus_per_node)
        assert len({(shape.link, shape.size) for shape in shapes}) == len(shapes)
        for shape in shapes:
            groups = list(shape.groups(world))
            assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
            for ranks in groups:
                assert len(ranks) == shape.size > 1
                assert link_class_of(shape.size, ranks, gpus_per_node) is shape.link


# -- a run ----------------------------------------------------------------------------------------


def work(rank: int, say: Say, output: str) -> tuple[int, list[str]]:
    """Exit code, and the table's digest on this rank as well as in the file."""
    torch.set_num_threads(1)
    seen: list[CalibrationTable] = []
    measured = measure.calibrate

    def calibrate(device: torch.device, settings: Settings) -> CalibrationTable:
        seen.append(measured(device, settings))
        return seen[0]

    measure.calibrate = calibrate  # type: ignore[assignment]
    code = load_tool().main([output, "--quick", "--backend", "gloo", "--gpus-per-node", "2"])
    return code, [seen[0].content_digest, load_calibration(output).content_digest]


def test_two_ranks_agree_and_the_file_loads(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    first, second = run_ranks(work, 2, arguments=(str(output),), timeout_s=120.0)
    assert first[0] == second[0] == 0
    assert len({*first[1], *second[1]}) == 1
    table = load_calibration(output)
    measured = {(times.kind, times.link, times.group_size) for times in table.collectives}
    assert measured == {(kind, INTRA, 2) for kind in CollectiveKind}
    assert all(times.size_bytes == (16384, 262144) for times in table.collectives)
    assert [rates.dtype for rates in table.matmul] == [torch.float32]
    assert table.dram_gb_per_s and table.kernel_issue_us and table.collective_issue_us
    assert table.coalesced_member_issue_us is not None and table.wait_issue_us is not None
    # On a CPU compute and network share the cores.
    assert table.compute_slowdown is None and table.loaded_launch_us is None
    assert dict(table.about)["backend"] == "gloo"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["table.json", "--gpus-per-node", "0"], "at least 1"),
        (["missing/folder/table.json"], "the folder of"),
        ([], "required: TABLE"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_tool().main(arguments) == 2
    assert text in capsys.readouterr().err


def test_help_shows_how_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool().main(["--help"]) == 0
    assert "torchrun --nproc-per-node 8 -m torch_patches calibrate" in capsys.readouterr().out


# -- model against measurement --------------------------------------------------------------------

LINK = DEVICES["H100"].link(INTRA)


def saved_table(path: Path) -> CalibrationTable:
    """A machine whose gathers take twice what the constants say, and whose products take that."""
    sizes = (1 << 20, 1 << 26)
    gather = [collective_ms(CollectiveKind.ALL_GATHER, size, 8, LINK) for size in sizes]
    times = CollectiveTimes(
        CollectiveKind.ALL_GATHER, INTRA, 8, sizes, tuple(2 * ms for ms in gather)
    )
    device = DEVICES["H100"]
    reached = device.matmul_tflops(torch.bfloat16) * device.matmul_efficiency
    rates = MatmulRates(torch.bfloat16, (10**11, 10**12), (reached, reached))
    table = CalibrationTable("a machine", (times,), (rates,))
    save_calibration(path, table)
    return table


def test_model_is_shown_beside_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_table(tmp_path / "t.json")
    assert cli.main(["calibrate", "--show", str(tmp_path / "t.json"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    off = {(row["what"], row["amount"]): round(row["off"], 6) for row in rows}
    gather, product = "all_gather, 8 ranks, intra_node", "matrix product, bfloat16"
    assert off == {
        (gather, 1 << 20): -0.5, (gather, 1 << 26): -0.5,
        (product, 10**11): 0.0, (product, 10**12): 0.0,
    }  # fmt: skip
    assert cli.main(["calibrate", "--show", str(tmp_path / "t.json")]) == 0
    text = capsys.readouterr().out
    assert "-50% !" in text
    assert "+0% " in text


def test_plot_is_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_table(tmp_path / "t.json")
    arguments = ["calibrate", "--show", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    assert cli.main(arguments) == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--show", "none.json"], "No such file"),
        (["--show", "none.json", "--device", "Z1"], "one of A100, H100"),
        (["--show", "none.json", "--plot", "missing/x.png"], "the folder of"),
        (["none.json"], "run it under torchrun"),
    ],
)
def test_trouble_is_told_in_a_line(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
