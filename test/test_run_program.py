"""``run_program``: a program in a fork of the process that has imported torch."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from torch_patches.testing.processes import RankFailed, run_program


def test_it_is_a_new_process_with_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7")
    code = """
import os, sys
import beside
print(os.getpid(), sys.argv, os.environ.get("NAME"), os.environ.get("HOME"), beside.value)
assert __name__ == "__main__"
"""
    environment = {"PYTHONPATH": str(tmp_path), "NAME": "a"}
    pid, *rest = run_program(code, "x", environment=environment, timeout_s=60).split()
    assert int(pid) != os.getpid()
    assert rest == ["['-c',", "'x']", "a", "None", "7"]
    assert "beside" not in run_program("import sys; print(*sys.modules)", timeout_s=60).split()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ValueError('wrong')", r"ended with 1\n(.|\n)*ValueError: wrong"),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("import os; os._exit(9)", "ended with 9"),
        ("import time; time.sleep(99)", r"ended with None\n(.|\n)*<string>"),
    ],
)
def test_an_end_that_is_none_is_told(code: str, told: str) -> None:
    timeout_s = 60 if "sleep" not in code else 6  # of which its start may take 4
    with pytest.raises(RankFailed, match=told):
        run_program(code, timeout_s=timeout_s)


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    """This process would wait for it at its own end."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    told = tmp_path / "pid"
    code = """
import os, signal, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(1)  # by then it is waited for
os.kill(int(sys.argv[2]), signal.SIGUSR1)
time.sleep(99)
"""
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_program(code, str(told), str(os.getpid()), timeout_s=60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
