# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""Overlap scheduling: which of two memory caps binds."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.overlap_scheduling import OverlapScheduler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _runtime_estimation


class TestMemoryCaps(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        bandwidth = mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", lambda: 1000)
        bandwidth.start()
        self.addCleanup(bandwidth.stop)

    def allowed_increase(self, gb, ratio):
        """Bytes over the input's peak that a scheduler with these caps allows, and that peak."""

        def reduce_one(x):
            group = dist.group.WORLD.group_name
            start = torch.ops._c10d_functional.all_reduce(x @ x, "sum", group)
            return torch.ops._c10d_functional.wait_tensor(start)

        with FakeTensorMode():
            # Fake tensors of a device whose memory is counted; that of the CPU is not.
            gm = make_fx(reduce_one)(torch.empty(512, 512, device="meta"))
        scheduler = OverlapScheduler(
            gm,
            max_in_flight_gb=5.0,
            max_compute_pre_fetch=5,
            collective_bucketing=False,
            insert_overlap_deps=False,
            compute_overlap_multipler=1.0,
            max_coll_distance=10,
            custom_runtime_estimation=lambda node, size: 1.0,
            max_memory_increase_gb=gb,
            max_memory_increase_ratio=ratio,
        )
        peak = scheduler.original_peak_memory
        return scheduler.allowed_peak_memory_bytes - peak, peak

    def test_one_cap(self):
        self.assertEqual(self.allowed_increase(1.0, None)[0], 1 << 30)
        increase, peak = self.allowed_increase(None, 0.5)
        self.assertEqual(increase, peak // 2)

    def test_smaller_cap_binds(self):
        increase, peak = self.allowed_increase(1.0, 0.5)
        self.assertGreater(peak, 0)
        self.assertEqual(increase, peak // 2)
        self.assertEqual(self.allowed_increase(1 / (1 << 20), 0.5)[0], 1 << 10)

    def test_a_cap_of_nothing_binds(self):
        self.assertEqual(self.allowed_increase(0.0, 0.5)[0], 0)
        self.assertEqual(self.allowed_increase(1.0, 0.0)[0], 0)


if __name__ == "__main__":
    run_tests()
