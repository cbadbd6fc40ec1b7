"""Plans from modules: the names for ``module_bucket_plans`` without writing strings.

    dist.module_bucket_plans = torch_patches.plan_from_modules(
        model, [[model.tok_embeddings], *model.layers, [model.norm, model.output]]
    )

Names are those that graphs have: without what torch.compile, activation checkpointing, DDP and
FSDP wrap around a module, and with a parametrized parameter's own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlanError,
    parse_plan,
)

_WRAPPER_KEYS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""torch.compile, activation checkpointing and offloading, FSDP1."""

_EXAMPLE = "[[model.tok_embeddings], *model.layers, [model.norm, model.output]]"

_ORIGINAL = re.compile(r"original[0-9]*")
"""What a parametrization calls the parameter, or each of several, that it computes from."""

Owned = nn.Module | nn.Parameter


def plan_from_modules(model: nn.Module, plan: Iterable[Any]) -> list[list[str] | str]:
    """Names for a plan of modules.

    Args:
        model: the model, wrapped (torch.compile, DDP, FSDP, checkpointing) or not.
        plan: modules of the model: each makes one bucket, a list of them one together.  A parameter
            of the model or a name, which may be a pattern, may stand for a module anywhere.  Other
            iterables, such as ``model.layers.values()``, work like lists; sets and mappings do not,
            since their order or their items are not what was meant.

    Returns:
        A plan for ``module_bucket_plans``, in the same order.  A module or parameter that the model
        has under several names has the first.

    Raises:
        ModulePlanError: ``model`` or an item is of another type; an item is not in the model, or the
            model itself, or stands twice; its name cannot be written in a plan; or
            :func:`parse_plan` refuses the result.
    """
    if not isinstance(model, nn.Module):
        raise ModulePlanError(
            f"plan_from_modules(model, plan): model is a torch.nn.Module, not {_type(model)}"
        )
    if not _is_list_like(plan):
        raise ModulePlanError(
            f"plan_from_modules(model, plan): plan is a list, like {_EXAMPLE}, not {_type(plan)}"
        )
    names = _Names(model)
    entries: list[list[str] | str] = []
    for number, entry in enumerate(plan):
        if _is_list_like(entry):
            entries.append([names.of(item, number) for item in entry])
        else:
            entries.append(names.of(entry, number))
    parse_plan(entries)
    return entries


class _Names:
    """The first name of each module and parameter of a model."""

    def __init__(self, model: nn.Module) -> None:
        # By id: tensors compare by value.  The caller's model keeps all of them alive.
        self._by_id: dict[int, str] = {}
        for owned, path in _walk(model, (), set()):
            self._by_id.setdefault(id(owned), _name(path))
        self._entry_of: dict[str, int] = {}

    def of(self, item: object, entry: int) -> str:
        """The name for an item of entry number ``entry``, counted from 0."""
        if isinstance(item, str):
            return item
        where = f"entry {entry} of the plan"
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise ModulePlanError(
                f"{where} has {_type(item)}; allowed are modules and parameters of the model, names, "
                f"and lists of these, like {_EXAMPLE}"
            )
        name = self._find(item)
        if name is None:
            raise ModulePlanError(f"{where} has {_type(item)} that is not in the model")
        if not name:
            raise ModulePlanError(
                f"{where} is the model itself, which would be one bucket of everything; "
                f"give its parts, like {_EXAMPLE}"
            )
        if any(mark in name for mark in "*[]"):
            raise ModulePlanError(
                f"{where}: {name!r} cannot be written in a plan, where '*', '[' and ']' are wildcards"
            )
        if name in self._entry_of:
            raise ModulePlanError(
                f"{where} repeats {name!r} of entry {self._entry_of[name]}; "
                "a module or parameter may stand once"
            )
        self._entry_of[name] = entry
        return name

    def _find(self, item: Owned) -> str | None:
        """Its name, or that of what it wraps; None if the model has neither."""
        wrapped: Owned | None = item
        while wrapped is not None:
            if id(wrapped) in self._by_id:
                return self._by_id[id(wrapped)]
            wrapped = _inside(wrapped)
        return None


def _walk(
    module: nn.Module, path: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[Owned, tuple[str, ...]]]:
    """A module and all that it holds, with their paths, in the order of ``named_modules``."""
    if id(module) in seen:  # a shared module; what it holds has its names already
        return
    seen.add(id(module))
    yield module, path
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield parameter, (*path, key)
    for key, child in module._modules.items():
        if child is not None:
            below = path if child is _inside(module) else (*path, key)
            yield from _walk(child, below, seen)


def _name(path: tuple[str, ...]) -> str:
    """``parametrizations.weight`` and ``parametrizations.weight.original`` are ``weight``."""
    parts = list(path)
    if len(parts) >= 3 and parts[-3] == "parametrizations" and _ORIGINAL.fullmatch(parts[-1]):
        parts.pop()
    if len(parts) >= 2 and parts[-2] == "parametrizations":
        del parts[-2]
    return ".".join(parts)


def _inside(item: Owned) -> nn.Module | None:
    """The module that a wrapper holds; None if the item is no wrapper."""
    if not isinstance(item, nn.Module):
        return None
    for key in _WRAPPER_KEYS:
        if item._modules.get(key) is not None:
            return item._modules[key]
    if isinstance(item, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return item.module
    return None


def _is_list_like(value: object) -> bool:
    """Whether it is an iterable of items in an order that the user chose."""
    if isinstance(value, (str, bytes, nn.Module, torch.Tensor, Mapping, Set)):
        return False
    return isinstance(value, Iterable)


def _type(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
