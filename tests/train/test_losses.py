"""Each divergence by hand on three tokens, its gradient against autograd, and float32 under autocast."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor

from train.losses import DIVERGENCES, divergence, score

P, Q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
# p = (.7 .2 .1), q = (.5 .3 .2). Acceptance is .5 + .2 + .1 = .8; m = (p + q) / 2 = (.6 .25 .15).
FORWARD = 0.7 * log(1.4) + 0.2 * log(2 / 3) + 0.1 * log(0.5)  # .0851
REVERSE = 0.5 * log(5 / 7) + 0.3 * log(1.5) + 0.2 * log(2)  # .0920
JSD = (
    0.7 * log(0.7 / 0.6)
    + 0.2 * log(0.2 / 0.25)
    + 0.1 * log(0.1 / 0.15)
    + 0.5 * log(0.5 / 0.6)
    + 0.3 * log(0.3 / 0.25)
    + 0.2 * log(0.2 / 0.15)
) / 2
WEIGHT = 2.718281828459045 ** (-3 * 0.8)
VALUES = {
    "forward_kl": 0.0851,
    "reverse_kl": 0.0920,
    "jsd": JSD,
    "tv": 0.2,
    "nla": -log(0.8),
    "lk": WEIGHT * FORWARD + (1 - WEIGHT) * 0.2,
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_literal_values(name: str) -> None:
    found = score(divergence(name), torch.tensor([[Q]]).log(), torch.tensor([P]), torch.ones(1, 1))

    assert found.value.item() == pytest.approx(VALUES[name], abs=1e-4)
    assert found.alpha.item() == pytest.approx(0.8)
    assert found.argmax.item() == 0
    assert pytest.approx(0.0851, abs=1e-4) == FORWARD and pytest.approx(0.0920, abs=1e-4) == REVERSE


def definition(name: str, p: Tensor, logits: Tensor) -> Tensor:
    """[S, n], as the formulas say, for autograd."""
    q = logits.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    forward = (p * (p.log() - q.log())).sum(-1)
    weight = torch.exp(-3 * alpha.detach())
    middle = 0.5 * p + 0.5 * q
    return {
        "forward_kl": forward,
        "reverse_kl": (q * (q.log() - p.log())).sum(-1),
        "jsd": 0.5 * (p * (p / middle).log()).sum(-1) + 0.5 * (q * (q / middle).log()).sum(-1),
        "tv": 1 - alpha,
        "nla": -alpha.log(),
        "lk": weight * forward + (1 - weight) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_are_autograd_s(name: str, mass: float) -> None:
    """Also where the target has mass outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.randn(3, 5, generator=generator, dtype=torch.float64).softmax(-1) * mass
    scale = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    expected = definition(name, p, logits)
    (gradient,) = torch.autograd.grad((scale * expected).sum(), logits)

    found = score(divergence(name), logits.detach(), p, scale)

    torch.testing.assert_close(found.value, expected.detach())
    torch.testing.assert_close(found.gradient, gradient)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_an_impossible_token_leaves_everything_finite(name: str) -> None:
    """p has a zero, and q one that rounds to zero, at another place."""
    p = torch.tensor([[1.0, 0.0, 0.0]])
    found = score(divergence(name), torch.tensor([[[-200.0, 0.0, 0.0]]]), p, torch.ones(1, 1))

    assert found.value.isfinite().all() and found.gradient.isfinite().all()


def test_alpha_is_taken_with_the_law_that_was_named() -> None:
    p = torch.tensor([[0.4, 0.2, 0.1]])  # .3 of the target's mass lies outside
    found = score(divergence("forward_kl"), torch.tensor([[Q]]).log(), p / 0.7, torch.ones(1, 1), law=p)

    assert found.alpha.item() == pytest.approx(0.4 + 0.2 + 0.1)
    assert found.value.item() == pytest.approx(
        sum(x / 0.7 * log(x / 0.7 / q) for x, q in zip((0.4, 0.2, 0.1), Q, strict=True)), abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_float32_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A draft close to its target, where bfloat16 arithmetic has 19 % of error in the gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(1, 64, 1000, generator=generator) * 3).to(dtype)
    p = (logits[0].double() + 0.05 * torch.randn(64, 1000, generator=generator).double()).softmax(-1)
    one = torch.ones(1, 64)
    reference = score(divergence(name), logits.double(), p, one.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score(divergence(name), logits, p.float(), one)

    torch.testing.assert_close(found.value.double(), reference.value, rtol=1e-4, atol=1e-6)
    error = (found.gradient.double() - reference.gradient).norm() / reference.gradient.norm()
    assert error < (1e-5 if name != "tv" else 1e-3)
