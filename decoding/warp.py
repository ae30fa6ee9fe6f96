"""From logits to the law that tokens are drawn from. Nothing else in Leadout does this (design.md, idea 2).

The order is Hugging Face's: temperature, top-k, top-p, min-p. Ids that tie with the last one kept are kept
too, so that the law does not depend on how a sort orders equals. The repetition penalty comes before all of
them; it needs the text, and decoding/law.py applies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ConfigError

NUCLEUS = 1e-4  # probabilities above it are looked at first for top-p; all only if these hold too little


@dataclass(frozen=True)
class Warp:
    temperature: float = 1.0  # 0: all mass on the largest logit, the lowest id on ties
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # least share of the likeliest id's probability; 0: off
    repetition_penalty: float = 1.0  # 1: off

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= 1e-5):
            raise ConfigError(f"temperature={self.temperature}: set 0 (greedy), or at least 0.00001.")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: set the number of ids to keep, or 0 to keep all.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: set a share of the mass above 0, or 1 to keep all.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p}: set a share of the largest probability, or 0.")
        if not self.repetition_penalty > 0:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty}: set a number above 0; 1 is off."
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] of logits [..., V]: float64 if those are, else float32."""
        if self.temperature == 0:
            return one_hot(largest(logits), logits)
        dtype = law_dtype(logits)
        scores = logits if self.temperature == 1 else scaled(logits.to(dtype, copy=True), self.temperature)
        probs = torch.softmax(scores, dim=-1, dtype=dtype)
        if self.top_k or self.top_p < 1 or self.min_p:
            for row in [probs] if probs.dim() == 1 else probs.view(-1, probs.shape[-1]):
                truncate_(row, self.top_k, self.top_p, self.min_p)
        return probs


def law_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def one_hot(index: Tensor, like: Tensor) -> Tensor:
    """All mass on `index` [...]: probabilities shaped as `like` [..., V]."""
    law = torch.zeros(like.shape, dtype=law_dtype(like), device=like.device)
    return law.scatter_(-1, index[..., None], 1.0)


def largest(logits: Tensor) -> Tensor:
    """Index [...] of the largest of logits [..., V], the lowest on ties."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # On a CPU numpy's argmax is vectorised and torch's is not: 3 against 75 microseconds for 49,152 values.
    if logits.dtype in (torch.bfloat16, torch.float16):
        # Their bits, read as integers, are in the order of the values as long as the largest is above 0.
        bits = logits.view(torch.int16).numpy()
        if (bits.max(-1) > 0).all():
            return torch.from_numpy(np.asarray(bits.argmax(-1)))
        logits = logits.float()
    return torch.from_numpy(np.asarray(logits.numpy().argmax(-1)))


def truncate_(row: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> None:
    """Takes from the law `row` [V], in place, what top-k, top-p and then min-p drop, and renormalises it."""
    head = None
    if 0 < top_k < len(row):
        head = descending(row, top_k)
        keep_from_(row, head[-1])
    if top_p < 1:
        keep_from_(row, nucleus_floor(row, head, top_p * total(row)))
    if min_p:
        keep_from_(row, (row.max() * min_p).numpy(force=True).flat[0])
    scaled(row, total(row))


def nucleus_floor(row: Tensor, head: np.ndarray | None, wanted: float) -> np.floating:
    """The least probability in the smallest set of likeliest ids that holds the mass `wanted`.

    head: the largest of `row` [V] in descending order, the others being 0 or ties of its last; None: unknown.
    """
    top = above(row, NUCLEUS) if head is None else head
    mass = top.cumsum(dtype=np.float64)
    if head is None and not (len(top) and mass[-1] >= wanted):
        top = above(row, 0.0)
        mass = top.cumsum(dtype=np.float64)
    # Past the end only where ties with the last hold the rest, or where rounding leaves even the whole below.
    return top[min(int(mass.searchsorted(wanted)), len(top) - 1)]


# On a CPU the passes over a vocabulary are numpy's, which are vectorised: of a law of 49,152 that is not in
# the processor's cache, torch divides in 55 microseconds and numpy in 15, and finds the 1,024 largest in 415
# and 70.


def scaled(row: Tensor, divisor: float) -> Tensor:
    """`row` divided by `divisor`, in place."""
    if row.device.type != "cpu":
        return row.div_(divisor)
    values = row.numpy()
    np.multiply(values, values.dtype.type(1 / divisor), out=values)
    return row


def total(row: Tensor) -> float:
    return float(row.sum() if row.device.type != "cpu" else row.numpy().sum())


def keep_from_(row: Tensor, floor: np.floating) -> None:
    """Sets to 0, in place, what is below `floor`."""
    if row.device.type != "cpu":
        F.threshold(row, float(np.nextafter(floor, floor.dtype.type(-1))), 0.0, inplace=True)
        return
    values = row.numpy()
    np.multiply(values, values >= floor, out=values)


def descending(row: Tensor, count: int) -> np.ndarray:
    """The `count` largest of `row` [V], largest first."""
    if row.device.type != "cpu":
        return row.topk(count).values.cpu().numpy()
    values = row.numpy()
    if count < len(values):
        values = np.partition(values, len(values) - count)[-count:]
    return np.sort(values)[::-1]


def above(row: Tensor, floor: float) -> np.ndarray:
    """Those of `row` [V] above `floor`, largest first."""
    if row.device.type != "cpu":
        return row[row > floor].sort(descending=True).values.cpu().numpy()
    values = row.numpy()
    return np.sort(values[values > floor])[::-1]
