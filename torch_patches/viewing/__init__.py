"""Shows what was done to a graph: pictures, pages and stories of collectives.

    report = torch_patches.optimize_graph(gm)
    report.to_html("report.html")              # record -> picture -> page
    report.to_chrome_trace("trace.json")       # record -> picture -> trace

``record`` keeps, in tuples without nodes, what the estimates expected of the graph before and after;
that is all that a run pays for.  The rest happens when somebody asks.
"""
