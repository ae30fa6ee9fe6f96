from __future__ import annotations

import pytest
import torch

from train.throughput import Arithmetic, Meter, peak_memory_mb, sheet_flops

CPU = torch.device("cpu")


def test_products_and_their_backward_passes_are_counted() -> None:
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    with Arithmetic() as counted:
        product = a @ b
        assert counted.flops == 2 * 2 * 3 * 4
        product.exp().sum().backward()
    assert counted.flops == 3 * 48  # one product more for each operand's gradient


def test_attention_is_counted_as_if_nothing_were_masked() -> None:
    q = torch.ones(1, 2, 8, 16)
    with Arithmetic() as counted:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counted.flops == 2 * (2 * 2 * 8 * 8 * 16)  # two heads; scores, and what they weigh


def test_the_first_step_is_counted_and_later_ones_follow_by_their_tokens() -> None:
    meter = Meter(CPU)
    with meter.counting():
        _ = torch.ones(10, 3) @ torch.ones(3, 1)
    assert meter.flops(tokens=10) == 60
    with meter.counting():
        _ = torch.ones(1000, 3) @ torch.ones(3, 1)
    assert meter.flops(tokens=5) == 30


def test_the_peak_is_the_data_sheet_s() -> None:
    assert sheet_flops("NVIDIA H200") == sheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert sheet_flops("NVIDIA A100-SXM4-80GB") == sheet_flops("NVIDIA A100-PCIE-40GB") == 312e12
    assert sheet_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert sheet_flops("NVIDIA H100 PCIe") is sheet_flops("NVIDIA H200 NVL") is None
    assert Meter(CPU).mfu(tflops=0.1) is None


def test_memory_is_in_megabytes() -> None:
    held = torch.ones(100_000_000 // 4)
    assert 100 < peak_memory_mb(CPU) < 100_000
    assert held.nbytes == pytest.approx(100e6)
