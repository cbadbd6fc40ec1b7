"""Classes in the module stacks of captured graphs: names survive, old files stay as they are, and
hostile names are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_patches.captured import FORMAT, CaptureFormatError, load_captured, save_captured
from torch_patches.captured._modules import MAX_CLASS_NAME, MAX_CLASSES

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = sorted(DATA.glob("*.json.gz"))


@pytest.fixture(scope="module", autouse=True)
def stored_captures() -> None:
    """Each load decodes."""


class Block(torch.nn.Module):
    class Inner(torch.nn.Module):
        pass


def graph_with(*stacks: dict[str, Any]) -> fx.GraphModule:
    """x -> sin -> sin ..., one for each module stack."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for stack in stacks:
        node = graph.call_function(torch.ops.aten.sin.default, (node,))
        node.meta["nn_module_stack"] = stack
    graph.output(node)
    return fx.GraphModule({}, graph)


def saved(tmp_path: Path, *stacks: dict[str, Any]) -> Path:
    save_captured(tmp_path / "x.json.gz", {"fw": graph_with(*stacks)}, {})
    return tmp_path / "x.json.gz"


def document_of(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def stacks_of(path: Path) -> list[list[tuple[str, type]]]:
    nodes = load_captured(path).graphs["fw"].graph.nodes
    return [list(n.meta["nn_module_stack"].values()) for n in nodes if n.op == "call_function"]


def names_of(path: Path) -> list[list[tuple[str, str, str]]]:
    """(path, module of the class, its qualified name) for each node."""
    return [[(p, c.__module__, c.__qualname__) for p, c in stack] for stack in stacks_of(path)]


# ------------------------------------------------------------------------------------- round trips


def test_qualified_names_survive(tmp_path: Path) -> None:
    class Local(torch.nn.Module):
        pass

    stack = {"a": ("layers.0", Block), "b": ("layers.0.in", Block.Inner), "c": ("l", Local)}
    path = saved(tmp_path, stack)
    local = "test_qualified_names_survive.<locals>.Local"
    assert names_of(path) == [
        [
            ("layers.0", __name__, "Block"),
            ("layers.0.in", __name__, "Block.Inner"),
            ("l", __name__, local),
        ]
    ]
    classes = [found for _, found in stacks_of(path)[0]]
    assert [found.__name__ for found in classes] == ["Block", "Inner", "Local"]
    # Stand-ins: nothing was imported, although the module of Block is at hand.
    assert Block not in classes
    assert all(issubclass(found, torch.nn.Module) for found in classes)


def test_one_class_is_one_object_in_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"": ("layers.0", Block)}, {"": ("layers.1", Block)})
    (first,), (second,) = stacks_of(path)
    assert first[1] is second[1]
    assert document_of(path)["module_classes"]["names"] == [f"{__name__}:Block"]


def test_equal_paths_of_other_classes_are_other_stacks(tmp_path: Path) -> None:
    path = saved(tmp_path, {"": ("a", Block)}, {"": ("a", Block.Inner)}, {"": ("a", Block)})
    assert [stack[0][2] for stack in names_of(path)] == ["Block", "Block.Inner", "Block"]
    assert document_of(path)["module_stacks"] == [["a"], ["a"]]


def test_saving_again_gives_an_equal_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"": ("a", Block)}, {"": ("b", torch.nn.Module), "b": ("b.c", Block)})
    load_captured(path).save(tmp_path / "again.json.gz")
    assert path.read_bytes() == (tmp_path / "again.json.gz").read_bytes()


