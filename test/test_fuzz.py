"""A short fuzz campaign in every test run, and proof that a campaign finds what is wrong.

Longer ones: ``python tools/fuzz.py --minutes 60 --seed 0``.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torch_patches._inductor.fx_passes.comm_overlap.graph import emit_copying
from torch_patches.testing import fuzzing
from torch_patches.testing.fuzzing import LANES, Examples

ROOT = Path(__file__).parents[1]
#: Small captures, of three parallelisms; a campaign takes all.
CAPTURES = [
    ROOT / "test" / "data" / f"{name}.json.gz"
    for name in ("llama_2l_hsdp2x4", "llama_2l_fsdp8_noreshard", "llama_3l_ddp8")
]


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def examples() -> Examples:
    return Examples(CAPTURES)


def test_a_fixed_seed(examples: Examples, tmp_path: Path) -> None:
    """The same 300 examples everywhere: two minutes on a slow core."""
    campaign = _tool().Campaign(0, LANES, examples, tmp_path)
    for number in range(300):
        campaign.run(number)
    tally = campaign.tally
    assert not tally.failures, tally
    assert {"graphs", "captures"} <= set(tally.examples)
    assert tally.with_buckets >= 20
    assert tally.no_programs <= 60
    assert tally.refused_flags + tally.refused_estimations >= 1


def test_a_fresh_seed(examples: Examples, tmp_path: Path, capsys: Any) -> None:
    """A minute of new examples; what runs them again is printed."""
    seed = random.SystemRandom().randrange(10**9)
    again = f"python tools/fuzz.py --seed {seed} --captures {' '.join(map(str, CAPTURES))}"
    with capsys.disabled():  # stderr, since nobody sees what a worker of xdist prints
        print(f"\nfuzz: {again}", file=sys.stderr)
    campaign = _tool().Campaign(seed, LANES, examples, tmp_path)
    start, number = time.monotonic(), 0
    while time.monotonic() - start < 60:
        campaign.run(number)
        number += 1
    assert not campaign.tally.failures, f"{again}\n{campaign.tally}"
    assert number >= 3


def test_a_planted_fault_is_found_and_printed_as_a_short_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: Examples
) -> None:
    """Members of a copying bucket handed out the wrong way round."""
    original = emit_copying._copy_out
    monkeypatch.setattr(emit_copying, "_copy_out", lambda *args: [*reversed(original(*args))])
    campaign = _tool().Campaign(9, ["graphs"], examples, tmp_path)
    number = 0
    while not campaign.tally.failures:
        campaign.run(number)
        number += 1
        assert number < 60
    assert set(campaign.tally.failures) <= {f"graphs invariant {letter}" for letter in "abf"}
    (script,) = tmp_path.glob("failure_graphs_*.py")
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) <= 10
    assert lines[-1].startswith("check_invariants(gm, Description(")
    # It runs by itself, and passes where the fault is not planted.
    subprocess.run([sys.executable, str(script)], check=True, cwd=ROOT, timeout=120)


def test_a_fault_of_a_check_is_counted_and_does_not_end_the_campaign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: Examples
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such node")

    monkeypatch.setattr(fuzzing, "check_invariants", fail)
    campaign = _tool().Campaign(3, ["graphs"], examples, tmp_path)
    for number in range(4):
        campaign.run(number)
    assert campaign.tally.failures == {"graphs KeyError of the check": 4}


def test_the_exit_code_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = _tool()
    arguments = ["--lanes", "augmented", "--examples", "2", "--out", str(tmp_path)]
    arguments += ["--captures", *map(str, CAPTURES)]
    taken: list[Path] = []
    monkeypatch.setattr(
        tool, "Examples", lambda files, tags: taken.extend(files) or Examples(files)
    )
    assert tool.main(arguments) == 0
    assert taken == CAPTURES

    def wrong(scenario: Any) -> None:
        raise fuzzing.augmented.Mismatch("planted")

    monkeypatch.setattr(fuzzing.augmented, "check_scenario", wrong)
    monkeypatch.setattr(fuzzing.augmented, "minimise", lambda scenario: scenario)
    assert tool.main(arguments) == 1
    (script,) = tmp_path.glob("failure_augmented_*.py")
    assert "planted" in script.read_text()
