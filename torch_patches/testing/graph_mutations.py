"""Graphs made from other graphs: each mutation changes a program into another legal-looking one.

    mutated, done = mutate(gm, groups, Random(0))

A mutation may give what is no program (a write to a payload in flight, a view of what cannot be
viewed); running the result tells, and such graphs are no examples.  The first argument of each is
changed in place.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.fx as fx
from torch._functorch._aot_autograd import descriptors as aot

from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect, find_starts
from torch_patches.testing import effect_ops
from torch_patches.testing.graph_builder import evaluate
from torch_patches.testing.graph_cuts import replace_by_input

aten = torch.ops.aten

#: Process-group name -> the rank lists of all groups with that name, as for ``SpmdInterpreter``.
Groups = Mapping[str, Sequence[Sequence[int]]]
Mutation = Callable[[fx.GraphModule, Groups, Random], None]


def mutate(
    gm: fx.GraphModule, groups: Groups, r: Random, most: int = 4
) -> tuple[fx.GraphModule, list[str]]:
    """A changed copy of ``gm``, and the names of what was done to it, one to ``most`` of
    :data:`MUTATIONS`.

    Raises:
        Exception: of any kind, where the result could not even be built.
    """
    mutated = copy.deepcopy(gm)
    names = r.choices(list(MUTATIONS), k=r.randint(1, most))
    done = []
    for name in names:
        if name == "shrink":  # many graphs hold sizes that depend on each other
            smaller = copy.deepcopy(mutated)
            try:
                shrink(smaller, groups, r)
            except Exception:
                continue
            mutated = smaller
        else:
            MUTATIONS[name](mutated, groups, r)
        done.append(name)
    mutated.graph.lint()
    return mutated, done


# ---------------------------------------------------------------- what stands where


def reorder(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """Another order that data flow allows, of all nodes or of a stretch of them."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if len(nodes) < 2:
        return
    size = r.choice([len(nodes), 12, 40])
    begin = r.randrange(max(len(nodes) - size, 0) + 1)
    stretch = {node: place for place, node in enumerate(nodes[begin : begin + size])}
    waiting = {n: sum(u in stretch for u in n.all_input_nodes) for n in stretch}
    ready = [n for n in stretch if not waiting[n]]
    stickiness, anchor = r.choice([0.0, 0.7]), nodes[begin].prev
    while ready:
        place = len(ready) - 1 if r.random() < stickiness else r.randrange(len(ready))
        node = ready.pop(place)
        anchor.append(node)
        anchor = node
        for user in sorted((u for u in node.users if u in stretch), key=stretch.__getitem__):
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)


