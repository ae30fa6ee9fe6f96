"""Rows that the tiny target wrote itself, and a clean accelerate for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from data.tokens import TokenRow
from models.target import Target


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings in singletons, which would leak from one test into the next."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def written_rows(target: Target, count: int, prompt: int = 6, reply: int = 24, seed: int = 0) -> list[TokenRow]:
    """Random prompts of `prompt` tokens and the target's greedy replies of `reply` tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, target.vocab_size, (count, prompt), generator=generator)
    for _ in range(reply):
        logits = target.forward(ids).logits
        assert logits is not None
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return [TokenRow(str(i), "tiny", row, [0] * prompt + [1] * reply) for i, row in enumerate(ids.tolist())]
