# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""Greedy bucketing: what depends on a bucket's member goes to a later bucket."""

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.bucketing import bucket_all_reduce_by_mb
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestGreedyBucketDependents(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def buckets(self, function, inputs, cap_mb=100.0):
        """Buckets as lists of the reductions' numbers in the graph."""
        with FakeTensorMode():
            gm = make_fx(function)(*[torch.empty(1 << 18) for _ in range(inputs)])
        starts = gm.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_reduce.default
        )
        found = bucket_all_reduce_by_mb(gm, lambda index: cap_mb)
        return [[starts.index(node) for node in bucket] for bucket in found]

    @staticmethod
    def reduce(x):
        group = dist.group.WORLD.group_name
        start = torch.ops._c10d_functional.all_reduce(x, "sum", group)
        return torch.ops._c10d_functional.wait_tensor(start)

    def test_independent(self):
        def two(x, y):
            return self.reduce(x), self.reduce(y)

        self.assertEqual(self.buckets(two, 2), [[0, 1]])

    def test_second_layer_is_the_next_bucket(self):
        """0 -> 2 and 1 -> 3: two of each."""

        def layers(x, y):
            x, y = self.reduce(x), self.reduce(y)
            return self.reduce(x + 1), self.reduce(y + 1)

        self.assertEqual(self.buckets(layers, 2), [[0, 1], [2, 3]])

    def test_dependents_of_several_layers(self):
        def layers(x, y):
            for _ in range(3):
                x, y = self.reduce(x), self.reduce(y)
            return x, y

        self.assertEqual(self.buckets(layers, 2), [[0, 1], [2, 3], [4, 5]])

    def test_dependent_comes_before_what_did_not_fit(self):
        """0 -> 1, and 2, 3 are free: with room for two, 1 stands in front of 3 in the graph."""

        def mixed(x, y, z):
            first = self.reduce(x)
            return self.reduce(first + 1), self.reduce(y), self.reduce(z)

        self.assertEqual(self.buckets(mixed, 3, cap_mb=2.0), [[0, 2], [1, 3]])

    def test_buckets_make_no_cycle_together(self):
        """0 -> 1 -> 3, 2 -> 4: a bucket is never needed by one made before it."""

        def crossed(x, y):
            first = self.reduce(x)
            second = self.reduce(first)
            third = self.reduce(y)
            return self.reduce(second + 1), self.reduce(third + 1)

        # 3 needs 1, so it may not be with 0 and 2, nor with 1.
        self.assertEqual(self.buckets(crossed, 2, cap_mb=2.0), [[0, 2], [1, 4]])


if __name__ == "__main__":
    run_tests()
