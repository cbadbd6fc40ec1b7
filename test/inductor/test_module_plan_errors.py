"""Every error of a module plan with its whole text.

test_module_plan_page.py makes docs/module_plan_errors.md of these cases.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import nn

from torch_patches import module_plans
from torch_patches._inductor.fx_passes.comm_overlap.passes import module_pattern, module_plan
from torch_patches._inductor.fx_passes.comm_overlap.passes.module_plan import (
    ModulePlanError,
    check_overlap_names,
    parse_plan,
)
from torch_patches.module_plans import plan_from_modules

EXAMPLE = '[["tok_embeddings"], "layers.*", ["norm", "output"]]'
NAMES = (
    ". Names are like 'layers.3', 'layers.*', 'layers.[0-5]', 'layers.[0,2,5-7]', "
    "'block_[0-3].attention'"
)
ALLOWED = (
    f"; allowed are names and lists of names, as in {EXAMPLE}. "
    "plan_from_modules(model, plan) makes names from modules"
)
GRAPH_BREAKS = (
    "\nGraph breaks split a model into several graphs, so that a name may belong to another one: "
    'then set aten_distributed_optimizations.module_plan_unmatched = "warn"'
)
FROM_MODULES = "[[model.tok_embeddings], *model.layers, [model.norm, model.output]]"
OF_MODULES = (
    f"; allowed are modules and parameters of the model, names, and lists of these, "
    f"like {FROM_MODULES}"
)

PARAMETERS = [
    "tok_embeddings.weight",
    *(f"layers.{n}.{w}.weight" for n in range(4) for w in ("attention.wq", "feed_forward.w1")),
    "norm.weight",
    "output.weight",
]
MODULES = [name.removesuffix(".weight") for name in PARAMETERS]


class Tiny(nn.Module):
    """With one of each thing that an error is about."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.again = self.layers[0]
        self.heads = nn.ModuleDict({"a*": nn.Linear(1, 1)})


MODEL = Tiny()

USABLE = {
    **{"parse_plan": parse_plan, "check_overlap_names": check_overlap_names},
    **{"plan_from_modules": plan_from_modules, "nn": nn, "model": MODEL},
    **{"PARAMETERS": PARAMETERS, "MODULES": MODULES},
}
"""Names in the code of the cases."""


@dataclass(frozen=True)
class Case:
    """One error: the user's code as a text to evaluate, and what it says."""

    title: str
    code: str
    message: str


def parsed(title: str, value: str, message: str) -> Case:
    return Case(title, f"parse_plan({value})", message)


def checked(title: str, plan: str, message: str, names: str = "PARAMETERS, MODULES") -> Case:
    return Case(title, f'parse_plan({plan}).check({names}, "error")', message)


def overlap(title: str, value: str, message: str) -> Case:
    buckets = '["layers.0", "layers.1", "norm+output"]'
    return Case(title, f"check_overlap_names({value}, {buckets}, MODULES)", message + GRAPH_BREAKS)


def from_modules(title: str, plan: str, message: str) -> Case:
    return Case(title, f"plan_from_modules({plan})", message)


def no_name(title: str, text: str, reason: str) -> Case:
    message = f"entry 0 of the module plan: the name {text!r} {reason}{NAMES}"
    return parsed(title, f'["{text}"]', message)


def missing(item: str, nearest: str, place: str = "entry 0") -> str:
    return (
        f"{item!r} ({place} of the module plan) matches no parameter and no module of this graph. "
        f"{nearest}"
    )


