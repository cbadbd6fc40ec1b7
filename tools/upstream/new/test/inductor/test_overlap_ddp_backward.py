# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""A merge that is tried and given up leaves the bucketer's timeline as it was."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.overlap_preserving_bucketer import (
    OverlapPreservingBucketer,
)
from torch._inductor.fx_passes.overlap_scheduling import (
    CollectiveInfo,
    schedule_overlap_bucketing,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _runtime_estimation
from torch.utils._ordered_set import OrderedSet

c10d = torch.ops._c10d_functional


def reduced(grad, group):
    return c10d.wait_tensor(c10d.all_reduce(grad, "sum", group)) / 2


class SharedParameter(torch.autograd.Function):
    """A parameter whose gradient is averaged over the ranks as soon as it is there."""

    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group), None


class TestDdpBackward(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        self.group = dist.group.WORLD.group_name

    def test_given_up_merge_restores_the_dependencies(self):
        """start_0 wait_0 mm_0 | start_1 wait_1 mm_1 | ...: nodes of a timeline depend each on the one
        before.  Taking any of them out and putting it back changes nothing."""

        def chain(x):
            for _ in range(3):
                x = x @ reduced(x, self.group)
            return x

        with FakeTensorMode():
            graph = make_fx(chain)(torch.empty(8, 8)).graph
        starts = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
        infos = {
            start: CollectiveInfo(start, next(iter(start.users)), 256, 1.0, 1.0) for start in starts
        }
        bucketer = OverlapPreservingBucketer(graph, infos, OrderedSet(graph.nodes))
        bucketer._populate_node_to_event(self.group)
        before = bucketer.aug_graph.get_all_extra_deps()
        self.assertGreater(len(before), 6)
        for start, info in infos.items():
            for node in (start, info.wait_node):
                around = bucketer.remove_from_event(node)
                bucketer.restore_to_event(node, *around)
                self.assertEqual(bucketer.aug_graph.get_all_extra_deps(), before)

    def backward(self, layers, width, batch):
        """Graph of the gradients of pre-norm MLP blocks, each reduced by itself."""

        def grads(x, *weights):
            hidden = x
            for up, down, norm in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
                shared = [SharedParameter.apply(w, self.group) for w in (up, down, norm)]
                inner = torch.nn.functional.silu(hidden * shared[2] @ shared[0])
                hidden = hidden + inner @ shared[1]
            return torch.autograd.grad(hidden.sum(), weights)

        with FakeTensorMode():
            shapes = [(width, 4 * width), (4 * width, width), (width,)] * layers
            weights = [torch.empty(shape, requires_grad=True) for shape in shapes]
            return make_fx(grads)(torch.empty(batch, width), *weights)

    def test_ddp_backward_is_scheduled(self):
        """Links so slow that a reduction spans several layers, so that merges are tried and given
        up while others have been made."""

        def estimate(node, size):
            if node.target == c10d.all_reduce.default:
                numel = node.args[0].meta["val"].numel()
                return 2.0 if size == 0 else 2.0 + 20 * numel / 1e6
            return None

        for layers in (4, 6):
            gm = self.backward(layers, width=256, batch=512)
            with (
                mock.patch.object(
                    _runtime_estimation, "get_device_tflops", lambda dtype, **kwargs: 100.0
                ),
                mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", lambda: 1000),
            ):
                schedule_overlap_bucketing(
                    gm,
                    collective_bucketing=True,
                    enable_fusion_regions=True,
                    compute_estimator="analytical",
                    custom_runtime_estimation=estimate,
                )
            gm.graph.lint()
            starts = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
            self.assertLess(len(starts), 3 * layers)


if __name__ == "__main__":
    run_tests()
