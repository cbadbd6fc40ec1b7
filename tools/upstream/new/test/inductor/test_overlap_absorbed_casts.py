# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""A cast that a bucket of gathers absorbs, and that hid another collective."""

import torch
import torch.distributed as dist
from torch._inductor.fx_passes.overlap_preserving_bucketer import (
    OverlapPreservingBucketer,
)
from torch._inductor.fx_passes.overlap_scheduling import CollectiveInfo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._ordered_set import OrderedSet

c10d = torch.ops._c10d_functional


class TestAbsorbedCasts(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def test_order_around_the_cast_stays(self):
        """gather_0 [cast_2 hides it] mm mm_1 cast_1 gather_1 gather_2 wait_0 wait_1 wait_2: gathers 1
        and 2 are merged, behind both products, and do their casts themselves."""

        def layer(x, *shards):
            group = dist.group.WORLD.group_name
            first = c10d.all_gather_into_tensor(shards[0], 2, group)
            cast_2 = torch.ops.prims.convert_element_type(shards[2], torch.bfloat16)
            product = x @ x @ x
            cast_1 = torch.ops.prims.convert_element_type(shards[1], torch.bfloat16)
            second = c10d.all_gather_into_tensor(cast_1, 2, group)
            third = c10d.all_gather_into_tensor(cast_2, 2, group)
            waits = [c10d.wait_tensor(start) for start in (first, second, third)]
            return product, *waits

        with FakeTensorMode():
            shards = [torch.empty(4, 8) for _ in range(3)]
            graph = make_fx(layer)(torch.empty(8, 8), *shards).graph
        gather = c10d.all_gather_into_tensor.default
        starts = graph.find_nodes(op="call_function", target=gather)
        infos = {
            start: CollectiveInfo(start, next(iter(start.users)), 256, 1.0, 1.0) for start in starts
        }
        infos[starts[0]].hiding_nodes = OrderedSet([starts[2].args[0]])
        infos[starts[0]].exposed_time_ms = 0.0
        bucketer = OverlapPreservingBucketer(graph, infos, OrderedSet(graph.nodes))
        bucketer.bucket_collectives()
        graph.lint()
        order = list(graph.nodes)
        merged = [node for node in order if "all_gather_into_tensor_out" in node.name]
        self.assertEqual(len(merged), 1)
        products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        self.assertEqual(len(products), 2)
        places = [order.index(node) for node in (starts[0], *products, *merged)]
        self.assertEqual(places, sorted(places))


if __name__ == "__main__":
    run_tests()
