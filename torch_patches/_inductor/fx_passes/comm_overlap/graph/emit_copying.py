"""Copying merge: one copy of all payloads in, one collective, one wait, one copy out.

Layout of a bucket of members with n_i elements on each of G ranks:

    gather    in: [n_0 | n_1 | ...]             out: G rows of it, split by columns
    scatter   in: G rows [n_0/G | n_1/G | ...]  out: [n_0/G | n_1/G | ...]
    reduce    in: [n_0 | n_1 | ...]             out: the same

All members have one dtype, so every part starts at a multiple of the element size.

The copy out is one node that gives each member a storage of its own.  Which one depends on who runs
the graph.  Inductor fuses ``_foreach_copy`` into one kernel; it has no lowering of
``split_with_sizes_copy``.  PyTorch's own ``_foreach_copy`` clones *all of the bucket* for each
member, since the functional form keeps the strides of what it writes to, in its place in the
storage; its ``split_with_sizes_copy`` makes the members and nothing else.

What all members have in common around the collective is done once, on the whole buffer: a cast in
front of gathers, and a scaling by a number behind all-reduces.  The bits are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.graph.casts import (
    CastChain,
    cast_in_front,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import MEMBER_MARK
from torch_patches._inductor.fx_passes.comm_overlap.graph.emitter import (
    PART_MARK,
    Emitter,
    Merged,
    collective_op,
    contiguous_strides,
    fake_view,
    mark,
    merged_arguments,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.links import common_scaling
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    first_argument,
    inputs_of,
    is_view,
    op_name,
    wait_source,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.traffic import makes_constant
from torch_patches._inductor.fx_passes.comm_overlap.plan import Bucket, Collective, CollectiveKind

aten = torch.ops.aten
_to_copy = aten._to_copy.default


def emit_copying(emitter: Emitter, bucket: Bucket, index: int) -> Merged:
    """Replaces the members by one collective over a copied buffer.  Sizes must be static."""
    members = [bucket.members[i] for i in bucket.payload_order]
    made = _Recorder(emitter)
    donor = bucket.members[0].start
    casts = _absorbable_casts(members, emitter.ordered)
    buffer = _copy_in(made, members, casts, donor, bucket)
    start = _launch(made, members[0].start, buffer, donor, bucket)
    mark(start, index, bucket)
    start_nodes = made.take()
    wait = made.call(
        bucket.members[0].waits[0].target,
        (start,),
        bucket.members[0].waits[0],
        start.meta["val"],
    )
    scalings = _absorbable_scalings(members, emitter.ordered)
    result = _scaled(made, wait, scalings) if scalings else wait
    outputs = _copy_out(made, result, members, bucket)
    wait_nodes = made.take()
    replaced = _replace(emitter, members, outputs, start, wait)
    for scaling in scalings:
        emitter.replace(scaling, _source_of(scaling))
    for chain in casts or ():
        _erase_unread(emitter, chain)
    emitter.erase(scalings)
    return Merged(start, start_nodes, replaced, wait_nodes)


class _Recorder:
    """An emitter that remembers what it made since the last ``take``."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self.run_eagerly = emitter.run_eagerly
        self._made: list[fx.Node] = []

    def call(self, *args: object, **kwargs: object) -> fx.Node:
        return self._record(self._emitter.call(*args, **kwargs))  # type: ignore[arg-type]

    def compute(self, *args: object, **kwargs: object) -> fx.Node:
        return self._record(self._emitter.compute(*args, **kwargs))  # type: ignore[arg-type]

    def own(self, *args: object) -> fx.Node:
        """A node that only ranks with such a shard have."""
        self._made.append(self._emitter.compute(*args))  # type: ignore[arg-type]
        return self._made[-1]

    def own_call(self, *args: object) -> fx.Node:
        """The same, with its value."""
        self._made.append(self._emitter.call(*args))  # type: ignore[arg-type]
        return self._made[-1]

    def _record(self, node: fx.Node) -> fx.Node:
        node.meta[PART_MARK] = True
        self._made.append(node)
        return node

    def view(self, node: fx.Node, shape: Sequence[int], donor: fx.Node) -> fx.Node:
        """``node`` with another shape; a copy only where its strides demand one."""
        value = node.meta["val"]
        if list(value.shape) == list(shape):
            return node
        if not value.is_contiguous():
            return self.compute(aten.reshape.default, (node, list(shape)), donor)
        view = fake_view(value, shape, contiguous_strides(shape))
        return self.call(aten.view.default, (node, list(shape)), donor, view)

    def take(self) -> tuple[fx.Node, ...]:
        made, self._made = tuple(self._made), []
        return made


def _source(member: Collective) -> fx.Node:
    return _source_of(member.start)


