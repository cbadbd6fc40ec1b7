"""Places, memory, copies, bytes and span: what bounds a merge besides hiding.

Matrices are 8 x 8 floats: 256 bytes.  A gather's payload is half of that, a parameter.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES, Device, Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.memory import peak_bytes
from torch_patches._inductor.fx_passes.comm_overlap.estimate.runtime import (
    HostCosts,
    Interference,
    RuntimeModel,
)
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches._inductor.fx_passes.comm_overlap.passes.schedule import Limits
from torch_patches._inductor.fx_passes.comm_overlap.plan import RefusalReason
from torch_patches.testing.hiding_sketch import Outcome, Sketch, bucket, words

pytestmark = pytest.mark.usefixtures("as_on_gpu")
FORMS = pytest.mark.parametrize("form", ["default", "coalesced"])
FREE = Limits(1 << 40)
aten = torch.ops.aten


def merged(
    s: Sketch,
    limits: Limits | None = FREE,
    form: str = "coalesced",
    model: RuntimeModel | None = None,
    **options: float,
) -> Outcome:
    asked = Options("topo_span", bucket_mode=form, **options)  # type: ignore[arg-type]
    return bucket(s.done(), s.hiding, asked, limits, model)


# -- places ---------------------------------------------------------------------------------------


def used(s: Sketch, wait: torch.fx.Node) -> None:
    s.results.remove(wait)
    s.results.append(s.call(aten.neg, wait))


def test_exposed_gathers_start_at_the_later_place() -> None:
    """A()A  mm  B()B, A not used before: late is less memory."""
    s = Sketch()
    s.end(s.start())
    s.mm()
    s.end(s.start())
    outcome = merged(s)
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "mm s w"


def test_hidden_gather_draws_the_start_in_front_of_its_compute() -> None:
    """A( mm0 )A  B( mm1 )B: the start stands in front of mm0, the wait at B's."""
    s = Sketch()
    before = s.mm()
    a = s.start()
    s.end(a, s.mm(before))
    b = s.start()
    s.end(b, s.mm())
    outcome = merged(s)
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "mm s mm mm w"


def test_use_draws_the_start_to_the_earlier_place() -> None:
    """A()A  mm(A)  B()B: nothing hides them, and A is used before B starts."""
    s = Sketch()
    s.mm()
    s.mm(s.end(s.start()))
    s.end(s.start())
    outcome = merged(s)
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "mm s w mm"


def test_use_draws_the_wait_behind_the_last_hiding_compute() -> None:
    """A( mm0 )A  B( mm1  mm(A)  )B: the wait stands between mm1 and what uses A."""
    s = Sketch()
    a = s.start()
    gathered = s.end(a, s.mm())
    b = s.start()
    hides_b = s.mm()
    s.mm(gathered)
    s.end(b, hides_b)
    outcome = merged(s)
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "s mm mm w mm"


def test_reductions_are_waited_for_at_the_later_place() -> None:
    s = Sketch()
    s.end(s.scatter(s.x))
    s.mm()
    r = s.scatter(s.mm())
    s.mm()
    s.end(r)
    outcome = merged(s)
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "mm mm s mm w"


def test_moves_name_the_places() -> None:
    """in x, parameters a and b, mm, A, wA, mm, B, wB: start and wait of both at the mm of B."""
    s = Sketch()
    s.end(s.start())
    s.mm()
    s.end(s.start())
    outcome = merged(s)
    # Placeholders stand at 0 to 2; A at 3, its wait at 4, mm at 5, B at 6, its wait at 7.
    assert [move.place for move in outcome.plan.moves] == [6, 6, 7, 7]


def test_cannot_bucket_without_a_place_between_inputs_and_first_use() -> None:
    """A is used in front of the fence behind which B's parameter is written."""
    s = Sketch()
    s.mm(s.end(s.start()))
    parameter = s.placeholder(4, 8)
    s.call(aten.add_.Tensor, parameter, parameter)
    s.end(s.all_gather(parameter, 2, "g"))
    outcome = merged(s)
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.PREFETCH}


