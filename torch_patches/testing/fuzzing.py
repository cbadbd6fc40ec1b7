"""One example of a fuzz campaign: a graph, flags, and all that must hold for them.

    examples = Examples(sorted(Path("test/data").glob("*.json.gz")))
    examples.run("graphs", Random("0/17"), tally)

Each lane draws its example from the generator alone, so an example can be run again alone:

    graphs      generated graphs, most of them mutated, under any flags
    captures    pieces of captured graphs, mutated, under any flags
    chains      chained collectives, against one collective over every group
    augmented   AugmentedGraph against its brute-force model
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch.fx as fx

from torch_patches import config
from torch_patches._inductor.fx_passes.comm_overlap.options import Options
from torch_patches.flags import FlagError
from torch_patches.testing import augmented_graph_model as augmented
from torch_patches.testing.backends import as_on_gpu
from torch_patches.testing.captured_cases import CapturedGraphs
from torch_patches.testing.chain_check import CHECKED_KINDS, ChainError, check_chain
from torch_patches.testing.flag_draws import BAD_ESTIMATIONS, bad_flag, random_flags, read_flags
from torch_patches.testing.flag_invariants import check_bad_estimation
from torch_patches.testing.graph_mutations import mutate
from torch_patches.testing.invariants import CaseError, InvariantError, Outcome
from torch_patches.testing.minimise import check_invariants
from torch_patches.testing.strategies import (
    TAGS,
    Description,
    build_case,
    random_options,
    random_recipe,
)

LANES = ("graphs", "captures", "chains", "augmented")
#: How often each lane's turn comes.
WEIGHTS = {"graphs": 10, "captures": 7, "chains": 1, "augmented": 1}
#: Scenarios of ``augmented``, and chains, in one example: each takes about a millisecond.
_SCENARIOS, _CHAINS = 50, 4


class FoundError(AssertionError):
    """A failure, with the program that shows it.

    Args:
        kind: what failed, in a word or two; failures are counted by it.
        program: what reproduces it; empty where the message says how.
    """

    def __init__(self, kind: str, problem: str, program: str = "") -> None:
        super().__init__(f"{kind}: {problem}")
        self.kind, self.problem, self.program = kind, problem, program


@dataclass
class Tally:
    """What was tried, and what came of it."""

    examples: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    no_programs: int = 0
    with_buckets: int = 0
    members: int = 0
    refused_flags: int = 0
    refused_estimations: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: Outcome) -> None:
        self.with_buckets += outcome.buckets > 0
        self.members += outcome.members

    def __str__(self) -> str:
        tried = ", ".join(f"{n} {lane}" for lane, n in sorted(self.examples.items()))
        failed = ", ".join(f"{n} x {kind}" for kind, n in sorted(self.failures.items()))
        return (
            f"{sum(self.examples.values())} examples ({tried}), {self.no_programs} no programs, "
            f"{self.with_buckets} with buckets, {self.members} members, "
            f"{self.refused_flags} bad flags and {self.refused_estimations} bad estimations refused, "
            f"failures: {failed or 'none'}"
        )


class Examples:
    """Draws and checks examples.

    Args:
        captures: files to take real graphs from.
        tags: what generated graphs may tell of their collectives.
    """

    def __init__(self, captures: Sequence[Path], tags: Sequence[str] = TAGS) -> None:
        self._captured = CapturedGraphs(captures)
        self._tags = tags
        self._lanes: dict[str, Callable[[Random, Tally, bool], None]] = {
            "graphs": self._graph,
            "captures": self._capture,
            "chains": _chains,
            "augmented": _augmented,
        }

    def run(self, lane: str, r: Random, tally: Tally, shrink: bool = True) -> None:
        """Draws an example and checks it.

        Args:
            shrink: cut a failing graph down first.

        Raises:
            FoundError: something does not hold.
        """
        tally.examples[lane] += 1
        self._lanes[lane](r, tally, shrink)

    def _graph(self, r: Random, tally: Tally, shrink: bool) -> None:
        case = build_case(random_recipe(r, tags=self._tags))
        gm, description = case.gm, case.description
        options = self._options(r, description, tally)
        if r.random() < 0.4:
            self._check(gm, description, options, r, tally, shrink, trusted=True)
        else:
            self._mutated(gm, description, options, r, tally, shrink)

    def _capture(self, r: Random, tally: Tally, shrink: bool) -> None:
        gm, description = self._captured.draw(r)
        options = self._options(r, description, tally)
        self._mutated(gm, description, options, r, tally, shrink)

    def _options(self, r: Random, description: Description, tally: Tally) -> Options:
        _check_bad_flag(r, description, tally)
        if r.random() < 0.3:
            return random_options(r)
        return read_flags(random_flags(r, description), description, r)

    def _mutated(
        self,
        gm: fx.GraphModule,
        description: Description,
        options: Options,
        r: Random,
        tally: Tally,
        shrink: bool,
    ) -> None:
        try:
            gm, done = mutate(gm, description.groups, r)
        except Exception:  # of torch, which cannot run what a mutation has made
            tally.no_programs += 1
            return
        tally.mutations.update(done)
        self._check(gm, description, options, r, tally, shrink, trusted=False)

    def _check(
        self,
        gm: fx.GraphModule,
        description: Description,
        options: Options,
        r: Random,
        tally: Tally,
        shrink: bool,
        trusted: bool,
    ) -> None:
        # in turn as on GPUs and as on gloo, which needs copies for some kinds
        with as_on_gpu() if r.random() < 0.5 else contextlib.nullcontext():
            try:
                tally.count(_checked(gm, description, options, trusted, shrink))
                if r.random() < 0.1:
                    check_bad_estimation(gm, options, r.choice(BAD_ESTIMATIONS))
                    tally.refused_estimations += 1
            except CaseError as error:
                if trusted:
                    raise FoundError("generator", str(error)) from error
                tally.no_programs += 1
            except InvariantError as error:
                problem, _, program = str(error).partition("\n\n")
                raise FoundError(f"invariant {error.kind}", problem, program) from error


def _checked(
    gm: fx.GraphModule, description: Description, options: Options, trusted: bool, shrink: bool
) -> Outcome:
    """As ``check_invariants``; it believes the metadata of a graph as long as nothing fails."""
    try:
        return check_invariants(gm, description, options, trusted=True, shrink=False)
    except InvariantError:
        return check_invariants(gm, description, options, trusted=trusted, shrink=shrink)


def _check_bad_flag(r: Random, description: Description, tally: Tally) -> None:
    if r.random() >= 0.2:
        return
    flags = random_flags(r, description)
    name, value = bad_flag(r)
    try:
        config.options_from_arguments({**flags, name: value}, "optimize_graph")
    except FlagError as error:
        if f"{name}=" not in str(error) or repr(value) not in str(error):
            raise FoundError(
                "flags", f"the error does not name {name}={value!r}: {error}"
            ) from None
        tally.refused_flags += 1
    except Exception as error:
        raise FoundError("flags", f"{name}={value!r} raised {error!r}") from error
    else:
        raise FoundError("flags", f"{name}={value!r} was accepted")


def _chains(r: Random, tally: Tally, shrink: bool) -> None:
    for _ in range(_CHAINS):
        try:
            check_chain(random.Random(r.getrandbits(64)), r.choice(CHECKED_KINDS), "chain")
        except ChainError as error:
            raise FoundError("chains", str(error)) from error


def _augmented(r: Random, tally: Tally, shrink: bool) -> None:
    for _ in range(_SCENARIOS):
        scenario = augmented.random_scenario(r)
        try:
            augmented.check_scenario(scenario)
        except augmented.Mismatch as mismatch:
            found: augmented.Mismatch = mismatch
            if shrink:
                try:
                    augmented.check_scenario(augmented.minimise(scenario))
                except augmented.Mismatch as smaller:
                    found = smaller
            raise FoundError("augmented", str(found), str(found)) from mismatch
