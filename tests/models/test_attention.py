"""Shared K/V heads under a mask: the numbers of transformers' own attention, and only where they may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from models import attention
from models.attention import sdpa
from models.target import Target

MODULE: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)


def heads(new: int, columns: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """q of 6 heads, k and v of 2, in float64; two sequences."""
    drawn = torch.Generator().manual_seed(0)
    sizes = ((6, new, 8), (2, columns, 8), (2, columns, 8))
    q, k, v = (torch.randn(2, *size, dtype=torch.float64, generator=drawn) for size in sizes)
    return q, k, v


def tree_mask(new: int, columns: int = 11) -> Tensor:
    """Other columns for each sequence and row, one at least."""
    mask = torch.rand(2, 1, new, columns, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("added", [False, True])
def test_the_numbers_are_transformers(new: int, added: bool) -> None:
    q, k, v = heads(new)
    mask = tree_mask(new)
    if added:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    ours, none = sdpa(MODULE, q, k, v, mask, dropout=0.0, scaling=0.3)
    theirs, _ = sdpa_attention_forward(MODULE, q, k, v, mask, dropout=0.0, scaling=0.3)
    assert none is None
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask, heads that are not shared, a bias on positions, gradients."""
    calls: list[int] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *a, **w: calls.append(1))
    q, k, v = heads(4)
    mask = tree_mask(4)
    sdpa(MODULE, q, k, v, None)
    sdpa(MODULE, q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), mask)
    sdpa(MODULE, q, k, v, mask, position_bias=torch.zeros(1))
    sdpa(MODULE, q.clone().requires_grad_(), k, v, mask)
    assert len(calls) == 4


def test_targets_attend_so(target: Target) -> None:
    assert target.config._attn_implementation == "sdpa"
    assert AttentionInterface()["sdpa"] is sdpa
