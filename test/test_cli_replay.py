"""``torch-patches replay``, and the readers of texts behind it: nothing of a file is executed."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_patches import _compat, cli
from torch_patches._inductor.fx_passes.comm_overlap.graph.collectives import collect
from torch_patches._inductor.fx_passes.comm_overlap.schedule_hash import launch_texts
from torch_patches.captured import CaptureFormatError, _propagate, load_captured
from torch_patches.captured._trace import read_trace
from torch_patches.captured.files import load_any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "test" / "data"
FSDP = DATA / "llama_2l_fsdp8_noreshard.json.gz"
HSDP = DATA / "llama_2l_hsdp2x4.json.gz"


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def replay(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    capsys.readouterr()  # what commands before have said
    assert run("replay", *arguments, "--json") == status
    return json.loads(capsys.readouterr().out)


# -- captures -------------------------------------------------------------------------------------


def test_before_and_after_of_a_capture(capsys: pytest.CaptureFixture[str]) -> None:
    found = replay(capsys, FSDP, "--as-on-gpu", "--check", "--compare", "torch")
    assert (found["kind"], found["warnings"]) == ("capture", [])
    assert list(found["graphs"]) == ["fw", "bw"]
    forward = found["graphs"]["fw"]
    assert forward["before"]["launches"] == {"all_gather": 21}
    assert forward["after"]["launches"]["all_gather"] < 21
    assert forward["after"]["exposed_ms"] < forward["before"]["exposed_ms"]
    assert forward["report"]["mode"] == "auto"
    if _compat.torch_release() >= (2, 13):
        assert forward["torch"]["launches"]["all_gather"] < 21
    else:
        assert "torch" in forward
    assert forward["check"]["verdict"] == "equal"
    assert found["graphs"]["bw"]["check"]["verdict"] in ("equal", "close")


def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", FSDP, "--graph", "fw", "--mode", "topo_span", "--as-on-gpu") == 0
    text = capsys.readouterr().out
    assert "all_gather 21" in text
    assert "exposed, ms" in text
    assert "topo_span: 1 buckets of 21 collectives" in text


def test_any_flag(capsys: pytest.CaptureFixture[str]) -> None:
    def buckets(*flags: object) -> int:
        arguments = [item for flag in flags for item in ("--set", flag)]
        found = replay(capsys, FSDP, "--graph", "fw", "--mode", "topo_span", *arguments)
        return len(found["graphs"]["fw"]["report"]["buckets"])

    assert buckets() == 1
    assert buckets("max_topo_span=40") > 1
    assert buckets("aten_distributed_optimizations.max_topo_span=40") > 1
    assert buckets("max_topo_span=None") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "max_topo_spam=3"), "did you mean max_topo_span?"),
        (("--set", "max_topo_span"), "FLAG=VALUE is expected"),
        (("--set", "max_topo_span=-3"), "-3 is not allowed"),
        (("--mode", "fast"), "'fast' is not allowed"),
        (("--graph", "middle"), "no graph 'middle' in the file; there are: joint, fw, bw"),
        (("--table", "none.json"), "No such file"),
        (("--group", "x=0-7"), "no group 'x' in the graphs; there are: 0"),
        (("--group", "0=0-3"), "group '0' has 8 ranks in the graphs, 4 are given"),
        (("--group", "0=7-0"), "no range of ranks"),
        (("--group", "0=0-3,2"), "a rank is named twice"),
        (("--group", "0=0-99999999"), "no range of ranks"),
        (("--size", "s0=many"), "SYMBOL=NUMBER is expected"),
    ],
)
def test_wrong_options_are_told(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("replay", FSDP, *arguments) == 2
    assert said in capsys.readouterr().err


def test_groups_without_a_common_rank_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(load_captured(HSDP).groups)
    sizes = {name: len(ranks) for name, ranks in load_captured(HSDP).groups.items()}
    smallest = min(names, key=lambda name: sizes[name])
    given = f"{smallest}={100}-{100 + sizes[smallest] - 1}"
    assert run("replay", HSDP, "--group", given) == 2
    assert "no rank is in all of the groups" in capsys.readouterr().err


def test_saved_result_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {mode: tmp_path / f"{mode}.json.gz" for mode in ("topo_span", "auto")}
    for mode, path in paths.items():
        replay(capsys, FSDP, "--graph", "fw", "--mode", mode, "--as-on-gpu", "--save", path)
    captured = load_captured(paths["topo_span"])
    assert list(captured.graphs) == ["fw", "fw_after"]
    assert captured.info["replayed"]["bucketing_mode"] == "topo_span"
    assert run("diff", paths["topo_span"], paths["topo_span"]) == 0
    again = tmp_path / "again.json.gz"
    replay(capsys, FSDP, "--graph", "fw", "--mode", "topo_span", "--as-on-gpu", "--save", again)
    assert again.read_bytes() == paths["topo_span"].read_bytes()
    assert run("replay", FSDP, "--save", FSDP) == 2


def test_a_check_that_fails_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_patches.cli import _replaying

    def spoil(module: Any, captured: Any, options: Any) -> Any:
        report = planned(module, captured, options)
        output = next(iter(module.graph.find_nodes(op="output")))
        first = next(n for n in output.all_input_nodes if n.meta["val"].is_floating_point())
        with module.graph.inserting_before(output):
            wrong = module.graph.call_function(torch.ops.aten.mul.Tensor, (first, 1.5))
        wrong.meta["val"] = first.meta["val"]
        output.replace_input_with(first, wrong)
        module.recompile()
        return report

    planned = _replaying.plan
    monkeypatch.setattr(_replaying, "plan", spoil)
    found = replay(capsys, FSDP, "--graph", "fw", "--check", status=1)
    assert found["graphs"]["fw"]["check"]["verdict"] == "different"


def test_what_is_too_large_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_patches.cli import _replaying

    monkeypatch.setattr(_replaying, "MAX_CHECKED_RANKS", 4)
    found = replay(capsys, FSDP, "--graph", "fw", "--check")
    assert found["graphs"]["fw"]["check"] == {
        "verdict": "skipped",
        "detail": "8 ranks, at most 4 are run",
    }


# -- logs and repro files of a real compile --------------------------------------------------------

#: Each run is a fork made before anything was compiled, so that torch is imported once.
FORKS = """
import glob, json, os, shutil, sys, torch, torch.distributed as dist
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import torch_patches
from torch_patches.testing.parallelize import fully_shard_simple
from torch_patches.testing.preload import inductor_patterns

