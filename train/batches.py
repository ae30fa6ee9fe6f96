"""The order in which rows are trained on, and the padded batch that an objective receives.

The order follows from (seed, epoch) alone and a position in it is an optimiser step, so a run that stops at
step k goes on with exactly the rows it would have seen.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokens import TokenRow

# Lengths are padded to multiples of it, so that kernels prepared per shape (as by oneDNN) meet few shapes:
# preparing one for each batch took as long as the batch, and all of them stayed in memory.
GRAIN = 64
JITTER = 0.1  # rows whose lengths differ by less than this share may trade places between epochs


@dataclass(frozen=True)
class RowFeatures:
    """What the target says about one token row of T tokens, R of which (at r + 1) are trained on."""

    taps: Tensor  # [T, n_taps * d]
    rows: Tensor  # [R] int64, on the CPU: the target rows r with m_{r+1} = 1, ascending
    hidden: Tensor  # [R, d] last hidden states of those rows, after the final norm
    lse: Tensor  # [R] float32: log-sum-exp of the rows' logits over the full vocabulary
    argmax: Tensor  # [R] int64: the rows' most likely token in the full vocabulary


@dataclass(frozen=True)
class Batch:
    """B rows padded on the right to T tokens. Taught target rows are packed in order, padded to N."""

    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool: tokens to train on; False on padding
    taps: Tensor  # [B, T, n_taps * d]
    teacher: Tensor  # [B, T] int64: where target row r lies in the packed tensors; -1 where it is not kept
    hidden: Tensor  # [N, d]
    lse: Tensor  # [N] float32
    argmax: Tensor  # [N] int64

    def to(self, device: torch.device) -> Batch:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return replace(self, **moved)


def rounded(size: int, grain: int = GRAIN) -> int:
    """The next multiple of `grain`."""
    return -(-size // grain) * grain


def collate(rows: Sequence[TokenRow], features: Sequence[RowFeatures], grain: int = GRAIN) -> Batch:
    """Pads rows and their features to one batch, T and N to multiples of `grain`."""
    size = (len(rows), rounded(max(len(row.input_ids) for row in rows), grain))
    tokens = torch.zeros(size, dtype=torch.int64)
    mask = torch.zeros(size, dtype=torch.bool)
    teacher = torch.full(size, -1, dtype=torch.int64)
    taps = features[0].taps.new_zeros(*size, features[0].taps.shape[-1])
    packed = 0
    for b, (row, feature) in enumerate(zip(rows, features, strict=True)):
        length, taught = len(row.input_ids), len(feature.rows)
        tokens[b, :length] = torch.tensor(row.input_ids)
        mask[b, :length] = torch.tensor(row.loss_mask, dtype=torch.bool)
        taps[b, :length] = feature.taps
        teacher[b, feature.rows] = torch.arange(packed, packed + taught)
        packed += taught
    spare = rounded(packed, grain) - packed
    return Batch(
        tokens,
        mask,
        taps,
        teacher,
        hidden=F.pad(torch.cat([f.hidden for f in features]), (0, 0, 0, spare)),
        lse=F.pad(torch.cat([f.lse for f in features]), (0, spare)),
        argmax=F.pad(torch.cat([f.argmax for f in features]), (0, spare)),
    )


def pack(sizes: Sequence[int], order: Sequence[int], tokens: int) -> list[list[int]]:
    """Cuts `order` into batches of at most `tokens` padded tokens; a longer row is a batch of its own."""
    batches: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, sizes[row])
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = sizes[row]
        batches[-1].append(row)
    return batches


def dealt(batches: Sequence[list[int]], rank: int, ranks: int) -> list[tuple[list[int], bool]]:
    """This rank's micro-batches of a step's, and whether they count. Every rank has as many: where they do
    not go round, the first stands in and does not count."""
    own = [(batch, True) for batch in batches[rank::ranks]]
    return own + [(batches[0], False)] * (-(-len(batches) // ranks) - len(own))


def shuffled(sizes: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch: every row once, in batches of similar lengths, both in an order drawn from (seed, epoch)."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    blurred = torch.tensor(sizes) * (1 + JITTER * torch.rand(len(sizes), generator=generator))
    batches = pack(sizes, blurred.argsort().tolist(), tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def stepped(
    sizes: Sequence[int], chapter: Sequence[int], tokens: int, accumulation: int, seed: int, epoch: int
) -> list[list[list[int]]]:
    """The optimiser steps of an epoch over the rows in `chapter`, each of them micro-batches of rows."""
    batches = [
        [chapter[i] for i in batch] for batch in shuffled([sizes[n] for n in chapter], tokens, seed, epoch)
    ]
    return [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]


class Plan:
    """Which micro-batches of rows make up each optimiser step."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        tokens: int,
        accumulation: int,
        epochs: int,
        seed: int,
        max_steps: int | None = None,
        chapters: Callable[[int], Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """`sizes`: tokens of each row. `tokens`: padded tokens of a micro-batch, at most. `chapters`: the
        rows of an epoch that are trained on together, one chapter after another; None: all of them."""
        of = chapters or (lambda epoch: [range(len(sizes))])
        self._epoch = lru_cache(maxsize=1)(
            lambda epoch: [
                step
                for chapter in of(epoch)
                for step in stepped(sizes, chapter, tokens, accumulation, seed, epoch)
            ]
        )
        counts = [len(self._epoch(epoch)) for epoch in range(epochs)]
        self._ends = list(itertools.accumulate(counts))
        self.steps = min(self._ends[-1], max_steps or self._ends[-1])

    def epoch(self, step: int) -> int:
        """The epoch that step (0, 1, ...) belongs to."""
        return bisect.bisect_right(self._ends, step)

    def __getitem__(self, step: int) -> list[list[int]]:
        """The micro-batches of `step`, each lists of row numbers; the last of a chapter may be fewer."""
        epoch = self.epoch(step)
        return self._epoch(epoch)[step - (self._ends[epoch - 1] if epoch else 0)]
