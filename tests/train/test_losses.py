from __future__ import annotations

import math

import pytest
import torch

from train.losses import soft_cross_entropy

# Three tokens in the draft vocabulary; the target has .3 of its mass elsewhere.
P = torch.tensor([[0.4, 0.2, 0.1]])
Q = torch.tensor([[[0.5, 0.3, 0.2]]])


def test_literal_value_of_a_law_that_does_not_sum_to_one() -> None:
    found = soft_cross_entropy(Q.log(), P)

    # -(.4 ln .5 + .2 ln .3 + .1 ln .2) = .27726 + .24079 + .16094
    assert found.value.item() == pytest.approx(0.67899, abs=1e-5)
    assert found.mass.item() == pytest.approx(0.7)
    assert found.argmax.item() == 0
    torch.testing.assert_close(found.q, Q)


def test_literal_value_renormalised() -> None:
    # The same divided by the mass: .67899 / .7
    assert soft_cross_entropy(Q.log(), P / 0.7).value.item() == pytest.approx(0.96999, abs=1e-5)


def test_forward_kl_of_the_reference_example() -> None:
    # p = (.7 .2 .1), q = (.5 .3 .2): cross-entropy minus p's entropy is .7 ln 1.4 + .2 ln(2/3) + .1 ln .5 =
    # .0851
    p = torch.tensor([[0.7, 0.2, 0.1]])
    entropy = -sum(x * math.log(x) for x in (0.7, 0.2, 0.1))

    assert soft_cross_entropy(Q.log(), p).value.item() - entropy == pytest.approx(0.0851, abs=1e-4)


def test_gradient_is_autograd_s() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.rand(3, 5, generator=generator, dtype=torch.float64) / 5
    scale = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad(-(scale[..., None] * p * logits.log_softmax(-1)).sum(), logits)

    torch.testing.assert_close(soft_cross_entropy(logits.detach(), p).gradient(p, scale), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_under_autocast(dtype: torch.dtype) -> None:
    """A draft close to its target, where bfloat16 arithmetic has 19 % of error in the gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(1, 64, 1000, generator=generator) * 3).to(dtype)
    p = (logits[0].double() + 0.05 * torch.randn(64, 1000, generator=generator).double()).softmax(-1)
    reference = soft_cross_entropy(logits.double(), p)
    one = torch.ones(1, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = soft_cross_entropy(logits, p.float())
        gradient = found.gradient(p.float(), one)

    torch.testing.assert_close(found.value.double(), reference.value, rtol=1e-5, atol=0)
    expected = reference.gradient(p, one.double())
    assert (gradient.double() - expected).norm() / expected.norm() < 1e-5
