"""Which module bucket each collective belongs to.

    stacks and parameter names -> a plan (found, or the user's) -> label of each collective

A collective belongs to the module that uses it, the innermost one that the plan names; where the plan
names none of those, to the entry that names its parameter (a head that is used inside the loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_patches._inductor.fx_passes.comm_overlap.graph.modules import (
    ModuleScope,
    clean_parameter_name,
    read_module_stacks,
    read_node_stacks,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import ModulePlanEntries, Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.blocks import Owner, find_blocks
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlan,
    check_overlap_names,
    parse_plan,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective, Skeleton, Traffic


@dataclass(frozen=True, eq=False)
class ModuleLabels:
    """The buckets of a graph by name.

    Args:
        entries: the plan, in the form of ``module_bucket_plans``.
        of: index of a collective -> label of its bucket; only those that the plan covers.
        owners: index -> its parameter's name, else the module that uses it, for people.
        found: what was found, for the log; empty where the user gave the plan.
        unmatched: sentences on entries that match nothing.
    """

    entries: ModulePlanEntries
    of: Mapping[int, str]
    owners: Mapping[int, str]
    found: str = ""
    unmatched: tuple[str, ...] = ()


def label_collectives(skeleton: Skeleton, options: Options) -> ModuleLabels:
    """Labels of all parameter and gradient collectives.  Linear in them.

    Raises:
        ModulePlanError: entries that match one parameter twice, or nothing at all; unknown names in
            ``module_overlap_with``.
        ModuleStackError: ``module_stack_fn`` failed.
    """
    stacks = read_module_stacks(skeleton, options.module_stack_fn)
    carried = [c for c in skeleton.collectives if c.traffic is not Traffic.OTHER]
    names = {c.index: _parameter(c) for c in carried}
    found, unmatched = "", list[str]()
    if options.bucketing_mode == "transformer_block":
        owners = [Owner(stacks.get(c.index, ()), names[c.index]) for c in carried]
        backward = [c.backward for c in carried]
        blocks = find_blocks(owners, backward=True if backward and all(backward) else None)
        plan, found = parse_plan(blocks.plan) if blocks.plan else None, blocks.describe()
    else:
        plan = parse_plan(options.module_bucket_plans)
        if not options.module_names_checked:
            unmatched = _check(plan, skeleton, names, options)
    labels: dict[int, str] = {}
    if plan is not None:
        for collective in carried:
            stack = stacks.get(collective.index, ())
            label = _label(plan, stack, names[collective.index])
            if label is not None:
                labels[collective.index] = label
    unmatched += _check_overlap(skeleton, labels, options)
    return ModuleLabels(
        entries=plan.entries if plan is not None else (),
        of=labels,
        owners={c.index: _owner(names[c.index], stacks.get(c.index, ())) for c in carried},
        found=found,
        unmatched=tuple(unmatched),
    )


def uncovered_owners(collectives: Sequence[Collective], labels: ModuleLabels) -> list[str]:
    """Parameters, or modules, of collectives that no entry covers; for the warning."""
    names = {
        labels.owners.get(c.index) or c.start.name: None
        for c in collectives
        if c.traffic is not Traffic.OTHER and c.index not in labels.of
    }
    return list(names)


def _parameter(collective: Collective) -> str | None:
    tag = collective.tag
    return clean_parameter_name(tag.parameter) if tag is not None and tag.parameter else None


def _owner(parameter: str | None, stack: Sequence[ModuleScope]) -> str:
    if parameter is not None:
        return parameter
    return stack[-1].path if stack else ""


def _label(plan: ModulePlan, stack: Sequence[ModuleScope], parameter: str | None) -> str | None:
    for scope in reversed(stack):
        labels = (plan.bucket_of(name) for name in scope.names)
        if (label := next((found for found in labels if found is not None), None)) is not None:
            return label
    return plan.bucket_of(parameter) if parameter is not None else None


def _check(
    plan: ModulePlan,
    skeleton: Skeleton,
    names: Mapping[int, str | None],
    options: Options,
) -> list[str]:
    """Against the names of this graph: all there is where nobody has seen the model."""
    parameters = list(dict.fromkeys(name for name in names.values() if name is not None))
    modules = _modules(skeleton, options)
    if not parameters and not modules:
        return []
    return plan.check(parameters, modules, options.module_plan_unmatched)


def _modules(skeleton: Skeleton, options: Options) -> list[str]:
    """Paths of all modules of the graph."""
    if not skeleton.collectives:
        return []
    graph = skeleton.collectives[0].start.graph
    stacks = read_node_stacks(skeleton, graph.nodes, options.module_stack_fn)
    scopes = (scope for stack in stacks.values() for scope in stack)
    return list({name: None for scope in scopes for name in scope.names})


def _check_overlap(skeleton: Skeleton, labels: Mapping[int, str], options: Options) -> list[str]:
    """Of blocks that were found, only the graph itself knows the buckets; and it may know a part of
    them, so a compile only warns."""
    found = options.bucketing_mode == "transformer_block"
    if not options.module_overlap_with or (options.module_names_checked and not found):
        return []
    unmatched = "warn" if options.module_names_checked else options.module_plan_unmatched
    buckets = list(dict.fromkeys(labels.values()))
    modules = _modules(skeleton, options)
    return check_overlap_names(dict(options.module_overlap_with), buckets, modules, unmatched)
