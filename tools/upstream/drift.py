"""Whether package and manifest still fit: every module is in a commit, or is left out by name."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from upstream.layout import PACKAGE_FOLDER, REPOSITORY, TESTING_FOLDER
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