def test_prefetch_bound() -> None:
    """The start goes three kernels ahead of the wait: A's use forces it up, B's hiding down."""

    def sketch() -> Sketch:
        s = Sketch()
        a = s.start()
        s.end(a, s.mm())
        b = s.start()
        s.end(b, s.mm(), s.mm())
        return s

    assert merged(sketch(), replace(FREE, prefetch_kernels=3)).buckets == [[0, 1]]
    outcome = merged(sketch(), replace(FREE, prefetch_kernels=2))
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.PREFETCH}


# -- memory ---------------------------------------------------------------------------------------


def peak(s: Sketch) -> None:
    """A tensor of 64 KB for a moment, kernels of its own around it."""
    s.mm()
    s.results.append(s.call(aten.sum, s.call(aten.repeat, s.x, [16, 16])))
    s.mm()


def peak_of(make: Callable[[], Sketch]) -> int:
    """Bytes at the peak of the graph as it is."""
    return peak_bytes(make().done().graph).peak_bytes


def gathers_far_apart() -> Sketch:
    """A( mm )A  big = mm..., freed  B( mm )B: B's result in flight beside the big tensor."""
    s = Sketch()
    a = s.start()
    s.end(a, s.mm())
    peak(s)
    b = s.start()
    s.end(b, s.mm())
    return s


#: What the merge adds at the peak: B's result; in a copying bucket also the copy of both shards.
MORE_BYTES = pytest.mark.parametrize(("form", "more"), [("default", 512), ("coalesced", 256)])


@MORE_BYTES
def test_can_bucket_gathers_under_the_memory_cap(form: str, more: int) -> None:
    cap = peak_of(gathers_far_apart) + more
    outcome = merged(gathers_far_apart(), Limits(cap), form)
    assert outcome.buckets == [[0, 1]]
    assert peak_bytes(outcome.after.graph).peak_bytes == cap


@MORE_BYTES
def test_cannot_bucket_gathers_over_the_memory_cap(form: str, more: int) -> None:
    outcome = merged(gathers_far_apart(), Limits(peak_of(gathers_far_apart) + more - 1), form)
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.MEMORY}


def scatters_around_a_peak() -> Sketch:
    """r = R(g), waited for; then a large tensor; then another scatter."""
    s = Sketch()
    r = s.scatter(s.call(aten.neg, s.x))
    s.end(r)
    peak(s)
    s.end(s.scatter(s.call(aten.neg, s.x)))
    return s


def test_can_bucket_scatters_under_the_memory_cap() -> None:
    """The first payload, 256 bytes, is held over the peak; its result, 128 bytes, is not there."""
    before = peak_of(scatters_around_a_peak)
    outcome = merged(scatters_around_a_peak(), Limits(before + 256))
    assert outcome.buckets == [[0, 1]]
    assert peak_bytes(outcome.after.graph).peak_bytes == before + 128


def test_cannot_bucket_scatters_over_the_memory_cap() -> None:
    """The result is not counted as gone: who knows when it is made anew."""
    outcome = merged(scatters_around_a_peak(), Limits(peak_of(scatters_around_a_peak) + 255))
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.MEMORY}


def scatters_with_a_choice() -> Sketch:
    """R0( R1( mm )R0  peak  )R1."""
    s = Sketch()
    first, second = s.call(aten.neg, s.x), s.call(aten.neg, s.x)
    r0, r1 = s.scatter(first), s.scatter(second)
    s.end(r0, s.mm())
    peak(s)
    s.end(r1)
    return s


def test_wait_goes_to_the_later_place_where_memory_allows() -> None:
    outcome = merged(scatters_with_a_choice())
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "s mm mm mm w"


def test_wait_goes_to_an_earlier_place_where_memory_is_short() -> None:
    outcome = merged(scatters_with_a_choice(), Limits(peak_of(scatters_with_a_choice)))
    assert outcome.buckets == [[0, 1]]
    assert words(outcome.after) == "s mm w mm mm"


