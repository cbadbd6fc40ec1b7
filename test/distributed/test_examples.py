"""Each example runs under torchrun on two gloo processes, merges what it says, and keeps the losses.

Their README's Python blocks run too, one after the other in one process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
#: Parameters of the examples' model: embedding, three blocks of three, norm, head.
PARAMETERS = 12
LONGEST_LINES = 120
#: A run takes about 16 s of CPU, both ranks together.
TIMEOUT_S = 150.0
#: torchrun sends its workers SIGTERM when it gets one, and SIGKILL 30 s later.
GRACE_S = 40.0

Launches = dict[str, int]
_ROW = re.compile(r"^(.{31}) forward: (.*?) +backward: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """What one run of an example launched in a step."""

    forward: Launches
    backward: Launches


def _fsdp(gathers: int, gathers_again: int, scatters: int) -> Row:
    backward = {"allgather": gathers_again, "reduce_scatter": scatters}
    return Row({"allgather": gathers}, backward)


# The head is used last in the forward and first in the backward: it is not gathered again.
UNMERGED = _fsdp(PARAMETERS, PARAMETERS - 1, PARAMETERS)
MERGED = _fsdp(1, 1, 1)
EXPECTED = {
    "simple_fsdp": {"backend aot_eager": UNMERGED, "backend aot_eager_comm_overlap": MERGED},
    "ddp": {
        "DistributedDataParallel": Row({}, {"allreduce": 1}),
        "backend aot_eager": Row({}, {"allreduce": PARAMETERS}),
        "backend aot_eager_comm_overlap": Row({}, {"allreduce": 1}),
    },
    "fsdp2": {
        "FSDP2": _fsdp(5, 5, 5),
        "traced, backend aot_eager": UNMERGED,
        # The last group, norm and head, stays gathered.
        "traced, a bucket a group": _fsdp(5, 4, 5),
    },
    "own_compiler": {"compile_before": UNMERGED, "compile_after": MERGED},
}


def _run(*command: str) -> tuple[int, str, str]:
    """Exit code and output of a command in the repository; it and its workers never outlive us."""
    paths = [str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        return _finish(process, TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _finish(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def _launches(text: str) -> Launches:
    pairs = [part.split(" ") for part in text.split(", ") if part != "none"]
    return {kind: int(count) for kind, count in pairs}


@pytest.mark.parametrize("name", EXPECTED)
def test_example_merges_and_keeps_the_losses(name: str) -> None:
    # A free port, unlike torchrun alone; names need not resolve.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    code, out, err = _run(*torchrun, "--nproc-per-node", "2", f"examples/{name}.py")
    assert code == 0, f"{out}\n{err}"
    rows = {row[1].strip(): Row(_launches(row[2]), _launches(row[3])) for row in _ROW.finditer(out)}
    assert rows == EXPECTED[name]
    assert re.search(r"^losses( \d\.\d{4}){3}: equal in every bit$", out, re.MULTILINE), out


SHOW = """
import sys, torch, torch.distributed as dist, _tiny
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
runs = {name: _tiny.Run([torch.tensor(float(name))]) for name in sys.argv[2:]}
_tiny.show(runs)
"""


@pytest.mark.parametrize("other", ["1.5", "nan"])
def test_other_losses_are_an_error(other: str, tmp_path: Path) -> None:
    code, out, err = _run("-c", SHOW, str(tmp_path / "store"), "1.0", other)
    assert code == 1, err
    assert "losses 1.0000: differ by up to" in out


# -- what a user reads ----------------------------------------------------------------------------


def test_examples_are_all_here_and_short() -> None:
    files = {path.stem: path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")}
    assert set(files) == set(EXPECTED)
    for name, path in files.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_LINES
        assert f"torchrun --nproc-per-node 2 examples/{name}.py" in README


#: Inductor without its code generation, which takes half a minute a block here.
BLOCKS = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from _tiny import TinyModel
from torch_patches.config import PREFIX
from torch_patches.testing.eager_backend import post_grad_eager

class Model(TinyModel):
    def compile(self, backend="inductor", **kwargs):
        super().compile(backend=post_grad_eager if backend == "inductor" else backend, **kwargs)

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
tokens, targets = torch.zeros(2, 16, dtype=torch.long)
kept = {PREFIX + "bucketing_mode": "none", PREFIX + "module_bucket_plans": None}
for path in sys.argv[2:]:
    torch._dynamo.reset()
    names = {"model": Model(), "mesh": mesh}
    with torch._inductor.config.patch(kept):
        exec(compile(Path(path).read_text(), path, "exec"), names)
        names["model"](tokens, targets).backward()
    print("ran", path)
"""


def test_blocks_of_the_readme_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    paths = [tmp_path / f"block_{index}.py" for index in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block, encoding="utf-8")
    code, out, err = _run("-c", BLOCKS, str(tmp_path / "store"), *map(str, paths))
    assert code == 0, f"{out}\n{err}"
    assert len(blocks) >= len(EXPECTED)
    assert out.count("ran ") == len(blocks)