def _absorbable_casts(
    members: Sequence[Collective], ordered: Set[fx.Node]
) -> list[CastChain] | None:
    """Casts in front of gathers that one cast of the whole buffer can replace.

    Only if nobody else reads them, and all members have one of the same kind from the same dtype:
    then casting after the copy gives the same bits in one node instead of many.  A cast that is
    ordered against a write of what it reads stays where it is.
    """
    if members[0].kind is not CollectiveKind.ALL_GATHER:
        return None
    chains = [chain for m in members if (chain := cast_in_front(_source(m), ordered)) is not None]
    casts = [chain.cast for chain in chains]
    if len(casts) < len(members) or not all(map(_is_plain_cast, casts)):
        return None
    sources = [first_argument(c) for c in casts]
    dtypes = {s.meta["val"].dtype for s in sources if isinstance(s, fx.Node)}
    targets = {(c.target, str(c.args[1:]), str(c.kwargs)) for c in casts}
    return chains if len(dtypes) == 1 and len(targets) == 1 else None


def _is_plain_cast(cast: fx.Node) -> bool:
    """Changes the dtype and nothing else (no device, layout or memory format)."""
    source = cast.args[0] if cast.args else None
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = cast.meta["val"]
    return (
        isinstance(before, torch.Tensor)
        and set(cast.kwargs) <= {"dtype"}
        and before.device == after.device
        and before.shape == after.shape
    )


def _absorbable_scalings(members: Sequence[Collective], ordered: Set[fx.Node]) -> list[fx.Node]:
    """Scalings behind all-reduces that one scaling of the whole buffer can replace.

    Only if all members have the same, nobody else reads the unscaled result, and it keeps the
    layout of what it reads, which then stands for it.
    """
    if members[0].kind is not CollectiveKind.ALL_REDUCE:
        return []
    scalings = common_scaling(members)
    if any(s in ordered or not _keeps_layout(s) for s in scalings):
        return []
    return list(scalings)


def _keeps_layout(scaling: fx.Node) -> bool:
    before, after = _source_of(scaling).meta["val"], scaling.meta["val"]
    return bool(before.shape == after.shape and before.stride() == after.stride())


def _source_of(node: fx.Node) -> fx.Node:
    source = first_argument(node)
    assert isinstance(source, fx.Node)
    return source


def _scaled(made: _Recorder, wait: fx.Node, scalings: Sequence[fx.Node]) -> fx.Node:
    scaling = scalings[0]
    return made.compute(scaling.target, (wait, *scaling.args[1:]), scaling)


def _copy_in(
    made: _Recorder,
    members: Sequence[Collective],
    casts: Sequence[CastChain] | None,
    donor: fx.Node,
    bucket: Bucket,
) -> fx.Node:
    """All payloads in one flat buffer: views and a single ``cat``."""
    chains: Sequence[CastChain | None] = casts or [None] * len(members)
    parts = [_flat_part(made, m, chain, bucket) for m, chain in zip(members, chains, strict=True)]
    rows = bucket.key.kind is CollectiveKind.REDUCE_SCATTER
    buffer = made.compute(aten.cat.default, (parts, 1 if rows else 0), donor)
    buffer = made.view(buffer, [buffer.meta["val"].numel()], donor)
    if casts:
        cast = casts[0].cast
        buffer = made.compute(
            cast.target, (buffer, *cast.args[1:]), donor, kwargs=dict(cast.kwargs)
        )
    return buffer


