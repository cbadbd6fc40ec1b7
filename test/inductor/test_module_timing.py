"""Where module buckets start and are waited for.

In all graphs a matrix product takes 10 ms and a collective 4 ms.  A layer of a forward is two
products with gathered weights.  A layer of a backward is four: gradient, input, gradient, input.
Sketches show starts, first waits and products in their order; the order of products never changes.
"""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx

from torch_patches._inductor.fx_passes.comm_overlap.check import FenceError
from torch_patches._inductor.fx_passes.comm_overlap.passes import schedule
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import ModulePlanError
from torch_patches.testing.effect_ops import barrier
from torch_patches.testing.module_graphs import (
    SIZE,
    ModuleGraph,
    backward,
    forward,
    merged,
    module_of,
    optimized,
    refused,
    sketch,
    tag,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten, c10d = torch.ops.aten, torch.ops._c10d_functional

PREFETCH = {
    0: ["AG layers.0", "W AG layers.0", "mm layers.0 x2",
        "AG layers.1", "W AG layers.1", "mm layers.1 x2",
        "AG layers.2", "W AG layers.2", "mm layers.2 x2",
        "AG layers.3", "W AG layers.3", "mm layers.3 x2"],
    1: ["AG layers.0", "AG layers.1", "W AG layers.0", "mm layers.0 x2",
        "AG layers.2", "W AG layers.1", "mm layers.1 x2",
        "AG layers.3", "W AG layers.2", "mm layers.2 x2",
        "W AG layers.3", "mm layers.3 x2"],
    2: ["AG layers.0", "AG layers.1", "AG layers.2", "W AG layers.0", "mm layers.0 x2",
        "AG layers.3", "W AG layers.1", "mm layers.1 x2",
        "W AG layers.2", "mm layers.2 x2",
        "W AG layers.3", "mm layers.3 x2"],
}  # fmt: skip

DEFERRAL = {
    0: ["mm layers.2 x3", "RS layers.2", "W RS layers.2", "mm layers.2",
        "mm layers.1 x3", "RS layers.1", "W RS layers.1", "mm layers.1",
        "mm layers.0 x3", "RS layers.0", "W RS layers.0", "mm layers.0"],
    1: ["mm layers.2 x3", "RS layers.2", "mm layers.2",
        "mm layers.1 x3", "RS layers.1", "W RS layers.2", "mm layers.1",
        "mm layers.0 x3", "RS layers.0", "W RS layers.1", "mm layers.0", "W RS layers.0"],
    2: ["mm layers.2 x3", "RS layers.2", "mm layers.2",
        "mm layers.1 x3", "RS layers.1", "mm layers.1",
        "mm layers.0 x3", "RS layers.0", "W RS layers.2", "mm layers.0",
        "W RS layers.1", "W RS layers.0"],
}  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetch_depth(depth: int) -> None:
    gm, report = optimized(forward(4), module_prefetch_depth=depth)
    assert sketch(gm, report) == PREFETCH[depth]
    assert report.way == "as asked"


def test_prefetch_hides_all_gathers_but_the_first() -> None:
    """Two products of 10 ms hide 4 ms and some."""
    _, report = optimized(forward(4))
    assert [span.exposed_ms > 0 for span in report.spans] == [True, False, False, False]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_deferral_depth(depth: int) -> None:
    gm, report = optimized(backward(3), module_deferral_depth=depth)
    assert sketch(gm, report) == DEFERRAL[depth]


def test_depths_are_those_of_their_direction() -> None:
    """Gathers one ahead, scatters two behind: neither depth is taken for the other."""
    options = {"module_prefetch_depth": 1, "module_deferral_depth": 2}
    gm, report = optimized(backward(3, regather=True), **options)
    lines = sketch(gm, report, skip=("mm",))
    assert lines == [
        "AG layers.2", "AG layers.1", "W AG layers.2", "RS layers.2",
        "AG layers.0", "W AG layers.1", "RS layers.1",
        "W AG layers.0", "RS layers.0", "W RS layers.2", "W RS layers.1", "W RS layers.0",
    ]  # fmt: skip


def test_blocks_that_were_found_are_placed_alike() -> None:
    gm, report = optimized(forward(4), None)
    assert sketch(gm, report) == PREFETCH[1]


def test_estimates_place_where_overlap_scheduling_is_asked_for() -> None:
    """A gather of 4 ms starts one product of 10 ms ahead of its use, not two."""
    gm, report = optimized(forward(4), enable_overlap_scheduling=True)
    expected = ["AG layers.0", "W AG layers.0"]
    for number in range(3):
        here, following = f"layers.{number}", f"layers.{number + 1}"
        expected += [f"mm {here}", f"AG {following}", f"mm {here}", f"W AG {following}"]
    assert sketch(gm, report) == [*expected, "mm layers.3 x2"]


def test_replicas_are_reduced_behind_their_scatters() -> None:
    """One more module later than the scatters: layers.2's scatter runs under layers.1, its
    all-reduce under layers.0."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved, g = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    out = []
    for number in (2, 1, 0):
        with b.inside(f"layers.{number}"):
            for _ in range(2):
                out.append(b.reduce_and_wait(b.gradient(saved, g), "sum", "replicas"))
                g = b.call(aten.mm, g, saved)
    gm, report = optimized(b.output(g, *out))
    assert sketch(gm, report) == [
        "mm layers.2 x3", "RS layers.2", "mm layers.2",
        "mm layers.1 x3", "RS layers.1", "W RS layers.2", "AR layers.2", "mm layers.1",
        "mm layers.0 x3", "RS layers.0", "W RS layers.1", "AR layers.1", "W AR layers.2",
        "mm layers.0", "W RS layers.0", "AR layers.0", "W AR layers.1", "W AR layers.0",
    ]  # fmt: skip


def test_visits_are_prefetched_in_their_order() -> None:
    """Two microbatches: the second run of layers.0 is gathered under the first of layers.1."""
    b = ModuleGraph()
    shards = {f"layers.{i}": [b.shard(), b.shard()] for i in range(2)}
    out = []
    for _ in range(2):
        h = b.placeholder(SIZE, SIZE)
        for path, (p, q) in shards.items():
            with b.inside(path):
                h = b.use(b.use(h, p), q)
        out.append(h)
    gm, report = optimized(b.output(*out))
    assert sketch(gm, report) == [
        "AG layers.0", "AG layers.1", "W AG layers.0", "mm layers.0 x2",
        "AG layers.0", "W AG layers.1", "mm layers.1 x2",
        "AG layers.1", "W AG layers.0", "mm layers.0 x2",
        "W AG layers.1", "mm layers.1 x2",
    ]  # fmt: skip


def test_all_buckets_of_a_module_start_together() -> None:
    """Experts' weights too, at the first use of anything of the module before."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for number in range(2):
        with b.inside(f"layers.{number}"):
            h = b.layer(h)
            h = b.use(b.use(h, b.shard(), "ep"), b.shard(), "ep")
    gm, report = optimized(b.output(h))
    assert sketch(gm, report) == [
        "AG layers.0 x2", "AG layers.1 x2", "W AG layers.0", "mm layers.0 x2",
        "W AG layers.0", "mm layers.0 x2",
        "W AG layers.1", "mm layers.1 x2", "W AG layers.1", "mm layers.1 x2",
    ]  # fmt: skip


def test_a_side_effect_is_not_crossed() -> None:
    """layers.1 would be gathered at layers.0's first product; the barrier stands behind it."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        h = b.layer(h)
    b.call(barrier, h)
    with b.inside("layers.1"):
        h = b.layer(h)
    gm, _ = optimized(b.output(h))
    nodes = [n.target for n in gm.graph.nodes]
    fence = nodes.index(barrier)
    gathers = [i for i, target in enumerate(nodes) if "all_gather_into_tensor_coal" in str(target)]
    assert [place > fence for place in gathers] == [False, True]


def around_a_barrier() -> fx.GraphModule:
    """layers.1 is gathered in front of a barrier and used behind it."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        h = b.layer(h)
    with b.inside("layers.1"):
        starts = [b.call(c10d.all_gather_into_tensor, b.shard(), 2, "dp") for _ in range(2)]
    b.call(barrier, h)
    with b.inside("layers.1"):
        for start in starts:
            h = b.call(aten.mm, h, b.call(c10d.wait_tensor, start))
    with b.inside("layers.2"):
        h = b.layer(h)
    return b.output(h)


#: layers.2 is wanted first and must stay behind the barrier; layers.1 is wanted where it is used
#: and must stay in front of it.
AGAINST_IT = {"module_prefetch_depth": 0, "module_overlap_with": (("layers.2", "layers.0"),)}


def test_what_is_wanted_first_keeps_no_gather_behind_a_side_effect() -> None:
    gm, report = optimized(around_a_barrier(), **AGAINST_IT)
    nodes = [n.target for n in gm.graph.nodes]
    fence = nodes.index(barrier)
    gathers = [i for i, target in enumerate(nodes) if "all_gather_into_tensor_coal" in str(target)]
    assert [place > fence for place in gathers] == [False, False, True]
    assert report.way == "as asked"


def test_a_schedule_that_crosses_a_side_effect_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that knows no side effects: layers.1 would start behind the barrier."""
    in_order = schedule._Scheduler._queue_place
    monkeypatch.setattr(
        schedule._Scheduler, "_queue_place", lambda self, unit: in_order(self, unit)[1:]
    )
    with pytest.raises(FenceError):
        optimized(around_a_barrier(), **AGAINST_IT)


def test_what_no_entry_covers_starts_where_it_stands() -> None:
    """The head's gathers are in no module bucket: they stay behind layers.1's compute."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    for path in ("layers.0", "layers.1", "head"):
        with b.inside(path):
            h = b.layer(h)
    gm, report = optimized(b.output(h), module_uncovered="leave")
    assert sketch(gm, report) == [
        "AG layers.0", "AG layers.1", "W AG layers.0", "mm layers.0 x2",
        "W AG layers.1", "mm layers.1 x2",
        "AG head", "W AG head", "mm head", "AG head", "W AG head", "mm head",
    ]  # fmt: skip


def test_a_bucket_that_no_entry_covers_starts_where_its_first_member_stands() -> None:
    """One of the head's gathers stands in front of layers.1, the other one behind it."""
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        h = b.layer(h)
    with b.inside("head"):
        early = b.all_gather(b.shard(), 2, "dp")
    with b.inside("layers.1"):
        h = b.layer(h)
    with b.inside("head"):
        late = b.all_gather(b.shard(), 2, "dp")
        h = b.call(aten.mm, h, b.wait(early))
        h = b.call(aten.mm, h, b.wait(late))
    gm, report = optimized(b.output(h), module_uncovered="bucket")
    assert sketch(gm, report) == [
        "AG layers.0", "AG layers.1", "W AG layers.0", "mm layers.0 x2",
        "AG head", "W AG layers.1", "mm layers.1 x2", "W AG head", "mm head x2",
    ]  # fmt: skip


def test_reductions_that_no_entry_covers_are_deferred_one_by_one() -> None:
    gm, report = optimized(backward(2), ("layers.7",), module_plan_unmatched="warn",
                           module_uncovered="leave")  # fmt: skip
    assert sketch(gm, report, skip=("mm",)) == [
        "RS layers.1 x2", "W RS layers.1", "RS layers.0", "W RS layers.1",
        "RS layers.0", "W RS layers.0 x2",
    ]  # fmt: skip


# ------------------------------------------------------------------- module_overlap_with


def named(*paths: str) -> fx.GraphModule:
    """A forward of these modules, of which only two gather."""
    b = ModuleGraph()
    h, square = b.placeholder(SIZE, SIZE), b.placeholder(SIZE, SIZE)
    for path in paths:
        with b.inside(path):
            if path in ("first", "last"):
                h = b.layer(h)
            else:
                h = b.call(aten.mm, b.call(aten.mm, h, square), square)
    return b.output(h)


@pytest.mark.parametrize(
    ("hider", "lines"),
    [
        (None, ["AG last", "W AG first", "mm first x2", "mm x x2", "mm y x2"]),
        ("first", ["AG last", "W AG first", "mm first x2", "mm x x2", "mm y x2"]),
        ("x", ["W AG first", "mm first x2", "AG last", "mm x x2", "mm y x2"]),
        ("y", ["W AG first", "mm first x2", "mm x x2", "AG last", "mm y x2"]),
    ],
)
def test_a_gather_starts_where_the_named_compute_begins(
    hider: str | None, lines: list[str]
) -> None:
    overlap = (("last", hider),) if hider is not None else ()
    gm, report = optimized(
        named("first", "x", "y", "last"), ("first", "last"), module_overlap_with=overlap
    )
    found = sketch(gm, report)
    assert found == ["AG first", *lines, "W AG last", "mm last x2"]


def test_a_gather_may_start_before_the_one_in_front_of_it() -> None:
    """layers.3 under layers.0, two gathers ahead of its turn."""
    gm, report = optimized(forward(4), module_overlap_with=(("layers.3", "layers.0"),))
    lines = sketch(gm, report)
    assert lines.index("AG layers.3") < lines.index("mm layers.0 x2") < lines.index("AG layers.2")


def test_submodules_of_the_named_module_count() -> None:
    gm, report = optimized(
        named("first", "x", "y.inner", "last"),
        ("first", "last"),
        module_overlap_with=(("last", "y"),),
    )
    lines = sketch(gm, report)
    assert lines[lines.index("AG last") + 1] == "mm y.inner x2"


def test_modules_with_longer_names_do_not_count() -> None:
    gm, report = optimized(
        named("first", "yy", "y", "last"), ("first", "last"), module_overlap_with=(("last", "y"),)
    )
    lines = sketch(gm, report)
    assert lines[lines.index("AG last") + 1] == "mm y x2"


def test_a_name_alone_tells_the_modules_above_it() -> None:
    """torchtitan's ``module_fqn`` names the innermost module only."""
    gm = named("first", "x", "y.inner", "last")
    for node in gm.graph.nodes:
        if "nn_module_stack" in node.meta:
            path = module_of(node)
            del node.meta["nn_module_stack"]
            node.meta["custom"] = {"module_fqn": path}
    after, report = optimized(gm, ("first", "last"), module_overlap_with=(("last", "y"),))
    bucket = [n for n in after.graph.nodes if "gather_into_tensor_coal" in str(n.target)][1]
    products = [n for n in after.graph.nodes if n.target is aten.mm.default]
    assert [n < bucket for n in products] == [True] * 4 + [False] * 4
    assert len(report.buckets) == 2


def test_the_latest_run_of_the_named_module_hides_a_gather() -> None:
    """Two microbatches of first, x, last: the second gather of last starts at the second x."""
    b = ModuleGraph()
    square, weights = b.placeholder(SIZE, SIZE), [b.shard(), b.shard()]
    out = []
    for _ in range(2):
        h = b.placeholder(SIZE, SIZE)
        with b.inside("x"):
            h = b.call(aten.mm, h, square)
        with b.inside("last"):
            out.append(b.use(b.use(h, weights[0]), weights[1]))
    gm, report = optimized(b.output(*out), ("last",), module_overlap_with=(("last", "x"),))
    once = ["AG last", "mm x", "W AG last", "mm last x2"]
    assert sketch(gm, report) == [*once, *once]


def test_the_next_run_of_the_named_module_hides_a_reduction() -> None:
    """Two microbatches, y behind x: the first scatter of x is waited for behind the first y."""
    b = ModuleGraph("fwd_nn_module_stack")
    saved = b.placeholder(SIZE, SIZE)
    out = []
    for _ in range(2):
        g = b.placeholder(SIZE, SIZE)
        with b.inside("x"):
            for place in range(2):
                out.append(b.gradient(saved, g))
                tag(out[-1], f"x.w{place}", place, place)
        with b.inside("y"):
            out.append(b.call(aten.mm, b.call(aten.mm, g, saved), saved))
        with b.inside("z"):
            out.append(b.call(aten.mm, g, saved))
    gm, report = optimized(b.output(*out), ("x",), module_overlap_with=(("x", "y"),))
    once = ["mm x x2", "RS x", "mm y x2", "W RS x", "mm z"]
    assert sketch(gm, report) == [*once, *once]


def test_compute_behind_the_use_hides_nothing() -> None:
    """ "y" runs behind "last": the default place remains."""
    gm, report = optimized(
        named("first", "x", "last", "y"), ("first", "last"), module_overlap_with=(("last", "y"),)
    )
    lines = sketch(gm, report)
    assert lines[lines.index("AG last") + 1 :][:2] == ["W AG first", "mm first x2"]


def test_a_reduction_waits_behind_the_named_compute() -> None:
    """layers.2's scatter is waited for behind layers.0, not where layers.1's starts."""
    gm, report = optimized(backward(3), module_overlap_with=(("layers.2", "layers.0"),))
    assert sketch(gm, report) == [
        "mm layers.2 x3", "RS layers.2", "mm layers.2",
        "mm layers.1 x3", "RS layers.1", "mm layers.1",
        "mm layers.0 x3", "RS layers.0", "W RS layers.1", "mm layers.0",
        "W RS layers.2", "W RS layers.0",
    ]  # fmt: skip


@pytest.mark.parametrize("plan", [("layers.*",), None], ids=["modules", "transformer_block"])
@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("layers.7", "layers.0"), "no bucket of this graph is named 'layers.7'"),
        (("layers.1", "head"), "no module of this graph is named 'head'"),
    ],
)
def test_unknown_names_to_overlap_with(
    plan: tuple[str, ...] | None, pair: tuple[str, str], message: str
) -> None:
    with pytest.raises(ModulePlanError, match=message):
        optimized(forward(2), plan, module_overlap_with=(pair,))


