"""The example of torch's own names on docs/drop_in.md runs, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_patches.testing.beside_torch import WorldSketch, held, words

PAGE = (Path(__file__).parents[2] / "docs" / "drop_in.md").read_text(encoding="utf-8")


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("TORCH_PATCHES_STRICT", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_is_a_pass_that_hides_a_gather(world):
    """Products of 8192 x 8192: mm A()A mm(A), the gather of 256 MB goes in front of the first."""
    with torch._inductor.config.patch({"post_grad_custom_post_pass": None}):
        scope = {"torch": torch, "model": torch.nn.Linear(1, 1)}
        exec(example(), scope)
        assert torch._inductor.config.post_grad_custom_post_pass is scope["overlap"]
    s = WorldSketch(dist.group.WORLD.group_name)
    x = s.placeholder(8192, 8192)
    s.mm(x, x)
    s.mm(s.end(s.all_gather(s.placeholder(4096, 8192), 2, s.world)), x)
    gm = s.done()
    scope["overlap"](gm.graph)
    assert words(gm) == "gather mm wait mm"
    assert held(gm) == ["mm", "wait"]
