"""Custom ops with side effects that no pass can know: fences for tests.

``torch_patches_testing::barrier(x)`` returns nothing; ``barrier_(x)`` writes its argument (x * 2 + 1,
which does not commute with itself or with sums, so that values show a changed order).
"""

from __future__ import annotations

import torch

_library = torch.library.Library("torch_patches_testing", "DEF")
_library.define("barrier(Tensor x) -> ()")
_library.define("barrier_(Tensor(a!) x) -> ()")


def _nothing(x: torch.Tensor) -> None:
    return None


def _write(x: torch.Tensor) -> None:
    x.mul_(2).add_(1)


_library.impl("barrier", _nothing, "CompositeExplicitAutograd")
_library.impl("barrier_", _write, "CompositeExplicitAutograd")
_library.impl("barrier", _nothing, "Meta")
_library.impl("barrier_", _nothing, "Meta")

barrier = torch.ops.torch_patches_testing.barrier.default
barrier_ = torch.ops.torch_patches_testing.barrier_.default
