"""Moves our files into torch's tree: names of modules change, and nothing else.

Imports are found in the syntax tree; names in texts and comments among the tokens.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from upstream.errors import StackError

PACKAGE = "torch_patches._inductor.fx_passes.comm_overlap"
IN_TREE = "torch._inductor.fx_passes.comm_overlap"
TESTING = "torch.testing._internal.distributed.comm_overlap"

#: The first that fits a module decides.
MODULES = (
    (PACKAGE, IN_TREE),
    ("torch_patches.testing", TESTING),
    ("torch_patches.flags", f"{IN_TREE}.flags"),
    ("torch_patches.flag_checks", f"{IN_TREE}.flag_checks"),
    ("torch_patches.module_plans", f"{IN_TREE}.module_plans"),
)
_RENAMED = (tokenize.STRING, tokenize.COMMENT, tokenize.NAME)

FOOTER = """

if __name__ == "__main__":
    # Plain pytest functions, so pytest runs them.
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
"""


def in_tree_name(module: str) -> str | None:
    """Where a module of ours is in the tree; None where it has no place there."""
    for old, new in MODULES:
        if module == old or module.startswith(f"{old}."):
            return new + module[len(old) :]
    return None


def moved_source(source: str, where: str) -> str:
    """The file as it reads in the tree.

    Raises:
        StackError: it imports something that has no place there.
    """
    return _with_texts(_with_imports(source, where))


def moved_test(source: str, where: str, only: tuple[str, ...], without: tuple[str, ...]) -> str:
    """A test file as it reads in the tree, with the tests asked for and what they use; it can be
    run by itself.

    Raises:
        StackError: a test that is asked for is not there.
    """
    source = moved_source(_selected(source, where, only, without), where)
    if _wants_fixtures(source):
        fixture = "as_on_gpu_fixture as as_on_gpu_fixture"  # pytest finds it, and nobody names it
        source = _with_import(source, f"from {TESTING}.fixtures import {fixture}")
    footer = FOOTER
    for name in ("pytest", "sys"):
        if not re.search(rf"^import {name}$", source, re.MULTILINE):
            source = _with_import(source, f"import {name}")
    return source.rstrip("\n") + "\n" + footer


def _wants_fixtures(source: str) -> bool:
    """Whether a test needs what our conftest gives: a fixture by name, or passes that are strict."""
    named = re.search(
        r"usefixtures\(\"as_on_gpu\"\)|^def test_.*\bas_on_gpu\b", source, re.MULTILINE
    )
    return bool(named) or "STRICT_VARIABLE" in source


def _with_imports(source: str, where: str) -> str:
    lines = source.splitlines(keepends=True)
    for node in reversed(list(_imports(ast.parse(source)))):
        if isinstance(node, ast.ImportFrom):
            new = in_tree_name(node.module or "")
            if new is None:
                raise StackError(f"{where}: imports {node.module}, which has no place in the tree")
            node.module = new
        else:
            for alias in node.names:
                if _is_ours(alias.name):
                    raise StackError(f"{where}: imports {alias.name} itself; import from a module")
        head = lines[node.lineno - 1][: node.col_offset]
        tail = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset or 0 :].decode()
        lines[node.lineno - 1 : node.end_lineno] = [head + ast.unparse(node) + tail]
    return "".join(lines)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "torch_patches"


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those of ours, in the order of lines."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.walk(tree):
        if (isinstance(node, ast.ImportFrom) and _is_ours(node.module or "")) or (
            isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names)
        ):
            found.append(node)
    return iter(sorted(found, key=lambda node: node.lineno))


def imported_modules(source: str) -> set[str]:
    """Names of modules that a file imports, or that it may take names from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def _with_texts(source: str) -> str:
    """With the new names in texts, comments and identifiers.

    ``tokenize`` cuts f-strings into pieces from Python 3.12 on; a piece has no quotes."""
    if "torch_patches" not in source.lower():
        return source
    kinds = {*_RENAMED, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token in reversed(tokens):
        if token.type not in kinds or "torch_patches" not in token.string.lower():
            continue
        (row, start), (end_row, end) = token.start, token.end
        text = lines[row - 1][:start] + _renamed_token(token.string) + lines[end_row - 1][end:]
        lines[row - 1 : end_row] = [text]
    return "".join(lines)


def _renamed_token(text: str) -> str:
    """A text that is our name alone names the package, as a parent of loggers does."""
    return f'"{IN_TREE}"' if text[1:-1] == "torch_patches" else renamed(text)


def renamed(text: str) -> str:
    """A text with the names of the tree instead of ours."""

    def new_name(match: re.Match[str]) -> str:
        return in_tree_name(match.group()) or re.sub(
            "^torch_patches", "comm_overlap", match.group()
        )

    return re.sub(r"torch_patches(\.\w+)*", new_name, text).replace("TORCH_PATCHES", "COMM_OVERLAP")


# -- parts of test files --------------------------------------------------------------------------


def _selected(source: str, where: str, only: tuple[str, ...], without: tuple[str, ...]) -> str:
    """Without the tests that are not asked for, and without what only those use."""
    methods = tuple(name for name in without if "." in name)
    source = _without_methods(source, where, methods)
    without = tuple(name for name in without if name not in methods)
    tree = ast.parse(source)
    tests = [name for node in tree.body for name in _defines(node) if _is_test(name)]
    if unknown := [name for name in (*only, *without) if name not in tests]:
        raise StackError(f"{where}: there is no test {unknown[0]}")
    kept = {name for name in tests if (not only or name in only) and name not in without}
    if kept == set(tests):
        return source
    defined = {name: node for node in tree.body for name in _defines(node)}
    used, todo = set(), [node for node in tree.body if not _defines(node)]
    todo += [defined[name] for name in kept]
    todo += [node for node in tree.body if _always_kept(node)]
    while todo:
        node = todo.pop()
        if node in used:
            continue
        used.add(node)
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.FunctionDef):
            names |= {argument.arg for argument in node.args.args}  # fixtures
        todo += [defined[name] for name in names if name in defined and not _is_test(name)]
    lines = source.splitlines(keepends=True)
    for node in reversed(tree.body):
        if node not in used and not isinstance(node, (ast.Import, ast.ImportFrom)):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(d.lineno for d in decorators)])
            del lines[first - 1 : node.end_lineno]
    return _without_unused("".join(lines))


