"""Other people's names over this code: autoparallel's, then torch's own.

autoparallel's are passes as plain functions, for people who compose their own backend: the
pipeline's two phases, and the fusion of chained all-gathers.

Tagging needs the joint graph, which only a partition function sees; bucketing wants the graphs that
come out of it::

    import functorch.compile
    from torch._dynamo.backends.common import aot_autograd
    from torch_patches.compat_api import bucket_collectives, tag_collectives_for_bucketing

    def compile_graph(gm, inputs):
        bucket_collectives(gm, bucket_cap_mb=50.0)
        return functorch.compile.make_boxed_func(gm.forward)

    def backend(model, inputs):
        def partition(joint, joint_inputs, **kwargs):
            tag_collectives_for_bucketing(joint, model)
            return functorch.compile.default_partition(joint, joint_inputs, **kwargs)

        return aot_autograd(fw_compiler=compile_graph, partition_fn=partition)(model, inputs)

    model = torch.compile(model, backend=backend)

Each works alone: without tags, descriptors of the inputs and then the structure of the graph tell
which collectives carry parameters and gradients.

torch's names have torch 2.13's signatures and return types, and do what the pipeline does;
``docs/drop_in.md`` says what each argument means here::

    from torch_patches.compat_api import schedule_overlap_bucketing

    schedule_overlap_bucketing(gm, collective_bucketing=True)
"""

from torch_patches.compat_api.augmented_graph_helper import AugmentedGraphHelper
from torch_patches.compat_api.autoparallel import (
    bucket_collectives,
    fuse_chained_allgathers,
    tag_collectives_for_bucketing,
)
from torch_patches.compat_api.bucketing import greedy_bucket_collective_by_mb
from torch_patches.compat_api.fsdp import identify_fsdp_groups, pre_bucket_fsdp_collectives
from torch_patches.compat_api.overlap_manual_scheduling import (
    ManualOverlapScheduler,
    manual_overlap_bucketing,
)
from torch_patches.compat_api.overlap_preserving_bucketer import OverlapPreservingBucketer
from torch_patches.compat_api.overlap_scheduling import (
    OverlapScheduler,
    schedule_overlap_bucketing,
)

__all__ = [
    "AugmentedGraphHelper",
    "ManualOverlapScheduler",
    "OverlapPreservingBucketer",
    "OverlapScheduler",
    "bucket_collectives",
    "fuse_chained_allgathers",
    "greedy_bucket_collective_by_mb",
    "identify_fsdp_groups",
    "manual_overlap_bucketing",
    "pre_bucket_fsdp_collectives",
    "schedule_overlap_bucketing",
    "tag_collectives_for_bucketing",
]
