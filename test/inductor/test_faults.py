"""Something fails while a graph is handled: the graph stays as it was, or is changed as on all ranks.

A seeded sample of the functions that the passes call; ``tools/inject_faults.py`` lets all of them
fail.  What the hook does around the passes fails in real compiles, at the end of this file.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from torch_patches import _cache_facts, config, mesh_groups
from torch_patches._inductor.fx_passes.comm_overlap import changing, module_names, notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph.control import (
    insert_overlap_dependencies,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.fault_check import (
    CASES,
    FaultError,
    outcome_of_fault,
    training_step,
    warnings_of_passes,
)
from torch_patches.testing.faults import FaultPlace, description, failing, places_of

PREFIX = config.PREFIX
#: Of the functions that run in one case; most of them run in the others too.
SAMPLE = 12
#: Always among the places: a rewrite that ends half way.
REWRITING = (
    "node.py:prepend",
    "graph.py:create_node",
    "graph.py:erase_node",
    "rewrite.py:apply_plan",
)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user's process does: no strict mode."""
    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_anywhere_does_no_harm(name: str) -> None:
    random, case = Random(name), CASES[name]
    places = case.places()
    chosen = random.sample(places, SAMPLE) + [p for p in places if p.name in REWRITING]
    outcomes = []
    for place in chosen:
        error = random.choice([KeyError("put in"), KeyError("put in"), MemoryError("put in")])
        call = random.randint(1, place.calls)
        outcomes.append(outcome_of_fault(case, place, call, error))
    assert outcomes.count("untouched") > 3


def test_the_graph_of_the_faults_is_changed_in_every_way() -> None:
    plain = description(training_step())
    results = {name: case.run() for name, case in CASES.items()}
    assert all(description(gm) != plain for gm in results.values())
    targets = {name: [str(n.target) for n in gm.graph.nodes] for name, gm in results.items()}
    assert any("coalesced" in target for target in targets["topo_span"])
    assert any("control_deps" in target for target in targets["transformer_block"])
    fused, bucketed = CASES["fused"].results
    assert len(fused) != len(bucketed)


@pytest.mark.usefixtures("lenient")
def test_harm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the way back, a rewrite that ends half way leaves half a rewrite."""
    case = CASES["topo_span"]
    (place,) = [p for p in case.places() if p.name == "graph.py:erase_node"]
    assert outcome_of_fault(case, place, 1, KeyError("put in")) == "untouched"
    monkeypatch.setattr(Snapshot, "restore", lambda self: None)
    with pytest.raises(FaultError, match="half changed"):
        outcome_of_fault(case, place, 1, KeyError("put in"))


def test_a_node_that_was_made_and_not_put_into_the_graph_is_no_user() -> None:
    """``create_node`` first makes a node, which is then known to what it reads."""
    gm = training_step()
    before = description(gm)
    snapshot = Snapshot(gm.graph)
    reader = next(n for n in gm.graph.nodes if n.op == "call_function")

    def make() -> None:
        gm.graph.call_function(torch.neg, (reader,))

    insert = gm.graph._insert
    gm.graph._insert = lambda node: 1 / 0
    with pytest.raises(ZeroDivisionError):
        make()
    gm.graph._insert = insert
    snapshot.restore()
    gm.recompile()
    assert description(gm) == before


def test_submodules_of_control_dependencies_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert_and_fail(*arguments: object) -> int:
        assert insert_overlap_dependencies(*arguments) > 0  # type: ignore[arg-type]
        raise KeyError("put in")

    gm = training_step()
    before = description(gm)
    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    monkeypatch.setattr(changing, "insert_overlap_dependencies", insert_and_fail)
    pipeline.run_post_grad(gm.graph, CASES["transformer_block"].options)
    gm.recompile()
    assert description(gm) == before


# -- around the passes ----------------------------------------------------------------------------


def fail(*arguments: object, **keywords: object) -> None:
    raise KeyError("put in")


AROUND = {
    "which tags there are": (pipeline, "is_tagged", "topo_span"),
    "the digest of tags": (pipeline, "collective_kind", "topo_span"),
    "names for the key": (_cache_facts, "_names", "transformer_block"),
    "names of modules": (module_names, "read_model_modules", "transformer_block"),
    "meshes": (mesh_groups, "_meshes_of", "topo_span"),
    "descriptors": (pipeline, "record_inputs", "topo_span"),
    "tags": (pipeline, "tag_graph", "topo_span"),
}


@pytest.mark.usefixtures("lenient", "fresh_inductor_cache")
@pytest.mark.parametrize("what", AROUND)
def test_a_compile_goes_on_where_something_around_the_passes_fails(
    monkeypatch: pytest.MonkeyPatch, mesh: object, what: str
) -> None:
    module, name, mode = AROUND[what]
    called: list[int] = []
    monkeypatch.setattr(module, name, lambda *args, **kwargs: (called.append(1), fail()))
    weight = torch.nn.Parameter(torch.eye(4))
    x = torch.ones(4, 4)
    flags = {PREFIX + "bucketing_mode": mode, PREFIX + "fuse_chained_all_gathers": True}
    with inductor_config.patch(flags), warnings_of_passes():
        result = torch.compile(lambda x: x @ weight)(x)
        result.sum().backward()
    assert called
    torch.testing.assert_close(result.detach(), x)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("error", [OSError("disk"), MemoryError(), RecursionError()])
def test_a_cause_local_to_a_rank_raises_there_too(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail_here(*arguments: object, **keywords: object) -> None:
        raise error

    gm = training_step()
    for module, name in ((pipeline, "is_tagged"), (_cache_facts, "_names")):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(module, name, fail_here)
            pipeline.tags_digest(gm)
            _cache_facts.metadata_digest(gm, Options("transformer_block"))


def test_what_cannot_be_read_shares_no_cache_entry(
    monkeypatch: pytest.MonkeyPatch, lenient: None
) -> None:
    gm = training_step()
    assert pipeline.tags_digest(gm) == pipeline.tags_digest(gm)
    monkeypatch.setattr(pipeline, "collective_kind", fail)
    monkeypatch.setattr(_cache_facts, "_names", fail)
    assert pipeline.tags_digest(gm) != pipeline.tags_digest(gm)
    facts = [_cache_facts.metadata_digest(gm, Options("transformer_block")) for _ in range(2)]
    assert facts[0] != facts[1]


# -- the instrument -------------------------------------------------------------------------------


def test_a_place_fails_at_the_call_that_was_asked_for() -> None:
    case = CASES["topo_span"]
    (place,) = [p for p in places_of(case.run) if p.name == "graph.py:create_node"]
    assert place.calls > 2
    gm = training_step()

    def nodes_at_failure(call: int) -> int:
        made: list[fx.Node] = []
        original = gm.graph.create_node

        def create_node(*arguments: object, **keywords: object) -> fx.Node:
            made.append(original(*arguments, **keywords))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gm.graph, "create_node", create_node)
            with failing(FaultPlace(place.code, place.name, place.calls), call, KeyError("put in")):
                try:
                    changing.change_graph(gm.graph, case.options, estimated=False)
                except KeyError:
                    return len(made)
        return -1

    first, second = nodes_at_failure(1), nodes_at_failure(2)
    assert (first, second) == (0, 1)
