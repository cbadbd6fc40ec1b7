# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""The roofline estimate of overlap scheduling on a machine that has no GPU to ask."""

from unittest import mock

import torch
from torch._inductor.fx_passes.overlap_scheduling import estimate_roofline_runtime_ms
from torch._inductor.utils import get_gpu_dram_gbps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests


class TestRooflineWithoutGpu(TestCase):
    def setUp(self):
        super().setUp()
        no_gpu = mock.patch.object(torch.accelerator, "is_available", lambda: False)
        no_gpu.start()
        self.addCleanup(no_gpu.stop)
        get_gpu_dram_gbps.cache_clear()
        self.addCleanup(get_gpu_dram_gbps.cache_clear)

    def estimate(self, size):
        """ms of one pointwise kernel that reads and writes ``size`` fp32 elements."""
        with FakeTensorMode():
            gm = make_fx(lambda x: x + 1)(torch.empty(size))
        (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        return estimate_roofline_runtime_ms(add)

    def test_estimate_is_a_time(self):
        self.assertGreater(self.estimate(1 << 20), 0.0)

    def test_estimate_is_bytes_over_bandwidth(self):
        self.assertEqual(self.estimate(1 << 20), 2 * 4 * (1 << 20) / get_gpu_dram_gbps() / 1e6)

    def test_bandwidth_is_warned_of_once(self):
        with self.assertLogs("torch._inductor.utils", "WARNING") as logs:
            get_gpu_dram_gbps()
            get_gpu_dram_gbps()
        self.assertEqual(len(logs.output), 1)
        self.assertIn("no GPU", logs.output[0])


if __name__ == "__main__":
    run_tests()
