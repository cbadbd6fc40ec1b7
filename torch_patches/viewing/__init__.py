"""Shows what was done to a graph: pictures, pages and stories of collectives.

    report = torch_patches.optimize_graph(gm)
    report.to_html("report.html")              # record -> picture -> page
    report.to_chrome_trace("trace.json")       # record -> picture -> trace

``record`` keeps, in tuples without nodes, what the estimates expected of the graph before and after;
that is all that a run pays for.  The rest happens when somebody asks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_patches._inductor.fx_passes.comm_overlap.reporting import Observer

__all__ = ["observer_of_compile"]

_REPORT_LOG = "torch_patches._inductor.fx_passes.comm_overlap.reporting"


def observer_of_compile() -> Observer | None:
    """Who observes a compile: whoever has the INFO log on, whose record carries the report
    (``record.report.to_html(path)``); nobody else pays for it, nor for the import."""
    if not logging.getLogger(_REPORT_LOG).isEnabledFor(logging.INFO):
        return None
    from torch_patches.viewing.record import observe

    return observe
