"""The pipeline as a whole: what it reports, what it does when something fails."""

import contextlib
import copy
import gc
import json
import logging

import pytest
import torch
from torch._dynamo.utils import counters

from torch_patches._inductor.fx_passes.comm_overlap import changing, notices, pipeline
from torch_patches._inductor.fx_passes.comm_overlap.graph import rewrite
from torch_patches._inductor.fx_passes.comm_overlap.graph.snapshot import Snapshot
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.testing.graph_builder import GraphBuilder

pytestmark = pytest.mark.usefixtures("as_on_gpu")
aten = torch.ops.aten
TOPO_SPAN = Options("topo_span")


def small_graph():
    b = GraphBuilder()
    x, waits = b.placeholder(4, 4), []
    for _ in range(3):
        x = b.call(aten.mm, x, b.gather_and_wait(b.placeholder(2, 4), 2, "g"))
        waits.append(b.scatter_and_wait(x, "sum", 2, "g"))
    return b.output(x, *waits)


@pytest.fixture
def lenient(monkeypatch):
    """What a user's process does: no strict mode."""
    monkeypatch.setenv(notices.STRICT_VARIABLE, "0")
    notices.warn_untouched.cache_clear()


def text(gm):
    return [(n.name, n.op, str(n.target), str(n.args), str(n.kwargs)) for n in gm.graph.nodes]


class TestReport:
    def test_figures_are_in_report_counters_and_one_info_line(self, caplog):
        counters.clear()
        with caplog.at_level(logging.INFO, logger="torch_patches"):
            report = pipeline.optimize_graph(small_graph(), TOPO_SPAN)
        assert report.collectives_before == {"all_gather": 3, "reduce_scatter": 3}
        assert report.collectives_after == {"all_gather": 1, "reduce_scatter": 1}
        assert report.max_span == max(x.span for x in report.buckets)
        assert report.closes == {"end": 2}
        assert report.max_consecutive_compute_before == 1
        assert report.max_consecutive_compute_after == 3
        counts = counters["inductor"]
        assert counts["comm_overlap_buckets"] == 2
        assert counts["comm_overlap_bucket_members"] == 6
        assert counts["comm_overlap_closed_by_end"] == 2
        assert counts["comm_overlap_max_span"] == report.max_span
        assert counts["comm_overlap_max_topo_span"] == 1500
        (record,) = [r for r in caplog.records if r.levelno == logging.INFO]
        assert record.report is report
        line = record.getMessage()
        for figure in ("2 buckets of 6", f"max span {report.max_span} (bound 1500)", "1 -> 3"):
            assert figure in line

    def test_debug_log_has_the_buckets_and_what_is_not_merged(self, caplog):
        with caplog.at_level(logging.DEBUG, logger="torch_patches"):
            report = pipeline.optimize_graph(small_graph(), TOPO_SPAN)
        ours = [r for r in caplog.records if r.name.startswith("torch_patches")]
        debug = "\n".join(r.getMessage() for r in ours if r.levelno == logging.DEBUG)
        assert debug == "\n".join(report.explain_decisions())
        assert debug.count("of 3 on g") == 2
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="torch_patches"):
            pipeline.optimize_graph(small_graph(), Options("topo_span", bucket_cap_mb=0.0))
        assert "not merged, because" in caplog.text

    def test_bytes_by_dtype_and_group(self):
        report = pipeline.optimize_graph(small_graph(), TOPO_SPAN)
        before = {(g.kind, g.group): g for g in report.groups_before}
        assert before["all_gather", "g"].bytes_by_dtype == {"float32": 3 * 64}
        assert {g.count for g in report.groups_after} == {1}
        assert sum(g.size_bytes for g in report.groups_after) == sum(
            g.size_bytes for g in report.groups_before
        )

    def test_json_has_every_refusal_as_a_sentence(self):
        b = GraphBuilder()
        gm = b.output(b.wait(b.all_to_all(b.placeholder(4), [2, 2], [2, 2], "g")))
        report = pipeline.optimize_graph(gm, TOPO_SPAN)
        (refusal,) = json.loads(report.to_json())["refusals"]
        assert refusal["reason"] == "this kind of collective is never merged"

    def test_schedule_hash_is_blind_to_names_and_sees_the_order(self):
        def schedule(build):
            b = GraphBuilder()
            gm = b.output(*[b.wait(s) for s in build(b)])
            for i, node in enumerate(gm.graph.nodes):
                node.name = f"n{i}_{id(b)}"
            return pipeline.optimize_graph(gm, TOPO_SPAN).schedule_hash

        def renamed(b):  # a rank of another sub-group: other names for the same roles
            return [b.all_reduce(b.placeholder(n), "sum", g) for n, g in ((4, "x"), (2, "y"))]

        def one(b):
            return [b.all_reduce(b.placeholder(n), "sum", g) for n, g in ((4, "a"), (2, "b"))]

        def other(b):
            return [b.all_reduce(b.placeholder(n), "sum", g) for n, g in ((2, "b"), (4, "a"))]

        assert schedule(one) == schedule(one) == schedule(renamed)
        assert schedule(one) != schedule(other)

    def test_graph_without_collectives_is_left_alone(self):
        b = GraphBuilder()
        gm = b.output(b.call(aten.neg, b.placeholder(4)))
        before = text(gm)
        report = pipeline.optimize_graph(gm, TOPO_SPAN)
        assert text(gm) == before
        assert report.buckets == ()
        assert report.failure is None


