"""What a plan reads beside the graph's code, as digests for torch's cache keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import stays_in_node
from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import registered_ranks
from torch_patches._inductor.fx_passes.comm_overlap.notices import (
    RANK_LOCAL_ERRORS,
    raise_if_strict,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.plan import RecordedInput
from torch_patches._inductor.fx_passes.comm_overlap.sources import unshared_digest


def _process_group_sizes() -> list[tuple[str, int]]:
    """Sizes of the registered process groups, by name; empty without torch.distributed."""
    try:
        from torch.distributed import distributed_c10d

        names = distributed_c10d._world.pg_names
    except (ImportError, AttributeError):
        return []
    return sorted(
        (str(name), int(group.size()))
        for group, name in list(names.items())
        if hasattr(group, "size")  # a placeholder stands for groups this rank is not in
    )


def _groups_within_nodes(gpus_per_node: int) -> list[tuple[str, bool]]:
    """Which of the registered groups lie within nodes, by name."""
    found = [(name, registered_ranks(name)) for name, _ in _process_group_sizes()]
    return [(name, stays_in_node(ranks or (), gpus_per_node)) for name, ranks in found]


def _names(model: Any) -> Iterator[str]:
    """Parameter and module names of the graph that Dynamo made, in graph order."""
    if not isinstance(model, fx.GraphModule):
        if isinstance(model, torch.nn.Module):
            yield from (name for name, _ in model.named_parameters())
        return
    for node in model.graph.nodes:
        source = getattr(node, "_dynamo_source", None)
        if source is not None:
            yield f"{node.op} {source.name}"
        # The keys are object ids, which differ between processes; the names do not.
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            yield f"module {path} {getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"
        custom = node.meta.get("custom")
        if isinstance(custom, Mapping) and "module_fqn" in custom:
            yield f"module_fqn {custom['module_fqn']}"


def inputs_digest(recorded: Sequence[RecordedInput], reads_names: bool = False) -> str:
    """Digest of what tags take from the inputs to decide: their kinds and where their gradients are,
    in order; and the names and the order of registration where those decide."""
    facts = [
        (
            record.kind.value,
            record.gradient_outputs,
            record.gradient_inputs,
            *((record.name, record.index) if reads_names else ()),
        )
        for record in recorded
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def metadata_digest(model: Any, options: Options, recorded: Sequence[RecordedInput] = ()) -> str:
    """Digest of the facts beside the graph's code that decide a plan; one that no other compile has
    where the model cannot be read."""
    try:
        return _digest_of_facts(model, options, recorded)
    except RANK_LOCAL_ERRORS:
        raise
    except Exception as error:
        raise_if_strict(error)
        return unshared_digest()


def _digest_of_facts(model: Any, options: Options, recorded: Sequence[RecordedInput]) -> str:
    digest = hashlib.sha256(repr(_process_group_sizes()).encode())
    if options.copy_engine_gathers:
        digest.update(repr(_groups_within_nodes(options.gpus_per_node)).encode())
    digest.update(inputs_digest(recorded, options.reads_modules).encode())
    if options.groups is not None:
        digest.update(repr(options.groups).encode())
    if options.reads_modules:
        for name in _names(model):
            digest.update(repr(name).encode())
    return digest.hexdigest()