config.cpp.simdlen = 1  # scalar code compiles faster
flags = config.aten_distributed_optimizations
folder = os.environ["TORCH_TRACE"]
for name, (program, arguments) in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        exec(program)
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")
    os.mkdir(f"{folder}/{name}")
    for path in glob.glob(f"{folder}/*.log"):
        shutil.move(path, f"{folder}/{name}")
"""

PROGRAM = """
rank, flags.bucketing_mode, sizes = arguments
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
c10d = torch.ops._c10d_functional
def step(x, first, second):
    group = dist.group.WORLD.group_name
    gathered = [c10d.wait_tensor(c10d.all_gather_into_tensor(p, 2, group)) for p in (first, second)]
    y = x @ gathered[0]
    z = y @ gathered[1]
    a, b = torch.split(z, 2)
    return [c10d.wait_tensor(c10d.reduce_scatter_tensor(t, "sum", 2, group)) for t in (y, z)], a @ gathered[0]
x = torch.ones(4, 4)
if sizes == "dynamic":
    torch._dynamo.mark_dynamic(x, 0)
with torch.no_grad():
    torch.compile(step, fullgraph=True)(
        x, torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True))
"""


TRAINING = """
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
flags.bucketing_mode, flags.enable_overlap_scheduling, flags.bucket_cap_mb = "topo_span", True, 0.0002
layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
model = fully_shard_simple(layers, init_device_mesh("cpu", (4,)))
torch.compile(model)(torch.ones(4, 8)).sum().backward()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with logs, of a process each: rank 0 compiles, rank 1 has a cache hit, and some more."""
    runs = {
        "miss": (PROGRAM, (0, "auto", "static")),
        "hit": (PROGRAM, (1, "auto", "static")),
        "none": (PROGRAM, (0, "none", "static")),
        "dynamic": (PROGRAM, (0, "auto", "dynamic")),
        "training miss": (TRAINING, None),
        "training hit": (TRAINING, None),
    }
    folder = tmp_path_factory.mktemp("traces")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TORCH_TRACE": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a thread would not be in a fork
    }
    command = [sys.executable, "-c", FORKS, json.dumps(runs)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {name: folder / name for name in runs}


def log_of(folder: Path) -> Path:
    (path,) = glob.glob(f"{folder}/*.log")
    return Path(path)


def payload(folder: Path, name: str) -> str:
    """Of the entry of this name."""
    lines = log_of(folder).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f'"{name}"' in line)
    taken = []
    for line in lines[start + 1 :]:
        if not line.startswith("\t"):
            break
        taken.append(line[1:])
    return "\n".join(taken)


def test_a_hit_on_one_rank_and_a_miss_on_the_other(
    traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = log_of(traces["hit"]).read_text()
    assert "fx_graph_cache_hit" in text
    assert "comm_overlap_schedule" not in text  # no pass ran
    emitted = json.loads(payload(traces["miss"], "comm_overlap_schedule"))
    assert run("diff", log_of(traces["miss"]), traces["hit"], "--json") == 0
    forward = json.loads(capsys.readouterr().out)["graphs"]["fw"]
    assert forward["a"] == forward["b"]
    assert forward["a"]["schedule_hash"] == emitted["schedule_hash"]
    assert forward["a"]["launches"] == len(emitted["launches"]) == 2


def test_other_flags_are_a_difference(
    traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", traces["miss"], traces["none"]) == 1
    assert "schedules differ from launch 0 on (2 launches" in capsys.readouterr().out


def test_derived_launches_are_those_of_the_artifact(traces: dict[str, Path]) -> None:
    for name in ("miss", "dynamic"):
        graphs = load_any(traces[name]).captured.graphs
        given = collect(graphs["fw"].graph).collectives
        derived = launch_texts(collect(graphs["fw_after"].graph), given)
        emitted = json.loads(payload(traces[name], "comm_overlap_schedule"))
        assert derived == emitted["launches"]


def test_a_log_without_graphs_of_torch_has_the_artifact(
    traces: dict[str, Path], tmp_path: Path
) -> None:
    lines = log_of(traces["miss"]).read_text().splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if '"comm_overlap_schedule"' in line)
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith("\t"))
    (tmp_path / "short.log").write_text("".join(lines[start:end]))
    assert run("diff", tmp_path / "short.log", traces["hit"]) == 0


@pytest.mark.parametrize("name", ["miss", "hit", "dynamic", "none"])
def test_replay_of_a_log(
    name: str, traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = replay(capsys, traces[name], "--check", "--mode", "topo_span", "--as-on-gpu")
    assert found["kind"] == "trace"
    assert found["warnings"] == ["ranks of group '0' are not told, 0-1 are taken (--group 0=...)"]
    forward = found["graphs"]["fw"]
    assert forward["before"]["launches"] == {"all_gather": 2, "reduce_scatter": 2}
    assert forward["after"]["launches"] == {"all_gather": 1, "reduce_scatter": 1}
    assert forward["check"]["verdict"] == "equal"


def test_values_of_a_printed_graph_are_those_of_the_compile(traces: dict[str, Path]) -> None:
    (node,) = (
        n
        for n in load_any(traces["miss"]).captured.graphs["fw"].graph.nodes
        if "all_gather" in n.name and "1" in n.name
    )
    value = node.meta["val"]
    assert (tuple(value.shape), value.dtype, value.device.type) == ((4, 4), torch.float32, "cpu")


def test_sizes_of_symbols_come_from_the_log_or_the_user(traces: dict[str, Path]) -> None:
    def size(**sizes: int) -> int:
        graph = load_any(traces["dynamic"], sizes=sizes).captured.graphs["fw"].graph
        symbols = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
        (value,) = (v for v in symbols if isinstance(v, torch.SymInt))
        return int(value.node.hint)

    assert size() == 4
    name = next(iter(read_trace(log_of(traces["dynamic"])).hints))
    assert size(**{name: 64}) == 64


@pytest.mark.parametrize("name", ["miss", "dynamic"])
def test_replay_of_a_repro_file(
    name: str, traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fx_graph_runnable.py"
    path.write_text(payload(traces[name], "fx_graph_runnable"))
    # torch 2.11 writes the size without its symbol
    tells = name == "miss" or _compat.torch_release() >= (2, 13)
    size = [] if tells else ["--size", "s77=4"]
    found = replay(capsys, path, "--check", "--group", "0=0,1", "--as-on-gpu", *size)
    assert (found["kind"], found["warnings"]) == ("repro", [])
    forward = found["graphs"]["fw"]
    assert forward["before"]["launches"] == {"all_gather": 2, "reduce_scatter": 2}
    assert forward["after"]["launches"] == {"all_gather": 1, "reduce_scatter": 1}
    assert forward["check"]["verdict"] == "equal"


def test_folder_of_tlparse(
    traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "-_0_0_0"
    folder.mkdir()
    for number, kind in enumerate(("before_post_grad_graph", "inductor_post_grad_graph"), 7):
        (folder / f"{kind}_{number}.txt").write_text(payload(traces["miss"], kind))
    (folder / "inductor_output_code_9.txt").write_text("import os; os.abort()")
    assert run("diff", tmp_path, traces["hit"]) == 0
    found = replay(capsys, tmp_path, "--as-on-gpu")
    assert found["graphs"]["fw"]["before"]["launches"]["all_gather"] == 2


def test_folders_of_several_ranks_need_a_choice(
    traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, name in enumerate(("miss", "none")):
        text = log_of(traces[name]).read_text()
        (tmp_path / f"dedicated_log_torch_trace_rank_{rank}_x.log").write_text(text)
    assert run("replay", tmp_path) == 2
    assert "take one, or --rank" in capsys.readouterr().err
    assert run("diff", tmp_path, traces["none"], "--rank", "1") == 2  # not a folder of many
    assert replay(capsys, tmp_path, "--rank", "0")["kind"] == "trace"


def test_a_rank_without_a_log_is_told(
    traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "dedicated_log_torch_trace_rank_0_x.log"
    (tmp_path / name).write_text(log_of(traces["miss"]).read_text())
    assert run("replay", tmp_path, "--rank", "7") == 2
    assert f"no log of rank 7 among 1 ({name})" in capsys.readouterr().err


def test_a_folder_of_captures_needs_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0_000.json.gz").write_bytes(FSDP.read_bytes())
    assert run("replay", tmp_path) == 2
    assert "1 captures; take one (rank0_000.json.gz)" in capsys.readouterr().err


def test_other_files_are_told_what_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "notes.md"
    other.write_text("# Notes\n\nnot a graph\n")
    assert run("replay", other) == 2
    err = capsys.readouterr().err
    assert "no Python in line 3" in err and "no capture (gzip), no repro file" in err


def test_compiles_can_be_chosen(
    traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(capsys, traces["miss"], "--compile", "0/0")["kind"] == "trace"
    assert run("replay", traces["miss"], "--compile", "5/0") == 2
    assert "no compile '5/0'; there are 0/0" in capsys.readouterr().err


def test_training_with_control_dependencies(
    traces: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Forward and backward of a compile and of a cache hit; collectives stand inside of
    control_deps."""
    miss, hit = traces["training miss"], traces["training hit"]
    emitted = [
        json.loads(entry.payload)
        for entry in read_trace(log_of(miss)).entries
        if entry.kind == "comm_overlap_schedule"
    ]
    assert "control_deps" in payload(hit, "inductor_post_grad_graph")
    assert run("diff", miss, hit, "--json") == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    hashes = [graphs[phase][side]["schedule_hash"] for side in "ab" for phase in ("fw", "bw")]
    assert hashes == [schedule["schedule_hash"] for schedule in emitted] * 2
    found = replay(capsys, hit, "--check", "--mode", "topo_span", "--as-on-gpu")
    for phase, launches in (
        ("fw", {"all_gather": 4}),
        ("bw", {"all_gather": 3, "reduce_scatter": 4}),
    ):
        assert found["graphs"][phase]["before"]["launches"] == launches
        assert found["graphs"][phase]["check"]["verdict"] in ("equal", "close")
    assert "joint" in load_any(hit).captured.graphs