class TestDeterminism:
    def test_equal_input_gives_equal_text(self):
        gm = small_graph()
        copies = [copy.deepcopy(gm) for _ in range(2)]
        for one in copies:
            pipeline.optimize_graph(one, TOPO_SPAN)
        assert text(copies[0]) == text(copies[1])

    def test_node_names_do_not_decide(self):
        gm, renamed = small_graph(), small_graph()
        for i, node in enumerate(reversed(renamed.graph.nodes)):
            node.name = f"x{i}"
        reports = [pipeline.optimize_graph(one, TOPO_SPAN) for one in (gm, renamed)]
        assert reports[0].schedule_hash == reports[1].schedule_hash
        assert [str(n.target) for n in gm.graph.nodes if n.op == "call_function"] == [
            str(n.target) for n in renamed.graph.nodes if n.op == "call_function"
        ]


STAGES = {
    "collect": (changing, "collect"),
    "contract": (changing, "contract"),
    "check": (changing, "check_plan"),
    "apply": (changing, "apply_plan"),
    "side effects": (changing, "check_fences"),
    "apply half way": (rewrite, "smallest_order"),
}


@pytest.mark.parametrize("stage", STAGES)
class TestFailure:
    def _break(self, monkeypatch, stage, error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(*STAGES[stage], fail)

    def test_cause_in_the_graph_leaves_it_untouched_with_one_warning(
        self, monkeypatch, lenient, caplog, stage
    ):
        gm = small_graph()
        before, code = text(gm), gm.code
        self._break(monkeypatch, stage, KeyError("boom"))
        for _ in range(2):
            with caplog.at_level(logging.WARNING, logger="torch_patches"):
                pipeline.optimize_graph(gm, TOPO_SPAN)
        assert text(gm) == before
        assert gm.code == code
        gm.graph.lint()
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "boom" in warnings[0]
        assert 'bucketing_mode = "none"' in warnings[0]

    @pytest.mark.parametrize(
        "error",
        [OSError("disk"), MemoryError(), RecursionError(), ImportError(), torch.OutOfMemoryError()],
    )
    def test_cause_local_to_a_rank_raises(self, monkeypatch, lenient, stage, error):
        self._break(monkeypatch, stage, error)
        with pytest.raises(type(error)):
            pipeline.optimize_graph(small_graph(), TOPO_SPAN)

    def test_strict_mode_raises(self, monkeypatch, stage):
        monkeypatch.setenv(notices.STRICT_VARIABLE, "1")
        self._break(monkeypatch, stage, KeyError("boom"))
        with pytest.raises(KeyError, match="boom"):
            pipeline.optimize_graph(small_graph(), TOPO_SPAN)


class TestReportFailure:
    """The other ranks have changed the graph; a failure to tell must not undo it here."""

    @pytest.mark.parametrize("error", [KeyError("boom"), OSError("disk")])
    def test_graph_stays_bucketed_with_a_warning(self, monkeypatch, lenient, caplog, error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(changing, "build_report", fail)
        gm = small_graph()
        with caplog.at_level(logging.WARNING, logger="torch_patches"):
            pipeline.optimize_graph(gm, TOPO_SPAN)
        assert gm.code.count("_coalesced.default(") == 2
        assert "could not report" in caplog.text


class TestSnapshot:
    def test_restored_graph_equals_the_original_and_can_be_optimized(self):
        gm = small_graph()
        before = text(gm)
        snapshot = Snapshot(gm.graph)
        pipeline.run_post_grad(gm.graph, TOPO_SPAN)
        assert text(gm) != before
        snapshot.restore()
        gm.graph.lint()
        assert text(gm) == before
        assert all("val" in n.meta for n in gm.graph.nodes if n.op == "call_function")
        assert len(pipeline.optimize_graph(gm, TOPO_SPAN).buckets) == 2


def test_digest_sees_names_and_contents_of_every_file(tmp_path):
    (tmp_path / "package").mkdir()
    seen = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("package/b.py", "1"), ("c.py", "1")):
        (tmp_path / name).write_text(content)
        seen.add(pipeline.digest_of(tmp_path))
    assert len(seen) == 4
    assert pipeline.digest_of(tmp_path) in seen


class TestGarbageCollection:
    """Paused while a pass runs, and as it was afterwards."""

    @pytest.mark.parametrize("was_on", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_paused_and_restored(self, monkeypatch, was_on, fails):
        during = []

        def look(*args, **kwargs):
            during.append(gc.isenabled())
            if fails:
                raise MemoryError
            return collect(*args, **kwargs)

        collect = changing.collect
        monkeypatch.setattr(changing, "collect", look)
        before = gc.isenabled()
        try:
            gc.enable() if was_on else gc.disable()
            with contextlib.suppress(MemoryError):
                pipeline.optimize_graph(small_graph(), TOPO_SPAN)
            assert gc.isenabled() == was_on
            assert during
            assert not any(during)
        finally:
            gc.enable() if before else gc.disable()


def test_a_reason_is_the_first_line_of_an_error() -> None:
    error = NotImplementedError(
        "no kernel\n\nCPU: registered at a.cpp:1\nMeta: registered at b.cpp:2"
    )
    assert notices.reason_of(error) == "NotImplementedError: no kernel"
    assert notices.reason_of(ValueError("x" * 5000)) == f"ValueError: {'x' * 300}..."
    assert notices.reason_of(KeyError()) == "KeyError: "