SECTIONS = {
    "The plan is not well-formed": [
        parsed(
            "not a list",
            '"layers.*"',
            f"a module plan is a list of names and of lists of names, like {EXAMPLE}; "
            "the str 'layers.*' is none",
        ),
        parsed(
            "not ordered",
            '{"norm", "output"}',
            f"a module plan is a list of names and of lists of names, like {EXAMPLE}; "
            "an object of type set is none",
        ),
        parsed(
            "empty plan",
            "[]",
            f"the module plan is empty; it needs at least one entry, as in {EXAMPLE}",
        ),
        parsed(
            "empty entry",
            '["norm", []]',
            "entry 1 of the module plan is an empty list; it needs at least one name",
        ),
        parsed(
            "an entry that is no name", "[3]", f"entry 0 of the module plan has the int 3{ALLOWED}"
        ),
        parsed(
            "a module instead of its name",
            "[model.layers[0]]",
            f"entry 0 of the module plan has an object of type Linear{ALLOWED}",
        ),
        parsed(
            "lists too deep",
            '[[["norm"], "output"]]',
            f"entry 0 of the module plan has an object of type list{ALLOWED}",
        ),
        parsed(
            "a name twice",
            '["norm", ["output", "norm"]]',
            "entry 1 of the module plan repeats 'norm' of entry 0; a name may stand once",
        ),
    ],
    "A name is not well-formed": [
        no_name("empty name", "", "is empty"),
        no_name("dots in a row", "layers..0", "has two dots in a row"),
        no_name("leading dot", ".layers", "begins or ends with a dot"),
        no_name("trailing dot", "layers.", "begins or ends with a dot"),
        no_name("range backwards", "layers.[3-1]", "has [3-1], where 3 is above 1"),
        no_name(
            "no integers",
            "layers.[a]",
            "has [a], which is not made of integers and ranges, without spaces, like [0,2,5-7]",
        ),
        no_name(
            "integer too long",
            "layers.[0-9999999999]",
            "has [0-9999999999], with an integer of more than 9 digits",
        ),
        no_name("bracket open", "layers.[0", "has a bracket without its partner in '[0'"),
        no_name("bracket not opened", "layers.0]", "has a bracket without its partner in '0]'"),
        no_name(
            "two wildcards", "h*_[0-3]", "has two wildcards in 'h*_[0-3]': one for each component"
        ),
    ],
    "The plan does not fit the graph": [
        checked(
            "two entries match one parameter",
            '["layers.*", "layers.*.attention"]',
            "'layers.*' (entry 0 of the module plan) and 'layers.*.attention' (entry 1 of the "
            "module plan) both match the parameter 'layers.0.attention.wq.weight' (and 3 more). "
            "At most one entry may: take one away or make it narrower",
        ),
        checked(
            "two items match one parameter",
            '[["norm", "layers.0"], ["layers.0.attention", "output"]]',
            "'layers.0' (in entry 0 of the module plan) and 'layers.0.attention' (in entry 1 of "
            "the module plan) both match the parameter 'layers.0.attention.wq.weight'. "
            "At most one entry may: take one away or make it narrower",
        ),
        checked(
            "two entries match one module, where no parameter has a name",
            '["layers.0", "layers.[0-1]"]',
            "'layers.0' (entry 0 of the module plan) and 'layers.[0-1]' (entry 1 of the module "
            "plan) both match the module 'layers.0.attention.wq' (and 1 more). "
            "At most one entry may: take one away or make it narrower",
            names="[], MODULES",
        ),
        checked(
            "two buckets of one name",
            '[["norm", "output"], "norm+output"]',
            "entry 0 (('norm', 'output')) and entry 1 ('norm+output') of the module plan both make "
            "a bucket 'norm+output'. Names of buckets must differ: write one of the entries in "
            "another way",
            names='[*PARAMETERS, "norm+output.weight"], []',
        ),
        checked(
            "misspelt", '["layer.*"]', missing("layer.*", "Nearest: 'layers.*'.") + GRAPH_BREAKS
        ),
        checked(
            "misspelt in a list",
            '[["tok_embedding", "norm"]]',
            missing("tok_embedding", "Nearest: 'tok_embeddings'.", "in entry 0") + GRAPH_BREAKS,
        ),
        checked(
            "a prefix is missing",
            '["layers.*"]',
            missing("layers.*", "Nearest: 'model.layers.*'.") + GRAPH_BREAKS,
            names='["model." + name for name in PARAMETERS], []',
        ),
        checked(
            "a prefix too many; no such layer",
            '["model.norm", "layers.[10-12]"]',
            missing("model.norm", "Nearest: 'norm'.")
            + "\n"
            + missing("layers.[10-12]", "Nearest: 'layers.*'.", "entry 1")
            + GRAPH_BREAKS,
        ),
        checked(
            "nothing near",
            '["vision"]',
            missing(
                "vision",
                "No name is near; names here begin with 'layers', 'norm', 'output', "
                "'tok_embeddings'.",
            )
            + GRAPH_BREAKS,
        ),
        checked(
            "nothing near among many",
            '["vision"]',
            missing(
                "vision",
                "No name is near; names here begin with '0', '1', '2', '3', '4' and others.",
            )
            + GRAPH_BREAKS,
            names="[str(n) for n in range(9)], []",
        ),
        checked(
            "the graph has no names",
            '["norm"]',
            missing("norm", "No name is known here.") + GRAPH_BREAKS,
            names="[], []",
        ),
    ],
    "`module_overlap_with` does not fit": [
        overlap(
            "no such bucket",
            '{"norm+outputs": "layers.1"}',
            "module_overlap_with['norm+outputs'] = 'layers.1': no bucket of this graph is named "
            "'norm+outputs'. Nearest: 'norm+output'.",
        ),
        overlap(
            "no such module",
            '{"layers.0": "layer.1"}',
            "module_overlap_with['layers.0'] = 'layer.1': no module of this graph is named "
            "'layer.1'. Nearest: 'layers.1', 'layers.3', 'layers.2'.",
        ),
    ],
    "`plan_from_modules`": [
        from_modules(
            "model is no module",
            "[model], [model.layers[0]]",
            "plan_from_modules(model, plan): model is a torch.nn.Module, not a list",
        ),
        from_modules(
            "plan is no list",
            "model, model.layers",
            f"plan_from_modules(model, plan): plan is a list, like {FROM_MODULES}, "
            "not a ModuleList",
        ),
        from_modules(
            "not in the model",
            "model, [nn.Linear(1, 1)]",
            "entry 0 of the plan has a Linear that is not in the model",
        ),
        from_modules(
            "the model itself",
            "model, [[model.again, model]]",
            "entry 0 of the plan is the model itself, which would be one bucket of everything; "
            f"give its parts, like {FROM_MODULES}",
        ),
        from_modules(
            "a module twice, here by its second name",
            "model, [*model.layers, model.again]",
            "entry 2 of the plan repeats 'layers.0' of entry 0; a module or parameter may stand "
            "once",
        ),
        from_modules(
            "wrong type",
            "model, [model.layers[0].weight * 2]",
            f"entry 0 of the plan has a Tensor{OF_MODULES}",
        ),
        from_modules(
            "not ordered",
            "model, [{model.layers[0]}]",
            f"entry 0 of the plan has a set{OF_MODULES}",
        ),
        from_modules(
            "lists too deep",
            "model, [[[model.layers[0]]]]",
            f"entry 0 of the plan has a list{OF_MODULES}",
        ),
        from_modules(
            "a name with wildcards",
            "model, [*model.heads.values()]",
            "entry 0 of the plan: 'heads.a*' cannot be written in a plan, where '*', '[' and ']' "
            "are wildcards",
        ),
    ],
}

