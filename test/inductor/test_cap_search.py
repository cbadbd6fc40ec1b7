"""How "auto" finds the sizes of buckets, and caps that depend on where a bucket begins."""

from dataclasses import replace

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import MIB
from torch_patches._inductor.fx_passes.comm_overlap.forecast import forecast
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import (
    collect,
    collective_kind,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes import bucket_sizes, cap_search
from torch_patches._inductor.fx_passes.comm_overlap.passes.bucket_sizes import DynamicSizes
from torch_patches._inductor.fx_passes.comm_overlap.passes.cap_search import CapSearch
from torch_patches._inductor.fx_passes.comm_overlap.passes.caps import (
    BucketCaps,
    fitting_bytes,
    tapering_bytes,
)
from torch_patches._inductor.fx_passes.comm_overlap.passes.linear import LinearMerger
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.passes.sizes import WHOLE_ROOM
from torch_patches._inductor.fx_passes.comm_overlap.passes.topo_span import plan_greedily
from torch_patches._inductor.fx_passes.comm_overlap.passes.track import Track, read_track
from torch_patches._inductor.fx_passes.comm_overlap.passes.ways import (
    Way,
    badness,
    excess_bytes,
    schedule_way,
    total_ms,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import (
    BucketKey,
    Collective,
    CollectiveKind,
    MergeForm,
    Plan,
)
from torch_patches.testing.graph_builder import GraphBuilder

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
AUTO = Options("auto")
FREE = Limits(1 << 50, prefetch_kernels=None)
#: A weight of 25 MiB, two ranks.
ROWS, WIDTH = 2560, 2560


def backward(
    layers: int, scatter_group: str = "g", activation_group: str | None = None
) -> torch.fx.GraphModule:
    """gather -> mm -> scatter of each layer; the result's gradient is as large as the weight."""
    b = GraphBuilder()
    h = b.placeholder(ROWS, WIDTH)
    if activation_group is not None:
        h = b.reduce_and_wait(b.call(aten.mm, h, h), "sum", activation_group)
    reduced = []
    for _ in range(layers):
        h = b.call(aten.mm, h, b.gather_and_wait(b.placeholder(ROWS // 2, WIDTH), 2, "g"))
        reduced.append(b.scatter_and_wait(h, "sum", 2, scatter_group))
    return b.output(h, *reduced)


def model_of(compute_ms: float, launch_ms: float, gib_per_ms: float) -> RuntimeModel:
    """Products take ``compute_ms``, collectives so much and their bytes at that rate."""

    def custom(node: torch.fx.Node, size_bytes: int | None) -> float:
        if node.target is aten.mm.default:
            return compute_ms
        if collective_kind(node) is None:
            return 0.0
        size = size_bytes if size_bytes is not None else ROWS * WIDTH * 4
        return launch_ms + size / 2**30 / gib_per_ms

    return RuntimeModel(
        custom=custom, host=HostCosts(0, 0, 0, 0), interference=Interference(1.0, 1.0)
    )


def track_of(gm: torch.fx.GraphModule, model: RuntimeModel) -> Track:
    now = forecast(gm.graph, collect(gm.graph), model)
    return read_track(now.order, now.skeleton, model, now.costs, now.live)


def uniform(track: Track, limits: Limits, mb: float) -> Way:
    merger = LinearMerger(track)
    plan = plan_greedily(track.skeleton, merger, replace(AUTO, bucket_cap_mb=mb))
    return schedule_way(f"{mb} MB", plan, track, limits)


# -- the search ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_ms", "launch_ms", "gib_per_ms"),
    [(1.0, 5.0, 1.0), (10.0, 0.1, 0.02), (4.0, 1.0, 0.02), (2.0, 0.5, 0.005)],
)
def test_no_fixed_size_is_better(compute_ms: float, launch_ms: float, gib_per_ms: float) -> None:
    """Bound by latency, by compute, by neither, by bandwidth."""
    track = track_of(backward(24), model_of(compute_ms, launch_ms, gib_per_ms))
    best = min(CapSearch(track, AUTO, FREE).ways(), key=lambda way: badness(way, FREE))
    for mb in (25, 50, 100, 200, 400, 800):
        assert total_ms(best) <= total_ms(uniform(track, FREE, mb)) + 1e-9, mb


def test_gathers_and_reductions_may_differ_in_size() -> None:
    """The link is what limits: few launches while compute waits for it anyway; the last reductions,
    which nothing hides, are fewer than others."""
    track = track_of(backward(24), model_of(4.0, 0.3, 0.01))
    ways = CapSearch(track, AUTO, FREE).ways()
    best = min(ways, key=lambda way: badness(way, FREE))
    assert best.name == "1600 MB by the dynamic program"
    assert total_ms(best) < min(total_ms(way) for way in ways if "dynamic" not in way.name)
    members = {member.index: len(b.members) for b in best.plan.buckets for member in b.members}
    gathers = [members.get(index, 1) for index in track.gathers]
    reductions = [members.get(index, 1) for index in track.reductions]
    assert reductions[-1] < max(reductions) and max(gathers) > 1
    assert gathers != reductions


def sizes_of(
    track: Track,
    by_key: dict[BucketKey, int],
    limits: Limits = FREE,
    options: Options = AUTO,
    by_first: dict[int, int] | None = None,
) -> dict[int, int]:
    """Of the dynamic program, members of each bucket by its first one."""
    seen = schedule_way("none", Plan(), track, limits)
    program = DynamicSizes(track, options, limits, seen)
    found = program.by_first(BucketCaps(by_key, by_first or {}))
    assert program.operations > 0
    return {index: size // (25 * MIB) for index, size in found.items()}


def keys_of(track: Track, mb: int) -> dict[BucketKey, int]:
    return {c.key: mb * MIB for c in track.skeleton.collectives if c.key is not None}


def test_program_keeps_the_caps_on_bytes_span_and_flight() -> None:
    """Launches cost 5 ms, bytes next to nothing: as few buckets as the caps allow."""
    track = track_of(backward(12), model_of(1.0, 5.0, 100.0))
    free = sizes_of(track, keys_of(track, 1600))
    assert max(free.values()) > 4
    assert max(sizes_of(track, keys_of(track, 100)).values()) == 4
    flying = replace(FREE, in_flight_bytes=75 * MIB)
    assert max(sizes_of(track, keys_of(track, 1600), flying).values()) == 3
    assert max(sizes_of(track, keys_of(track, 50), flying).values()) == 2
    assert sum(free.values()) == 24
    # Two gathers in a row stand 5 positions apart, three 10.
    for span, members in ((4, 1), (5, 2), (9, 2), (10, 3)):
        wide = replace(AUTO, max_topo_span=span)
        found = sizes_of(track, keys_of(track, 1600), options=wide)
        assert max(found[index] for index in track.gathers if index in found) == members
    gathers = list(track.gathers)
    bound = sizes_of(track, keys_of(track, 1600), by_first={gathers[0]: 100 * MIB})
    assert bound[gathers[0]] <= 2 < free[gathers[0]]  # half of that, as another one is in flight


@pytest.mark.parametrize(("scatter_group", "comes_first"), [("g", True), ("h", False)])
def test_program_comes_last_where_groups_get_in_each_others_way(
    scatter_group: str, comes_first: bool
) -> None:
    """It plans each key alone: a search among several groups does not end with it."""
    track = track_of(backward(12, scatter_group), model_of(1.0, 5.0, 100.0))
    names = [way.name for way in CapSearch(track, AUTO, FREE).ways()]
    by_program = ["dynamic" in name for name in names]
    assert any(by_program)
    first = by_program.index(True)
    assert all(by_program[first:])
    assert (len(names) <= 5) is comes_first


def test_program_counts_two_buckets_of_memory() -> None:
    """One is in flight when the next one starts: each has half of what is free."""
    track = track_of(backward(12), model_of(1.0, 5.0, 100.0))
    tight = replace(FREE, peak_bytes=max(track.fixed_bytes) + 150 * MIB)
    reductions = {
        index: members
        for index, members in sizes_of(track, keys_of(track, 1600), tight).items()
        if index in track.reductions
    }
    assert max(reductions.values()) > 1
    for index, members in reductions.items():
        slot = track.slot[track.place[track.reductions[index].start]]
        assert members * 25 * MIB <= (tight.peak_bytes - min(track.fixed_bytes[slot:])) // 2
    # Without more than the peak, where the first four start 125, 112, 100 and 87 MiB are free.
    none = replace(FREE, peak_bytes=max(track.fixed_bytes))
    found = sizes_of(track, keys_of(track, 1600), none)
    assert [found.get(index) for index in track.reductions][:4] == [2, None, 1, 1]


def test_program_leaves_single_launches_where_copies_cost_too_much() -> None:
    """A launch is copied nowhere; two together are, at 0.1 GB/s of memory."""
    model = model_of(1.0, 5.0, 100.0)
    slow = replace(model, device=replace(model.device, dram_gb_per_s=0.1))
    track = track_of(backward(6), slow)
    copying = replace(AUTO, bucket_mode="default")
    found = sizes_of(track, keys_of(track, 1600), options=copying)
    assert found == dict.fromkeys(range(12), 1)


def with_replicas() -> torch.fx.GraphModule:
    """mm -> scatter -> all-reduce over replicas, eight times."""
    b = GraphBuilder()
    h = b.placeholder(ROWS, WIDTH)
    reduced = []
    for _ in range(8):
        h = b.call(aten.mm, h, h)
        scattered = b.scatter_and_wait(h, "sum", 2, "g")
        reduced.append(b.reduce_and_wait(scattered, "sum", "replicas"))
    return b.output(h, *reduced)


def test_program_sizes_nothing_that_follows_its_scatters() -> None:
    """All-reduces over replicas take the members of the scatters that they reduce further."""
    track = track_of(with_replicas(), model_of(1.0, 5.0, 100.0))
    found = sizes_of(track, keys_of(track, 1600))
    assert sum(found.values()) == 8
    kinds = {track.skeleton.collectives[index].kind for index in found}
    assert kinds == {CollectiveKind.REDUCE_SCATTER}


def test_program_counts_replicas_on_the_link_that_they_take() -> None:
    """Where nodes have two ranks, replicas have another link than their scatters: these go on in
    smaller buckets while replicas are reduced.  On one link more buckets are only more launches."""
    model = model_of(4.0, 1.0, 0.02)
    buckets = []
    for gpus_per_node in (8, 2):
        track = track_of(with_replicas(), replace(model, gpus_per_node=gpus_per_node))
        buckets.append(len(sizes_of(track, keys_of(track, 1600))))
    assert 2 * buckets[0] <= buckets[1]


def test_program_gives_up_beyond_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    track = track_of(backward(12), model_of(1.0, 5.0, 100.0))
    seen = schedule_way("none", Plan(), track, FREE)
    monkeypatch.setattr(bucket_sizes, "_MAX_STEPS", 1)
    program = DynamicSizes(track, AUTO, FREE, seen)
    assert program.by_first(BucketCaps(keys_of(track, 1600))) == {}


def test_work_of_the_program_grows_linearly() -> None:
    """Small collectives stand together, so a bucket reaches a bounded number of them."""
    steps = []
    for layers in (100, 200, 400):
        track = track_of(backward(layers), model_of(4.0, 1.0, 0.02))
        program = DynamicSizes(track, AUTO, FREE, schedule_way("none", Plan(), track, FREE))
        program.by_first(BucketCaps(keys_of(track, 400)))
        steps.append(program.operations)
    assert steps[1] <= 2.2 * steps[0] and steps[2] <= 2.2 * steps[1]


def test_work_is_bounded_by_schedules_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan may be over the cap, and be scheduled a second time, when the last one is left."""
    track = track_of(backward(24), model_of(4.0, 1.0, 0.02))
    made: list[str] = []

    def counted(name: str, *args: object) -> Way:
        made.append(name)
        return schedule_way(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(cap_search, "schedule_way", counted)
    assert len(CapSearch(track, AUTO, FREE).ways()) == len(made) <= AUTO.max_schedules
    for budget in (5, 1):
        made.clear()
        CapSearch(track, replace(AUTO, max_schedules=budget), FREE).ways()
        assert len(made) == budget


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_work_on_a_large_graph_is_bounded_where_the_first_plans_do_not_settle_it(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cap_search, "is_small", lambda track: False)
    track = track_of(backward(24), model_of(0.5, 5.0, 1.0))
    assert len(CapSearch(track, replace(AUTO, max_schedules=budget), FREE).ways()) == budget


@pytest.mark.parametrize("member_us", [0.0, 4000.0])
def test_buckets_are_copied_where_the_host_is_what_limits(member_us: float) -> None:
    """Each member of a zero-copy launch costs the host so much; a copied bucket is one of two kernels
    more."""
    model = replace(model_of(0.5, 1.0, 1.0), host=HostCosts(10.0, 10.0, member_us, 1.0))
    track = track_of(backward(24), model)
    ways = CapSearch(track, AUTO, FREE).ways()
    best = min(ways, key=lambda way: badness(way, FREE))
    forms = {bucket.form for bucket in best.plan.buckets}
    assert forms == {MergeForm.COPY if member_us else MergeForm.COALESCED}
    assert best.name.endswith(", copied all_gather, reduce_scatter") == bool(member_us)
    asked = CapSearch(track, replace(AUTO, bucket_mode="coalesced"), FREE).ways()
    assert {b.form for way in asked for b in way.plan.buckets} == {MergeForm.COALESCED}
    if not member_us:  # nothing is tried that cannot help
        assert {b.form for way in ways for b in way.plan.buckets} == {MergeForm.COALESCED}


def test_it_sets_out_from_sizes_that_suit_a_wider_dtype_too() -> None:
    """Gradients are often reduced in float32 where parameters are gathered in bfloat16."""
    track = track_of(backward(48), model_of(4.0, 1.0, 0.02))
    names = [way.name for way in CapSearch(track, AUTO, FREE).ways()]
    assert names[1:4] == ["100 MB", "400 MB", "all_gather 400 MB, reduce_scatter 800 MB"]


@pytest.mark.parametrize("launch_ms", [0.1, 1.0])
def test_a_large_graph_of_one_group_is_done_with_the_dynamic_program(
    launch_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is better than the default, and launches do not limit."""
    monkeypatch.setattr(cap_search, "is_small", lambda track: False)
    ways = CapSearch(track_of(backward(48), model_of(4.0, launch_ms, 0.02)), AUTO, FREE).ways()
    assert ways[1].name == "1600 MB by the dynamic program"
    assert badness(ways[1], FREE) < badness(ways[0], FREE)
    assert (len(ways) > 2) == (launch_ms == 1.0)


@pytest.mark.parametrize("small", [True, False])
def test_copying_is_tried_first_where_the_host_is_what_limits(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can halve a run: few schedules must not be used up before."""
    monkeypatch.setattr(cap_search, "is_small", lambda track: small)
    model = replace(model_of(4.0, 0.1, 0.02), host=HostCosts(10.0, 10.0, 40000.0, 1.0))
    ways = CapSearch(track_of(backward(48), model), replace(AUTO, max_schedules=4), FREE).ways()
    copied = [{bucket.form for bucket in way.plan.buckets} for way in ways]
    assert copied == [{MergeForm.COALESCED}, *[{MergeForm.COPY}] * 3]
    assert all(total_ms(way) < total_ms(ways[0]) / 2 for way in ways[1:])


@pytest.mark.parametrize(
    ("compute_ms", "launch_ms", "gib_per_ms"), [(0.5, 5.0, 1.0), (2.0, 5.0, 0.02)]
)
def test_a_large_graph_is_searched_where_larger_buckets_are_better(
    compute_ms: float, launch_ms: float, gib_per_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many launches of a slow network: the clock of the default sizes stands still too often for the
    program.  What did not settle it takes nothing from the search."""
    track = track_of(backward(48), model_of(compute_ms, launch_ms, gib_per_ms))
    options = replace(AUTO, max_schedules=64)
    small = [total_ms(way) for way in CapSearch(track, options, FREE).ways()]
    monkeypatch.setattr(cap_search, "is_small", lambda track: False)
    large = [total_ms(way) for way in CapSearch(track, options, FREE).ways()]
    assert set(small) < set(large)
    assert min(large) < 0.85 * large[1]


def test_a_large_graph_with_activations_on_another_group_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor parallelism's collectives are none that the program sizes, and stand in its way."""
    monkeypatch.setattr(cap_search, "is_small", lambda track: False)
    model = model_of(4.0, 1.0, 0.02)
    track = track_of(backward(48, activation_group="tp"), model)
    assert len(CapSearch(track, AUTO, FREE).ways()) > 2


def test_a_large_graph_that_is_near_what_its_links_take_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traffic of 48 gathers and scatters takes 469 ms, all compute 24, and a launch next to nothing."""
    monkeypatch.setattr(cap_search, "is_small", lambda track: False)
    gm = backward(24, activation_group="a")  # several groups: the dynamic program comes last
    found = {}
    for share in (0.01, -1.0):
        monkeypatch.setattr(cap_search, "_NEAR_SHARE", share)
        ways = CapSearch(track_of(gm, model_of(1.0, 0.01, 0.0025)), AUTO, FREE).ways()
        found[share] = min(map(total_ms, ways)), len(ways)
    (near_ms, tried), (best_ms, all_tried) = found.values()
    assert tried < all_tried and best_ms <= near_ms <= 1.01 * best_ms


def test_less_memory_is_tried_no_further_where_it_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cap_search, "excess_bytes", lambda way, limits: 1 << 20)
    track = track_of(backward(24), model_of(4.0, 1.0, 0.02))
    peak = Limits(1 << 30, prefetch_kernels=None)
    names = [way.name for way in CapSearch(track, AUTO, peak).ways()]
    assert len([name for name in names if "of the memory" in name]) == 1


def test_equal_plans_are_scheduled_once() -> None:
    """Two small gathers: any size takes both."""
    track = track_of(backward(1), model_of(4.0, 1.0, 0.02))
    assert [way.plan.buckets for way in CapSearch(track, AUTO, FREE).ways()] == [()]


def test_nothing_to_merge_is_no_way() -> None:
    b = GraphBuilder()
    gm = b.output(b.call(aten.relu, b.placeholder(4, 4)))
    assert CapSearch(track_of(gm, model_of(1, 1, 1)), AUTO, FREE).ways() == []


def test_names_do_not_name_groups() -> None:
    """Ranks of one job name their groups differently."""
    track = track_of(backward(24), model_of(4.0, 1.0, 0.02))
    names = [way.name for way in CapSearch(track, AUTO, FREE).ways()]
    assert len(names) == len(set(names))
    words = {word.strip(",") for name in names for word in name.split()}
    kinds = {"all_gather", "reduce_scatter", "MB", "tapered", "by", "the", "dynamic", "program"}
    assert {word for word in words if not word.isdigit()} <= kinds


def test_plan_over_the_memory_cap_is_scheduled_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each first schedule exceeded the cap by 1 MiB; the second one may use so much less."""
    track = track_of(backward(24), model_of(4.0, 1.0, 0.02))
    limits: list[int] = []

    def excess(way: Way, cap: Limits) -> int:
        return MIB if len(limits) % 2 == 0 else 0

    def again(track: Track, way: Way, lower: Limits) -> Way:
        limits.append(lower.peak_bytes)
        return way

    monkeypatch.setattr(cap_search, "excess_bytes", excess)
    monkeypatch.setattr(cap_search, "reschedule", again)
    cap = Limits(1 << 34, prefetch_kernels=None)
    CapSearch(track, AUTO, cap).ways()
    assert limits and set(limits) == {(1 << 34) - MIB - (1 << 24)}


# -- caps ------------------------------------------------------------------------------------------


def gathers_of(track: Track) -> list[Collective]:
    return [gather.collective for gather in track.gathers.values()]


def test_bucket_holds_no_more_than_its_first_member_may() -> None:
    track = track_of(backward(8), model_of(4.0, 1.0, 0.02))
    first, *_ = gathers_of(track)
    by_key = {c.key: 100 * MIB for c in track.skeleton.collectives if c.key is not None}
    caps = BucketCaps(by_key, {first.index: 50 * MIB})
    plan = plan_greedily(track.skeleton, LinearMerger(track), AUTO, caps)
    sizes = [len(b.members) for b in plan.buckets if b.members[0].index in track.gathers]
    assert sizes == [2, 4, 2]


def test_gathers_fit_into_what_is_free_in_front_of_their_use() -> None:
    """A tensor of 100 MiB that dies before the last two products: the gathers before have less."""
    b = GraphBuilder()
    h = b.placeholder(ROWS, WIDTH)
    big = b.call(aten.cat, [h] * 4)
    h = b.call(aten.mm, h, b.gather_and_wait(b.placeholder(ROWS // 2, WIDTH), 2, "g"))
    h = b.call(aten.mul.Tensor, h, b.call(aten.sum, big))
    for _ in range(40):
        h = b.call(aten.mm, h, h)
    h = b.call(aten.mm, h, b.gather_and_wait(b.placeholder(ROWS // 2, WIDTH), 2, "g"))
    track = track_of(b.output(h), model_of(4.0, 1.0, 0.02))
    limit = max(track.fixed_bytes) + 10 * MIB
    early, late = (fitting_bytes(track, Limits(limit))[c.index] for c in gathers_of(track))
    assert early == 10 * MIB
    assert late >= 100 * MIB


def test_buckets_taper_where_no_compute_hides_them() -> None:
    """100 MiB take 4.88 ms; a quarter of the compute of 4 ms a layer counts."""
    track = track_of(backward(8), model_of(4.0, 0.0, 0.02))
    by_key = {c.key: 100 * MIB for c in track.skeleton.collectives if c.key is not None}
    caps = tapering_bytes(track, by_key)
    gathers = [caps[index] / MIB for index in track.gathers]
    whole_ms = 100 / 1024 / 0.02
    expected = [100 * min(max(layer / whole_ms, 0.125), 1.0) for layer in range(8)]
    assert gathers == pytest.approx(expected, rel=1e-3)
    scatters = [caps[index] / MIB for index in track.reductions]
    assert scatters == pytest.approx(expected[::-1], rel=1e-3)


def test_excess_counts_before_time() -> None:
    track = track_of(backward(8), model_of(1.0, 5.0, 1.0))
    merged, alone = uniform(track, FREE, 800), uniform(track, FREE, 1)
    assert badness(merged, FREE) < badness(alone, FREE)
    tight = Limits(alone.schedule.peak_bytes, prefetch_kernels=None)
    assert excess_bytes(merged, tight) and badness(alone, tight) < badness(merged, tight)


def test_collectives_that_cost_nothing_are_not_tapered() -> None:
    """A user's estimation may say so."""
    track = track_of(backward(3), model_of(4.0, 0.0, float("inf")))
    key = track.skeleton.collectives[0].key
    assert key is not None
    sizes = tapering_bytes(track, {key: 1000})
    assert set(sizes.values()) == {1000}


# -- where memory is short -------------------------------------------------------------------------


def tight_track() -> tuple[Track, Limits]:
    """Launches cost 5 ms: few large buckets are fastest, and 150 MiB are free beside the rest.

    Gathers and reductions are of two groups, so greedy sizes compete with the program's.
    """
    track = track_of(backward(12, "h"), model_of(1.0, 5.0, 100.0))
    return track, replace(FREE, peak_bytes=max(track.fixed_bytes) + 150 * MIB)


def test_buckets_that_exceed_the_cap_become_smaller() -> None:
    track, limits = tight_track()
    ways = CapSearch(track, AUTO, limits).ways()
    best = min(ways, key=lambda way: badness(way, limits))
    assert best.sizes is not None and best.sizes.room < WHOLE_ROOM
    assert not excess_bytes(best, limits)
    others = [w for w in ways if w.sizes is not None and w.sizes.room == WHOLE_ROOM]
    holding = [total_ms(way) for way in others if not excess_bytes(way, limits)]
    assert len(holding) < len(others)
    assert total_ms(best) < min(holding, default=float("inf"))


def test_room_is_left_alone_where_the_cap_holds() -> None:
    track, _ = tight_track()
    ways = CapSearch(track, AUTO, FREE).ways()
    assert all(way.sizes is not None and way.sizes.room == WHOLE_ROOM for way in ways)


def test_smaller_buckets_are_within_the_budget_of_schedules() -> None:
    track, limits = tight_track()
    for budget in (1, 6):
        options = replace(AUTO, max_schedules=budget)
        assert len(CapSearch(track, options, limits).ways()) <= budget


def test_way_that_failed_is_planned_again_with_smaller_buckets() -> None:
    """By so much as it exceeded the cap when it was applied."""
    track, limits = tight_track()
    ways = CapSearch(track, AUTO, limits).ways()
    largest = max(ways, key=lambda way: way.schedule.peak_bytes)
    most = largest.schedule.peak_bytes - 50 * MIB
    smaller = CapSearch(track, AUTO, limits).shrunk(largest, most)
    assert smaller.schedule.peak_bytes <= most
    sizes = [
        max(sum(m.size_bytes for m in b.members) for b in w.plan.buckets)
        for w in (smaller, largest)
    ]
    assert sizes[0] < sizes[1]
    assert CapSearch(track, AUTO, limits).shrunk(smaller, most) is smaller
    asked = replace(largest, sizes=None)  # buckets of the user's
    assert CapSearch(track, AUTO, limits).shrunk(asked, most) is asked
