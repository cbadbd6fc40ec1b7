"""Makes the environment that ``make demo`` and ``make test`` run in; quick when nothing changed.

    python3 tools/bootstrap.py            # creates .venv, installs torch and this package in it

Environment variables:
    TORCH_PATCHES_PYTHON   an interpreter or virtual environment to use instead of .venv
    TORCH_INDEX_URL        wheel index to take torch from, such as
                           https://download.pytorch.org/whl/cpu (PyPI's Linux wheel brings CUDA)
    CXX                    the C++ compiler, which Inductor uses too (default g++)

Needs no package: it runs before there are any.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = ROOT / "build" / "bootstrap.stamp"
TORCH = "torch==2.13.0"
SUPPORTED_TORCH = ((2, 11), (2, 15))
"""From, and below; the same range as in torch_patches/_compat.py."""
SUPPORTED_PYTHON = ((3, 11), (3, 13))
"""From, and below, for the .venv made here; TORCH_PATCHES_PYTHON may be newer."""
REQUIREMENTS = ROOT / "tools" / "requirements.txt"
INPUTS = ("setup.py", "pyproject.toml", "tools/bootstrap.py", "tools/requirements.txt")

DEBIAN_HINT = (
    "Debian, Ubuntu:  apt-get install g++ python3-dev python3-venv\n"
    "Fedora:          dnf install gcc-c++ python3-devel\n"
    "macOS:           xcode-select --install"
)


class MissingRequirementError(Exception):
    """Something this script cannot install; the text says what and how to get it."""


def main() -> int:
    try:
        check_compiler()
        python = choose_python()
        if is_current(python):
            return 0
        check_headers(python)
        install(python)
    except MissingRequirementError as problem:
        print(f"bootstrap: {problem}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as problem:
        command = " ".join(map(str, problem.cmd))
        print(f"bootstrap: failed with exit code {problem.returncode}: {command}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(digest(python))
    return 0


# -- what cannot be installed from here -----------------------------------------------------------


def compiler() -> str:
    """The one Inductor's CPU backend takes."""
    return os.environ.get("CXX") or "g++"


def check_compiler() -> None:
    if shutil.which(compiler()) is None:
        raise MissingRequirementError(
            f"no C++ compiler: '{compiler()}' is not on the PATH, and Inductor's CPU backend "
            f"compiles C++. Install one, or set CXX.\n{DEBIAN_HINT}"
        )


def check_headers(python: Path) -> None:
    """Compiles three lines against Python.h, as Inductor will."""
    show = "import sysconfig; print(sysconfig.get_paths()['include'])"
    include = subprocess.check_output([python, "-c", show], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <Python.h>\n#include <vector>\nint main() { return 0; }\n")
        command = [compiler(), "-fsyntax-only", f"-I{include}", str(source)]
        probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode == 0:
        return
    if not Path(include, "Python.h").exists():
        raise MissingRequirementError(
            f"no Python headers: {include}/Python.h is missing, and Inductor's CPU backend needs "
            f"it. Install the headers of this Python.\n{DEBIAN_HINT}"
        )
    raise MissingRequirementError(
        f"'{compiler()}' cannot compile a three-line program:\n{probe.stderr}{DEBIAN_HINT}"
    )


# -- the interpreter ------------------------------------------------------------------------------


def choose_python() -> Path:
    """TORCH_PATCHES_PYTHON, or .venv's, made if need be."""
    named = os.environ.get("TORCH_PATCHES_PYTHON")
    if named:
        return named_python(named)
    python = VENV / "bin" / "python"
    if not works(python):
        make_venv(find_base_python())
    return python


def named_python(named: str) -> Path:
    path = Path(named).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    found = shutil.which(str(path))
    if found is None or not works(Path(found)):
        raise MissingRequirementError(f"TORCH_PATCHES_PYTHON={named}: no Python runs there")
    if version_of(found) < SUPPORTED_PYTHON[0]:
        raise MissingRequirementError(f"TORCH_PATCHES_PYTHON={named}: Python 3.11 or newer needed")
    return Path(found)


def works(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0


def version_of(python: str) -> tuple[int, int]:
    """(0, 0) if it does not run."""
    show = "import sys; print(*sys.version_info[:2])"
    probe = subprocess.run([python, "-c", show], capture_output=True, text=True)
    numbers = probe.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if probe.returncode == 0 else (0, 0)


def find_base_python() -> str:
    """The first supported interpreter, this one preferred."""
    low, high = SUPPORTED_PYTHON
    for name in (sys.executable, "python3.12", "python3.11", "python3"):
        found = shutil.which(name)
        if found is not None and low <= version_of(found) < high:
            return found
    raise MissingRequirementError(
        "no Python 3.11 or 3.12 found. Install one, or name another interpreter (3.11 or newer) "
        "with TORCH_PATCHES_PYTHON."
    )


def make_venv(base: str) -> None:
    probe = [base, "-c", "import ensurepip, venv"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        raise MissingRequirementError(
            f"{base} cannot make virtual environments (no venv or ensurepip).\n{DEBIAN_HINT}"
        )
    say(f"creating {VENV.name} with {base}")
    subprocess.run([base, "-m", "venv", "--clear", VENV], check=True)


# -- packages -------------------------------------------------------------------------------------


def digest(python: Path) -> str:
    """Changes when the installation has to be redone."""
    content = hashlib.sha256(str(python).encode())
    for name in INPUTS:
        content.update((ROOT / name).read_bytes())
    return content.hexdigest()


def is_current(python: Path) -> bool:
    return STAMP.exists() and STAMP.read_text() == digest(python) and works(python)


def install(python: Path) -> None:
    pip = [str(python), "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        subprocess.run([str(python), "-m", "ensurepip"], check=True)
    installed = torch_release(python)
    low, high = SUPPORTED_TORCH
    if installed is not None and low <= installed < high:
        say(f"torch {installed[0]}.{installed[1]} is there already")
    else:
        index = os.environ.get("TORCH_INDEX_URL")
        say(f"installing {TORCH}" + (f" from {index}" if index else ""))
        source = ["--index-url", index] if index else []
        subprocess.run([*pip, "install", TORCH, *source], check=True)
    say("installing torch_patches with its test tools")
    if python == VENV / "bin" / "python" and install_pinned(pip):
        # Its requirements are there, and so is what builds it.
        local = ["--no-deps", "--no-build-isolation", "-e", "."]
        subprocess.run([*pip, "install", *local], check=True, cwd=ROOT)
    else:
        subprocess.run([*pip, "install", "-e", ".[test,tools]"], check=True, cwd=ROOT)


def install_pinned(pip: list[str]) -> bool:
    """Versions and hashes of tools/requirements.txt; False where the index lacks one of them.

    Raises:
        CalledProcessError: for any other reason, such as a file that does not match its hash.
    """
    command = [*pip, "install", "--require-hashes", "-r", str(REQUIREMENTS)]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    print(run.stderr, end="", file=sys.stderr)
    if run.returncode and "No matching distribution found" in run.stderr:
        say(f"this index lacks a version of {REQUIREMENTS.name}; taking what setup.py allows")
        return False
    run.check_returncode()
    return True


def torch_release(python: Path) -> tuple[int, int] | None:
    """(major, minor) of the torch that this interpreter imports, None if it imports none."""
    show = "import torch; print('release', *torch.__version__.split('.')[:2])"
    probe = subprocess.run([python, "-c", show], capture_output=True, text=True)
    words = probe.stdout.split()
    return (int(words[1]), int(words[2])) if words[:1] == ["release"] else None


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
