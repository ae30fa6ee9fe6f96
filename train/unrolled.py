"""A recurrent draft unrolled over ground-truth tokens, as EAGLE drafts are when they decode.

Step 0 reads the target's features, each later step its own previous state at the same row (EAGLE-3's
training-time test, Li et al. 2025; HASS, Zhang et al. 2024, for EAGLE-1). At step i, row j attends to the
step-0 keys of rows <= j and to its own row's keys of steps 1..i, exactly what its K/V cache holds in
decoding.

Prompts are long and replies short, so only what a loss can see is computed: steps >= 1 run on the rows that
some step supervises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.layers import Attend
from train.alignment import TABLE, align
from train.batches import Batch
from train.supervision import Term, joint_matches, selection


class Recurrent(Protocol):
    """What unrolling asks of a draft network."""

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [B, T, d] of tapped states [B, T, n_taps * d_target]."""
        ...

    def __call__(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States [B, T, d] of features, or of the states of the step before, [B, T, d]."""
        ...


class UnrolledAttention:
    """How an unrolled draft attends, given to the network as `attend`.

    Step 0 is plain causal attention over all rows of the sequence; padding, on the right, is after every real
    row. In later steps the queries are a selection of rows, and each sees the step-0 keys of rows up to its
    own and its own keys of steps 1..i.

    Scores are by far the largest tensors here: every step keeps [B, H, R, T] of them for the backward pass.
    With `recompute` none are kept and the backward pass makes them again (Chen et al. 2016).
    """

    def __init__(self, recompute: bool = False) -> None:
        self._recompute = recompute
        self._allowed: Tensor | None = None  # [B, 1, 1, R, T] bool; None in step 0
        self._bias: Tensor | None = None  # 0 where allowed, else -inf, in the dtype of the scores
        self._context: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> K, V of step 0: [B, Hkv, T, hd]
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> K, V of steps 1..i: [B, Hkv, R, hd]

    def select(self, rows: Tensor, length: int) -> None:
        """From now on queries are `rows` [B, R] of the sequence, whose step 0 had `length` rows."""
        self._allowed = (torch.arange(length, device=rows.device) <= rows[..., None])[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, R, hd], k and v [B, Hkv, R, hd], rotated -> [B, H, R, hd]."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._allowed is None:
            self._context[layer] = (k, v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self._bias is None:
            self._bias = q.new_zeros(self._allowed.shape).masked_fill_(~self._allowed, float("-inf"))
        own = self._own.setdefault(layer, [])
        own.append((k, v))
        everything = (q, *self._context[layer], list(own), self._bias)
        with torch.autocast(q.device.type, enabled=False):  # which would widen the scores to float32
            if self._recompute:
                return checkpoint(attend_to_both, *everything, use_reentrant=False, preserve_rng_state=False)
            return attend_to_both(*everything)


def attend_to_both(q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], bias: Tensor) -> Tensor:
    """Attention of q [B, H, R, hd] over a context k, v [B, Hkv, T, hd] and over each row's own keys.

    own: one pair [B, Hkv, R, hd] for each of the steps 1..i. bias [B, 1, 1, R, T]: added to context scores.
    """
    b, heads, rows, size = q.shape
    q = q.view(b, k.shape[1], -1, rows, size) * size**-0.5  # [B, Hkv, G, R, hd]: G query heads share a key
    own_k, own_v = (torch.stack(tensors, dim=3) for tensors in zip(*own, strict=True))  # [B, Hkv, R, i, hd]
    context = (q.flatten(2, 3) @ k.mT).view(*q.shape[:4], -1) + bias  # [B, Hkv, G, R, T]
    itself = (q.transpose(2, 3) @ own_k.mT).transpose(2, 3)  # [B, Hkv, G, R, i]
    law = torch.cat([context, itself], dim=-1).softmax(-1)
    context, itself = law.split([k.shape[2], len(own)], dim=-1)
    seen = (context.flatten(2, 3) @ v).view(q.shape) + (itself.transpose(2, 3) @ own_v).transpose(2, 3)
    return seen.reshape(b, heads, rows, size)


@dataclass(frozen=True)
class Unrolled:
    rows: Tensor  # [B, R] int64: the selected rows j, ascending, then rows that no step supervises as padding
    steps: list[Term]


def step_positions(batch: Batch, steps: int) -> Tensor:
    """Supervised positions of each step, int64 [steps]."""
    aligned = [align(TABLE["eagle3"](i), batch.tokens, batch.mask) for i in range(steps)]
    return torch.stack([step.mask.sum() for step in aligned])


def step_matches(draft: Any, batch: Batch, steps: int) -> Tensor:
    """`Objective.matches` of a `Recurrent` draft with a draft vocabulary."""
    unrolled = unroll(draft, batch, steps)
    drafted = [draft.draft_ids[draft.logits(step.states).argmax(-1)] for step in unrolled.steps]
    return joint_matches(batch, unrolled.rows, unrolled.steps, drafted)


def unroll(draft: Recurrent, batch: Batch, steps: int, recompute: bool = False) -> Unrolled:
    """Runs `draft` for `steps` steps over `batch`. The RoPE position of row j at step i is j + i."""
    # Padded so that every step has all rows of step 0; what is beyond a sequence's end has mask 0.
    tokens, mask = F.pad(batch.tokens, (0, steps)), F.pad(batch.mask, (0, steps))
    teacher = F.pad(batch.teacher, (0, steps), value=-1)
    aligned = [
        align(TABLE["eagle3"](i), tokens, mask, features=batch.taps, target=teacher) for i in range(steps)
    ]
    length = aligned[0].rows - steps  # rows whose step-0 label is inside the batch
    rows = selection(torch.stack([step.mask[:, :length] for step in aligned]).any(0))

    attend = UnrolledAttention(recompute)
    taps = aligned[0].features
    assert taps is not None
    everywhere = torch.arange(length, device=rows.device).expand(len(rows), -1)
    state = draft(draft.fuse(taps[:, :length]), aligned[0].tokens[0][:, :length], everywhere, attend)
    state = state.gather(1, rows[..., None].expand(-1, -1, state.shape[-1]))
    attend.select(rows, length)

    done = []
    for i, step in enumerate(aligned):
        if i > 0:
            state = draft(state, step.tokens[0].gather(1, rows), rows + i, attend)
        assert step.target is not None
        of_rows = (values.gather(1, rows) for values in (step.mask, step.target, step.labels))
        done.append(Term(state, *of_rows))
    return Unrolled(rows, done)
