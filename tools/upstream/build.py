"""Makes the commits: files moved, edits applied, size and imports checked."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from upstream.anchors import apply_edit
from upstream.errors import StackError
from upstream.flag_lines import flag_lines
from upstream.layout import REPOSITORY, Placed, package_files, placed_files
from upstream.manifest import Commit, Edit, Manifest
from upstream.message import message
from upstream.rewrite import IN_TREE, TESTING, imported_modules
from upstream.ruff import formatted_change, tidy
from upstream.tree import AUTHOR, Repository, TorchTree

_LAYERS = ("graph", "estimate", "passes")


@dataclass(frozen=True)
class Built:
    """A commit that was made.

    Args:
        commit: what it is of.
        sha: its hash.
        files: paths in the tree that it adds.
        edited: paths of torch's files that it changes.
        lines: added and removed.
    """

    commit: Commit
    sha: str
    files: tuple[str, ...]
    edited: tuple[str, ...]
    lines: int


@dataclass
class Stack:
    """What was built.

    Args:
        tree: what it was built for.
        repository: with the commits.
        base: hash of torch as it was.
        commits: in order.
        left_out: those that this torch does not need.
    """

    tree: TorchTree
    repository: Repository
    base: str
    commits: list[Built] = field(default_factory=list)
    left_out: list[Commit] = field(default_factory=list)


def build_stack(
    tree: TorchTree,
    manifest: Manifest,
    out: Path,
    repository: Path = REPOSITORY,
    author: str = AUTHOR,
) -> Stack:
    """Builds all commits that the tree needs under ``out/tree``, and patches under ``out/patches``.

    Raises:
        StackError: a place is not found, a commit is too large, a file imports what no commit before
            it has, something does not exist, or the folders are not empty.
    """
    if any((out / "patches").glob("*")):
        raise StackError(f"{out / 'patches'} is not empty")
    edited = sorted({edit.file for commit in manifest.commits for edit in commit.edits})
    repo = Repository.of(tree, out / "tree", edited, author)
    stack = Stack(tree, repo, repo.head())
    chosen = [commit for commit in manifest.commits if commit.serves(tree.release)]
    stack.left_out = [commit for commit in manifest.commits if commit not in chosen]
    placed = {commit.title: list(placed_files(commit, repository)) for commit in chosen}
    texts = tidied_texts([file for files in placed.values() for file in files])
    tests = {p: imported_modules(text) for p, text in texts.items() if p.startswith("test/")}
    layer = 0
    for commit in chosen:
        layer = _check_layer(commit, layer)
        files = placed[commit.title]
        built = _make(commit, files, texts, stack, manifest)
        text = message(commit, built.files, repository, _later_tests(files, tests))
        stack.commits.append(_committed(built, stack, text))
    _check_sizes(stack.commits, manifest.max_lines)
    repo.git(
        "format-patch",
        "-q",
        "--no-signature",
        "-o",
        str((out / "patches").resolve()),
        stack.base,
    )
    return stack


def tidied_texts(files: Sequence[Placed]) -> Mapping[str, str]:
    """The text of each file by its path in the tree, formatted for it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / file.path for file in files]
        for path, file in zip(paths, files, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        tidy(paths)
        return {file.path: path.read_text() for path, file in zip(paths, files, strict=True)}


def _make(
    commit: Commit,
    placed: Sequence[Placed],
    texts: Mapping[str, str],
    stack: Stack,
    manifest: Manifest,
) -> Built:
    """Puts the files of a commit into the tree and edits torch's."""
    root = stack.repository.root
    added = [file.path for file in placed]
    for path in [*added, *package_files(added)]:
        target = root / path
        if target.exists() and path in texts:
            raise StackError(f"{commit.title!r}: {path} is in the tree already")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.write_text(texts.get(path, ""))
    edits = [e for e in commit.edits if not e.versions or stack.tree.release in e.versions]
    for edit in edits:
        _edit(edit, root, commit, manifest)
    for path in added:
        _check_file(root, path, commit)
    edited = tuple(sorted({edit.file for edit in edits} - set(added)))
    return Built(commit, "", tuple(added), edited, 0)


def _committed(built: Built, stack: Stack, text: str) -> Built:
    repo = stack.repository
    paths = sorted({*built.files, *package_files(list(built.files)), *built.edited})
    repo.git("add", "-f", "--", *paths)
    repo.git("commit", "-q", "--no-verify", "-F", "-", text=text)
    return replace(built, sha=repo.head(), lines=repo.changed_lines())


def _later_tests(
    placed: Sequence[Placed], tests: Mapping[str, set[str]], most: int = 2
) -> list[str]:
    """Test files that import what a commit adds, of those whose imports are given."""
    added = {file.path.removesuffix(".py").replace("/", ".") for file in placed}
    return [path for path, imports in tests.items() if imports & added][:most]


def _check_sizes(commits: Sequence[Built], most: int) -> None:
    large = [f"{built.commit.title!r}: {built.lines}" for built in commits if built.lines > most]
    if large:
        raise StackError(too_large(large, most))


def too_large(commits: Sequence[str], most: int) -> str:
    """What to do about commits, given as title and number of lines."""
    return (
        f"{most} changed lines are allowed in a commit; move files or tests of these to another, or "
        f"leave tests out: {'; '.join(commits)}"
    )


def _edit(edit: Edit, root: Path, commit: Commit, manifest: Manifest) -> None:
    path = root / edit.file
    if not path.is_file():
        raise StackError(f"{commit.title!r}: the tree has no {edit.file}")
    text = flag_lines(manifest.flags_left_out) if edit.generator == "flags" else edit.text
    before = path.read_text()
    after = apply_edit(before, edit, text)
    path.write_text(formatted_change(before, after) if path.suffix == ".py" else after)


def _check_layer(commit: Commit, reached: int) -> int:
    """The layer that the stack has reached with this commit.

    Raises:
        StackError: it goes back to a lower one.
    """
    layers = [_LAYERS.index(m.split("/")[0]) for m in commit.modules if m.split("/")[0] in _LAYERS]
    if layers and min(layers) < reached:
        raise StackError(
            f"{commit.title!r}: a module of {_LAYERS[min(layers)]}/ behind one of {_LAYERS[reached]}/"
        )
    return max([reached, *layers])


def _check_file(root: Path, path: str, commit: Commit) -> None:
    """Raises:
    StackError: an import of ours that is not in the tree yet, or our name left in the text.
    """
    source = (root / path).read_text()
    for name in sorted(imported_modules(source)):
        if not name.startswith((f"{IN_TREE}.", f"{TESTING}.")):
            continue
        folder = root / name.replace(".", "/")
        attribute_of = folder.parent.with_suffix(".py")
        if not (folder.with_suffix(".py").is_file() or folder.is_dir() or attribute_of.is_file()):
            raise StackError(
                f"{commit.title!r}: {path} imports {name}, which comes later or not at all"
            )
    for number, line in enumerate(source.splitlines(), 1):
        if "torch_patches" in line.lower():
            raise StackError(
                f"{commit.title!r}: {path}:{number} names torch_patches: {line.strip()}"
            )
