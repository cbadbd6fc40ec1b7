"""The text of a graph, as torch prints it, as a capture; read with ``ast``, never run.

``print_readable`` writes it into logs (``aot_joint_graph``, ``inductor_post_grad_graph``, ...), with
sizes as annotations; repro files (``fx_graph_runnable``) hold it without, and the inputs in a function
``load_args``.  The text becomes the JSON of a capture file, and goes through the same checks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_patches.captured._expressions import (
    OPERATORS,
    Arguments,
    Symbols,
    cannot_read,
    contiguous,
    device_text,
    dotted,
    read_annotation,
    target_of,
)
from torch_patches.captured._targets import CaptureFormatError

MAX_TEXT = 64 * 2**20  # characters of one graph
_LAMBDA = re.compile(r"^(\s*)class <[^>\n]*>\(", re.MULTILINE)


@dataclass(frozen=True)
class GroupFact:
    """What a repro file says of a process group: its size, and the place of its rank."""

    size: int
    rank: int


@dataclass(frozen=True)
class ReadGraph:
    """A graph as JSON of a capture.

    Args:
        encoded: nodes and attributes.
        groups: by name, from a repro file; empty for other texts.
        without_values: nothing but the inputs has a size.
    """

    encoded: dict[str, Any]
    groups: dict[str, GroupFact] = field(default_factory=dict)
    without_values: bool = False


def parse_module(text: str, what: str = "the text") -> ast.Module:
    """The syntax tree of a printed graph or a repro file.

    Raises:
        CaptureFormatError: it is no Python, too long or nested too deeply.
    """
    if len(text) > MAX_TEXT:
        raise CaptureFormatError(f"{what}: more than {MAX_TEXT} characters")
    try:
        return ast.parse(_LAMBDA.sub(r"\1class Lambda(", text))
    except SyntaxError as error:
        raise CaptureFormatError(f"{what}: no Python in line {error.lineno}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CaptureFormatError(f"{what}: no Python ({type(error).__name__})") from error


def read_printed(text: str, symbols: Symbols, what: str = "the text") -> ReadGraph:
    """A graph of ``print_readable``.

    Raises:
        CaptureFormatError: it is none, or holds what graphs do not hold.
    """
    tree = parse_module(text, what)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if len(classes) != 1:
        raise CaptureFormatError(f"{what}: one class is expected, {len(classes)} are there")
    return ReadGraph(_read_class(classes[0], symbols))


def read_repro(text: str, symbols: Symbols, what: str = "the file") -> ReadGraph:
    """A graph of a repro file (``fx_graph_runnable``).

    Raises:
        CaptureFormatError: it is none, or holds what graphs do not hold.
    """
    tree = parse_module(text, what)
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and _method(n, "forward")]
    loaders = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "load_args"]
    if not found or len(loaders) != 1:
        raise CaptureFormatError(
            f"{what}: no class with forward, or no load_args: not a repro file"
        )
    repro = found[-1]
    encoded = _read_class(repro, symbols)
    _add_attributes(repro, encoded)
    inputs = [node for node in encoded["nodes"] if node["op"] == "placeholder"]
    values = _read_inputs(loaders[0], symbols)
    if len(values) != len(inputs):
        raise CaptureFormatError(f"{what}: {len(inputs)} inputs, {len(values)} in load_args")
    for node, value in zip(inputs, values, strict=True):
        node["val"] = value
    return ReadGraph(encoded, _read_groups(tree), without_values=True)


def is_repro(text: str) -> bool:
    """Whether this looks like a repro file."""
    return "def load_args(" in text and "def forward(" in text


# -- graphs ---------------------------------------------------------------------------------------


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == name:
            return item
    return None


def _read_class(node: ast.ClassDef, symbols: Symbols) -> dict[str, Any]:
    forward = _method(node, "forward")
    if forward is None:
        raise cannot_read(node, f"class {node.name} without forward")
    inner = {item.name: item for item in node.body if isinstance(item, ast.ClassDef)}
    reader = _GraphReader(symbols)
    for argument in forward.args.args[1:]:
        reader.placeholder(argument.arg, argument.annotation)
    for statement in forward.body:
        reader.statement(statement)
    attributes: dict[str, Any] = {}
    for name, value in reader.attributes.items():
        if name in inner:
            attributes[name] = {"graph": _read_class(inner[name], symbols)}
        else:
            attributes[name] = {"tensor": value or _SCALAR}
    return {"nodes": reader.nodes, "attributes": attributes}


_SCALAR = {"shape": [], "stride": [], "dtype": "float32", "device": "cpu"}


class _GraphReader:
    """Statements of ``forward`` as nodes."""

    def __init__(self, symbols: Symbols) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.attributes: dict[str, Any] = {}  # name -> tensor or None
        self._symbols = symbols
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._read = Arguments(self._names)
        self._declared: dict[str, ast.expr] = {}  # annotations without a value

    def placeholder(self, text: str, annotation: ast.expr | None) -> None:
        """Adds an input."""
        name = self._new_name(text)
        node: dict[str, Any] = {"name": name, "op": "placeholder", "target": name}
        self._annotate(node, annotation)
        self.nodes.append(node)

    def _flattened_inputs(self, names: Sequence[ast.expr]) -> None:
        """``a, b, = fx_pytree.tree_flatten_spec([primals, tangents], ...)``: the inputs of a joint graph,
        which stand in for the arguments."""
        self.nodes.clear()
        self._names.clear()
        self._taken.clear()
        for item in names:
            if not isinstance(item, ast.Name):
                raise cannot_read(item)
            self.placeholder(item.id, self._declared.get(item.id))

    def statement(self, statement: ast.stmt) -> None:
        """Adds the node of a statement; one that only forgets a name has none."""
        if isinstance(statement, ast.Return):
            value = self._returned(statement.value)
            node = {"name": self._new_name("output"), "op": "output", "target": "output"}
            self.nodes.append({**node, "args": [value]})
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value, statement.annotation)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self._declared[statement.target.id] = statement.annotation
        elif isinstance(statement, ast.Assign):
            forgets = isinstance(statement.value, ast.Constant) and statement.value.value is None
            if forgets or _is_text(statement.value):
                return
            if len(statement.targets) != 1:
                raise cannot_read(statement)
            target = statement.targets[0]
            if isinstance(target, ast.Tuple) and _calls(statement.value, _FLATTEN):
                self._flattened_inputs(target.elts)
                return
            self._assign(statement.targets[0], statement.value, None)
        elif not (isinstance(statement, ast.Expr) and _is_text(statement.value)):
            raise cannot_read(statement)

    def _returned(self, value: ast.expr | None) -> Any:
        if isinstance(value, ast.Call) and _calls(value, _UNFLATTEN) and value.args:
            value = value.args[0]
        return None if value is None else self._read.read(value)

    def _assign(self, target: ast.expr, value: ast.expr, annotation: ast.expr | None) -> None:
        if not isinstance(target, ast.Name):
            raise cannot_read(target)
        if isinstance(value, ast.Name) and value.id in self._names:  # x_1 = x: a placeholder's name
            self._names[target.id] = self._names[value.id]
            return
        node = self._operation(value)
        name = self._new_name(target.id)
        self._annotate(node, annotation)
        if node["op"] == "get_attr":
            self.attributes.setdefault(node["target"], node.get("val"))
        self.nodes.append({"name": name, **node})

    def _operation(self, value: ast.expr) -> dict[str, Any]:
        read = self._read.read
        if isinstance(value, ast.Call):
            return self._call(value)
        if isinstance(value, ast.Subscript):
            return _function("getitem", [read(value.value), read(value.slice)])
        if isinstance(value, ast.BinOp):
            return _function(OPERATORS[type(value.op)], [read(value.left), read(value.right)])
        if isinstance(value, ast.UnaryOp):
            return _function(OPERATORS[type(value.op)], [read(value.operand)])
        if isinstance(value, ast.Compare) and len(value.ops) == 1:
            name = OPERATORS.get(type(value.ops[0]))
            if name is not None:
                return _function(name, [read(value.left), read(value.comparators[0])])
        path = dotted(value) or ""
        if path.startswith("self."):
            return {"op": "get_attr", "target": path.removeprefix("self.").replace(".", "_")}
        raise cannot_read(value)

    def _call(self, value: ast.Call) -> dict[str, Any]:
        path = dotted(value.func) or ""
        target = target_of(path)
        if target is None:
            raise cannot_read(value, f"a call of {path or ast.unparse(value.func)}"[:160])
        node: dict[str, Any] = {"op": "call_function", "target": target}
        if value.args:
            node["args"] = [self._read.read(item) for item in value.args]
        if any(key.arg is None for key in value.keywords):
            raise cannot_read(value)
        if value.keywords:
            node["kwargs"] = {str(key.arg): self._read.read(key.value) for key in value.keywords}
        return node

    def _annotate(self, node: dict[str, Any], annotation: ast.expr | None) -> None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            value = read_annotation(annotation.value, self._symbols, annotation.lineno)
            if value is not None:
                node["val"] = value

    def _new_name(self, text: str) -> str:
        """The capture's name of what the text calls so from here on: texts may use a name again,
        graphs may not."""
        name, number = text, 1
        while name in self._taken:
            name, number = f"{text}_again{number}", number + 1
        self._taken.add(name)
        self._names[text] = name
        return name


#: What torch prints around the inputs and outputs of graphs that take trees of tensors.
_FLATTEN, _UNFLATTEN = "fx_pytree.tree_flatten_spec", "pytree.tree_unflatten"


def _calls(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == name


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _function(name: str, arguments: list[Any]) -> dict[str, Any]:
    return {"op": "call_function", "target": f"py:operator.{name}", "args": arguments}


# -- repro files ----------------------------------------------------------------------------------


def _read_inputs(loader: ast.FunctionDef, symbols: Symbols) -> list[Any]:
    """Values of the inputs, in order, from the calls of ``load_args``."""
    devices: dict[str, str] = {}
    values: list[Any] = []
    for statement in loader.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if not isinstance(value, ast.Call):
            continue
        kind = (dotted(value.func) or "").removeprefix("reader.")
        given = {str(key.arg): key.value for key in value.keywords}
        if kind == "storage" and isinstance(statement, ast.Assign):
            device = given.get("device")
            place = device_text(device) if isinstance(device, ast.Call) else "cpu"
            devices[ast.unparse(statement.targets[0])] = place
        elif kind == "tensor":
            values.append(_input_tensor(value, given, devices, symbols))
        elif kind == "symint":
            values.append(_input_size(value, given, symbols))
        elif kind in ("const", "unsupported", "generator", "opaque"):
            values.append({"opaque": kind})
        else:
            raise cannot_read(value)
    return values


def _input_tensor(
    call: ast.Call, given: Mapping[str, ast.expr], devices: Mapping[str, str], symbols: Symbols
) -> dict[str, Any]:
    if len(call.args) not in (2, 3):
        raise cannot_read(call)
    shape = _sizes(call.args[1], symbols)
    stride = _sizes(call.args[2], symbols) if len(call.args) == 3 else contiguous(shape)
    dtype = dotted(given["dtype"]) if "dtype" in given else "torch.float32"
    value: dict[str, Any] = {
        "shape": shape,
        "stride": stride,
        "dtype": str(dtype).removeprefix("torch."),
        "device": devices.get(ast.unparse(call.args[0]), "cpu"),
    }
    offset = given.get("storage_offset")
    if isinstance(offset, ast.Constant) and isinstance(offset.value, int) and offset.value:
        return {**value, "offset": offset.value}
    return value


def _sizes(node: ast.expr, symbols: Symbols) -> list[Any]:
    text = ast.unparse(node)
    annotation = read_annotation(f"f32[{text[1:-1].rstrip(',')}]", symbols, node.lineno)
    if not isinstance(node, ast.Tuple) or annotation is None:
        raise cannot_read(node)
    shape = annotation["shape"]
    assert isinstance(shape, list)
    return shape


def _input_size(call: ast.Call, given: Mapping[str, ast.expr], symbols: Symbols) -> Any:
    expression = given.get("expr")
    if isinstance(expression, ast.Constant):
        hint = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        text = str(expression.value)
        if text.isidentifier() and isinstance(hint, int):
            symbols.hints = {**symbols.hints, text: symbols.hints.get(text, hint)}
        return read_annotation(f"Sym({text})", symbols, call.lineno)
    if len(call.args) == 1 and isinstance(call.args[0], ast.Constant):
        return call.args[0].value
    raise cannot_read(call)


def _add_attributes(repro: ast.ClassDef, encoded: dict[str, Any]) -> None:
    """Sizes of constants, where ``__init__`` tells: ``torch.randn([4], dtype=torch.float32)``."""
    made = _method(repro, "__init__")
    for statement in () if made is None else made.body:
        text = ast.unparse(statement)
        name = re.search(r"register_buffer\('(\w+)'|self\.(\w+) =", text)
        size = re.search(r"torch\.\w+\(\[?([\d, ]*)\]?, dtype=torch\.(\w+)", text)
        if name is None or size is None or (name[1] or name[2]) not in encoded["attributes"]:
            continue
        shape = [int(part) for part in size[1].split(",") if part.strip()]
        tensor = {**_SCALAR, "shape": shape, "stride": contiguous(shape), "dtype": size[2]}
        encoded["attributes"][name[1] or name[2]] = {"tensor": tensor}


def _read_groups(tree: ast.Module) -> dict[str, GroupFact]:
    """The argument of ``setup_fake_process_groups``."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        if (dotted(node.func) or "").rsplit(".", 1)[-1] != "setup_fake_process_groups":
            continue
        try:
            content = ast.literal_eval(node.args[0])
            return {
                str(name): GroupFact(int(fact["size"]), int(fact["rank"]))
                for name, fact in content.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise cannot_read(node) from error
    return {}
