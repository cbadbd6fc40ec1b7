"""What the builder remembers of operators: every value is that of an evaluation, in its own mode."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_patches.testing.graph_builder import GraphBuilder, evaluate

aten = torch.ops.aten


def test_values_belong_to_the_mode_of_their_builder():
    for _ in range(2):
        b = GraphBuilder()
        out = b.gather_and_wait(b.placeholder(4, 8), 2, "fsdp")
        assert out.meta["val"].fake_mode is b.fake_mode
        assert out.meta["val"].shape == (8, 8)


def test_symbolic_sizes_stay_symbolic():
    """Also beside a builder in whose graph the size is the same number."""
    plain = GraphBuilder()
    for_number = plain.call(aten.neg, plain.placeholder(6, 8)).meta["val"]
    b = GraphBuilder(FakeTensorMode(shape_env=ShapeEnv()))
    size = b.symbol(6).meta["val"]
    out = b.call(aten.neg, b.placeholder(size, 8)).meta["val"]
    assert isinstance(out.shape[0], torch.SymInt)
    assert out.fake_mode is b.fake_mode
    assert type(for_number.shape[0]) is int
    again = plain.call(aten.neg, plain.placeholder(6, 8, name="again")).meta["val"]
    assert type(again.shape[0]) is int


def test_sizes_learnt_from_data_are_of_one_builder():
    """The result has a symbol of the mode's own, though the argument has none."""
    symbols = []
    for _ in range(2):
        mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
        b = GraphBuilder(mode)
        out = b.call(aten.nonzero, b.placeholder(4)).meta["val"]
        assert out.shape[0].node.shape_env is mode.shape_env
        symbols.append(out.shape[0])
    assert symbols[0].node.shape_env is not symbols[1].node.shape_env


@pytest.mark.parametrize("order", [(1, 1.0, True), (True, 1.0, 1)])
def test_equal_numbers_of_other_types_are_told_apart(order):
    found = {}
    for number in order:
        b = GraphBuilder()
        x = b.placeholder(3, dtype=torch.bool)
        found[type(number)] = b.call(aten.add.Tensor, x, number).meta["val"].dtype
    assert found == {int: torch.int64, float: torch.float32, bool: torch.bool}


@pytest.mark.parametrize("stride", [(8, 1), (1, 4), (16, 2), (0, 1)])
@pytest.mark.parametrize("op", [aten.clone.default, aten.neg.default, aten.t.default])
def test_layout_is_that_of_an_evaluation(stride, op):
    """Of dense, transposed, spread and expanded arguments, with and without an offset."""
    for _ in range(2):  # the second is remembered, if anything is
        b = GraphBuilder()
        whole = b.placeholder((4, 8), stride=stride)
        for x in (whole, b.call(aten.slice.Tensor, whole, 1, 2, 8)):
            found = b.call(op, x).meta["val"]
            with b.fake_mode:
                expected = evaluate(op, (x.meta["val"],), {})
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
            assert found.storage_offset() == expected.storage_offset()
            assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_views_share_the_memory_of_their_argument():
    for _ in range(2):
        b = GraphBuilder()
        x = b.placeholder(4, 8)
        view = b.call(aten.t.default, x)
        storages = [n.meta["val"].untyped_storage()._cdata for n in (x, view)]
        assert storages[0] == storages[1]
