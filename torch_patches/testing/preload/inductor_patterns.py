"""Builds the patterns that Inductor looks for in joint graphs, which each rank would build at its first
compile.  Nothing of ours is imported: each rank does that itself."""

import torch
from torch._inductor.fx_passes import joint_graph

# As joint_graph_passes calls it, which so finds it done.
joint_graph.lazy_init(torch.device("cpu"))