# ------------------------------------------------------------------- memory


def peaking() -> fx.GraphModule:
    """layers.0 needs four temporaries of (4, 4) at once: the peak; layers.1 needs little.

    A gather of layers.1 has 64 bytes, as each temporary: prefetched at layers.0's first product,
    both would live beside the temporaries.
    """
    b = ModuleGraph()
    h = b.placeholder(SIZE, SIZE)
    with b.inside("layers.0"):
        h = b.layer(h)
        parts = [b.call(aten.mm, h, h) for _ in range(4)]
        for part in parts:
            h = b.call(aten.mm, h, part)
        h = b.call(aten.mm, h, h)
    with b.inside("layers.1"):
        h = b.layer(h)
    return b.output(h)


def test_a_prefetch_over_the_peak_starts_later() -> None:
    free, report = optimized(peaking())
    assert sketch(free, report)[:4] == [
        "AG layers.0",
        "AG layers.1",
        "W AG layers.0",
        "mm layers.0 x11",
    ]
    assert report.peak_bytes_after > report.peak_bytes_before
    capped, report = optimized(peaking(), max_memory_increase_gb=0.0)
    lines = sketch(capped, report)
    assert report.way == "as asked"
    assert merged(report)["AG layers.1 dp x2"] == 1
    place = lines.index("AG layers.1")
    assert lines[place - 1].startswith("mm layers.0"), lines  # behind some of its compute
    assert lines[place + 1].startswith("mm layers.0"), lines  # and still hidden
    assert report.peak_bytes_after <= report.peak_bytes_before


