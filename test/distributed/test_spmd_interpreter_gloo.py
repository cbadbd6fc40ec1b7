"""The SPMD interpreter against torch itself: four gloo processes, and LocalTensorMode.

The four ranks are a 2x2 mesh, and most graphs run in its rows. Two ranks may reduce arbitrary
floats, because a + b == b + a; other payloads are small integers, exact in every order.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.multiprocessing as mp
import torch.utils._pytree as pytree
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches import _compat
from torch_patches.testing._handmade_graph import Build, handmade, started, wait
from torch_patches.testing.spmd_interpreter import (
    SpmdInterpreter,
    expand_group,
    mesh_groups,
    random_inputs,
    run_spmd,
)

C = torch.ops._c10d_functional
LEGACY = torch.ops.c10d_functional
aten = torch.ops.aten
WATCHDOG_S = 120
MESH = mesh_groups((2, 2), {"row": (1,), "col": (0,)})


def payload(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers in [0, 16), exact in every dtype and in every product of four."""
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def noise(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))


def coalesced(op: Any, *rest: Any) -> Build:
    """x -> [wait(op([x, x.t() * 3], *rest)[i]) for i in (0, 1)]"""

    def build(call: Any, x: fx.Node) -> Any:
        second = call(aten.mul.Tensor, call(aten.t, x), 3)
        if not _compat.sends_strided_payloads():
            second = call(aten.clone, second, memory_format=torch.contiguous_format)
        many = call(op, [call(aten.clone, x), second], *rest)
        return [wait(call, call(operator.getitem, many, i)) for i in (0, 1)]

    return build


def into(op: Any, *rest: Any, rows: float) -> Build:
    """x -> wait(op(x, *rest, out=a new buffer)), whose rows are `rows` times those of x"""

    def build(call: Any, x: fx.Node) -> Any:
        repeated = call(aten.repeat, x, [2, 1]) if rows > 1 else x
        buffer = call(aten.clone, call(aten.slice.Tensor, repeated, 0, 0, int(4 * rows)))
        return wait(call, call(op, x, *rest, out=buffer))

    return build


def uneven(call: Any, x: fx.Node, *splits: fx.Node) -> Any:
    return wait(call, call(C.all_to_all_single, x, list(splits[:2]), list(splits[2:]), "row"))


def in_place(op: Any, *rest: Any) -> Build:
    return lambda call, x: wait(call, call(op, call(aten.clone, x), *rest))


def one_input(ranks: list[int]) -> dict[str, Build]:
    """Graphs with one (4, 4) input, over the row `ranks` of the mesh."""
    return {
        "all_gather": started(C.all_gather_into_tensor, 2, "row"),
        "all_gather_out": into(C.all_gather_into_tensor_out, 2, "row", rows=2),
        "all_gather_coalesced": coalesced(C.all_gather_into_tensor_coalesced, 2, "row"),
        "reduce_scatter_out": into(C.reduce_scatter_tensor_out, "sum", 2, "row", rows=0.5),
        "reduce_scatter_coalesced": coalesced(C.reduce_scatter_tensor_coalesced, "avg", 2, "row"),
        "all_reduce_": in_place(C.all_reduce_, "sum", "row"),
        "all_reduce_coalesced": coalesced(C.all_reduce_coalesced, "sum", "row"),
        "all_reduce_coalesced_": coalesced(C.all_reduce_coalesced_, "max", "row"),
        "all_to_all": started(C.all_to_all_single, [2, 2], [2, 2], "row"),
        "broadcast": started(C.broadcast, 1, "row"),
        "broadcast_column": started(C.broadcast, 1, "col"),
        "broadcast_": in_place(C.broadcast_, 1, "row"),
        "legacy_all_gather": started(LEGACY.all_gather_into_tensor, "", ranks, 2),
        "legacy_reduce_scatter": started(LEGACY.reduce_scatter_tensor, "sum", "", ranks, 2),
        "legacy_all_to_all": started(LEGACY.all_to_all_single, None, None, "", ranks, 2),
    } | {
        f"{name}_{reduce_op}": started(op, reduce_op, *rest)
        for name, op, rest in (
            ("all_reduce", C.all_reduce, ("row",)),
            ("reduce_scatter", C.reduce_scatter_tensor, (2, "row")),
        )
        for reduce_op in ("sum", "avg", "product", "min", "max")
    }


