# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""comm_overlap under torch.compile's Inductor, reached by the flags of the config."""

import subprocess
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.comm_overlap import in_tree, pipeline
from torch._inductor.fx_passes.comm_overlap.flags import FLAGS, FlagError
from torch._inductor.fx_passes.comm_overlap.graph.tags import TAG_MARK
from torch._inductor.fx_passes.comm_overlap.plan import (
    CollectiveTag,
    TagSource,
    Traffic,
)
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

c10d = torch.ops._c10d_functional
PREFIX = "aten_distributed_optimizations."


def flags(**values):
    return config.patch({PREFIX + name: value for name, value in values.items()})


class TestInTree(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    @staticmethod
    def model(x, *shards):
        """Four products with gathered weights."""
        for shard in shards:
            group = dist.group.WORLD.group_name
            start = c10d.all_gather_into_tensor(shard, 2, group)
            x = x @ c10d.wait_tensor(start)
        return x

    def graph(self):
        with FakeTensorMode():
            shards = [torch.empty(32, 64) for _ in range(4)]
            return make_fx(self.model)(torch.empty(64, 64), *shards)

    def launches(self, gm):
        return sum(
            "all_gather" in str(node.target) and node.op == "call_function"
            for node in gm.graph.nodes
        )

    def post_grad(self, **values):
        gm = self.graph()
        with (
            flags(**values),
            gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode,
        ):
            joint_graph_passes(gm)
            with torch._inductor.virtualized.V.set_fake_mode(
                gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
            ):
                post_grad_passes(gm, is_inference=True)
        return gm

    def test_nothing_is_imported_at_the_defaults(self):
        code = (
            "import torch, sys; from torch._inductor.utils import fresh_cache; "
            "step = torch.compile(lambda x: x @ x); x = torch.ones(4, 4, requires_grad=True)\n"
            "with fresh_cache(): step(x).sum().backward()\n"
            "assert 'torch._inductor.fx_passes.joint_graph' in sys.modules\n"
            "assert 'torch._inductor.codecache' in sys.modules\n"
            "sys.exit(any('comm_overlap' in name for name in sys.modules))"
        )
        self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)

    def test_every_flag_but_those_left_out_is_in_the_config(self):
        missing = [f.name for f in FLAGS if f.full_name not in config._config]
        self.assertEqual(missing, ["create_flattened_groups"])
        for flag in FLAGS:
            if flag.name not in missing and not flag.of_torch:
                value = getattr(config.aten_distributed_optimizations, flag.name)
                self.assertEqual(value, flag.default)

    def test_off_by_default(self):
        self.assertEqual(self.launches(self.post_grad()), 4)

    def test_topo_span_merges(self):
        self.assertEqual(self.launches(self.post_grad(bucketing_mode="topo_span")), 1)

    def test_wrong_value_is_an_error(self):
        with (
            flags(bucketing_mode="greedy"),
            self.assertRaisesRegex(FlagError, "'greedy' is not allowed"),
        ):
            in_tree.read_options()

    def test_torch_schedules_only_where_no_mode_is_set(self):
        entry = (
            "torch._inductor.fx_passes.overlap_scheduling"
            ".schedule_overlap_bucketing_from_inductor_configs"
        )
        for mode, calls in (("none", 1), ("topo_span", 0)):
            with mock.patch(entry) as torchs:
                self.post_grad(enable_overlap_scheduling=True, bucketing_mode=mode)
            self.assertEqual(torchs.call_count, calls)

    def test_passes_that_bucket_too_run_only_where_no_mode_is_set(self):
        flag, entry = (
            "bucket_all_gathers_fx",
            "torch._inductor.fx_passes.bucketing.bucket_all_gather",
        )
        for mode, calls in (("none", 1), ("topo_span", 0)):
            in_tree._warn_unread.cache_clear()
            with (
                mock.patch(entry) as bucket,
                mock.patch.object(in_tree.log, "warning") as warning,
                config.patch({flag: "all"}),
            ):
                self.post_grad(bucketing_mode=mode)
                self.post_grad(bucketing_mode=mode)
            self.assertEqual(bucket.call_count, 2 * calls)
            self.assertEqual(warning.call_count, 1 - calls)
            self.assertIn(flag, str(warning.call_args_list) if warning.called else flag)

    def test_cache_key_sees_names_where_they_decide(self):
        """Two graphs that differ in the name of the module only, before they are tagged."""

        def facts(path):
            gm = self.graph()
            for node in gm.graph.nodes:
                node.meta["nn_module_stack"] = {str(id(gm)): (path, torch.nn.Linear)}
            return in_tree.cache_facts(gm)

        for mode, same in (("topo_span", True), ("transformer_block", False)):
            with flags(bucketing_mode=mode):
                self.assertEqual(facts("layers.0"), facts("layers.0"))
                self.assertEqual(facts("layers.0") == facts("layers.1"), same)

    def test_joint_graph_is_tagged_first(self):
        order = []
        with (
            mock.patch.object(pipeline, "run_joint", lambda *a: order.append("joint")),
            mock.patch.object(pipeline, "run_post_grad", lambda *a: order.append("post_grad")),
        ):
            self.post_grad(bucketing_mode="topo_span")
        self.assertEqual(order, ["joint", "post_grad"])

    def test_cache_key_sees_tags_and_groups(self):
        gm = self.graph()
        with flags(bucketing_mode="topo_span"):
            untagged = in_tree.cache_facts(gm)
            self.assertEqual(untagged, in_tree.cache_facts(self.graph()))
            start = gm.graph.find_nodes(
                op="call_function", target=c10d.all_gather_into_tensor.default
            )[0]
            start.meta[TAG_MARK] = CollectiveTag(Traffic.OTHER, TagSource.STRUCTURE)
            tagged = in_tree.cache_facts(gm)
            self.assertNotEqual(tagged, untagged)
            dist.new_group([0])
            self.assertNotEqual(in_tree.cache_facts(gm), tagged)

    def test_compared_ranks_never_come_from_a_cache(self):
        gm = self.graph()
        with flags(bucketing_mode="topo_span", cross_rank_check="warn"):
            self.assertNotEqual(in_tree.cache_facts(gm), in_tree.cache_facts(gm))

    def test_compile_reaches_it(self):
        """The graph that code is generated for has one gather."""
        seen = []

        def post_grad(graph, options):
            report = original(graph, options)
            seen.append((report.collectives_before, report.collectives_after))
            return report

        original = pipeline.run_post_grad
        shards = [torch.empty(32, 64) for _ in range(4)]
        with (
            mock.patch.object(pipeline, "run_post_grad", post_grad),
            flags(bucketing_mode="topo_span"),
            fresh_cache(),
            torch.no_grad(),
        ):
            torch.compile(self.model, backend=compile_fx)(torch.empty(64, 64), *shards)
        ((before, after),) = seen
        self.assertEqual((before["all_gather"], after["all_gather"]), (4, 1))


if __name__ == "__main__":
    run_tests()
