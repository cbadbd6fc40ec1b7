"""A Dynamo backend that runs Inductor's post-grad graphs eagerly instead of generating code.

Everything up to code generation is Inductor's: decompositions, the joint passes, the partitioner,
then the custom post-grad passes of the compile (ours among them, put there by the hook).  Since no
kernel is fused, two runs that differ only in how collectives are bucketed must agree bit for bit::

    torch.compile(model, backend=post_grad_eager, fullgraph=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config

from torch_patches import _compat
from torch_patches.config import PREFIX

HOLDS_ORDER = f"{PREFIX}insert_overlap_deps"


def post_grad_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """See the module."""
    # Looked up at call time: that is where the hook sits.
    compile_fx: Callable[..., Any] = compile_fx_module.compile_fx
    patches = {} if _compat.runs_control_deps() else {HOLDS_ORDER: False}
    with inductor_config.patch(patches):
        return compile_fx(gm, example_inputs, inner_compile=_run_eagerly)


def _run_eagerly(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Stands in for Inductor's code generation."""
    passes = inductor_config.post_grad_custom_post_pass
    for graph_pass in passes if isinstance(passes, (list, tuple)) else [passes]:
        if graph_pass is not None:
            graph_pass(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return make_boxed_func(gm.forward)