CASES = [case for cases in SECTIONS.values() for case in cases]


def message_of(code: str) -> str:
    with pytest.raises(ModulePlanError) as caught:
        eval(code, dict(USABLE))
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_error_says(case: Case) -> None:
    assert message_of(case.code) == case.message


def test_long_values_are_cut() -> None:
    assert f"the name '{'x' * 56}... " in message_of("parse_plan(['x' * 1000 + '.'])")
    assert f"repeats '{'x' * 56}... of entry 0" in message_of("parse_plan(['x' * 1000] * 2)")
    assert len(message_of("parse_plan('x' * 1000)")) < 300


# -- no error is left out -------------------------------------------------------------------------


def raising_lines(module) -> set[int]:
    """Lines of statements that raise an error of a plan, or return one to be raised."""
    errors = ("ModulePlanError", "PatternError")
    lines = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        made = node.exc if isinstance(node, ast.Raise) else getattr(node, "value", None)
        ends = isinstance(node, (ast.Raise, ast.Return)) and isinstance(made, ast.Call)
        if ends and isinstance(made.func, ast.Name) and made.func.id in errors:
            lines.add(node.lineno)
    return lines


@pytest.mark.parametrize("module", [module_pattern, module_plan, module_plans])
def test_every_error_in_the_sources_has_a_case(module) -> None:
    expected, seen = raising_lines(module), set()
    path = module.__file__

    def trace(frame, event, _) -> Callable | None:
        if frame.f_code.co_filename != path:
            return None
        seen.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for case in CASES:
            message_of(case.code)
    finally:
        sys.settrace(before)
    assert expected and expected <= seen, f"{path}: no case for lines {sorted(expected - seen)}"


@pytest.mark.parametrize(("count", "others"), [(5, "."), (6, " and others.")])
def test_others_are_named_where_there_are_some(count: int, others: str) -> None:
    with pytest.raises(ModulePlanError) as caught:
        parse_plan(["vision"]).check([str(n) for n in range(count)], [], "error")
    assert f"begin with '0', '1', '2', '3', '4'{others}" in str(caught.value)
