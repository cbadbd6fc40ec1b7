"""Device models beside what is known of the chips, and what must agree with them."""

from dataclasses import replace

import pytest
import torch

from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES, Device, Link
from torch_patches._inductor.fx_passes.comm_overlap.estimate.network import collective_ms
from torch_patches._inductor.fx_passes.comm_overlap.estimate.saturation import saturation_bytes
from torch_patches._inductor.fx_passes.comm_overlap.plan import CollectiveKind

#: Multiprocessors, bf16 multiply-adds of one of them in a clock, and the boost clock in GHz.
CHIPS = {"A100": (108, 1024, 1.41), "H100": (132, 2048, 1.83), "H200": (132, 2048, 1.83)}
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@pytest.mark.parametrize("name", CHIPS)
def test_rates_are_those_of_the_tensor_cores(name: str) -> None:
    """In whole TFLOPS; TF32 has half the rate, 8 bit twice, but on the A100, which has no float8."""
    processors, products, ghz = CHIPS[name]
    half = processors * products * 2 * ghz / 1e3
    device = DEVICES[name]
    assert (
        device.matmul_tflops(torch.bfloat16) == device.matmul_tflops(torch.float16) == round(half)
    )
    assert device.matmul_tflops(torch.float32) == round(half / 2)
    eight = half if name == "A100" else 2 * half
    assert {device.matmul_tflops(dtype) for dtype in EIGHT_BITS} == {round(eight)}


@pytest.mark.parametrize("name", ["B200", "generic"])
def test_rates_keep_their_proportions(name: str) -> None:
    device = DEVICES[name]
    half = device.matmul_tflops(torch.bfloat16)
    assert device.matmul_tflops(torch.float32) * 2 == half == device.matmul_tflops(torch.float16)
    assert {device.matmul_tflops(dtype) for dtype in EIGHT_BITS} == {2 * half}


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_what_is_reached_is_a_share_of_the_peak(device: Device) -> None:
    assert 0.5 < device.matmul_efficiency < device.dram_efficiency < 1.0
    assert device.kernel_us < device.intra_node.base_us <= device.inter_node.base_us


def test_h200_is_an_h100_with_faster_memory() -> None:
    one, other = DEVICES["H100"], DEVICES["H200"]
    assert replace(other, name=one.name, dram_gb_per_s=one.dram_gb_per_s) == one
    assert other.dram_gb_per_s > one.dram_gb_per_s


def test_a_device_nobody_described_lies_between_two_that_are() -> None:
    low, high, generic = DEVICES["A100"], DEVICES["H100"], DEVICES["generic"]
    assert low.dram_gb_per_s < generic.dram_gb_per_s < high.dram_gb_per_s
    for dtype in (torch.bfloat16, torch.float32, *EIGHT_BITS):
        rates = [d.matmul_tflops(dtype) for d in (low, generic, high)]
        assert rates == sorted(set(rates))


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_default_buckets_saturate_the_links_of_an_h100(ranks: int) -> None:
    """What a bucket holds without a cap is worked out from the same link as its time."""
    device = DEVICES["H100"]
    link = device.intra_node if ranks <= 8 else device.inter_node
    size = saturation_bytes(ranks)
    moving = Link(0.0, 0.0, link.gb_per_s)
    kind = CollectiveKind.ALL_GATHER
    share = collective_ms(kind, size, ranks, moving) / collective_ms(kind, size, ranks, link)
    assert share == pytest.approx(0.9, rel=1e-6)
