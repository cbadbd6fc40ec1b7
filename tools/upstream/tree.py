"""Torch trees: finding one, knowing it, and making a git repository of what the stack changes.

A tree is an installed torch (a site-packages folder, its ``torch`` folder, or a virtual environment)
or a checkout of PyTorch.  Neither is changed: an installed one is copied, only Python files; a
checkout is cloned.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from upstream.errors import StackError, UnknownTreeError

#: Folders of an installed torch whose Python files go under git; others only file by file.
COPIED = ("torch/_inductor",)
_INSTALLED_VERSION = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)", re.MULTILINE)
#: Nobody's: who submits says who they are.
AUTHOR = "comm_overlap <comm_overlap@localhost>"
_AUTHOR = re.compile(r"([^<>\n]*[^<>\s]) <([^<>\s]+@[^<>\s]+)>")
_GIT_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}


@dataclass(frozen=True)
class TorchTree:
    """A tree that is read only.

    Args:
        root: the folder that holds ``torch``.
        release: "2.13".
        version: the whole version text.
        is_checkout: it is a git checkout.
    """

    root: Path
    release: str
    version: str
    is_checkout: bool

    @property
    def can_run(self) -> bool:
        """Whether its binaries are there, so that the patched tree can be imported."""
        return any((self.root / "torch").glob("_C.*"))


def find_tree(given: str, known: Sequence[str], download_to: Path) -> TorchTree:
    """The tree that a path or a version names.

    Args:
        given: a path, or a version such as "2.13" or "2.14.1".
        known: releases that the stack is made for.
        download_to: where the wheel of a version goes that is not the running one.

    Raises:
        UnknownTreeError: it is no torch tree, or one of another release.
        StackError: a version could not be had from the index.
    """
    if re.fullmatch(r"\d+\.\d+(\.\d+)?", given):
        _known_release(given, known, f"torch {given}")
        return _open(_of_version(given, download_to), known)
    path = Path(given).expanduser().resolve()
    candidates = [path, *sorted(path.glob("lib/python*/site-packages"))]
    if path.name == "torch":
        candidates.append(path.parent)
    for root in candidates:
        if (root / "torch" / "_inductor" / "config.py").is_file():
            return _open(root, known)
    raise UnknownTreeError(f"{given}: no torch there (no torch/_inductor/config.py)")


def _open(root: Path, known: Sequence[str]) -> TorchTree:
    checkout = (root / "version.txt").is_file() and (root / ".git").exists()
    if checkout:
        version = (root / "version.txt").read_text().strip()
    else:
        file = root / "torch" / "version.py"
        match = _INSTALLED_VERSION.search(file.read_text() if file.is_file() else "")
        if match is None:
            raise UnknownTreeError(f"{root}: torch/version.py gives no version")
        version = match.group(1)
    return TorchTree(root, _known_release(version, known, str(root)), version, checkout)


def _known_release(version: str, known: Sequence[str], where: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    release = match.group() if match else version
    if release not in known:
        raise UnknownTreeError(
            f"{where}: torch {version} is not known to the stack, which is made for "
            f"{', '.join(known)}; build it for one of these and rebase, or add the release to "
            "tools/upstream/manifest/00_stack.toml and see which places are not found"
        )
    return release


def _of_version(version: str, download_to: Path) -> Path:
    """The running interpreter's torch if it is that version, else the Python files of its wheel."""
    import torch

    running = str(torch.__version__)
    if running == version or re.match(re.escape(version) + r"[.+]", running):
        return Path(torch.__file__).parents[1]
    download_to.mkdir(parents=True, exist_ok=True)
    wanted = version if version.count(".") == 2 else f"{version}.*"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--dest", str(download_to), f"torch=={wanted}"]
    if not list(download_to.glob(f"torch-{version}*.whl")):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StackError(f"pip has no torch {version}: {done.stderr.strip()[-500:]}")
    wheel = sorted(download_to.glob(f"torch-{version}*.whl"))[-1]
    root = download_to / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(root, names)
    return root


