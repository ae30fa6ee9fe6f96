"""Packed linear layers give what plain ones give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.packing import LEAST_ROWS, MOST_ROWS, pack

ROWS = [(1, 1, 48), (1, 3, 48), (2, 8, 48), (1, MOST_ROWS + 1, 48)]


def layer(dtype: torch.dtype, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", LEAST_ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", ROWS)
def test_products_are_the_plain_ones(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    plain, packed = layer(dtype, bias), layer(dtype, bias)
    pack(packed)
    x = torch.randn(shape).to(dtype)
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
    assert packed(x).shape == (*shape[:2], 80)
    assert (packed(x) - plain(x)).abs().max() <= 4 * rounding


def test_what_trains_or_is_no_linear_layer_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4).requires_grad_(False), nn.Embedding(4, 4))
    assert pack(module) == 0
    assert pack(layer(torch.float64, bias=False)) == 0


def test_weights_stay_as_they_were() -> None:
    packed = layer(torch.float32, bias=True)
    before = {name: weight.clone() for name, weight in packed.state_dict().items()}
    assert pack(packed) == 1
    assert packed.state_dict().keys() == before.keys()
    assert all(torch.equal(packed.state_dict()[name], weight) for name, weight in before.items())
