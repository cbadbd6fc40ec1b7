"""Which file of ours becomes which file of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upstream.errors import StackError
from upstream.manifest import HERE, Commit, TestFile
from upstream.rewrite import IN_TREE, TESTING, in_tree_name, moved_source, moved_test

REPOSITORY = HERE.parents[1]
PACKAGE_FOLDER = "torch_patches/_inductor/fx_passes/comm_overlap"
TESTING_FOLDER = "torch_patches/testing"
NEW = HERE / "new"
_PREFIX = "test_comm_overlap_"


@dataclass(frozen=True)
class Placed:
    """A file of a commit.

    Args:
        path: in the tree.
        text: as it reads there, not formatted yet.
        source: path of ours, from the repository's root.
    """

    path: str
    text: str
    source: str


def placed_files(commit: Commit, repository: Path = REPOSITORY) -> Iterator[Placed]:
    """The files that a commit adds; the packages' empty ``__init__`` files are not among them.

    Raises:
        StackError: a file is not there, or cannot move.
    """
    for module in commit.modules:
        yield _moved(repository, f"{PACKAGE_FOLDER}/{module}")
    for path in commit.moved:
        yield _moved(repository, path)
    for name in commit.support:
        yield _moved(repository, f"{TESTING_FOLDER}/{name}")
    for test in commit.tests:
        yield _test(repository, test)
    for path in commit.new:
        yield Placed(path, _read(NEW, path), str((NEW / path).relative_to(repository)))


def test_path(path: str) -> str:
    """Where a test file of ours is in the tree; torch has tests of its own with plain names."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{_PREFIX}{name.removeprefix('test_')}"


def package_files(paths: Iterator[str] | list[str]) -> list[str]:
    """The ``__init__`` files of our packages that these files need."""
    tops = [name.replace(".", "/") for name in (IN_TREE, TESTING)]
    found: dict[str, None] = {}
    for path in paths:
        folder = Path(path).parent
        while any(str(folder) == top or str(folder).startswith(f"{top}/") for top in tops):
            found.setdefault(f"{folder}/__init__.py")
            folder = folder.parent
    return sorted(found)


def _moved(repository: Path, path: str) -> Placed:
    module = in_tree_name(path.removesuffix(".py").replace("/", "."))
    if module is None:
        raise StackError(f"{path} has no place in the tree")
    target = module.replace(".", "/") + ".py"
    return Placed(target, moved_source(_read(repository, path), path), path)


def _test(repository: Path, test: TestFile) -> Placed:
    text = moved_test(_read(repository, test.path), test.path, test.only, test.without)
    folder = test.path.rpartition("/")[0]
    return Placed(test_path(f"{folder}/{test.name}" if test.name else test.path), text, test.path)


def _read(root: Path, path: str) -> str:
    file = root / path
    if not file.is_file():
        raise StackError(f"{path} is in the manifest and does not exist")
    return file.read_text()
