"""What objectives of drafts that propose several tokens from one forward share (P-EAGLE, DFlash).

A place n of a sequence is where such a draft starts from: it knows the target's features up to token n and
the pending token n + 1, and drafts tokens n + 2, n + 3, ... by one row each. `Lesson` says what stands there
and what is to be predicted, `Attention` lets those rows see the places up to their own, and `draws` chooses
among positions where not all are trained on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train.alignment import Offsets, align
from train.batches import Batch
from train.supervision import Term


@dataclass(frozen=True)
class Lesson:
    """What stands at the L places of each sequence, and what its S steps are to predict there."""

    features: Tensor  # [B, L, n_taps * d]: at place n itself
    pending: Tensor  # [B, L] int64
    mask: Tensor  # [B, L, S] bool
    teacher: Tensor  # [B, L, S] int64: packed target rows
    labels: Tensor  # [B, L, S] int64

    @property
    def places(self) -> Tensor:
        """int64 [B, L]: 0, 1, ..., L - 1."""
        size = self.pending.shape
        return torch.arange(size[1], device=self.pending.device).expand(size)

    def terms(self, rows: Tensor, states: Sequence[Tensor], mask: Tensor) -> list[Term]:
        """The steps with these `states` [B, R, d] at the places `rows` [B, R], trained where `mask` [B, L, S]
        says."""
        wide = rows[..., None].expand(-1, -1, len(states))
        steps = (values.gather(1, wide).unbind(-1) for values in (mask, self.teacher, self.labels))
        return [Term(*of_step) for of_step in zip(states, *steps, strict=True)]


def lesson(batch: Batch, offsets: Sequence[Offsets]) -> Lesson:
    """The places of `batch` from which `offsets[0]` predicts a token of it; later steps may reach beyond its
    end, where the mask is False."""
    beyond = len(offsets)
    tokens, mask = F.pad(batch.tokens, (0, beyond)), F.pad(batch.mask, (0, beyond))
    teacher = F.pad(batch.teacher, (0, beyond), value=-1)
    steps = [align(step, tokens, mask, features=batch.taps, target=teacher) for step in offsets]
    first = steps[0]
    assert first.features is not None
    length = max(0, batch.tokens.shape[1] - first.start - offsets[0].label)
    targets = [step.target for step in steps if step.target is not None]
    return Lesson(
        features=first.features[:, :length],
        pending=first.tokens[0][:, :length],
        mask=torch.stack([step.mask[:, :length] for step in steps], dim=-1),
        teacher=torch.stack([target[:, :length] for target in targets], dim=-1),
        labels=torch.stack([step.labels[:, :length] for step in steps], dim=-1),
    )


@dataclass
class Attention:
    """How drafted rows attend, given to a network as `attend`: to the context, and to some of each other.

    One mask over context and rows lets any selection of them be computed in one call, and a fused kernel
    keeps the scores out of memory.
    """

    context: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # K, V [B, Hkv, L, hd] of each layer
    mask: Tensor | None = None  # bool [B, 1, M, L + M]

    def record(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Plain causal attention over the L places, whose keys and values become the context."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        self.context.append((k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, M, hd], k and v [B, Hkv, M, hd], rotated -> [B, H, M, hd]."""
        pairs = zip(self.context[layer], (k, v), strict=True)
        keys, values = (torch.cat([before.to(v.dtype), own.to(v.dtype)], dim=2) for before, own in pairs)
        return F.scaled_dot_product_attention(q.to(v.dtype), keys, values, self.mask, enable_gqa=True)


def visible(place: Tensor, step: Tensor, length: int, causal: bool) -> Tensor:
    """Which of `length` places of context and M rows each row sees: bool [B, 1, M, length + M].

    place [B, M]: where a row's draft starts. It sees the context up to there, and the rows of the same place,
    if `causal` only those up to its own `step` [B, M].
    """
    context = torch.arange(length, device=place.device) <= place[..., None]
    own = place[:, :, None] == place[:, None, :]
    if causal:
        own = own & (step[:, None, :] <= step[:, :, None])
    return torch.cat([context, own], dim=-1)[:, None]


def draws(batch: Batch, seed: int, step: int) -> Tensor:
    """Uniform numbers in [0, 1), float32 [B, T].

    Each sequence's follow from the seed, the optimiser step and its own trained tokens: the same whatever
    the padding, the other sequences of the batch, and the run's interruptions.
    """
    drawn = np.empty(batch.tokens.shape, dtype=np.float32)
    for row, tokens, mask in zip(drawn, batch.tokens.cpu(), batch.mask.cpu(), strict=True):
        text = zlib.crc32(tokens[mask].numpy().tobytes())
        row[:] = np.random.default_rng([seed, step, text]).random(len(row), dtype=np.float32)
    return torch.from_numpy(drawn).to(batch.tokens.device)
