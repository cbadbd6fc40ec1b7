"""Captured-graph files that must be refused, without anything of them being executed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_patches.captured import FORMAT, CaptureFormatError, is_stub, load_captured

DATA = Path(__file__).resolve().parents[1] / "data"


def document_of(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path: Path, document: Any) -> Path:
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def small_document() -> dict[str, Any]:
    value = {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu"}
    nodes = [
        {"name": "x", "op": "placeholder", "target": "x", "val": value},
        {
            "name": "sin",
            "op": "call_function",
            "target": "op:aten.sin.default",
            "args": [{"node": "x"}],
            "val": value,
        },
        {"name": "output", "op": "output", "target": "output", "args": [{"node": "sin"}]},
    ]
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "info": {},
        "groups": {},
        "symbols": {},
        "module_stacks": [],
        "graphs": {"fw": {"nodes": nodes, "attributes": {}}},
    }


def with_node(tmp_path: Path, index: int = 1, **changes: Any) -> Path:
    """A small file with one node changed."""
    document = small_document()
    document["graphs"]["fw"]["nodes"][index].update(changes)
    return write(tmp_path / "small.json.gz", document)


def test_the_small_document_is_accepted(tmp_path: Path) -> None:
    module = load_captured(write(tmp_path / "x.json.gz", small_document())).graphs["fw"]
    assert torch.equal(module(torch.ones(2)), torch.ones(2).sin())


CODE = "__import__('pathlib').Path('executed').touch()"
HOSTILE_NODES: dict[str, dict[str, Any]] = {
    "python_function": {"target": "py:os:system", "args": ["touch executed"]},
    "dotted_path": {"target": "py:os.system"},
    "builtin": {"target": "py:builtins.eval"},
    "operator_not_listed": {"target": "py:operator.methodcaller"},
    "no_kind": {"target": "os.system"},
    "operator_name": {"target": f"op:aten.sin.{CODE}"},
    "higher_order_name": {"target": f"hop:{CODE}"},
    "target_not_text": {"target": ["op:aten.sin.default"]},
    "operator_as_operand": {"target": "py:operator.add", "args": [{"target": "op:a.b.default"}, 1]},
    "nested_target": {"args": [{"target": "py:os.system"}]},
    "placeholder_default": {"index": 0, "target": f"x={CODE}"},
    "placeholder_name": {"index": 0, "name": f"x={CODE}"},
    "node_name": {"name": f"a = {CODE}; b"},
    "keyword_name": {"kwargs": {f"a={CODE}, b": 1}},
    "attribute_path": {"op": "get_attr", "target": f'a", {CODE}, "b'},
    "call_method": {"op": "call_method", "target": "__reduce__"},
    "call_module": {"op": "call_module", "target": "x"},
    "missing_node": {"args": [{"node": "later"}]},
    "not_a_dtype": {"kwargs": {"dtype": {"dtype": "load"}}},
    "value_dtype": {"val": {"shape": [], "stride": [], "dtype": "load", "device": "cpu"}},
    "value_device": {"val": {"shape": [], "stride": [], "dtype": "bool", "device": "nowhere"}},
    "negative_size": {"val": {"shape": [-1], "stride": [1], "dtype": "bool", "device": "cpu"}},
    "huge_size": {"val": {"shape": [10**40], "stride": [1], "dtype": "bool", "device": "cpu"}},
    "unknown_symbol": {"val": {"sym": "s0"}},
    "expression_text": {"val": {"sym": CODE}},
    "expression_function": {"val": {"sym": ["lambdify", 1]}},
    "power_of_number": {"val": {"sym": ["Pow", 9, 9]}},
    "power_tower": {"val": {"sym": ["Pow", ["Add", ["Pow", 99, 64], 1], 64]}},
    "descriptor": {"meta": {"desc": {"descriptor": "dataclasses"}}},
    "descriptor_fields": {"meta": {"desc": {"descriptor": "PlainAOTInput", "evil": 1}}},
    "recompute": {"meta": {"recompute": "mro"}},
    "module_stack": {"meta": {"nn_module_stack": 7}},
    "not_an_object": {"args": [{}]},
}


@pytest.mark.parametrize("changes", HOSTILE_NODES.values(), ids=HOSTILE_NODES.keys())
def test_hostile_node_is_refused(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_node(tmp_path, **changes)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CaptureFormatError):
        load_captured(path)
    assert not (tmp_path / "executed").exists()


def test_hostile_attribute_name_is_refused(tmp_path: Path) -> None:
    document = small_document()
    document["graphs"]["fw"]["attributes"] = {
        "__class__": {"graph": small_document()["graphs"]["fw"]}
    }
    with pytest.raises(CaptureFormatError):
        load_captured(write(tmp_path / "x.json.gz", document))


@pytest.mark.parametrize("version", [0, 2, None, "1", [1]])
def test_other_format_is_refused(version: Any, tmp_path: Path) -> None:
    document = {**small_document(), "format": version}
    with pytest.raises(CaptureFormatError, match="format"):
        load_captured(write(tmp_path / "x.json.gz", document))


@pytest.mark.parametrize("document", [[], 1, "x", None])
def test_other_json_is_refused(document: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureFormatError, match="format"):
        load_captured(write(tmp_path / "x.json.gz", document))


@pytest.mark.parametrize(
    ("key", "content"),
    [
        (key, content)
        for key in ("info", "groups", "symbols", "module_stacks", "graphs")
        for content in (None, 7, "x", [[1]])
        if (key, content) != ("module_stacks", "x")  # a text is a list of texts
    ],
)
def test_wrong_section_is_refused(key: str, content: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureFormatError):
        load_captured(write(tmp_path / "x.json.gz", {**small_document(), key: content}))


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
def test_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    data = (DATA / "llama_1l_fsdp8_dynamic_seq_inductor.json.gz").read_bytes()
    (tmp_path / "x.json.gz").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CaptureFormatError):
        load_captured(tmp_path / "x.json.gz")


@pytest.mark.parametrize("data", [b"{}", b"\x1f\x8b garbage", b"PK\x03\x04"])
def test_other_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json.gz").write_bytes(data)
    with pytest.raises(CaptureFormatError):
        load_captured(tmp_path / "x.json.gz")


@pytest.mark.parametrize("depth", [200, 1_000_000])
@pytest.mark.parametrize("brackets", ["[]", ("{", "}")], ids=["array", "object"])
def test_deep_nesting_is_refused(depth: int, brackets: Any, tmp_path: Path) -> None:
    opening = "[" if brackets == "[]" else '{"a":'
    closing = "]" if brackets == "[]" else "}"
    text = '{"format":1,"info":' + opening * depth + "0" + closing * depth + "}"
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(CaptureFormatError, match="nested"):
        load_captured(tmp_path / "x.json.gz")


def test_decompression_bomb_is_refused(tmp_path: Path) -> None:
    """A 200 KB file of 200 MB: refused after reading the limit, not the whole."""
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(b" " * (200 * 2**20), compresslevel=1))
    with pytest.raises(CaptureFormatError, match="bytes"):
        load_captured(tmp_path / "x.json.gz")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1" * 5000])
def test_other_numbers_are_refused(number: str, tmp_path: Path) -> None:
    text = '{"format":1,"info":' + number + "}"
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(CaptureFormatError):
        load_captured(tmp_path / "x.json.gz")


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_captured(tmp_path / "none.json.gz")


def test_unknown_operator_becomes_a_stub(tmp_path: Path) -> None:
    path = with_node(tmp_path, target="op:some_library.fancy_op.default")
    captured = load_captured(path)
    (node,) = (n for n in captured.graphs["fw"].graph.nodes if n.op == "call_function")
    assert is_stub(node.target)
    with pytest.raises(NotImplementedError, match=r"some_library\.fancy_op\.default"):
        node.target()
    captured.save(tmp_path / "again.json.gz")
    again = document_of(tmp_path / "again.json.gz")
    assert again["graphs"]["fw"]["nodes"][1]["target"] == "op:some_library.fancy_op.default"
