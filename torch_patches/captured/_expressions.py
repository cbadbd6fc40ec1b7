"""Python expressions in the text of a graph as the JSON of ``_values``; read with ``ast``, never run.

torch.ops.aten.full.default([2, arg1_1], -inf, dtype = torch.float32, device = device(type='cpu'))
"bf16[s0, 64][64, 1]cuda:0"     annotations of print_readable
"Sym((s0//8))"
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._dtype_abbrs import dtype_abbrs

from torch_patches.captured._targets import PYTHON_CALLABLES, CaptureFormatError

#: Names of operators of :mod:`operator`, by what prints as an infix.
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv",
    ast.Mod: "mod", ast.Pow: "pow", ast.LShift: "lshift", ast.RShift: "rshift",
    ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor", ast.USub: "neg", ast.UAdd: "pos",
    ast.Invert: "invert", ast.Not: "not_", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt",
    ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip

_DTYPES = {short: str(dtype).removeprefix("torch.") for dtype, short in dtype_abbrs.items()}
_CONSTANT_KINDS = ("dtype", "layout", "memory_format")
_TENSOR = re.compile(
    r"(?:\w+\()?(?P<dtype>[a-z]\w*)\[(?P<shape>[^\[\]]*)\]"
    r"(?:\[(?P<stride>[^\[\]]*)\])?(?P<device>[a-z]+(?::\d+)?)?.*",
    re.ASCII | re.DOTALL,
)
_SYMBOL = re.compile(r"(s|u)\w*", re.ASCII)
#: As sympy and torch print functions in sizes, and what ``_symbols`` calls them.
_FUNCTIONS = {"Max": "Max", "Min": "Min", "Mod": "Mod", "PythonMod": "PythonMod",
              "FloorDiv": "FloorDiv", "CeilDiv": "CeilToInt", "CleanDiv": "CleanDiv",
              "IntTrueDiv": "IntTrueDiv", "TruncToInt": "TruncToInt"}  # fmt: skip
_RELATIONS = {
    ast.Eq: "Equality", ast.NotEq: "Unequality", ast.Lt: "StrictLessThan", ast.LtE: "LessThan",
    ast.Gt: "StrictGreaterThan", ast.GtE: "GreaterThan",
}  # fmt: skip


def cannot_read(node: ast.AST, what: str = "") -> CaptureFormatError:
    """An error that names the line and what stands there."""
    text = " ".join(ast.unparse(node).split())
    line = getattr(node, "lineno", 0)
    return CaptureFormatError(f"line {line}: cannot read {what or text[:120]!r}")


@dataclass
class Symbols:
    """Symbols of sizes: their names in the text, and names that a capture allows.

    Args:
        hints: by the names in the text.
    """

    hints: Mapping[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)

    #: Size of a symbol that nobody tells.
    DEFAULT = 1024

    def name(self, text: str) -> str:
        """The capture's name for one."""
        return self.names.setdefault(text, f"s{len(self.names)}")

    def section(self) -> dict[str, int]:
        """The file's section."""
        self.guessed |= set(self.names) - set(self.hints)
        return {name: self.hints.get(text, self.DEFAULT) for text, name in self.names.items()}


# -- arguments ------------------------------------------------------------------------------------


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as text; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def target_of(path: str) -> str | None:
    """What ``_targets`` calls a callable: of ``torch.ops.aten.mm.default`` op:aten.mm.default."""
    if path.startswith("torch.ops.higher_order."):
        return f"hop:{path.removeprefix('torch.ops.higher_order.')}"
    if path.startswith("torch.ops."):
        rest = path.removeprefix("torch.ops.")
        return f"op:{rest}" if rest.count(".") == 2 else None
    name = path.removeprefix("_") if path.startswith("_operator.") else path
    return f"py:{name}" if name in PYTHON_CALLABLES else None


