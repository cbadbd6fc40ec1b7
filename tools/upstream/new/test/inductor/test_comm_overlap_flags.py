# Owner(s): ["module: inductor"]
# mypy: ignore-errors
"""The table of flags of comm_overlap."""

from torch._inductor.fx_passes.comm_overlap.flag_checks import Unacceptable
from torch._inductor.fx_passes.comm_overlap.flags import BY_NAME, FLAGS
from torch._inductor.fx_passes.comm_overlap.options import Options
from torch.testing._internal.common_utils import TestCase, run_tests


class TestFlags(TestCase):
    def test_defaults_are_allowed_and_those_of_the_options(self):
        options = Options()
        for flag in FLAGS:
            self.assertEqual(flag.check(flag.default), getattr(options, flag.name))

    def test_bad_values_are_refused(self):
        bad = {
            "bucketing_mode": "greedy",
            "bucket_cap_mb": -1.0,
            "max_topo_span": True,
            "compute_slowdown": 0.5,
            "module_bucket_plans": [["layers.["]],
        }
        for name, value in bad.items():
            with self.assertRaises(Unacceptable):
                BY_NAME[name].check(value)

    def test_caps_by_index_become_a_tuple(self):
        self.assertEqual(BY_NAME["bucket_cap_mb"].check([1, 25]), (1.0, 25.0))


if __name__ == "__main__":
    run_tests()
