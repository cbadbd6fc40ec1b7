"""Which module made a node.

    L['self']._modules['layers']._modules['0'].attention   ->   layers.0.attention

Dynamo leaves the modules on each node that it traces, outermost first: ``nn_module_stack`` on those
of the forward, ``fwd_nn_module_stack`` on those of the backward; torchtitan leaves one dotted name
in ``meta["custom"]["module_fqn"]``.  The keys of a stack are object ids, so only its values are
read.  A function that is compiled may hold several models.  The root that owns the parameters is
left out of names if it is the only one (so names are those of ``named_modules``); every other root
stands in front of its names, so that two ``layers.0`` are never one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.casts import passed_on
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    inputs_of,
    is_view,
    reads_only_shape,
    wrapped_node,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import (
    data_inputs,
    passes_through,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    Collective,
    CollectiveKind,
    Skeleton,
    Traffic,
)

#: Upstream's signature: (path, class) of the modules that made a node, outermost first.
ModuleStackFn = Callable[[fx.Node], Sequence[tuple[str, object]]]

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_STORAGE = frozenset({"_modules", "_parameters", "_buffers", "__dict__"})
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARAMETRIZATIONS = "parametrizations"
# Steps from a function to what it holds; the next two have an index behind them.
_FUNCTION_STEPS = frozenset({"cell_contents", "__self__", "__func__", "__wrapped__"})
_INDEXED_STEPS = frozenset({"__closure__", "__defaults__", "__kwdefaults__"})
_STEP = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\s*\]|([^.\[\]]+)")
_SCOPE = re.compile(r"[LG]\[")
# What means something in a plan's patterns cannot be part of a name.
_PATTERN_CHARACTERS = re.compile(r"[\s*+,\[\]]")
# The base class stands for a class that nobody knows: captured graphs do not keep it.
_NO_CLASS = frozenset({"torch.nn.Module", "torch.nn.modules.module.Module"})
# Nodes asked around a start that knows no module: keeps the search linear.
_MAX_NEIGHBOURS = 16
# Views and pads that a search looks through; they do not count as nodes asked.
_MAX_VIEWS = 256
# Inputs of what pads: one and some zeros.
_MAX_PADDED = 4


class ModuleStackError(ValueError):
    """A user's ``module_stack_fn`` raised, or returned something else than (path, class) pairs."""


