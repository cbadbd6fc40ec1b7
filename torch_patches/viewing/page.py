"""One HTML page that needs no network: ``write_page([Sheet.of(report), ...], path)``.

Texts of the graph (names of nodes, modules and groups) may be anything.  jinja2 escapes them in the
tables; in the JSON they cannot end the element that holds them; and the page's policy runs no script
but its own, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.viewing.picture import Picture
from torch_patches.viewing.tables import measured_rows, sheet_tables
from torch_patches.viewing.timeline_data import timeline_data

if TYPE_CHECKING:
    from torch_patches.viewing.profile import Comparison

_TEMPLATES = Path(__file__).parent / "templates"
#: Parts of the page's one script, in order.
_SCRIPTS = ("figures.js", "timeline.js")


@dataclass(frozen=True)
class Sheet:
    """What a page shows of one graph.

    Args:
        title: for its tab.
        report: of the run.
        picture: None where nobody observed it: then there are tables only.
    """

    title: str
    report: Report
    picture: Picture | None

    @staticmethod
    def of(report: Report, title: str = "") -> Sheet:
        """The sheet of a report."""
        picture = getattr(report.story, "picture", None)
        return Sheet(title or f"mode {report.mode}", report, picture)


def write_page(
    sheets: Sequence[Sheet],
    path: str | Path,
    title: str = "",
    measured: Comparison | None = None,
) -> None:
    """Writes the page; equal sheets give equal files.

    Args:
        title: of the page; empty for one that says what it is.
        measured: a profile beside the estimates.

    Raises:
        OSError: it cannot be written.
    """
    Path(path).write_text(render(sheets, title, measured), encoding="utf-8")


def render(sheets: Sequence[Sheet], title: str = "", measured: Comparison | None = None) -> str:
    """The page as text; arguments as for :func:`write_page`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = [(_TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    script = "".join(['"use strict";\n(() => {\n', *parts, "})();\n"])
    digest = hashlib.sha256(script.encode()).digest()
    return environment.get_template("page.html.j2").render(
        title=title or "Collectives before and after",
        sheets=[_content(sheet, f"sheet-{number}", Markup) for number, sheet in enumerate(sheets)],
        measured=None if measured is None else measured_rows(measured),
        css=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(digest).decode(),
    )


def _content(sheet: Sheet, identity: str, trusted: Any) -> dict[str, Any]:
    content = {"id": identity, "title": sheet.title, **sheet_tables(sheet)}
    picture = sheet.picture
    data = "" if picture is None else script_json(timeline_data(picture, sheet.report))
    return {**content, "data": trusted(data)}


def script_json(value: object) -> str:
    """JSON for a ``<script>`` element: no ``<`` is left that could end it, or begin a comment."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
