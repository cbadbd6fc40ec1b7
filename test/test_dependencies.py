"""What is installed for tests is pinned by hash, fits setup.py, and its licences are listed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "tools" / "requirements.txt").read_text(encoding="utf-8")
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.MULTILINE)
}
#: What torch brings; see docs/dependencies.md.
OF_TORCH = {"torch", "filelock", "fsspec", "mpmath", "networkx", "sympy"}


def wanted(extras: tuple[str, ...] = ("test", "tools")) -> list[Requirement]:
    """What setup.py asks for, read from its text: it is not run."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    found = []
    for extra in extras:
        (block,) = re.findall(rf'"{extra}": \[(.*?)\]', text, re.DOTALL)
        found += [Requirement(item) for item in re.findall(r'"(.+?)"', block)]
    return found


def test_every_package_is_pinned_with_hashes() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(PINNED) > 20
    for block in blocks:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
    assert "://" not in LOCK  # no index of somebody's machine


def test_pins_are_what_setup_allows() -> None:
    for requirement in wanted():
        version = PINNED[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)


def test_pins_are_complete() -> None:
    """Each package that a pinned one needs is pinned or comes with torch, as far as it is here."""
    for name in PINNED:
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                known = canonicalize_name(requirement.name)
                assert known in PINNED or known in OF_TORCH, (name, requirement)


def test_licences_are_listed() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w. ]+) \| (.+) \|$", text, re.MULTILINE)
    listed = {canonicalize_name(name): version for name, version, _ in rows if name != "package"}
    assert set(listed) == set(PINNED) | OF_TORCH
    assert all(listed[name] == version for name, version in PINNED.items())
    assert all(licence.strip() not in ("", "?") for _, _, licence in rows)


# -- the script that installs them -----------------------------------------------------------------


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pip_that(text: str, status: int) -> list[str]:
    """A command that ends as pip would."""
    return [sys.executable, "-c", f"import sys; sys.stderr.write({text!r}); sys.exit({status})"]


def test_a_wrong_hash_ends_the_installation(bootstrap: ModuleType) -> None:
    wrong = pip_that("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", 1)
    with pytest.raises(subprocess.CalledProcessError):
        bootstrap.install_pinned(wrong)


def test_a_version_that_is_not_offered_does_not(
    bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = pip_that("ERROR: No matching distribution found for ruff==0.0.0\n", 1)
    assert not bootstrap.install_pinned(missing)
    assert "taking what setup.py allows" in capsys.readouterr().out
    assert bootstrap.install_pinned(pip_that("", 0))


def test_hashes_are_asked_for(bootstrap: ModuleType, tmp_path: Path) -> None:
    """pip itself refuses a file that is not the one meant."""
    package = tmp_path / "attrs-26.1.0-py3-none-any.whl"
    package.write_bytes(b"not the package")
    bootstrap.REQUIREMENTS = tmp_path / "requirements.txt"
    bootstrap.REQUIREMENTS.write_text(
        f"attrs @ file://{package} --hash=sha256:{'0' * 64}\n", encoding="utf-8"
    )
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pytest.skip("no pip here")
    with pytest.raises(subprocess.CalledProcessError) as error:
        bootstrap.install_pinned(pip)
    assert "DO NOT MATCH THE HASHES" in error.value.stderr