class Arguments:
    """Reads arguments of nodes, given the names of the nodes before."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self._nodes = nodes  # name in the text -> name in the capture

    def read(self, node: ast.AST) -> Any:
        """An argument as JSON.

        Raises:
            CaptureFormatError: it is nothing that a graph holds.
        """
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Constant):
            return _constant(node)
        if isinstance(node, ast.List):
            return [self.read(item) for item in node.elts]
        if isinstance(node, ast.Tuple):
            return {"tuple": [self.read(item) for item in node.elts]}
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return {"dict": {str(k): self.read(v) for k, v in zip(keys, node.values, strict=True)}}
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return _number(node)
        if isinstance(node, ast.Attribute):
            return _torch_name(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            return {"slice": [None if part is None else self.read(part) for part in parts]}
        raise cannot_read(node)

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._nodes:
            return {"node": self._nodes[node.id]}
        if node.id in ("inf", "nan"):
            return {"float": node.id}
        raise cannot_read(node)

    def _call(self, node: ast.Call) -> Any:
        name = dotted(node.func) or ""
        if name == "slice" and not node.keywords:
            parts = [self.read(item) for item in node.args]
            return {"slice": parts if len(parts) == 3 else _full_slice(node, parts)}
        if name in ("device", "torch.device"):
            return {"device": device_text(node)}
        if name == "float" and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            value = str(node.args[0].value)
            if value.lstrip("+-") in ("inf", "nan"):
                return {"float": value}
        # Groups, meshes, generators: what prints as a call is no number and no tensor.
        return {"opaque": (name.rsplit(".", 1)[-1] or "object")[:64]}


def _full_slice(node: ast.Call, parts: list[Any]) -> list[Any]:
    if len(parts) == 1:
        return [None, parts[0], None]
    if len(parts) == 2:
        return [*parts, None]
    raise cannot_read(node)


def device_text(node: ast.Call) -> str:
    """``device(type='cuda', index=0)`` as "cuda:0"."""
    given = {key.arg: key.value for key in node.keywords}
    values = [*node.args, *(given[name] for name in ("type", "index") if name in given)]
    texts = [str(v.value) for v in values if isinstance(v, ast.Constant) and v.value is not None]
    if not texts or len(texts) > 2 or len(texts) != len(values):
        raise cannot_read(node)
    return ":".join(texts)


def _constant(node: ast.Constant) -> Any:
    value = node.value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise cannot_read(node)


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub}


def _number(node: ast.UnaryOp | ast.BinOp) -> Any:
    """A negative or a complex number: all else in front of which an operator stands is a node."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if isinstance(node.operand, ast.Name) and node.operand.id in ("inf", "nan"):
            return {"float": f"-{node.operand.id}"}
        if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int | float):
            return -node.operand.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = node.left, node.right
        negative = isinstance(left, ast.UnaryOp) and isinstance(left.op, ast.USub)
        inner = left.operand if isinstance(left, ast.UnaryOp) and negative else left
        if isinstance(inner, ast.Constant) and isinstance(right, ast.Constant):
            real, imaginary = inner.value, right.value
            if isinstance(real, int | float) and isinstance(imaginary, complex):
                value = _ARITHMETIC[type(node.op)](-real if negative else real, imaginary)
                return {"complex": [value.real, value.imag]}
    raise cannot_read(node)


def _torch_name(node: ast.Attribute) -> Any:
    path = dotted(node) or ""
    if path.startswith("torch.ops."):
        target = target_of(path)
        if target is not None:
            return {"target": target}
    name = path.removeprefix("torch.")
    for kind in _CONSTANT_KINDS:
        if name.isidentifier() and isinstance(vars(torch).get(name), getattr(torch, kind)):
            return {kind: name}
    return {"opaque": (path.rsplit(".", 1)[-1] or "object")[:64]}


# -- annotations ----------------------------------------------------------------------------------


