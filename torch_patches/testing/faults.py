"""Raises an error at one chosen call inside the passes, for tests of what then becomes of a graph.

    places = places_of(lambda: optimize_graph(gm, options))
    with failing(places[7], call=1, error=KeyError("boom")):
        optimize_graph(again, options)

A place is a Python function that runs while a graph is read, decided about or changed: one of the
package's, or one of torch.fx that a rewrite is made of.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import changing, notices
from torch_patches._inductor.fx_passes.comm_overlap.passes import tagging

_PASSES = str(Path(changing.__file__).parent)
_FX = str(Path(fx.__file__).parent)
#: Of torch.fx, what changes a graph.
_REWRITING = frozenset({"create_node", "_insert", "erase_node", "replace_all_uses_with", "prepend"})
#: What has to hold: only what these call is made to fail.
_GUARDED = frozenset(
    function.__code__ for function in (changing.change_graph, tagging.tag_graph, tagging.is_tagged)
)


@dataclass(frozen=True)
class FaultPlace:
    """A function that ran, and how often.

    Args:
        name: file and function, for messages.
    """

    code: CodeType
    name: str
    calls: int


class _Watch:
    """Sees every call that is made to handle a graph; a profile function of Python."""

    def __init__(self, called: Callable[[CodeType], None]) -> None:
        self._called = called
        self._depth = 0  # of functions that have to hold

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code in _GUARDED:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and self._depth and _may_fail(code):
            self._called(code)

    @contextmanager
    def watching(self) -> Iterator[None]:
        previous = sys.getprofile()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(previous)


def places_of(run: Callable[[], object]) -> list[FaultPlace]:
    """What ``run`` calls to handle a graph, in the order of the first calls.

    Generators are left out: Python also enters one to close it, where errors are lost.
    """
    calls: dict[CodeType, int] = {}

    def count(code: CodeType) -> None:
        calls[code] = calls.get(code, 0) + 1

    with _Watch(count).watching():
        run()
    return [
        FaultPlace(code, f"{Path(code.co_filename).name}:{code.co_name}", number)
        for code, number in calls.items()
    ]


def _may_fail(code: CodeType) -> bool:
    if code.co_flags & inspect.CO_GENERATOR:
        return False
    in_passes = code.co_filename.startswith(_PASSES) and code.co_filename != notices.__file__
    return in_passes or (code.co_name in _REWRITING and code.co_filename.startswith(_FX))


@contextmanager
def failing(place: FaultPlace, call: int, error: BaseException) -> Iterator[None]:
    """Within it the ``call``-th call of ``place``, counted from 1, raises ``error``; once."""
    seen = 0

    def fail(code: CodeType) -> None:
        nonlocal seen
        if code is place.code:
            seen += 1
            if seen == call:
                sys.setprofile(None)
                raise error

    with _Watch(fail).watching():
        yield


def description(gm: fx.GraphModule) -> tuple[Any, ...]:
    """All of a graph, node for node, with metadata, users in their order, and submodules."""
    nodes = tuple(
        (
            *_wiring(node),
            tuple(user.name for user in node.users),
            tuple((key, id(value)) for key, value in node.meta.items()),
        )
        for node in gm.graph.nodes
    )
    return nodes, tuple(name for name, _ in gm.named_modules()), gm.code


def wiring(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Names, ops and arguments: equal for two graphs that were made alike."""
    return [_wiring(node) for node in gm.graph.nodes]


def _wiring(node: fx.Node) -> tuple[Any, ...]:
    return node.name, node.op, str(node.target), str(node.args), str(node.kwargs), node.type
