"""Cuts a failing graph down to the nodes it takes, and prints it as a program."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.graph_code import IMPORTS, builder_code
from torch_patches.testing.invariants import InvariantError, Outcome, find_violation
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
            small, description, found = _smallest(gm, description, options, error)
        program = reproduction(small, description, options)
        raise InvariantError(found.letter, f"{str(found)[4:]}\n\n{program}") from error


def reproduction(gm: fx.GraphModule, description: Description, options: Options) -> str:
    """A self-contained program that checks the graph."""
    values = f", values={dict(description.values)!r}" if description.values else ""
    integers = ", integers=True" if description.integers else ""
    return "\n".join(
        [
            *IMPORTS,
            "from torch_patches.testing.minimise import check_invariants",
            "from torch_patches.testing.strategies import Description",
            *builder_code(gm),
            f"check_invariants(gm, Description({f'{values}{integers}'[2:]}), {options!r})",
        ]
    )


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
            found = _failure(*candidate, options, error.letter)
            if found is not None:
                (gm, description), error, progress = candidate, found, True
        if not progress or size > 1:
            size //= 2
    return gm, description, error


def _failure(
    gm: fx.GraphModule, description: Description, options: Options, letter: str
) -> InvariantError | None:
    """The violation of the same invariant; None for another one, for none and for illegal graphs."""
    try:
        find_violation(gm, description, options)
    except InvariantError as found:
        return found if found.letter == letter else None
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
                _replace_by_input(node)
            else:
                smaller.graph.erase_node(node)
    return _cleaned(smaller, description)


def _replace_by_input(node: fx.Node) -> None:
    """Lets the users of ``node`` read its first tensor argument like it, or else a new input."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return
    alike = [
        n
        for n in node.all_input_nodes
        if isinstance(n.meta["val"], torch.Tensor)
        and n.meta["val"].shape == val.shape
        and n.meta["val"].dtype is val.dtype
    ]
    if alike:
        node.replace_all_uses_with(alike[0])
        node.graph.erase_node(node)
        return
    graph = node.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        new = graph.placeholder(f"cut_{node.name}")
    new.meta["val"] = val
    last = graph.find_nodes(op="placeholder")[-1]
    if last is not new:
        last.append(new)  # placeholders are numbered in graph order: the new one comes last
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _cleaned(gm: fx.GraphModule, description: Description) -> tuple[fx.GraphModule, Description]:
    """Without the placeholders nobody reads, and the values given for them."""
    places = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node in [n for n in places if not n.users][: len(places) - 1]:
        gm.graph.erase_node(node)
    kept = gm.graph.find_nodes(op="placeholder")
    given = description.values
    values = {new: given[places[n]] for new, n in enumerate(kept) if places[n] in given}
    return gm, replace(description, values=values)