class Repository:
    """The git repository that the stack is built in."""

    def __init__(self, root: Path, author: str = AUTHOR) -> None:
        self.root = root
        self.environment = git_environment(author)

    @classmethod
    def of(
        cls, tree: TorchTree, root: Path, edited: Iterable[str], author: str = AUTHOR
    ) -> Repository:
        """Clones a checkout, or copies what the stack can touch of an installed torch.

        Args:
            tree: where from.
            root: a folder that does not exist or is empty.
            edited: paths of further files that the stack changes.
            author: of the commits, as "Name <mail>".

        Raises:
            StackError: the folder is not empty, or the author has another form.
        """
        if root.exists() and any(root.iterdir()):
            raise StackError(f"{root} is not empty")
        made = cls(root, author)
        if tree.is_checkout:
            root.parent.mkdir(parents=True, exist_ok=True)
            clone = ["git", "clone", "-q", "--shared", str(tree.root), str(root)]
            done = subprocess.run(
                clone, env=made.environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise StackError(f"git clone: {done.stderr.strip()}")
            made.git("checkout", "-q", "-b", "comm_overlap")
            return made
        root.mkdir(parents=True, exist_ok=True)
        for folder in COPIED:
            shutil.copytree(
                tree.root / folder,
                root / folder,
                ignore=_only_python,
                dirs_exist_ok=True,
            )
        for path in edited:
            if (tree.root / path).is_file() and not (root / path).exists():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree.root / path, root / path)
        _make_writable(root)
        made.git("init", "-q", "-b", "comm_overlap")
        made.git("add", "-A")
        made.git("commit", "-q", "-m", f"torch {tree.version}")
        return made

    def git(self, *arguments: str, text: str | None = None) -> str:
        """Output of a git command.

        Raises:
            StackError: it failed.
        """
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", *arguments],
            cwd=self.root,
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StackError(f"git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def head(self) -> str:
        """Hash of the last commit."""
        return self.git("rev-parse", "HEAD").strip()

    def changed_lines(self, commit: str = "HEAD") -> int:
        """Added and removed lines of a commit."""
        rows = self.git("show", "--numstat", "--format=", commit).splitlines()
        return sum(int(number) for row in rows for number in row.split("\t")[:2])


def git_environment(author: str) -> dict[str, str]:
    """For git on a repository of ours: nothing of the user's, whose hooks and aliases set
    ``GIT_DIR`` and more.

    Raises:
        StackError: the author is not "Name <mail>".
    """
    match = _AUTHOR.fullmatch(author)
    if match is None:
        raise StackError(f"{author!r} is no author: give 'Name <name@example.org>'")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = {f"GIT_{role}_NAME": match[1] for role in ("AUTHOR", "COMMITTER")}
    mail = {f"GIT_{role}_EMAIL": match[2] for role in ("AUTHOR", "COMMITTER")}
    return {**kept, **_GIT_ENVIRONMENT, **who, **mail}


def _make_writable(root: Path) -> None:
    """Copies have the mode of what they are of, and an installed torch may be read only."""
    for path in (root, *root.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)


def _only_python(folder: str, names: list[str]) -> list[str]:
    inside = Path(folder)
    return [name for name in names if not (name.endswith(".py") or (inside / name).is_dir())] + [
        name for name in names if name == "__pycache__"
    ]


def link_rest(tree: TorchTree, root: Path) -> None:
    """Makes a repository of an installed torch importable: links to all that it lacks, and bytecode.

    They are unknown to git.

    Raises:
        StackError: the tree has no binaries.
    """
    if not tree.can_run:
        raise StackError(
            f"{tree.root}: no binaries, so nothing can be run; give an installed torch"
        )
    with (root / ".git" / "info" / "exclude").open("a") as file:
        file.write("__pycache__/\n.pytest_cache/\n.hypothesis/\n")
        for path in _link_folder(tree.root / "torch", root / "torch"):
            file.write(f"/{path.relative_to(root)}\n")
    _copy_bytecode(tree.root / "torch", root / "torch")


def _link_folder(source: Path, target: Path) -> Iterable[Path]:
    for item in sorted(source.iterdir()):
        place = target / item.name
        if item.name == "__pycache__" or place.is_file():
            continue
        if place.is_dir():
            yield from _link_folder(item, place)
        else:
            place.symlink_to(item)
            yield place


def _copy_bytecode(source: Path, target: Path) -> None:
    """Of the files that were copied, valid for as long as they have this text: without, each new
    process compiles hundreds of them.  The header is that of PEP 552, checked by hash."""
    target = target.resolve()
    for made in source.rglob("*.pyc"):
        folder = target / made.parents[1].relative_to(source)
        name = f"{made.name.split('.')[0]}.py"
        text, copy = made.parents[1] / name, folder / name
        if folder.resolve() != folder or not text.is_file() or copy.is_symlink():
            continue  # behind a link, or one
        content, status = made.read_bytes(), text.stat()
        stamp = (0, int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
        if copy.is_file() and content[4:16] == struct.pack("<LLL", *stamp):
            cache = folder / made.parent.name
            cache.mkdir(exist_ok=True)
            digest = importlib.util.source_hash(text.read_bytes())
            (cache / made.name).write_bytes(
                content[:4] + struct.pack("<L", 0b11) + digest + content[16:]
            )
