"""Cuts a failing graph down to the nodes it takes, and prints it as a program."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.flag_invariants import find_violation
from torch_patches.testing.graph_code import IMPORTS, builder_code
from torch_patches.testing.graph_cuts import replace_by_input
from torch_patches.testing.invariants import InvariantError, Outcome
from torch_patches.testing.strategies import Description

#: Candidates tried per failure; a graph of 60 nodes takes about 150.
MAX_ATTEMPTS = 250


def check_invariants(
    gm: fx.GraphModule,
    description: Description,
    options: Options,
    *,
    trusted: bool = False,
    shrink: bool = True,
) -> Outcome:
    """``find_violation``; a failure's message ends with a program that reproduces it."""
    try:
        return find_violation(gm, description, options, trusted=trusted)
    except InvariantError as error:
        small, found = gm, error
        if shrink:
            options = _simplest(gm, description, options, error.kind)
            small, description, found = _smallest(gm, description, options, error)
            for marks in _MARKS:
                small = _without_marks(small, marks, description, options, error.kind)
        program = reproduction(small, description, options)
        raise InvariantError(found.letter, f"{str(found)[4:]}\n\n{program}") from error


def reproduction(gm: fx.GraphModule, description: Description, options: Options) -> str:
    """A self-contained program that checks the graph."""
    values = f", values={dict(description.values)!r}" if description.values else ""
    extra = _arguments_of(description)
    return "\n".join(
        [
            *IMPORTS,
            *builder_code(gm),
            f"check_invariants(gm, Description({f'{values}{extra}'[2:]}), {options_code(options)})",
        ]
    )


def _arguments_of(description: Description) -> str:
    """What differs from the defaults, besides the values given."""
    plain = Description()
    names = [f.name for f in fields(Description) if f.name != "values"]
    changed = [n for n in names if getattr(description, n) != getattr(plain, n)]
    return "".join(f", {name}={getattr(description, name)!r}" for name in changed)


def options_code(options: Options) -> str:
    """The call that makes them: what differs from the defaults."""
    functions = ("estimation_digest", "module_stack_digest", "calibration")  # made from others
    changed = [
        f"{f.name}={_value_code(getattr(options, f.name))}"
        for f in fields(Options)
        if f.name not in functions and getattr(options, f.name) != f.default
    ]
    digests = ["estimation_digest='given'"] if options.custom_runtime_estimation else []
    digests += ["module_stack_digest='given'"] if options.module_stack_fn else []
    return f"Options({', '.join([*changed, *digests])})"


def _value_code(value: object) -> str:
    return str(getattr(value, "__name__", None) or repr(value))


def _simplest(gm: fx.GraphModule, description: Description, options: Options, kind: str) -> Options:
    """With defaults in the place of all values that the failure does not take."""
    plain = Options()
    for names in _TOGETHER:
        changes = {name: getattr(plain, name) for name in names}
        if any(getattr(options, name) != value for name, value in changes.items()):
            simpler = replace(options, **changes)
            if _failure(gm, description, simpler, kind) is not None:
                options = simpler
    return options


#: What says what is checked, and a plan that its mode cannot be without.
_NEEDED = ("bucketing_mode", "module_bucket_plans")
#: Fields that go back to their defaults at once.
_TOGETHER = (
    ("calibration", "calibration_digest", "calibration_file"),
    ("custom_runtime_estimation", "estimation_digest"),
    ("module_stack_fn", "module_stack_digest"),
    *((f.name,) for f in fields(Options) if f.name not in _NEEDED),
)


#: Of modules, and what torch knows of inputs and outputs, without which structure decides.
_MARKS = (("nn_module_stack", "fwd_nn_module_stack"), ("desc",))


def _without_marks(
    gm: fx.GraphModule,
    marks: tuple[str, ...],
    description: Description,
    options: Options,
    kind: str,
) -> fx.GraphModule:
    """Without these in the metadata of nodes, if the failure does not take them."""
    bare = copy.deepcopy(gm)
    for node in bare.graph.nodes:
        for mark in marks:
            node.meta.pop(mark, None)
    return bare if _failure(bare, description, options, kind) is not None else gm


def _smallest(
    gm: fx.GraphModule, description: Description, options: Options, error: InvariantError
) -> tuple[fx.GraphModule, Description, InvariantError]:
    """Takes pieces away, halves first and single ones last, as long as the same invariant fails."""
    attempts = 0
    size = len(_pieces(gm))
    while size and attempts < MAX_ATTEMPTS:
        progress = False
        pieces = _pieces(gm)
        for begin in range(0, len(pieces), size):
            attempts += 1
            candidate = _without(gm, description, set(pieces[begin : begin + size]))
            found = _failure(*candidate, options, error.kind)
            if found is not None:
                (gm, description), error, progress = candidate, found, True
        if not progress or size > 1:
            size //= 2
    return gm, description, error


def _failure(
    gm: fx.GraphModule, description: Description, options: Options, kind: str
) -> InvariantError | None:
    """The violation of the same invariant; None for another one, for none and for illegal graphs."""
    try:
        find_violation(gm, description, options)
    except InvariantError as found:
        return found if found.kind == kind else None
    except Exception:  # what is left is no program
        return None
    return None


def _pieces(gm: fx.GraphModule) -> list[str]:
    """What can be taken away, users first: outputs by place, then nodes by name."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    nodes = [n.name for n in reversed(gm.graph.nodes) if n.op == "call_function"]
    return [f"output {place}" for place in range(len(outputs))] + nodes


def _without(
    gm: fx.GraphModule, description: Description, pieces: set[str]
) -> tuple[fx.GraphModule, Description]:
    """A copy without the pieces; what still reads an erased node reads an input in its place."""
    smaller = copy.deepcopy(gm)
    output = smaller.graph.output_node()
    kept = [v for i, v in enumerate(output.args[0]) if f"output {i}" not in pieces]  # type: ignore[arg-type, call-overload]
    output.args = (tuple(kept),)
    if "desc" in output.meta:
        descriptors = enumerate(output.meta["desc"])
        output.meta["desc"] = [d for i, d in descriptors if f"output {i}" not in pieces]
    for node in reversed(list(smaller.graph.nodes)):
        if node.op == "call_function" and node.name in pieces:
            if node.users:
                replace_by_input(node)
            else:
                smaller.graph.erase_node(node)
    return _cleaned(smaller, description)


def _cleaned(gm: fx.GraphModule, description: Description) -> tuple[fx.GraphModule, Description]:
    """Without the placeholders nobody reads, and the values given for them."""
    places = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node in [n for n in places if not n.users][: len(places) - 1]:
        gm.graph.erase_node(node)
    kept = gm.graph.find_nodes(op="placeholder")
    given = description.values
    values = {new: given[places[n]] for new, n in enumerate(kept) if places[n] in given}
    return gm, replace(description, values=values)
