"""Milliseconds of compute nodes by roofline: the larger of arithmetic and memory time.

    ms(node) = max(flops / (peak of the operands' dtype * efficiency), bytes / DRAM rate), and at
               least one launch where the node ends a kernel

Flops of matrix products come from their shapes, of convolutions and attention from torch's own
formulas (``torch.utils.flop_counter``); everything else is bound by memory.  Values that stay in
registers inside a fused region cost nothing (see ``fusion.py``).  Symbolic sizes count as the
stated fallback, so every rank gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.fx as fx
from torch.utils import flop_counter

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import Device
from torch_patches._inductor.fx_passes.comm_overlap.estimate.fusion import (
    memory_traffic,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.nodes import (
    ResultBytes,
    inputs_of,
    schema_arguments,
    tensors_of,
    traits_of,
)
from torch_patches._inductor.fx_passes.comm_overlap.graph.sizes import decision_bytes, has_symbols

#: Position of the first matrix among the arguments of a product.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "_int_mm": 0}
_ATTENTION = "_scaled_dot_product"
#: What a formula raises for arguments that it cannot count; 0 is said of these.
_NOT_COUNTED = (AssertionError, AttributeError, IndexError, TypeError, ValueError)


class ComputeCost(NamedTuple):
    """What a compute node takes.

    Args:
        ms: on the device.
        launches: kernels that the host issues: 1 where the node ends a kernel, else 0.
    """

    ms: float
    launches: int


def compute_costs(
    graph: fx.Graph,
    device: Device,
    idle: Set[fx.Node] = frozenset(),
    sizes: ResultBytes | None = None,
) -> dict[fx.Node, ComputeCost]:
    """Cost of each node that computes; others, collectives among them, are not in it.

    Linear in nodes and edges.

    Args:
        idle: nodes that count as views.
        sizes: those known already; it is added to.
    """
    counter = FlopCounter()
    bytes_per_ms = device.dram_gb_per_s * device.dram_efficiency * 1e6
    kernel_ms = device.kernel_us / 1e3
    costs: dict[fx.Node, ComputeCost] = {}
    for node, (read_bytes, written_bytes, launches) in memory_traffic(graph, idle, sizes).items():
        traits = traits_of(node.target)
        if traits.communicates:
            continue
        ms = (read_bytes + written_bytes) / bytes_per_ms
        if launches and kernel_ms > ms:
            ms = kernel_ms
        if not traits.is_pointwise and (amount := counter.flops(node)):
            ms = max(ms, _arithmetic_ms(node, amount, device))
        costs[node] = ComputeCost(ms, int(launches))
    return costs


def _arithmetic_ms(node: fx.Node, amount: int, device: Device) -> float:
    rate = device.matmul_tflops(_operand_dtype(node)) * device.matmul_efficiency
    return amount / (rate * 1e9)


def _operand_dtype(node: fx.Node) -> torch.dtype:
    for source in inputs_of(node):
        for tensor in tensors_of(source.meta.get("val")):
            return tensor.dtype
    return torch.float32


class FlopCounter:
    """Counts operations; torch's formulas are looked up once, and asked once for equal arguments."""

    def __init__(self) -> None:
        self._formulas: dict[str, Callable[..., object] | None] = {}
        # By name of an op and shapes of its arguments and result.
        self._known: dict[tuple[str, str, str], int] = {}

    def flops(self, node: fx.Node) -> int:
        """Floating-point operations of a matrix product, convolution or attention; 0 of others."""
        traits = traits_of(node.target)
        if traits.namespace != "aten" or traits.is_pointwise or traits.is_view:
            return 0
        name = str(traits.name)
        if name in _PRODUCTS:
            return _product_flops(node, _PRODUCTS[name])
        if name not in self._formulas:
            self._formulas[name] = _formula(name)
        formula = self._formulas[name]
        return 0 if formula is None else self._by_formula(node, name, formula)

    def _by_formula(self, node: fx.Node, name: str, formula: Callable[..., object]) -> int:
        shapes = fx.node.map_arg((node.args, node.kwargs), _shapes_of)
        key = (name, repr(shapes), repr(_shapes_of(node)))
        if key not in self._known:
            self._known[key] = _flops_by_formula(node, formula)
        return self._known[key]


def _shapes_of(node: fx.Node) -> Any:
    return tuple(tuple(tensor.shape) for tensor in tensors_of(node.meta.get("val")))


def _formula(name: str) -> Callable[..., object] | None:
    """torch's formula for an op; attention has CPU variants with the arguments of the others."""
    packet = getattr(torch.ops.aten, name.replace("_for_cpu", ""), None)
    return flop_counter.flop_registry.get(packet)


def _product_flops(node: fx.Node, first: int) -> int:
    """2 * (elements of the result) * (length of the rows multiplied)."""
    left = [*schema_arguments(node).values(), None][first]
    value = left.meta.get("val") if isinstance(left, fx.Node) else None
    results = list(tensors_of(node.meta.get("val")))
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not results:
        return 0
    return 2 * decision_bytes(results[0].numel()) * decision_bytes(value.shape[-1])


def _flops_by_formula(node: fx.Node, formula: Callable[..., object]) -> int:
    """torch's formula on fake values; 0 where a size is symbolic (memory decides then)."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    result = node.meta.get("val")
    if _any_symbolic([*args, *kwargs.values(), result]):
        return 0
    given: Sequence[object] = args
    if str(traits_of(node.target).name).startswith(_ATTENTION):
        given = _with_equal_heads(args)
    try:
        counted = formula(*given, **kwargs, out_val=result)
    except _NOT_COUNTED:
        return 0
    return int(counted) if isinstance(counted, (int, float)) else 0


def _with_equal_heads(args: Sequence[object]) -> list[object]:
    """Attention with each key and value counted for every query head that shares it, which torch's
    formula does from 2.12 on; 2.11 refuses it.  Formulas take shapes in the place of tensors."""
    heads = max((a.shape[1] for a in args if _has_heads(a)), default=0)
    return [_of_heads(a, heads) if _has_heads(a) else a for a in args]


def _has_heads(value: object) -> TypeGuard[torch.Tensor]:
    """(batch, heads, rows, columns)"""
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _of_heads(value: torch.Tensor, heads: int) -> torch.Size:
    batch, _, rows, columns = value.shape
    return torch.Size((batch, heads, rows, columns))


def _any_symbolic(values: Sequence[object]) -> bool:
    tensors = [t for value in values for t in tensors_of(value)]
    return any(isinstance(v, torch.SymInt) for v in values) or any(map(has_symbols, tensors))