def gathers_on_both_sides() -> Sketch:
    """A( mm )A  peak  B( mm )B  C( mm )C."""
    s = gathers_far_apart()
    c = s.start()
    s.end(c, s.mm())
    return s


@pytest.mark.parametrize(("more", "buckets"), [(512, [[0, 1, 2]]), (256, [[0, 1]])])
def test_accepted_merges_use_the_room_up(more: int, buckets: list[list[int]]) -> None:
    """B and C add 256 bytes each at the peak."""
    outcome = merged(gathers_on_both_sides(), Limits(peak_of(gathers_on_both_sides) + more))
    assert outcome.buckets == buckets
    assert len(outcome.reasons) == 3 - len(buckets[0])
    assert set(outcome.reasons.values()) <= {RefusalReason.MEMORY}


@pytest.mark.parametrize(("more", "buckets"), [(896, [[0, 1, 2]]), (895, [[0, 1]])])
def test_a_copying_bucket_that_grows_is_copied_once(more: int, buckets: list[list[int]]) -> None:
    """At the peak stand B's and C's results, 512 bytes, and the copy of all shards, 3 times 128."""
    before = peak_of(gathers_on_both_sides)
    outcome = merged(gathers_on_both_sides(), Limits(before + more), "default")
    assert outcome.buckets == buckets
    assert peak_bytes(outcome.after.graph).peak_bytes == before + 256 * len(buckets[0]) + (
        128 if len(buckets[0]) > 2 else 0
    )


def test_a_refused_merge_takes_no_room() -> None:
    """A( a( mm )A )a  peak  B( b( mm )B )b: for the larger pair there is too little, not for a and b."""

    def sketch() -> Sketch:
        s = Sketch()
        for number in range(2):
            large = s.all_gather(s.placeholder(8, 8), 2, "g")
            small = s.start("h")
            hides = s.mm()
            s.end(large, hides)
            s.end(small, hides)
            if not number:
                peak(s)
        return s

    outcome = merged(sketch(), Limits(peak_of(sketch) + 256))
    assert outcome.buckets == [[1, 3]]
    assert [outcome.reasons[place] for place in (0, 2)] == [RefusalReason.MEMORY] * 2


def test_an_input_over_the_cap_hinders_no_merge_that_takes_nothing_more_there() -> None:
    """A()A  peak  B()B: A starts and is waited for behind the peak, where it is not needed."""

    def sketch() -> Sketch:
        s = Sketch()
        s.end(s.start())
        peak(s)
        s.end(s.start())
        return s

    assert merged(sketch(), Limits(peak_of(sketch) - 512)).buckets == [[0, 1]]


def test_bytes_in_flight() -> None:
    """256 bytes each."""
    s = gathers_far_apart()
    assert merged(s, replace(FREE, in_flight_bytes=512)).buckets == [[0, 1]]
    s = gathers_far_apart()
    outcome = merged(s, replace(FREE, in_flight_bytes=511))
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.MEMORY}


# -- copies ---------------------------------------------------------------------------------------

#: 1 byte a ns for memory; a collective costs 10 us, and 1 us a byte; the host nothing.
SLOW_COPIES: Device = replace(
    DEVICES["H100"],
    dram_gb_per_s=0.1,
    dram_efficiency=1.0,
    kernel_us=0.0,
    intra_node=Link(base_us=10.0, hop_us=0.0, gb_per_s=0.001),
)


def copy_model(base_us: float) -> RuntimeModel:
    link = replace(SLOW_COPIES.intra_node, base_us=base_us)
    free, quiet = HostCosts(0, 0, 0, 0), Interference(launch_us=0.0)
    return RuntimeModel(replace(SLOW_COPIES, intra_node=link), host=free, interference=quiet)


def two_gathers() -> Sketch:
    s = Sketch()
    s.end(s.start())
    s.end(s.start())
    return s


