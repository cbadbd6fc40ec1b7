"""Which graphs the SPMD interpreter refuses, and in which order it launches.

Every refusal has a neighbour that differs in one point and is accepted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.fx_passes.control_dependencies  # registers control_deps
import torch.fx as fx

from torch_patches.testing._handmade_graph import Build, handmade, started, wait
from torch_patches.testing.spmd_interpreter import (
    SpmdError,
    SpmdInterpreter,
    run_spmd,
)

C = torch.ops._c10d_functional
aten = torch.ops.aten
PAIR = {"g": [[0, 1]]}


def ranks_of(*values: torch.Tensor) -> list[list[torch.Tensor]]:
    """One input for each rank."""
    return [[v] for v in values]


def shards(world_size: int, *shape: int) -> list[torch.Tensor]:
    """Integer-valued, different on every rank."""
    size = torch.Size(shape).numel()
    return [torch.arange(float(size)).reshape(shape) + 100 * r for r in range(world_size)]


# ---------------------------------------------------------------- what is refused


def refused(build: Build, inputs: list[list[Any]], *names: str, groups: Any = PAIR) -> None:
    """The graph raises an error that has all the names."""
    gm = handmade(len(inputs[0]), build)
    with pytest.raises(SpmdError) as caught:
        run_spmd(gm, inputs, groups)
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize("op", [aten.neg, aten.t, aten.relu_, C.all_reduce])
def test_use_before_the_wait_raises(op: Any) -> None:
    def build(call: Any, x: fx.Node) -> Any:
        start = call(C.all_gather_into_tensor, x, 2, "g")
        used = call(op, start, "sum", "g") if op is C.all_reduce else call(op, start)
        return wait(call, start), used

    name = str(op).split(".")[-1]
    refused(build, ranks_of(*shards(2, 2, 2)), name, "all_gather_into_tensor")


def test_use_of_an_empty_tensor_before_the_wait_raises() -> None:
    def build(call: Any, x: fx.Node) -> Any:
        start = call(C.all_reduce, x, "sum", "g")
        used = call(aten.neg, start)
        return wait(call, start), used

    refused(build, ranks_of(*shards(2, 0, 2)), "neg", "all_reduce")


def test_data_in_flight_are_hidden_from_reads_that_escape_the_checks() -> None:
    buffers: list[torch.Tensor] = []
    seen: list[list[float]] = []

    def remember(x: torch.Tensor) -> None:
        buffers.append(x)

    def peek(x: torch.Tensor) -> None:
        seen.extend(b.tolist() for b in buffers)

    def build(call: Any, x: fx.Node) -> Any:
        call(remember, x)
        start = call(C.all_reduce_, x, "sum", "g")
        call(peek, call(aten.ones, [1]))
        return wait(call, start)

    outs = run_spmd(handmade(1, build), ranks_of(*shards(2, 1)), PAIR)
    assert outs[0].tolist() == [100] and all(v != v for (v,) in seen) and seen


def test_use_of_an_alias_before_the_wait_raises() -> None:
    def build(call: Any, x: fx.Node) -> Any:
        view = call(aten.view, x, [4])
        start = call(C.all_reduce_, x, "sum", "g")
        used = call(aten.neg, view)
        return wait(call, start), used

    refused(build, ranks_of(*shards(2, 2, 2)), "neg", "all_reduce_")


def test_views_between_start_and_wait_are_accepted() -> None:
    def build(call: Any, x: fx.Node) -> Any:
        y = call(C.all_gather_into_tensor, x, 2, "g")
        call(aten.sym_size.int, y, 0)
        y = call(aten.detach, call(aten.alias, call(aten.view, y, [4, 2])))
        y = call(aten.slice.Tensor, call(aten.reshape, y, [8]), 0, 0, 8)
        return wait(call, call(aten.view.dtype, y, torch.int32))

    outs = run_spmd(handmade(1, build), ranks_of(*shards(2, 2, 2)), PAIR)
    assert outs[1].view(torch.float32).tolist() == [0, 1, 2, 3, 100, 101, 102, 103]


@pytest.mark.parametrize("view", [(aten.slice.Tensor, 0, 0, 1), (aten.reshape, [6])])
def test_view_that_drops_or_copies_before_the_wait_raises(view: Any) -> None:
    def build(call: Any, x: fx.Node) -> Any:
        start = call(C.all_reduce_, x, "sum", "g")
        used = call(view[0], start, *view[1:])
        return wait(call, start), used

    refused(build, ranks_of(*[x.t() for x in shards(2, 2, 3)]), "all_reduce_")


def test_unwaited_output_raises() -> None:
    gm = handmade(1, lambda call, x: [call(aten.alias, call(C.all_reduce, x, "sum", "g"))])
    inputs = ranks_of(*shards(2, 2))
    with pytest.raises(SpmdError, match="output uses all_reduce"):
        run_spmd(gm, inputs, PAIR)


def test_unwaited_output_is_accepted_on_request() -> None:
    gm = handmade(1, lambda call, x: call(C.all_reduce, x, "sum", "g"))
    interpreter = SpmdInterpreter(gm, PAIR, 2, allow_unwaited_outputs=True)
    outs = interpreter.run(ranks_of(*shards(2, 2)))
    assert outs[0].tolist() == [100, 102] and interpreter.unwaited == ["all_reduce"]


def wait_for_one_of_two(call: Any, x: fx.Node) -> Any:
    many = call(C.all_reduce_coalesced, [x, x], "sum", "g")
    first = wait(call, call(operator.getitem, many, 0))
    return first, call(aten.neg, call(operator.getitem, many, 1))


def test_waiting_for_one_coalesced_output_does_not_reveal_the_other() -> None:
    refused(wait_for_one_of_two, ranks_of(*shards(2, 2)), "neg", "all_reduce_coalesced")


def test_wait_on_what_is_not_in_flight_returns_it() -> None:
    x = torch.ones(1)
    (out,) = run_spmd(handmade(1, lambda call, x: wait(call, wait(call, x))), ranks_of(x), {})
    assert out is x


def overwrite(write: Callable[[Any, fx.Node], Any], late: bool) -> Build:
    """A write to the payload x, before or after the wait."""

    def build(call: Any, x: fx.Node) -> Any:
        start = call(C.all_gather_into_tensor, x, 2, "g")
        if late:
            done = wait(call, start)
            write(call, x)
            return done
        write(call, x)
        return wait(call, start)

    return build


WRITES: dict[str, Callable[[Any, fx.Node], Any]] = {
    "add_": lambda call, x: call(aten.add_.Tensor, x, 1),
    "zero_": lambda call, x: call(aten.zero_, call(aten.slice.Tensor, x, 0, 1, 2)),
    "all_reduce_": lambda call, x: wait(call, call(C.all_reduce_, x, "sum", "g")),
    "all_gather_into_tensor_out": lambda call, x: wait(
        call, call(C.all_gather_into_tensor_out, call(aten.ones, [1]), 2, "g", out=x)
    ),
    "fill_": lambda call, x: x.graph.call_method("fill_", (x, 0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_to_a_payload_in_flight_raises(name: str) -> None:
    build = overwrite(WRITES[name], late=False)
    refused(build, ranks_of(*shards(2, 2)), name, "all_gather_into_tensor,")


@pytest.mark.parametrize("name", WRITES)
def test_write_to_a_payload_after_its_wait_is_accepted(name: str) -> None:
    outs = run_spmd(handmade(1, overwrite(WRITES[name], late=True)), ranks_of(*shards(2, 2)), PAIR)
    assert outs[0].tolist() == [0, 1, 100, 101]


def test_write_to_another_part_of_the_payloads_buffer_is_accepted() -> None:
    def build(call: Any, x: fx.Node) -> Any:
        even, odd = (call(aten.slice.Tensor, x, 0, i, 4, 2) for i in (0, 1))
        start = call(C.all_reduce, even, "sum", "g")
        call(aten.zero_, odd)
        return wait(call, start)

    outs = run_spmd(handmade(1, build), ranks_of(*shards(2, 4)), PAIR)
    assert outs[0].tolist() == [100, 104]


@pytest.mark.parametrize(
    ("build", "values", "message"),
    [
        (started(C.all_gather_into_tensor, 2, "g"), ([1.0], [1.0, 2.0]), "shapes differ"),
        (started(C.all_reduce, "sum", "g"), ([1.0], [1]), "dtypes differ"),
        (started(C.reduce_scatter_tensor, "sum", 2, "g"), ([1.0], [2.0]), "not divisible"),
        (started(C.all_reduce, "avg", "g"), ([1], [2]), "avg of torch.int64"),
        (started(C.all_reduce, "mean", "g"), ([1], [2]), "unknown reduce op"),
        (started(C.broadcast, 2, "g"), ([1], [2]), "src 2"),
        *(
            # point-to-point ops came after 2.11
            [(lambda call, x: call(C.isend, x, 1, 0, "g"), ([1], [2]), "does not know")]
            if hasattr(C, "isend")
            else []
        ),
        (
            lambda call, x: call(
                C.all_gather_into_tensor_out, x, 2, "g", out=call(aten.ones, [2, 1])
            ),
            ([1.0], [2.0]),
            "out is",
        ),
    ],
)  # fmt: skip
def test_collective_that_real_ranks_cannot_do_raises(
    build: Build, values: Any, message: str
) -> None:
    refused(build, ranks_of(*map(torch.tensor, values)), message)


def mixed(call: Any, x: fx.Node, y: fx.Node) -> Any:
    many = call(C.all_gather_into_tensor_coalesced, [x, y], 2, "g")
    return [wait(call, call(operator.getitem, many, i)) for i in (0, 1)]


MIXED_INPUTS = [[torch.ones(1), torch.ones(1, dtype=torch.bfloat16)] for _ in range(2)]


def test_mixed_dtypes_in_one_launch_raises() -> None:
    refused(mixed, MIXED_INPUTS, "dtypes differ")


def test_mixed_dtypes_in_one_launch_are_accepted_on_request() -> None:
    out = run_spmd(handmade(2, mixed), MIXED_INPUTS, PAIR, allow_mixed_dtypes=True)[0]
    assert [t.dtype for t in out] == [torch.float32, torch.bfloat16]


def test_wrong_number_of_inputs_raises() -> None:
    gm = handmade(1, lambda call, x: x)
    with pytest.raises(ValueError, match="world size"):
        run_spmd(gm, [[1]], {}, world_size=2)
    with pytest.raises(ValueError, match="1 placeholders"):
        run_spmd(gm, [[1, 2]], {})


def test_error_of_an_op_tells_node_and_rank() -> None:
    gm = handmade(1, lambda call, x: call(aten.mm, x, x))
    with pytest.raises(RuntimeError) as caught:
        run_spmd(gm, ranks_of(torch.ones(2, 2), torch.ones(3)), {})
    assert caught.value.__notes__ == ["while node mm ran on rank 1"]


# ---------------------------------------------------------------- order, nesting, inputs


def nested(inner: Build) -> tuple[Build, dict[str, Any]]:
    """start -> control_deps((start,), inner, y); inner runs although the start is in flight."""

    def build(call: Any, x: fx.Node, y: fx.Node) -> Any:
        start = call(C.all_gather_into_tensor, x, 2, "g")
        sub = x.graph.get_attr("sub")
        result = call(torch.ops.higher_order.control_deps, (start,), sub, y, start)
        return wait(call, start), result

    return build, {"sub": handmade(2, inner)}


def test_control_deps_on_a_start_runs_its_handmade() -> None:
    build, attrs = nested(lambda call, y, start: wait(call, call(C.all_reduce, y, "sum", "g")))
    interpreter = SpmdInterpreter(handmade(2, build, attrs), PAIR, 2)
    outs = interpreter.run([[x, x + 1] for x in shards(2, 3)])
    assert outs[0][1].tolist() == [102, 104, 106]
    expected = [("all_gather_into_tensor", "g", 3), ("all_reduce", "g", 3)]
    assert interpreter.events == [expected, expected]


def test_use_inside_control_deps_before_the_wait_raises() -> None:
    build, attrs = nested(lambda call, y, start: call(aten.neg, start))
    with pytest.raises(SpmdError, match="control_deps/neg uses all_gather_into_tensor "):
        run_spmd(handmade(2, build, attrs), [[x, x] for x in shards(2, 3)], PAIR)


def test_events_count_a_coalesced_launch_once() -> None:
    interpreter = SpmdInterpreter(handmade(2, mixed), PAIR, 2)
    interpreter.run([[torch.ones(2), torch.ones(3)]] * 2)
    assert interpreter.events[1] == [("all_gather_into_tensor_coalesced", "g", 5)]