# Eager torch returns contiguous tensors here, its meta kernels do not.
EAGER_STRIDES_DIFFER = ("all_reduce_coalesced", "broadcast transposed", "broadcast_column")
Case = tuple[fx.GraphModule, list[list[Any]]]


def all_cases(ranks: list[int]) -> dict[str, Case]:
    """Every graph with contiguous, transposed, bf16 and arbitrary float payloads, by name."""
    cases = {"sub_mesh": (handmade(1, sub_mesh), [[payload(r, 4, 4)] for r in range(4)])}
    for name, build in one_input(ranks).items():
        gm = handmade(1, build)
        cases[name] = gm, [[payload(r, 4, 4)] for r in range(4)]
        if _compat.sends_strided_payloads():
            cases[f"{name} transposed"] = gm, [[payload(r, 4, 4).t()] for r in range(4)]
        cases[f"{name} bf16"] = gm, [[payload(r, 4, 4, dtype=torch.bfloat16)] for r in range(4)]
        cases[f"{name} noise"] = gm, [[noise(r, 4, 4)] for r in range(4)]
    for name, rows in {"uneven": [[1, 3], [2, 2]], "zero splits": [[0, 4], [0, 4]]}.items():
        receives = [list(column) for column in zip(*rows, strict=True)]
        inputs = [[payload(r, 4, 2), *receives[r % 2], *rows[r % 2]] for r in range(4)]
        cases[f"all_to_all {name}"] = handmade(5, uneven), inputs
    return cases


def sub_mesh(call: Any, x: fx.Node) -> Any:
    """Gather along a row, reduce along a column, and the rest over both."""
    gathered = wait(call, call(C.all_gather_into_tensor, x, 2, "row"))
    scattered = wait(call, call(C.reduce_scatter_tensor, gathered, "sum", 2, "col"))
    reduced = wait(call, call(C.all_reduce, scattered, "max", "row"))
    exchanged = wait(call, call(C.all_to_all_single, x, [2, 2], [2, 2], "col"))
    return [gathered, scattered, reduced, exchanged]


# ---------------------------------------------------------------- real processes


def renamed(gm: fx.GraphModule, names: dict[str, str]) -> fx.GraphModule:
    """The same graph with the names that the process groups have here."""
    for node in gm.graph.nodes:
        node.args = fx.node.map_aggregate(
            node.args, lambda a: names.get(a, a) if isinstance(a, str) else a
        )
    gm.recompile()
    return gm


