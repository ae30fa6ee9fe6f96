"""Where the decoder's chance comes from: an interface narrow enough that a test can replay every outcome.

Each decision names a key, and no key is used twice in a sequence. The uniform number belongs to the key
alone, so it depends neither on how many draws came before nor on what else is in the batch (decoding.md,
Randomness).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from configs.errors import TargetError


class Purpose(IntEnum):
    propose = 0  # draw a token from the draft's law
    accept = 1  # let a proposed token stand, or not
    emit = 2  # draw a token from the target's law, or from what is left of it


class Key(NamedTuple):
    """Names one decision of a sequence.

    accept, emit: `position` is that of the token decided on, which one round settles; `rank` counts siblings
    tried. propose: several rounds may propose for one position, so `position` is the pending token's, which
    every round moves on, and `rank` counts the round's draws.
    """

    position: int
    purpose: Purpose
    rank: int = 0


class Randomness(Protocol):
    def accept(self, probability: float, key: Key) -> bool:
        """True with `probability` (above 1 counts as 1; 0 is never accepted)."""
        ...

    def draw(self, probs: Tensor, key: Key) -> int:
        """An index of `probs` [V], each with its probability; one of probability 0 is never drawn."""
        ...


class Seeded:
    """Counter-based (Philox, Salmon et al. 2011): the same seed and key give the same number everywhere."""

    def __init__(self, seed: int) -> None:
        self.key = np.array([seed % 2**64, 0], dtype=np.uint64)

    def uniform(self, key: Key) -> float:
        """A float64 in [0, 1), a multiple of 2**-53."""
        counter = np.array([key.position, key.purpose, key.rank, 0], dtype=np.uint64)
        word = int(np.random.Philox(key=self.key, counter=counter).random_raw())
        return (word >> 11) * 2.0**-53

    def accept(self, probability: float, key: Key) -> bool:
        # Strict: with `<=` a zero probability, such as a forbidden token's, would pass when the uniform is 0.
        return probability >= 1 or self.uniform(key) < probability

    def draw(self, probs: Tensor, key: Key) -> int:
        """By the inverse of the cumulative law, summed in float64 on the CPU, so that devices agree."""
        cumulative = probs.to("cpu", torch.float64).cumsum(0).numpy()
        total = float(cumulative[-1])
        if not 0 < total < float("inf"):
            raise TargetError(
                f"No token can be drawn for {key}: its law has mass {total}, because the target or the draft "
                "gave logits that are not finite. Load it in float32, and check its weights."
            )
        index = int(np.searchsorted(cumulative, self.uniform(key) * total, side="right"))
        # The product may round up to the total: then the last index that has mass.
        return min(index, int(np.searchsorted(cumulative, total, side="left")))