# -- hostile files --------------------------------------------------------------------------------

GOOD = """
class <lambda>(torch.nn.Module):
    def forward(self, x: "f32[4, 8][8, 1]cuda:0"):
        y: "f32[8, 8][8, 1]cuda:0" = {expression};  x = None
        return (y,)
"""
FINE = "torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')"

HOSTILE = [
    "__import__('os').abort()",
    "eval('1')",
    "exec(x)",
    "open('/etc/passwd')",
    "torch.load(x)",
    "torch.ops.load_library('x')",
    "torch.ops.aten.mm.default.__globals__",
    "torch.ops.aten.mm(x, x)",
    "(lambda: 1)()",
    "[i for i in x]",
    "x.__class__",
    "f'{x}'",
    "x if x else x",
    "(y := x)",
    "torch.ops.aten.mm.default(*x)",
    "torch.ops.aten.mm.default(**x)",
    "torch.ops.aten.mm.default(unknown)",
    "torch.ops.aten.mm.default(x, [i for i in x])",
    "operator.attrgetter('a')(x)",
    "getattr(x, 'y')",
]


def test_the_harmless_text_itself_is_read(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(GOOD.format(expression=FINE))
    (graph,) = load_any(path).captured.graphs.values()
    assert len(collect(graph.graph).collectives) == 1


@pytest.mark.parametrize("expression", HOSTILE)
def test_hostile_expressions_are_refused(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "abort", lambda: pytest.fail("something was executed"))
    path = tmp_path / "graph.txt"
    path.write_text(GOOD.format(expression=expression))
    with pytest.raises(CaptureFormatError):
        load_any(path)


@pytest.mark.parametrize(
    "statement",
    ["import os", "del x", "x.y = 1", "x[0] = 1", "x += 1", "while True: pass", "raise x",
     "def f(): pass", "with x: pass", "assert x", "global x", "y = z = x"],
)  # fmt: skip
def test_hostile_statements_are_refused(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    text = GOOD.format(expression=FINE)
    path.write_text(text.replace("        y:", f"        {statement}\n        y:"))
    with pytest.raises(CaptureFormatError):
        load_any(path)


@pytest.mark.parametrize(
    "annotation",
    ["f32[__import__('os').abort()][1]cpu", "f32[4, (lambda: 1)()][8, 1]cpu", "f32[s0**99**99][1]cpu",
     "f32[-5][1]cpu", "f32[4][1, 1]cpu", "f32[4][1]warp:0", "f32[1.5][1]cpu", "f32[x][1]cpu",
     "Sym(open('x'))", "f32[" + "(" * 500 + "1" + ")" * 500 + "][1]cpu"],
)  # fmt: skip
def test_hostile_annotations_are_refused(annotation: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    text = GOOD.format(expression=FINE).replace("f32[4, 8][8, 1]cuda:0", annotation)
    path.write_text(text)
    with pytest.raises(CaptureFormatError):
        load_any(path)


def test_operators_that_read_files_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aten has some; a graph with one is read, and its result has no size."""
    ran: list[str] = []
    real = _propagate._run

    def run_noting(target: Any, arguments: Any, keywords: Any) -> Any:
        ran.append(str(target))
        return real(target, arguments, keywords)

    monkeypatch.setattr(_propagate, "_run", run_noting)
    made = tmp_path / "made_by_the_operator"
    call = f"torch.ops.aten.from_file.default({str(made)!r}, True, 16)"
    path = tmp_path / "graph.txt"
    text = GOOD.format(expression=call).replace('y: "f32[8, 8][8, 1]cuda:0"', "y")
    path.write_text(text.replace("        y = ", f"        z = {FINE}\n        y = "))
    loaded = load_any(path)
    assert not made.exists()
    assert ran == ["_c10d_functional.all_gather_into_tensor.default"]
    assert loaded.warnings[0].startswith("fw: no sizes for")


def test_a_repro_file_is_not_run(tmp_path: Path, traces: dict[str, Path]) -> None:
    text = payload(traces["miss"], "fx_graph_runnable")
    made = tmp_path / "made"
    path = tmp_path / "repro.py"
    path.write_text(f"open({str(made)!r}, 'w')\n{text}")
    assert load_any(path).captured.graphs
    assert not made.exists()


@pytest.mark.parametrize(
    "change",
    [
        ("reader.tensor(buf0, (2, 4)", "reader.tensor(buf0, open('x')"),
        ("reader.storage(None, 32)", "reader.storage(None, 32, device=open('x'))"),
        ("reader.storage(None, 32)", "__import__('os').abort()"),
        ("'size': 2", "'size': 1 + f()"),
        ("reader.tensor(buf2, (4, 4), is_leaf=True)", "pass"),
    ],
)
def test_hostile_repro_files(
    change: tuple[str, str], tmp_path: Path, traces: dict[str, Path]
) -> None:
    text = payload(traces["miss"], "fx_graph_runnable")
    assert change[0] in text
    path = tmp_path / "repro.py"
    path.write_text(text.replace(*change))
    with pytest.raises(CaptureFormatError):
        load_any(path)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_logs_are_read_or_refused(
    seed: int, traces: dict[str, Path], tmp_path: Path
) -> None:
    import random

    drawn = random.Random(seed)
    data = bytearray(log_of(traces["miss"]).read_bytes())
    for _ in range(drawn.choice((1, 5, 50))):
        place = drawn.randrange(len(data))
        if drawn.random() < 0.5:
            data[place] = drawn.randrange(256)
        else:
            del data[place : place + drawn.randrange(1, 2000)]
    path = tmp_path / "damaged.log"
    path.write_bytes(data)
    with contextlib.suppress(CaptureFormatError):
        load_any(path)


def test_code_that_is_no_graph_ends_soon(tmp_path: Path) -> None:
    path = tmp_path / "deep.txt"
    path.write_text("class A:\n  x = " + "(" * 100_000)
    with pytest.raises(CaptureFormatError):
        load_any(path)
    path.write_text("class A:\n  x = " + "-" * 100_000 + "1")
    with pytest.raises(CaptureFormatError):
        load_any(path)
