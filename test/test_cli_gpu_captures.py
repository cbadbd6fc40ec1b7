"""Captures of a job on GPUs, read on a machine without: every command plans them as they are there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from torch_patches import _compat, cli

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Captures of test/data whose tensors are on a GPU, by name."""
    folder, found = tmp_path_factory.mktemp("on_gpus"), {}
    for name in ("llama_2l_fsdp8_noreshard", "llama_2l_fsdp8_dynamic_batch"):
        text = gzip.decompress((DATA / f"{name}.json.gz").read_bytes()).decode()
        assert text.count('"device":"cpu"') > 1000
        found[name] = folder / f"{name}.json.gz"
        moved = text.replace('"device":"cpu"', '"device":"cuda:0"')
        found[name].write_bytes(gzip.compress(moved.encode()))
    return found


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert cli.main(["replay", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["graphs"]["fw"]


def test_planned_as_the_same_graph_with_as_on_gpu(
    on_gpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "llama_2l_fsdp8_dynamic_batch"
    flags = ("--graph", "fw", "--mode", "topo_span", "--set", "bucket_mode=default")
    there = replay(capsys, on_gpus[name], *flags)
    here = replay(capsys, DATA / f"{name}.json.gz", "--as-on-gpu", *flags)
    assert there["report"]["failure"] is None
    assert there["after"] == here["after"]
    assert [bucket["form"] for bucket in there["report"]["buckets"]] == ["default"]


@pytest.mark.skipif(_compat.torch_release() < (2, 13), reason="torch's passes are other ones there")
def test_beside_torch(on_gpus: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    name, flags = "llama_2l_fsdp8_noreshard", ("--graph", "fw", "--compare", "torch")
    there = replay(capsys, on_gpus[name], *flags)
    here = replay(capsys, DATA / f"{name}.json.gz", "--as-on-gpu", *flags)
    assert there["torch"] == here["torch"]
    assert there["torch"]["exposed_ms"] < there["before"]["exposed_ms"]
