"""The user's own estimation, and how it enters the compile cache key.

    def estimate(node: torch.fx.Node, override_size_bytes: int | None) -> float | None:
        ...    # milliseconds, or None to leave the node to the model

``override_size_bytes`` is the full tensor of a bucket that the collective would be a member of;
None asks for the node as it is.  The answer must be a finite number >= 0, else
:class:`EstimationError`; what the function itself raises passes through.  It must answer alike on
every rank: from shapes, never from a clock, a device or a random number.

torch keys a function by its name alone, so an edited one would hit the old entry.  Where one node's
cache has that and another's has not, ranks run different schedules and hang.  Our key
(:func:`estimation_key`) is made from what the function is:

    it has ``uuid()``             what that returns
    a function of a module        name, source file of the module, code, and what globals the code
                                  names: plain values, functions with what they name, files of
                                  modules and classes
    functools.partial of one      the same, with the arguments, which must be plain values
    anything else                 None: this compile must not be cached

A function of a module still may read what no key sees (a file, the environment, an object that
changes after import, a module that another module imports): such a one should have a ``uuid()``.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
"""Types whose ``repr`` tells all."""

_MAX_DEPTH = 20


class EstimationError(ValueError):
    """A user's estimation returned something that is no time, or names a device nobody knows."""


class _NoKey(Exception):
    """Something that the estimation uses has no stable description."""


def estimation_key(custom: Callable[..., object] | None) -> str | None:
    """What stands for a custom estimation in the compile cache key.

    Equal in two processes only if the estimation is the same (see the module).

    Returns:
        A text; "none" without a custom estimation; None where caching must be off: for lambdas,
        closures, local functions, bound methods and other objects without a ``uuid()``, and for
        functions that use one of those.
    """
    if custom is None:
        return "none"
    try:
        return _key_of(custom, set())
    except _NoKey:
        return None


def _key_of(custom: Any, seen: set[str]) -> str:
    if not isinstance(custom, type) and callable(uuid := getattr(custom, "uuid", None)):
        given = uuid()
        if given is None:
            raise _NoKey
        return f"uuid {_digest(_plain(given))}"
    if isinstance(custom, functools.partial):
        arguments = _plain((custom.args, tuple(sorted(custom.keywords.items()))))
        return f"partial {_digest(arguments)} of {_key_of(custom.func, seen)}"
    if isinstance(custom, types.FunctionType):
        return _function_key(custom, seen)
    raise _NoKey


def _function_key(function: types.FunctionType, seen: set[str]) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in seen:  # recursion, or two users of one helper
        return name
    seen.add(name)
    module = sys.modules.get(function.__module__)
    found: Any = module
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not function or function.__closure__ is not None:
        raise _NoKey
    source = _source(module)
    parts = [source.hex(), *_code_parts(function.__code__)]
    parts.append(_plain((function.__defaults__, _sorted_items(function.__kwdefaults__))))
    for global_name in sorted(set(_global_names(function.__code__))):
        if global_name in function.__globals__:
            value = function.__globals__[global_name]
            parts.append(f"{global_name} = {_global(value, bool(source), seen)}")
    return f"{name} {_digest(repr(parts))}"


def _global(value: Any, user_has_source: bool, seen: set[str]) -> str:
    """A description of a global that a function names."""
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__} {_origin(value.__name__)}"
    try:
        return _plain(value)
    except _NoKey:
        pass
    origin = getattr(value, "__module__", None)
    if not isinstance(origin, str):
        raise _NoKey
    if isinstance(value, types.FunctionType) and not _is_library(origin):
        return _function_key(value, seen)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{origin}.{value.__qualname__} {_origin(origin)}"
    # An object of some class: the file tells how it was made, and the class's file what it does.
    if not user_has_source:
        raise _NoKey
    return f"object of {origin}.{type(value).__qualname__} {_origin(origin)}"


def _origin(module_name: str) -> str:
    """Digest of a module's source.

    Raises:
        _NoKey: it has none and is no library.
    """
    if _is_library(module_name):
        return "library"
    source = _source(sys.modules.get(module_name))
    if not source:
        raise _NoKey
    return source.hex()


def _is_library(module_name: str) -> bool:
    """torch's version is part of torch's own key; Python's is of its cache folder's content."""
    top = module_name.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def _source(module: types.ModuleType | None) -> bytes:
    """Digest of the module's source file; empty where there is none (a notebook, ``python -c``)."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py"):
        return b""
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).digest()
    except OSError:
        return b""


def _code_parts(code: types.CodeType) -> Iterator[str]:
    """What a code object does, the same in every process; the file's path does not count."""
    yield code.co_code.hex()
    yield code.co_exceptiontable.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _plain(value: Any, depth: int = 0) -> str:
    """A text for a plain value or a container of such; two that differ have two texts."""
    if depth > _MAX_DEPTH:
        raise _NoKey
    name = type(value).__name__
    if type(value) in (tuple, list):
        return f"{name}({', '.join(_plain(item, depth + 1) for item in value)})"
    if type(value) in (set, frozenset):
        return f"{name}({', '.join(sorted(_plain(item, depth + 1) for item in value))})"
    if type(value) is dict:
        items = [f"{_plain(k, depth + 1)}: {_plain(v, depth + 1)}" for k, v in value.items()]
        return f"dict({', '.join(items)})"
    if type(value) in _PLAIN:
        return f"{name} {value!r}"
    raise _NoKey


def _sorted_items(mapping: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((mapping or {}).items(), key=lambda item: item[0]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
