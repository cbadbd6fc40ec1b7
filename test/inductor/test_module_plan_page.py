"""docs/module_plan_errors.md is made from the cases of test_module_plan_errors.py.

To write the page again: ``python test/inductor/test_module_plan_page.py``.
"""

from __future__ import annotations

import html
from pathlib import Path

from test_module_plan_errors import SECTIONS

PAGE = Path(__file__).parents[2] / "docs/module_plan_errors.md"

HEAD = """\
# Errors of module plans

Each is a `ModulePlanError`, a `ValueError`, raised when the flags are read or when the plan meets
the first graph. Entries are counted from 0. The names known here are those of a Llama of four
layers (`layers.0.attention.wq`, `layers.0.feed_forward.w1`, ...), with `tok_embeddings`, `norm` and
`output`; `model` has two `layers`, `again` which is `layers[0]`, and a ModuleDict `heads`.
`PARAMETERS` and `MODULES` are the names of parameters and modules in the graph.

An entry that matches nothing, or an unknown name in `module_overlap_with`, is a warning with
`aten_distributed_optimizations.module_plan_unmatched = "warn"`.

Made by `python test/inductor/test_module_plan_page.py`; a test compares.
"""


def cell(text: str) -> str:
    """Text in a table: ``|`` and line ends would break the row, ``<`` would be markup."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")


def page() -> str:
    parts = [HEAD]
    for section, cases in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| Error | Example | Message |\n|---|---|---|\n")
        for case in cases:
            code = f"`{case.code}`"
            message = cell(case.message).replace("*", "\\*").replace("_", "\\_")
            parts.append(f"| {case.title} | {code} | {message} |\n")
    return "".join(parts)


def test_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "run python test/inductor/test_module_plan_page.py"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