# Copying in reads and writes 256 bytes of two shards, copying out 512 of two results: 1536 bytes at
# 0.1 bytes a ns are 15.36 us.
def test_can_bucket_when_the_launch_costs_more_than_the_copies() -> None:
    assert merged(two_gathers(), None, "default", copy_model(16.0)).buckets == [[0, 1]]


def test_cannot_bucket_when_the_copies_cost_more() -> None:
    outcome = merged(two_gathers(), None, "default", copy_model(15.0))
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.COPIES}


def test_can_bucket_without_copies_whatever_they_cost() -> None:
    assert merged(two_gathers(), None, "coalesced", copy_model(0.0)).buckets == [[0, 1]]


def test_sizes_of_both_count_whichever_is_larger() -> None:
    """256 bytes and 1024: 3840 bytes are copied, in 38.4 us."""
    for base_us, buckets in ((38.0, []), (39.0, [[0, 1]])):
        s = Sketch()
        s.end(s.start())
        s.end(s.all_gather(s.placeholder(16, 8), 2, "g"))
        found = merged(s, None, "default", copy_model(base_us)).buckets
        assert found == buckets


def test_a_further_member_costs_its_own_copies() -> None:
    """Two of 256 bytes cost 15.36 us; the third, of 512, as much by itself and 23.04 with the first."""
    s = two_gathers()
    s.end(s.all_gather(s.placeholder(8, 8), 2, "g"))
    assert merged(s, None, "default", copy_model(16.0)).buckets == [[0, 1, 2]]


def test_host_work_counts_as_saved() -> None:
    """0 us of latency, but 16 us of the host for each launch."""
    model = replace(copy_model(0.0), host=HostCosts(0, 16.0, 0, 0))
    assert merged(two_gathers(), None, "default", model).buckets == [[0, 1]]


def test_host_work_counts_in_microseconds() -> None:
    """0.3 us of the host and 15 of latency do not make up for 15.36 us of copies; 0.4 do."""
    for collective_us, buckets in ((0.3, []), (0.4, [[0, 1]])):
        model = replace(copy_model(15.0), host=HostCosts(0, collective_us, 0, 0))
        assert merged(two_gathers(), None, "default", model).buckets == buckets


def test_steps_of_the_ring_count_as_saved() -> None:
    """One step in a group of two."""
    model = copy_model(0.0)
    link = replace(model.device.intra_node, hop_us=16.0)
    model = replace(model, device=replace(model.device, intra_node=link))
    assert merged(two_gathers(), None, "default", model).buckets == [[0, 1]]


# -- bytes, span, keys ----------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("limits", [None, FREE])
def test_byte_cap(form: str, limits: Limits | None) -> None:
    """256 bytes each; three fit under 800."""
    s = Sketch()
    for _ in range(5):
        s.end(s.start())
    assert merged(s, limits, form, bucket_cap_mb=800 / 2**20).buckets == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("limits", [None, FREE])
@pytest.mark.parametrize("hidden", [False, True])
def test_span_cap(limits: Limits | None, hidden: bool) -> None:
    """Four working nodes a gather (it, its wait, two products): two starts within four nodes."""
    s = Sketch()
    for number in range(4):
        start = s.start()
        compute = s.mm(), s.mm()
        s.end(start, *(compute if hidden and number % 2 else ()))
    outcome = merged(s, limits, max_topo_span=4)
    assert outcome.buckets == [[0, 1], [2, 3]]
    assert all(b.span <= 4 for b in outcome.plan.buckets)


def test_cannot_bucket_other_keys() -> None:
    """Another group, kind, dtype."""
    s = Sketch()
    s.end(s.start("g"))
    s.end(s.start("h"))
    s.end(s.scatter(s.mm(), "g"))
    s.end(s.all_gather(s.placeholder(4, 8, dtype=torch.float64), 2, "g"))
    outcome = merged(s)
    assert outcome.buckets == []
    assert set(outcome.reasons.values()) == {RefusalReason.ALONE_IN_KEY}