def read_annotation(text: str, symbols: Symbols, line: int) -> Any:
    """The value that print_readable annotates, as JSON; None where it is none that is known.

    Raises:
        CaptureFormatError: it looks like a tensor or a symbol and cannot be read.
    """
    if text.startswith("Sym(") and text.endswith(")"):
        return _symbolic(_expression_of(text[4:-1], line), symbols)
    match = _TENSOR.fullmatch(text)
    if match is None or match["dtype"] not in _DTYPES:
        return None
    shape = read_sizes(match["shape"], symbols, line)
    stride = match["stride"]
    return {
        "shape": shape,
        "stride": contiguous(shape) if stride is None else read_sizes(stride, symbols, line),
        "dtype": _DTYPES[match["dtype"]],
        "device": match["device"] or "cuda:0",
    }


def read_sizes(text: str, symbols: Symbols, line: int) -> list[Any]:
    """``s0, 64`` as JSON."""
    listed = _expression_of(f"[{text}]", line)
    assert isinstance(listed, ast.List)
    return [_symbolic(item, symbols) for item in listed.elts]


def contiguous(shape: list[Any]) -> list[Any]:
    """Strides of a contiguous tensor."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        inner = strides[0]
        if isinstance(size, int) and isinstance(inner, int):
            strides.insert(0, max(size, 1) * inner)
        else:
            strides.insert(0, {"sym": ["Mul", _tree_of(size), _tree_of(inner)]})
    return strides[: len(shape)]


def _tree_of(size: Any) -> Any:
    return size["sym"] if isinstance(size, dict) else size


def _expression_of(text: str, line: int) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CaptureFormatError(f"line {line}: cannot read the size {text[:120]!r}") from error


def _symbolic(node: ast.expr, symbols: Symbols) -> Any:
    tree = symbolic_tree(node, symbols)
    if isinstance(tree, bool | int):
        return tree
    if isinstance(tree, list) and tree[0] in ("Equality", "Unequality", *_RELATIONS.values()):
        return {"sym": tree, "kind": "bool"}
    if isinstance(tree, list) and tree[0] == "Float":
        return {"sym": tree, "kind": "float"}
    return {"sym": tree}


def symbolic_tree(node: ast.expr, symbols: Symbols) -> Any:
    """The expression tree of ``_symbols``.

    Raises:
        CaptureFormatError: it holds something else than sizes are made of.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        return node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        return ["Float", node.value]
    if isinstance(node, ast.Name) and _SYMBOL.fullmatch(node.id):
        return symbols.name(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = symbolic_tree(node.operand, symbols)
        return -inner if isinstance(inner, int) else ["Mul", -1, inner]
    if isinstance(node, ast.BinOp):
        left, right = symbolic_tree(node.left, symbols), symbolic_tree(node.right, symbols)
        return _binary(node, left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _RELATIONS:
        sides = [symbolic_tree(part, symbols) for part in (node.left, *node.comparators)]
        return [_RELATIONS[type(node.ops[0])], *sides]
    if isinstance(node, ast.Call) and not node.keywords:
        name = dotted(node.func) or ""
        if name in _FUNCTIONS:
            return [_FUNCTIONS[name], *(symbolic_tree(item, symbols) for item in node.args)]
    raise cannot_read(node)


def _binary(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, ast.Add):
        return ["Add", left, right]
    if isinstance(node.op, ast.Sub):
        return ["Add", left, -right if isinstance(right, int) else ["Mul", -1, right]]
    if isinstance(node.op, ast.Mult):
        return ["Mul", left, right]
    if isinstance(node.op, ast.FloorDiv):
        return ["FloorDiv", left, right]
    if isinstance(node.op, ast.Mod):
        return ["Mod", left, right]
    if isinstance(node.op, ast.Pow):
        return ["Pow", left, right]
    if isinstance(node.op, ast.Div):
        return ["IntTrueDiv", left, right]
    raise cannot_read(node)
