# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""Greedy bucketing: the cap of a bucket is the one of its own index."""

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.bucketing import bucket_all_gather_by_mb
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestGreedyBucketCaps(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def sizes_of_buckets(self, gathers, caps_mb):
        """Members of the buckets of gathers of 1 MiB, with these caps; the last one repeats."""

        def gather_all(*shards):
            group = dist.group.WORLD.group_name
            starts = [
                torch.ops._c10d_functional.all_gather_into_tensor(shard, 2, group)
                for shard in shards
            ]
            return [torch.ops._c10d_functional.wait_tensor(start) for start in starts]

        with FakeTensorMode():
            gm = make_fx(gather_all)(*[torch.empty(1 << 17) for _ in range(gathers)])
        buckets = bucket_all_gather_by_mb(
            gm, lambda index: caps_mb[min(index, len(caps_mb) - 1)], mode="default"
        )
        return [len(bucket) for bucket in buckets]

    def test_one_cap(self):
        self.assertEqual(self.sizes_of_buckets(9, [3.0]), [3, 3, 3])

    def test_growing_caps(self):
        self.assertEqual(self.sizes_of_buckets(9, [2.0, 3.0, 4.0]), [2, 3, 4])

    def test_shrinking_caps(self):
        self.assertEqual(self.sizes_of_buckets(9, [5.0, 2.0]), [5, 2, 2])

    def test_index_counts_buckets_of_one(self):
        """A bucket of one is not returned, and its index is used up."""
        self.assertEqual(self.sizes_of_buckets(6, [1.0, 2.0, 3.0]), [2, 3])


if __name__ == "__main__":
    run_tests()
