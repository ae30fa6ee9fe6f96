"""From logits to the law that tokens are drawn from. Nothing else in Leadout does this (design.md, idea 2).

The order is Hugging Face's: temperature, top-k, top-p, min-p. Ids that tie with the last one kept are kept
too, so that the law does not depend on how a sort orders equals. The repetition penalty comes before all of
them; it needs the text, and decoding/law.py applies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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

    @property
    def truncates(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def __call__(self, logits: Tensor) -> np.ndarray:
        """Probabilities [V] of logits [V], on the host: float64 if those are, else float32.

        There on any device: a law is made at the few nodes that a walk comes to, and what follows are single
        numbers of it.
        """
        if self.temperature == 0:
            wide = logits.dtype == torch.float64
            return certain(choices(logits[None])(0), len(logits), np.float64 if wide else np.float32)
        law = self.softmax(logits).numpy(force=True)
        return truncated(law, self.top_k, self.top_p, self.min_p) if self.truncates else law

    def laws(self, logits: Tensor) -> Tensor:
        """The same of many: probabilities [..., V] of logits [..., V], on their device."""
        if self.temperature and not self.truncates:
            return self.softmax(logits)
        rows = [self(row) for row in logits.reshape(-1, logits.shape[-1])]
        return torch.from_numpy(np.stack(rows)).view(logits.shape).to(logits.device)

    def softmax(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] of logits [..., V] at the temperature, nothing truncated."""
        dtype = law_dtype(logits)
        scores = logits if self.temperature == 1 else logits.to(dtype) / self.temperature
        return torch.softmax(scores, dim=-1, dtype=dtype)


def law_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def certain(token: int, vocab: int, dtype: Any) -> np.ndarray:
    """The law [vocab], of numpy's `dtype`, that is certain of `token`."""
    law = np.zeros(vocab, dtype=dtype)
    law[token] = 1
    return law


def normalise_(law: np.ndarray) -> bool:
    """Divides `law` [V] by its mass, in place, if it has any; returns whether it has."""
    mass = float(law.sum())
    if mass > 0:
        np.multiply(law, law.dtype.type(1 / mass), out=law)
    return mass > 0


def choices(logits: Tensor) -> Callable[[int], int]:
    """Tells of row i of logits [N, V], when asked, the index of the largest, the lowest on ties."""
    if logits.device.type != "cpu":
        return logits.argmax(-1).tolist().__getitem__  # all at once: each transfer waits for the device
    # On a CPU numpy's argmax is vectorised and torch's is not: 3 against 75 microseconds for 49,152 values.
    if logits.dtype not in (torch.bfloat16, torch.float16):
        values = logits.numpy()
        return lambda i: int(values[i].argmax())
    # Their bits, read as integers, are in the order of the values as long as the largest is above 0.
    bits = logits.view(torch.int16).numpy()

    def choice(i: int) -> int:
        index = int(bits[i].argmax())
        return index if bits[i, index] > 0 else int(logits[i].float().numpy().argmax())

    return choice


def truncated(law: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """What top-k, then top-p and then min-p leave of `law` [V], whose mass is 1; normalised.

    Few entries stay of many, so all but the first look at the law is at those alone.
    """
    ids, values = candidates(law, top_k, top_p, min_p)
    held = float(values.sum())
    if not held > 0:
        return law  # of logits that are not finite, which drawing from it refuses
    floor = law.dtype.type(min_p) * values.max() if min_p else law.dtype.type(0)
    if top_p < 1:
        floor = max(floor, nucleus_floor(values, top_p * (held if top_k else 1.0)))
    keep = values >= floor
    kept = values[keep]
    left = np.zeros_like(law)
    left[ids[keep]] = kept * law.dtype.type(1 / float(kept.sum()))
    return left


def candidates(law: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids, ascending, among which is everything of `law` [V] that may stay; and its values."""
    if top_k:
        ids = np.flatnonzero(law >= np.partition(law, -top_k)[-top_k] if top_k < len(law) else law)
    elif top_p < 1:
        ids = np.flatnonzero(law > law.dtype.type(NUCLEUS))
        values = law[ids]
        if float(values.sum()) >= top_p:
            return ids, values
        ids = np.flatnonzero(law)
    else:
        ids = np.flatnonzero(law >= law.max() * law.dtype.type(min_p))
    return ids, law[ids]


def nucleus_floor(values: np.ndarray, wanted: float) -> np.floating:
    """The least of `values` [n] in the smallest set of largest ones that holds the mass `wanted`."""
    top = np.sort(values)[::-1]
    held = top.cumsum(dtype=np.float64)
    # Past the end only where rounding leaves even the whole below.
    return top[min(int(held.searchsorted(wanted)), len(top) - 1)]
