"""The target's features of the training rows: taps at every row, and the taught rows' last hidden states.

`online`: the target runs beside the draft, and nothing is stored. `cached`: computed once and kept on a disk
(train/store.py).

The target's logits are never kept: the last hidden state and the log-sum-exp of its full-vocabulary logits
give any part of its law back (train/objectives). What is taught is decided by the loss mask alone: target row
r is kept iff m_{r+1} = 1. Rows with features that are not finite are left out and counted; too many of them
stop the run.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import TargetError
from data.tokens import TokenRow
from models.target import Target
from train.batches import Batch, RowFeatures, collate, rounded

LOGIT_ELEMENTS = 1 << 24  # logits that exist at a time while log-sum-exps are taken
MAX_BAD = 0.01  # share of rows that may have features that are not finite


class Features(Protocol):
    """Where batches come from."""

    def usable(self) -> list[int]:
        """Numbers of the rows that may be asked for."""
        ...

    def chapters(self, numbers: Sequence[int], seed: int, epoch: int) -> list[Sequence[int]]:
        """Places in `numbers` of the rows that can be read together, each once: one chapter after another."""
        ...

    def want(self, numbers: Sequence[int]) -> None:
        """Says which rows the step reads, of all processes, before any of them is asked for."""
        ...

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows `numbers` with their features."""
        ...

    def ahead(self, batches: Sequence[Sequence[int]]) -> None:
        """Says that these will be asked for next, in this order, so that they may be read by then."""
        ...

    def close(self) -> None:
        """Gives back what it holds; nothing is asked for after."""
        ...


class Online:
    """Features computed by the target whenever they are asked for."""

    def __init__(self, target: Target, rows: Sequence[TokenRow], taps: tuple[int, ...]) -> None:
        self._target, self._rows, self._taps = target, rows, taps
        self._bad: set[int] = set()

    def usable(self) -> list[int]:
        return list(range(len(self._rows)))

    def chapters(self, numbers: Sequence[int], seed: int, epoch: int) -> list[Sequence[int]]:
        return [range(len(numbers))]

    def want(self, numbers: Sequence[int]) -> None:
        """Nothing: each is computed when it is asked for."""

    def batch(self, numbers: Sequence[int]) -> Batch:
        rows = [self._rows[n] for n in numbers]
        features = compute(self._target, rows, self._taps)
        for i, n in enumerate(numbers):
            if not finite(features[i]):
                self._bad.add(n)
                rows[i], features[i] = silent(rows[i], features[i])
        refuse_many(len(self._bad), len(self._rows), self._target)
        return collate(rows, features)

    def ahead(self, batches: Sequence[Sequence[int]]) -> None:
        """Nothing: the target computes where the draft learns, and one would wait for the other."""

    def close(self) -> None:
        """Nothing is held."""


@torch.no_grad()
def compute(target: Target, rows: Sequence[TokenRow], taps: tuple[int, ...]) -> list[RowFeatures]:
    """One forward of the target over `rows`, padded on the right, where causal attention never looks."""
    ids = torch.zeros(len(rows), rounded(max(len(row.input_ids) for row in rows)), dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row.input_ids)] = torch.tensor(row.input_ids)
    out = target.forward(ids.to(target.device), taps=taps, logits=False)
    taught = [taught_rows(row) for row in rows]
    hidden = torch.cat([out.last_hidden[b, at] for b, at in enumerate(taught)])
    lse, argmax = summarise(target, hidden)
    features = []
    for b, (row, at, packed) in enumerate(zip(rows, taught, spans([len(at) for at in taught]), strict=True)):
        states = torch.zeros(0) if out.taps is None else out.taps[b, : len(row.input_ids)]
        features.append(RowFeatures(states, at, hidden[packed], lse[packed], argmax[packed]))
    return features


def summarise(target: Target, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp (float32 [n]) and argmax (int64 [n]) of the full-vocabulary logits of `hidden` [n, d]."""
    n = len(hidden)
    padded = F.pad(hidden, (0, 0, 0, rounded(n) - n))
    chunks = padded.split(rounded(max(1, LOGIT_ELEMENTS // target.vocab_size)))
    logits = (target.lm_head(chunk) for chunk in chunks)
    found = [(chunk.float().logsumexp(-1), chunk.argmax(-1)) for chunk in logits]
    return torch.cat([lse for lse, _ in found])[:n], torch.cat([argmax for _, argmax in found])[:n]


def taught_rows(row: TokenRow) -> Tensor:
    """The target rows r that predict a token to train on: m_{r+1} = 1. int64 [R], ascending."""
    return torch.tensor(row.loss_mask[1:]).nonzero().squeeze(1)


def finite(features: RowFeatures) -> bool:
    values = features.taps, features.hidden, features.lse
    return all(bool(torch.isfinite(value).all()) for value in values)


def silent(row: TokenRow, features: RowFeatures) -> tuple[TokenRow, RowFeatures]:
    """The row with zeros for features and nothing to train on."""
    nothing = [values[:0] for values in (features.rows, features.hidden, features.lse, features.argmax)]
    return (
        replace(row, loss_mask=[0] * len(row.loss_mask)),
        RowFeatures(torch.zeros_like(features.taps), *nothing),
    )


def refuse_many(bad: int, total: int, target: Target) -> None:
    if bad > MAX_BAD * total:
        raise TargetError(
            f"{bad} of {total} rows have features of target {target.name} that are NaN or infinite, "
            f"more than {MAX_BAD:.0%}: it overflows in {target.dtype}, or its weights are damaged. "
            "Set target.dtype=float32, or fetch the target again."
        )


def spans(lengths: Sequence[int]) -> list[slice]:
    """Where things of these lengths lie when packed one after the other."""
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def row_bytes(target: Target, row: TokenRow, taps: int) -> int:
    """What a row takes on disk, but for a few bytes. Shards end where it says (train/store.py)."""
    width = target.dtype.itemsize * target.hidden_size
    return len(row.input_ids) * (taps * width + 4) + sum(row.loss_mask[1:]) * (width + 8)


def rows_digest(rows: Sequence[TokenRow]) -> str:
    """SHA-256 over token ids and loss masks of all rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        values = [len(row.input_ids), *row.input_ids, *row.loss_mask]
        digest.update(np.asarray(values, dtype=np.int64).tobytes())
    return digest.hexdigest()
