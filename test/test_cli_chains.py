"""Chained collectives in ``torch-patches replay``: fused as a compile fuses them, from a file alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_patches
from torch_patches import _compat, cli
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.backend import aot_eager_comm_overlap
from torch_patches.captured import (
    CapturedGroup,
    CapturedMesh,
    OpaqueValue,
    load_captured,
    save_captured,
)
from torch_patches.testing.graph_builder import GraphBuilder

S0S0 = Path(__file__).parents[1] / "test" / "data" / "llama_2l_s0s0_4x2.json.gz"
GATHERS = ("--set", "fuse_chained_all_gathers=true")
NO_GROUP = RefusalReason.CHAIN_NO_GROUP
SCATTERS = ("--set", "fuse_chained_reduce_scatters=true")
CREATE = ("--set", "create_flattened_groups=true")


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert cli.main(["replay", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["graphs"]


def test_chains_of_a_capture_are_fused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", str(S0S0), "--graph", "fw", "--mode", "none", *GATHERS, "--check"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "│ all_gather 42 │ all_gather 21 │" in text
    assert "chains as one: 21, 21 launches fewer" in text
    assert "values: equal (496 outputs of 8 ranks, bit by bit)" in text


# -- beside a compile -----------------------------------------------------------------------------


class Weight(nn.Module):
    """One parameter, cut twice along its rows, by dimensions 0 and 2 of a 2 x 2 x 2 mesh."""

    def __init__(self) -> None:
        super().__init__()
        # torch takes an equal mesh of another test's world, whose groups are gone, for this one.
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "y", "z"))
        cut = (Shard(0), Replicate(), Shard(0))
        self.weight = nn.Parameter(distribute_tensor(torch.randn(16, 4), cube, cut))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.full_tensor()


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def capture_weight(folder: Path, **options: bool) -> Path:
    torch._dynamo.reset()
    with torch_patches.capture(folder) as session:
        compiled = torch.compile(
            Weight(), backend=aot_eager_comm_overlap, fullgraph=True, options=options or None
        )
        compiled(torch.randn(2, 16)).sum().backward()
    (path,) = session.paths
    return path


def fused_group(path: Path, name: str) -> tuple[int, ...]:
    captured = load_captured(path)
    (gather,) = collect(captured.graphs[name].graph).collectives
    return captured.groups[gather.group]


@pytest.mark.usefixtures("eight_ranks")
def test_groups_that_a_compile_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No group has just the ranks of a chain; the flag that makes it works on the file as well."""
    plain = capture_weight(tmp_path / "plain")
    compiled = capture_weight(
        tmp_path / "compiled", fuse_chained_all_gathers=True, create_flattened_groups=True
    )
    dist.destroy_process_group()
    found = replay(capsys, plain, *GATHERS, "--graph", "fw", "--mode", "none")
    assert [r["reason"] for r in found["fw"]["report"]["refusals"]] == [NO_GROUP.value]
    if _compat.torch_release() < (2, 12):  # its graphs have no device mesh as an input
        arguments = ["replay", str(plain), *GATHERS, *CREATE, "--graph", "fw", "--mode", "none"]
        assert cli.main(arguments) == 0
        assert "no device mesh in the file has the groups" in capsys.readouterr().err
        return
    saved = tmp_path / "replayed.json.gz"
    found = replay(
        capsys,
        plain,
        *GATHERS,
        *CREATE,
        "--graph",
        "fw",
        "--mode",
        "none",
        "--save",
        saved,
        "--check",
    )
    assert found["fw"]["after"]["launches"] == {"all_gather": 1}
    assert found["fw"]["check"]["verdict"] == "equal"
    # rank 3 is (0, 1, 1)
    assert fused_group(saved, "fw_after") == fused_group(compiled, "fw_after") == (2, 3, 6, 7)


# -- other files ----------------------------------------------------------------------------------


