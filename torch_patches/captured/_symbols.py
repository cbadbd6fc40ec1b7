"""Symbolic sizes of a capture as JSON and back.

An expression is a tree, ``{"sym": ["Mul", "s0", 8]}``, rebuilt from a list of functions and never
evaluated as text.  Symbols are renamed s0, s1, ... (with a hint) and u0, u1, ... (unbacked, no hint)
in order of appearance: torch takes the original names from where a size came from, which is not
recorded, and renaming makes equal graphs give equal files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as torch_sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_patches.captured._targets import CaptureFormatError

SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)

_MAX_INTEGER = 2**63
_MAX_EXPONENT = 64
# Functions whose results can be far longer than their arguments.
_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")

# By class name, which for sympy's relations is the long one.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": sympy.Add,
    "Mul": sympy.Mul,
    "Pow": sympy.Pow,
    "Equality": sympy.Eq,
    "Unequality": sympy.Ne,
    "StrictLessThan": sympy.Lt,
    "LessThan": sympy.Le,
    "StrictGreaterThan": sympy.Gt,
    "GreaterThan": sympy.Ge,
    "And": sympy.And,
    "Or": sympy.Or,
    "Not": sympy.Not,
}
_FUNCTIONS.update(
    (name, function)
    for name, function in vars(torch_sympy).items()
    if isinstance(function, type)
    and issubclass(function, sympy.Basic)
    and function.__module__ == torch_sympy.__name__
)


class SymbolEncoder:
    """Encodes the symbolic values of one file; ``hints`` are its symbols."""

    def __init__(self) -> None:
        self.hints: dict[str, int | None] = {}
        self._names: dict[sympy.Symbol, str] = {}

    def encode(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> dict[str, Any]:
        node = value.node
        kind = node.pytype.__name__
        tree = self._tree(node.expr, node.shape_env)
        return {"sym": tree} if kind == "int" else {"sym": tree, "kind": kind}

    def _tree(self, expression: Any, shape_env: ShapeEnv) -> Any:
        if isinstance(expression, sympy.Symbol):
            return self._name(expression, shape_env)
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Rational):
            return ["Rational", int(expression.p), int(expression.q)]
        if isinstance(expression, sympy.Float):
            return ["Float", float(expression)]
        if expression in (sympy.true, sympy.false):
            return bool(expression)
        name = type(expression).__name__
        if name not in _FUNCTIONS:
            raise CaptureFormatError(f"a captured graph cannot hold the expression {expression}")
        return [name, *(self._tree(part, shape_env) for part in expression.args)]

    def _name(self, symbol: sympy.Symbol, shape_env: ShapeEnv) -> str:
        if symbol not in self._names:
            hint = shape_env.backed_var_to_val.get(symbol)
            prefix = "u" if hint is None else "s"
            count = sum(name.startswith(prefix) for name in self.hints)
            name = self._names[symbol] = f"{prefix}{count}"
            self.hints[name] = None if hint is None else int(hint)
        return self._names[symbol]


class SymbolDecoder:
    """Rebuilds the symbolic values of one file in a shape environment of its own."""

    def __init__(self, hints: Mapping[str, int | None]) -> None:
        self.shape_env = ShapeEnv()
        self._symbols = {name: self._new_symbol(name, hint) for name, hint in hints.items()}

    def _new_symbol(self, name: str, hint: int | None) -> sympy.Expr:
        if hint is None:
            unbacked = self.shape_env.create_unbacked_symint()
            torch._check(unbacked >= 0)
            return unbacked.node.expr
        # DYNAMIC: two sizes with the same hint stay two symbols, and 0 and 1 stay symbolic.
        return self.shape_env.create_symbol(
            check_integer(hint),
            ConstantSource(f"captured_{name}"),
            dynamic_dim=DimDynamic.DYNAMIC,
            do_not_specialize_zero_one=True,
        )

    def decode(self, encoded: Mapping[str, Any]) -> Any:
        expression = self._expression(encoded["sym"])
        kind = encoded.get("kind", "int")
        if kind == "bool":
            return self.shape_env.create_symboolnode(expression)
        known = expression.xreplace(self.shape_env.backed_var_to_val)
        hint = known if known.is_number else None
        if kind == "int":
            return self.shape_env.create_symintnode(
                expression, hint=None if hint is None else int(hint)
            )
        if kind == "float":
            return self.shape_env.create_symfloatnode(
                expression, hint=None if hint is None else float(hint)
            )
        raise CaptureFormatError(f"unknown kind of symbolic value {str(kind)[:200]!r}")

    def _expression(self, tree: Any) -> Any:
        if isinstance(tree, str):
            return self._symbols[tree]
        if isinstance(tree, bool):
            return sympy.true if tree else sympy.false
        if isinstance(tree, int):
            return sympy.Integer(check_integer(tree))
        name, *parts = tree
        if name == "Rational":
            return sympy.Rational(*(check_integer(part) for part in parts))
        if name == "Float":
            (number,) = parts
            return sympy.Float(float(number))
        if not isinstance(name, str) or name not in _FUNCTIONS:
            raise CaptureFormatError(f"refused function {str(name)[:200]!r} in an expression")
        values = [self._expression(part) for part in parts]
        if name in _POWERS:
            _check_power(*values)
        return _FUNCTIONS[name](*values)


def check_integer(value: Any) -> int:
    """``value`` if it is an integer of a sensible size."""
    if type(value) is not int or abs(value) >= _MAX_INTEGER:
        raise CaptureFormatError(f"expected an integer, got {str(value)[:200]!r}")
    return value


def _check_power(base: Any, exponent: Any) -> None:
    """A short tower of powers would ask sympy for a number that fills the memory.  torch only has
    small powers of symbols."""
    small = exponent.is_number and abs(exponent) <= _MAX_EXPONENT and not base.is_number
    if not small or base.has(*(_FUNCTIONS[name] for name in _POWERS)):
        raise CaptureFormatError("refused a power in an expression")
