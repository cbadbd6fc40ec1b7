"""Milliseconds from a table of measurements, and what a table has for each question.

A table is measured once on the user's machines, written to a file (``calibration.py``) and read
by every rank.  It is asked by kind, link class, group size, bytes, dtype and flops: never by rank
or by the device at hand, so that it answers alike on every rank.

    between two measured points    linear
    beyond the last, before the first    along the nearest segment, never below zero
    another group size             the nearest measured one, scaled as the ring formula scales
    anything not measured          None: the caller takes the device's constants

Noise only ever adds time.  So a smaller amount counts at most as long as any larger one that was
measured.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import (
    Device,
    Link,
    LinkClass,
)
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import (
    UNKNOWN_GROUP_SIZE,
    collective_ms,
)
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind


@dataclass(frozen=True)
class Curve:
    """Milliseconds by amount (bytes or flops), piecewise linear.

    Args:
        amounts: at least two, rising.
        ms: of each, not falling.
    """

    amounts: tuple[float, ...]
    ms: tuple[float, ...]

    @classmethod
    def through(cls, amounts: Sequence[float], ms: Sequence[float]) -> Curve:
        """The curve through measured points, made to rise (see the module)."""
        rising = list(ms)
        for index in range(len(rising) - 2, -1, -1):
            rising[index] = min(rising[index], rising[index + 1])
        return cls(tuple(amounts), tuple(rising))

    def at(self, amount: float) -> float:
        """Milliseconds, at least 0.  O(log points)."""
        right = min(max(bisect.bisect_right(self.amounts, amount), 1), len(self.amounts) - 1)
        left = right - 1
        slope = (self.ms[right] - self.ms[left]) / (self.amounts[right] - self.amounts[left])
        return max(self.ms[left] + (amount - self.amounts[left]) * slope, 0.0)


@dataclass(frozen=True)
class CollectiveTimes:
    """What one kind of collective took on groups of one shape; dtypes do not matter.

    Args:
        kind, link, group_size: what was measured; the size is at least 2.
        size_bytes: of the full tensor, at least two, rising.
        ms: of each, alone on its link, above 0.
    """

    kind: CollectiveKind
    link: LinkClass
    group_size: int
    size_bytes: tuple[int, ...]
    ms: tuple[float, ...]


@dataclass(frozen=True)
class MatmulRates:
    """What matrix products of one dtype reach.

    Args:
        dtype: of the operands.
        flops: of one product, at least one, rising.
        tflops: reached at each (10**12 / s).
    """

    dtype: torch.dtype
    flops: tuple[int, ...]
    tflops: tuple[float, ...]

    def curve(self) -> Curve:
        """Products smaller than the smallest count at its rate, larger ones as the last grew."""
        ms = [flops / rate / 1e9 for flops, rate in zip(self.flops, self.tflops, strict=True)]
        return Curve.through((0, *self.flops), (0.0, *ms))


@dataclass(frozen=True)
class CalibrationTable:
    """Measurements; whatever is None or missing comes from the device's constants.

    Args:
        device: what was measured, for people.
        collectives: one entry for each kind, link and group size.
        matmul: one entry for each dtype.
        dram_gb_per_s: bytes read and written by a large copy (GB = 10**9 bytes).
        kernel_issue_us, collective_issue_us, coalesced_member_issue_us, wait_issue_us: what the
            host spends: on a compute kernel; a collective without its wait; each further member of
            a coalesced one; a wait on finished work.
        compute_slowdown: how many times as long compute takes under a collective, at least 1.
        loaded_launch_us: by how much longer a collective takes that starts while compute runs.
        about: names and texts for people; not part of the digest.
    """

    device: str
    collectives: tuple[CollectiveTimes, ...] = ()
    matmul: tuple[MatmulRates, ...] = ()
    dram_gb_per_s: float | None = None
    kernel_issue_us: float | None = None
    collective_issue_us: float | None = None
    coalesced_member_issue_us: float | None = None
    wait_issue_us: float | None = None
    compute_slowdown: float | None = None
    loaded_launch_us: float | None = None
    about: tuple[tuple[str, str], ...] = ()
    content_digest: str = field(init=False)
    _by_kind: dict[tuple[CollectiveKind, LinkClass], dict[int, Curve]] = field(
        init=False, repr=False, compare=False
    )
    _by_dtype: dict[torch.dtype, Curve] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_kind: dict[tuple[CollectiveKind, LinkClass], dict[int, Curve]] = {}
        for times in self.collectives:
            curves = by_kind.setdefault((times.kind, times.link), {})
            curves[times.group_size] = Curve.through(times.size_bytes, times.ms)
        # The dataclass is frozen; these three follow from what it was given.
        object.__setattr__(self, "_by_kind", by_kind)
        object.__setattr__(self, "_by_dtype", {m.dtype: m.curve() for m in self.matmul})
        content = json.dumps({**content_of(self), "about": {}}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        object.__setattr__(self, "content_digest", digest)

    def collective_ms(
        self,
        kind: CollectiveKind,
        size_bytes: float,
        group_size: int | None,
        link_class: LinkClass,
        link: Link,
    ) -> float | None:
        """Milliseconds of one collective alone on its link; None where nothing like it is there.

        Args:
            size_bytes: of the full tensor.
            group_size: ranks, None (unknown) counts as 8; groups of one are never in a table.
            link: the device's constants, which scale to other group sizes.
        """
        curves = self._by_kind.get((kind, link_class))
        ranks = group_size or UNKNOWN_GROUP_SIZE
        if curves is None or ranks == 1:
            return None
        curve = curves.get(ranks)
        if curve is not None:
            return _at_least(curve, size_bytes, link)
        nearest = min(curves, key=lambda size: (max(size, ranks) / min(size, ranks), size))
        measured = _at_least(curves[nearest], size_bytes, link)
        reference = collective_ms(kind, size_bytes, nearest, link)
        if reference <= 0:
            return measured
        return measured * collective_ms(kind, size_bytes, ranks, link) / reference

    def matmul_ms(self, dtype: torch.dtype, flops: int, device: Device) -> float | None:
        """Milliseconds of a product's arithmetic, None where its dtype was not measured.

        A dtype that neither the table nor the device knows counts as float32, as in
        :meth:`Device.matmul_tflops`.
        """
        curve = self._by_dtype.get(dtype)
        if curve is None and dtype not in device.tflops:
            curve = self._by_dtype.get(torch.float32)
        return None if curve is None else curve.at(flops)

    def roofline_device(self, device: Device) -> Device:
        """``device`` with the measured memory rate, and without arithmetic time where
        :meth:`matmul_ms` has it."""
        measured = dict.fromkeys(self._by_dtype, math.inf)
        changed = replace(device, tflops={**device.tflops, **measured})
        if self.dram_gb_per_s is None:
            return changed
        return replace(changed, dram_gb_per_s=self.dram_gb_per_s, dram_efficiency=1.0)

    def describe(self) -> str:
        """Device, contents and digest in a few words."""
        return (
            f"calibration {self.content_digest[:12]} of {self.device} "
            f"({len(self.collectives)} collective curves, {len(self.matmul)} matmul dtypes)"
        )


def _at_least(curve: Curve, size_bytes: float, link: Link) -> float:
    """A line through two large transfers may meet zero bytes below zero: latency stays."""
    return max(curve.at(size_bytes), min(curve.ms[0], link.base_us / 1e3))


def content_of(table: CalibrationTable) -> dict[str, Any]:
    """The table as plain JSON values, its entries sorted (the format of ``calibration.py``)."""
    collectives = sorted(
        table.collectives, key=lambda t: (t.kind.value, t.link.value, t.group_size)
    )
    matmul = sorted(table.matmul, key=lambda rates: str(rates.dtype))
    return {
        "device": table.device,
        "about": dict(table.about),
        "collectives": [
            {
                "kind": times.kind.value,
                "link": times.link.value,
                "group_size": times.group_size,
                "size_bytes": list(times.size_bytes),
                "ms": [float(ms) for ms in times.ms],
            }
            for times in collectives
        ],
        "matmul": [
            {
                "dtype": str(rates.dtype).removeprefix("torch."),
                "flops": list(rates.flops),
                "tflops": [float(rate) for rate in rates.tflops],
            }
            for rates in matmul
        ],
        **{name: _as_float(getattr(table, name)) for name in SCALARS},
    }


def _as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


SCALARS = (
    "dram_gb_per_s",
    "kernel_issue_us",
    "collective_issue_us",
    "coalesced_member_issue_us",
    "wait_issue_us",
    "compute_slowdown",
    "loaded_launch_us",
)
"""The table's single numbers."""