def chain_file(
    path: Path,
    mesh: CapturedMesh | None = None,
    backends: tuple[str, str, str] = ("gloo", "gloo", "gloo"),
) -> Path:
    """4 x 2 ranks seen from rank 5; gathered over 2 and then over 4, group "all" has them all."""
    b = GraphBuilder()
    shard = b.placeholder(2, 4)
    if mesh is not None:
        b.opaque_placeholder("mesh", OpaqueValue("DeviceMesh", mesh))
    gathered = b.gather_and_wait(b.gather_and_wait(shard, 2, "inner"), 4, "outer")
    ranks = {"all": tuple(range(8)), "outer": (1, 3, 5, 7), "inner": (4, 5)}
    groups = {
        name: CapturedGroup(ranks[name], "", backend)
        for name, backend in zip(ranks, backends, strict=True)
        if name != "all" or mesh is None
    }
    save_captured(path, {"fw": b.output(gathered)}, {"rank": 5}, groups)
    return path


def launches(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> int:
    found = replay(capsys, path, "--mode", "none", *GATHERS, *arguments)
    return int(found["fw"]["after"]["launches"]["all_gather"])


def test_chains_of_reduce_scatters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = GraphBuilder()
    wait = b.scatter_and_wait(b.placeholder(16, 4), "sum", 4, "outer")
    wait = b.scatter_and_wait(wait, "sum", 2, "inner")
    path = tmp_path / "scatters.json.gz"
    ranks = {"all": tuple(range(8)), "outer": (1, 3, 5, 7), "inner": (4, 5)}
    groups = {name: CapturedGroup(members) for name, members in ranks.items()}
    save_captured(path, {"bw": b.output(wait)}, {}, groups)
    found = replay(capsys, path, "--mode", "none", *SCATTERS, "--check")["bw"]
    assert found["after"]["launches"] == {"reduce_scatter": 1}
    assert found["check"]["verdict"] in ("equal", "close")


def test_groups_of_other_backends_are_no_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launches(capsys, chain_file(tmp_path / "same.json.gz")) == 1
    other = chain_file(tmp_path / "other.json.gz", backends=("nccl", "gloo", "gloo"))
    assert load_captured(other).group_backends["all"] == "nccl"
    assert launches(capsys, other) == 2


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (tuple(range(8)), 1),
        ((1, 0, 2, 3, 4, 5, 6, 7), 2),  # rank 0's inner line is in another order than rank 5's
    ],
)
def test_meshes_decide_as_in_a_compile(
    ranks: tuple[int, ...],
    expected: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = CapturedMesh("cpu", (4, 2), ranks, (), ("outer", "inner"))
    assert launches(capsys, chain_file(tmp_path / "a.json.gz", mesh), *CREATE) == expected
    assert "warning" not in capsys.readouterr().err


def test_a_mesh_that_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = chain_file(tmp_path / "other.json.gz", backends=("nccl", "gloo", "gloo"))
    assert cli.main(["replay", str(other), *GATHERS, *CREATE]) == 0
    assert "no device mesh in the file has the groups outer, inner" in capsys.readouterr().err


def test_a_printed_graph_with_its_groups_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is used by no graph yet, so its ranks have to be told."""
    path = tmp_path / "graph.txt"
    path.write_text("""
class <lambda>(torch.nn.Module):
    def forward(self, x: "f32[2, 4][4, 1]cuda:0"):
        a = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '3')
        b = torch.ops._c10d_functional.wait_tensor.default(a)
        c = torch.ops._c10d_functional.all_gather_into_tensor.default(b, 4, '1')
        d = torch.ops._c10d_functional.wait_tensor.default(c)
        return (d,)
""")
    groups = ("--group", "3=0,1", "--group", "1=0,2,4,6", "--group", "0=0-7")
    assert launches(capsys, path, *groups, "--check") == 1
    assert cli.main(["replay", str(path), *groups]) == 2  # without the flag it is a slip
    assert "no group '0' in the graphs; there are: 1, 3" in capsys.readouterr().err
