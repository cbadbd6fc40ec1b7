"""Logs and folders of logs from somewhere: however large they are, little of them is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_patches.captured import _trace
from torch_patches.captured._targets import CaptureFormatError
from torch_patches.captured._trace import read_trace

HEAD = 'V1129 00:34:34.631000 13926 torch/_x.py:1797] {"aot_forward_graph": {}, "frame_id": 0}\n'


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds, a millionth of what they are."""
    monkeypatch.setattr(_trace, "MAX_LINE", 200)
    monkeypatch.setattr(_trace, "MAX_PAYLOADS", 500)


def test_a_line_without_end_is_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text("x" * 1000 + "\n" + HEAD + "\tgraph\n" + "y" * 1000, encoding="utf-8")
    (entry,) = read_trace(log).entries
    assert entry.payload == "graph\n"


def test_too_much_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text((HEAD + "\t" + "z" * 100 + "\n") * 6, encoding="utf-8")
    with pytest.raises(CaptureFormatError, match="more than 500 characters"):
        read_trace(log)


def test_what_is_not_kept_may_be_large(tmp_path: Path) -> None:
    """Logs of a long job are mostly other entries."""
    log = tmp_path / "rank_0.log"
    other = HEAD.replace("aot_forward_graph", "guards")
    log.write_text((other + "\t" + "z" * 100 + "\n") * 20 + HEAD + "\tgraph\n", encoding="utf-8")
    assert len(read_trace(log).entries) == 1


def test_a_large_file_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "aot_forward_graph_1.txt"
    file.write_text("z" * 100, encoding="utf-8")
    assert len(read_trace(tmp_path).entries) == 1
    file.write_text("z" * 300, encoding="utf-8")
    with pytest.raises(CaptureFormatError, match="more than 200 bytes"):
        read_trace(tmp_path)


def test_a_link_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("class not_yours: ...", encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "aot_forward_graph_1.txt").symlink_to(secret)
    with pytest.raises(CaptureFormatError, match="without graphs"):
        read_trace(folder)