def move_waits(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """Other hiding relations: waits right behind their starts, or in front of their first users."""
    for start in find_starts(gm.graph):
        waits = [u for u in start.users if "wait_tensor" in str(u.target)]
        if not waits or r.random() < 0.5:
            continue
        if r.random() < 0.5:
            start.append(waits[0])
        elif waits[0].users:
            places = {node: place for place, node in enumerate(gm.graph.nodes)}
            first = min(waits[0].users, key=places.__getitem__)
            if first.op != "output":
                first.prepend(waits[0])


def hide(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """New compute between a start and its wait, which something reads or nothing does."""
    start = _any(find_starts(gm.graph), r)
    waits = [] if start is None else [u for u in start.users if "wait_tensor" in str(u.target)]
    value = _any([n for n in _floats(gm) if n.meta["val"].dim() == 2], r)
    if value is None or not waits or not value < waits[0]:
        return
    with gm.graph.inserting_before(waits[0]):
        made = value
        for _ in range(r.randint(1, 3)):
            transposed = _call(gm, aten.permute.default, made, [1, 0])
            product = _call(gm, aten.mm.default, made, transposed)
            made = _call(gm, aten.mm.default, product, made)
    _return(gm, made, r)


# ---------------------------------------------------------------- what there is


def drop(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """Some nodes are gone; what read one reads its input, or a new input of the graph."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in r.sample(nodes, min(len(nodes), r.randint(1, 6))):
        if node.users:
            replace_by_input(node)
        else:
            gm.graph.erase_node(node)


def duplicate(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """A collective once more, right behind itself or behind its wait."""
    start = _any(find_starts(gm.graph), r)
    waits = [] if start is None else [u for u in start.users if "wait_tensor" in str(u.target)]
    if start is None or len(waits) != 1 or not isinstance(start.meta["val"], torch.Tensor):
        return
    with gm.graph.inserting_after(r.choice([start, waits[0]])):
        again = gm.graph.node_copy(start)
    with gm.graph.inserting_after(again if again.prev is waits[0] else waits[0]):
        waited = gm.graph.node_copy(waits[0])
    waited.replace_input_with(start, again)
    _return(gm, waited, r)


def retarget(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """Some or all collectives of a group go to another group of as many ranks."""
    starts = [s for s in find_starts(gm.graph) if _place_of_group(s, groups) is not None]
    if not starts:
        return
    old = groups_of(r.choice(starts), groups)
    alike = [name for name in groups if len(groups[name][0]) == len(groups[old][0])]
    new, share = r.choice(alike), r.choice([1.0, 0.3])
    for start in starts:
        place = _place_of_group(start, groups)
        if place is not None and start.args[place] == old and r.random() < share:
            start.update_arg(place, new)


def groups_of(start: fx.Node, groups: Groups) -> str:
    """The name of the group of a collective that has one."""
    return next(a for a in start.args if isinstance(a, str) and a in groups)


def _place_of_group(start: fx.Node, groups: Groups) -> int | None:
    places = [i for i, a in enumerate(start.args) if isinstance(a, str) and a in groups]
    return places[-1] if places else None


# ---------------------------------------------------------------- sizes


def shrink(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """Divides one size, wherever it or a multiple of it stands, and works all shapes out anew.

    Raises:
        Exception: where the graph does not run with the smaller size.
    """
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if _is_static(n)]
    sizes = sorted({size for n in inputs for size in n.meta["val"].shape if size > 1})
    if not sizes:
        return
    old = r.choice(sizes)
    factor = r.choice([f for f in (2, 3, 4, 8, old) if old % f == 0])

    def smaller(value: Any) -> Any:
        multiple = isinstance(value, int) and not isinstance(value, bool) and value >= old
        return value // factor if multiple and value % old == 0 else value

    for node in inputs:
        val = node.meta["val"]
        shape = [smaller(size) for size in val.shape]
        strides = sorted(range(len(shape)), key=lambda d: val.stride(d))
        with val.fake_mode:
            dense = torch.empty([shape[d] for d in reversed(strides)], dtype=val.dtype)
            node.meta["val"] = dense.permute([strides[::-1].index(d) for d in range(len(shape))])
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            start = 1 if "c10d_functional" in str(node.target) else 0  # not ranks of a group
            if not start:
                node.args = fx.node.map_aggregate(node.args, smaller)  # type: ignore[assignment]
    propagate(gm)
    _check_divisible(gm)


def _check_divisible(gm: fx.GraphModule) -> None:
    """What fake kernels do not look at: the rows that ranks cut a payload into."""
    for start in find_starts(gm.graph):
        name, arguments = str(start.target), list[Any](start.args)
        rows = [*start.all_input_nodes[0].meta["val"].shape[:1], 1][0]
        ranks = [n for n in arguments if isinstance(n, int)]
        if "reduce_scatter_tensor.default" in name and ranks and rows % ranks[0]:
            raise ValueError(f"{start.name}: {rows} rows on {ranks[0]} ranks")
        sent = arguments[2] if "all_to_all" in name else []
        if sent and all(isinstance(n, int) for n in sent) and sum(sent) != rows:
            raise ValueError(f"{start.name}: {sent} of {rows} rows")


def propagate(gm: fx.GraphModule) -> None:
    """Works the values of all nodes out anew from those of the inputs."""
    mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if _is_static(n))
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = evaluate(node.target, args, kwargs)


# ---------------------------------------------------------------- effects and views


def fence(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """An unknown effect that reads a value, or writes a copy of one."""
    value = _any(_floats(gm), r)
    if value is None:
        return
    place = r.choice([n for n in gm.graph.nodes if n.op != "placeholder"])
    if not value < place:
        return
    with gm.graph.inserting_before(place):
        if r.random() < 0.5:
            _call(gm, effect_ops.barrier, value)
        else:
            copied = _call(gm, aten.clone.default, value)
            _call(gm, effect_ops.barrier_, copied)
            _return(gm, copied, r)


def write(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """A value is written in place, anywhere behind where it is made, but for where it is in flight."""
    value = _any(_floats(gm), r)
    if value is None:
        return
    starts = [s for s in find_starts(gm.graph) if value in s.all_input_nodes]
    flights = [(s, w) for s in starts for w in s.users if "wait_tensor" in str(w.target)]
    behind = [
        n
        for n in gm.graph.nodes
        if n.op != "placeholder" and value < n and not any(s < n and n <= w for s, w in flights)
    ]
    with gm.graph.inserting_before(r.choice(behind)):
        if r.random() < 0.5:
            _call(gm, aten.add_.Tensor, value, 1.0)
        else:
            half = _call(gm, aten.mul.Tensor, value, 0.5)
            _call(gm, aten.copy_.default, value, half)


def look_through(gm: fx.GraphModule, groups: Groups, r: Random) -> None:
    """Some users of a value read a view of it, or a view of a view that is the same in the end."""
    value = _any(_floats(gm), r)
    users = [] if value is None else [u for u in value.users if u.op == "call_function"]
    if value is None or not users:
        return
    behind = value if value.op != "placeholder" else gm.graph.find_nodes(op="placeholder")[-1]
    shape = list(value.meta["val"].shape)
    kind = r.choice(["alias", "view", "flat", "slice", "cut"])
    with gm.graph.inserting_after(behind):
        anchor = _call(gm, aten.alias.default, value)
    with gm.graph.inserting_after(anchor):
        if kind == "view":
            made = _call(gm, aten.view.default, anchor, shape)
        elif kind == "flat":
            flat = _call(gm, aten.reshape.default, anchor, [-1])
            with gm.graph.inserting_after(flat):
                made = _call(gm, aten.reshape.default, flat, shape)
        elif kind == "slice" and shape:
            made = _call(gm, aten.slice.Tensor, anchor, 0, 0, shape[0])
        elif kind == "cut" and shape and shape[0] > 1:
            first, rest = _apart(gm, anchor, shape[0], r)
            with gm.graph.inserting_after(rest):
                made = _call(gm, aten.cat.default, [first, rest])
        else:
            made = anchor
    for user in users:
        if user is not anchor and r.random() < 0.7:
            user.replace_input_with(value, made)


def _apart(gm: fx.GraphModule, value: fx.Node, rows: int, r: Random) -> tuple[fx.Node, fx.Node]:
    cut = r.randint(1, rows - 1)
    first = _call(gm, aten.slice.Tensor, value, 0, 0, cut)
    with gm.graph.inserting_after(first):
        return first, _call(gm, aten.slice.Tensor, value, 0, cut, rows)


MUTATIONS: dict[str, Mutation] = {
    "reorder": reorder, "move_waits": move_waits, "hide": hide, "drop": drop,
    "duplicate": duplicate, "retarget": retarget, "shrink": shrink, "fence": fence,
    "write": write, "look_through": look_through,
}  # fmt: skip


# ---------------------------------------------------------------- helpers


def _any(nodes: Collection[fx.Node], r: Random) -> fx.Node | None:
    return r.choice(list(nodes)) if nodes else None


def _is_static(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and all(isinstance(size, int) for size in val.shape)


def _floats(gm: fx.GraphModule) -> list[fx.Node]:
    """Values that arithmetic may read at once: no starts, which must be waited for first."""
    flying = {n for c in collect(gm.graph).collectives for n in (c.start, *c.start.users)}
    waits = {wait for c in collect(gm.graph).collectives for wait in c.waits}
    return [
        n
        for n in gm.graph.nodes
        if _is_static(n) and n.meta["val"].is_floating_point() and (n not in flying or n in waits)
    ]


def _call(gm: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    """A new node where the graph inserts; its value is what the op returns."""
    node = gm.graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = next(n.meta["val"].fake_mode for n in node.all_input_nodes)
    with mode:
        node.meta["val"] = evaluate(target, values, {})
    return node


def _return(gm: fx.GraphModule, value: fx.Node, r: Random) -> None:
    """The graph returns ``value`` too, or a sum that reads it, or nobody reads it."""
    choice = r.random()
    if choice < 0.2:
        return
    output = gm.graph.output_node()
    if choice < 0.6:
        with gm.graph.inserting_before(output):
            value = _call(gm, aten.sum.default, value)
    given = output.args[0]
    assert isinstance(given, (list, tuple))
    output.args = ((*given, value),)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"], aot.PlainAOTOutput(len(given))]
    output.meta.pop("val", None)
