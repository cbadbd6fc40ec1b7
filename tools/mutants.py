"""Do the tests notice small faults?  Seeded mutants of graph/, passes/ and estimate/.

    python tools/mutants.py --map calls.json                       # which test calls what
    python tools/mutants.py --calls calls.json --count 300 --seed 0 --out mutants.json

The first command runs tests once and notes the functions that each one enters, and its time; where
there are many cores, several can do so for some of the files each (--tests), and several can run a
part of the sample each (--first).  The second draws mutants, one changed operator, constant,
condition or statement each, and runs for each tests that enter the changed function, until one
fails; --again takes those that lived in an earlier run, with more time for each (--seconds).  A
mutant lives in a forked child that has torch already and imports this package anew; the files on
disk do not change.  What takes far longer than without the mutant counts as noticed: it would not
end.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torch_patches._inductor.fx_passes.comm_overlap"
SOURCES = ROOT / PACKAGE.replace(".", "/")
FOLDERS = ("graph", "passes", "estimate")
#: Tests that compile, start processes or read much: not worth their time here.
_SLOW = ("compile", "hooks", "inductor.py", "compat", "cache", "measured", "upstream", "survival", "backend", "gloo")  # fmt: skip
#: How many times as long as without the mutant its tests may take.
_PATIENCE = 6.0


# ---------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One change.

    Args:
        file: below the package's folder.
        line: where.
        function: first line of the function around it, 0 for module level.
        what: the change, in words.
        number: of the change among those of the file.
    """

    file: str
    line: int
    function: int
    what: str
    number: int


_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


