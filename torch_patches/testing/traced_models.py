"""Small models for ``traced.py``: a chain of matmuls whose weights are read in a given way.

    x -> relu(x @ read(w0)) -> relu(. @ read(w1)) -> ... -> result

Each special model is the chain with one thing changed, named by its class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_patches.testing.gathers import (
    Way,
    accumulate,
    all_gather,
    gather_sequence,
    matmul_of_shards,
    scatter_sequence,
)

WIDTH = 8
BATCH = 4


def _recompute_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_recomputing = functools.partial(create_selective_checkpoint_contexts, _recompute_all)


def _stored(way: Way, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(way.stored_shape(shape)))


class Layer(nn.Module):
    """``relu(x @ weight + bias)``, both read in one way."""

    def __init__(
        self, way: Way, bias: bool = False, recompute: bool = False, width: int = WIDTH
    ) -> None:
        """The bias is registered first, which is not the order of use.

        Args:
            recompute: what reading a parameter takes is done again in the backward.
        """
        super().__init__()
        self.way, self.recompute = way, recompute
        if bias:
            self.bias = _stored(way, width)
        self.weight = _stored(way, width, width)

    def read(self, stored: Tensor) -> Tensor:
        if not self.recompute:
            return self.way.read(stored)
        return checkpoint(self.way.read, stored, use_reentrant=False, context_fn=_recomputing)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.read(self.weight)
        y = x.to(weight.dtype) @ weight
        if hasattr(self, "bias"):
            y = y + self.read(self.bias)
        return y.relu()


class Mlp(nn.Module):
    """A chain of layers, one for each way."""

    def __init__(self, ways: Sequence[Way], **options: Any) -> None:
        """Options are those of :class:`Layer`."""
        super().__init__()
        self.layers = nn.ModuleList(Layer(way, **options) for way in ways)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CheckpointedMlp(Mlp):
    """Each layer is an activation checkpoint; its gathers run again in the backward if torch wants
    so (2.13) or not (2.11)."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class RecomputedMlp(Mlp):
    """Each layer is an activation checkpoint that must run again as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=_recomputing)
        return x


class ReversedMlp(Mlp):
    """The layers are used in the reverse of the order of their registration."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class TiedMlp(Mlp):
    """The last layer has the first one's weight."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(ways)
        self.layers[-1].weight = self.layers[0].weight


class FrozenMlp(Mlp):
    """The first layer's weight needs no gradient."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(ways)
        self.layers[0].weight.requires_grad_(False)


class TwiceMlp(Mlp):
    """The first layer runs twice: its weight is gathered twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](x))


class SequenceParallel(Mlp):
    """A gather of the activation before the first layer and a scatter behind the last."""

    def forward(self, x: Tensor) -> Tensor:
        return scatter_sequence(super().forward(gather_sequence(x.sin())))


class GatheredBuffer(Mlp):
    """A buffer stored in shards."""

    table: Tensor

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(ways)
        self.register_buffer("table", torch.zeros(WIDTH // 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ all_gather(self.table, 4, "dp"))


class GatheredInput(Mlp):
    """The model's input is gathered as it comes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(all_gather(x, 4, "dp"))


class GatheredProduct(Mlp):
    """A gather of ``p @ p``: computed from one parameter, but no parameter."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(ways)
        self.square = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product = gather_sequence(self.square @ self.square, "dp", 4)
        return super().forward(x) @ product[:WIDTH]


class SavedActivation(Mlp):
    """The backward gathers an activation straight from where the forward saved it."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(ways)
        self.head = Layer(ways[0])

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x).sin()
        return matmul_of_shards(hidden, self.head.read(self.head.weight))


class AccumulatingMlp(Mlp):
    """Gradients are added to those of an earlier microbatch, which are buffers."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(ways)
        for number, way in enumerate(ways):
            shape = way.stored_shape((WIDTH, WIDTH))
            self.register_buffer(f"previous{number}", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            stored = accumulate(layer.weight, getattr(self, f"previous{number}"))
            x = (x @ layer.way.read(stored)).relu()
        return x
