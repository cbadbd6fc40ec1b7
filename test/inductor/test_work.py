"""Work is near-linear, and equal on ranks that differ only in names, views and hash seeds."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate import shards
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.graph.contraction import contract
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import tensors_of
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.buckets import Merger
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import (
    greedy_buckets,
    plan_topo_span,
)
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.plan import Collective
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.graph_builder import GraphBuilder
from torch_patches.testing.synthetic import training_graph


@pytest.mark.parametrize("form", ["default", "coalesced"])
def test_operations_grow_linearly(form):
    def operations(layers):
        options = Options("topo_span", bucket_mode=form, max_topo_span=120)
        return optimize_graph(training_graph(layers), options).operations

    small = operations(12)
    assert small > 0
    assert operations(24) <= 2 * small * 1.1


UNBOUND = Options("topo_span", max_topo_span=None, bucket_cap_mb=100.0)


@pytest.mark.parametrize("form", ["default", "coalesced"])
def test_operations_grow_linearly_where_large_buckets_are_chained(form):
    """x_i -> AR of one group -> W -> AR of another -> W: each of these looks back at a set."""

    def operations(count):
        b = GraphBuilder()
        inner = [b.reduce_and_wait(b.placeholder(4), "sum", "a") for _ in range(count)]
        gm = b.output(*[b.reduce_and_wait(x, "sum", "b") for x in inner])
        skeleton = collect(gm.graph)
        options = dataclasses.replace(UNBOUND, bucket_mode=form)
        plan = plan_topo_span(skeleton, contract(gm.graph, skeleton), options)
        assert [len(bucket.members) for bucket in plan.buckets] == [count, count]
        return plan.operations

    assert operations(400) <= 4 * operations(100) * 1.1


def test_a_node_with_many_inputs_costs_its_users_little():
    """x_i -> AR -> W -> cat -> count times AR -> W: each of the latter looks back at the cat."""

    def operations(count):
        b = GraphBuilder()
        inputs = [b.reduce_and_wait(b.placeholder(4), "sum", "a") for _ in range(count)]
        hub = b.call(torch.ops.aten.cat, inputs)
        gm = b.output(*[b.reduce_and_wait(hub, "sum", "dp") for _ in range(count)])
        skeleton = collect(gm.graph)
        users = skeleton.collectives[count:]
        return greedy_buckets(users, Merger(contract(gm.graph, skeleton)), UNBOUND).operations

    assert operations(400) <= 4 * operations(100) * 1.1


class _Watched(Collective):
    """Counts how often its fences are looked at."""

    reads = 0

    def __getattribute__(self, name):
        if name == "wait_segment":
            _Watched.reads += 1
        return super().__getattribute__(name)


def test_looks_at_fences_grow_linearly_on_a_dependent_chain():
    """x -> AR -> W -> mm -> AR -> W -> mm -> ...: each bucket closes with one member."""

    def reads(count):
        b = GraphBuilder()
        x = b.placeholder(4, 4)
        for _ in range(count):
            x = b.reduce_and_wait(b.call(torch.ops.aten.mm, x, x), "sum", "dp")
        gm = b.output(x)
        skeleton = collect(gm.graph)
        watched = [_Watched(**vars(c)) for c in skeleton.collectives]
        _Watched.reads = 0
        plan = greedy_buckets(watched, Merger(contract(gm.graph, skeleton)), UNBOUND)
        assert plan.buckets == () and len(plan.refusals) == count
        return _Watched.reads

    assert reads(800) <= 2 * reads(400) * 1.2


SCRIPT = """
from torch_patches._inductor.fx_passes.comm_overlap.pipeline import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.options import (Options)
from torch_patches.testing.synthetic import training_graph
gm = training_graph(3)
for i, node in enumerate(gm.graph.nodes):
    node.name = f"{prefix}{{i}}"
report = optimize_graph(gm, Options("topo_span", bucket_cap_mb=2e-4, max_topo_span=120))
print(report.schedule_hash, [str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
"""


def test_plan_does_not_depend_on_hash_seed_or_names():
    outputs = set()
    for seed, prefix in (("0", "a"), ("1", "zz")):
        script = textwrap.dedent(SCRIPT).format(prefix=prefix)
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        outputs.add(result.stdout)
    assert len(outputs) == 1
    assert "coalesced" in outputs.pop()


def test_one_large_bucket_costs_its_members_little(monkeypatch):
    """N casts joined by one node, N gradients returned: each is looked at a few times, not N."""
    looked_at = {"parts": 0, "output": 0}
    elements, replace_all = shards._elements, torch.fx.Node.replace_all_uses_with

    def count_elements(node):
        looked_at["parts"] += len(list(tensors_of(node.meta.get("val"))))
        return elements(node)

    def count_replaced(node, *args, **kwargs):
        looked_at["output"] += any(user.op == "output" for user in node.users)
        return replace_all(node, *args, **kwargs)

    monkeypatch.setattr(shards, "_elements", count_elements)
    monkeypatch.setattr(torch.fx.Node, "replace_all_uses_with", count_replaced)

    def work(layers):
        looked_at["parts"] = 0
        gm = training_graph(layers)
        with as_on_gpu():
            report = optimize_graph(gm, Options("topo_span", max_topo_span=None))
        assert [len(bucket.members) for bucket in report.buckets] == [8 * layers] * 2
        return looked_at["parts"]

    small = work(6)
    assert small > 0
    assert work(24) <= 4 * small * 1.1
    assert looked_at["output"] == 0
