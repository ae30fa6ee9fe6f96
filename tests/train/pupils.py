"""What tests do with any objective: a row, an optimiser step, a few of training, and the decoder's side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config, DataConfig, DecodeConfig, MethodConfig, TargetConfig, TrainerConfig
from data.tokens import Prompt, TokenRow
from models.target import Target
from tests.train.conftest import written_rows
from train.batches import Batch


def row(tokens: list[int], prompt: int) -> TokenRow:
    """A prompt of `prompt` tokens, and the rest its reply."""
    return TokenRow("", "", tokens, [0] * prompt + [1] * (len(tokens) - prompt))


def gradients(objective: Any, batches: Sequence[Batch]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one optimiser step over `batches`."""
    objective.zero_grad()
    positions = torch.stack([objective.positions(batch) for batch in batches]).sum(0)
    losses = [objective(batch, positions).value for batch in batches]
    for loss in losses:
        loss.backward()
    grads = [weight.grad for weight in objective.draft.parameters()]
    return sum(loss.item() for loss in losses), [grad for grad in grads if grad is not None]


def padded(batch: Batch, columns: int) -> Batch:
    """The batch with more padding, whose features are far from zero."""

    def wider(values: Tensor, fill: Any) -> Tensor:
        return torch.cat([values, values.new_full((len(values), columns, *values.shape[2:]), fill)], 1)

    return dataclasses.replace(
        batch,
        tokens=wider(batch.tokens, 33),
        mask=wider(batch.mask, False),
        taps=wider(batch.taps, 7.0),
        teacher=wider(batch.teacher, -1),
    )


def fit(objective: Any, batch: Batch, steps: int, lr: float, clip: float | None = None) -> None:
    """Trains on `batch` alone."""
    optimizer = torch.optim.AdamW(objective.draft.parameters(), lr=lr)
    for _ in range(steps):
        loss = objective(batch, objective.positions(batch)).value
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(objective.draft.parameters(), clip)
        optimizer.step()


def moves_every_weight(objective: Any, batch: Batch) -> None:
    """Asserts that training under autocast lowers the loss and moves every weight, norms included: bfloat16
    masters would leave norms at exactly 1."""
    optimizer = torch.optim.AdamW(objective.draft.parameters(), lr=1e-3)
    before = [weight.detach().clone() for weight in objective.draft.parameters()]
    losses = []
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = objective(batch, objective.positions(batch)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(weight.dtype == torch.float32 for weight in objective.draft.parameters())
    assert not any(torch.equal(w, b) for w, b in zip(objective.draft.parameters(), before, strict=True))


def config(method: str, **decode: Any) -> Config:
    """What held-out measurement reads of a configuration; replies are of 24 tokens."""
    return Config(
        experiment="test",
        target=TargetConfig(name="tiny"),
        method=MethodConfig(name=method),
        data=DataConfig(folder="unused"),
        decode=DecodeConfig(**{"draft_tokens": 3, **decode}),
        trainer=TrainerConfig(eval_new_tokens=24),
    )


def heldout(target: Target) -> list[Prompt]:
    rows = written_rows(target, count=16, reply=1, seed=1)
    return [Prompt(row.id, "tiny", row.input_ids[:6]) for row in rows]


def greedy(target: Target, ids: list[int], length: int) -> list[int]:
    """Plain decoding without a cache, to `length` tokens or the end of text."""
    made: list[int] = []
    while len(made) < length and not (made and made[-1] in target.eos_ids):
        logits = target.forward(torch.tensor([ids + made])).logits
        assert logits is not None
        made.append(int(logits[0, -1].argmax()))
    return made
