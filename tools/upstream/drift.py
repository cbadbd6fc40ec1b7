"""Whether package and manifest still fit: every module is in a commit, or is left out by name, and no
commit has grown too large."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from upstream.build import tidied_texts, too_large
from upstream.layout import PACKAGE_FOLDER, REPOSITORY, TESTING_FOLDER, placed_files
from upstream.manifest import Manifest


def find_drift(manifest: Manifest, repository: Path = REPOSITORY) -> list[str]:
    """Sentences that say what does not fit; none if all does."""
    problems: list[str] = []
    taken: dict[str, str] = {}
    for commit in manifest.commits:
        paths = [f"{PACKAGE_FOLDER}/{module}" for module in commit.modules]
        paths += [f"{TESTING_FOLDER}/{name}" for name in commit.support]
        for path in [*paths, *commit.moved, *(test.path for test in commit.tests)]:
            if not (repository / path).is_file():
                problems.append(f"{path}: in the commit {commit.title!r}, and does not exist")
            elif path in taken and not path.startswith("test/"):
                problems.append(f"{path}: in two commits, {taken[path]!r} and {commit.title!r}")
            taken.setdefault(path, commit.title)
    files = sorted(
        str(path.relative_to(repository))
        for path in (repository / "torch_patches").rglob("*.py")
        if path.stat().st_size
    )
    for path in files:
        if path not in taken and not any(
            fnmatch.fnmatch(path, o.files) for o in manifest.out_of_tree
        ):
            problems.append(
                f"{path}: in no commit; add it to one in tools/upstream/manifest, or to out_of_tree "
                "with the reason"
            )
    for out in manifest.out_of_tree:
        if not any(fnmatch.fnmatch(path, out.files) and path not in taken for path in files):
            problems.append(f"out_of_tree {out.files!r} matches no file that is in no commit")
    return problems


def find_large(manifest: Manifest, repository: Path = REPOSITORY) -> list[str]:
    """A sentence that names the commits with more lines than allowed, if there are any.

    Counted without a torch tree, so without what a commit changes in files of torch.

    Raises:
        StackError: a file is not there, or cannot move.
    """
    placed = {commit.title: list(placed_files(commit, repository)) for commit in manifest.commits}
    texts = tidied_texts([file for files in placed.values() for file in files])
    lines = {
        title: sum(len(texts[file.path].splitlines()) for file in files)
        for title, files in placed.items()
    }
    large = [f"{title!r}: {count}" for title, count in lines.items() if count > manifest.max_lines]
    return [too_large(large, manifest.max_lines)] if large else []