def _without_unused(source: str) -> str:
    """Without imports of ours that nothing uses; the formatter drops the others."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = source.splitlines(keepends=True)
    for node in reversed(tree.body):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            names = [a for a in node.names if (a.asname or a.name) in used]
            kept = [ast.unparse(ast.ImportFrom(node.module, names, 0)) + "\n"] if names else []
            lines[node.lineno - 1 : node.end_lineno] = kept
    return "".join(lines)


def _without_methods(source: str, where: str, names: tuple[str, ...]) -> str:
    """Without methods of test classes, given as ``Class.method``."""
    lines = source.splitlines(keepends=True)
    found: dict[str, tuple[int, int]] = {}
    kinds = [kind for kind in ast.parse(source).body if isinstance(kind, ast.ClassDef)]
    for kind in kinds:
        for node in kind.body:
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found[f"{kind.name}.{node.name}"] = (
                    first,
                    node.end_lineno or node.lineno,
                )
    for name in sorted(names, key=lambda name: -found.get(name, (0, 0))[0]):
        if name not in found:
            raise StackError(f"{where}: there is no test {name}")
        first, last = found[name]
        del lines[first - 1 : last]
    return "".join(lines)


def _is_test(name: str) -> bool:
    return name.startswith(("test_", "Test"))


def _always_kept(node: ast.stmt) -> bool:
    """What works without being named: a fixture that is used by itself, an op that is registered."""
    text = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any("autouse" in each or "library" in each for each in text)


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return [name for name in names if name not in ("pytestmark", "__all__")]


def _with_import(source: str, line: str) -> str:
    """The formatter puts it where it belongs."""
    for node in ast.parse(source).body:
        if (
            isinstance(node, (ast.Import, ast.ImportFrom))
            and getattr(node, "module", "") != "__future__"
        ):
            lines = source.splitlines(keepends=True)
            lines.insert(node.lineno - 1, f"{line}\n")
            return "".join(lines)
    raise StackError("a test file without imports")