def test_bytes_in_flight_hold_a_prefetch_back() -> None:
    """Two gathers of 64 bytes are one bucket: depth 2 would have two buckets in flight."""
    options = {"module_prefetch_depth": 2, "max_in_flight_gb": 128 / 2**30}
    gm, report = optimized(forward(4), **options)
    assert sketch(gm, report) == [
        "AG layers.0", "W AG layers.0", "AG layers.1", "mm layers.0 x2",
        "W AG layers.1", "AG layers.2", "mm layers.1 x2",
        "W AG layers.2", "AG layers.3", "mm layers.2 x2",
        "W AG layers.3", "mm layers.3 x2",
    ]  # fmt: skip
    gm, report = optimized(forward(4), module_prefetch_depth=2, max_in_flight_gb=256 / 2**30)
    assert sketch(gm, report) == [
        "AG layers.0", "AG layers.1", "W AG layers.0", "AG layers.2", "mm layers.0 x2",
        "W AG layers.1", "AG layers.3", "mm layers.1 x2",
        "W AG layers.2", "mm layers.2 x2", "W AG layers.3", "mm layers.3 x2",
    ]  # fmt: skip


def test_a_module_over_the_bytes_in_flight_is_split() -> None:
    """Four gathers of 64 bytes, of which two may be in flight."""
    _, report = optimized(forward(1, count=4), max_in_flight_gb=128 / 2**30)
    assert merged(report) == {"AG layers.0 dp x2": 2}
    assert refused(report) == {"MEMORY": 2}