@dataclass(frozen=True)
class ModuleScope:
    """A module that a node was made in.

    Args:
        path: "layers.0.attention", without wrappers.
        kind: qualified name of its class, None where unknown.
        rooted: the path with its root in front, where ``path`` leaves that out.
    """

    path: str
    kind: str | None
    rooted: str | None = field(default=None, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """What a user may call it."""
        return (self.path,) if self.rooted is None else (self.path, self.rooted)


@dataclass(frozen=True)
class _RawScope:
    """A scope whose root is not yet judged; ``root`` is empty for names without one."""

    root: tuple[str, ...]
    steps: tuple[str, ...]
    kind: str | None


def clean_parameter_name(name: str) -> str:
    """A parameter's name as plans write it, from ``named_parameters`` or from Dynamo's source.

        _orig_mod.layers.0._checkpoint_wrapped_module.wq.parametrizations.weight.original
        ->  layers.0.wq.weight

    Wrappers are left out, and a parametrized parameter has the name that it had before (the
    ``original0``, ``original1`` of one in several parts too).
    """
    steps = _split_root(name)[1]
    if _PARAMETRIZATIONS in steps:
        place = steps.index(_PARAMETRIZATIONS)
        steps = (*steps[:place], *steps[place + 1 : place + 2])
    return ".".join(steps)


def read_module_stacks(
    skeleton: Skeleton, module_stack_fn: ModuleStackFn | None = None
) -> dict[int, tuple[ModuleScope, ...]]:
    """For each collective, by index, the modules that made it, outermost first; () if unknown.

    ``module_stack_fn`` is asked first, for the start and all nodes around it; where it knows
    nothing, each node's metadata is.  The nodes around a start are asked in this order, and only
    if the start knows nothing: its waits, what only prepares its payload, and the first users of
    its waits (reductions: what made the payload, before those).

    Whether a root is part of the names depends on the roots of this graph's collectives: in a
    backward where only one of two models is trained, its names have none.

    Raises:
        ModuleStackError: the function raised or returned something else than (path, class) pairs.
    """
    raw = _raw_stacks(skeleton, module_stack_fn)
    names = _names_of(raw, skeleton)
    return {index: _named(stack, names) for index, stack in raw.items()}


def read_node_stacks(
    skeleton: Skeleton, nodes: Iterable[fx.Node], module_stack_fn: ModuleStackFn | None = None
) -> dict[fx.Node, tuple[ModuleScope, ...]]:
    """The same for each of ``nodes`` that knows its own modules, by the same names.

    Raises:
        ModuleStackError: see :func:`read_module_stacks`.
    """
    raw = {node: _own_stack(node, module_stack_fn) for node in nodes if node.op == "call_function"}
    raw = {node: stack for node, stack in raw.items() if stack}
    of_collectives = _raw_stacks(skeleton, module_stack_fn)
    names = _names_of(of_collectives, skeleton)
    roots = {scope.root for scope in _rooted(raw.values())}
    alone = next(iter(roots)) if len(roots) == 1 else None
    left_out = _left_out(names) if names else alone
    names = {**_root_names(_rooted(raw.values()), left_out), **names}
    return {node: _named(stack, names) for node, stack in raw.items()}


def read_model_modules(graph: fx.Graph) -> list[str]:
    """Paths of all modules of the graph that Dynamo made, in order of first use.

    The root of all parameters is left out, as it is where all collectives have one root.
    """
    raw = [stack for node in graph.nodes if (stack := _from_metadata(node))]
    sources = [getattr(node, "_dynamo_source", None) for node in graph.nodes]
    owning = [_split_root(str(source.name)) for source in sources if source is not None]
    main = {root for root, steps in owning if len(steps) > 0}
    left_out = next(iter(main)) if len(main) == 1 else None
    names = _root_names(_rooted(raw), left_out)
    scopes = (scope for stack in raw for scope in _named(stack, names))
    return list({name: None for scope in scopes for name in scope.names})


def _raw_stacks(
    skeleton: Skeleton, module_stack_fn: ModuleStackFn | None
) -> dict[int, list[_RawScope]]:
    return {c.index: _raw_stack(c, module_stack_fn) for c in skeleton.collectives}


def _names_of(
    raw: Mapping[int, Sequence[_RawScope]], skeleton: Skeleton
) -> dict[tuple[str, ...], str]:
    """Names of roots; that of all parameters has none."""
    carrying = [c.index for c in skeleton.collectives if c.traffic is not Traffic.OTHER]
    main = dict.fromkeys(s.root for index in carrying or raw for s in raw[index] if s.root)
    return _root_names(_rooted(raw.values()), next(iter(main)) if len(main) == 1 else None)


def _rooted(stacks: Iterable[Sequence[_RawScope]]) -> list[_RawScope]:
    return [scope for stack in stacks for scope in stack if scope.root]


def _left_out(names: Mapping[tuple[str, ...], str]) -> tuple[str, ...] | None:
    return next((root for root, name in names.items() if not name), None)


# -- stacks ---------------------------------------------------------------------------------------


def _raw_stack(collective: Collective, module_stack_fn: ModuleStackFn | None) -> list[_RawScope]:
    if module_stack_fn is not None:
        for node in _nodes_around(collective):
            stack = _asked(module_stack_fn, node)
            if stack:
                return stack
    for node in _nodes_around(collective):
        stack = _from_metadata(node)
        if stack:
            return stack
    return []


def _own_stack(node: fx.Node, module_stack_fn: ModuleStackFn | None) -> list[_RawScope]:
    asked = _asked(module_stack_fn, node) if module_stack_fn is not None else []
    return asked or _from_metadata(node)


def _from_metadata(node: fx.Node) -> list[_RawScope]:
    for meta in [n.meta for n in (node, wrapped_node(node)) if n is not None]:
        for key in _STACKS:
            stack = meta.get(key)
            if isinstance(stack, Mapping) and stack:
                return [_scope(str(entry[0]), entry[1]) for entry in stack.values()]
        custom = meta.get("custom")
        name = custom.get("module_fqn") if isinstance(custom, Mapping) else None
        if isinstance(name, str) and name:
            return [_scope(name, None)]
    return []


def _asked(module_stack_fn: ModuleStackFn, node: fx.Node) -> list[_RawScope]:
    try:
        answer = module_stack_fn(node)
    except Exception as error:
        raise ModuleStackError(
            f"module_stack_fn raised {type(error).__name__} for the node {node.name}: {error}"
        ) from error
    if not isinstance(answer, (list, tuple)) or not all(map(_is_pair, answer)):
        raise ModuleStackError(
            "module_stack_fn must return a list of (path, class) pairs, outermost module first; "
            f"for the node {node.name} it returned {answer!r}"
        )
    return [_scope(path, kind) for path, kind in answer]


def _is_pair(entry: object) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    return entry[1] is None or isinstance(entry[1], (str, type))


def _scope(name: str, kind: object) -> _RawScope:
    root, steps = _split_root(name)
    if isinstance(kind, type):
        kind = f"{kind.__module__}.{kind.__qualname__}"
    known = isinstance(kind, str) and bool(kind) and kind not in _NO_CLASS
    return _RawScope(root, steps, str(kind) if known else None)


def _named(
    stack: Sequence[_RawScope], names: Mapping[tuple[str, ...], str]
) -> tuple[ModuleScope, ...]:
    """A wrapper and what it wraps are one module, of the inner class; a root without a name and
    the modules of a parametrization are none."""
    scopes: list[ModuleScope] = []
    for raw in stack:
        root = names.get(raw.root, "")
        path = ".".join([root, *raw.steps] if root else raw.steps)
        if not path or _PARAMETRIZATIONS in raw.steps:
            continue
        rooted = ".".join([_joined(raw.root[1:]), *raw.steps]) if raw.root and not root else None
        kind = raw.kind
        if scopes and scopes[-1].path == path:
            wrapper = scopes.pop()
            kind = kind or wrapper.kind
        scopes.append(ModuleScope(path, kind, rooted))
    return tuple(scopes)


# -- names ----------------------------------------------------------------------------------------


def _split_root(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The root that a name starts at (empty if it has none), and the steps from there."""
    steps = [next((g for g in groups if g), "") for groups in _STEP.findall(name)]
    taken = 0
    if _SCOPE.match(name):
        taken = 2  # scope and variable
        for place, step in enumerate(steps):
            if step in _FUNCTION_STEPS:
                taken = max(taken, place + 1)
            elif step in _INDEXED_STEPS:
                taken = max(taken, place + 2)
    kept = [s for s in steps[taken:] if s and s not in _STORAGE and s not in _WRAPPERS]
    return tuple(steps[:taken]), tuple(_PATTERN_CHARACTERS.sub("_", s) for s in kept)


def _root_names(
    scopes: Sequence[_RawScope], left_out: tuple[str, ...] | None
) -> dict[tuple[str, ...], str]:
    """A name of one component for each root but one: "encoder" for ``L['encoder']``, and longer
    ones where two would be equal, or equal to a child of the root that is left out."""
    children = {s.steps[0] for s in scopes if s.root == left_out and s.steps}
    roots = [root for root in dict.fromkeys(s.root for s in scopes) if root != left_out]
    names = {root: _joined(root[1:]) for root in roots}
    if len({*names.values(), *children}) < len(roots) + len(children):
        names = {root: _joined(root) for root in roots}
    return names if left_out is None else {**names, left_out: ""}


def _joined(steps: Sequence[str]) -> str:
    kept = [s for s in steps if s not in _FUNCTION_STEPS and s not in _INDEXED_STEPS]
    return re.sub(r"\W", "_", "_".join(kept))


# -- neighbours -----------------------------------------------------------------------------------


def _nodes_around(collective: Collective) -> Iterator[fx.Node]:
    """The start, and what may know its module in its place, the nearest first."""
    yield collective.start
    yield from collective.waits
    gathers = collective.kind is CollectiveKind.ALL_GATHER
    yield from _above(collective.start, only_preparing=True)
    if not gathers:
        yield from _above(collective.start, only_preparing=False)
    yield from _below(collective.waits)


def _above(start: fx.Node, only_preparing: bool) -> Iterator[fx.Node]:
    """Nodes that ``start`` is made of, nearest first; only those that nobody else reads, or all.

    Views and pads are no steps of the way: a rank with one more would ask in another order.
    """
    pending, seen, known, passed = list(data_inputs(start)), {start}, 0, 0
    for given in pending:
        node = given
        while passed <= _MAX_VIEWS and (source := _same_data(node)) is not None:
            node, passed = source, passed + 1
        if known == _MAX_NEIGHBOURS or passed > _MAX_VIEWS:
            return
        if node in seen or node.op != "call_function":
            continue
        if only_preparing and (len(_readers([node])) > 1 or not passes_through(node)):
            continue
        seen.add(node)
        known += 1
        yield node
        pending.extend(data_inputs(node))


def _below(waits: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """What reads the results of ``waits``, and behind what only rearranges them what reads that; in
    the order of the graph."""
    pending, seen, known = _readers(waits), set[fx.Node](), 0
    heapq.heapify(pending)
    while pending and known < _MAX_NEIGHBOURS:
        node = heapq.heappop(pending)
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        known += 1
        yield node
        if passes_through(node):
            for reader in _readers([node]):
                heapq.heappush(pending, reader)


def _readers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Users of ``nodes``, those of their views and pads in the place of these: a rank may have some
    that others have not."""
    pending, found = list(nodes), dict[fx.Node, None]()
    for _ in range(_MAX_VIEWS):
        if not pending:
            break
        node = pending.pop()
        for user in node.users:
            if is_view(user) or _same_data(user) is node:
                pending.append(user)
            elif not reads_only_shape(user):
                found[user] = None
    return list(found)


def _same_data(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a view of or pads; of what joins many, nobody asks."""
    return passed_on(node) if len(inputs_of(node)) <= _MAX_PADDED else None
