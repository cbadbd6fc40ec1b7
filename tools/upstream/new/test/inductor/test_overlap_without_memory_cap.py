# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""Overlap scheduling without any memory cap."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _runtime_estimation

c10d = torch.ops._c10d_functional


class TestWithoutMemoryCap(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def order(self, gb, ratio):
        """Starts ("S") and products ("m") of a scheduled chain of four gathered layers."""

        def chain(x, *shards):
            for shard in shards:
                start = c10d.all_gather_into_tensor(shard, 2, dist.group.WORLD.group_name)
                x = x @ c10d.wait_tensor(start)
            return x

        with FakeTensorMode():
            shards = [torch.empty(256, 512) for _ in range(4)]
            gm = make_fx(chain)(torch.empty(512, 512), *shards)
        with (
            mock.patch.object(_runtime_estimation, "get_device_tflops", lambda dtype: 100.0),
            mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", lambda: 1000),
        ):
            schedule_overlap_bucketing(
                gm,
                custom_runtime_estimation=lambda node, size: 0.001,
                compute_estimator="analytical",
                max_memory_increase_gb=gb,
                max_memory_increase_ratio=ratio,
                pre_bucketing_fsdp_collectives=False,
            )
        letters = {
            c10d.all_gather_into_tensor.default: "S",
            torch.ops.aten.mm.default: "m",
        }
        return "".join(letters.get(node.target, "") for node in gm.graph.nodes)

    def test_no_cap_schedules_as_a_cap_that_does_not_bind(self):
        self.assertEqual(self.order(None, None), self.order(1000.0, None))

    def test_no_cap_prefetches(self):
        self.assertNotEqual(self.order(None, None), "SmSmSmSm")


if __name__ == "__main__":
    run_tests()
