"""The names that a printed program needs (see ``graph_code``)::

from torch_patches.testing.program import *
"""

import operator as operator

import torch as torch
from torch import device as device
from torch._functorch._aot_autograd.descriptors import *  # noqa: F403
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv

from torch_patches._inductor.fx_passes.comm_overlap.graph.groups import GroupTable as GroupTable
from torch_patches._inductor.fx_passes.comm_overlap.options import *  # noqa: F403
from torch_patches._inductor.fx_passes.comm_overlap.plan import *  # noqa: F403
from torch_patches.testing import effect_ops as effect_ops
from torch_patches.testing.estimations import Estimation as Estimation
from torch_patches.testing.flag_draws import RandomEstimation as RandomEstimation
from torch_patches.testing.flag_draws import stack_of_kinds as stack_of_kinds
from torch_patches.testing.graph_builder import GraphBuilder as GraphBuilder
from torch_patches.testing.graph_builder import Group as Group
from torch_patches.testing.minimise import check_invariants as check_invariants
from torch_patches.testing.strategies import Description as Description