def worker(rank: int, folder: str) -> None:
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4
    )
    names, ranks = {}, {}
    for name, partition in MESH.items():  # every rank makes every group, in this order
        for members in partition:
            group = dist.new_group(members)
            if rank in members:
                names[name], ranks[name] = group.group_name, members
    results = {
        case: renamed(gm, names)(*inputs[rank])
        for case, (gm, inputs) in all_cases(ranks["row"]).items()
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gloo_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank's results by case; kills the processes when they take too long."""
    folder = tmp_path_factory.mktemp("gloo")
    # One server imports torch and this package, and forks the ranks before they start threads.
    mp.set_forkserver_preload(["torch_patches.testing.spmd_interpreter"])
    processes = mp.start_processes(
        worker, args=(str(folder),), nprocs=4, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + WATCHDOG_S
    try:
        while not processes.join(timeout=1):
            if time.monotonic() > deadline:
                pytest.fail(f"gloo processes did not end within {WATCHDOG_S} s")
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def assert_same(case: str, ours: Any, theirs: Any) -> None:
    """Bitwise, with shape, dtype and strides."""
    ours, theirs = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert [t is None for t in ours] == [t is None for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        if a is None:  # a mesh, or an input without gradient
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a, b), f"{a}\n{b}"
        if not case.startswith(EAGER_STRIDES_DIFFER):
            assert a.stride() == b.stride()


CASES = all_cases([0, 1])


@pytest.mark.parametrize("case", CASES)
def test_gloo_gets_the_same_bits(case: str, gloo_results: list[dict[str, Any]]) -> None:
    gm, inputs = CASES[case]
    for rank, ours in enumerate(run_spmd(gm, inputs, MESH)):
        assert_same(case, ours, gloo_results[rank][case])


# ---------------------------------------------------------------- LocalTensorMode


@pytest.fixture
def fake_world() -> Iterator[dict[str, str]]:
    """A fake group of four, rank 0, with the groups of a 2x2 mesh; name -> torch's name."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("col", "row"))
    names = {name: mesh.get_group(name).group_name for name in ("row", "col")}
    yield names | {"all": dist.group.WORLD.group_name}
    dist.destroy_process_group()


def run_local_tensor(gm: fx.GraphModule, inputs: list[list[Any]]) -> list[Any]:
    """Each rank's output of the graph run once on tensors that stand for all ranks.

    No broadcast: LocalTensorMode takes `src` for a global rank, gloo for a rank of the group.
    """
    with LocalTensorMode(len(inputs)):
        columns = [dict(enumerate(c)) for c in zip(*inputs, strict=True)]
        args = [LocalTensor(c) if isinstance(c[0], torch.Tensor) else c[0] for c in columns]
        output = gm(*args)
    return [
        pytree.tree_map_only(LocalTensor, lambda t, rank=rank: t._local_tensors[rank], output)
        for rank in range(len(inputs))
    ]


LOCAL_CASES: dict[str, Build] = {
    "sub_mesh": sub_mesh,
    "all_gather": started(C.all_gather_into_tensor, 4, "all"),
    "all_to_all": started(C.all_to_all_single, [1] * 4, [1] * 4, "all"),
} | {
    f"{name}_{reduce_op}": started(op, reduce_op, *rest)
    for name, op, rest in (
        ("all_reduce", C.all_reduce, ("all",)),
        ("reduce_scatter", C.reduce_scatter_tensor, (4, "all")),
    )
    for reduce_op in ("sum", "avg", "product", "min", "max")
}


@pytest.mark.parametrize("case", LOCAL_CASES)
def test_local_tensor_mode_gets_the_same_bits(case: str, fake_world: dict[str, str]) -> None:
    inputs = [[noise(r, 4, 4)] for r in range(4)]
    groups = MESH | {"all": [[0, 1, 2, 3]]}
    ours = run_spmd(handmade(1, LOCAL_CASES[case]), inputs, groups)
    theirs = run_local_tensor(renamed(handmade(1, LOCAL_CASES[case]), fake_world), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(case, a, b)


def capture_hsdp(mesh: dist.DeviceMesh) -> list[fx.GraphModule]:
    """Forward and backward of two linear layers whose weights are DTensors, HSDP by hand.

    Each weight: gather over "row", its gradient: all-reduce over "col", scatter over "row".
    """
    shard, full = (Replicate(), Shard(0)), (Replicate(), Replicate())
    weights = [
        torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, shard))
        for shape in ((8, 4), (4, 8))
    ]
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def loss(x: torch.Tensor, *weights: DTensor) -> torch.Tensor:
        for w in weights:
            gathered = w.redistribute(placements=full)
            local = gathered.to_local(grad_placements=(Partial(), Partial()))
            x = torch.nn.functional.linear(x, local).relu()
        return x.sum()

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(loss, fullgraph=True, backend=backend)(torch.zeros(3, 4), *weights).backward()
    torch._dynamo.reset()
    return graphs


def test_captured_dtensor_graphs_get_the_same_bits(fake_world: dict[str, str]) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("col", "row"))
    groups = {}
    for name, partition in MESH.items():
        group = mesh.get_group(name)
        groups[group.group_name] = expand_group(dist.get_process_group_ranks(group), 4)
        assert groups[group.group_name] == partition
    forward, backward = capture_hsdp(mesh)
    for gm, launches in ((forward, 2), (backward, 4)):
        inputs = random_inputs(gm, 4, seed=1)
        interpreter = SpmdInterpreter(gm, groups, 4)
        ours, theirs = interpreter.run(inputs), run_local_tensor(gm, inputs)
        assert [len(events) for events in interpreter.events] == [launches] * 4
        for a, b in zip(ours, theirs, strict=True):
            assert_same("", a, b)
