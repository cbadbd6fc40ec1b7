"""Folders as tlparse lays them out: one for each compile, of several ranks one for each rank around."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_patches import cli
from torch_patches.captured import CaptureFormatError
from torch_patches.captured._trace import Trace, read_trace
from torch_patches.captured.files import load_any

FORWARD = """
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[{rows}, 8][8, 1]cuda:0"):
        start: "f32[{whole}, 8][8, 1]cuda:0" = torch.ops._c10d_functional.all_gather_into_tensor.default(
            primals_1, 4, '0')
        wait: "f32[{whole}, 8][8, 1]cuda:0" = torch.ops._c10d_functional.wait_tensor.default(start)
        return (wait,)
"""
BACKWARD = FORWARD.replace("primals_1", "tangents_1")
KIND = "before_post_grad_graph"
LOG = 'V0101 00:00:00.000000 1 torch/x.py:1] {{"artifact": {{"name": "{kind}"}}, {ids}}}\n'


def text(rows: int = 2, graph: str = FORWARD) -> str:
    return graph.format(rows=rows, whole=4 * rows)


def graph_file(folder: Path, rows: int = 2, number: int = 3) -> Path:
    """One graph, the size of whose input tells which it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{KIND}_{number}.txt"
    path.write_text(text(rows))
    return path


def entry(ids: str, rows: int = 2) -> str:
    lines = text(rows).splitlines(keepends=True)
    return LOG.format(kind=KIND, ids=ids) + "".join("\t" + line for line in lines)


def rows_of(trace: Trace) -> list[int]:
    return [
        n for e in trace.entries for n in range(1, 99) if f'primals_1: "f32[{n}, 8]' in e.payload
    ]


def test_folders_of_ranks_need_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, rows in ((0, 2), (1, 3), (10, 5)):
        graph_file(tmp_path / f"rank_{rank}" / "-_0_0_0", rows)
    assert cli.main(["replay", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "folders of 3 ranks (rank_0, rank_1, rank_10); take one, or --rank" in said
    assert rows_of(read_trace(tmp_path, 1)) == [3]
    assert rows_of(read_trace(tmp_path, 10)) == [5]
    assert rows_of(read_trace(tmp_path / "rank_0")) == [2]
    with pytest.raises(CaptureFormatError, match="no folder of rank 3 among 3"):
        read_trace(tmp_path, 3)


def test_one_folder_of_a_rank_is_taken(tmp_path: Path) -> None:
    graph_file(tmp_path / "rank_0" / "-_0_0_0", 4)
    assert rows_of(read_trace(tmp_path)) == [4]


def test_the_rank_of_one_folder_is_not_told(tmp_path: Path) -> None:
    graph_file(tmp_path / "-_0_0_0")
    with pytest.raises(CaptureFormatError, match="tell no rank; leave out --rank"):
        read_trace(tmp_path, 1)


def test_compiles_are_called_as_torch_prints_them(tmp_path: Path) -> None:
    folders = {"-_0_0_0": "0/0", "-_1_2_1": "1/2", "4_0_2_0": "!4/0/2", "4_-_-_-": "!4"}
    for folder in folders:
        graph_file(tmp_path / "made" / folder)
    assert sorted(read_trace(tmp_path / "made").compile_ids) == sorted(folders.values())

    log = tmp_path / "a.log"
    log.write_text(
        entry('"frame_id": 1, "frame_compile_id": 2, "attempt": 1')
        + entry('"compiled_autograd_id": 4, "frame_id": 0, "frame_compile_id": 2')
        + entry('"compiled_autograd_id": 4')
    )
    assert read_trace(log).compile_ids == ["1/2", "!4/0/2", "!4"]


def test_copies_of_the_log(tmp_path: Path) -> None:
    """tlparse puts the log beside its folders; in the short one the graphs are missing."""
    graph_file(tmp_path / "-_0_0_0", 2)
    bare = LOG.format(kind=KIND, ids='"frame_id": 0, "frame_compile_id": 0')
    (tmp_path / "shortraw.log").write_text(bare)
    assert rows_of(read_trace(tmp_path)) == [2]
    (tmp_path / "raw.log").write_text(bare)
    assert rows_of(read_trace(tmp_path)) == [2]
    (tmp_path / "raw.log").write_text(entry('"frame_id": 0, "frame_compile_id": 0', 7))
    assert rows_of(read_trace(tmp_path)) == [7]  # tells more, such as hints of symbols


def test_files_of_one_compile_stay_in_the_order_of_the_log(tmp_path: Path) -> None:
    for number, rows in ((9, 2), (10, 3), (100, 4)):
        graph_file(tmp_path / "-_0_0_0", rows, number)
    assert rows_of(read_trace(tmp_path)) == [2, 3, 4]
    assert rows_of(read_trace(tmp_path / "-_0_0_0")) == [2, 3, 4]


def test_links_are_not_followed(tmp_path: Path) -> None:
    real = graph_file(tmp_path / "elsewhere")
    folder = tmp_path / "made" / "-_0_0_0"
    folder.mkdir(parents=True)
    (folder / f"{KIND}_1.txt").symlink_to(real)
    (folder / f"{KIND}_2.txt").mkdir()  # no file either
    (tmp_path / "made" / "-_1_0_0").symlink_to(real.parent)
    (tmp_path / "made" / "rank_0").symlink_to(real.parent)
    with pytest.raises(CaptureFormatError, match="without graphs of tlparse"):
        read_trace(tmp_path / "made")


@pytest.mark.parametrize(("graph", "name"), [(FORWARD, "fw"), (BACKWARD, "bw")])
def test_one_printed_graph_is_named_by_its_phase(graph: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(text(graph=graph))
    assert list(load_any(path).captured.graphs) == [name]
