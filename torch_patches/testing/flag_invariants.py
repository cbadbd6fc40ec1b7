"""The invariants under any flags: those of ``invariants``, and what single flags add to them.

    find_violation(gm, description, options)

    fuse_chained_...        the fused chains give the same values (of sums: nearly), and the rest of
                            the pipeline keeps every invariant on the fused graph
    insert_overlap_deps     control dependencies change neither values nor the launch order
    cross_rank_check        another rank, whose graph has other names and views, can apply the plan,
                            and launches the same
    module_plan_unmatched   an entry that matches nothing raises, and the graph is as it was
    a bad estimation        does the same

Letters are those of ``invariants``; "i" is a plan that does not travel, "j" a change by what raised.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random

import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap import changing, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import EstimationError
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlanError
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import schedule_hash
from torch_patches.testing import invariants
from torch_patches.testing.graph_variants import rename
from torch_patches.testing.invariants import (
    InvariantError,
    Outcome,
    check_values,
    execute_input,
    run_strictly,
)
from torch_patches.testing.strategies import Description

#: Sums in another order may round otherwise: bf16 has 8 bits, and some of a graph's ops amplify.
_TOLERANCE = 0.1


def find_violation(
    gm: fx.GraphModule, description: Description, options: Options, *, trusted: bool = False
) -> Outcome:
    """Checks every invariant on copies of ``gm``; raises the first ``InvariantError``.

    Args:
        trusted: the metadata of ``gm`` is known to be right.

    Raises:
        CaseError: the graph is illegal by itself.
    """
    if options.fuses:
        gm = _check_fusion(gm, description, options, trusted)
        trusted = False
    plain = replace(options, insert_overlap_deps=False)
    if plain.bucketing_mode == "none" or _is_refused(gm, plain):
        return Outcome(0, 0, 0.0)
    outcome = invariants.find_violation(gm, description, plain, trusted=trusted)
    if options.insert_overlap_deps:
        _check_control(gm, description, plain)
    if options.cross_rank_check == "agree":
        _check_travel(gm, plain)
    return outcome


def _check_fusion(
    gm: fx.GraphModule, description: Description, options: Options, trusted: bool
) -> fx.GraphModule:
    """The graph with its chains fused."""
    expected = execute_input(gm, description, trusted)
    fused = copy.deepcopy(gm)
    only = replace(options, bucketing_mode="none", insert_overlap_deps=False)
    run_strictly(fused, only)
    sums = options.fuse_chained_reduce_scatters
    check_values(gm, fused, expected, description, _TOLERANCE if sums else None)
    text = str(fused.graph)
    run_strictly(fused, only)
    if str(fused.graph) != text:
        raise InvariantError("e", f"fusing a second time changed the graph:\n{text}\n{fused.graph}")
    return fused


def _is_refused(gm: fx.GraphModule, options: Options) -> bool:
    """A plan of which two entries match one module of this graph, or an entry nothing where that is
    an error: the user's mistakes, which raise and change nothing."""
    if not options.reads_modules:
        return False
    changed = copy.deepcopy(gm)
    try:
        pipeline.run_post_grad(changed.graph, options)
    except ModulePlanError as error:
        if str(changed.graph) != str(gm.graph):
            raise InvariantError("j", f"half done:\n{gm.graph}\n{changed.graph}") from None
        return options.module_plan_unmatched == "error" or "both match" in str(error)
    except Exception:
        return False  # is found again by the other checks
    return False


def _launches(gm: fx.GraphModule) -> str:
    return schedule_hash(collect(gm.graph))


def _check_control(gm: fx.GraphModule, description: Description, plain: Options) -> None:
    """Against the same without control dependencies, which has been checked."""
    free, held = copy.deepcopy(gm), copy.deepcopy(gm)
    run_strictly(free, plain)
    run_strictly(held, replace(plain, insert_overlap_deps=True))
    if _order(free) != _order(held):
        raise InvariantError("k", f"control dependencies changed the launches:\n{held.graph}")
    held.graph.lint()
    check_values(gm, held, invariants.execute(free, description), description)


def _order(gm: fx.GraphModule) -> list[str]:
    """Launches and waits, as both graphs name them."""
    collectives = collect(gm.graph).collectives
    return [f"{c.start.name} {c.kind.value} {c.group} {len(c.waits)}" for c in collectives]


def _check_travel(gm: fx.GraphModule, plain: Options) -> None:
    """A graph whose nodes have other names takes over the plan that was made for this one."""
    here, there = copy.deepcopy(gm), copy.deepcopy(gm)
    rename(there.graph, Random(len(gm.graph.nodes)))
    options = replace(plain, cross_rank_check="off")
    made = changing.change_graph(here.graph, options, False)
    if made is None:
        return
    taken = changing.change_graph(there.graph, options, False, made.plan)
    if taken is None or _launches(there) != _launches(here):
        raise InvariantError("i", f"another rank launches otherwise with the plan:\n{there.graph}")


def check_bad_estimation(gm: fx.GraphModule, options: Options, estimation: object) -> None:
    """It is asked or not; if it is, that raises, and nothing is half done."""
    bad = replace(options, custom_runtime_estimation=estimation, estimation_digest="bad")  # type: ignore[arg-type]
    changed = copy.deepcopy(gm)
    try:
        pipeline.run_post_grad(changed.graph, replace(bad, insert_overlap_deps=False))
    except (EstimationError, ModulePlanError):  # the plan is read first
        if str(changed.graph) != str(gm.graph):
            raise InvariantError("j", f"half done:\n{gm.graph}\n{changed.graph}") from None
    except Exception as error:
        raise InvariantError("j", f"a bad estimation raised {error!r}") from error
    else:
        if options.schedules and collect(gm.graph).collectives:
            raise InvariantError("j", "a bad estimation was accepted")