def _flat_part(
    made: _Recorder, member: Collective, chain: CastChain | None, bucket: Bucket
) -> fx.Node:
    source = _source(member) if chain is None else _before_cast(made, chain)
    numel = source.meta["val"].numel()
    if bucket.key.kind is CollectiveKind.REDUCE_SCATTER:
        return made.view(source, [_group_size(bucket), numel // _group_size(bucket)], member.start)
    return made.view(source, [numel], member.start)


def _before_cast(made: _Recorder, chain: CastChain) -> fx.Node:
    """The payload as it would be without the cast: its views and pads over what is cast."""
    before, uncast = chain.cast, _source_of(chain.cast)
    source = uncast
    for node in chain.behind:
        first, *rest = node.args
        over: object = source
        if op_name(node.target) == "cat":
            over = [
                source if part is before else _recast(made, part, uncast, node)
                for part in _nodes(first)
            ]
        source = made.own(node.target, (over, *rest), node, dict(node.kwargs))
        before = node
    return source


def _erase_unread(emitter: Emitter, chain: CastChain) -> None:
    """The chain and the constants that it was padded with, but for what others read."""
    constants = [n for node in chain.behind for n in inputs_of(node) if makes_constant(n)]
    for node in (*reversed(chain.behind), *constants, chain.cast):
        if not node.users:
            emitter.erase([node])


def _nodes(argument: object) -> list[fx.Node]:
    assert isinstance(argument, (list, tuple))
    return [node for node in argument if isinstance(node, fx.Node)]


def _recast(made: _Recorder, constant: fx.Node, like: fx.Node, donor: fx.Node) -> fx.Node:
    """A constant in the dtype of ``like``."""
    dtype = {"dtype": like.meta["val"].dtype}
    if not makes_constant(constant):
        return made.own(_to_copy, (constant,), donor, dtype)
    arguments = fx.node.map_arg(constant.args, lambda _: like)
    value = constant.meta["val"].to(like.meta["val"].dtype)
    return made.own_call(constant.target, arguments, donor, value, {**constant.kwargs, **dtype})


def _group_size(bucket: Bucket) -> int:
    assert bucket.key.group_size is not None
    return bucket.key.group_size


def _launch(
    made: _Recorder, member: fx.Node, buffer: fx.Node, donor: fx.Node, bucket: Bucket
) -> fx.Node:
    value = buffer.meta["val"]
    numel = value.numel()
    if bucket.key.kind is CollectiveKind.ALL_GATHER:
        numel *= _group_size(bucket)
    elif bucket.key.kind is CollectiveKind.REDUCE_SCATTER:
        numel //= _group_size(bucket)
    result = value.new_empty([numel])
    return made.call(
        collective_op(member, coalesced=False), merged_arguments(member, buffer), donor, result
    )


def _copy_out(
    made: _Recorder, wait: fx.Node, members: Sequence[Collective], bucket: Bucket
) -> list[fx.Node]:
    """Each member's result, contiguous and in its own storage."""
    copies = _copied_parts(made, wait, members, bucket)
    outputs: list[fx.Node] = []
    for place, member in enumerate(members):
        donor = member.waits[0]
        part = made.call(operator.getitem, (copies, place), donor, copies.meta["val"][place])
        output = made.view(part, list(member.start.meta["val"].shape), donor)
        output.meta[MEMBER_MARK] = True
        outputs.append(output)
    return outputs


def _copied_parts(
    made: _Recorder, wait: fx.Node, members: Sequence[Collective], bucket: Bucket
) -> fx.Node:
    """A node with a copy of every member's part: of columns for gathers, else of a flat piece."""
    sizes = [m.start.meta["val"].numel() for m in members]
    is_gather = bucket.key.kind is CollectiveKind.ALL_GATHER
    rows = _group_size(bucket) if is_gather else 1
    widths, dim = [n // rows for n in sizes], int(is_gather)
    whole = made.view(wait, [rows, sum(widths)], wait) if is_gather else wait
    if made.run_eagerly:
        return made.compute(aten.split_with_sizes_copy.default, (whole, widths, dim), wait)
    # What is copied *into* only gives the layout: a piece of the buffer of the same size.
    into = _parts(made, wait, wait, sizes, 0)
    parts = into
    if is_gather:
        into = [made.view(p, [rows, n], wait) for p, n in zip(into, widths, strict=True)]
        parts = _parts(made, wait, whole, widths, dim)
    return made.compute(aten._foreach_copy.default, (into, parts), wait)


def _parts(
    made: _Recorder, donor: fx.Node, source: fx.Node, sizes: Sequence[int], dim: int
) -> list[fx.Node]:
    """Views of consecutive pieces of ``source`` along ``dim``."""
    whole = source.meta["val"]
    values: list[torch.Tensor] = []
    offset = 0
    for size in sizes:
        shape = [*whole.shape[:dim], size, *whole.shape[dim + 1 :]]
        values.append(fake_view(whole, shape, whole.stride(), offset * whole.stride()[dim]))
        offset += size
    arguments = (source, list(sizes), dim)
    split = made.call(aten.split_with_sizes.default, arguments, donor, values)
    return [
        made.call(operator.getitem, (split, place), donor, value)
        for place, value in enumerate(values)
    ]


def _replace(
    emitter: Emitter,
    members: Sequence[Collective],
    outputs: Sequence[fx.Node],
    start: fx.Node,
    wait: fx.Node,
) -> dict[fx.Node, fx.Node]:
    """Hands the members' uses over and erases their starts and waits.

    A view between start and wait stays, now reading the finished result.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for member, output in zip(members, outputs, strict=True):
        emitter.replace(member.start, output)
        for old_wait in member.waits:
            source = wait_source(old_wait)
            assert source is not None and (source is output or is_view(source))
            emitter.replace(old_wait, source)
            emitter.erase([old_wait])
            replaced[old_wait] = wait
        replaced[member.start] = start
        emitter.erase([member.start])
    return replaced