class Changer(ast.NodeTransformer):
    """Makes the ``wanted``-th change of a file; without one it only lists them."""

    def __init__(self, file: str, wanted: int | None = None) -> None:
        self.file, self.wanted = file, wanted
        self.found: list[Mutant] = []
        self._functions: list[int] = []

    def _is_wanted(self, node: ast.AST, what: str) -> bool:
        number = len(self.found)
        function = self._functions[-1] if self._functions else 0
        line: int = getattr(node, "lineno", 0)
        self.found.append(Mutant(self.file, line, function, what, number))
        return number == self.wanted

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self._functions.append(first)
        # Neither the signature, with its types, nor the docstring.
        begin = 1 if ast.get_docstring(node) is not None else 0
        node.body = [*node.body[:begin], *(self.visit(s) for s in node.body[begin:])]
        self._functions.pop()
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for place, op in enumerate(node.ops):
            other = _COMPARISONS[type(op)]
            if self._is_wanted(node, f"{type(op).__name__} -> {other.__name__}"):
                node.ops[place] = other()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = _ARITHMETIC.get(type(node.op))
        if other and self._is_wanted(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._is_wanted(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        dropped = isinstance(node.op, ast.Not) and self._is_wanted(node, "not dropped")
        return node.operand if dropped else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, (bool, int, float)):
            return node
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        wanted = self._is_wanted(node, f"{node.value} -> {other}")
        return ast.copy_location(ast.Constant(other), node) if wanted else node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._is_wanted(node, "condition turned over"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        swaps = {"min": "max", "max": "min", "any": "all", "all": "any"}
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in swaps and self._is_wanted(node, f"{name} -> {swaps[name]}"):
            node.func = ast.copy_location(ast.Name(swaps[name], ast.Load()), node.func)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node  # a docstring
        self.generic_visit(node)
        logs = ast.unparse(node.value).startswith("log.")
        if not logs and self._is_wanted(node, f"dropped: {ast.unparse(node)[:60]}"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if self._is_wanted(node, f"dropped: {ast.unparse(node)[:60]}"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        wanted = self._is_wanted(node, "continue -> break")
        return ast.copy_location(ast.Break(), node) if wanted else node


def all_mutants() -> list[Mutant]:
    """Of all files, in their order."""
    found: list[Mutant] = []
    for path in sorted(p for folder in FOLDERS for p in (SOURCES / folder).glob("*.py")):
        changer = Changer(str(path.relative_to(SOURCES)))
        changer.visit(ast.parse(path.read_text()))
        found += changer.found
    return found


class _MutantLoader(importlib.machinery.SourceFileLoader):
    """Loads the mutant's file with its change."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType | None:
        tree = ast.parse(Path(self.path).read_text())
        changed = Changer(self.mutant.file, self.mutant.number).visit(tree)
        return compile(ast.fix_missing_locations(changed), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"{PACKAGE}.{mutant.file.removesuffix('.py').replace('/', '.')}"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        file = str(SOURCES / self._mutant.file)
        loader = _MutantLoader(fullname, file)
        loader.mutant = self._mutant
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


# ---------------------------------------------------------------- which test calls what


class CallMap:
    """A pytest plugin: test -> seconds, and functions of the package that it enters."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._end = path, time.monotonic() + seconds
        self.calls: dict[str, dict[str, Any]] = {}
        self._entered: set[CodeType] = set()

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        self._entered.add(frame.f_code)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        if time.monotonic() > self._end:
            import pytest

            pytest.exit("the time for the map is up", 0)
        self._entered = set()
        self._begin = time.process_time()
        sys.settrace(self._trace)  # type: ignore[arg-type]

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        sys.settrace(None)
        seconds = time.process_time() - self._begin
        prefix = str(SOURCES) + os.sep
        found = sorted(
            f"{code.co_filename.removeprefix(prefix)}:{code.co_firstlineno}"
            for code in self._entered
            if code.co_filename.startswith(prefix)
        )
        self.calls[nodeid] = {"seconds": seconds, "functions": found}

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        self._path.write_text(json.dumps(self.calls))


def make_map(path: Path, minutes: float, given: Sequence[str]) -> int:
    """Runs the given test files, or those that may be quick; the exit code of pytest."""
    import pytest

    files = list(given) or sorted(
        str(file)
        for file in (ROOT / "test" / "inductor").glob("test_*.py")
        if not any(part in file.name for part in _SLOW)
    )
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    return int(pytest.main([*quiet, *files], plugins=[CallMap(path, 60 * minutes)]))


# ---------------------------------------------------------------- running


class Runner:
    """Runs mutants, each in a child; torch must be imported already.

    Args:
        calls: as :class:`CallMap` wrote them.
        seconds: of tests for one mutant, as they took without it.
    """

    def __init__(self, calls: dict[str, dict[str, Any]], seconds: float = 25.0) -> None:
        self._seconds = seconds
        #: Of each function: how many others a test enters, its seconds and name.
        self._tests: dict[str, list[tuple[int, float, str]]] = {}
        for name, call in calls.items():
            for function in call["functions"]:
                file = function.split(":")[0]
                for key in (function, f"{file}:0"):
                    entry = len(call["functions"]), call["seconds"], name
                    self._tests.setdefault(key, []).append(entry)

    def tests(self, mutant: Mutant) -> tuple[list[str], float]:
        """Those that enter the changed function, and their seconds: of each test file the one that
        enters the fewest functions, which looks closest at them, then the second of each, and so on;
        the file named like the changed one comes first."""
        entered = sorted(set(self._tests.get(f"{mutant.file}:{mutant.function}", ())))
        own = f"test_{Path(mutant.file).stem}"
        taken: Counter[str] = Counter()
        order = []
        for functions, seconds, name in entered:
            file = name.partition("::")[0]
            order.append((own not in file, taken[file], functions, seconds, name))
            taken[file] += 1
        chosen: list[str] = []
        total = 0.0
        for *_, seconds, name in sorted(order):
            if not chosen or total + seconds <= self._seconds:
                chosen.append(name)
                total += seconds
        return chosen, total

    def run(self, mutant: Mutant) -> str:
        """ "killed", "endless", "survived", or "not entered" by any test of the map."""
        tests, seconds = self.tests(mutant)
        if not tests:
            return "not entered"
        child = os.fork()
        if child == 0:
            os._exit(_in_child(mutant, tests, int(_PATIENCE * seconds + 30)))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return "endless"
        return "survived" if os.WEXITSTATUS(status) == 0 else "killed"


def _in_child(mutant: Mutant, tests: Sequence[str], cpu_seconds: int) -> int:
    """Exit code of pytest; the child is ended after so much CPU time."""
    import resource

    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, used + cpu_seconds))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.meta_path.insert(0, _Finder(mutant))
    try:
        import pytest

        quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=no"]
        return int(pytest.main([*quiet, *tests]))
    except BaseException:
        return 1


def _import_torch() -> None:
    """What all tests import, but for this package: a child takes it over."""
    for name in (
        "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor",
        "torch._functorch._aot_autograd.descriptors", "torch.testing._internal.distributed.fake_pg",
        "torch.distributed._functional_collectives", "hypothesis", "expecttest", "pytest",
    ):  # fmt: skip
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def sample(count: int, seed: int, files: Sequence[str] = ()) -> list[Mutant]:
    """Drawn from all, or from those of some files, in the order of the draw, so that fewer are the
    first of more."""
    mutants = [m for m in all_mutants() if not files or m.file in files]
    Random(seed).shuffle(mutants)
    return mutants[:count]


def lived(results: Path) -> list[Mutant]:
    """Those of a file that an earlier run wrote."""
    found = json.loads(results.read_text())
    return [Mutant(**each) for each in found if each.pop("outcome") in ("survived", "not entered")]


def run_all(
    mutants: Sequence[Mutant], runner: Runner, minutes: float
) -> Iterator[tuple[Mutant, str]]:
    """Until the time is up."""
    end = time.monotonic() + 60 * minutes
    for mutant in mutants:
        if time.monotonic() > end:
            return
        yield mutant, runner.run(mutant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each mutant that lives and the share that was killed; 0."""
    options = _parser().parse_args(arguments)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if options.map is not None:
        return make_map(options.map, options.minutes, options.tests)
    _import_torch()
    runner = Runner(
        {
            name: call
            for path in options.calls
            for name, call in json.loads(path.read_text()).items()
        },
        options.seconds,
    )
    results: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    if options.again is not None:
        mutants = lived(options.again)
    else:
        mutants = sample(options.first + options.count, options.seed, options.files)
    mutants = mutants[options.first : options.first + options.count]
    for mutant, outcome in run_all(mutants, runner, options.minutes):
        counts[outcome] += 1
        results.append({**asdict(mutant), "outcome": outcome})
        if outcome in ("survived", "not entered"):
            print(f"{outcome}: {mutant.file}:{mutant.line} {mutant.what}", flush=True)
        options.out.write_text(json.dumps(results, indent=1))
    killed = counts["killed"] + counts["endless"]
    print(f"{dict(counts)}: {killed} of {sum(counts.values())} killed")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--map", type=Path, help="only run tests, and write here what they call")
    parser.add_argument("--tests", nargs="+", default=[], help="files for --map; default: many")
    parser.add_argument("--calls", type=Path, nargs="+", help="what --map wrote")
    parser.add_argument("--files", nargs="+", default=[], help="only these, as passes/auto.py")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="--out of an earlier run: those that lived")
    parser.add_argument("--seconds", type=float, default=25.0, help="of tests for one mutant")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