def test_plain_modules_leave_no_trace(tmp_path: Path) -> None:
    """Files from before classes were recorded: loaded with this class, written without it."""
    path = saved(tmp_path, {"": ("a", torch.nn.Module)})
    assert "module_classes" not in document_of(path)
    assert stacks_of(path) == [[("a", torch.nn.Module)]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_stored_files_are_written_as_they_are(path: Path, tmp_path: Path) -> None:
    load_captured(path).save(tmp_path / "again.json.gz")
    assert document_of(path) == document_of(tmp_path / "again.json.gz")


def test_names_in_place_of_classes(tmp_path: Path) -> None:
    """torch.export has ``module.Class`` as text; a class then stands for it."""
    path = saved(tmp_path, {"": ("a", "torch.nn.modules.linear.Linear")})
    assert names_of(path) == [[("a", "torch.nn.modules.linear", "Linear")]]


@pytest.mark.parametrize(
    "found",
    [
        7,
        None,
        "Linear",
        "a.b c",
        type("Ünicode", (), {}),
        type("x" * (MAX_CLASS_NAME + 1), (), {}),
        type("lambda", (), {}),
    ],
    ids=["number", "none", "no_module", "blank", "not_ascii", "long", "keyword"],
)
def test_what_could_not_be_loaded_is_not_written(found: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, {"": ("a", found), "b": ("a.b", Block)})
    assert names_of(path) == [
        [("a", "torch.nn.modules.module", "Module"), ("a.b", __name__, "Block")]
    ]


def test_path_without_class(tmp_path: Path) -> None:
    assert stacks_of(saved(tmp_path, {"": ("a",)})) == [[("a", torch.nn.Module)]]


def classes_made(count: int) -> dict[str, Any]:
    return {str(i): (f"m.{i}", f"made.C{i}") for i in range(count)}


def test_number_of_classes_is_bounded(tmp_path: Path) -> None:
    assert len(stacks_of(saved(tmp_path, classes_made(MAX_CLASSES)))[0]) == MAX_CLASSES
    with pytest.raises(CaptureFormatError, match=str(MAX_CLASSES)):
        saved(tmp_path, classes_made(MAX_CLASSES + 1))


# ---------------------------------------------------------------------------------- hostile files


def document_with(stacks: Any, classes: Any) -> dict[str, Any]:
    x = {"name": "x", "op": "placeholder", "target": "x", "meta": {"nn_module_stack": 0}}
    output = {"name": "output", "op": "output", "target": "output", "args": [{"node": "x"}]}
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "info": {},
        "groups": {},
        "symbols": {},
        "module_stacks": stacks,
        "module_classes": classes,
        "graphs": {"fw": {"nodes": [x, output], "attributes": {}}},
    }


def load_document(tmp_path: Path, document: Any) -> fx.GraphModule:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return load_captured(path).graphs["fw"]


def sections(names: Any = ("m:A",), of_stacks: Any = ((0,),)) -> dict[str, Any]:
    return {"names": names, "of_stacks": of_stacks}


def test_the_small_document_is_accepted(tmp_path: Path) -> None:
    module = load_document(tmp_path, document_with([["a"]], sections()))
    ((_, found),) = next(iter(module.graph.nodes)).meta["nn_module_stack"].values()
    assert (found.__module__, found.__qualname__, found.__name__) == ("m", "A", "A")


HOSTILE_NAMES: dict[str, Any] = {
    "no_module": "A",
    "empty": "",
    "empty_module": ":A",
    "empty_class": "m:",
    "empty_part": "m..n:A",
    "call": "m:A()",
    "blank": "m:A B",
    "line": "m:A\n",
    "null": "m:A\x00",
    "keyword": "m:class",
    "locals_last": "m:f.<locals>",
    "locals_in_module": "m.<locals>:A",
    "two_colons": "m:A:B",
    "not_ascii": "m:\u00c4",
    "long": "m:" + "A" * MAX_CLASS_NAME,
    "number": 7,
    "list": ["m:A"],
    "none": None,
}


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES.keys())
def test_hostile_class_name_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureFormatError, match="not the name of a class"):
        load_document(tmp_path, document_with([["a"]], sections([name])))


HOSTILE_SECTIONS: dict[str, Any] = {
    "text": "m:A",
    "list": [["m:A"], [[0]]],
    "number": 7,
    "false": False,
    "no_names": {"of_stacks": [[0]]},
    "no_places": {"names": ["m:A"]},
    "names_are_text": sections("m:A"),
    "names_are_an_object": sections({"m:A": 0}),
    "places_are_text": sections(of_stacks="0"),
    "row_is_a_number": sections(of_stacks=[0]),
    "row_is_text": sections(of_stacks=["0"]),
    "row_missing": sections(of_stacks=[]),
    "row_too_many": sections(of_stacks=[[0], [0]]),
    "row_too_short": sections(of_stacks=[[]]),
    "row_too_long": sections(of_stacks=[[0, 0]]),
    "place_too_large": sections(of_stacks=[[1]]),
    "place_negative": sections(of_stacks=[[-1]]),
    "place_true": sections(["m:A", "m:B"], [[True]]),
    "place_text": sections(of_stacks=[["0"]]),
    "place_fraction": sections(of_stacks=[[0.0]]),
    "place_huge": sections(of_stacks=[[10**40]]),
}


@pytest.mark.parametrize("classes", HOSTILE_SECTIONS.values(), ids=HOSTILE_SECTIONS.keys())
def test_hostile_section_is_refused(classes: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureFormatError):
        load_document(tmp_path, document_with([["a"]], classes))


def test_too_many_classes_are_refused_before_any_is_made(tmp_path: Path) -> None:
    names = [f"refused:C{i}" for i in range(MAX_CLASSES + 1)]
    with pytest.raises(CaptureFormatError, match=str(MAX_CLASSES)):
        load_document(tmp_path, document_with([["a"]], sections(names)))
    made = [found for found in torch.nn.Module.__subclasses__() if found.__module__ == "refused"]
    assert made == []
